"""Arguments of `Memory` that no caller should give."""

import numpy as np
import pytest

from tests.host.test_machine import FAR, KIB, STATE, part
from tests.odd import require_typed
from unimem_jax.errors import UsageError
from unimem_jax.memory import GREEDY_WORDS, Memory
from unimem_jax.plan import plan
from unimem_jax.requests import NO_PREFIX, Prefix, Work
from unimem_jax.spec import window

PLAN = plan([STATE, FAR, part(2, 2, window(5))], 40 * KIB, 3)


class Served(Memory):
    """A memory with an admitted request of 4 tokens."""

    def __init__(self):
        super().__init__(PLAN, 4, 24)
        self.admitted = self.admit(4, 8)
        self.prefill(self.admitted, [1, 2, 3, 4])


CALLS = {
    "open": lambda _: [GREEDY_WORDS, 5, NO_PREFIX],
    "admit": lambda _: [3, 2, GREEDY_WORDS, NO_PREFIX],
    "fork": lambda made: [made.admitted, GREEDY_WORDS],
    "share": lambda made: [made.admitted, 0, 1],
    "drop": lambda made: [made.admitted.ids[:1], 1],
    "free": lambda made: [made.admitted],
    "run": lambda made: [[Work(made.admitted, 1)], 1, 1, 8],
    "skip": lambda made: [[made.admitted], [1]],
    "prefill": lambda made: [made.admitted, [5]],
    "decode": lambda made: [1, [made.admitted]],
    "retire": lambda made: [made.ticket],
    "fits": lambda _: [(1, 1, 1)],
}


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_of_memory_get_typed_errors(name):
    assert require_typed(Served, name, CALLS[name]) > 10


@pytest.mark.parametrize("name", ["ids", "slots", "length"])
def test_an_odd_prefix_gets_typed_errors(name):
    class Begun(Served):
        def begin(self, odd):
            held = self.admitted
            parts = {"length": 4, "ids": held.ids, "slots": held.slots, name: odd}
            return self.open(prefix=Prefix(**parts))

    assert require_typed(Begun, "begin", lambda _: [None]) > 10


@pytest.mark.parametrize("at", range(4))
def test_odd_work_gets_typed_errors(at):
    class Working(Served):
        def work(self, odd):
            parts = [self.admitted, 1, np.array([1]), True]
            return self.run([Work(*parts[:at], odd, *parts[at + 1 :])])

    refused = require_typed(Working, "work", lambda _: [None])
    assert refused > 10 or at == 3  # whatever is true emits


def test_odd_sizes_of_a_memory_get_typed_errors():
    class Maker:
        def __init__(self):
            self.made_before = 0  # so that there is something to compare

        def make(self, made_for, rows, context_tokens, chunk_tokens, fused_steps):
            sizes = {"chunk_tokens": chunk_tokens, "fused_steps": fused_steps}
            return Memory(made_for, rows, context_tokens, **sizes)

    assert require_typed(Maker, "make", lambda _: [PLAN, 3, 24, 4, 4]) > 100


def test_the_integers_of_numpy_are_integers():
    memory = Memory(PLAN, np.int64(3), np.uint8(24), chunk_tokens=np.int32(4))
    assert type(memory.rows) is type(memory.context_tokens) is type(memory.chunk_tokens) is int
    request = memory.admit(np.int64(4), np.uint8(3))
    memory.prefill(request, np.arange(4, dtype=np.uint8))
    memory.decode(np.int8(2), [request])
    memory.run([Work(request, np.int64(1))], rows=np.uint8(1), tokens=np.int64(1))
    memory.retire(np.int64(memory.ticket))
    assert memory.open(limit=np.int16(7)).limit == 7
    memory.check()


@pytest.mark.parametrize("size", [10**400, -(10**400), 1.5, None, True, "1"])
def test_an_arena_or_a_page_of_an_impossible_size_is_refused(size):
    for sizes in ((size, 4), (1 << 20, size)):
        with pytest.raises(UsageError):
            plan([STATE, FAR], *sizes)
