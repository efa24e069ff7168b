"""Requests on one allocator: their rows, page tables, slots and packets.

`Memory` is the host side of one arena. It grants what tokens need, keeps each request's page table, and writes
packets that bring the device up to date and run it. It holds no device array and never waits for one.

    [0, length)          dispatched; windows keep only what the next query sees
    [length, capacity)   granted by the current call, not yet dispatched
    [capacity, limit)    committed for requests of `admit`; only hoped for by requests of `open`

M1  Between calls a request holds exactly `prices.held(length)`, plus what fused steps granted ahead.
M2  The page table cell of a page that some sub-pool holds is its id; other cells are never read.
M3  An admitted request's commitment is its peak less what it holds, so growing within its limit always fits.
M4  A call that raises has changed nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from unimem_jax.allocator import UNIFIED, Allocator, Split
from unimem_jax.errors import InvariantError, OutOfMemory, UsageError
from unimem_jax.packet import LAST_TOKEN, UPKEEP_MOVES, UPKEEP_UPDATES, Packet
from unimem_jax.packet import Shape, blank, int32, step_shape, upkeep_shape
from unimem_jax.plan import Plan
from unimem_jax.price import Demand, Prices, add
from unimem_jax.page_tables import tables_of

if TYPE_CHECKING:
    from unimem_jax.step import DeviceState

GREEDY_WORDS = (0, int(np.float32(1).view(np.int32)), 0, 0, 0)  # temperature 0, top_p 1
SMALLEST_BUCKET_TOKENS = 256  # context that the smallest compiled shape reads


@dataclass(slots=True, eq=False)
class Request:
    """One request's memory. Only `Memory` changes it.

    Attributes:
      row: its row of the device's tables.
      length: tokens that dispatched steps consumed.
      limit: most tokens it may grow to.
      ids: page id of each page; 0 where no sub-pool ever held the page.
      slots: slot id per state sub-pool; empty before the first token.
      first: per token sub-pool index, the first page still held there.
      gaps: per window sub-pool index, pages [start, end) that a long chunk left out, until it is settled.
      peak: committed units per sub-pool in all, or None without a commitment.
    """

    row: int
    limit: int
    options: np.ndarray
    length: int = 0
    ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    first: dict[int, int] = field(default_factory=dict)
    gaps: dict[int, range] = field(default_factory=dict)
    peak: Demand | None = None
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Work:
    """What one request does in one step.

    Attributes:
      count: new tokens.
      tokens: their ids, int32[count]; None for one token, the one sampled last.
      emit: whether the step samples a token after them.
    """

    request: Request
    count: int
    tokens: np.ndarray | None = None
    emit: bool = True


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
      UsageError: sizes that are not positive.
    """

    def __init__(
        self, plan: Plan, rows: int = 64, context_tokens: int = 4096, *,
        chunk_tokens: int = 64, fused_steps: int = 32, layout: str | Split = UNIFIED,
    ):  # fmt: skip
        sizes = {
            "rows": rows, "context_tokens": context_tokens,
            "chunk_tokens": chunk_tokens, "fused_steps": fused_steps,
        }  # fmt: skip
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is a positive int, not {value!r}")
        self.plan = plan
        self.prices = Prices(plan)
        self.rows = rows
        self.context_tokens = context_tokens
        self.chunk_tokens = chunk_tokens
        self.fused_steps = fused_steps
        self.allocator = Allocator(plan.geometry, layout)
        self.tables = tables_of(plan, rows, self.prices.pages(context_tokens))
        self._free_rows = list(range(rows))[::-1]
        self._requests: dict[int, Request] = {}
        self._cells: dict[int, int] = {}

    def init(self, store: Any = None) -> "DeviceState":
        """Fresh device state: the arena, the tables and the last tokens."""
        from unimem_jax.step import init_device  # the host side imports without JAX

        return init_device(self.plan, self.rows, self.tables.row_pages, store)

    @property
    def free_rows(self) -> int:
        """Rows that no request holds."""
        return len(self._free_rows)

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
          UsageError: if `limit` exceeds the context.
        """
        if limit is not None and not 0 < limit <= self.context_tokens:
            raise UsageError(
                f"a request of {limit} tokens exceeds the context of {self.context_tokens}"
            )
        words = int32(list(options), "sampling words")
        if not self._free_rows:
            raise OutOfMemory(f"all {self.rows} request rows are in use")
        request = Request(self._free_rows.pop(), limit or self.context_tokens, words)
        self._requests[request.row] = request
        return request

    def admit(
        self, prompt_tokens: int, max_new: int, options: Sequence[int] = GREEDY_WORDS
    ) -> Request:
        """Takes a row and commits all that `prompt_tokens + max_new` tokens can ever need at once.

        Raises:
          UsageError: sizes that are not positive, a request over the context, or one that an empty arena cannot
            hold (itemised).
          OutOfMemory: it does not fit beside what is held and committed now (itemised).
        """
        if prompt_tokens < 1 or max_new < 0:
            raise UsageError(
                f"a request has at least one prompt token and no negative number of new ones, "
                f"not {prompt_tokens} and {max_new}"
            )
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

    def grow(self, growths: Sequence[tuple[Request, int]], *, fused: bool = False) -> None:
        """Grants what every request needs for its next tokens, all or nothing.

        Args:
          growths: requests, each at most once, and how many tokens each is to grow by.
          fused: whether the tokens are written one step after another and not as one chunk.
        Raises:
          OutOfMemory: if they do not fit together, or a pin blocks the moves.
          UsageError: a request that is not open, or that would exceed its limit.
        """
        demand = covered = (0,) * len(self.plan.sub_pools)
        for request, count in growths:
            if not request.is_open or count < 0 or request.length + count > request.limit:
                raise UsageError(
                    f"a request of {request.length} tokens and limit {request.limit} cannot grow by {count}"
                    + ("" if request.is_open else ": it was freed")
                )
            growth = self.prices.growth(request.length, request.length + count, fused)
            demand = add(demand, growth)
            if request.peak is not None:
                covered = add(covered, map(min, growth, self._uncovered(request)))
        uncovered = tuple(need - has for need, has in zip(demand, covered, strict=True))
        self.allocator.commit(uncovered)
        try:
            self.allocator.make_room(demand)
        except OutOfMemory:  # pins are in the way
            self.allocator.uncommit(uncovered)
            raise
        for request, count in growths:
            self._grant(request, count, fused)

    def settle(self, requests: Sequence[Request]) -> None:
        """Drops, after their step was dispatched, the window pages that no later query sees."""
        for request in requests:
            for pool in self.plan.token_pools:
                held = request.first.get(pool.index, 0)
                wanted = self.prices.first_page(pool.lifetime, request.length)
                last = min(wanted, len(request.ids))
                if last <= held:
                    continue
                ids = self._mapped(request, pool.index, held, last)
                self.allocator.drop(ids, pool.index)
                request.first[pool.index] = last
                request.gaps.pop(pool.index, None)
                if request.peak is not None:
                    again = [0] * len(self.plan.sub_pools)
                    again[pool.index] = len(ids)
                    self.allocator.commit(again)

    def run(
        self, work: Sequence[Work], *, rows: int | None = None, tokens: int | None = None,
        pages: int | None = None,
    ) -> tuple[Packet, ...]:  # fmt: skip
        """Grants what `work` needs and writes its packets: upkeep first, the step packet last.

        Args:
          work: at most `rows` items of at most `tokens` tokens, each request at most once.
          rows, tokens, pages: the compiled shape; by default exactly what `work` needs, with `pages` rounded up to
            a bucket.
        Returns:
          Packets to dispatch in this order, all through the same step. Row i of the last one is `work[i]`.
        Raises:
          OutOfMemory, UsageError: before anything changed.
        """
        work = list(work)
        rows = len(work) if rows is None else rows
        tokens = max((item.count for item in work), default=1) if tokens is None else tokens
        past = max((item.request.length for item in work), default=0)
        pages = self.bucket_pages(past) if pages is None else pages
        ids = [self._token_ids(item) for item in work]
        if len(work) > rows or any(item.count > tokens for item in work):
            raise UsageError(f"the work does not fit a packet of {rows} rows of {tokens} tokens")
        if past > pages * self.plan.page_tokens:
            raise UsageError(f"{pages} pages do not cover a past of {past} tokens")
        self.grow([(item.request, item.count) for item in work])
        shape = step_shape(self.plan, rows, tokens, pages)
        packets = self.upkeep(room=shape.updates)
        packets.append(self._step_packet(shape, work, ids))
        for item in work:
            item.request.length += item.count
        self.settle([item.request for item in work])
        return tuple(packets)

    def prefill(self, request: Request, tokens: Sequence[int]) -> tuple[Packet, ...]:
        """Packets that run a prompt in chunks; the last one samples. Dispatch all, in order."""
        ids = int32(tokens, "token ids")
        if not ids.size:
            raise UsageError("a prompt has at least one token")
        if request.length + ids.size > request.limit:
            raise UsageError(
                f"{ids.size} tokens after {request.length} exceed the limit of {request.limit}"
            )
        packets: list[Packet] = []
        for at in range(0, ids.size, self.chunk_tokens):
            chunk = ids[at : at + self.chunk_tokens]
            is_last = at + chunk.size == ids.size
            item = Work(request, chunk.size, chunk, emit=is_last)
            packets += self.run([item], rows=1, tokens=self.chunk_tokens)
        return tuple(packets)

    def decode(self, steps: int, requests: Sequence[Request]) -> tuple[Packet, ...]:
        """Packets for `steps` decode steps, granted ahead; each has a leading axis to scan over.

        Args:
          steps: at most `fused_steps`.
          requests: all with at least one token; one that reaches its limit idles for the remaining steps.
        Returns:
          Upkeep packets, of one step each, then one of `steps` steps whose row i is `requests[i]`.
        """
        if not 0 < steps <= self.fused_steps or not requests:
            raise UsageError(
                f"decode runs 1 to {self.fused_steps} steps of at least one request, "
                f"not {steps} of {len(requests)}"
            )
        if any(request.length == 0 for request in requests):
            raise UsageError("decode follows prefill: a request without tokens has nothing to go on")
        counts = [min(steps, request.limit - request.length) for request in requests]
        self.grow(list(zip(requests, counts, strict=True)), fused=True)
        pages = self.bucket_pages(max(request.length for request in requests) + steps)
        shape = step_shape(self.plan, len(requests), 1, pages)
        packets = [Packet(p.words[None], p.shape) for p in self.upkeep(room=shape.updates)]
        stacked = []
        for index in range(steps):
            work = [
                Work(request, int(index < count))
                for request, count in zip(requests, counts, strict=True)
            ]
            ids = [np.full(item.count, LAST_TOKEN, np.int32) for item in work]
            stacked.append(self._step_packet(shape, work, ids).words)
            for item in work:
                item.request.length += item.count
        self.settle(requests)
        return (*packets, Packet(np.stack(stacked), shape))

    def free(self, request: Request) -> None:
        """Gives back all that a request holds and its row. Its units can be granted again at once."""
        if not request.is_open or self._requests.get(request.row) is not request:
            raise UsageError("the request was freed already")
        if request.peak is not None:
            self.allocator.uncommit(self._uncovered(request))
        for pool in self.plan.token_pools:
            held = request.first.get(pool.index, 0)
            ids = self._mapped(request, pool.index, held, len(request.ids))
            self.allocator.drop(ids, pool.index)
        for pool, slot in zip(self.plan.slot_pools, request.slots, strict=False):
            self.allocator.drop([slot], pool.index)
        request.is_open = False
        del self._requests[request.row]
        self._free_rows.append(request.row)

    def bucket_pages(self, tokens: int) -> int:
        """Page-table columns that a compiled shape reads for a past of `tokens`: a power-of-4 bucket."""
        if not tokens:
            return 0
        bucket = SMALLEST_BUCKET_TOKENS
        while bucket < tokens:
            bucket *= 4
        return min(self.prices.pages(bucket), self.tables.row_pages)

    def upkeep(self, room: int = 0) -> list[Packet]:
        """Packets for all pending moves, and for table changes beyond the `room` of the packet that follows."""
        batches = self.allocator.take_moves()
        packets = []
        for batch in batches:
            for at in range(0, len(batch.sources), UPKEEP_MOVES):
                sources = batch.sources[at : at + UPKEEP_MOVES]
                packet, words = self._blank(upkeep_shape(self.plan, batch.sub_pool))
                words["move_count"][0] = len(sources)
                words["sources"][: len(sources)] = sources
                words["destinations"][: len(sources)] = batch.destinations[at : at + UPKEEP_MOVES]
                packets.append(packet)
        self._take_changes()
        while len(self._cells) > room:
            packet, words = self._blank(upkeep_shape(self.plan, 0))
            self._write_updates(words, UPKEEP_UPDATES)
            packets.append(packet)
        return packets

    def metrics(self) -> dict[str, Any]:
        """Plain numbers: rows in use and the allocator's metrics."""
        return {"rows": self.rows - self.free_rows, **self.allocator.metrics()}

    def check(self) -> None:
        """Verifies M1 and M2 and the allocator's invariants from scratch.

        Raises:
          InvariantError: naming the invariant.
        """
        self.allocator.check()
        for request in self._requests.values():
            for pool in self.plan.token_pools:
                first = request.first.get(pool.index, 0)
                wanted = self.prices.first_page(pool.lifetime, request.length)
                if first != min(wanted, len(request.ids)):
                    raise InvariantError(f"M1: row {request.row} holds {pool.name} from page {first}")
                mapped = self.allocator.mapping[pool.index][request.ids[first:]]
                if (mapped >= pool.unit_count).any():
                    raise InvariantError(f"M2: row {request.row} has a {pool.name} page that is absent")

    def _uncovered(self, request: Request) -> Demand:
        """What a commitment still covers: its peak less what the request holds."""
        assert request.peak is not None
        held = []
        for pool in self.plan.sub_pools:
            if pool.is_slot:
                held.append(int(bool(request.slots)))
            else:
                gap = request.gaps.get(pool.index, range(0))
                held.append(len(request.ids) - request.first.get(pool.index, 0) - len(gap))
        return tuple(max(0, peak - count) for peak, count in zip(request.peak, held, strict=True))

    def _grant(self, request: Request, count: int, fused: bool) -> None:
        """Takes ids and units that are committed and for which `make_room` has made room."""
        if count and not request.slots:
            request.slots = [self.allocator.grant_slot(pool.index) for pool in self.plan.slot_pools]
        target = request.length + count
        start, end = len(request.ids), self.prices.pages(target)
        firsts = {
            pool.index: self.prices.new_pages(pool, request.length, target, fused).start
            for pool in self.plan.token_pools
        }
        # Between two edges the same sub-pools hold something for each page.
        edges = sorted({start, end, *(min(first, end) for first in firsts.values())})
        for page, stop in zip(edges, edges[1:], strict=False):
            pools = [index for index, first in firsts.items() if first <= page]
            if not pools:
                request.ids.extend([0] * (stop - page))
                continue
            ids = self.allocator.grant_pages(stop - page, pools).tolist()
            request.ids.extend(ids)
            cell = self.tables.cell(request.row, page)
            self._cells.update(zip(range(cell, cell + len(ids)), ids, strict=True))
        for index, first in firsts.items():
            if first > start:
                request.gaps[index] = range(start, min(first, end))

    def _mapped(self, request: Request, pool: int, start: int, stop: int) -> list[int]:
        """Ids of pages [start, stop) that `pool` holds something for."""
        gap = request.gaps.get(pool, range(0))
        return [request.ids[page] for page in range(start, stop) if page not in gap]

    def _take_changes(self) -> None:
        for pool, changes in enumerate(self.allocator.take_changes()):
            start = self.tables.mapping_start[pool]
            ids, addresses = changes
            self._cells.update(zip((start + ids).tolist(), addresses.tolist(), strict=True))

    def _token_ids(self, item: Work) -> np.ndarray:
        if item.tokens is None:
            if item.count > 1:
                raise UsageError("only one token can be the one sampled last")
            return np.full(item.count, LAST_TOKEN, np.int32)
        ids = int32(item.tokens, "token ids")
        if ids.shape != (item.count,) or (ids.size and ids.min() < 0):
            raise UsageError(f"token ids are {item.count} numbers that are not negative")
        return ids

    def _blank(self, shape: Shape) -> tuple[Packet, dict[str, np.ndarray]]:
        return blank(shape, self.tables.words, self.rows)

    def _write_updates(self, words: dict[str, np.ndarray], most: int) -> None:
        """Moves up to `most` pending table changes into a packet."""
        taken = list(self._cells.items())[:most]
        for at, (index, value) in enumerate(taken):
            words["updates_index"][at] = index
            words["updates_value"][at] = value
            del self._cells[index]

    def _step_packet(self, shape: Shape, work: Sequence[Work], ids: list[np.ndarray]) -> Packet:
        packet, words = self._blank(shape)
        self._write_updates(words, shape.updates)
        for at, (item, tokens) in enumerate(zip(work, ids, strict=True)):
            request = item.request
            words["row"][at] = request.row
            words["slot"][at] = request.slots
            words["position"][at] = request.length
            words["count"][at] = item.count
            words["start"][at] = request.length == 0
            words["emit"][at] = item.emit and item.count > 0
            words["options"][at] = request.options
            words["tokens"][at, : item.count] = tokens
        return packet
