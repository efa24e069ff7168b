"""Qwen3.5 (dense, text) from a Hugging Face folder: gated DeltaNet with attention between.

Every fourth layer is attention: gated, and turning a quarter of each head. Norms are centred, but
for the one inside DeltaNet. A folder of the model with vision is read for its text: `model.visual.`
and the drafting layers `mtp.` stay unread. Families that differ in their feed-forwards, or in how
their DeltaNet is stored, are read by the same functions.

    qkv = silu(conv(in_proj_qkv x))      z, a, b = in_proj_z x, in_proj_a x, in_proj_b x
    out_proj(norm(delta_rule(qkv, a, b)) * silu(z))

Text has one position per token, so the three interleaved kinds of rotary position are one.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from unimem_jax.spec import REQUEST, Part, Site

from .checkpoint import Loaded, dense_feed, load_folder, read_sizes
from .decoder import (
    Attention,
    Decoder,
    FeedForward,
    MakeNorm,
    Matrix,
    Mixed,
    Mixer,
    Norm,
    parameter,
    split_heads,
)
from .delta import Tokens, delta_rule, short_convolution, unit
from .fields import Fields
from .folder import OnTensor
from .qwen3 import FULL

LINEAR = "linear_attention"
FULL_INTERVAL = 4  # every fourth layer, where a configuration is silent
ROTATED = 0.25  # of a head, where a configuration is silent
# Rotary settings that only matter with images, or that are read here.
BESIDE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
NESTED = "model.language_model."  # in a folder of the model with vision
UNREAD = ("model.visual.", "mtp.")


class Taps(nnx.Module):
    """Weights [channels, 1, taps] of a depthwise convolution, oldest input first."""

    def __init__(self, channels: int, taps: int):
        self.weight = parameter(channels, 1, taps)


class DeltaNet(nnx.Module):
    """Gated DeltaNet in which several value heads may share a key head.

    Its site owns, per request, "conv" [K - 1, channels] and "state" [value_heads, Dk, Dv], both
    float32.

    Attributes:
      heads: key heads, value heads.
      sizes: Dk, Dv.
      taps: inputs K that the convolution sees.
    """

    name = "linear_attn"

    def __init__(
        self, site: Site, width: int, heads: tuple[int, int], *,
        sizes: tuple[int, int], taps: int, norm: MakeNorm,
    ):  # fmt: skip
        """Declares the layer; `norm` is that of each value head."""
        self.site, self.heads, self.sizes, self.taps = site, heads, sizes, taps
        self.values = heads[1] * sizes[1]
        self.channels = 2 * heads[0] * sizes[0] + self.values
        self.declare_inputs(width)
        self.conv1d = Taps(self.channels, taps)
        self.A_log = parameter(heads[1])
        self.dt_bias = parameter(heads[1])
        self.norm = norm(sizes[1])
        self.out_proj = Matrix(width, self.values)

    def declare_inputs(self, width: int) -> None:
        """Makes the matrices that `inputs` uses."""
        self.in_proj_qkv = Matrix(self.channels, width)
        self.in_proj_z = Matrix(self.values, width)
        self.in_proj_a = Matrix(self.heads[1], width)
        self.in_proj_b = Matrix(self.heads[1], width)

    def inputs(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """[R, T, ...]: queries, keys and values side by side; output gates; rates; strengths."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_a(x), self.in_proj_b(x)

    def parts(self) -> tuple[Part, ...]:
        """As `Mixer.parts`."""
        tail, memory = (self.taps - 1, self.channels), (self.heads[1], *self.sizes)
        return (
            Part(self.site, "conv", tail, "float32", REQUEST),
            Part(self.site, "state", memory, "float32", REQUEST),
        )

    def __call__(self, x: Float[Array, "requests tokens width"], views: Any) -> Mixed:
        """As `Mixer.__call__`; no token parts."""
        inputs, gate, rate, strength = (part.astype(jnp.float32) for part in self.inputs(x))
        taps = self.conv1d.weight[...][:, 0, :].astype(jnp.float32).T
        tail, views = views.read(self.site, "conv")
        lengths = views.valid.sum(axis=1, dtype=jnp.int32)
        mixed, tail = short_convolution(inputs, taps, tail, lengths)
        views = views.write(self.site, "conv", tail)

        memory, views = views.read(self.site, "state")
        tokens = self._tokens(jax.nn.silu(mixed), rate, strength, views.valid)
        read, memory = delta_rule(tokens, memory)
        views = views.write(self.site, "state", memory)

        read = self.norm(read).reshape(gate.shape) * jax.nn.silu(gate)
        return self.out_proj(read.astype(x.dtype)), {}, views

    def _tokens(self, mixed: Array, rate: Array, strength: Array, valid: Array) -> Tokens:
        """Splits channels into heads; a token that is not valid is made to change nothing."""
        (key_heads, heads), (key_size, _) = self.heads, self.sizes
        kept = valid[:, :, None]
        mixed = jnp.where(kept, mixed, jnp.zeros_like(mixed))
        keys = key_heads * key_size
        query, key, value = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        # Key head j serves the value heads j * r to j * r + r - 1.
        query, key = (
            jnp.repeat(unit(split_heads(part, key_heads)), heads // key_heads, axis=2)
            for part in (query, key)
        )
        rate = jax.nn.softplus(rate + self.dt_bias[...][None, None, :])
        decay = -jnp.exp(self.A_log[...])[None, None, :] * rate
        strength = jax.nn.sigmoid(strength)
        return Tokens(
            query=query * key_size**-0.5,
            key=key,
            value=split_heads(value, heads),
            decay=jnp.where(kept, decay, jnp.zeros_like(decay)),
            strength=jnp.where(kept, strength, jnp.zeros_like(strength)),
        )


# Gives the feed-forward of a layer that a configuration describes.
type MakeFeed = Callable[[Fields, int], FeedForward]


def read_decoder(
    fields: Fields, token_dtype: str, *,
    feed: MakeFeed = dense_feed, delta_net: type[DeltaNet] = DeltaNet,
) -> Decoder:  # fmt: skip
    """The text network that a `config.json` describes, with or without vision around it.

    Args:
      token_dtype: stored dtype of keys and values, a name from `spec.STORED_DTYPES`.
      feed, delta_net: those of a family.
    Raises:
      UsageError: a field is missing, contradicts another, or asks for what is not computed here.
    """
    outer = fields
    if outer.get("text_config") is not None:
        fields = outer.section("text_config")
    fields.require(attention_bias=False, hidden_act="silu")
    kinds = fields.layer_kinds((LINEAR, FULL)) or _regular_kinds(fields)
    heads = fields.attention_heads()
    epsilon = fields.positive("rms_norm_eps", 1e-6)
    plain, centred = partial(Norm, epsilon=epsilon), partial(Norm, epsilon=epsilon, is_centred=True)
    rotary = fields.rotary(_rotated(fields, heads[2]), BESIDE)
    width = fields.count("hidden_size")

    def mixer(layer: int) -> Mixer:
        if kinds[layer] == FULL:
            return Attention(
                Site(layer), width, heads,
                rotary=rotary, token_dtype=token_dtype, norm=centred, is_gated=True,
            )  # fmt: skip
        delta_heads, sizes, taps = _delta_sizes(fields)
        return delta_net(Site(layer), width, delta_heads, sizes=sizes, taps=taps, norm=plain)

    is_tied = fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings"))
    blocks = [(mixer(layer), feed(fields, layer)) for layer in range(len(kinds))]
    return Decoder(read_sizes(fields, is_tied=is_tied), blocks, centred)


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
) -> Loaded:  # fmt: skip
    """Loads a Qwen3.5 folder; arguments, result, errors and cost as `checkpoint.load_folder`."""
    return load_folder(
        path, read_decoder, dtype, token_dtype=token_dtype, on_tensor=on_tensor,
        nested=NESTED, ignored=UNREAD,
    )  # fmt: skip


