"""Brute force over whole tiny arenas: every layout of live units, every placement of bands.

Slow twins like `twin.py`, but for millions of cases: `ends_reached` tries every start of a band,
`least_moved_of_all` tries every interval of every band for all layouts at once. `Bench` puts a real
`Layout` into any state and follows the bytes of its moves granule by granule. A set of addresses or
granules is the bits of an integer.
"""

import itertools

import numpy as np

from unimem_jax.bands import Geometry
from unimem_jax.errors import OutOfMemory
from unimem_jax.layout import Layout
from unimem_jax.ledger import BEYOND, HOLE, LIVE

NEVER = 1 << 20  # more granules than any case moves


def kinds_of_ends(sub_pools):
    """Every kind of both edges; between them are floats."""
    edges = itertools.product(("low", "float"), ("high", "float"))
    return [(first, *["float"] * (sub_pools - 2), last) for first, last in edges]


def geometry_of(arena, units, ends):
    return Geometry(arena, tuple(units), tuple(ends), (False,) * len(units), max(1, arena))


def ends_reached(arena, unit, end, count, reached):
    """Granules at which a band of so many units can end, above one of the granules `reached`."""
    if not count:
        return reached
    last = arena // unit - count
    starts = {"low": [0], "high": [last], "float": range(last + 1)}[end]
    found = 0
    for start in starts:
        if 0 <= start <= last and reached & ((1 << start * unit + 1) - 1):
            found |= 1 << (start + count) * unit
    return found


