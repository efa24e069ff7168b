"""Parts that any model here is built from: norms, rotary positions, SwiGLU, attention over views.

They hold no state of a request: attention reads its past through views and hands its fresh keys and
values back.

M1  Norm statistics, rotary angles and softmax are float32 whatever the activations are.
M2  Rank and dtype never change implicitly: all of it runs under strict promotion and with rank
    promotion an error.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int32

from unimem_jax.spec import Lifetime, Part, PartKey, Site

NORM_EPSILON = 1e-6


@partial(jax.jit, static_argnames="epsilon")  # layers of one shape are traced once, here and below
def normalise(
    x: Float[Array, "*batch channels"], epsilon: float = NORM_EPSILON
) -> Float[Array, "*batch channels"]:
    """Scales the last axis to a root mean square of 1, in float32; the dtype of `x` comes back."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype)


@partial(jax.jit, static_argnames="base")
def rotate(
    x: Float[Array, "requests tokens heads head"],
    positions: Int32[Array, "requests tokens"],
    base: float,
) -> Float[Array, "requests tokens heads head"]:
    """Rotary positions [Su et al. 2021, arXiv:2104.09864] over the whole head, halves paired.

    Args:
      x: queries or keys; the head size is even.
      positions: position of each token in its request.
      base: wavelengths run from 2 pi to 2 pi * base tokens.
    """
    half = x.shape[-1] // 2
    frequency = base ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None, :]
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [low * cosine - high * sine, high * cosine + low * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, *, zero: bool = False) -> nnx.Linear:
    """A matrix without bias; `zero` lets a block start by adding nothing."""
    start = nnx.initializers.zeros_init() if zero else nnx.initializers.lecun_normal()
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=start, rngs=rngs)


class RMSNorm(nnx.Module):
    """Root mean square norm with one weight per channel of the last axis."""

    def __init__(self, channels: int):
        self.weight = nnx.Param(jnp.ones((channels,), jnp.float32))

    def __call__(self, x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
        """Normalises and weighs; shape and dtype of `x`."""
        weight = self.weight[...].astype(x.dtype)
        return normalise(x) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


class SwiGLU(nnx.Module):
    """Gated feed-forward layer [Shazeer 2020, arXiv:2002.05202]: down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.gate = linear(width, hidden, rngs)
        self.up = linear(width, hidden, rngs)
        self.down = linear(hidden, width, rngs, zero=True)

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Shape and dtype of `x`; 6 * width * hidden floating point operations per token."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Attention(nnx.Module):
    """Grouped-query attention with normalised queries and keys and rotary positions.

    Its site owns "key" and "value", both [key_heads, head] per token, of the given lifetime.
    """

    def __init__(
        self, site: Site, width: int, heads: tuple[int, int, int], *,
        lifetime: Lifetime, rotary_base: float, token_dtype: str, rngs: nnx.Rngs,
    ):  # fmt: skip
        self.site, self.lifetime, self.token_dtype = site, lifetime, token_dtype
        self.query_heads, self.key_heads, self.head = heads
        self.rotary_base = rotary_base
        self.query = linear(width, self.query_heads * self.head, rngs)
        self.key = linear(width, self.key_heads * self.head, rngs)
        self.value = linear(width, self.key_heads * self.head, rngs)
        self.query_norm = RMSNorm(self.head)
        self.key_norm = RMSNorm(self.head)
        self.out = linear(self.query_heads * self.head, width, rngs, zero=True)

    def parts(self) -> tuple[Part, ...]:
        """The two token parts of this layer."""
        shape = (self.key_heads, self.head)
        return tuple(
            Part(self.site, name, shape, self.token_dtype, self.lifetime)
            for name in ("key", "value")
        )

    def __call__(
        self, x: Float[Array, "requests tokens width"], views: Any
    ) -> tuple[Float[Array, "requests tokens width"], dict[PartKey, Array], Any]:
        """Mixes tokens: (what to add to `x`, fresh keys and values [R, T, Hk, D], views)."""
        query = self._heads(self.query(x), self.query_heads)
        key = self._heads(self.key(x), self.key_heads)
        value = self._heads(self.value(x), self.key_heads)
        query = rotate(self.query_norm(query), views.positions, self.rotary_base)
        key = rotate(self.key_norm(key), views.positions, self.rotary_base)
        mixed, views = views.attend(self.site, query, key, value, scale=self.head**-0.5)
        fresh = {(self.site, "key"): key, (self.site, "value"): value}
        return self.out(mixed.reshape(*x.shape[:2], -1)), fresh, views

    def _heads(self, x: Array, heads: int) -> Array:
        return x.reshape(*x.shape[:2], heads, self.head)
