"""Ids, mappings, sharers and commitments: the logical half of the allocator.

What it is: the one owner of "which id holds which unit". Requests, prefixes and page tables hold
ids; an id is mapped to one address in each sub-pool that holds something for it, and to absent (one
past the last address) elsewhere. What it does not do: it moves no byte and knows no request, no
step layout and no device.

* An id is a number and its life: one that was freed comes back after 2^31 lives of its number, so
  a holder that uses a stale id is caught. Tables are indexed by `number_of(id)`.
* Page sub-pools share one space of ids; every slot sub-pool has its own.
* Sharers are counted per (id, sub-pool). The last one to drop an id in a sub-pool frees its unit
  there; an id with no unit left anywhere is free. An id dropped in a sub-pool is never mapped there
  again while it lives.
* Capacity is one question, `fits`: held (live + committed) + demand. A grant from a commitment
  always succeeds unless a pin is in the way. Everything is all or nothing, and raises before
  anything changed.

Invariant (checked by `check` with L1 to L9 of the ledger, the layout and the tables):
  L10 held == live + committed in every sub-pool, committed >= 0, and held fits.
"""

from collections.abc import Sequence
from operator import index as as_int

import numpy as np

from unimem_jax.bands import Geometry, Split
from unimem_jax.capacity import Capacity
from unimem_jax.errors import InvariantError, OutOfMemory, UsageError, plain_int, require_counts
from unimem_jax.layout import UNIFIED, Batch, Layout
from unimem_jax.ledger import COPY, FENCED, LIVE
from unimem_jax.plan import GRANULE_BYTES
from unimem_jax.tables import NUMBER, Ids, IdSpace, Table, number_of

__all__ = ["UNIFIED", "Allocator", "Batch", "Split", "number_of"]


