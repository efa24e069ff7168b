"""Requests on one allocator: their rows, page tables, slots and packets.

`Memory` is the host side of one arena. It grants what tokens need, keeps each request's page table,
and writes packets that bring the device up to date and run it. It holds no device array and never
waits for one.

    [0, length)          dispatched; windows keep only what the next query sees
    [length, capacity)   granted by the current call, not yet dispatched
    [capacity, limit)    committed for requests of `admit`; only hoped for by requests of `open`

M1  Between calls a request holds exactly `prices.held(length)`.
M2  The page table cell of a page that some sub-pool holds is its id; other cells are never read.
M3  An admitted request's commitment is its peak less what it holds, with the units promised for
    pages of windows that it shares (`holdings`), so growing within its limit, by at most
    `chunk_tokens` or `fused_steps` at once, always fits.
M4  A call that raises has changed nothing.
M5  When no request is left, nothing is committed and only what others share is live.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unimem_jax.allocator import UNIFIED, Split, number_of
from unimem_jax.errors import (
    InvariantError,
    OutOfMemory,
    UsageError,
    require_counts,
    require_positive,
)
from unimem_jax.holdings import Holdings
from unimem_jax.packet import OPTION_WORDS, Packet, int32, step_shape
from unimem_jax.plan import Plan, SubPool
from unimem_jax.price import Demand, add
from unimem_jax.requests import NO_PREFIX, Prefix, Request, Work, require_prefix

if TYPE_CHECKING:
    from unimem_jax.step import DeviceState

GREEDY_WORDS = (0, int(np.float32(1).view(np.int32)), 0, 0, 0)  # temperature 0, top_p 1


class Memory(Holdings):
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
        rows, context_tokens = require_positive(rows=rows, context_tokens=context_tokens)
        self.chunk_tokens, self.fused_steps = require_positive(
            chunk_tokens=chunk_tokens, fused_steps=fused_steps
        )
        super().__init__(plan, rows, context_tokens, layout)

    def init(self, store: Any = None) -> "DeviceState":
        """Fresh device state: the arena, the tables and the last tokens."""
        from unimem_jax.step import init_device  # the host side imports without JAX

        return init_device(self.plan, self.rows, self.tables.row_pages, store)

    def fits(self, demand: Sequence[int]) -> bool:
        """Whether `demand` more units of each sub-pool fit beside what is held and committed."""
        return self.allocator.fits(demand)

    def open(
        self, options: Sequence[int] = GREEDY_WORDS, limit: int | None = None,
        prefix: Prefix = NO_PREFIX,
    ) -> Request:  # fmt: skip
        """Takes a row for a request; what it grows by is asked for step by step.

        Args:
          options: the five words of `Sampling.words()`.
          limit: most tokens it may grow to; the context by default.
          prefix: computed tokens that it begins with. It shares their full pages; the partly
            filled last page and the slots are copied on the device by the packets of the next
            call, in order with all that ran before. Its next token has to be named.
        Raises:
          OutOfMemory: no row is free, or the copies do not fit now (NeverFits: not even alone with
            the prefix), or a pin is in the way.
          UsageError: a limit that is not positive or exceeds the context; wrong options; a prefix
            that is longer than the limit or not there.
        """
        words, limit = self._checked(options, self.context_tokens if limit is None else limit)
        require_prefix(prefix, limit)
        return self._begin(words, limit, prefix)

    def admit(
        self, prompt_tokens: int, max_new: int, options: Sequence[int] = GREEDY_WORDS,
        prefix: Prefix = NO_PREFIX,
    ) -> Request:  # fmt: skip
        """Takes a row and commits all that `prompt_tokens + max_new` tokens can ever need at once.

        Args:
          prefix: as in `open`: the first of the prompt's tokens, of which it pays what it copies,
            and windows whole, since they slide out of what it shares.
        Raises:
          UsageError: sizes that are not positive, a request over the context, or one that an empty
            arena cannot hold (itemised); a prefix longer than the prompt, or not there.
          OutOfMemory: it does not fit beside what is held and committed now (itemised).
        """
        (prompt_tokens,) = require_positive(prompt_tokens=prompt_tokens)
        (max_new,) = require_counts(max_new=max_new)
        words, total = self._checked(options, prompt_tokens + max_new)
        peak = self.prices.peak(total, self.chunk_tokens, self.fused_steps)
        self.refuse_impossible(peak)
        require_prefix(prefix, prompt_tokens)
        return self._begin(words, total, prefix, peak)

    def fork(self, request: Request, options: Sequence[int] | None = None) -> Request:
        """A request that goes on by itself from where another is: one more sample, a beam, a draft.

        It begins with all that the other has computed, as in `open`; what either does afterwards
        the other does not see. It has the limit of the other, a commitment if the other has one,
        and no next token until one is named.

        Args:
          options: the five words of `Sampling.words()`; those of the other by default.
        Raises:
          OutOfMemory, UsageError: as `open`; or the request was freed.
        """
        self._columns.require_held(request)
        words, limit = self._checked(
            request.options.tolist() if options is None else options, request.limit
        )
        prefix = Prefix(request.length, request.ids, request.slots)
        return self._begin(words, limit, prefix, request.peak)

    def _checked(self, options: Sequence[int], limit: int) -> tuple[np.ndarray, int]:
        """The sampling words and the limit of a request. Raises UsageError if they are wrong."""
        (limit,) = require_positive(limit=limit)
        if limit > self.context_tokens:
            raise UsageError(f"{limit} tokens exceed the context of {self.context_tokens}")
        words = int32(options, "sampling words")
        if words.shape != (OPTION_WORDS,):
            raise UsageError(f"sampling takes {OPTION_WORDS} words, not {options!r}")
        return words, limit

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
        batch = self._columns.batch(work)
        rows = max(1, len(batch.rows)) if rows is None else rows
        tokens = max(1, batch.most_tokens) if tokens is None else tokens
        pages = self.bucket_pages(batch.past_tokens) if pages is None else pages
        rows, tokens = require_positive(rows=rows, tokens=tokens)
        (pages,) = require_counts(pages=pages)
        if len(batch.rows) > rows or batch.most_tokens > tokens:
            raise UsageError(f"the work does not fit a packet of {rows} rows of {tokens} tokens")
        if batch.past_tokens > pages * self.plan.page_tokens:
            raise UsageError(f"{pages} pages do not cover a past of {batch.past_tokens} tokens")
        shape = step_shape(self.plan, rows, tokens, pages)
        self._grow(batch)
        packets = self.upkeep(room=shape.updates)
        packets.append(self.pending.step_packet(shape, batch))
        self._columns.advance(batch)
        self._settle(batch)
        return tuple(packets)

    def skip(self, requests: Sequence[Request], counts: np.ndarray) -> np.ndarray:
        """As `run`, without tokens and packets: for simulations, which have no device.

        Returns: int64[requests], their lengths after the step.
        """
        batch = self._columns.unnamed(requests, counts)
        self._grow(batch)
        self.pending.forget()
        self._columns.advance(batch)
        self._settle(batch)
        return batch.lengths

    def prefill(self, request: Request, tokens: Sequence[int]) -> tuple[Packet, ...]:
        """Packets that run an admitted request's prompt in chunks; the last samples.

        Returns:
          Packets to dispatch in order. Where a pin blocks a later chunk, those before it: go on
          from `request.length` when the pin has ended.
        Raises:
          UsageError: no tokens, more than the limit, or a request without a commitment.
          OutOfMemory: a pin blocks the first chunk.
        """
        self._columns.require_held(request)
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
        (steps,) = require_positive(steps=steps)
        try:
            work = [Work(request, 0) for request in requests]
        except TypeError:
            work = []
        if steps > self.fused_steps or not work:
            raise UsageError(
                f"decode runs 1 to {self.fused_steps} steps of at least one request, "
                f"not {steps} of {requests!r}"
            )
        first = self._columns.batch(work)
        self._columns.require_sampled(first.rows)
        counts = np.minimum(steps, self._columns.limit[first.rows] - first.lengths)
        self._grow(first.of_counts(counts), fused=True)
        shape = step_shape(self.plan, len(work), 1, self.bucket_pages(first.past_tokens + steps))
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
        self._let_go(request)

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
        (ticket,) = require_counts(ticket=ticket)
        if ticket > ledger.dispatched:
            raise UsageError(f"ticket {ticket} was never given out; the last is {self.ticket}")
        for finished in range(ledger.retired + 1, ticket + 1):
            ledger.retire(finished)

    def metrics(self) -> dict[str, Any]:
        """Plain numbers: rows in use and the allocator's metrics."""
        return {"rows": self.rows - self.free_rows, **self.allocator.metrics()}

    def check(self) -> None:
        """Verifies M1, M2 and M3 and the allocator's invariants from scratch.

        Raises:
          InvariantError: naming the invariant.
        """
        self.allocator.check()
        committed = (0,) * len(self.plan.sub_pools)
        shares: dict[int, set[int]] = {pool.index: set() for pool in self.plan.token_pools}
        for request in filter(None, self._columns.holders):
            held = self.prices.held(request.length)
            for pool in self.plan.token_pools:
                self._check_pages(request, pool, held[pool.index])
            if request.peak is not None:
                committed = add(committed, self._uncovered(request))
                for index in shares:
                    shares[index].update(request.mapped(index))
        owed = {i: self._owed(self.plan.sub_pools[i], list(ids)) for i, ids in shares.items()}
        committed = tuple(count + owed.get(index, 0) for index, count in enumerate(committed))
        if committed != tuple(self.allocator.committed):
            raise InvariantError(f"M3: {self.allocator.committed} committed, not {committed}")

    def check_idle(self, kept: Demand | None = None) -> None:
        """Verifies cheaply that nothing was lost: for production, when no request is left.

        Any other time it verifies L5, L9 and L10 by their counts alone.

        Args:
          kept: units that are held beside requests: shared pages, checkpoints; none by default.
        Raises:
          InvariantError: naming the invariant.
        Cost: O(sub-pools + pins).
        """
        allocator = self.allocator
        live = [allocator.live(pool.index) for pool in self.plan.sub_pools]
        allocator.layout.check_counts(live)
        in_use = allocator.pages.count - allocator.pages.free_count
        if in_use > sum(live[pool.index] for pool in self.plan.token_pools):
            raise InvariantError(f"L9: {in_use} ids are in use, more than pages")
        if min(allocator.committed) < 0 or not allocator.layout.fits(allocator.held):
            raise InvariantError(f"L10: {allocator.held} held units do not fit")
        if self.free_rows < self.rows:
            return
        wanted = [0] * len(live) if kept is None else list(kept)
        if any(allocator.committed) or live != wanted:
            raise InvariantError(
                f"M5: no request is left, but {live} units are live, not {wanted}, and "
                f"{allocator.committed} committed"
            )

    def _check_pages(self, request: Request, pool: SubPool, held: int) -> None:
        first = request.first.get(pool.index, 0)
        wanted = self.prices.first_page(pool.lifetime, request.length)
        count = request.held(pool.index)
        if first != min(wanted, len(request.ids)) or count != held:
            raise InvariantError(
                f"M1: row {request.row} holds {count} pages of {pool.name} from {first} on"
            )
        ids = np.array(request.ids[first:], np.int64)
        numbers = number_of(ids)
        is_present = self.allocator.pages.present[numbers] == ids
        is_mapped = self.allocator.mapping[pool.index][numbers] < pool.unit_count
        if not (is_present & is_mapped).all():
            raise InvariantError(f"M2: row {request.row} lost a page of {pool.name}")
