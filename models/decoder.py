"""A decoder as hub folders hold it: embedding, layers of a mixer and a feed-forward, head.

Flax NNX modules whose attributes are named as the hub names tensors. A family makes the mixers and
the feed-forwards of its layers, as `Mixer` and `FeedForward` describe them; `Attention` and the
gated `Feed` are here since nearly every family has them.

    x = x + mixer(norm(x));  x = x + feed(norm(x))      in each layer

N1  The path of a parameter in the modules is the name of its tensor in a text model's folder, and
    parameters are one flat dictionary: loading changes nothing but dtypes. A matrix is [out, in].
    What a folder holds otherwise, such as experts one by one, is listed as `forms`.
N2  Vectors (norms, decays, biases) are float32. Norm statistics, rotary angles, gates and logits
    are computed in float32; everything else in the dtype of the matrices.
N3  `apply` is pure. The graph of modules stays on the model and holds shapes only; arrays come with
    every call and are merged while tracing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int32

from unimem_jax.errors import UsageError
from unimem_jax.spec import CONTEXT, STORED_DTYPES, Part, PartKey, Site

from .layers import normalise
from .rotary import Rotary, turn_first

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
PRECISION = lax.Precision.HIGHEST  # float32 weights are multiplied as such on a GPU too

type Shapes = dict[str, tuple[int, ...]]
# How folders hold parameters that are not one tensor of the same name and shape: for each, one or
# more ways, each of them tensors that one behind the other have the parameter's elements.
type Forms = dict[str, tuple[Shapes, ...]]
type Mixed = tuple[Array, dict[PartKey, Array], Any]  # to add to the input, fresh parts, views


def parameter(*shape: int) -> nnx.Param[Any]:
    """A parameter of this shape, without an array."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32))


class Matrix(nnx.Module):
    """A matrix [outputs, inputs] without bias."""

    def __init__(self, outputs: int, inputs: int):
        self.weight = parameter(outputs, inputs)

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Float32 sums, rounded to the dtype of `x`."""
        return self.wide(x).astype(x.dtype)

    def wide(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """The sums in float32."""
        return jnp.einsum(
            "...i,oi->...o", x, self.weight[...],
            precision=PRECISION, preferred_element_type=jnp.float32,
        )  # fmt: skip


class Norm(nnx.Module):
    """Root mean square norm of the last axis.

    Attributes:
      is_centred: the weight is what is added to 1, and rounding comes after it, not before.
    """

    def __init__(self, channels: int, *, epsilon: float, is_centred: bool = False):
        self.weight = parameter(channels)
        self.epsilon, self.is_centred = epsilon, is_centred

    def __call__(self, x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
        """Shape and dtype of `x`."""
        weight = self.weight[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        if self.is_centred:
            wide = normalise(x.astype(jnp.float32), self.epsilon)
            return (wide * (1 + weight)).astype(x.dtype)
        return normalise(x, self.epsilon) * weight.astype(x.dtype)


# The norms of a family, by their channels.
type MakeNorm = Callable[[int], Norm]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder around its mixers.

    Attributes:
      width: channels between layers.
      is_tied: the head is the embedding.
      end_tokens: each ends a text when sampled.
    """

    vocab: int
    width: int
    context_tokens: int
    is_tied: bool = False
    start_token: int | None = None
    end_tokens: tuple[int, ...] = ()


class Mixer(Protocol):
    """How a layer mixes tokens: an NNX module.

    Where it has a method `forms() -> Forms`, names there begin within the layer.

    Attributes:
      name: what the hub calls it within a layer.
    """

    name: str

    def parts(self) -> tuple[Part, ...]:
        """What it remembers."""
        ...

    def __call__(self, x: Array, views: Any) -> Mixed:
        """[R, T, width] -> (what to add to the input, fresh token parts, views)."""
        ...


