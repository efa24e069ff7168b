"""Requests on one allocator: their rows, page tables, slots and packets.

`Memory` is the host side of one arena. It grants what tokens need, keeps each request's page table,
and writes packets that bring the device up to date and run it. It holds no device array and never
waits for one.

    [0, length)          dispatched; windows keep only what the next query sees
    [length, capacity)   granted by the current call, not yet dispatched
    [capacity, limit)    committed for requests of `admit`; only hoped for by requests of `open`

M1  Between calls a request holds exactly `prices.held(length)`.
M2  The page table cell of a page that some sub-pool holds is its id; other cells are never read.
M3  An admitted request's commitment is its peak less what it holds, so growing within its limit,
    by at most `chunk_tokens` or `fused_steps` at once, always fits.
M4  A call that raises has changed nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unimem_jax.allocator import UNIFIED, Allocator, Split, number_of
from unimem_jax.errors import (
    InvariantError,
    OutOfMemory,
    UsageError,
    require_counts,
    require_positive,
)
from unimem_jax.packet import OPTION_WORDS, Packet, int32, step_shape
from unimem_jax.page_tables import tables_of
from unimem_jax.pending import Pending
from unimem_jax.plan import Plan
from unimem_jax.price import Demand, Prices, add, less
from unimem_jax.requests import Batch, Request, Rows, Work

if TYPE_CHECKING:
    from unimem_jax.step import DeviceState

GREEDY_WORDS = (0, int(np.float32(1).view(np.int32)), 0, 0, 0)  # temperature 0, top_p 1


class Memory:
    """The host side of one arena.

    Args:
      plan: the layout.
      rows: most requests that hold memory at once.
      context_tokens: longest request, prompt and generated tokens together.
      chunk_tokens: prompt tokens per step in `prefill`.
      fused_steps: most decode steps that `decode` grants ahead.
      layout: `UNIFIED`, or `Split(caps)` to compare with separate pools.
    Raises:
      UsageError: sizes that are not positive, or page tables that int32 cannot index.
    """

    def __init__(
        self, plan: Plan, rows: int = 64, context_tokens: int = 4096, *,
        chunk_tokens: int = 64, fused_steps: int = 32, layout: str | Split = UNIFIED,
    ):  # fmt: skip
        require_positive(rows=rows, context_tokens=context_tokens)
        require_positive(chunk_tokens=chunk_tokens, fused_steps=fused_steps)
        self.plan = plan
        self.prices = Prices(plan)
        self.rows = rows
        self.context_tokens = context_tokens
        self.chunk_tokens = chunk_tokens
        self.fused_steps = fused_steps
        self.allocator = Allocator(plan.geometry, layout)
        self.tables = tables_of(plan, rows, self.prices.pages(context_tokens))
        self.pending = Pending(plan, self.tables, rows, self.allocator)
        self._columns = Rows(rows, len(plan.slot_pools))

    def init(self, store: Any = None) -> "DeviceState":
        """Fresh device state: the arena, the tables and the last tokens."""
        from unimem_jax.step import init_device  # the host side imports without JAX

        return init_device(self.plan, self.rows, self.tables.row_pages, store)

    @property
    def free_rows(self) -> int:
        """Rows that no request holds."""
        return len(self._columns.free)

    def fits(self, demand: Sequence[int]) -> bool:
        """Whether `demand` more units of each sub-pool fit beside what is held and committed."""
        return self.allocator.fits(demand)

    def open(self, options: Sequence[int] = GREEDY_WORDS, limit: int | None = None) -> Request:
        """Takes a row for a request, and no bytes: what it grows by is asked for step by step.

        Args:
          options: the five words of `Sampling.words()`.
          limit: most tokens it may grow to; the context by default.
        Raises:
          OutOfMemory: if no row is free.
          UsageError: a limit that is not positive or exceeds the context; wrong options.
        """
        limit = self.context_tokens if limit is None else limit
        require_positive(limit=limit)
        if limit > self.context_tokens:
            raise UsageError(f"{limit} tokens exceed the context of {self.context_tokens}")
        words = int32(list(options), "sampling words")
        if words.shape != (OPTION_WORDS,):
            raise UsageError(f"sampling takes {OPTION_WORDS} words, not {len(options)}")
        if not self.free_rows:
            raise OutOfMemory(f"all {self.rows} request rows are in use")
        return self._columns.take(words, limit)

    def admit(
        self, prompt_tokens: int, max_new: int, options: Sequence[int] = GREEDY_WORDS
    ) -> Request:
        """Takes a row and commits all that `prompt_tokens + max_new` tokens can ever need at once.

        Raises:
          UsageError: sizes that are not positive, a request over the context, or one that an empty
            arena cannot hold (itemised).
          OutOfMemory: it does not fit beside what is held and committed now (itemised).
        """
        require_positive(prompt_tokens=prompt_tokens)
        require_counts(max_new=max_new)
        total = prompt_tokens + max_new
        if total > self.context_tokens:
            raise UsageError(f"{total} tokens exceed the context of {self.context_tokens}")
        peak = self.prices.peak(total, self.chunk_tokens, self.fused_steps)
        self.refuse_impossible(peak)
        if not self.fits(peak):
            raise OutOfMemory(f"does not fit now: {self.prices.itemise(peak)}")
        request = self.open(options, total)
        self.allocator.commit(peak)
        request.peak = peak
        return request

    def refuse_impossible(self, demand: Demand) -> None:
        """Raises UsageError, itemised, if an empty arena cannot hold `demand`."""
        if not self.allocator.layout.fits(demand):
            raise UsageError(
                f"can never fit: needs {self.prices.itemise(demand)}; the arena has "
                f"{self.plan.arena_bytes:,} bytes"
            )

    def run(
        self, work: Sequence[Work], *, rows: int | None = None, tokens: int | None = None,
        pages: int | None = None,
    ) -> tuple[Packet, ...]:  # fmt: skip
        """Grants what `work` needs and writes its packets: upkeep first, the step packet last.

        Args:
          work: at most `rows` items of at most `tokens` tokens, each request at most once.
          rows, tokens, pages: the compiled shape; by default exactly what `work` needs, with
            `pages` rounded up to a bucket.
        Returns:
          Packets to dispatch in this order, all through the same step. Row i of the last one is
          `work[i]`.
        Raises:
          OutOfMemory, UsageError: before anything changed.
        """
        batch = self._columns.batch(list(work))
        rows = max(1, len(batch.rows)) if rows is None else rows
        tokens = max(1, batch.most_tokens) if tokens is None else tokens
        pages = self.bucket_pages(batch.past_tokens) if pages is None else pages
        require_positive(rows=rows, tokens=tokens)
        require_counts(pages=pages)
        if len(batch.rows) > rows or batch.most_tokens > tokens:
            raise UsageError(f"the work does not fit a packet of {rows} rows of {tokens} tokens")
        if batch.past_tokens > pages * self.plan.page_tokens:
            raise UsageError(f"{pages} pages do not cover a past of {batch.past_tokens} tokens")
        self._grow(batch)
        shape = step_shape(self.plan, rows, tokens, pages)
        packets = self.upkeep(room=shape.updates)
        packets.append(self.pending.step_packet(shape, batch))
        self._columns.advance(batch)
        self._settle(batch)
        return tuple(packets)

    def skip(self, work: Sequence[Work]) -> None:
        """As `run`, but writes no packets: for simulations, which have no device.

        Raises:
          OutOfMemory, UsageError: before anything changed.
        """
        batch = self._columns.batch(list(work))
        self._grow(batch)
        self.pending.forget()
        self._columns.advance(batch)
        self._settle(batch)

    def prefill(self, request: Request, tokens: Sequence[int]) -> tuple[Packet, ...]:
        """Packets that run an admitted request's prompt in chunks; the last samples.

        Returns:
          Packets to dispatch in order. Where a pin blocks a later chunk, those before it: go on
          from `request.length` when the pin has ended.
        Raises:
          UsageError: no tokens, more than the limit, or a request without a commitment.
          OutOfMemory: a pin blocks the first chunk.
        """
        if request.peak is None:
            raise UsageError("prefill serves requests of `admit`; `run` serves the others")
        ids = int32(tokens, "token ids")
        if ids.ndim != 1 or not ids.size or ids.min() < 0:
            raise UsageError(f"a prompt is a row of token ids, 0 or more each; seen {tokens!r}")
        if request.length + ids.size > request.limit:
            raise UsageError(
                f"{ids.size} tokens after {request.length} exceed the limit of {request.limit}"
            )
        packets: list[Packet] = []
        for at in range(0, ids.size, self.chunk_tokens):
            chunk = ids[at : at + self.chunk_tokens]
            item = Work(request, chunk.size, chunk, emit=at + chunk.size == ids.size)
            try:
                packets += self.run([item], rows=1, tokens=self.chunk_tokens)
            except OutOfMemory:
                if not at:
                    raise
                break
        return tuple(packets)

    def decode(self, steps: int, requests: Sequence[Request]) -> tuple[Packet, ...]:
        """Packets for `steps` decode steps, granted ahead; each has a leading axis to scan over.

        Args:
          steps: at most `fused_steps`.
          requests: each has sampled its next token; one that reaches its limit idles for the
            remaining steps.
        Returns:
          Upkeep packets, of one step each, then one of `steps` steps whose row i is `requests[i]`.
        """
        require_positive(steps=steps)
        if steps > self.fused_steps or not requests:
            raise UsageError(
                f"decode runs 1 to {self.fused_steps} steps of at least one request, "
                f"not {steps} of {len(requests)}"
            )
        first = self._columns.batch([Work(request, 0) for request in requests])
        self._columns.require_sampled(first.rows)
        counts = np.minimum(steps, self._columns.limit[first.rows] - first.lengths)
        self._grow(first.of_counts(counts), fused=True)
        shape = step_shape(
            self.plan, len(requests), 1, self.bucket_pages(first.past_tokens + steps)
        )
        packets = [Packet(p.words[None], p.shape) for p in self.upkeep(room=shape.updates)]
        stacked = []
        for index in range(steps):
            batch = first.of_counts((index < counts).astype(np.int64))
            stacked.append(self.pending.step_packet(shape, batch).words)
            self._columns.advance(batch)
        self._settle(first)
        return (*packets, Packet(np.stack(stacked), shape))

    def free(self, request: Request) -> None:
        """Gives back all that a request holds, to be granted again at once, and its row."""
        self._columns.require_held(request)
        if request.peak is not None:
            self.allocator.uncommit(self._uncovered(request))
        for pool in self.plan.token_pools:
            held = request.first.get(pool.index, 0)
            ids = request.mapped(pool.index, held, len(request.ids))
            self.allocator.drop(ids, pool.index)
        for pool, slot in zip(self.plan.slot_pools, request.slots, strict=False):
            self.allocator.drop([slot], pool.index)
        self._columns.give(request)

    def bucket_pages(self, tokens: int) -> int:
        """Page-table columns that a compiled shape reads for a past of `tokens`."""
        return self.tables.bucket(tokens)

    def upkeep(self, room: int = 0) -> list[Packet]:
        """Packets for pending moves, and for table changes beyond the `room` of the next packet."""
        return self.pending.upkeep(room)

    @property
    def ticket(self) -> int:
        """Ticket of the last packet handed out; tickets count packets in dispatch order."""
        return self.allocator.ledger.dispatched

    def retire(self, ticket: int) -> None:
        """Notes that the step of `ticket`, and all before it, have finished on the device; until
        then something is kept of every batch of moves.
        """
        ledger = self.allocator.ledger
        if ticket > ledger.dispatched:
            raise UsageError(f"ticket {ticket} was never given out; the last is {self.ticket}")
        for finished in range(ledger.retired + 1, ticket + 1):
            ledger.retire(finished)

    def metrics(self) -> dict[str, Any]:
        """Plain numbers: rows in use and the allocator's metrics."""
        return {"rows": self.rows - self.free_rows, **self.allocator.metrics()}

    def check(self) -> None:
        """Verifies M1 and M2 and the allocator's invariants from scratch.

        Raises:
          InvariantError: naming the invariant.
        """
        self.allocator.check()
        for request in filter(None, self._columns.holders):
            held = self.prices.held(request.length)
            for pool in self.plan.token_pools:
                first = request.first.get(pool.index, 0)
                wanted = self.prices.first_page(pool.lifetime, request.length)
                count = request.held(pool.index)
                if first != min(wanted, len(request.ids)) or count != held[pool.index]:
                    raise InvariantError(
                        f"M1: row {request.row} holds {count} pages of {pool.name} from {first} on"
                    )
                ids = np.array(request.ids[first:], np.int64)
                numbers = number_of(ids)
                is_present = self.allocator.pages.present[numbers] == ids
                is_mapped = self.allocator.mapping[pool.index][numbers] < pool.unit_count
                if not (is_present & is_mapped).all():
                    raise InvariantError(f"M2: row {request.row} lost a page of {pool.name}")

    def _uncovered(self, request: Request) -> Demand:
        """What a commitment still covers: its peak less what the request holds."""
        assert request.peak is not None
        held = [
            int(request.has_slots) if pool.is_slot else request.held(pool.index)
            for pool in self.plan.sub_pools
        ]
        return tuple(max(0, peak - count) for peak, count in zip(request.peak, held, strict=True))

    def _grow(self, batch: Batch, fused: bool = False) -> None:
        """Grants what every request needs for its next tokens, all or nothing.

        The caller dispatches those tokens: growing twice for the same ones would grant twice.
        """
        targets = batch.lengths + batch.counts
        growing = np.flatnonzero(targets > self._columns.capacity[batch.rows]).tolist()
        if not growing:
            return
        demand = covered = (0,) * len(self.plan.sub_pools)
        for at in growing:
            request, target = batch.requests[at], int(targets[at])
            growth = self.prices.growth(request.length, target, fused)
            demand = add(demand, growth)
            if request.peak is not None:
                covered = add(covered, tuple(map(min, growth, self._uncovered(request))))
        uncovered = less(demand, covered)
        self.allocator.commit(uncovered)
        try:
            self.allocator.make_room(demand)
        except OutOfMemory:  # pins are in the way
            self.allocator.uncommit(uncovered)
            raise
        for at in growing:
            self._grant(batch.requests[at], int(targets[at]), fused)

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
        held = len(request.ids) if self.plan.token_pools else self.prices.pages(request.limit)
        columns.capacity[row] = held * self.plan.page_tokens

    def _grant_pages(self, count: int, pools: list[int]) -> list[int]:
        if not pools:
            return []
        if count == 1:  # of nearly every decode step; much cheaper than an array of one
            return [self.allocator.grant_page(pools)]
        return self.allocator.grant_pages(count, pools).tolist()

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
            ids = request.mapped(pool.index, held, last)
            covered = self._uncovered(request) if request.peak is not None else ()
            self.allocator.drop(ids[0] if len(ids) == 1 else ids, pool.index)
            request.first[pool.index] = last
            request.gaps.pop(pool.index, None)
            if request.peak is not None:
                # Less than what was dropped if a chunk had grown past the peak.
                self.allocator.commit(less(self._uncovered(request), covered))
        self._columns.settle_at[request.row] = nearest