class Allocator(Capacity):
    """Grants ids and units of all sub-pools from one arena.

    Attributes:
      mapping: per sub-pool int64[ids], `number_of(id)` -> address or absent. Read only.
      ledger: tickets and pins (`dispatch`, `retire`, `pin`, `fence`, `settled`); unpin through
        `Allocator.unpin`.
    Raises:
      UsageError: the layout is not UNIFIED and not a split that lies in the arena.
    """

    def __init__(self, geometry: Geometry, layout: str | Split = UNIFIED):
        super().__init__(geometry, Layout(geometry, layout))
        self.ledger = self.layout.ledger
        pages = IdSpace(geometry.id_count)
        self.tables = [
            Table(index, IdSpace(units) if is_slot else pages, units)
            for index, (is_slot, units) in enumerate(
                zip(geometry.is_slot, geometry.unit_counts, strict=True)
            )
        ]
        self.pages = pages
        self.page_pools = tuple(i for i, is_slot in enumerate(geometry.is_slot) if not is_slot)
        self.mapping = tuple(table.mapping for table in self.tables)
        self._moves: list[Batch] = []

    def make_room(self, demand: Sequence[int], committed: bool = True) -> None:
        """Decides the layout for a whole step at once, so that the grants that follow move nothing.

        Grants nothing. Several requests first ask here for their sum; holes then serve each.

        Raises:
          OutOfMemory: does not fit (not committed; NeverFits if no empty arena would hold it), or
            waits for pins, which it names.
          UsageError: more than is committed.
        """
        counts = self._counts(demand)
        if committed:
            self._require_committed(counts)
        else:
            self._require(counts)
        self._make_room(counts)

    def _make_room(self, demand: Sequence[int]) -> None:
        for band, count in zip(self.layout.bands, demand):  # noqa: B905
            if band.hole_count < count:
                break
        else:
            return
        try:
            batches = self.layout.make_room(demand)
        except OutOfMemory:
            self.refusals["pins"] += 1
            raise
        self._redirect(batches)

    def compact(self, most_bytes: int) -> int:
        """Pays down fragmentation: moves at most so many bytes into the inner holes of bands.

        For a step with bandwidth to spare. It takes nothing from `fits` and from grants, and what
        it moves now no grant has to move later.

        Returns:
          Bytes that the batches it adds to `take_moves` move; 0 once there is nothing to gain.
        Cost: O(sub-pools) where there are no inner holes; else one pass over such bands in NumPy.
        """
        (most_bytes,) = require_counts(most_bytes=most_bytes)
        before = self._bytes(self.moved_units)
        self._redirect(self.layout.compact(most_bytes // GRANULE_BYTES))
        return self._bytes(self.moved_units) - before

    def _redirect(self, batches: Sequence[Batch]) -> None:
        """Lets ids follow their units."""
        for batch in batches:
            self.tables[batch.sub_pool].move(batch.sources, batch.destinations)
            self.moved_units[batch.sub_pool] += len(batch.sources)
        self.batch_count += len(batches)
        self._moves += batches

    def grant_pages(
        self, count: int, sub_pools: Sequence[int] | None = None, committed: bool = True
    ) -> np.ndarray:
        """Grants new ids, each with one page in every named sub-pool.

        Args:
          sub_pools: page sub-pools that hold something for these ids; all by default. A page of a
            long chunk that is outside the window already leaves the window's sub-pool out.
          committed: whether the units come out of a commitment.
        Returns:
          int64[count] ids.
        Raises:
          OutOfMemory: does not fit (not committed), no id is left, or waits for pins.
          UsageError: a count that is negative or no int, more than is committed, no sub-pool, or
            one that has no pages.
        """
        count = plain_int(count, "a grant is a count of at least 0", least=0)
        pools = self.page_pools if sub_pools is None else self._page_pools(sub_pools)
        self._charge(pools, count, committed, self.pages)
        ids, numbers = self.pages.take(count, len(pools))
        for index in self.page_pools:
            if index in pools:
                self.tables[index].bind(numbers, self.layout.take(index, count))
            else:
                self.tables[index].leave_out(numbers)
        return ids

    def grant_page(self, sub_pools: Sequence[int] | None = None, committed: bool = True) -> int:
        """`grant_pages` for one id."""
        pools = self.page_pools if sub_pools is None else self._page_pools(sub_pools)
        self._charge(pools, 1, committed, self.pages)
        id_ = self.pages.take_one(len(pools))
        number = id_ & NUMBER
        for index in self.page_pools:
            if index in pools:
                self.tables[index].bind_one(number, self.layout.take_one(index))
            else:
                self.tables[index].leave_out_one(number)
        return id_

    def grant_slot(self, sub_pool: int, committed: bool = True) -> int:
        """Grants a slot of a state sub-pool. Returns its id, which is known in that sub-pool only.
        Raises as `grant_pages`.
        """
        table = self._table(sub_pool)
        if not self.geometry.is_slot[sub_pool]:
            raise UsageError(f"sub-pool {sub_pool} holds pages; grant_pages serves it")
        self._charge((sub_pool,), 1, committed, table.ids)
        id_ = table.ids.take_one(1)
        table.bind_one(id_ & NUMBER, self.layout.take_one(sub_pool))
        return id_

    def copy_pages(
        self, ids: Ids, sub_pools: Sequence[int] | None = None, committed: bool = True
    ) -> np.ndarray:
        """Grants new ids with copies of pages: copy-on-write of a shared page, forks.

        The copies are batches of `take_moves`, in order with moves; the originals stay.

        Args:
          sub_pools: those to copy, where every id has a page; all by default.
        Returns:
          int64[ids] new ids, in the order of the originals.
        Raises:
          UsageError: an id has no page there, or a peer is writing it.
          OutOfMemory: as `grant_pages`.
        """
        pools = self.page_pools if sub_pools is None else self._page_pools(sub_pools)
        for index in pools:
            known = self.require_readable(ids, index)
        copies = self.grant_pages(len(known), pools, committed)
        self._copy(known, number_of(copies), pools)
        return copies

    def copy_slot(self, id_: int, sub_pool: int, committed: bool = True) -> int:
        """`copy_pages` for one slot: a checkpoint, or a fork. Returns its id."""
        known = self.require_readable(id_, sub_pool)
        copy = self.grant_slot(sub_pool, committed)
        self._copy(known, np.array([number_of(copy)]), (sub_pool,))
        return copy

    def require_readable(self, ids: Ids, sub_pool: int) -> np.ndarray:
        """Their numbers. Raises UsageError unless each has a unit there that no peer is writing."""
        _, known = self._mapped(ids, sub_pool)
        self.ledger.apply(sub_pool, self.mapping[sub_pool][known], COPY)
        return known

    def _copy(self, known: np.ndarray, copies: np.ndarray, pools: Sequence[int]) -> None:
        for index in pools if len(known) else ():
            batch = Batch(index, self.mapping[index][known], self.mapping[index][copies])
            self.ledger.queue(index, batch.sources, batch.destinations)
            self.copied_units[index] += len(known)
            self._moves.append(batch)

    def map_more(self, ids: Ids, sub_pool: int, committed: bool = True) -> None:
        """Grants a page of one more sub-pool to live ids.

        Raises:
          UsageError: an id is free, is mapped there, or was: a repaired page needs a new id.
          OutOfMemory: as `grant_pages`.
        """
        table = self._table(sub_pool)
        known = table.ids.known(ids)
        if (table.ids.uses[known] == 0).any() or table.sharers[known].any():
            raise UsageError(f"an id is free, or has a page in sub-pool {sub_pool}, or had one")
        self._charge((sub_pool,), len(known), committed, None)
        table.bind(known, self.layout.take(sub_pool, len(known)))
        table.ids.uses[known] += 1

    def _page_pools(self, sub_pools: Sequence[int]) -> tuple[int, ...]:
        try:
            pools = tuple(dict.fromkeys(map(as_int, sub_pools)))
        except TypeError:
            pools = ()
        if not pools or any(pool not in self.page_pools for pool in pools):
            raise UsageError(f"pages live in sub-pools {self.page_pools}; seen {sub_pools!r}")
        return pools

    def _charge(
        self, pools: Sequence[int], count: int, committed: bool, ids: IdSpace | None
    ) -> None:
        """Makes room for `count` units in each of the pools and counts them as live."""
        demand = [0] * len(self.held)
        for index in pools:
            demand[index] = count
        if committed:
            self._require_committed(demand)
        else:
            self._require(demand)
        if ids is not None and ids.free_count < count:
            self.refusals["ids"] += 1
            raise OutOfMemory(f"{count} ids wanted, {ids.free_count} of {ids.count} are free")
        self._make_room(demand)
        for index in pools:
            if committed:
                self.committed[index] -= count
            else:
                self.held[index] += count
            live = self.held[index] - self.committed[index]
            if live > self.high_water[index]:
                self.high_water[index] = live

    def _table(self, sub_pool: int) -> Table:
        try:
            if sub_pool >= 0:
                return self.tables[sub_pool]
        except (IndexError, TypeError):
            pass
        raise UsageError(f"sub-pools are 0 to {len(self.tables) - 1}; seen {sub_pool!r}")

    def share(self, ids: Ids, sub_pool: int) -> None:
        """Adds one sharer to each id in a sub-pool. Raises UsageError for an id without unit."""
        table, known = self._mapped(ids, sub_pool)
        table.sharers[known] += 1

    def sharers(self, ids: Ids, sub_pool: int) -> np.ndarray:
        """int64[ids] how many sharers each id has there. Raises UsageError for an id without."""
        table, known = self._mapped(ids, sub_pool)
        return table.sharers[known].astype(np.int64)

    def drop(self, ids: Ids, sub_pool: int) -> int:
        """Takes one sharer from each id in one sub-pool; the last one frees the unit there.

        Returns:
          Number of units freed.
        Raises:
          UsageError: an id has no unit there (freed before, or never granted).
        """
        if type(ids) is int:
            table = self._table(sub_pool)
            number = table.ids.known_one(ids)
            if table.sharers_of(number) <= 0:
                table.require_mapped(np.array([number]))
            return self._drop_one(number, sub_pool)
        table, known = self._mapped(ids, sub_pool)
        return self._drop(table.ids, known, table.ids.uses[known], (sub_pool,))

    def free(self, ids: Ids) -> None:
        """Takes one sharer from each page id in every sub-pool that maps it.

        For a holder that shares all of an id. One that let its window slide over an id that others
        still hold there drops what it holds sub-pool by sub-pool instead.

        Raises:
          UsageError: an id is free already.
        """
        if type(ids) is int:
            number = self.pages.known_one(ids)
            if not self.pages.uses_view[number]:
                raise UsageError(f"page {ids} is free")
            for index in self.page_pools:
                if self.tables[index].sharers_of(number) > 0:
                    self._drop_one(number, index)
            return
        known = self.pages.known(ids)
        uses = self.pages.uses[known]
        if np.count_nonzero(uses) < len(known):
            raise UsageError(f"pages {known[uses == 0].tolist()} are free")
        self._drop(self.pages, known, uses, self.page_pools)

    def _mapped(self, ids: Ids, sub_pool: int) -> tuple[Table, np.ndarray]:
        table = self._table(sub_pool)
        known = table.ids.known(ids)
        table.require_mapped(known)
        return table, known

    def _drop(
        self, ids: IdSpace, known: np.ndarray, uses: np.ndarray, sub_pools: Sequence[int]
    ) -> int:
        """Takes a sharer from each number, wherever it has one. Returns units freed."""
        freed_count = 0
        ended: np.ndarray | np.uint8 = np.uint8(0)
        for index in sub_pools:
            addresses, is_last = self.tables[index].drop(known)
            self.layout.give(index, addresses)
            self.held[index] -= len(addresses)
            self.freed_units[index] += len(addresses)
            ended = ended + is_last
            freed_count += len(addresses)
        uses = uses - ended
        gone = known
        if not np.count_nonzero(uses):
            ids.uses[known] = 0
        else:  # the device need not hear of ids that are free
            ids.uses[known] = uses
            gone = known[uses == 0]
            for index in sub_pools:
                self.tables[index].touch(known[uses > 0])
        ids.give(gone)
        return freed_count

    def _drop_one(self, number: int, sub_pool: int) -> int:
        table = self.tables[sub_pool]
        address = table.drop_one(number)
        if address == table.absent:
            return 0
        self.layout.give_one(sub_pool, address)
        self.held[sub_pool] -= 1
        self.freed_units[sub_pool] += 1
        if not table.ids.uses_view[number]:
            table.ids.give_one(number)
        return 1

    def unpin(self, sub_pool: int, address: int, user: object) -> None:
        """Ends a pin or fence; a unit freed meanwhile becomes reusable with the last one."""
        self.layout.unpin(sub_pool, address, user)

    def take_moves(self, most: int = 1 << 31) -> list[Batch]:
        """Moves and copies since last taken, in batches of at most `most` units.

        Each is a program, and they are the next to be dispatched, in this order.
        """
        most = plain_int(most, "a batch has at least one unit at most")
        taken = [part for batch in self._moves for part in batch.parts(most)]
        for batch in taken:
            self.ledger.hand_out(batch.sub_pool, batch.sources, batch.destinations)
        self._moves = []
        return taken

    def take_changes(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per sub-pool the (numbers, addresses) new to the device; a drop reads absent.

        Ids that are free now are left out: nothing may refer to them.
        """
        return [table.take_changes() for table in self.tables]

    def check(self) -> None:
        """Verifies L1 to L10 from scratch.

        Raises:
          InvariantError: naming the first that fails.
        Cost: O(ids + units); for tests and idle moments.
        """
        self.layout.check()
        for index, (table, states) in enumerate(zip(self.tables, self.ledger.states, strict=True)):
            held = np.flatnonzero((states == LIVE) | (states == FENCED))
            table.check(held)
            if self.committed[index] < 0 or self.live(index) != len(held):
                raise InvariantError(f"L10: sub-pool {index} does not hold live + committed units")
        if not self.layout.fits(self.held):
            raise InvariantError(f"L10: {tuple(self.held)} held units do not fit")
        for space in {id(table.ids): table.ids for table in self.tables}.values():
            space.check([table.sharers for table in self.tables if table.ids is space])