class FeedForward(Protocol):
    """What a layer does to each token alone: an NNX module; `name` and `forms` as in `Mixer`."""

    name: str

    def __call__(self, x: Array, valid: Array) -> Array:
        """[R, T, width] -> what to add to the input; a token that is not valid may get anything
        finite.
        """
        ...


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

    Its site owns "key" and "value", both [key_heads, head] per token, for the whole context.

    Attributes:
      heads: query heads, key heads, head size.
      rotary: turns the first channels of a head; the rest, if any, stays.
      is_gated: each query head has a gate, stored behind its query, that weighs its output.
    """

    name = "self_attn"

    def __init__(
        self, site: Site, width: int, heads: tuple[int, int, int], *,
        rotary: Rotary, token_dtype: str, norm: MakeNorm | None = None, is_gated: bool = False,
    ):  # fmt: skip
        """Declares the layer.

        Args:
          token_dtype: stored dtype of keys and values.
          norm: of every query and key before it turns, over the channels of a head; None for none.
        Raises:
          UsageError: keys and values are to be stored as integers, for which they have no scale.
        """
        require_float(token_dtype, "keys and values")
        self.site, self.heads, self.rotary = site, heads, rotary
        self.token_dtype, self.is_gated = token_dtype, is_gated
        query_heads, key_heads, head = heads
        queries, keys = query_heads * head, key_heads * head
        self.q_proj = Matrix(queries * (2 if is_gated else 1), width)
        self.k_proj = Matrix(keys, width)
        self.v_proj = Matrix(keys, width)
        self.o_proj = Matrix(width, queries)
        self.q_norm = None if norm is None else norm(head)
        self.k_norm = None if norm is None else norm(head)

    def parts(self) -> tuple[Part, ...]:
        """As `Mixer.parts`."""
        return tuple(
            Part(self.site, name, self.heads[1:], self.token_dtype, CONTEXT)
            for name in ("key", "value")
        )

    def __call__(self, x: Float[Array, "requests tokens width"], views: Any) -> Mixed:
        """As `Mixer.__call__`."""
        query_heads, key_heads, head = self.heads
        query = split_heads(self.q_proj(x), query_heads)
        query, gate = query[..., :head], query[..., head:]
        key = split_heads(self.k_proj(x), key_heads)
        value = split_heads(self.v_proj(x), key_heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        table = self.rotary.table(views.positions)
        query, key = turn_first(query, table), turn_first(key, table)
        mixed, views = views.attend(self.site, query, key, value, scale=head**-0.5)
        if self.is_gated:
            wide = mixed.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
            mixed = wide.astype(x.dtype)
        added = self.o_proj(mixed.reshape(*x.shape[:2], -1))
        return added, {(self.site, "key"): key, (self.site, "value"): value}, views


class Feed(nnx.Module):
    """Gated feed-forward [Shazeer 2020, arXiv:2002.05202]: down(silu(gate x) * up x)."""

    name = "mlp"

    def __init__(self, width: int, hidden: int):
        self.gate_proj = Matrix(hidden, width)
        self.up_proj = Matrix(hidden, width)
        self.down_proj = Matrix(width, hidden)

    def __call__(
        self, x: Float[Array, "*batch width"], valid: Array | None = None
    ) -> Float[Array, "*batch width"]:
        """Shape and dtype of `x`; `valid` makes no difference."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """A mixer and a feed-forward, each added to what comes in; attributes have the hub's names."""

    def __init__(self, mixer: Mixer, feed: FeedForward, width: int, norm: MakeNorm):
        self.mixer_name, self.feed_name = mixer.name, feed.name
        self.input_layernorm = norm(width)
        setattr(self, mixer.name, mixer)
        self.post_attention_layernorm = norm(width)
        setattr(self, feed.name, feed)

    def __call__(self, x: Float[Array, "requests tokens width"], views: Any) -> Mixed:
        """(x after this layer, fresh token parts, views)."""
        mixer: Mixer = getattr(self, self.mixer_name)
        feed: FeedForward = getattr(self, self.feed_name)
        added, fresh, views = mixer(self.input_layernorm(x), views)
        x = x + added
        return x + feed(self.post_attention_layernorm(x), views.valid), fresh, views


type Blocks = Sequence[tuple[Mixer, FeedForward]]  # one per layer


