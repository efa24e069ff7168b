"""Gated DeltaNet [Yang et al. 2024, arXiv:2412.06464] with its short convolution.

    S*  = exp(g) S                     S [Dk, Dv] per head: the memory, float32
    S'  = S* + k (beta (v - k' S*))'   writes v under k, first taking out what k held
    o   = q' S'                        reads the new memory

Many tokens go in chunks: inside a chunk the recurrence is one unit lower triangular system, between
chunks it is a `lax.scan`. This module knows no views and no bytes beyond its own layer's "conv" and
"state" parts.

D1  A token that is not valid leaves state and convolution tail bit for bit as they were.
D2  The tail holds the last K - 1 valid inputs, before convolution and activation, however few a
    chunk brings.
D3  Only differences G_i - G_j <= 0 of the summed decay are ever exponentiated: no decay overflows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int32

from unimem_jax.spec import REQUEST, Part, PartKey, Site

from .layers import RMSNorm, linear

CHUNK_TOKENS = 32  # tokens of one triangular system; 16 to 64 differ little on a CPU
UNIT_EPSILON = 1e-6  # inside the root, as in the reference


class Tokens(NamedTuple):
    """What T tokens bring to the recurrence, float32; keys have unit length, queries Dk ** -0.5."""

    query: Float[Array, "requests tokens heads key"]
    key: Float[Array, "requests tokens heads key"]
    value: Float[Array, "requests tokens heads value"]
    decay: Float[Array, "requests tokens heads"]  # g <= 0, the log of what is kept
    strength: Float[Array, "requests tokens heads"]  # beta; 0 writes nothing


type Memory = Float[Array, "requests heads key value"]
type Mixed = Float[Array, "requests tokens heads value"]


@jax.jit  # layers of one shape are traced once, here and below
def short_convolution(
    inputs: Float[Array, "requests tokens channels"],
    taps: Float[Array, "taps channels"],
    tail: Float[Array, "requests past channels"],
    lengths: Int32[Array, " requests"],
) -> tuple[Float[Array, "requests tokens channels"], Float[Array, "requests past channels"]]:
    """Causal depthwise convolution; the last tap weighs the current token.

    Args:
      inputs: of the new tokens, of which the first `lengths` of each row are valid.
      taps: K weights per channel, oldest first.
      tail: the K - 1 inputs before the new ones, oldest first.
    Returns:
      Outputs for all tokens, and the K - 1 last valid inputs (D2).
    """
    joined = jnp.concatenate([tail.astype(inputs.dtype), inputs], axis=1)
    tokens, past = inputs.shape[1], tail.shape[1]
    outputs = jnp.zeros_like(inputs)
    for tap in range(past + 1):
        outputs = outputs + joined[:, tap : tap + tokens] * taps[tap][None, None, :]
    last = lengths[:, None] + jnp.arange(past, dtype=jnp.int32)[None, :]
    kept = jnp.take_along_axis(joined, last[:, :, None], axis=1)
    return outputs, kept.astype(tail.dtype)


@jax.jit
def delta_rule(tokens: Tokens, memory: Memory) -> tuple[Mixed, Memory]:
    """The recurrence over T >= 1 tokens from `memory`: outputs, and the memory after the last."""
    if tokens.query.shape[1] == 1:
        return delta_step(tokens, memory)
    return delta_chunks(tokens, memory)


def delta_step(tokens: Tokens, memory: Memory) -> tuple[Mixed, Memory]:
    """One token, T = 1: about 7 Dk Dv floating point operations per head, as the sums say.

    Args:
      tokens: with a decay per head, or one per head and key channel, as in `kda`.
    """
    query, key, value, decay, strength = (part[:, 0] for part in tokens)
    memory = memory * jnp.exp(decay).reshape(*decay.shape[:2], -1, 1)
    held = jnp.sum(memory * key[:, :, :, None], axis=2)
    change = (value - held) * strength[:, :, None]
    memory = memory + key[:, :, :, None] * change[:, :, None, :]
    mixed = jnp.sum(memory * query[:, :, :, None], axis=2)
    return mixed[:, None], memory


def delta_chunks(tokens: Tokens, memory: Memory, chunk: int = CHUNK_TOKENS) -> tuple[Mixed, Memory]:
    """Many tokens, `chunk` at a time, padded with tokens that change nothing.

    Args:
      chunk: tokens C of one triangular system (WY form [Bischof and Van Loan 1987]), a power of 2.
    Cost: per token and head about 2 C (2 Dk + 2 Dv) + 6 Dk Dv floating point operations; holds
      three [R, T / C, H, C, C] matrices.
    """
    length = tokens.query.shape[1]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    blocks = Tokens(*(in_chunks(part, chunk) for part in tokens))
    total = jnp.cumsum(blocks.decay, axis=-1)
    kept = _kept_between(total)
    keys = jnp.swapaxes(blocks.key, -1, -2)
    # Row i of the system: what token i writes, less what earlier tokens of the chunk already hold
    # under its key.
    system = jnp.tril(jnp.matmul(blocks.key, keys) * kept, -1) * blocks.strength[..., None]
    own = blocks.value * blocks.strength[..., None]
    from_memory = blocks.key * (blocks.strength * jnp.exp(total))[..., None]
    solved = jnp.matmul(unit_lower_inverse(system), jnp.concatenate([own, from_memory], axis=-1))
    own, from_memory = jnp.split(solved, [own.shape[-1]], axis=-1)
    within = jnp.matmul(blocks.query, keys) * kept
    query = blocks.query * jnp.exp(total)[..., None]
    end = total[..., -1:]
    key = blocks.key * jnp.exp(end - total)[..., None]

    def advance(memory: Array, block: tuple[Array, ...]) -> tuple[Array, Array]:
        own, from_memory, within, query, key, end = block
        change = own - jnp.matmul(from_memory, memory)
        mixed = jnp.matmul(query, memory) + jnp.matmul(within, change)
        memory = memory * jnp.exp(end)[..., None]
        return memory + jnp.matmul(jnp.swapaxes(key, -1, -2), change), mixed

    memory, mixed = lax.scan(advance, memory, (own, from_memory, within, query, key, end))
    mixed = jnp.transpose(mixed, (1, 0, 3, 2, 4))
    return mixed.reshape(mixed.shape[0], -1, *mixed.shape[3:])[:, :length], memory


def unit_lower_inverse(strict: Float[Array, "*batch c c"]) -> Float[Array, "*batch c c"]:
    """The inverse of I + A for strictly lower triangular A whose size C is a power of 2.

    Two inverses of size s on the diagonal give one of size 2 s, log2 C times:
    [[P, 0], [-Q B P, Q]] for B below P and left of Q. It is as stable as substitution, unlike sums
    of powers of A, and all matrix products: a CPU's LAPACK solves such small systems one by one.
    """
    chunk = strict.shape[-1]
    inverse = jnp.ones((*strict.shape[:-1], 1, 1), strict.dtype)
    for size in (1 << level for level in range(chunk.bit_length() - 1)):
        count = chunk // size
        blocks = strict.reshape(*strict.shape[:-2], count, size, count, size)
        blocks = jnp.swapaxes(blocks, -3, -2)
        odd = np.arange(1, count, 2)
        below = blocks[..., odd, odd - 1, :, :]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        left = jnp.concatenate([first, -(second @ below @ first)], axis=-2)
        right = jnp.concatenate([jnp.zeros_like(second), second], axis=-2)
        inverse = jnp.concatenate([left, right], axis=-1)
    return inverse[..., 0, :, :]


def in_chunks(part: Array, chunk: int) -> Array:
    """[R, T, H, ...] -> [chunks, R, H, chunk, ...], padded with zeros, which change nothing."""
    requests, tokens, heads, *rest = part.shape
    count = -(-tokens // chunk)
    part = jnp.pad(part, [(0, 0), (0, count * chunk - tokens), *[(0, 0)] * (part.ndim - 2)])
    part = part.reshape(requests, count, chunk, heads, *rest)
    return jnp.transpose(part, (1, 0, 3, 2, *range(4, part.ndim)))


def _kept_between(total: Array) -> Array:
    """[..., C] -> [..., C, C]: exp(G_i - G_j) for i >= j, else 0; masked before exp (D3)."""
    chunk = total.shape[-1]
    causal = jnp.tril(jnp.ones((chunk, chunk), jnp.bool_))
    causal = causal.reshape((1,) * (total.ndim - 1) + causal.shape)
    return jnp.exp(jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf))


@jax.jit
def unit(x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
    """Scales the last axis to length 1, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + UNIT_EPSILON)


