"""GPT-OSS from a Hugging Face folder: alternating window and full attention, mixtures of experts.

Attention has biases, one sink per query head and YaRN positions; every layer has a router and
experts. Weights are float32, bfloat16 or float16 tensors, or MXFP4 experts, which are expanded
while loading. The published sizes are those of openai/gpt-oss-20b and -120b.

G1  `apply` is pure; the graph of modules stays on the model (as in `embedded`).
G2  Norms, sinks, router and the sum over experts are float32 whatever the weights are.
G3  `load` takes a folder whose every tensor fits its configuration, or raises; a configuration that
    asks for what this does not compute is refused by the name of the field.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int32

from unimem_jax.errors import UsageError
from unimem_jax.spec import CONTEXT, Lifetime, Part, PartKey, Site, window

from .checkpoint import all_ends, require_served
from .experts import choose_experts, mix_experts
from .folder import Folder, OnTensor
from .gpt_oss_config import Sizes, read_packing, read_sizes
from .hub_text import HubText, read_text
from .mxfp4 import dequantise, packed_shapes
from .rotary import turn

PRECISION = lax.Precision.HIGHEST  # float32 weights are multiplied as such on a GPU too
EXPERTS = ("feed.gate_up", "feed.down")  # parameters that MXFP4 packs
PACKED = ("_blocks", "_scales")
# Parameter -> tensor of the hub; a name that ends in "kernel" is the transpose of its tensor.
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head": "lm_head.weight",
}
BLOCK_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.sinks": "self_attn.sinks",
    **{
        f"attention.{ours}.{kind}": f"self_attn.{theirs}_proj.{stored}"
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o"))
        for kind, stored in (("kernel", "weight"), ("bias", "bias"))
    },
    "feed_norm.weight": "post_attention_layernorm.weight",
    "feed.router.kernel": "mlp.router.weight",
    "feed.router.bias": "mlp.router.bias",
    "feed.gate_up": "mlp.experts.gate_up_proj",
    "feed.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "feed.down": "mlp.experts.down_proj",
    "feed.down_bias": "mlp.experts.down_proj_bias",
}


class Norm(nnx.Module):
    """Root mean square norm that weighs before it rounds to the dtype of its input (G2)."""

    def __init__(self, channels: int, epsilon: float):
        self.epsilon = epsilon
        self.weight = nnx.Param(jnp.ones((channels,), jnp.float32))

    def __call__(self, x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
        """Shape and dtype of `x`."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * lax.rsqrt(mean_square + self.epsilon) * weight).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with biases and sinks; its site owns "key" and "value"."""

    def __init__(self, layer: int, sizes: Sizes, dtypes: tuple[str, str], rngs: nnx.Rngs):
        dtype, self.token_dtype = dtypes
        self.site = Site(layer)
        limit = sizes.windows[layer]
        self.lifetime: Lifetime = CONTEXT if limit is None else window(limit)
        self.query_heads, self.key_heads, self.head = sizes.attention_heads
        queries, keys = self.query_heads * self.head, self.key_heads * self.head
        self.query = _linear(sizes.width, queries, dtype, rngs)
        self.key = _linear(sizes.width, keys, dtype, rngs)
        self.value = _linear(sizes.width, keys, dtype, rngs)
        self.out = _linear(queries, sizes.width, dtype, rngs)
        self.sinks = nnx.Param(jnp.zeros((self.query_heads,), jnp.float32))

    def parts(self) -> tuple[Part, ...]:
        """The two token parts of this layer."""
        shape = (self.key_heads, self.head)
        return tuple(
            Part(self.site, name, shape, self.token_dtype, self.lifetime)
            for name in ("key", "value")
        )

    def __call__(
        self, x: Float[Array, "requests tokens width"], views: Any, table: tuple[Array, Array]
    ) -> tuple[Float[Array, "requests tokens width"], dict[PartKey, Array], Any]:
        """Mixes tokens: (what to add to `x`, fresh keys and values [R, T, Hk, D], views)."""
        query = turn(self._heads(self.query(x), self.query_heads), table)
        key = turn(self._heads(self.key(x), self.key_heads), table)
        value = self._heads(self.value(x), self.key_heads)
        mixed, views = views.attend(
            self.site, query, key, value, scale=self.head**-0.5, sinks=self.sinks[...]
        )
        fresh = {(self.site, "key"): key, (self.site, "value"): value}
        return self.out(mixed.reshape(*x.shape[:2], -1)), fresh, views

    def _heads(self, x: Array, heads: int) -> Array:
        return x.reshape(*x.shape[:2], heads, self.head)