class Body(nnx.Module):
    """Embedding, layers, and the norm of the tokens that the views select."""

    def __init__(self, sizes: Sizes, blocks: Blocks, norm: MakeNorm):
        self.embed_tokens = Matrix(sizes.vocab, sizes.width)
        self.layers = nnx.List([Layer(*block, sizes.width, norm) for block in blocks])
        self.norm = norm(sizes.width)

    def __call__(self, tokens: Int32[Array, "requests new"], views: Any) -> Mixed:
        """(normed tokens, fresh token parts, views)."""
        x = self.embed_tokens.weight[...].at[tokens].get(mode="clip")
        fresh: dict[PartKey, Array] = {}
        for layer in self.layers:
            x, new, views = layer(x, views)
            fresh |= new
        return self.norm(views.select(x)), fresh, views


class Network(nnx.Module):
    """A body and its head, which may be the embedding."""

    def __init__(self, sizes: Sizes, blocks: Blocks, norm: MakeNorm):
        self.model = Body(sizes, blocks, norm)
        self.lm_head = None if sizes.is_tied else Matrix(sizes.vocab, sizes.width)

    def __call__(self, tokens: Int32[Array, "requests new"], views: Any) -> Mixed:
        """As `Decoder.apply`."""
        hidden, fresh, views = self.model(tokens, views)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.wide(hidden), fresh, views


class Decoder:
    """A model, following the model protocol.

    Attributes:
      vocab_size, context_tokens, start_token, end_tokens: of the configuration.
    """

    def __init__(self, sizes: Sizes, blocks: Blocks, norm: MakeNorm):
        """Makes the graph and no arrays."""
        self.sizes = sizes
        self.vocab_size, self.context_tokens = sizes.vocab, sizes.context_tokens
        self.start_token, self.end_tokens = sizes.start_token, sizes.end_tokens
        self._parts = tuple(part for mixer, _ in blocks for part in mixer.parts())
        self._forms = {
            f"model.layers.{layer}.{name}": tuple(
                {f"model.layers.{layer}.{tensor}": shape for tensor, shape in way.items()}
                for way in ways
            )
            for layer, block in enumerate(blocks)
            for module in block
            for name, ways in getattr(module, "forms", dict)().items()
        }
        self._graph, state = nnx.split(Network(sizes, blocks, norm))
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))
        self._shapes = {
            ".".join(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in leaves
        }

    def parts(self) -> tuple[Part, ...]:
        """What the model remembers; see docs/ARCHITECTURE.md."""
        return self._parts

    def shapes(self) -> Shapes:
        """Name and shape of every parameter (N1)."""
        return dict(self._shapes)

    def forms(self) -> Forms:
        """How folders hold every parameter; most are one tensor."""
        return {
            name: self._forms.get(name, ({name: shape},)) for name, shape in self._shapes.items()
        }

    def apply(
        self, params: Mapping[str, Array], tokens: Int32[Array, "requests new"], views: Any
    ) -> tuple[Float[Array, "..."], dict[PartKey, Array], Any]:
        """Runs the network on new tokens, given their past as views.

        Args:
          params: arrays by the names of `shapes()`.
        Returns:
          Logits float32[R, V] of `views.select`'s tokens, fresh token parts, the views to go on
          with.
        Cost: about 2 floating point operations per parameter and token, and attention.
        """
        nested = jax.tree.unflatten(self._tree, [params[name] for name in self._shapes])
        return nnx.merge(self._graph, nested)(tokens, views)


def split_heads(
    x: Float[Array, "requests tokens channels"], heads: int
) -> Float[Array, "requests tokens heads head"]:
    """Equal stretches of channels, one per head."""
    return x.reshape(*x.shape[:2], heads, -1)


def require_float(dtype: str, what: str) -> None:
    """Refuses integers as the stored dtype; an unknown one is the part's to refuse.

    Raises:
      UsageError: it is one of integers.
    """
    stored = STORED_DTYPES.get(dtype)
    if stored is not None and not jnp.issubdtype(stored, jnp.floating):
        raise UsageError(f"{what} are stored as floats, not as {dtype!r}")
