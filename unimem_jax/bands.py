"""Where bands may lie: the closed form of capacity, and the choice of intervals for moves.

What it is: pure functions of integers. A band is the stretch of the arena that a sub-pool occupies.
Bands keep the physical order of their sub-pools; the low end is anchored at granule 0, the high end
at the top page of its own grid, floats lie anywhere between. What it does not do: it knows no ids,
holds no state and moves no byte.

    0                                                                    arena_granules
    | low end -->      | <-- float --> |      | <-- float --> |      <-- high end |  |
                                                                     grid of the high end stops here

Invariants of every choice of targets:
  B1  targets are disjoint, in physical order and inside the arena; an empty band takes no space and
      is not rounded;
  B2  a target holds at least as many units as its band is to hold;
  B3  a pinned unit lies inside its band's target;
  B4  without pins a choice exists exactly when `fits` says yes;
  B5  batches run in `batch_order` never write over a unit that has yet to move.

Why `fits` is exact (B4): packing every band down against the one below is the layout with the
smallest end of each prefix of bands, because rounding up to a grid is monotone; so the high end
fits above it or above nothing. A choice reaches that layout because the last candidate of each band
is its packed form.

Why one batch per band suffices (B5): let a batch move the units of band i that lie outside its
target T_i into free positions inside T_i. If i has units below T_i and above T_i, then T_i lies
inside the stretch that i occupied before and touches nobody. If i has units below T_i only, T_i
lies above the lowest unit of i, so it can only touch units of bands above, and any such unit lies
below its own target; those bands have units on the low side too. So, from the top down, each finds
the bands above already inside their targets. The mirror image holds for bands with units above T_i
only, from the bottom up. Neither kind can touch a band of the other kind that waits: a waiting band
below has all its units under T_i's own old units, a waiting band above has its strays above its
target.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat

import numpy as np

from unimem_jax.errors import UsageError, plain_int

EXACT_CANDIDATES = 32  # up to here every number of moved units is tried; then each is 1/8 larger
INT32_MAX = 2**31 - 1  # what the device counts with; absent is one past the last address
NO_MORE = repeat(0)  # as many zeros as are asked for
FRONTIER_POINTS = 64  # most partial choices kept from band to band

Interval = tuple[int, int]
Targets = list[Interval]
Occupied = Sequence[Sequence[int]]  # per band, ascending addresses
Held = tuple[Sequence[int], Sequence[int]]  # occupied and pinned addresses of one band
Starts = tuple[int, ...]  # per band the lowest address that its interval may have
Point = tuple[int, int, Starts]  # granules moved so far, end granule, starts chosen so far


@dataclass(frozen=True)
class Geometry:
    """What the host memory core knows of a plan; one value per sub-pool, in physical order.

    Attributes:
      arena_granules: size of the arena in granules of 128 bytes.
      unit_granules: granules of one unit of each sub-pool.
      ends: "low" (only the first), "high" (only the last) or "float".
      is_slot: True where a unit is a slot with ids of its own; pages share one space of ids.
      id_count: number of page ids; 0 if there are no page sub-pools.
    Raises:
      UsageError: lengths differ, a size is not positive, or an end stands at the wrong place.
    """

    arena_granules: int
    unit_granules: tuple[int, ...]
    ends: tuple[str, ...]
    is_slot: tuple[bool, ...]
    id_count: int

    def __post_init__(self) -> None:
        columns = self.unit_granules, self.ends, self.is_slot
        if not all(isinstance(column, tuple) for column in columns):
            raise UsageError(f"unit sizes, ends and slot flags are tuples, not {columns}")
        count = len(self.unit_granules)
        if not count or {len(self.ends), len(self.is_slot)} != {count}:
            raise UsageError(
                f"one unit size, end and slot flag per sub-pool are needed, not {columns}"
            )
        plain = partial(plain_int, rule="the arena and every unit need at least one granule")
        object.__setattr__(self, "arena_granules", plain(self.arena_granules))
        object.__setattr__(self, "unit_granules", tuple(map(plain, self.unit_granules)))
        ids = plain_int(self.id_count, "ids are a count of at least 0", 0)
        object.__setattr__(self, "id_count", ids)
        if max(*self.unit_counts, self.id_count) > INT32_MAX:
            raise UsageError("more addresses or ids than fit 32 bits; take larger units")
        if self.id_count < (not all(self.is_slot)):
            raise UsageError(f"page sub-pools need at least one id, not {self.id_count}")
        for index, end in enumerate(self.ends):
            is_place = {"low": index == 0, "high": index == count - 1, "float": True}
            if not is_place.get(end, False):
                raise UsageError(f"sub-pool {index} of {count} cannot be the {end!r} end")

    @cached_property
    def unit_counts(self) -> tuple[int, ...]:
        """Addresses of sub-pool i go from 0 to unit_counts[i] - 1; unit_counts[i] means absent."""
        return tuple(self.arena_granules // unit for unit in self.unit_granules)

    @cached_property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Per sub-pool (unit_granules, pages of the grid of a high end or 0), for `fits`."""
        parts = zip(self.unit_granules, self.unit_counts, self.ends, strict=True)
        return tuple((unit, count if end == "high" else 0) for unit, count, end in parts)

    @cached_property
    def id_counts(self) -> tuple[int, ...]:
        """Number of ids of each sub-pool: of its pages, or one per possible slot."""
        slots = zip(self.is_slot, self.unit_counts, strict=True)
        return tuple(count if is_slot else self.id_count for is_slot, count in slots)


