"""What requests hold: begun from a prefix, granted ahead of their tokens, dropped behind them.

What it is: the half of `Memory` that grants, shares, copies and drops. What it does not do: it
writes no packet and counts no token.

A request may begin with tokens that another one computed. It shares their full pages and copies
what will change: the last page, if it is partly filled, and the slot of running state.

    pages of the prefix   | shared | shared | shared | copied |
    [0, length)           +--------+--------+--------+----+
    window                   not seen | shared        | copied |

Sharers of a window's page let it slide out at different times, and the one who is first gets no
unit back. One with a commitment is promised another unit in its place all the same (M3), so a page
of a window that `s` sharers hold, `a` of them with a commitment, has min(a, s - 1) units promised
beside it. Whoever drops it takes either the unit or one of these along: the last sharer the unit, a
committed one of several a promise. Without commitments nothing is promised and sharing is free.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from unimem_jax.allocator import UNIFIED, Allocator, Split, number_of
from unimem_jax.errors import (
    NeverFits,
    OutOfMemory,
    UsageError,
    require_counts,
)
from unimem_jax.page_tables import tables_of
from unimem_jax.pending import Pending
from unimem_jax.plan import Plan, SubPool
from unimem_jax.price import Demand, Prices, add, less
from unimem_jax.requests import Batch, Prefix, Request, Rows


class Holdings:
    """Requests and what each of them holds; see `Memory`.

    Attributes:
      allocator: of the arena. What requests hold and promise is this class's to change.
      tables, pending: where the device's tables are, and what it has not heard of yet.
    """

    def __init__(self, plan: Plan, rows: int, context_tokens: int, layout: str | Split = UNIFIED):
        if not isinstance(plan, Plan):
            raise UsageError(f"a memory is of a Plan, not {plan!r}")
        self.plan = plan
        self.rows = rows
        self.context_tokens = context_tokens
        self.prices = Prices(plan)
        self.allocator = Allocator(plan.geometry, layout)
        self.tables = tables_of(plan, rows, self.prices.pages(context_tokens))
        self.pending = Pending(plan, self.tables, rows, self.allocator)
        self._columns = Rows(rows, len(plan.slot_pools))
        self._one_page = tuple(int(not pool.is_slot) for pool in plan.sub_pools)

    @property
    def free_rows(self) -> int:
        """Rows that no request holds."""
        return len(self._columns.free)

    def copies(self, length: int) -> Demand:
        """Units that a request copies which begins with `length` tokens: the last page of every
        token sub-pool where it is partly filled, and the running state.
        """
        is_partly_full = int(length % self.plan.page_tokens > 0)
        return tuple(
            int(pool.is_running and length > 0) if pool.is_slot else is_partly_full
            for pool in self.plan.sub_pools
        )

    def share(self, request: Request, start: int, stop: int) -> dict[int, list[int]]:
        """Adds one sharer, the caller, to full pages of a request, which then survive its `free`.

        Args:
          start, stop: page numbers; a window's pages that it no longer sees are left out.
        Returns:
          Per token sub-pool index the ids shared there; `drop` gives them back. An id should lose
          its pages of longer lifetimes last: there are no more ids than such pages.
        Raises:
          UsageError: not a range of full pages.
          OutOfMemory: an admitted request is promised other units for pages of its windows, and
            they do not fit.
        """
        self._columns.require_held(request)
        start, stop = require_counts(start=start, stop=stop)
        if not start <= stop <= request.length // self.plan.page_tokens:
            raise UsageError(f"pages {start} to {stop} of {request.length} tokens are not full")
        shares = {}
        for pool in self.plan.token_pools:
            first = max(start, request.first.get(pool.index, 0))
            shares[pool.index] = request.ids[first:stop]
            self.allocator.require_readable(shares[pool.index], pool.index)
        self._promise(self._owed_more(shares, 0))
        for index, ids in shares.items():
            self.allocator.share(ids, index)
        return shares

    def drop(self, ids: Sequence[int], sub_pool: int) -> int:
        """Takes back a share of pages in one token sub-pool. Returns the number of units freed.

        Raises:
          UsageError: an id has no page there.
        """
        self.allocator.sharers(ids, sub_pool)  # or raises
        return self._drop(self.plan.sub_pools[sub_pool], list(ids), is_admitted=False)

    def _begin(
        self, words: np.ndarray, limit: int, prefix: Prefix, peak: Demand | None = None
    ) -> Request:
        """Takes a row, shares and copies what the request begins with and commits its peak."""
        shares = self._shares(prefix)
        if not self.free_rows:
            raise OutOfMemory(f"all {self.rows} request rows are in use")
        copies, held = self.copies(prefix.length), self.prices.held(prefix.length)
        demand = add(copies, self._owed_more(shares, int(peak is not None)))
        if peak is not None:
            demand = add(demand, _lack(peak, held))
        if not self.allocator.layout.fits(held, demand):
            raise NeverFits(
                f"can never fit: {self.prices.itemise(demand)} beside {self.prices.itemise(held)} "
                "of what it begins with"
            )
        self._promise(demand)
        try:
            self.allocator.make_room(copies)
        except OutOfMemory:  # pins are in the way
            self.allocator.uncommit(demand)
            raise
        request = self._columns.take(words, limit)
        request.peak = peak
        if prefix.length:
            self._take_over(request, prefix, shares)
        return request

    def _shares(self, prefix: Prefix) -> dict[int, list[int]]:
        """Per token sub-pool index the full pages of a prefix that its next token still sees.

        Raises:
          UsageError: they, or what is to be copied, are not there for programs to read.
        """
        length = prefix.length
        pages = self.prices.pages(length) if self.plan.token_pools else 0
        slots = len(self.plan.slot_pools) if length else 0
        if (len(prefix.ids), len(prefix.slots)) != (pages, slots):
            raise UsageError(
                f"{length} tokens have {pages} pages and {slots} slots, not {len(prefix.ids)} and "
                f"{len(prefix.slots)}"
            )
        ids, shares = list(prefix.ids), {}
        for pool in self.plan.token_pools:
            first = min(pages, self.prices.first_page(pool.lifetime, length))
            self.allocator.require_readable(ids[first:], pool.index)
            shares[pool.index] = ids[first : length // self.plan.page_tokens]
        for pool, slot in zip(self.plan.slot_pools, prefix.slots, strict=False):
            self.allocator.require_readable([slot], pool.index)
        return shares

    def _take_over(self, request: Request, prefix: Prefix, shares: dict[int, list[int]]) -> None:
        """Shares and copies; the units are committed and there is room for them."""
        columns, row = self._columns, request.row
        full = prefix.length // self.plan.page_tokens
        request.ids = list(prefix.ids)
        for index, ids in shares.items():
            self.allocator.share(ids, index)
            if self.plan.sub_pools[index].lifetime.kind == "window":
                request.first[index] = full - len(ids)
        if request.ids[full:]:
            request.ids[full:] = self.allocator.copy_pages(request.ids[full:]).tolist()
        columns.slots[row] = [
            self.allocator.copy_slot(slot, pool.index)
            for pool, slot in zip(self.plan.slot_pools, prefix.slots, strict=True)
        ]
        request.has_slots = True
        columns.length[row] = prefix.length
        columns.capacity[row] = self._capacity(request)
        self.pending.set_pages(row, 0, request.ids)

    def _capacity(self, request: Request) -> int:
        """Tokens up to which nothing more has to be granted."""
        pages = len(request.ids) if self.plan.token_pools else self.prices.pages(request.limit)
        return pages * self.plan.page_tokens

    def _promise(self, demand: Demand) -> None:
        """Commits, or raises OutOfMemory, itemised."""
        if not self.allocator.fits(demand):
            raise OutOfMemory(f"does not fit now: {self.prices.itemise(demand)}")
        self.allocator.commit(demand)

    def _owed(self, pool: SubPool, ids: Sequence[int], sharers: int = 0, admitted: int = 0) -> int:
        """Units promised beside shared pages of a window, of their sharers and so many more."""
        if pool.lifetime.kind != "window" or not ids:
            return 0
        counts = self.allocator.sharers(ids, pool.index) + sharers - 1
        committed: Counter[int] = Counter()
        if counts.max() > 0:
            for request in filter(None, self._columns.holders):
                if request.peak is not None:
                    committed.update(request.mapped(pool.index))
        promised = zip(ids, counts.tolist(), strict=True)
        return sum(max(0, min(committed[id_] + admitted, count)) for id_, count in promised)

    def _owed_more(self, shares: dict[int, list[int]], admitted: int) -> Demand:
        """What one more sharer of all these pages adds to the promises beside them."""
        demand = [0] * len(self.plan.sub_pools)
        for index, ids in shares.items():
            pool = self.plan.sub_pools[index]
            demand[index] = self._owed(pool, ids, 1, admitted) - self._owed(pool, ids)
        return tuple(demand)

    def _drop(self, pool: SubPool, ids: list[int], is_admitted: bool) -> int:
        """Takes one sharer from pages, with what was promised for it."""
        single = ids[0] if len(ids) == 1 else ids  # much cheaper than an array of one
        if not self._is_promised(pool, ids):
            return self.allocator.drop(single, pool.index)
        owed = self._owed(pool, ids) - self._owed(pool, ids, -1, -int(is_admitted))
        freed = self.allocator.drop(single, pool.index)
        demand = [0] * len(self.plan.sub_pools)
        demand[pool.index] = owed
        self.allocator.uncommit(demand)
        return freed

    def _is_promised(self, pool: SubPool, ids: list[int]) -> bool:
        """Whether something may be promised beside pages that are held."""
        if pool.lifetime.kind != "window" or not ids:
            return False
        table = self.allocator.tables[pool.index]
        if len(ids) == 1:
            return table.sharers_of(number_of(ids[0])) > 1
        return bool(table.sharers[number_of(np.array(ids))].max() > 1)

    def _let_go(self, request: Request) -> None:
        """Gives back all that a request holds, and its row."""
        self._columns.require_held(request)
        for pool in self.plan.token_pools:
            self._drop(pool, request.mapped(pool.index), request.peak is not None)
        if request.peak is not None:
            self.allocator.uncommit(self._uncovered(request))
        for pool, slot in zip(self.plan.slot_pools, request.slots, strict=False):
            self.allocator.drop([slot], pool.index)
        self._columns.give(request)

    def _uncovered(self, request: Request) -> Demand:
        """What a commitment still covers: its peak less what the request holds."""
        assert request.peak is not None
        held = tuple(
            int(request.has_slots) if pool.is_slot else request.held(pool.index)
            for pool in self.plan.sub_pools
        )
        return _lack(request.peak, held)

    def _grow(self, batch: Batch, fused: bool = False) -> None:
        """Grants what every request needs for its next tokens, all or nothing.

        The caller dispatches those tokens: growing twice for the same ones would grant twice.
        """
        targets = batch.lengths + batch.counts
        growing = (targets > self._columns.capacity[batch.rows]).nonzero()[0].tolist()
        if not growing:
            return
        demand = covered = (0,) * len(self.plan.sub_pools)
        turning: list[int] = []  # those who turn one page, in every sub-pool of pages
        others: list[int] = []
        for at in growing:
            request, target = batch.requests[at], int(targets[at])
            growth = self.prices.growth(request.length, target, fused)
            demand = add(demand, growth)
            if request.peak is not None:
                covered = add(covered, tuple(map(min, growth, self._uncovered(request))))
            is_turn = growth == self._one_page
            is_turn = is_turn and self.prices.pages(target) == len(request.ids) + 1
            (turning if is_turn else others).append(at)
        uncovered = less(demand, covered)
        self.allocator.commit(uncovered)
        try:
            self.allocator.make_room(demand)
        except OutOfMemory:  # pins are in the way
            self.allocator.uncommit(uncovered)
            raise
        self._turn([batch.requests[at] for at in turning])
        for at in others:
            self._grant(batch.requests[at], int(targets[at]), fused)

    def _turn(self, requests: list[Request]) -> None:
        """`_grant` of one page everywhere to each, as nearly all decode steps need, at once."""
        if not requests:
            return
        pools = [pool.index for pool in self.plan.token_pools]
        for request, id_ in zip(requests, self._grant_pages(len(requests), pools), strict=True):
            self.pending.set_pages(request.row, len(request.ids), [id_])
            request.ids.append(id_)
            self._columns.capacity[request.row] = self._capacity(request)

    def _grant(self, request: Request, target: int, fused: bool) -> None:
        """Takes ids and units that are committed and for which `make_room` has made room."""
        columns, row, start = self._columns, request.row, len(request.ids)
        if not request.has_slots:
            slots = [self.allocator.grant_slot(pool.index) for pool in self.plan.slot_pools]
            columns.slots[row], request.has_slots = slots, True
        for pages, pools in self.prices.additions(start, request.length, target, fused):
            ids = self._grant_pages(len(pages), pools)
            request.ids.extend(ids or [0] * len(pages))
            self.pending.set_pages(row, pages.start, ids)
            for pool in self.plan.token_pools:
                if pool.index not in pools:
                    request.gaps[pool.index] = range(start, pages.stop)
        columns.capacity[row] = self._capacity(request)

    def _grant_pages(self, count: int, pools: list[int]) -> list[int]:
        if count == 1 and pools:  # of nearly every decode step; much cheaper than an array of one
            return [self.allocator.grant_page(pools)]
        return self.allocator.grant_pages(count, pools).tolist() if pools else []

    def _settle(self, batch: Batch) -> None:
        """Drops, after their step was dispatched, the window pages that no later query sees."""
        for at in np.flatnonzero(batch.lengths >= self._columns.settle_at[batch.rows]).tolist():
            self._drop_unseen(batch.requests[at])

    def _drop_unseen(self, request: Request) -> None:
        """Drops what windows no longer see, and notes when the next page leaves one."""
        nearest, length = self.context_tokens + 1, request.length
        for pool in self.plan.token_pools:
            if pool.lifetime.kind != "window":
                continue
            held = request.first.get(pool.index, 0)
            wanted = self.prices.first_page(pool.lifetime, length)
            last = min(wanted, len(request.ids))
            next_drop = (last + 1) * self.plan.page_tokens + pool.lifetime.tokens - 1
            nearest = min(nearest, next_drop)
            if last <= held:
                continue
            covered = self._uncovered(request) if request.peak is not None else ()
            self._drop(pool, request.mapped(pool.index, last), request.peak is not None)
            request.first[pool.index] = last
            request.gaps.pop(pool.index, None)
            if request.peak is not None:
                # Less than what was dropped if a chunk had grown past the peak.
                self.allocator.commit(less(self._uncovered(request), covered))
        self._columns.settle_at[request.row] = nearest


def _lack(wanted: Demand, held: Demand) -> Demand:
    """What of the first demand the second does not cover."""
    return tuple(max(0, most - count) for most, count in zip(wanted, held, strict=True))
