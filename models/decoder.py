"""A decoder as hub folders hold it: embedding, layers of a mixer and a gated feed-forward, head.

Plain functions over one flat dictionary of parameters. A family lists the mixers of its layers, as
`Mixer` describes them; `Attention` is here since every family has it.

    x = x + mixer(norm(x));  x = x + down(silu(gate(y)) * up(y)), y = norm(x)      in each layer

N1  Parameters have the names and shapes of the tensors in a text model's folder: loading changes
    nothing but dtypes. A matrix is [out, in].
N2  Vectors (norms, decays, biases) are float32. Norm statistics, rotary angles, gates and logits
    are computed in float32; everything else in the dtype of the matrices.
N3  `apply` is pure; nothing here holds an array.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

from unimem_jax.spec import CONTEXT, Part, PartKey, Site

from .layers import normalise
from .rotary import Rotary, turn

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
PRECISION = lax.Precision.HIGHEST  # float32 weights are multiplied as such on a GPU too

type Weights = Mapping[str, Array]
type Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm of the last axis.

    Attributes:
      is_centred: the weight is what is added to 1, and rounding comes after it, not before.
    """

    epsilon: float
    is_centred: bool = False

    def __call__(
        self, x: Float[Array, "*batch channels"], weight: Float[Array, " channels"]
    ) -> Float[Array, "*batch channels"]:
        """Shape and dtype of `x`."""
        weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
        if self.is_centred:
            wide = normalise(x.astype(jnp.float32), self.epsilon)
            return (wide * (1 + weight)).astype(x.dtype)
        return normalise(x, self.epsilon) * weight.astype(x.dtype)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder around its mixers.

    Attributes:
      width, hidden: channels between layers, and inside a feed-forward.
      is_tied: the head is the embedding.
      end_tokens: each ends a text when sampled.
    """

    vocab: int
    width: int
    hidden: int
    context_tokens: int
    is_tied: bool = False
    start_token: int | None = None
    end_tokens: tuple[int, ...] = ()


class Mixer(Protocol):
    """How a layer mixes tokens. Static: its weights come with every call."""

    def shapes(self) -> Shapes:
        """Its tensors by their names within the layer."""
        ...

    def parts(self) -> tuple[Part, ...]:
        """What it remembers."""
        ...

    def __call__(
        self, weights: Weights, x: Array, views: Any
    ) -> tuple[Array, dict[PartKey, Array], Any]:
        """[R, T, width] -> (what to add to the input, fresh token parts, views)."""
        ...


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions.

    Its site owns "key" and "value", both [key_heads, head] per token, for the whole context.

    Attributes:
      heads: query heads, key heads, head size.
      rotary: turns the first channels of a head; the rest, if any, stays.
      norm: of every query and key before it turns, over the channels of a head; None for none.
      is_gated: each query head has a gate, stored behind its query, that weighs its output.
    """

    site: Site
    width: int
    heads: tuple[int, int, int]
    rotary: Rotary
    norm: Norm | None
    token_dtype: str
    is_gated: bool = False

    def shapes(self) -> Shapes:
        """As `Mixer.shapes`."""
        query_heads, key_heads, head = self.heads
        queries, keys = query_heads * head, key_heads * head
        shapes: Shapes = {
            "self_attn.q_proj.weight": (queries * (2 if self.is_gated else 1), self.width),
            "self_attn.k_proj.weight": (keys, self.width),
            "self_attn.v_proj.weight": (keys, self.width),
            "self_attn.o_proj.weight": (self.width, queries),
        }
        if self.norm is not None:
            shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        return shapes

    def parts(self) -> tuple[Part, ...]:
        """As `Mixer.parts`."""
        return tuple(
            Part(self.site, name, self.heads[1:], self.token_dtype, CONTEXT)
            for name in ("key", "value")
        )

    def __call__(
        self, weights: Weights, x: Float[Array, "requests tokens width"], views: Any
    ) -> tuple[Float[Array, "requests tokens width"], dict[PartKey, Array], Any]:
        """As `Mixer.__call__`."""
        query_heads, key_heads, head = self.heads
        query = split_heads(multiply(x, weights["self_attn.q_proj.weight"]), query_heads)
        query, gate = query[..., :head], query[..., head:]
        key = split_heads(multiply(x, weights["self_attn.k_proj.weight"]), key_heads)
        value = split_heads(multiply(x, weights["self_attn.v_proj.weight"]), key_heads)
        table = self.rotary.table(views.positions)
        if self.norm is not None:
            query = self.norm(query, weights["self_attn.q_norm.weight"])
            key = self.norm(key, weights["self_attn.k_norm.weight"])
        query, key = _turn_first(query, table), _turn_first(key, table)
        mixed, views = views.attend(self.site, query, key, value, scale=head**-0.5)
        if self.is_gated:
            wide = mixed.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
            mixed = wide.astype(x.dtype)
        added = multiply(mixed.reshape(*x.shape[:2], -1), weights["self_attn.o_proj.weight"])
        return added, {(self.site, "key"): key, (self.site, "value"): value}, views