@dataclass(frozen=True, slots=True)
class Split:
    """A layout of fixed shares, one per sub-pool, for comparison: never moves, never lends.

    Attributes:
      caps: units of each sub-pool; shares lie in physical order from granule 0.
    """

    caps: tuple[int, ...]


def fits(geometry: Geometry, counts: Sequence[int]) -> bool:
    """Whether `counts[i]` units of every sub-pool i can lie in the arena at once: the closed form.

    Raises:
      UsageError: a count is negative, or there is not one per sub-pool.
    Cost: O(sub-pools) integer operations; depends on nothing but the counts.
    """
    return packed_fits(geometry, _counts(geometry, counts))


def packed_fits(geometry: Geometry, counts: Sequence[int], more: Iterable[int] = NO_MORE) -> bool:
    """`fits` of the sums of `counts` and `more`, without its checks, for the hot path."""
    position = 0
    # Callers have checked the lengths.
    for (unit, top), first, second in zip(geometry.grids, counts, more):  # noqa: B905
        count = first + second
        if count:
            if top:
                return position <= (top - count) * unit
            position = (-(-position // unit) + count) * unit
    return position <= geometry.arena_granules


def choose_targets(
    geometry: Geometry,
    occupied: Occupied,
    pinned: Occupied,
    counts: Sequence[int],
) -> Targets | None:
    """Intervals for all bands with the fewest granules of units outside them, or None if pins
    forbid any.

    Args:
      occupied: per band the ascending addresses that hold something (memoryviews and lists are
        fastest).
      pinned: per band the ascending occupied addresses that must stay.
      counts: per band how many units its interval must hold, at least the occupied ones.
    Returns:
      Per band `(lo, hi)` in its own addresses; `lo == hi` for a band that holds nothing.
    Cost: small when few units must move: the search widens its budget of moved granules from a few
      units up.
    Source: shortest path over the bands, low to high, on the Pareto frontier of (granules moved,
      end granule).
    """
    budget = 4 * max(geometry.unit_granules)
    everything = sum(len(o) * u for o, u in zip(occupied, geometry.unit_granules, strict=True))
    while True:
        chosen = _walk(geometry, occupied, pinned, counts, budget)
        if chosen is not None:
            return _settle(geometry, occupied, counts, chosen)
        if budget >= everything:
            return None
        budget *= 8


def shares_of(geometry: Geometry, caps: Sequence[int]) -> Targets:
    """The fixed interval of every sub-pool, in physical order from granule 0.

    Raises:
      UsageError: not one non-negative cap per sub-pool, or shares beyond the arena.
    """
    shares = []
    position = 0
    for unit, cap in zip(geometry.unit_granules, _counts(geometry, caps), strict=True):
        start = -(-position // unit)
        shares.append((start, start + cap))
        position = (start + cap) * unit if cap else position
    if position > geometry.arena_granules:
        raise UsageError(
            f"shares of {caps} units need {position} granules; there are {geometry.arena_granules}"
        )
    return shares


def _counts(geometry: Geometry, counts: Sequence[int]) -> tuple[int, ...]:
    """Plain ints. Raises UsageError unless there is one of at least 0 per sub-pool."""
    rule = "counts are one int of at least 0 per sub-pool"
    try:
        found = tuple(counts)
    except TypeError:
        found = ()
    if len(found) != len(geometry.ends):
        raise UsageError(f"{rule} ({len(geometry.ends)}), not {counts!r}")
    return tuple(plain_int(count, rule, 0) for count in found)


def squeezed(
    occupied: np.ndarray, pinned: Sequence[int], bounds: Interval, end: str, most: int
) -> tuple[Interval, Interval]:
    """A smaller interval for one band, with at most `most` of its units outside it.

    The band draws in towards its end of the arena; a float towards the stretch where it needs the
    fewest moves in all. Outermost units go first.

    Args:
      occupied: ascending addresses.
      pinned: those of them that stay, and so does what lies behind them.
      bounds: what the band covers; all occupied addresses lie in it.
    Returns:
      The interval, inside `bounds` and with room for all units; and the stretch of it that moved
      units land in, so that none has to move again.
    """
    count, (lo, hi) = len(occupied), bounds
    dense = lo if end == "low" else hi - count
    if end == "float" and count:
        beneath = np.zeros(hi - lo + 1, np.int64)  # occupied addresses under each of the band's
        beneath[occupied - lo + 1] = 1
        np.cumsum(beneath, out=beneath)
        first, last = lo, dense
        if len(pinned):  # a stretch that holds them, if one can
            first, last = max(first, pinned[-1] + 1 - count), min(last, pinned[0])
        starts = np.clip(occupied, min(first, last), last) - lo
        inside = beneath[starts + count] - beneath[starts]
        dense = int(starts[inside.argmax()]) + lo
    first, last = np.searchsorted(occupied, (dense, dense + count)).tolist()
    below, above = first, count - last
    if len(pinned):
        nearest = np.searchsorted(occupied, (pinned[0], pinned[-1])).tolist()
        below, above = min(below, nearest[0]), min(above, count - 1 - nearest[1])
    below = min(below, most)
    above = min(above, most - below)
    lo = dense if below == first else int(occupied[below])
    hi = dense + count if above == count - last else int(occupied[count - 1 - above]) + 1
    return (lo, hi), (dense, dense + count)


def batch_order(sides: Sequence[tuple[bool, bool]]) -> list[int]:
    """The order in which bands run their batches, see B5.

    Args:
      sides: per band (has units below its target, has units above its target).
    Returns:
      Indices of the bands that have anything to move, first to run first.
    """
    rising = [i for i, (below, _) in enumerate(sides) if below]
    sinking = [i for i, (below, above) in enumerate(sides) if above and not below]
    return rising[::-1] + sinking


def _walk(
    geometry: Geometry, occupied: Occupied, pinned: Occupied, counts: Sequence[int], budget: int
) -> Starts | None:
    """Per band the lowest address of its interval, cheapest within the budget; or None."""
    points: list[Point] = [(0, 0, ())]
    for index, count in enumerate(counts):
        if not count:
            points = [(cost, end, (*los, 0)) for cost, end, los in points]
            continue
        unit = geometry.unit_granules[index]
        limit = geometry.arena_granules // unit
        expand = _high_candidates if geometry.ends[index] == "high" else _candidates
        held = occupied[index], pinned[index]
        reached = []
        for cost, end, los in points:
            lo = -(-end // unit)
            if lo + count > limit or (len(held[1]) and held[1][0] < lo):
                continue
            for moved, hi in expand(held, (lo, limit), count, (budget - cost) // unit):
                reached.append((cost + moved * unit, hi * unit, (*los, lo)))
        points = _pareto(reached)
        if not points:
            return None
    return points[0][2]


def _candidates(held: Held, bounds: Interval, count: int, most: int) -> Iterator[tuple[int, int]]:
    """(units moved, upper edge) of intervals from bounds[0] up; fewest moved first, packed last."""
    occupied, pinned = held
    below = bisect_left(occupied, bounds[0])
    edge = bounds[0] + count
    if len(pinned):
        edge = max(edge, pinned[-1] + 1)
    strays = len(occupied) - bisect_left(occupied, edge)  # they must move for it to end at `edge`
    above = 0
    while below + above <= most:
        if above >= strays:
            yield below + strays, edge
            return
        yield below + above, occupied[len(occupied) - 1 - above] + 1
        above = min(strays, above + (1 if above < EXACT_CANDIDATES else above // 8))


def _high_candidates(held: Held, bounds: Interval, _: int, most: int) -> Iterator[tuple[int, int]]:
    """The only interval of a high end that is worth trying: all that the bands below leave."""
    below = bisect_left(held[0], bounds[0])
    if below <= most:
        yield below, bounds[1]


def _pareto(points: list[Point]) -> list[Point]:
    """The points that none beats in both cost and end, cheapest first.

    Thinned where there are many; the shortest end, the packed layout, is always kept.
    """
    points.sort(key=lambda point: point[:2])
    kept: list[Point] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    if len(kept) <= FRONTIER_POINTS:
        return kept
    step = (len(kept) - 1) / (FRONTIER_POINTS - 1)
    return [kept[round(step * rank)] for rank in range(FRONTIER_POINTS)]


def _settle(geometry: Geometry, occupied: Occupied, counts: Sequence[int], los: Starts) -> Targets:
    """Intervals as tight as the choice allows, in the slack that it leaves between the bands.

    The thinned search leaves slack; using it up here, no band moves more than its neighbours force
    it to.
    """
    starts = _latest_starts(geometry, occupied, counts, los)
    targets = []
    end = 0
    for index, count in enumerate(counts):
        if not count:
            targets.append((0, 0))
            continue
        unit, held = geometry.unit_granules[index], occupied[index]
        floor, ceiling = -(-end // unit), starts[index + 1] // unit
        first, last = bisect_left(held, floor), bisect_left(held, ceiling)
        kept = (held[first], held[last - 1] + 1) if first < last else None
        lo, hi = _tight(geometry.ends[index], (floor, ceiling), kept, count)
        targets.append((lo, hi))
        end = hi * unit
    return targets


def _latest_starts(
    geometry: Geometry, occupied: Occupied, counts: Sequence[int], los: Starts
) -> list[int]:
    """First granule that each band (and whatever lies above it) needs if it keeps its low units."""
    starts = [geometry.arena_granules] * (len(counts) + 1)
    for index in reversed(range(len(counts))):
        unit, held = geometry.unit_granules[index], occupied[index]
        starts[index] = starts[index + 1]
        if counts[index]:
            latest = starts[index + 1] // unit - counts[index]
            first = bisect_left(held, los[index])
            starts[index] = min([latest, *held[first : first + 1]]) * unit
    return starts


def _tight(end: str, bounds: Interval, kept: Interval | None, count: int) -> Interval:
    """The smallest interval for `count` units around those kept, grown toward the wider side."""
    floor, ceiling = bounds
    if end == "low":
        return 0, max(count, kept[1] if kept else 0)
    if end == "high":
        return min(ceiling - count, kept[0] if kept else ceiling), ceiling
    if kept is None:
        lo = floor + (ceiling - floor - count) // 2
        return lo, lo + count
    lo, hi = kept
    lack = max(0, count - (hi - lo))
    up = min(lack, ceiling - hi) if ceiling - hi >= lo - floor else max(0, lack - (lo - floor))
    return lo - (lack - up), hi + up
