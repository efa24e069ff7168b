"""Forks and prefixes on the host: what they cost, what is refused, what sharing may not break."""

from typing import Any

import numpy as np
import pytest

from tests.host.test_machine import FAR, KIB, STATE, part
from tests.host.world import World, frozen
from unimem_jax.errors import InvariantError, NeverFits, OutOfMemory, UsageError
from unimem_jax.holdings import Holdings
from unimem_jax.memory import Memory
from unimem_jax.plan import plan
from unimem_jax.requests import Prefix, Work
from unimem_jax.spec import window

PAGE, WINDOW = 3, 5
LENGTHS = [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 2]


def world_of(size: int = 40 * KIB, **options: Any) -> World:
    return World(plan([STATE, FAR, part(2, 2, window(WINDOW))], size, PAGE), **options)


def begun(world: World, length: int, **options: Any) -> Any:
    """A twin of so many tokens."""
    if options:
        world.admit(**options)
    else:
        world.open()
    world.run([(world.twins[-1], length)])
    return world.twins[-1]


def units(memory: Memory) -> list[int]:
    return list(memory.allocator.held)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_fork_pays_for_what_it_copies_and_for_nothing_else(length: int) -> None:
    world = world_of()
    twin = begun(world, length)
    before = units(world.memory)
    world.fork(twin)
    paid = [after - was for after, was in zip(units(world.memory), before, strict=True)]
    is_begun, is_partly_full = int(length > 0), int(length % PAGE > 0)
    assert paid == [is_begun, is_partly_full, is_partly_full]
    assert world.memory.allocator.copied_units == paid
    world.check()
    world.run([(other, 2) for other in world.twins])
    world.check()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("slides", [0, 1])
def test_a_window_that_slides_in_one_branch_only_takes_nothing_from_the_other(
    length: int, slides: int
) -> None:
    """Admitted requests, the last of which fill the arena: a promise too few would be refused."""
    world = world_of(chunk=4)
    twin = begun(world, length, prompt=max(1, length), new=12)
    world.fork(twin)
    world.fork(world.twins[-1])
    while world.memory.free_rows and len(world.twins) < 5:
        before = len(world.twins)
        world.fork(twin)
        if len(world.twins) == before:
            break
    for _ in range(12 - 1):
        world.run([(world.twins[slides], 1)])
        world.check()
    for at in (1 - slides, 2):
        for _ in range(12 - 1):
            world.run([(world.twins[at], 1)])
            world.check()
    for twin in list(world.twins)[::-1]:
        world.free(twin)
        world.check()
    assert units(world.memory) == [0, 0, 0]


def test_admitted_branches_in_a_full_arena_are_never_refused_what_they_were_promised() -> None:
    refused = 0
    for size in range(20, 44):
        world = world_of(size * KIB, chunk=3, fused=2)
        world.admit(8, 10)
        if not world.twins:
            continue
        world.prefill(world.twins[0], 8)
        for _ in range(3):
            world.fork(world.twins[0])
        world.keep(world.twins[0])
        for at, twin in enumerate(world.twins):
            for _ in range(3 + 2 * at):
                world.run([(twin, 1)])  # `attempt` lets no refusal pass
                world.check()
        for kept in list(world.kept):
            world.let_go(kept)
            world.check()
        for _ in range(4):
            world.run([(twin, min(1, twin.limit - twin.length)) for twin in world.twins])
            world.check()
        refused += world.waits
    assert refused > 0, "no arena was too small for all"