class Decoder:
    """A model, following the model protocol.

    Attributes:
      vocab_size, context_tokens, start_token, end_tokens: of the configuration.
    """

    def __init__(self, sizes: Sizes, mixers: Sequence[Mixer], norm: Norm):
        self.sizes, self.norm = sizes, norm
        self.mixers = tuple(mixers)
        self.vocab_size, self.context_tokens = sizes.vocab, sizes.context_tokens
        self.start_token, self.end_tokens = sizes.start_token, sizes.end_tokens

    def parts(self) -> tuple[Part, ...]:
        """What the model remembers; see docs/ARCHITECTURE.md."""
        return tuple(part for mixer in self.mixers for part in mixer.parts())

    def shapes(self) -> Shapes:
        """Name and shape of every parameter (N1)."""
        sizes = self.sizes
        found: Shapes = {EMBEDDING: (sizes.vocab, sizes.width), NORM: (sizes.width,)}
        if not sizes.is_tied:
            found[HEAD] = (sizes.vocab, sizes.width)
        for layer, mixer in enumerate(self.mixers):
            inside = {
                **mixer.shapes(),
                "input_layernorm.weight": (sizes.width,),
                "post_attention_layernorm.weight": (sizes.width,),
                "mlp.gate_proj.weight": (sizes.hidden, sizes.width),
                "mlp.up_proj.weight": (sizes.hidden, sizes.width),
                "mlp.down_proj.weight": (sizes.width, sizes.hidden),
            }
            found |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
        return found

    def apply(
        self, params: Weights, tokens: Int32[Array, "requests new"], views: Any
    ) -> tuple[Float[Array, "..."], dict[PartKey, Array], Any]:
        """Runs the network on new tokens, given their past as views.

        Args:
          params: arrays by the names of `shapes()`.
        Returns:
          Logits float32[R, V] of `views.select`'s tokens, fresh token parts, the views to go on
          with.
        Cost: about 2 floating point operations per parameter and token, and attention.
        """
        x = params[EMBEDDING].at[tokens].get(mode="clip")
        fresh: dict[PartKey, Array] = {}
        for layer, mixer in enumerate(self.mixers):
            start = f"model.layers.{layer}."
            weights = {
                name.removeprefix(start): array
                for name, array in params.items()
                if name.startswith(start)
            }
            normed = self.norm(x, weights["input_layernorm.weight"])
            added, new, views = mixer(weights, normed, views)
            x, fresh = x + added, fresh | new
            x = x + feed_forward(weights, self.norm(x, weights["post_attention_layernorm.weight"]))
        hidden = self.norm(views.select(x), params[NORM])
        head = params[EMBEDDING if self.sizes.is_tied else HEAD]
        return _multiply_wide(hidden, head), fresh, views


def multiply(
    x: Float[Array, "*batch inputs"], matrix: Float[Array, "outputs inputs"]
) -> Float[Array, "*batch outputs"]:
    """A matrix of a hub folder times vectors; float32 sums, rounded to the dtype of `x`."""
    return _multiply_wide(x, matrix).astype(x.dtype)


def feed_forward(weights: Weights, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """Gated feed-forward [Shazeer 2020, arXiv:2002.05202]: down(silu(gate x) * up x)."""
    gate = jax.nn.silu(multiply(x, weights["mlp.gate_proj.weight"]))
    up = multiply(x, weights["mlp.up_proj.weight"])
    return multiply(gate * up, weights["mlp.down_proj.weight"])


def split_heads(
    x: Float[Array, "requests tokens channels"], heads: int
) -> Float[Array, "requests tokens heads head"]:
    """Equal stretches of channels, one per head."""
    return x.reshape(*x.shape[:2], heads, -1)


def _multiply_wide(x: Array, matrix: Array) -> Array:
    return jnp.einsum(
        "...i,oi->...o", x, matrix, precision=PRECISION, preferred_element_type=jnp.float32
    )


def _turn_first(x: Array, table: tuple[Array, Array]) -> Array:
    """Rotates as many of the first channels as the table has angles for."""
    channels = 2 * table[0].shape[-1]
    if channels == x.shape[-1]:
        return turn(x, table)
    return jnp.concatenate([turn(x[..., :channels], table), x[..., channels:]], axis=-1)
