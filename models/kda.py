"""Kimi delta attention [Kimi Team 2025, arXiv:2510.26692]: a delta rule that forgets by channel.

    S*  = Diag(exp(g)) S               S [Dk, Dv] per head: the memory, float32; g [Dk]
    S'  = S* + k (beta (v - k' S*))'
    o   = q' S'

As `delta`, whose D1 to D3 hold here too, but for the decay: one per key channel, so that a chunk's
system weighs each channel of a product of keys by itself.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from unimem_jax.spec import REQUEST, Part, Site

from .decoder import Forms, Matrix, Mixed, Norm, parameter, split_heads
from .delta import (
    Memory,
    Tokens,
    delta_step,
    in_chunks,
    short_convolution,
    unit,
    unit_lower_inverse,
)

CHUNK_TOKENS = 16  # C * C * Dk floats are held per head and request
STREAMS = ("q", "k", "v")  # each with a convolution of its own, kept side by side


@jax.jit  # layers of one shape are traced once
def channel_delta_rule(tokens: Tokens, memory: Memory) -> tuple[Array, Memory]:
    """The recurrence over T >= 1 tokens from `memory`.

    Args:
      tokens: as for `delta.delta_rule`, but with a decay per key channel [R, T, H, Dk].
    Returns:
      Outputs [R, T, H, Dv] and the memory after the last token.
    """
    if tokens.query.shape[1] == 1:
        return delta_step(tokens, memory)
    return channel_delta_chunks(tokens, memory)


def channel_delta_chunks(
    tokens: Tokens, memory: Memory, chunk: int = CHUNK_TOKENS
) -> tuple[Array, Memory]:
    """Many tokens, `chunk` at a time, padded with tokens that change nothing.

    Args:
      chunk: tokens C of one triangular system, a power of 2.
    Cost: per token and head about 6 C Dk + 6 Dk Dv floating point operations and C Dk exponentials;
      holds [R, H, C, C, Dk] of one chunk at a time.
    """
    length = tokens.query.shape[1]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    blocks = Tokens(*(in_chunks(part, chunk) for part in tokens))

    def advance(memory: Array, block: Tokens) -> tuple[Array, Array]:
        total = jnp.cumsum(block.decay, axis=-2)
        within, between = _products(block, total)
        strength = block.strength[..., None]
        # Row i of the system: what token i writes, less what earlier tokens of the chunk hold
        # under its key.
        system = jnp.tril(between, -1) * strength
        kept = jnp.exp(total)
        sides = jnp.concatenate([block.value, block.key * kept], axis=-1) * strength
        own, from_memory = jnp.split(
            unit_lower_inverse(system) @ sides, [block.value.shape[-1]], axis=-1
        )
        change = own - from_memory @ memory
        mixed = (block.query * kept) @ memory + within @ change
        end = total[..., -1:, :]
        key = block.key * jnp.exp(end - total)
        memory = memory * jnp.swapaxes(jnp.exp(end), -1, -2)
        return memory + jnp.swapaxes(key, -1, -2) @ change, mixed

    memory, mixed = lax.scan(advance, memory, blocks)
    mixed = jnp.transpose(mixed, (1, 0, 3, 2, 4))
    return mixed.reshape(mixed.shape[0], -1, *mixed.shape[3:])[:, :length], memory


def _products(block: Tokens, total: Array) -> tuple[Array, Array]:
    """[..., C, C] for i >= j, else 0: sums over channels of q_i k_j and of k_i k_j, each channel
    weighed by exp(G_i - G_j), which is masked before exp (D3).
    """
    chunk = total.shape[-2]
    causal = jnp.tril(jnp.ones((chunk, chunk), jnp.bool_))
    causal = causal.reshape((1,) * (total.ndim - 2) + (chunk, chunk, 1))
    between = total[..., :, None, :] - total[..., None, :, :]
    weighed = jnp.exp(jnp.where(causal, between, -jnp.inf)) * block.key[..., None, :, :]
    product = partial(jnp.einsum, "...ic,...ijc->...ij", precision=lax.Precision.HIGHEST)
    return product(block.query, weighed), product(block.key, weighed)


class KimiDelta(nnx.Module):
    """Kimi delta attention with its short convolutions.

    Its site owns, per request, "conv" [K - 1, 3 * heads * head], the last inputs of queries, keys
    and values, and "state" [heads, head, head], both float32.

    Attributes:
      heads, head: how many, and their channels.
      taps: inputs K that a convolution sees.
    """

    name = "self_attn"

    def __init__(
        self, site: Site, width: int, heads: tuple[int, int], *, taps: int, epsilon: float
    ):
        """Declares the layer; `heads` is their number and size, `epsilon` that of the norm."""
        self.site, self.taps, self.width = site, taps, width
        self.heads, self.head = heads
        channels = self.heads * self.head
        self.qkv_proj = Matrix(3 * channels, width)
        self.conv1d = parameter(3 * channels, taps)
        self.A_log = parameter(self.heads)
        self.dt_bias = parameter(channels)
        self.f_a_proj, self.f_b_proj = Matrix(self.head, width), Matrix(channels, self.head)
        self.g_a_proj, self.g_b_proj = Matrix(self.head, width), Matrix(channels, self.head)
        self.b_proj = Matrix(self.heads, width)
        self.o_norm = Norm(self.head, epsilon=epsilon)
        self.o_proj = Matrix(width, channels)

    def forms(self) -> Forms:
        """As `Mixer` says: folders hold queries, keys and values apart."""
        channels = self.heads * self.head
        return {
            f"{self.name}.qkv_proj.weight": (
                {f"{self.name}.{one}_proj.weight": (channels, self.width) for one in STREAMS},
            ),
            f"{self.name}.conv1d": (
                {f"{self.name}.{one}_conv1d.weight": (channels, 1, self.taps) for one in STREAMS},
            ),
            f"{self.name}.A_log": ({f"{self.name}.A_log": (1, 1, self.heads, 1)},),
        }

    def parts(self) -> tuple[Part, ...]:
        """As `Mixer.parts`."""
        tail = (self.taps - 1, 3 * self.heads * self.head)
        return (
            Part(self.site, "conv", tail, "float32", REQUEST),
            Part(self.site, "state", (self.heads, self.head, self.head), "float32", REQUEST),
        )

    def __call__(self, x: Float[Array, "requests tokens width"], views: Any) -> Mixed:
        """As `Mixer.__call__`; no token parts."""
        inputs = self.qkv_proj(x).astype(jnp.float32)
        taps = self.conv1d[...].astype(jnp.float32).T
        tail, views = views.read(self.site, "conv")
        lengths = views.valid.sum(axis=1, dtype=jnp.int32)
        mixed, tail = short_convolution(inputs, taps, tail, lengths)
        views = views.write(self.site, "conv", tail)

        memory, views = views.read(self.site, "state")
        tokens = self._tokens(jax.nn.silu(mixed), x, views.valid)
        read, memory = channel_delta_rule(tokens, memory)
        views = views.write(self.site, "state", memory)

        gate = self.g_b_proj.wide(self.g_a_proj(x))
        read = self.o_norm(read).reshape(gate.shape) * jax.nn.sigmoid(gate)
        return self.o_proj(read.astype(x.dtype)), {}, views

    def _tokens(self, mixed: Array, x: Array, valid: Array) -> Tokens:
        """Splits channels into heads; a token that is not valid is made to change nothing."""
        kept = valid[:, :, None]
        mixed = jnp.where(kept, mixed, jnp.zeros_like(mixed))
        query, key, value = (split_heads(part, self.heads) for part in jnp.split(mixed, 3, axis=-1))
        rate = self.f_b_proj.wide(self.f_a_proj(x)) + self.dt_bias[...][None, None, :]
        decay = split_heads(jax.nn.softplus(rate), self.heads)
        decay = -jnp.exp(self.A_log[...])[None, None, :, None] * decay
        strength = jax.nn.sigmoid(self.b_proj.wide(x))
        return Tokens(
            query=unit(query) * self.head**-0.5,
            key=unit(key),
            value=value,
            decay=jnp.where(kept[..., None], decay, jnp.zeros_like(decay)),
            strength=jnp.where(kept, strength, jnp.zeros_like(strength)),
        )
