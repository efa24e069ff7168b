"""Norms, rotary positions and SwiGLU beside their formulas in float64 NumPy."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from unimem_jax.models.layers import RMSNorm, SwiGLU, rotate

BASE = 100.0


def test_rotation_is_a_turn_of_complex_numbers() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 2, 8))
    positions = np.array([[0, 1, 2], [700, 701, 702]])
    turns = np.exp(1j * positions[:, :, None, None] * BASE ** (-np.arange(4) / 4))
    expected = (x[..., :4] + 1j * x[..., 4:]) * turns
    found = rotate(jnp.asarray(x, jnp.float32), jnp.asarray(positions, jnp.int32), BASE)
    np.testing.assert_allclose(found[..., :4], expected.real, rtol=0, atol=2e-4)
    np.testing.assert_allclose(found[..., 4:], expected.imag, rtol=0, atol=2e-4)


def test_a_norm_divides_by_the_root_mean_square_and_weighs() -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(3, 5, 6)), rng.normal(size=6)
    norm = RMSNorm(6)
    norm.weight[...] = jnp.asarray(weight, jnp.float32)
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=0, atol=1e-5)


def test_norm_statistics_of_narrow_activations_are_wide() -> None:
    # The square of 300 is beyond float16.
    x = jnp.full((1, 64), 300, jnp.float16)
    found = RMSNorm(64)(x)
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, 1, rtol=1e-3)


def test_swiglu_is_the_gated_product() -> None:
    rng = np.random.default_rng(2)
    layer = SwiGLU(4, 6, nnx.Rngs(0))
    layer.down.kernel[...] = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
    x = rng.normal(size=(2, 3, 4))
    gate, up, down = (
        np.asarray(matrix.kernel[...], np.float64) for matrix in (layer.gate, layer.up, layer.down)
    )
    expected = (x @ gate / (1 + np.exp(-x @ gate)) * (x @ up)) @ down
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=0, atol=1e-5)
