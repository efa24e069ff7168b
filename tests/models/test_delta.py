"""The gated DeltaNet beside a float64 recurrence: chunks, steps, padding, tails, strong decay."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from unimem_jax.models.delta import (
    CHUNK_TOKENS,
    GatedDeltaNet,
    Tokens,
    delta_chunks,
    delta_rule,
    delta_step,
    short_convolution,
    unit,
)

from tests.models.recurrence import StateViews, convolve, recur
from unimem_jax.spec import Site

HEADS, KEY, VALUE, TAPS = 2, 8, 4, 4
SITE = Site(3)
convolution, step = jax.jit(short_convolution), jax.jit(delta_step)
DECAYS = (0.0, -0.5, -1.0, -2.5, -5.0, -10.0)


def random_tokens(rng: np.random.Generator, rows: int, tokens: int) -> Tokens:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(rows, tokens, HEADS, *shape)), jnp.float32)

    return Tokens(
        query=unit(normal(KEY)) * KEY**-0.5,
        key=unit(normal(KEY)),
        value=normal(VALUE),
        decay=-jnp.abs(normal()),
        strength=nnx.sigmoid(normal()),
    )


def random_memory(rng: np.random.Generator, rows: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=(rows, HEADS, KEY, VALUE)), jnp.float32)


def assert_close(found: Any, expected: Any, error: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=error)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 21])
def test_chunks_steps_and_the_float64_recurrence_are_one(length: int) -> None:
    rng = np.random.default_rng(length)
    tokens, start = random_tokens(rng, 2, length), random_memory(rng, 2)
    expected, expected_memory = recur(tokens, np.asarray(start))

    mixed, memory = jax.jit(partial(delta_chunks, chunk=8))(tokens, start)
    assert_close(mixed, expected)
    assert_close(memory, expected_memory)

    memory = start
    for token in range(length):
        mixed, memory = step(Tokens(*(part[:, token : token + 1] for part in tokens)), memory)
        assert_close(mixed[:, 0], expected[:, token])
    assert_close(memory, expected_memory)


@pytest.mark.parametrize("length", [CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1])
def test_the_shipped_chunk_is_right_around_its_own_length(length: int) -> None:
    rng = np.random.default_rng(length)
    tokens, start = random_tokens(rng, 1, length), random_memory(rng, 1)
    expected, expected_memory = recur(tokens, np.asarray(start))
    mixed, memory = jax.jit(delta_rule)(tokens, start)
    assert_close(mixed, expected)
    assert_close(memory, expected_memory)


@pytest.mark.parametrize("cuts", [(), (1, 2, 3), (5, 13)])
def test_where_a_sequence_is_cut_changes_nothing(cuts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    tokens, memory = random_tokens(rng, 1, 19), random_memory(rng, 1)
    expected, expected_memory = recur(tokens, np.asarray(memory))
    run, pieces = jax.jit(delta_rule), []
    for first, last in zip((0, *cuts), (*cuts, 19), strict=True):
        mixed, memory = run(Tokens(*(part[:, first:last] for part in tokens)), memory)
        pieces.append(mixed)
    assert_close(jnp.concatenate(pieces, axis=1), expected)
    assert_close(memory, expected_memory)


def test_equal_keys_written_at_full_strength_stay_exact() -> None:
    tokens = random_tokens(np.random.default_rng(1), 1, 64)
    same = jnp.broadcast_to(tokens.key[:, :1], tokens.key.shape)
    tokens = tokens._replace(
        key=same, strength=jnp.ones_like(tokens.strength), decay=jnp.zeros_like(tokens.decay)
    )
    memory = jnp.zeros((1, HEADS, KEY, VALUE), jnp.float32)
    expected, expected_memory = recur(tokens, np.asarray(memory))
    mixed, memory = jax.jit(delta_rule)(tokens, memory)
    assert_close(mixed, expected)
    assert_close(memory, expected_memory)


@pytest.mark.parametrize("decay", [*DECAYS, None], ids=[*map(str, DECAYS), "mixed"])
def test_strong_decay_over_256_tokens_neither_overflows_nor_drifts(decay: float | None) -> None:
    rng = np.random.default_rng(5)
    tokens, start = random_tokens(rng, 1, 256), random_memory(rng, 1)
    constant = np.full(tokens.decay.shape, decay or 0.0)
    chosen = rng.choice(DECAYS, tokens.decay.shape) if decay is None else constant
    tokens = tokens._replace(decay=jnp.asarray(chosen, jnp.float32))
    expected, expected_memory = recur(tokens, np.asarray(start))

    def run(tokens: Tokens, start: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        mixed, memory = delta_rule(tokens, start)
        return jnp.sum(mixed), (mixed, memory)

    slope, (mixed, memory) = jax.jit(jax.grad(run, has_aux=True))(tokens, start)
    for found, truth in ((mixed[0], expected[0]), (memory[0], expected_memory[0])):
        error = np.linalg.norm(np.asarray(found, np.float64) - truth, axis=-1)
        assert np.all(error <= 1e-3 * np.linalg.norm(truth, axis=-1).max())
        assert np.linalg.norm(error) < 1e-3 * np.linalg.norm(truth)
    assert all(bool(jnp.isfinite(part).all()) for part in slope)


@settings(max_examples=60)
@given(pieces=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_the_tail_is_the_last_inputs_however_few_a_chunk_brings(
    pieces: list[int], seed: int
) -> None:
    # Every chunk is padded to five tokens; what lies in the padding is garbage.
    rng = np.random.default_rng(seed)
    taps = rng.normal(size=(TAPS, 3)).astype(np.float32)
    inputs = rng.normal(size=(sum(pieces), 3)).astype(np.float32)
    expected = convolve(inputs, taps)
    tail = jnp.zeros((1, TAPS - 1, 3), jnp.float32)
    start = 0
    for length in pieces:
        chunk = np.full((1, 5, 3), 1e9, np.float32)
        chunk[0, :length] = inputs[start : start + length]
        lengths = jnp.array([length], jnp.int32)
        outputs, tail = convolution(jnp.asarray(chunk), jnp.asarray(taps), tail, lengths)
        assert_close(outputs[0, :length], expected[start : start + length])
        start += length
    seen = np.concatenate([np.zeros((TAPS - 1, 3), np.float32), inputs])[-(TAPS - 1) :]
    np.testing.assert_array_equal(np.asarray(tail[0]), seen)


@pytest.fixture(scope="module")
def layer() -> GatedDeltaNet:
    made = GatedDeltaNet(SITE, 12, (HEADS, KEY, VALUE), taps=TAPS, rngs=nnx.Rngs(0))
    made.out.kernel[...] = jnp.asarray(
        np.random.default_rng(2).normal(size=made.out.kernel.shape), jnp.float32
    )
    return made


def run_layer(
    layer: GatedDeltaNet, x: np.ndarray, lengths: list[int], state: dict[Any, Any]
) -> tuple[np.ndarray, dict[Any, Any]]:
    valid = np.arange(x.shape[1])[None, :] < np.array(lengths)[:, None]
    mixed, fresh, views = layer(jnp.asarray(x), StateViews(state, jnp.asarray(valid)))
    assert fresh == {}
    return np.asarray(mixed), views.state


def random_state(layer: GatedDeltaNet, rows: int) -> dict[Any, Any]:
    rng = np.random.default_rng(3)
    return {
        part.key: jnp.asarray(rng.normal(size=(rows, *part.shape)), part.dtype)
        for part in layer.parts()
    }


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_row_of_padding_leaves_tail_and_state_bit_for_bit(
    layer: GatedDeltaNet, tokens: int
) -> None:
    state = random_state(layer, 2)
    x = np.random.default_rng(4).normal(size=(2, tokens, 12)).astype(np.float32)
    x[1] = np.nan
    _, after = run_layer(layer, x, [tokens, 0], state)
    for key, value in state.items():
        np.testing.assert_array_equal(np.asarray(after[key][1]), np.asarray(value[1]))
        assert not np.array_equal(np.asarray(after[key][0]), np.asarray(value[0]))


@pytest.mark.parametrize("length", [1, 2, 4])
def test_padding_after_a_short_row_changes_neither_state_nor_outputs(
    layer: GatedDeltaNet, length: int
) -> None:
    state = random_state(layer, 1)
    x = np.random.default_rng(6).normal(size=(1, 9, 12)).astype(np.float32)
    expected, expected_state = run_layer(layer, x[:, :length], [length], state)
    mixed, after = run_layer(layer, x, [length], state)
    assert_close(mixed[:, :length], expected)
    for key in state:
        assert_close(after[key], expected_state[key])


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_a_layer_fed_in_chunks_is_the_layer_fed_at_once(layer: GatedDeltaNet, chunk: int) -> None:
    x = np.random.default_rng(8).normal(size=(1, 13, 12)).astype(np.float32)
    state = {key: jnp.zeros_like(value) for key, value in random_state(layer, 1).items()}
    expected, expected_state = run_layer(layer, x, [13], state)
    pieces = []
    for first in range(0, 13, chunk):
        piece = x[:, first : first + chunk]
        mixed, state = run_layer(layer, piece, [piece.shape[1]], state)
        pieces.append(mixed)
    assert_close(np.concatenate(pieces, axis=1), expected)
    for key, value in state.items():
        assert_close(value, expected_state[key])
