"""Which units are free, where each band lies, and how room is made: the physical allocator.

What it is: the holes and the frontier of every band, over one ledger. What it does not do: it knows
no ids, no sharers and no commitments; its caller redirects the mappings of moved units.

    [lo, hi)   a band in addresses of its own grid; each address inside is occupied or a hole
    holes      a stack of all holes of the band, the next one to hand out last

Room is made by the first rung that suffices: holes; growth into the gaps between bands; the same
after every band has let go of the holes at its edges; moves (`bands.choose_targets`). The first two
cost nothing per unit of the pool, the others one pass over the bands in NumPy.

Invariants (checked by `check`):
  L4  bands are disjoint in granules, in order and inside the arena (split: inside their own share
      of it);
  L5  occupied units and holes fill each band exactly, and lie nowhere else;
  L6  the stack of a band names each of its holes once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from unimem_jax.bands import (
    NO_MORE,
    Geometry,
    Interval,
    Split,
    Targets,
    batch_order,
    choose_targets,
    packed_fits,
    shares_of,
    squeezed,
)
from unimem_jax.errors import InvariantError, OutOfMemory, UsageError
from unimem_jax.ledger import (
    BEYOND,
    FENCED,
    GRANT,
    GROW,
    HOLE,
    LIVE,
    PENDING,
    TRIM,
    VACATED,
    Ledger,
    trimmed_end,
    trimmed_start,
)

GROWTH_UNITS = 64  # most units a band takes ahead of need, and at most 1/8 of its gap
UNIFIED = "unified"


@dataclass(frozen=True, slots=True)
class Batch:
    """Units of one sub-pool to copy at once; sources and destinations are disjoint.

    Attributes:
      sources, destinations: int64 addresses of equal length.
    """

    sub_pool: int
    sources: np.ndarray
    destinations: np.ndarray

    def parts(self, most: int) -> "list[Batch]":
        """The same in batches of at most so many units."""
        return [
            Batch(self.sub_pool, self.sources[at : at + most], self.destinations[at : at + most])
            for at in range(0, len(self.sources), most)
        ]


class Band:
    """Frontier and stack of holes of one sub-pool."""

    __slots__ = ("end", "hi", "hole_count", "hole_view", "holes", "lo", "top", "unit")

    def __init__(self, unit: int, top: int, end: str):
        self.unit = unit
        self.top = top
        self.end = end
        self.lo = self.hi = top if end == "high" else 0
        self.holes = np.empty(top, np.int64)
        self.hole_view = memoryview(self.holes)
        self.hole_count = 0

    def push(self, addresses: np.ndarray) -> None:
        """Adds holes; the last one is the next to be handed out."""
        self.holes[self.hole_count : self.hole_count + len(addresses)] = addresses
        self.hole_count += len(addresses)


class Layout:
    """Hands out and takes back addresses of all bands. What raises changes nothing."""

    def __init__(self, geometry: Geometry, layout: str | Split = UNIFIED):
        if not isinstance(geometry, Geometry):
            raise UsageError(f"a layout is of a Geometry, not {geometry!r}")
        self.geometry = geometry
        self.ledger = Ledger(geometry)
        parts = zip(geometry.unit_granules, geometry.unit_counts, geometry.ends, strict=True)
        self.bands = [Band(unit, top, end) for unit, top, end in parts]
        self.shares: Targets | None = None
        self.caps: tuple[int, ...] = ()
        if isinstance(layout, Split):
            self.shares = shares_of(geometry, layout.caps)
            self.caps = tuple(hi - lo for lo, hi in self.shares)
            for band, (lo, _) in zip(self.bands, self.shares, strict=True):
                band.end, band.lo, band.hi = "low", lo, lo
        elif layout != UNIFIED:
            raise UsageError(f"layout must be UNIFIED or Split(caps), not {layout!r}")

    def fits(self, counts: Sequence[int], more: Iterable[int] = NO_MORE) -> bool:
        """Whether `counts[i] + more[i]` units of each sub-pool i can be held at once.

        Cost: O(sub-pools).
        """
        if self.shares is None:
            return packed_fits(self.geometry, counts, more)
        return all(
            first + second <= cap
            for first, second, cap in zip(counts, more, self.caps)  # noqa: B905 (more has no end)
        )

    def take(self, sub_pool: int, count: int) -> np.ndarray:
        """Makes that many holes live; `make_room` came before. Returns int64 addresses."""
        band = self.bands[sub_pool]
        left = band.hole_count - count
        addresses = band.holes[left : band.hole_count].copy()
        self.ledger.apply(sub_pool, addresses, GRANT)
        band.hole_count = left
        return addresses

    def take_one(self, sub_pool: int) -> int:
        """`take` for one unit."""
        band = self.bands[sub_pool]
        left = band.hole_count - 1
        address = band.hole_view[left]
        self.ledger.apply(sub_pool, address, GRANT)
        band.hole_count = left
        return address

    def give(self, sub_pool: int, addresses: np.ndarray) -> None:
        """Frees live units; those under a pin become holes when the last pin ends."""
        self.bands[sub_pool].push(self.ledger.free(sub_pool, addresses))

    def give_one(self, sub_pool: int, address: int) -> None:
        """`give` for one unit."""
        if self.ledger.free_one(sub_pool, address):
            band = self.bands[sub_pool]
            band.hole_view[band.hole_count] = address
            band.hole_count += 1

    def unpin(self, sub_pool: int, address: int, user: object) -> None:
        """Ends a pin; see `Ledger.unpin`."""
        if self.ledger.unpin(sub_pool, address, user):
            self.bands[sub_pool].push(np.array([address]))

    def make_room(self, demand: Sequence[int]) -> list[Batch]:
        """Sees to it that every band has at least `demand[i]` holes.

        Returns:
          Batches to run in this order before the step that uses the holes; mostly none.
        Raises:
          OutOfMemory: pins are in the way; names them. The caller has asked `fits` before.
        Cost: O(1) per unit on the first three rungs; O(units in the bands) in NumPy when units
          move.
        """
        if self._grow(demand):
            return []
        self._trim()
        if self._grow(demand):
            return []
        return self._rearrange(demand)

    def _grow(self, demand: Sequence[int]) -> bool:
        """Opens the missing holes in the gaps between bands, for all bands or for none."""
        edges = [(band.lo, band.hi) for band in self.bands]
        for index, (band, count) in enumerate(zip(self.bands, demand, strict=True)):
            lack = count - band.hole_count
            if lack > 0:
                grown = self._grown(index, lack, edges)
                if grown is None:
                    return False
                edges[index] = grown
        for index, (band, (lo, hi)) in enumerate(zip(self.bands, edges, strict=True)):
            if (lo, hi) == (band.lo, band.hi):
                continue
            if band.lo == band.hi:
                band.lo = band.hi = lo if band.end != "high" else hi
            self._open(index, lo, hi)
        return True

    def _grown(self, index: int, lack: int, edges: Targets) -> Interval | None:
        """Edges of a band grown by at least `lack` units into its gaps; None if they do not fit."""
        floor, ceiling = self._bounds(index, edges)
        end = self.bands[index].end
        lo, hi = edges[index]
        if lo == hi:
            lo = hi = {"low": floor, "high": ceiling}.get(end, (floor + ceiling) // 2)
        down = 0 if end == "low" else lo - floor
        up = 0 if end == "high" else ceiling - hi
        if up + down < lack:
            return None
        wanted = max(lack, min(GROWTH_UNITS, (up + down) // 8))
        # What is left of the two gaps is as equal as it can be, so that either neighbour may grow.
        rise = min(wanted, max(0, (wanted + up - down) // 2))
        return lo - (wanted - rise), hi + rise

    def _bounds(self, index: int, edges: Targets) -> Interval:
        """The addresses that a band may cover while its neighbours stay."""
        if self.shares is not None:
            return self.shares[index]
        granules = self.geometry.unit_granules
        below = [
            hi * unit for (lo, hi), unit in zip(edges[:index], granules, strict=False) if hi > lo
        ]
        above = [
            lo * unit
            for (lo, hi), unit in zip(edges[index + 1 :], granules[index + 1 :], strict=True)
            if hi > lo
        ]
        floor = -(-below[-1] // granules[index]) if below else 0
        ceiling = (above[0] if above else self.geometry.arena_granules) // granules[index]
        return floor, ceiling

    def _open(self, index: int, lo: int, hi: int) -> None:
        """Grows a band to [lo, hi), a superset of what it covers; the units nearest to it are
        handed out first.
        """
        band = self.bands[index]
        for start, stop, step in ((lo, band.lo, 1), (band.hi, hi, -1)):
            if start < stop:
                self.ledger.apply(index, slice(start, stop), GROW)
                band.push(np.arange(start, stop)[::step])
        band.lo, band.hi = lo, hi

    def _hull(self, index: int) -> Interval:
        """What a band covers without the holes at its edges. Cost: O(those holes)."""
        band, view = self.bands[index], memoryview(self.ledger.states[index])
        hi = band.hi if band.end == "high" else trimmed_end(view, band.lo, band.hi)
        lo = band.lo if band.end == "low" else trimmed_start(view, band.lo, hi)
        return lo, hi

    def _trim(self) -> None:
        """Lets every band go of the holes at its edges."""
        for index, band in enumerate(self.bands):
            lo, hi = self._hull(index)
            if (lo, hi) == (band.lo, band.hi):
                continue
            self.ledger.apply(index, slice(band.lo, lo), TRIM)
            self.ledger.apply(index, slice(hi, band.hi), TRIM)
            holes = band.holes[: band.hole_count]
            holes = holes[(holes >= lo) & (holes < hi)]
            band.lo, band.hi, band.hole_count = lo, hi, 0
            band.push(holes)

    def _rearrange(self, demand: Sequence[int]) -> list[Batch]:
        states = self.ledger.states
        occupied = [
            _places(states[index][band.lo : band.hi] != HOLE, band.lo)
            for index, band in enumerate(self.bands)
        ]
        counts = [len(held) + count for held, count in zip(occupied, demand, strict=True)]
        pinned = [sorted(pins) for pins in self.ledger.pins]
        targets = None
        if self.shares is None:
            views = [memoryview(held) for held in occupied]
            targets = choose_targets(self.geometry, views, pinned, counts)
        if targets is None:
            raise OutOfMemory(
                f"the demand {tuple(demand)} waits for pins on {self._blocking(demand)}"
            )
        moves = [
            self._shift(index, target, occupied[index], target)
            for index, target in enumerate(targets)
        ]
        order = batch_order([sides for _, sides in moves])
        return [moves[index][0] for index in order]

    def compact(self, granules: int) -> list[Batch]:
        """Moves at most so many granules from the edges of bands into their own holes.

        A band only draws in, so no other has to move first and the answers of `fits` stay what they
        were. Repeated, it leaves no inner hole unless a pin holds an edge.

        Cost: O(holes at the edges); O(units in a band) in NumPy where it has inner holes.
        """
        batches = []
        for index, band in enumerate(self.bands if self.shares is None else ()):
            most = granules // band.unit
            if not most or not self.inner_holes(index):
                continue
            occupied = _places(self.ledger.states[index][band.lo : band.hi] != HOLE, band.lo)
            pinned = sorted(self.ledger.pins[index])
            target, dense = squeezed(occupied, pinned, self._hull(index), band.end, most)
            batch, _ = self._shift(index, target, occupied, dense)
            if len(batch.sources):
                granules -= len(batch.sources) * band.unit
                batches.append(batch)
        return batches

    def inner_holes(self, index: int) -> int:
        """Holes of a band that have a unit on either side, or on the one that is not an end."""
        band = self.bands[index]
        lo, hi = self._hull(index)
        return band.hole_count - (band.hi - hi) - (lo - band.lo)

    def _blocking(self, demand: Sequence[int]) -> str:
        """Names the pins in the way of the layout that would be chosen without any."""
        states = self.ledger.states
        held = [np.flatnonzero((state == LIVE) | (state == FENCED)) for state in states]
        counts = [len(live) + count for live, count in zip(held, demand, strict=True)]
        views = [memoryview(live) for live in held]
        targets = self.shares or choose_targets(self.geometry, views, [()] * len(held), counts)
        names = []
        for index, pins in enumerate(self.ledger.pins):
            lo, hi = targets[index] if targets else (0, 0)
            for address, users in sorted(pins.items()):
                if states[index][address] == PENDING or not lo <= address < hi:
                    names.append(f"unit {address} of sub-pool {index} (used by {users})")
        return ", ".join(names)

    def _shift(
        self, index: int, target: Interval, occupied: np.ndarray, landing: Interval
    ) -> tuple[Batch, tuple[bool, bool]]:
        """Makes a band cover its target; units move into the part `landing` of it. Returns its
        batch and (has units below the target, has units above).
        """
        band = self.bands[index]
        lo, hi = target
        below, above = np.searchsorted(occupied, (lo, hi))
        sources = np.concatenate((occupied[:below], occupied[above:]))
        states = self.ledger.states[index]
        for start, stop in ((lo, min(hi, band.lo)), (max(lo, band.hi), hi)):
            if start < stop:
                self.ledger.apply(index, slice(start, stop), GROW)
        holes = _places(states[lo:hi] == HOLE, lo)
        # Units from above go to the lowest holes and units from below to the highest, away from
        # the neighbour that pushes them.
        first, last = np.searchsorted(holes, landing)
        rank, left = first + len(occupied) - above, last - below
        destinations = np.concatenate((holes[left:last], holes[first:rank]))
        self.ledger.move(index, sources, destinations)
        for start, stop in ((band.lo, min(band.hi, lo)), (max(band.lo, hi), band.hi)):
            if start < stop:
                self.ledger.apply(index, _places(states[start:stop] == HOLE, start), TRIM)
        band.lo, band.hi, band.hole_count = lo, hi, 0
        if lo == hi:
            band.lo = band.hi = band.top if band.end == "high" else 0
        holes = np.concatenate((holes[:first], holes[rank:left], holes[last:]))
        band.push(holes[::-1] if band.end == "low" else holes)
        return Batch(index, sources, destinations), (bool(below), bool(len(occupied) > above))

    def check_counts(self, live: Sequence[int]) -> None:
        """Verifies L5 by the numbers of units alone. Cost: O(sub-pools + pins)."""
        for index, (band, count) in enumerate(zip(self.bands, live, strict=True)):
            known = count + band.hole_count + self.ledger.pending_count(index)
            if band.hi - band.lo != known:
                raise InvariantError(f"L5: band {index} covers other than its {known} units")

    def check(self) -> None:
        """Verifies L1 to L6 from scratch. Raises InvariantError naming the first that fails. Cost:
        O(units).
        """
        self.ledger.check()
        end = 0
        for index, band in enumerate(self.bands):
            lo, hi = band.lo, band.hi
            if lo < hi:
                share = self.shares[index] if self.shares else (0, band.top)
                is_anchored = (band.end != "low" or lo == share[0]) and (
                    band.end != "high" or hi == band.top
                )
                is_inside = lo * band.unit >= end and share[0] <= lo and hi <= share[1]
                if not (is_anchored and is_inside):
                    raise InvariantError(f"L4: band {index} covers [{lo}, {hi}) outside its place")
                end = hi * band.unit
            states = self.ledger.states[index]
            is_outside = (states == BEYOND) | (states == VACATED)
            if is_outside[lo:hi].any() or not (is_outside[:lo].all() and is_outside[hi:].all()):
                raise InvariantError(f"L5: band {index} and the states of its units disagree")
            if not np.array_equal(
                np.sort(band.holes[: band.hole_count]), np.flatnonzero(states == HOLE)
            ):
                raise InvariantError(f"L6: the stack of band {index} is not the set of its holes")


def _places(is_wanted: np.ndarray, start: int) -> np.ndarray:
    """The addresses from `start` on for which the flag is set."""
    found = np.flatnonzero(is_wanted)
    found += start
    return found