class Feed(nnx.Module):
    """Router and experts; gate and up projections alternate in the columns of `gate_up`."""

    def __init__(self, sizes: Sizes, dtype: str, rngs: nnx.Rngs):
        self.sizes = sizes
        start = nnx.initializers.lecun_normal(batch_axis=0)
        shape = (sizes.experts, sizes.width, 2 * sizes.hidden)
        self.router = _linear(sizes.width, sizes.experts, "float32", rngs)
        self.gate_up = nnx.Param(start(rngs.params(), shape, dtype))
        self.gate_up_bias = nnx.Param(jnp.zeros((shape[0], shape[2]), dtype))
        shape = (sizes.experts, sizes.hidden, sizes.width)
        self.down = nnx.Param(start(rngs.params(), shape, dtype))
        self.down_bias = nnx.Param(jnp.zeros((shape[0], shape[2]), dtype))

    def __call__(
        self, x: Float[Array, "requests tokens width"], valid: Array
    ) -> Float[Array, "requests tokens width"]:
        """Shape and dtype of `x`; zeros for tokens that are not valid, which choose no expert."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = choose_experts(self.router(tokens.astype(jnp.float32)), self.sizes.chosen)
        chosen = jnp.where(valid.reshape(-1, 1), chosen, self.sizes.experts)
        mixed = mix_experts(tokens, chosen, weights, self._expert, expert_count=self.sizes.experts)
        return mixed.astype(x.dtype).reshape(x.shape)

    def _expert(self, expert: Array, rows: Array) -> Array:
        """Clamped SwiGLU: (clip(up) + 1) * gate * sigmoid(slope * gate), gate bounded above."""
        limit = self.sizes.gate_limit
        both = _multiply_add(rows, self.gate_up[...], self.gate_up_bias[...], expert)
        gate, up = jnp.minimum(both[:, 0::2], limit), jnp.clip(both[:, 1::2], -limit, limit)
        hidden = (up + 1) * gate * jax.nn.sigmoid(self.sizes.gate_slope * gate)
        return _multiply_add(hidden.astype(rows.dtype), self.down[...], self.down_bias[...], expert)


class Block(nnx.Module):
    """Attention and experts, each added to what comes in."""

    def __init__(self, layer: int, sizes: Sizes, dtypes: tuple[str, str], rngs: nnx.Rngs):
        self.attention_norm = Norm(sizes.width, sizes.norm_epsilon)
        self.attention = Attention(layer, sizes, dtypes, rngs)
        self.feed_norm = Norm(sizes.width, sizes.norm_epsilon)
        self.feed = Feed(sizes, dtypes[0], rngs)

    def __call__(
        self, x: Array, views: Any, table: tuple[Array, Array]
    ) -> tuple[Array, dict[PartKey, Array], Any]:
        """(x [R, T, width], fresh token parts, views) after this layer."""
        added, fresh, views = self.attention(self.attention_norm(x), views, table)
        x = x + added
        return x + self.feed(self.feed_norm(x), views.valid), fresh, views


class Network(nnx.Module):
    """Embedding, blocks, and logits of the tokens that the views select."""

    def __init__(self, sizes: Sizes, dtypes: tuple[str, str], rngs: nnx.Rngs):
        shape, dtype = (sizes.vocab, sizes.width), dtypes[0]
        self.rotary = sizes.rotary
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape, dtype))
        layers = range(len(sizes.windows))
        self.blocks = nnx.List([Block(layer, sizes, dtypes, rngs) for layer in layers])
        self.norm = Norm(sizes.width, sizes.norm_epsilon)
        self.head = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * shape[1] ** -0.5)

    def parts(self) -> tuple[Part, ...]:
        """The parts of all layers, in layer order."""
        return tuple(part for block in self.blocks for part in block.attention.parts())

    def __call__(self, tokens: Array, views: Any) -> tuple[Array, dict[PartKey, Array], Any]:
        """As `GptOss.apply`."""
        x = self.embedding[...].at[tokens].get(mode="clip")
        table = self.rotary.table(views.positions)
        fresh: dict[PartKey, Array] = {}
        for block in self.blocks:
            x, added, views = block(x, views, table)
            fresh |= added
        hidden = self.norm(views.select(x))
        logits = jnp.einsum(
            "...h,vh->...v", hidden, self.head[...],
            precision=PRECISION, preferred_element_type=jnp.float32,
        )  # fmt: skip
        return logits, fresh, views


class GptOss:
    """A GPT-OSS network, following the model protocol.

    Attributes:
      vocab_size, context_tokens, start_token, end_tokens: of the configuration.
    """

    def __init__(self, sizes: Sizes, dtype: str = "float32", token_dtype: str | None = None):
        """Makes the graph and no arrays.

        Args:
          dtype: of weights and activations, one of `checkpoint.SERVED_DTYPES`.
          token_dtype: stored dtype of keys and values, a name from `spec.STORED_DTYPES`; `dtype` by
            default.
        """
        require_served(dtype)
        self.sizes = sizes
        self.vocab_size = sizes.vocab
        self.context_tokens = sizes.context_tokens
        self.start_token, self.end_tokens = sizes.start_token, sizes.end_tokens
        self._dtypes = (dtype, token_dtype or dtype)
        network: Network = nnx.eval_shape(lambda: self._network(0))
        self._parts = network.parts()
        self._graph, shapes = nnx.split(network)
        self._shapes = nnx.to_pure_dict(shapes)

    def parts(self) -> tuple[Part, ...]:
        """What the model remembers; see docs/ARCHITECTURE.md."""
        return self._parts

    def init(self, seed: int) -> dict[str, Any]:
        """Fresh random parameters."""
        return nnx.to_pure_dict(nnx.state(self._network(seed)))

    def apply(
        self, params: dict[str, Any], tokens: Int32[Array, "requests new"], views: Any
    ) -> tuple[Float[Array, "..."], dict[PartKey, Array], Any]:
        """Runs the network on new tokens, given their past as views.

        Returns:
          Logits float32[R, V] of `views.select`'s tokens, fresh token parts, the views to go on
          with.
        Cost: about 2 floating point operations per token and parameter that it uses, and attention;
          reads each expert that some token chose once per 32 rows.
        """
        return nnx.merge(self._graph, params)(tokens, views)

    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Dotted name, such as "blocks.0.feed.gate_up", shape and dtype of every parameter."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._shapes)
        return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}

    def nest(self, tensors: Mapping[str, Array]) -> dict[str, Any]:
        """Parameters as `apply` takes them, from a mapping with the names of `leaves()`."""
        tree = jax.tree.structure(self._shapes)
        return jax.tree.unflatten(tree, [tensors[name] for name in self.leaves()])

    def _network(self, seed: int) -> Network:
        return Network(self.sizes, self._dtypes, nnx.Rngs(seed))


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
) -> tuple[GptOss, dict[str, Any], HubText | None]:  # fmt: skip
    """Loads a Hugging Face folder: `config.json` and safetensors files.

    Args:
      dtype: of weights and activations; by default that of the stored embedding.
      token_dtype: of stored keys and values; by default `dtype`.
      on_tensor: called after each tensor, to show progress.
    Returns:
      The model, its parameters, and its tokenizer where there is one that can be read.
    Raises:
      UsageError: no folder, a configuration that is contradictory or asks for what this does not
        compute, or a tensor that is missing, extra or of another shape; the message names it.
    Cost: one tensor at a time; MXFP4 experts take four times their bytes as bfloat16.
    """
    if path is None:
        raise UsageError("gpt_oss has no weights of its own; give a folder with its config.json")
    folder = Folder(path, on_tensor)
    sizes, packing = read_sizes(folder.config), read_packing(folder.config)
    sizes = replace(sizes, end_tokens=all_ends(folder, sizes.end_tokens))
    dtype = require_served(dtype or folder.dtype(NAMES["embedding"]))
    model = GptOss(sizes, dtype, token_dtype)
    names = {name: _hub_name(name) for name in model.leaves()}
    shapes = _hub_shapes(model, names, packing)
    _require_packing(folder, packing)
    folder.require(shapes)
    text = read_text(folder.path, model.vocab_size)
    tensors = {}
    for name, leaf in model.leaves().items():
        hub = names[name]
        if hub in shapes:
            tensor = folder.tensor(hub, leaf.dtype)
            tensor = tensor.T if name.endswith("kernel") else tensor
        else:
            blocks, scales = (np.asarray(folder.tensor(hub + suffix)) for suffix in PACKED)
            tensor = dequantise(blocks, scales, leaf.dtype, hub)
        tensors[name] = jnp.array(tensor)  # a copy: the file may change once it is loaded
    return model, model.nest(tensors), text


def _hub_name(name: str) -> str:
    if not name.startswith("blocks."):
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{BLOCK_NAMES[rest]}"


def _hub_shapes(
    model: GptOss, names: Mapping[str, str], packing: str | None
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the folder has to hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, leaf in model.leaves().items():
        if packing and name.endswith(EXPERTS):
            packed = packed_shapes(*leaf.shape)
            shapes |= {names[name] + suffix: s for suffix, s in zip(PACKED, packed, strict=True)}
        else:
            shapes[names[name]] = leaf.shape[::-1] if name.endswith("kernel") else leaf.shape
    return shapes


def _require_packing(folder: Folder, packing: str | None) -> None:
    """Experts stored otherwise than configured are named as such, not as missing tensors."""
    is_packed = any(name.endswith(PACKED) for name in folder.names)
    if is_packed != (packing is not None):
        stored = "are MXFP4" if is_packed else "are not quantised"
        raise UsageError(
            f"config.json: quantization_config asks for {packing or 'no quantisation'}, but the "
            f"experts in this folder {stored}"
        )


def _linear(inputs: int, outputs: int, dtype: str, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, dtype=dtype, param_dtype=dtype, precision=PRECISION, rngs=rngs
    )


def _multiply_add(x: Array, matrices: Array, biases: Array, index: Array) -> Array:
    """x [rows, in] times matrix `index` of [count, in, out], plus its bias; float32."""
    matrix = lax.dynamic_index_in_dim(matrices, index, keepdims=False)
    bias = lax.dynamic_index_in_dim(biases, index, keepdims=False).astype(jnp.float32)
    found = jnp.matmul(x, matrix, precision=PRECISION, preferred_element_type=jnp.float32)
    return found + bias[None, :]
