"""Requests that do what few do: take part twice, write nothing, outgrow what was priced."""

import numpy as np
import pytest

from tests.device.models import MIXTURES, Attending, Mixture
from unimem_jax.errors import UsageError
from unimem_jax.memory import Memory
from unimem_jax.packet import fields
from unimem_jax.plan import plan
from unimem_jax.requests import Work
from unimem_jax.spec import window


def memory_of(model, **options):
    return Memory(plan(model.parts(), 64 << 10, 4), 4, 256, **options)


def tokens(count):
    return np.ones(count, np.int32)


def test_a_request_takes_part_in_fused_steps_once():
    memory = memory_of(MIXTURES["hybrid"])
    request = memory.admit(4, 8)
    memory.prefill(request, tokens(4))
    with pytest.raises(UsageError, match="takes part in a step once"):
        memory.decode(2, [request, request])
    assert request.length == 4
    memory.decode(2, [request])
    memory.check()


def test_a_request_of_another_memory_is_refused():
    one, other = memory_of(MIXTURES["hybrid"]), memory_of(MIXTURES["hybrid"])
    other.open()
    with pytest.raises(UsageError, match="of another memory"):
        one.run([Work(other.open(), 1, tokens(1))])
    assert one.metrics()["live"] == [0, 0, 0]


@pytest.mark.parametrize("name", ["hybrid", "state only"])
def test_a_request_without_a_token_may_idle_beside_others(name):
    memory = memory_of(MIXTURES[name])
    idle, busy = memory.open(), memory.open()
    (packet,) = memory.run([Work(idle, 0, tokens(0)), Work(busy, 1, tokens(1))])
    start, _ = fields(packet.shape)["count"]
    assert packet.words[start : start + 2].tolist() == [0, 1]
    assert (idle.length, busy.length) == (0, 1)
    memory.run([Work(idle, 0, tokens(0))])
    memory.check()


@pytest.mark.parametrize("options", [(), (1,), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)])
def test_sampling_words_of_another_number_are_refused_before_a_row_is_taken(options):
    memory = memory_of(MIXTURES["attention only"])
    with pytest.raises(UsageError, match="5 words"):
        memory.open(options)
    assert memory.free_rows == 4


def test_a_chunk_longer_than_was_priced_leaves_no_commitment_behind():
    memory = memory_of(Mixture(Attending(window(64))), chunk_tokens=8, fused_steps=4)
    request = memory.admit(200, 20)
    for _ in range(3):
        memory.run([Work(request, 64, tokens(64))])
        held, committed = request.held(0), memory.allocator.committed[0]
        assert committed == max(0, request.peak[0] - held)
    memory.free(request)
    assert memory.allocator.held == [0]
