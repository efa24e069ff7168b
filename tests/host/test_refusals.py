"""What Memory refuses without a change, and what it does when a pin blocks a prompt."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unimem_jax.allocator import number_of
from unimem_jax.errors import InvariantError, OutOfMemory, UsageError
from unimem_jax.memory import Memory
from unimem_jax.plan import plan
from unimem_jax.requests import Work
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, window

PARTS = (
    Part(Site(0), "key", (32,), "float32", CONTEXT),
    Part(Site(1), "key", (32,), "float32", window(12)),
    Part(Site(2), "state", (64,), "float32", REQUEST),
)


@pytest.fixture
def memory() -> Memory:
    return Memory(plan(PARTS, 1 << 18, 8), rows=4, context_tokens=128, chunk_tokens=16)


def seen(memory: Memory) -> tuple[Any, ...]:
    return memory.metrics(), memory.ticket, memory.free_rows


@pytest.mark.parametrize(
    "wrong",
    [
        lambda memory: memory.admit(3.5, 1),
        lambda memory: memory.admit(3, 1.5),
        lambda memory: memory.admit(True, 1),
        lambda memory: memory.admit("3", 1),
        lambda memory: memory.admit(3, -1),
        lambda memory: memory.open(limit=2.5),
        lambda memory: memory.open(limit=0),
        lambda memory: memory.open(limit=129),
        lambda memory: memory.run([], rows=2.5),
        lambda memory: memory.run([], tokens=None, pages=1.5),
        lambda memory: memory.run([], pages=-1),
        lambda memory: memory.decode(1.0, []),
        lambda memory: Memory(memory.plan, rows=4096, context_tokens=1 << 23),
    ],
)
def test_a_size_that_is_no_count_is_refused(memory: Memory, wrong: Callable[[Memory], Any]) -> None:
    before = seen(memory)
    with pytest.raises(UsageError):
        wrong(memory)
    assert seen(memory) == before


def test_no_step_goes_on_from_the_token_of_a_rows_former_request(memory: Memory) -> None:
    former = memory.admit(4, 8)
    memory.prefill(former, [1, 2, 3, 4])
    memory.decode(2, [former])
    memory.free(former)
    request = memory.open()
    assert request.row == former.row
    before = seen(memory)
    with pytest.raises(UsageError, match="sampled no next token"):
        memory.run([Work(request, 1)])
    assert seen(memory) == before
    memory.run([Work(request, 3, np.arange(3), emit=False)])
    before = seen(memory)
    for wrong in (lambda: memory.run([Work(request, 1)]), lambda: memory.decode(1, [request])):
        with pytest.raises(UsageError, match="sampled no next token"):
            wrong()
    assert seen(memory) == before
    memory.run([Work(request, 1, np.arange(1))])
    memory.decode(2, [request])
    assert request.length == 6


@pytest.mark.parametrize("blocked", [0, 1, 2])
def test_a_prompt_that_a_pin_blocks_goes_on_where_it_stopped(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, blocked: int
) -> None:
    request = memory.admit(48, 4)
    prompt, calls, make_room = np.arange(48), [], memory.allocator.make_room

    def pinned(demand: Any) -> None:
        calls.append(demand)
        if len(calls) == blocked + 1:
            raise OutOfMemory("a pin is in the way")
        make_room(demand)

    monkeypatch.setattr(memory.allocator, "make_room", pinned)
    before = seen(memory)
    if not blocked:
        with pytest.raises(OutOfMemory):
            memory.prefill(request, prompt)
        assert seen(memory) == before
    else:
        packets = memory.prefill(request, prompt)
        assert len(packets) == blocked
        assert request.length == 16 * blocked
        assert not request.has_sampled
    memory.check()
    memory.prefill(request, prompt[request.length :])
    assert (request.length, request.has_sampled) == (48, True)
    memory.decode(4, [request])
    memory.free(request)
    memory.check()
    assert memory.metrics()["committed"] == [0, 0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda memory, request: memory.free(request),
        lambda memory, request: memory.run([Work(request, 1, np.arange(1))]),
        lambda memory, request: memory.skip([request], np.array([1])),
        lambda memory, request: memory.decode(1, [request]),
    ],
)
@pytest.mark.parametrize("row", [0, 7])
def test_a_request_of_another_memory_is_refused(memory: Memory, wrong: Any, row: int) -> None:
    """Freeing it would take the row of whoever has the same one here."""
    request = memory.admit(4, 8)
    memory.prefill(request, [1, 2, 3, 4])
    other = Memory(memory.plan, rows=8, context_tokens=128)
    strangers = [other.admit(4, 8) for _ in range(8)]
    other.prefill(strangers[row], [1, 2, 3, 4])
    before = seen(memory)
    with pytest.raises(UsageError, match="another memory"):
        wrong(memory, strangers[row])
    assert seen(memory) == before
    assert request.length == 4
    memory.check()
    other.check()


@pytest.mark.parametrize("count", [1.7, True, None, "1", 2**70])
def test_a_count_of_tokens_that_is_no_int_is_refused(memory: Memory, count: Any) -> None:
    request = memory.admit(4, 8)
    memory.prefill(request, [1, 2, 3, 4])
    before = seen(memory)
    with pytest.raises(UsageError, match="counts of new tokens"):
        memory.run([Work(request, count)])
    assert seen(memory) == before
    assert request.length == 4


def test_the_check_finds_a_request_whose_pages_went_to_another(memory: Memory) -> None:
    robbed, owner = memory.open(), memory.open()
    memory.run([Work(robbed, 8, np.arange(8))])
    memory.allocator.free(list(robbed.ids))
    memory.run([Work(owner, 8, np.arange(8))])
    assert number_of(robbed.ids[0]) == number_of(owner.ids[0])
    with pytest.raises(InvariantError, match="M2: row 0 lost a page"):
        memory.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda request: request.ids.append(request.ids[-1]),
        lambda request: request.ids.pop(),
        lambda request: request.first.update({1: 0}),
    ],
    ids=["one more", "one less", "one unseen"],
)
def test_the_check_finds_a_request_that_does_not_hold_what_its_length_is_priced_at(
    memory: Memory, change: Callable[[Any], Any]
) -> None:
    request = memory.open()
    memory.run([Work(request, 30, np.arange(30))])
    memory.check()
    change(request)
    with pytest.raises(InvariantError, match="M1: row 0 holds"):
        memory.check()
