"""Whole small arenas: the closed form, that what fits is served, and that no cheaper moves exist.

The default suite takes a share of each; `slow` tests take all of it. docs/TESTING.md has the
figures of one run.
"""

import itertools
import random

import numpy as np
import pytest

from tests.memory.brute import (
    NEVER,
    Bench,
    counts_and_answers,
    geometry_of,
    greatest_demands,
    kinds_of_ends,
    least_moved_of_all,
    live_layouts,
)
from unimem_jax.bands import fits

UNITS = range(1, 5)

EXHAUSTIVE = pytest.mark.exhaustive  # minutes to an hour each


def geometries(sub_pools, arenas):
    for arena, ends in itertools.product(arenas, kinds_of_ends(sub_pools)):
        for units in itertools.product(UNITS, repeat=sub_pools):
            if arena >= max(units):
                yield arena, units, ends


def ask_all_counts(sub_pools, arenas):
    """`fits` against every start of every band. Returns (questions, yes)."""
    asked = yes = 0
    for arena, units, ends in geometries(sub_pools, arenas):
        geometry = geometry_of(arena, units, ends)
        for counts, answer in counts_and_answers(arena, units, ends):
            assert fits(geometry, counts) == answer, (arena, units, ends, counts)
            asked += 1
            yes += answer
    return asked, yes


def serve_all_layouts(sub_pools, arenas):
    """Every layout of live units, the greatest demands and single units. Returns (cases, cases that
    move something).
    """
    served = moving = 0
    for arena, units, ends in geometries(sub_pools, arenas):
        bench, demands = Bench(geometry_of(arena, units, ends)), {}
        for some in itertools.batched(live_layouts(arena, units), 4096):
            cases = []
            for sets in some:
                held = tuple(live.bit_count() for live in sets)
                if held not in demands:
                    demands[held] = greatest_demands(arena, units, ends, held)
                cases += [(sets, demand) for demand in demands[held]]
            if cases:
                served += len(cases)
                moving += serve(bench, cases)
    return served, moving


def serve(bench, cases):
    """Each case is served with the fewest granules. Returns how many cases move any."""
    geometry, moving = bench.geometry, 0
    layouts = np.array([sets for sets, _ in cases])
    counts = np.bitwise_count(layouts) + np.array([demand for _, demand in cases])
    bands = geometry.arena_granules, geometry.unit_granules, geometry.ends
    least = least_moved_of_all(*bands, layouts, counts).tolist()
    for (sets, demand), fewest in zip(cases, least, strict=True):
        moved = bench.meet(sets, demand)
        assert moved == fewest < NEVER, (geometry, sets, demand, moved, fewest)
        moving += moved > 0
    return moving


@pytest.mark.parametrize(
    "sub_pools, arenas", [(2, range(1, 25)), (3, range(1, 25)), (4, (5, 12, 18))]
)
def test_fits_says_yes_exactly_when_a_placement_exists(sub_pools, arenas):
    asked, yes = ask_all_counts(sub_pools, arenas)
    assert 0.1 < yes / asked < 0.9


@pytest.mark.exhaustive
def test_fits_says_yes_exactly_when_a_placement_of_four_bands_exists():
    print("(questions, yes)", ask_all_counts(4, range(1, 25)))


@pytest.mark.parametrize("sub_pools, arenas", [(2, (7, 8)), (3, (5,)), (4, (3,))])
def test_what_fits_is_served_with_the_fewest_bytes(sub_pools, arenas):
    served, moving = serve_all_layouts(sub_pools, arenas)
    assert 0.2 < moving / served < 0.9


@pytest.mark.parametrize(
    "sub_pools, arena",
    [
        pytest.param(bands, arena, marks=pytest.mark.slow if arena <= short else EXHAUSTIVE)
        for bands, short, most in ((2, 10, 14), (3, 6, 10), (4, 4, 8))
        for arena in range(1, most + 1)
    ],
)
def test_what_fits_is_served_with_the_fewest_bytes_in_every_layout(sub_pools, arena):
    print(sub_pools, arena, "(cases, moving)", serve_all_layouts(sub_pools, (arena,)))


def random_state(rng):
    """Up to six sub-pools, mostly fuller than half, holes everywhere."""
    sub_pools, arena = rng.randint(1, 6), rng.randint(12, 96)
    units = [rng.choice([1, 1, 2, 3, 4, 5, 7]) for _ in range(sub_pools)]
    ends = list(rng.choice(kinds_of_ends(sub_pools))) if sub_pools > 1 else ["float"]
    density, sets, position = rng.choice([0.3, 0.6, 0.95]), [], 0
    for index, unit in enumerate(units):
        first = -(-position // unit) + rng.choice([0, 0, 0, 1, 4])
        most = (arena - position) // unit // rng.randint(1, sub_pools - index)
        chosen = [
            a for a in range(first, min(first + most, arena // unit)) if rng.random() < density
        ]
        sets.append(sum(1 << address for address in chosen))
        position = (chosen[-1] + 1) * unit if chosen else position
    return geometry_of(arena, units, ends), tuple(sets)


def greatest_demand(rng, geometry, sets):
    """Units of each sub-pool, in random order as many as still fit or one, by asking `fits`."""
    counts = [live.bit_count() for live in sets]
    demand = [0] * len(sets)
    for index in rng.sample(range(len(sets)), len(sets)):
        most = geometry.unit_counts[index] - counts[index] if rng.random() < 0.7 else 1
        while most and not fits(geometry, [c + most * (i == index) for i, c in enumerate(counts)]):
            most -= 1
        counts[index] += most
        demand[index] = most
    return tuple(demand)


def serve_random_states(seed, states):
    """Returns how many of them had to move something."""
    rng, moving = random.Random(seed), 0
    for _ in range(states):
        geometry, sets = random_state(rng)
        moving += Bench(geometry).meet(sets, greatest_demand(rng, geometry, sets)) > 0
    return moving


def test_random_states_with_up_to_six_sub_pools_serve_the_most_that_fits():
    assert serve_random_states(0, 30_000) > 10_000


@pytest.mark.slow
def test_100_000_random_states_with_up_to_six_sub_pools_serve_the_most_that_fits():
    assert serve_random_states(1, 100_000) > 30_000
