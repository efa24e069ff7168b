"""Kimi delta attention beside a float64 recurrence, and as a layer of a folder."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unimem_jax.models.delta import Tokens, delta_rule, delta_step, unit
from unimem_jax.models.kda import CHUNK_TOKENS, channel_delta_chunks, channel_delta_rule

HEADS, KEY, VALUE = 2, 8, 4
step = jax.jit(delta_step)


def random_tokens(rng, rows, tokens, strongest=1.0):
    def normal(*shape):
        return jnp.asarray(rng.normal(size=(rows, tokens, HEADS, *shape)), jnp.float32)

    return Tokens(
        query=unit(normal(KEY)) * KEY**-0.5,
        key=unit(normal(KEY)),
        value=normal(VALUE),
        decay=-jnp.abs(normal(KEY)) * strongest,
        strength=jax.nn.sigmoid(normal()),
    )


def random_memory(rng, rows):
    return jnp.asarray(rng.normal(size=(rows, HEADS, KEY, VALUE)), jnp.float32)


def recur(tokens, memory):
    """Float64, token by token: each key channel forgets at its own rate."""
    query, key, value, decay, strength = (np.asarray(part, np.float64) for part in tokens)
    memory, mixed = np.array(memory, np.float64), np.zeros(value.shape)
    for row, token, head in np.ndindex(strength.shape):
        at = row, token, head
        held = memory[row, head] * np.exp(decay[at])[:, None]
        change = strength[at] * (value[at] - key[at] @ held)
        memory[row, head] = held + np.outer(key[at], change)
        mixed[at] = query[at] @ memory[row, head]
    return mixed, memory


def close(found, wanted):
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 8, 21])
def test_chunks_steps_and_the_float64_recurrence_are_one(length):
    rng = np.random.default_rng(length)
    tokens, start = random_tokens(rng, 2, length), random_memory(rng, 2)
    wanted, wanted_memory = recur(tokens, start)
    mixed, memory = jax.jit(partial(channel_delta_chunks, chunk=8))(tokens, start)
    close(mixed, wanted)
    close(memory, wanted_memory)
    memory = start
    for token in range(length):
        mixed, memory = step(Tokens(*(part[:, token : token + 1] for part in tokens)), memory)
        close(mixed[:, 0], wanted[:, token])
    close(memory, wanted_memory)


def test_the_shipped_chunk_is_right_past_its_own_length():
    rng = np.random.default_rng(0)
    tokens, start = random_tokens(rng, 1, CHUNK_TOKENS + 1), random_memory(rng, 1)
    wanted, wanted_memory = recur(tokens, start)
    mixed, memory = channel_delta_rule(tokens, start)
    close(mixed, wanted)
    close(memory, wanted_memory)


@pytest.mark.parametrize("strongest", [0.0, 5.0, 80.0])
def test_no_decay_overflows_or_drifts_over_256_tokens(strongest):
    rng = np.random.default_rng(1)
    tokens, start = random_tokens(rng, 1, 256, strongest), random_memory(rng, 1)
    # Channels that forget at once lie beside one that forgets nothing.
    tokens = tokens._replace(decay=tokens.decay.at[..., 0].set(0.0))
    wanted, wanted_memory = recur(tokens, start)
    mixed, memory = channel_delta_rule(tokens, start)
    close(mixed, wanted)
    close(memory, wanted_memory)


def test_one_rate_for_all_channels_is_the_gated_delta_rule():
    rng = np.random.default_rng(2)
    tokens, start = random_tokens(rng, 2, 40), random_memory(rng, 2)
    equal = tokens._replace(decay=jnp.broadcast_to(tokens.decay[..., :1], tokens.decay.shape))
    wanted, wanted_memory = delta_rule(tokens._replace(decay=tokens.decay[..., 0]), start)
    mixed, memory = channel_delta_rule(equal, start)
    close(mixed, wanted)
    close(memory, wanted_memory)
    # The comparison can fail: rates of their own give another memory.
    assert np.abs(np.asarray(channel_delta_rule(tokens, start)[1] - wanted_memory)).max() > 0.1


def test_tokens_without_strength_and_decay_leave_the_memory_bit_for_bit():
    rng = np.random.default_rng(3)
    tokens, start = random_tokens(rng, 1, 5), random_memory(rng, 1)
    none = tokens._replace(
        decay=jnp.zeros_like(tokens.decay), strength=jnp.zeros_like(tokens.strength)
    )
    for part in (none, Tokens(*(one[:, :1] for one in none))):
        np.testing.assert_array_equal(channel_delta_rule(part, start)[1], start)
