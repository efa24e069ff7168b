"""Background compaction: within its budget, with the fewest bytes in all, and never in the way."""

import itertools
import random

import pytest

from tests.memory.brute import Bench, geometry_of
from unimem_jax.allocator import Allocator, Split
from unimem_jax.bands import Geometry
from unimem_jax.errors import UsageError
from unimem_jax.ledger import LIVE

GEOMETRY = Geometry(240, (4, 3, 2), ("low", "float", "high"), (True, False, False), 120)
SLOT, WINDOW, CONTEXT = range(3)


def fewest(live, top, end):
    """Units outside the best stretch of as many places, over every stretch the end allows."""
    count = live.bit_count()
    starts = {"low": [0], "high": [top - count], "float": range(top - count + 1)}[end]
    return min((live & ~(((1 << count) - 1) << start)).bit_count() for start in starts)


@pytest.mark.parametrize("end", ["low", "float", "high"])
@pytest.mark.parametrize("most", [1, 2, 99])
def test_any_budget_ends_without_inner_holes_and_with_the_fewest_moves(end, most):
    top, moving = 10, 0
    bench = Bench(geometry_of(top, (1,), (end,)))
    for live in range(1, 1 << top):
        bench.put((live,))
        held, moved = live, 0
        while batches := bench.layout.compact(most):
            (batch,) = batches
            for source in batch.sources:
                assert held >> int(source) & 1
                held &= ~(1 << int(source))
            for destination in batch.destinations:
                assert not held >> int(destination) & 1, "a move overwrites a unit"
                held |= 1 << int(destination)
            assert len(batch.sources) <= most
            moved += len(batch.sources)
            bench.layout.check()
        assert bench.layout.inner_holes(0) == 0
        assert held.bit_count() == live.bit_count()
        assert moved == fewest(live, top, end), bin(live)
        moving += moved > 0
    assert moving > 500


@pytest.mark.parametrize("pinned", [1, 5, 9])
def test_a_float_draws_in_around_a_pin(pinned):
    bench = Bench(geometry_of(10, (1,), ("float",)))
    bench.put((0b1010101010,))
    bench.layout.ledger.pin(0, pinned, "copy")
    while bench.layout.compact(1):
        bench.layout.check()
    assert bench.layout.inner_holes(0) == 0
    assert bench.layout.ledger.states[0][pinned] == LIVE


def test_a_pinned_edge_of_an_end_band_holds_its_holes_and_nothing_moves_in_vain():
    bench = Bench(geometry_of(10, (1,), ("low",)))
    bench.put((0b1010101010,))
    bench.layout.ledger.pin(0, 9, "copy")
    assert bench.layout.compact(99) == []
    assert bench.layout.inner_holes(0) == 5


def churned(seed):
    """Half of everything freed at random, with the device up to date."""
    memory, rng = Allocator(GEOMETRY), random.Random(seed)
    slots = [memory.grant_slot(SLOT, committed=False) for _ in range(15)]
    pages = memory.grant_pages(30, committed=False).tolist()
    memory.drop(rng.sample(slots, 7), SLOT)
    memory.free(rng.sample(pages, 15))
    memory.take_moves()
    memory.take_changes()
    memory.ledger.retire(memory.ledger.dispatch())
    return memory


def inner(memory):
    return [memory.layout.inner_holes(pool) for pool in range(3)]


@pytest.mark.parametrize("most_bytes", [0, 128, 383, 512, 2000, 10**6])
def test_no_step_moves_more_bytes_than_its_budget(most_bytes):
    memory = churned(1)
    units = GEOMETRY.unit_granules
    for _ in range(40):
        moved = memory.compact(most_bytes)
        batches = memory.take_moves()
        assert moved <= most_bytes
        assert moved == sum(len(b.sources) * units[b.sub_pool] * 128 for b in batches)
        memory.check()
    assert not any(inner(memory)) or most_bytes < 512
    assert memory.metrics()["moved_bytes"] <= 40 * most_bytes


def test_when_idle_fragmentation_goes_to_zero_and_then_nothing_moves():
    memory = churned(2)
    assert any(inner(memory))
    steps = 0
    while memory.compact(1024):
        steps += 1
        memory.check()
    assert not any(inner(memory))
    assert steps > 3
    moved = memory.metrics()["moved_bytes"]
    assert memory.compact(10**9) == 0
    assert memory.metrics()["moved_bytes"] == moved


def test_compaction_takes_nothing_from_what_fits_and_no_grant_waits_for_it():
    """Demands of every kind, as large as fit, before and after any number of steps of it."""
    for seed, steps in itertools.product(range(20), (1, 3, 50)):
        still, moving = churned(seed), churned(seed)
        for _ in range(steps):
            moving.compact(1024)
        rng = random.Random(seed)
        for demand in (
            [rng.randint(0, 20), rng.randint(0, 40), rng.randint(0, 60)] for _ in "12345"
        ):
            assert moving.fits(demand) == still.fits(demand)
            if still.fits(demand):
                still.make_room(demand, committed=False)
                moving.make_room(demand, committed=False)
        moving.check()


def test_what_was_compacted_before_a_demand_does_not_move_in_it():
    still, moved = churned(3), churned(3)
    while moved.compact(10**6):
        moved.take_moves()
    slots = GEOMETRY.unit_counts[SLOT]
    most = max(count for count in range(slots) if still.fits([count, 0, 0]))
    for memory in (still, moved):
        memory.make_room([most, 0, 0], committed=False)
    waiting = [sum(len(b.sources) for b in memory.take_moves()) for memory in (still, moved)]
    assert waiting[1] < waiting[0]


def test_a_split_is_not_compacted_and_a_negative_budget_is_refused():
    memory = Allocator(GEOMETRY, Split((10, 20, 40)))
    pages = memory.grant_pages(10, committed=False)
    memory.free(pages[::2])
    assert memory.compact(10**6) == 0
    with pytest.raises(UsageError):
        memory.compact(-1)
