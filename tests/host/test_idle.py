"""The cheap check for production: it sees what a leak leaves behind, and costs next to nothing."""

from typing import Any

import numpy as np
import pytest

from tests.host.test_machine import FAR, KIB, STATE, part
from unimem_jax.errors import InvariantError
from unimem_jax.memory import Memory
from unimem_jax.plan import plan
from unimem_jax.requests import Work
from unimem_jax.spec import window


@pytest.fixture
def memory() -> Memory:
    """All requests are gone; units were moved, pinned and freed meanwhile."""
    made = Memory(plan([STATE, FAR, part(2, 2, window(5))], 40 * KIB, 3), 4, 24)
    requests = [made.open(), made.admit(9, 9)]
    for request in requests:
        made.run([Work(request, 9, np.arange(9))])
    made.check_idle()
    address = int(made.allocator.mapping[1].min())
    made.allocator.ledger.pin(1, address, "a transfer")
    for request in requests:
        made.free(request)
    made.check_idle()
    made.allocator.unpin(1, address, "a transfer")
    made.check_idle()
    return made


def unit_lost(memory: Memory) -> None:
    memory.allocator.layout.bands[1].hole_count -= 1


def slot_kept(memory: Memory) -> None:
    memory.allocator.grant_slot(0, committed=False)


def commitment_kept(memory: Memory) -> None:
    memory.allocator.commit((0, 1, 0))


def id_lost(memory: Memory) -> None:
    memory.allocator.pages.free_count -= 1


def page_counted_twice(memory: Memory) -> None:
    memory.allocator.held[2] += 1


LEAKS = {
    unit_lost: "L5",
    slot_kept: "M5",
    commitment_kept: "M5",
    id_lost: "L9",
    page_counted_twice: "L5",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_seen_when_no_request_is_left(memory: Memory, leak: Any) -> None:
    leak(memory)
    with pytest.raises(InvariantError, match=LEAKS[leak]):
        memory.check_idle()


def test_what_others_share_may_be_left(memory: Memory) -> None:
    request = memory.open()
    memory.run([Work(request, 9, np.arange(9))])
    shares = memory.share(request, 0, 3)
    memory.free(request)
    kept = tuple(len(shares.get(pool.index, ())) for pool in memory.plan.sub_pools)
    memory.check_idle(kept)
    with pytest.raises(InvariantError, match="M5"):
        memory.check_idle()
    for index, ids in shares.items():
        memory.drop(ids, index)
    memory.check_idle()
