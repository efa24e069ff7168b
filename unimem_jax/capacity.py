"""What is held and promised, and the one question about it: `fits`.

What it is: two counts per sub-pool, and what has been done so far in numbers. What it does not do:
its answers know no id, no address and no hole; they depend on nothing but what was asked before.

    held == live + committed        live: ids hold it        committed: promised, not yet granted
"""

from collections.abc import Sequence
from operator import index as as_int
from typing import Any, NoReturn

from unimem_jax.bands import Geometry
from unimem_jax.errors import NeverFits, OutOfMemory, UsageError
from unimem_jax.layout import Layout
from unimem_jax.plan import GRANULE_BYTES

REASONS = ("bytes", "ids", "pins", "never")  # why a demand was refused


class Capacity:
    """Counts of all sub-pools over one layout.

    Attributes:
      held: per sub-pool live + committed units. Read only, and not a capacity: ask `fits`.
      committed: per sub-pool units promised and not yet granted. Read only.
      refusals: how often a demand was refused, by reason.
      high_water, freed_units, moved_units, copied_units: per sub-pool, since the start.
    """

    def __init__(self, geometry: Geometry, layout: Layout):
        self.geometry = geometry
        self.layout = layout
        self.held = [0] * len(geometry.ends)
        self.committed = [0] * len(geometry.ends)
        self.refusals = dict.fromkeys(REASONS, 0)
        self.high_water = [0] * len(geometry.ends)
        self.freed_units = [0] * len(geometry.ends)
        self.moved_units = [0] * len(geometry.ends)
        self.copied_units = [0] * len(geometry.ends)
        self.batch_count = 0

    def live(self, sub_pool: int) -> int:
        """Units of a sub-pool that ids hold."""
        return self.held[sub_pool] - self.committed[sub_pool]

    def fits(self, demand: Sequence[int]) -> bool:
        """Whether `demand[i]` more units of every sub-pool can be held: the only capacity question.

        Raises:
          UsageError: a negative count, or not one per sub-pool.
        Cost: O(sub-pools) integer operations, under a microsecond for three.
        """
        try:
            if len(demand) != len(self.held) or min(demand) < 0:
                self._refuse(demand)
            return self.layout.fits(self.held, demand)
        except TypeError:
            self._refuse(demand)

    def commit(self, demand: Sequence[int]) -> None:
        """Promises units: they count in `fits` from now on. No address is touched.

        Raises:
          OutOfMemory: the demand does not fit now; NeverFits: not even into an empty arena.
          UsageError: not one int of at least 0 per sub-pool.
        """
        counts = self._counts(demand)
        self._require(counts)
        for index, count in enumerate(counts):
            self.committed[index] += count
            self.held[index] += count

    def uncommit(self, demand: Sequence[int]) -> None:
        """Takes back a promise.

        Raises:
          UsageError: more than is committed, or not one int of at least 0 per sub-pool.
        """
        counts = self._counts(demand)
        self._require_committed(counts)
        for index, count in enumerate(counts):
            self.committed[index] -= count
            self.held[index] -= count

    def _counts(self, demand: Sequence[int]) -> tuple[int, ...]:
        """A demand as plain ints, whichever integers it came in."""
        try:
            counts = tuple(map(as_int, demand))
        except TypeError:
            self._refuse(demand)
        if len(counts) != len(self.held) or min(counts) < 0:
            self._refuse(demand)
        return counts

    def _refuse(self, demand: object) -> NoReturn:
        raise UsageError(f"a demand is one non-negative int per sub-pool, not {demand!r}")

    def _require(self, demand: Sequence[int]) -> None:
        if self.layout.fits(self.held, demand):
            return
        if self.layout.fits(demand):
            self.refusals["bytes"] += 1
            raise OutOfMemory(
                f"{tuple(demand)} more units do not fit beside {tuple(self.held)} held"
            )
        self.refusals["never"] += 1
        units = self.geometry.unit_granules
        needs = " + ".join(
            f"{count} * {unit * GRANULE_BYTES:,}"
            for count, unit in zip(demand, units, strict=True)
            if count
        )
        raise NeverFits(
            f"can never fit: {tuple(demand)} units need {needs} bytes in order on their grids; "
            f"the arena has {self.geometry.arena_granules * GRANULE_BYTES:,} bytes"
        )

    def _require_committed(self, demand: Sequence[int]) -> None:
        if any(count > most for count, most in zip(demand, self.committed, strict=True)):
            raise UsageError(
                f"{tuple(demand)} units exceed {tuple(self.committed)} committed; commit them first"
            )

    def metrics(self) -> dict[str, Any]:
        """Plain numbers: lists have one entry per sub-pool, `refusals` one per reason.

        `moved_per_freed` is what room costs: bytes moved for each byte that was freed.

        Cost: O(sub-pools + pins).
        """
        ledger, pools = self.layout.ledger, range(len(self.held))
        moved, freed = self._bytes(self.moved_units), self._bytes(self.freed_units)
        return {
            "live": [self.live(index) for index in pools],
            "committed": list(self.committed),
            "holes": [band.hole_count for band in self.layout.bands],
            "pinned": [len(pins) for pins in ledger.pins],
            "pending": [ledger.pending_count(index) for index in pools],
            "high_water": list(self.high_water),
            "moved_units": list(self.moved_units),
            "moved_bytes": moved,
            "copied_bytes": self._bytes(self.copied_units),
            "move_batches": self.batch_count,
            "freed_bytes": freed,
            "moved_per_freed": moved / freed if freed else 0.0,
            "refusals": dict(self.refusals),
        }

    def _bytes(self, units: Sequence[int]) -> int:
        pairs = zip(units, self.geometry.unit_granules, strict=True)
        return sum(count * granules for count, granules in pairs) * GRANULE_BYTES