class GatedDeltaNet(nnx.Module):
    """One gated DeltaNet layer.

    Its site owns, per request, "conv" [K - 1, channels] and "state" [heads, Dk, Dv], both float32.
    """

    def __init__(
        self, site: Site, width: int, heads: tuple[int, int, int], *, taps: int, rngs: nnx.Rngs
    ):
        self.site, self.taps = site, taps
        self.heads, self.key, self.value = heads
        self.channels = self.heads * (2 * self.key + self.value)
        self.mix = linear(width, self.channels, rngs)
        self.gates = linear(width, 2 * self.heads, rngs)
        self.output_gate = linear(width, self.heads * self.value, rngs)
        start = jax.random.normal(rngs.params(), (taps, self.channels), jnp.float32)
        self.convolution = nnx.Param(start * taps**-0.5)
        # Heads start with half-lives from about a word to a few verses.
        self.log_rate = nnx.Param(jnp.zeros((self.heads,), jnp.float32))
        self.rate_bias = nnx.Param(jnp.linspace(-2.0, -6.0, self.heads, dtype=jnp.float32))
        self.norm = RMSNorm(self.value)
        self.out = linear(self.heads * self.value, width, rngs, zero=True)

    def parts(self) -> tuple[Part, ...]:
        """The two request parts of this layer."""
        return (
            Part(self.site, "conv", (self.taps - 1, self.channels), "float32", REQUEST),
            Part(self.site, "state", (self.heads, self.key, self.value), "float32", REQUEST),
        )

    def __call__(
        self, x: Float[Array, "requests tokens width"], views: Any
    ) -> tuple[Float[Array, "requests tokens width"], dict[PartKey, Array], Any]:
        """Mixes tokens: (what to add to `x`, no fresh token parts, views with state written)."""
        tail, views = views.read(self.site, "conv")
        lengths = views.valid.sum(axis=1, dtype=jnp.int32)
        mixed, tail = short_convolution(self.mix(x), self.convolution[...], tail, lengths)
        views = views.write(self.site, "conv", tail)
        tokens = self._tokens(nnx.silu(mixed), self.gates(x), views.valid)
        memory, views = views.read(self.site, "state")
        read, memory = delta_rule(tokens, memory)
        views = views.write(self.site, "state", memory)
        gate = nnx.silu(self.output_gate(x).reshape(read.shape).astype(jnp.float32))
        read = (self.norm(read) * gate).astype(x.dtype)
        return self.out(read.reshape(*x.shape[:2], -1)), {}, views

    def _tokens(self, mixed: Array, gates: Array, valid: Array) -> Tokens:
        """Splits channels into heads; a token that is not valid is made to change nothing (D1)."""
        kept = valid[:, :, None]
        mixed = jnp.where(kept, mixed, jnp.zeros_like(mixed)).astype(jnp.float32)
        width = self.heads * self.key
        query, key, value = jnp.split(mixed, [width, 2 * width], axis=-1)
        rate, strength = jnp.split(gates.astype(jnp.float32), 2, axis=-1)
        rate = nnx.softplus(rate + self.rate_bias[...][None, None, :])
        decay = -jnp.exp(self.log_rate[...])[None, None, :] * rate
        shape = (*mixed.shape[:2], self.heads, -1)
        return Tokens(
            query=unit(query.reshape(shape)) * self.key**-0.5,
            key=unit(key.reshape(shape)),
            value=value.reshape(shape),
            decay=jnp.where(kept, decay, jnp.zeros_like(decay)),
            strength=jnp.where(kept, nnx.sigmoid(strength), jnp.zeros_like(strength)),
        )