def test_without_its_promises_sharing_breaks_a_commitment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is not blind."""
    monkeypatch.setattr(Holdings, "_owed", lambda *_: 0)
    with pytest.raises((AssertionError, OutOfMemory, InvariantError)):
        test_admitted_branches_in_a_full_arena_are_never_refused_what_they_were_promised()


def test_what_was_shared_survives_its_request_and_goes_with_its_last_sharer() -> None:
    world = world_of()
    twin = begun(world, 3 * PAGE)
    world.keep(twin)
    world.keep(twin)
    world.free(twin)
    world.catch_up()
    world.check()
    first, second = world.kept
    world.resume(first)
    world.let_go(first)
    world.check()
    world.run([(world.twins[-1], 4)])
    world.check()
    world.free(world.twins[-1])
    assert sum(units(world.memory)) > 0
    world.let_go(second)
    world.check()
    assert units(world.memory) == [0, 0, 0]


def test_a_fork_without_a_row_or_without_room_changes_nothing() -> None:
    world = world_of(rows=2)
    twin = begun(world, PAGE)
    world.open()
    world.fork(twin)  # no row
    assert world.waits == 1
    world = world_of(16 * KIB)
    while not world.waits:
        world.open()
        world.run([(world.twins[-1], 4)])
    twin = next(twin for twin in world.twins if twin.length)
    world.fork(twin)
    assert world.waits == 2
    world.check()


def test_a_fork_beside_which_its_origin_never_fits_is_told_so() -> None:
    memory = Memory(plan([STATE, FAR], 9 * KIB, PAGE), rows=3, context_tokens=24)
    request = memory.open()
    memory.run([Work(request, 22, np.arange(22))])
    with pytest.raises(NeverFits, match="can never fit: 1 slot of request"):
        memory.fork(request)
    memory.check()


def test_a_pin_in_the_way_of_the_copies_refuses_and_changes_nothing() -> None:
    """A slot to copy fits only where pages lie, and one of them may not move."""
    memory = Memory(plan([STATE, FAR], 24 * KIB, PAGE), rows=8, context_tokens=96)
    gone, request = memory.open(), memory.open()
    for one in (gone, request):
        memory.run([Work(one, 60, np.arange(60))])
    memory.free(gone)  # its pages lay above
    allocator, pool = memory.allocator, memory.plan.token_pools[0].index
    lowest = int(allocator.mapping[pool].min())
    allocator.ledger.pin(pool, lowest, "a transfer")
    refusals = 0
    while memory.fits(memory.copies(60)):
        seen = frozen(memory)
        try:
            memory.fork(request)
        except OutOfMemory as error:
            assert "a transfer" in str(error)
            assert frozen(memory) == seen
            refusals += 1
            allocator.unpin(pool, lowest, "a transfer")
        memory.check()
    assert refusals == 1


WRONG = {
    "no int": lambda r: Prefix(2.5, r.ids, r.slots),
    "negative": lambda r: Prefix(-1, r.ids, r.slots),
    "too few pages": lambda r: Prefix(5, r.ids[:1], r.slots),
    "too many pages": lambda r: Prefix(PAGE, r.ids, r.slots),
    "no slots": lambda r: Prefix(5, r.ids, ()),
    "slots of nothing": lambda r: Prefix(0, (), r.slots),
    "an id of nobody": lambda r: Prefix(5, [r.ids[0], 17], r.slots),
    "an id that is no int": lambda r: Prefix(5, [r.ids[0], "2"], r.slots),
    "an id twice": lambda r: Prefix(6, [r.ids[0], r.ids[0]], r.slots),
    "a slot of nobody": lambda r: Prefix(5, r.ids, [3]),
    "longer than the context": lambda r: Prefix(25, r.ids * 5, r.slots),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_prefix_that_is_not_there_is_refused_and_changes_nothing(what: str) -> None:
    world = world_of()
    request = begun(world, 5).request
    for begin in (world.memory.open, lambda **options: world.memory.admit(8, 4, **options)):
        world.attempt(lambda begin=begin: begin(prefix=WRONG[what](request)), is_wrong=True)
    world.check()


def test_pages_that_are_not_full_and_requests_that_are_gone_are_not_shared() -> None:
    world = world_of()
    twin = begun(world, 5)
    for start, stop in ((0, 2), (1, 0), (-1, 1), (0.5, 1)):
        world.attempt(
            lambda start=start, stop=stop: world.memory.share(twin.request, start, stop),
            is_wrong=True,
        )
    world.free(twin)
    world.attempt(lambda: world.memory.share(twin.request, 0, 1), is_wrong=True)
    world.attempt(lambda: world.memory.fork(twin.request), is_wrong=True)
    with pytest.raises(UsageError, match="was freed"):
        world.memory.fork(twin.request)


def test_a_fork_names_its_next_token_and_may_have_other_sampling() -> None:
    memory = Memory(plan([STATE, FAR], 24 * KIB, PAGE), rows=3, context_tokens=24)
    request = memory.open()
    memory.run([Work(request, 4, np.arange(4))])
    fork = memory.fork(request, (1, 2, 3, 4, 5))
    assert (fork.length, fork.limit, fork.has_sampled) == (4, request.limit, False)
    assert fork.options.tolist() == [1, 2, 3, 4, 5]
    assert memory.fork(fork).options.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(UsageError, match="sampled no next token"):
        memory.run([Work(fork, 1)])
    with pytest.raises(UsageError, match="5 words"):
        memory.fork(request, (1,))
    memory.run([Work(fork, 1, np.array([7]))])
    memory.run([Work(fork, 1), Work(request, 1)])
    memory.check()