def _regular_kinds(fields: Fields) -> tuple[str, ...]:
    interval = FULL_INTERVAL
    if fields.get("full_attention_interval") is not None:
        interval = fields.count("full_attention_interval")
    layers = range(1, fields.layers() + 1)
    return tuple(LINEAR if layer % interval else FULL for layer in layers)


def _rotated(fields: Fields, head: int) -> int:
    """Channels of a head that turn."""
    share = fields.positive("partial_rotary_factor", ROTATED)
    if fields.get("rope_parameters"):
        fields = fields.section("rope_parameters")
        share = fields.positive("partial_rotary_factor", share)
    if share > 1:
        raise fields.refusal("partial_rotary_factor", "a share of a head")
    return int(head * share)


def _delta_sizes(fields: Fields) -> tuple[tuple[int, int], tuple[int, int], int]:
    """(key heads, value heads), (Dk, Dv), taps."""
    key_heads = fields.count("linear_num_key_heads")
    heads = fields.count("linear_num_value_heads")
    if heads % key_heads:
        raise fields.refusal("linear_num_value_heads", f"a multiple of {key_heads} key heads")
    taps = fields.count("linear_conv_kernel_dim")
    if taps < 2:
        raise fields.refusal("linear_conv_kernel_dim", "at least 2")
    sizes = (fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim"))
    return (key_heads, heads), sizes, taps
