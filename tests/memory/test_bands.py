"""The closed form and the choice of targets, against brute force over all tiny arenas."""

import itertools
import random

import pytest

from tests.memory.brute import live_layouts
from tests.memory.twin import Arena, least_moved, packs, packs_fast
from unimem_jax.bands import Geometry, batch_order, choose_targets, fits
from unimem_jax.errors import UsageError

ENDS = {
    1: [("low",), ("float",), ("high",)],
    2: [("low", "high"), ("low", "float"), ("float", "high"), ("float", "float")],
    3: [("low", "float", "high"), ("low", "float", "float"), ("float", "float", "high")],
    4: [("low", "float", "float", "high")],
}


def geometry_of(arena, units, ends):
    return Geometry(arena, tuple(units), tuple(ends), (False,) * len(units), max(1, arena))


def counts_up_to(arena, units):
    """All counts whose bytes fit, and a border of those that do not."""
    return itertools.product(*(range(arena // unit + 2) for unit in units))


@pytest.mark.parametrize(
    "sub_pools, arenas, most_unit",
    [(1, range(1, 13), 4), (2, range(1, 13), 4), (3, (5, 9, 12), 4), (4, (8, 9), 3)],
)
def test_fits_says_yes_exactly_when_some_placement_exists(sub_pools, arenas, most_unit):
    for arena, ends in itertools.product(arenas, ENDS[sub_pools]):
        for units in itertools.product(range(1, most_unit + 1), repeat=sub_pools):
            if arena < max(units):
                continue
            geometry = geometry_of(arena, units, ends)
            for counts in counts_up_to(arena, units):
                expected = packs_fast(arena, units, ends, counts)
                assert fits(geometry, counts) == expected, (arena, units, ends, counts)
                if sub_pools < 3 or sum(counts) % 7 == 0:  # every start tried on a fixed share
                    assert packs(arena, units, ends, counts) == expected, (arena, units, counts)


def test_fits_is_monotone_so_that_eviction_may_bisect():
    geometry = geometry_of(23, (4, 3, 2), ("low", "float", "high"))
    for counts in itertools.product(range(6), range(8), range(12)):
        for index in range(3):
            if counts[index] and fits(geometry, counts):
                fewer = [count - (i == index) for i, count in enumerate(counts)]
                assert fits(geometry, fewer), (counts, index)


def test_an_empty_float_takes_no_space_and_is_not_rounded():
    geometry = geometry_of(11, (3, 4, 2), ("low", "float", "high"))
    assert fits(geometry, (1, 0, 3))  # 3 + 6 of 10 granules; a rounded empty float would end at 4
    assert not fits(geometry, (1, 1, 2))  # the float lies at [4, 8), and the top grid ends at 10


def test_negative_counts_and_missing_counts_are_refused():
    geometry = geometry_of(10, (2, 2), ("low", "high"))
    for wrong in [(-1, 0), (1,), (1, 1, 1)]:
        with pytest.raises(UsageError):
            fits(geometry, wrong)


@pytest.mark.parametrize(
    "changes",
    [
        {"arena_granules": 0},
        {"unit_granules": (0, 1)},
        {"ends": ("high", "low")},
        {"ends": ("low", "low")},
        {"ends": ("low", "middle")},
        {"ends": ("low",)},
        {"id_count": 0},
    ],
)
def test_an_impossible_geometry_is_refused(changes):
    right = {
        "arena_granules": 10, "unit_granules": (2, 1), "ends": ("low", "high"),
        "is_slot": (True, False), "id_count": 5,
    }  # fmt: skip
    Geometry(**right)
    with pytest.raises(UsageError):
        Geometry(**(right | changes))


def addresses_of(sets):
    """Ascending addresses per band, out of one set a band as `brute` has them."""
    return tuple([bit for bit in range(live.bit_length()) if live >> bit & 1] for live in sets)


def check_targets(geometry, occupied, pinned, counts, targets):
    """B1 to B3, and the cost of the choice."""
    position = cost = 0
    for i, (lo, hi) in enumerate(targets):
        unit = geometry.unit_granules[i]
        if not counts[i]:
            assert lo == hi
            continue
        assert hi - lo >= counts[i]
        assert lo * unit >= position
        assert lo == 0 or geometry.ends[i] != "low"
        assert hi == geometry.unit_counts[i] or geometry.ends[i] != "high"
        assert all(lo <= address < hi for address in pinned[i])
        position = hi * unit
        cost += unit * sum(not lo <= address < hi for address in occupied[i])
    assert position <= geometry.arena_granules
    return cost


def run_batches(geometry, occupied, targets):
    """Runs the moves on granules, batch by batch. Every unit must arrive whole; free bytes are
    poison.
    """
    arena = Arena(geometry.arena_granules, geometry.unit_granules)
    where = {}
    for i, addresses in enumerate(occupied):
        for address in addresses:
            arena.write(i, address, (i, address))
            where[i, address] = address
    batches, sides = [], []
    for i, ((lo, hi), held) in enumerate(zip(targets, occupied, strict=True)):
        strays = [a for a in held if not lo <= a < hi]
        free = [a for a in range(lo, hi) if a not in held]
        batches.append((i, strays, free[: len(strays)]))
        sides.append((any(a < lo for a in strays), any(a >= hi for a in strays)))
    for index in batch_order(sides):
        arena.move(*batches[index])
        for source, destination in zip(*batches[index][1:], strict=True):
            where[index, source] = destination
    for (i, first), address in where.items():
        assert arena.read(i, address) == (i, first), (geometry, occupied, targets)


def meet(arena, units, ends, occupied, demand, pinned=None):
    """One layout and demand: found exactly when one exists, with the fewest bytes, safe to run."""
    geometry = geometry_of(arena, units, ends)
    pinned = pinned or [[] for _ in units]
    counts = [len(held) + more for held, more in zip(occupied, demand, strict=True)]
    least = least_moved(arena, units, ends, occupied, pinned, counts)
    targets = choose_targets(geometry, occupied, pinned, counts)
    assert (targets is None) == (least is None), (arena, units, ends, occupied, pinned, counts)
    if targets is None:
        return None
    cost = check_targets(geometry, occupied, pinned, counts, targets)
    assert cost == least, (arena, units, ends, occupied, pinned, counts, targets)
    run_batches(geometry, occupied, targets)
    return cost


@pytest.mark.parametrize(
    "arena, units", [(7, (1, 1)), (8, (2, 1)), (9, (1, 2)), (10, (3, 2)), (10, (2, 3))]
)
@pytest.mark.parametrize("ends", ENDS[2])
def test_two_bands_always_find_the_cheapest_layout(arena, units, ends):
    moved = 0
    for occupied in map(addresses_of, live_layouts(arena, units)):
        for demand in itertools.product(range(3), repeat=2):
            counts = [len(held) + more for held, more in zip(occupied, demand, strict=True)]
            if fits(geometry_of(arena, units, ends), counts):
                cost = meet(arena, units, ends, occupied, demand)
                assert cost is not None, "fits said yes"
                moved += cost
            else:
                assert meet(arena, units, ends, occupied, demand) is None, "fits said no"
    assert moved, "nothing ever had to move, so nothing was tested"


@pytest.mark.parametrize(
    "arena, units", [(7, (2, 1, 1)), (8, (3, 2, 2)), (8, (2, 2, 1)), (9, (3, 2, 1))]
)
@pytest.mark.parametrize("ends", ENDS[3])
def test_three_bands_find_the_cheapest_layout(arena, units, ends):
    rng = random.Random(0)
    layouts = list(map(addresses_of, live_layouts(arena, units)))
    for occupied in rng.sample(layouts, min(len(layouts), 500)):
        for demand in [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1), (0, 2, 1)]:
            meet(arena, units, ends, occupied, demand)


def random_case(rng, sub_pools, arena):
    units = [rng.choice([1, 2, 3, 4, 5]) for _ in range(sub_pools)]
    occupied, position = [], 0
    for index, unit in enumerate(units):
        first = -(-position // unit) + rng.randint(0, 2)
        room = (arena - position) // unit // (sub_pools - index)
        addresses = [
            a for a in range(first, min(first + room, arena // unit)) if rng.random() < 0.6
        ]
        occupied.append(addresses)
        position = (addresses[-1] + 1) * unit if addresses else position
    ends = ["float"] * sub_pools
    ends[0] = rng.choice(["low", "float"])
    ends[-1] = rng.choice(["high", "float"]) if sub_pools > 1 else ends[0]
    return units, ends, occupied


@pytest.mark.parametrize("sub_pools", [2, 3, 4, 5, 6])
def test_random_states_with_and_without_pins_find_the_cheapest_layout(sub_pools):
    rng = random.Random(sub_pools)
    found = 0
    for _ in range(300):
        arena = rng.randint(20, 40)
        units, ends, occupied = random_case(rng, sub_pools, arena)
        pinned = [[a for a in held if rng.random() < 0.05] for held in occupied]
        demand = [rng.choice([0, 0, 1, 3]) for _ in units]
        found += meet(arena, units, ends, occupied, demand, pinned) is not None
    assert 30 < found < 300


def test_a_large_arena_moves_one_page_for_a_shortage_of_one_page():
    """Two end bands that touch, holes everywhere: exactly one unit of one band has to move."""
    geometry = geometry_of(48_000, (1, 1), ("low", "high"))
    low = [a for a in range(24_000) if a % 3 or a == 23_999]
    high = [a for a in range(24_000, 48_000) if a % 3 != 1 or a == 24_000]
    counts = [24_001, len(high)]
    assert len(low) < 24_000
    targets = choose_targets(geometry, [low, high], [[], []], counts)
    assert check_targets(geometry, [low, high], [[], []], counts, targets) == 1


def test_a_search_too_wide_to_be_exact_stays_near_the_least():
    """Thousands of units must move; end bands still move the fewest."""
    rng = random.Random(5)
    for _ in range(5):
        low = [a for a in range(3000) if rng.random() < 0.5]
        middle = sorted(rng.sample(range(1600, 2600), 400))
        units = (1, 2)
        geometry = geometry_of(5400, units, ("low", "high"))
        counts = [len(low), len(middle) + 1500]
        targets = choose_targets(geometry, [low, middle], [[], []], counts)
        cost = check_targets(geometry, [low, middle], [[], []], counts, targets)
        edge = (2700 - counts[1]) * 2  # the high band takes exactly this much from the low one
        assert cost == sum(a >= edge for a in low)


def test_an_order_of_batches_runs_risers_from_the_top_then_sinkers_from_the_bottom():
    sides = [(True, False), (False, True), (True, True), (False, False), (False, True)]
    assert batch_order(sides) == [2, 0, 1, 4]