def counts_and_answers(arena, units, ends):
    """(counts, does a placement exist) for all counts up to one unit beyond what places allow."""

    def place(index, reached, chosen):
        if index == len(units):
            yield chosen, bool(reached)
            return
        for count in range(arena // units[index] + 2):
            found = ends_reached(arena, units[index], ends[index], count, reached)
            yield from place(index + 1, found, (*chosen, count))
            if not found:
                break

    return place(0, 1, ())


def live_layouts(arena, units):
    """Every choice of live units with the bands in order and apart, as one set a band."""

    def place(index, position):
        if index == len(units):
            yield ()
            return
        unit = units[index]
        first = -(-position // unit)
        for chosen in range(1 << max(0, arena // unit - first)):
            addresses = chosen << first
            end = addresses.bit_length() * unit if chosen else position
            for rest in place(index + 1, end):
                yield (addresses, *rest)

    return list(place(0, 0))


def greatest_demands(arena, units, ends, counts):
    """What can be asked for beside `counts` such that one unit more of anything is too much, and
    single units; by trying.
    """

    def packs(demand):
        reached = 1
        for unit, end, held, more in zip(units, ends, counts, demand, strict=True):
            reached = ends_reached(arena, unit, end, held + more, reached)
        return bool(reached)

    spaces = [range(arena // unit - held + 1) for unit, held in zip(units, counts, strict=True)]
    feasible = {demand for demand in itertools.product(*spaces) if packs(demand)}
    ones = [tuple(int(i == j) for j in range(len(units))) for i in range(len(units))]
    return [
        demand
        for demand in feasible
        if demand in ones
        or not any(
            tuple(a + b for a, b in zip(demand, one, strict=True)) in feasible for one in ones
        )
    ]


def least_moved_of_all(arena, units, ends, layouts, counts):
    """Fewest granules of live units outside their intervals, over all disjoint intervals.

    Args:
      layouts: int64[cases, bands] sets of live units; counts: int64[cases, bands] units to hold.
    Returns:
      int64[cases], NEVER where no intervals exist.
    """
    best = [np.zeros(len(layouts), np.int64)] * (arena + 1)  # by granule where the bands end
    for index, (unit, end) in enumerate(zip(units, ends, strict=True)):
        held, wanted, top = layouts[:, index], counts[:, index], arena // unit
        found = [np.full(len(layouts), NEVER)] * (arena + 1)
        for lo in [0] if end == "low" else range(top + 1):
            for hi in [top] if end == "high" else range(lo + 1, top + 1):
                outside = ~(((1 << hi) - 1) & ~((1 << lo) - 1))
                cost = best[lo * unit] + unit * np.bitwise_count(held & outside)
                cost[wanted > hi - lo] = NEVER
                found[hi * unit] = np.minimum(found[hi * unit], cost)
        found = np.minimum.accumulate(np.stack(found))
        best = list(np.where(wanted == 0, np.stack(best), found))
    return best[arena]


class Bench:
    """One real `Layout` that is put into state after state."""

    def __init__(self, geometry):
        self.geometry = geometry
        self.layout = Layout(geometry)
        self.known = [{} for _ in geometry.ends]

    def put(self, sets):
        """Makes exactly these units live; each band covers from its first to its last."""
        self.layout.ledger._vacated.clear()
        for index, (band, held) in enumerate(zip(self.layout.bands, sets, strict=True)):
            if held not in self.known[index]:
                self.known[index][held] = self._state(index, held)
            states, band.lo, band.hi, holes = self.known[index][held]
            self.layout.ledger.states[index][:] = states
            band.hole_count = 0
            band.push(holes)

    def _state(self, index, held):
        top, end = self.geometry.unit_counts[index], self.geometry.ends[index]
        live = [address for address in range(top) if held >> address & 1]
        lo = 0 if end == "low" or not live else live[0]
        hi = top if end == "high" else live[-1] + 1 if live else 0
        lo = hi if not live and end == "high" else lo
        states = np.full(top, BEYOND, np.uint8)
        states[lo:hi] = HOLE
        states[live] = LIVE
        return states, lo, hi, np.flatnonzero(states == HOLE)

    def meet(self, sets, demand):
        """Makes room beside `sets`, checks what came of it, and returns the granules moved."""
        self.put(sets)
        try:
            batches = self.layout.make_room(demand)
        except OutOfMemory as error:
            raise AssertionError(f"fits, yet refused: {error}") from error
        sets, moved = list(sets), 0
        bytes_of = [self.granules(index, held) for index, held in enumerate(sets)]
        for batch in batches:
            index, sources, destinations = batch.sub_pool, 0, 0
            for source, destination in zip(
                batch.sources.tolist(), batch.destinations.tolist(), strict=True
            ):
                sources |= 1 << source
                destinations |= 1 << destination
            assert sources & sets[index] == sources, "a unit moves that is not live"
            assert sources.bit_count() == destinations.bit_count() == len(batch.sources)
            landing = self.granules(index, destinations)
            assert not any(landing & held for held in bytes_of), "a move overwrites live bytes"
            sets[index] = sets[index] & ~sources | destinations
            bytes_of[index] = self.granules(index, sets[index])
            moved += len(batch.sources) * self.geometry.unit_granules[index]
        self._look(sets, demand)
        return moved

    def granules(self, index, held):
        """The granules of a set of units."""
        unit = self.geometry.unit_granules[index]
        if unit == 1:
            return held
        found, one = 0, (1 << unit) - 1
        while held:
            low = held & -held
            found |= one << (low.bit_length() - 1) * unit
            held ^= low
        return found

    def _look(self, sets, demand):
        """L4 to L6 of the new state, and that the room is there."""
        position = 0
        for index, (band, held) in enumerate(zip(self.layout.bands, sets, strict=True)):
            states = self.layout.ledger.states[index]
            found = int.from_bytes(
                np.packbits(states == LIVE, bitorder="little").tobytes(), "little"
            )
            assert found == held, "the states are not what the moves made"
            assert band.hole_count >= demand[index], "no room was made"
            assert band.hi - band.lo == band.hole_count + held.bit_count()
            if band.lo < band.hi:
                assert band.lo * band.unit >= position, "bands overlap"
                position = band.hi * band.unit
                assert band.lo == 0 or band.end != "low"
                assert band.hi == band.top or band.end != "high"
        assert position <= self.geometry.arena_granules
