"""What the host keeps of the requests on one memory, and what they do in one step.

What every step reads of every request lies in columns, one cell per request row, so that a step
costs a few array operations and not a walk over objects. `Memory` alone changes any of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from unimem_jax.errors import UsageError, plain_int
from unimem_jax.packet import OPTION_WORDS, int32
from unimem_jax.price import Demand


class Rows:
    """Columns over request rows; a cell of a row that nobody holds means nothing.

    Attributes:
      length: int64[rows], tokens that dispatched steps consumed.
      limit: int64[rows], most tokens that the request may grow to.
      capacity: int64[rows], tokens up to which nothing more has to be granted.
      settle_at: int64[rows], length from which on some window page is no longer seen.
      has_sampled: bool[rows], whether the device holds the token that follows `length`.
      options: int32[rows, 5], words of `Sampling.words()`.
      slots: int64[rows, state sub-pools], slot ids; zeros before the first token.
      holders: the request of each row, or None.
      free: rows that nobody holds.
    """

    def __init__(self, count: int, slots: int):
        self.length, self.limit, self.capacity, self.settle_at = np.zeros((4, count), np.int64)
        self.has_sampled = np.zeros(count, np.bool_)
        self.options = np.zeros((count, OPTION_WORDS), np.int32)
        self.slots = np.zeros((count, slots), np.int64)
        self.holders: list[Request | None] = [None] * count
        self.free = list(range(count))[::-1]

    def take(self, options: np.ndarray, limit: int) -> "Request":
        """A request on a free row."""
        row = self.free.pop()
        self.length[row] = self.capacity[row] = self.settle_at[row] = self.slots[row] = 0
        self.limit[row], self.has_sampled[row], self.options[row] = limit, False, options
        request = self.holders[row] = Request(self, row)
        return request

    def give(self, request: "Request") -> None:
        """Frees a request's row."""
        self.holders[request.row] = None
        self.free.append(request.row)

    def batch(self, work: Sequence["Work"]) -> "Batch":
        """What `work` does, in its order.

        Raises:
          UsageError: a request that was freed, is of another memory or named twice, more tokens
            than its limit, a count that is negative or no int, or token ids that are not `count`
            numbers of 0 or more.
        """
        try:
            work = list(work)
            requests = [item.request for item in work]
            counted = [item.count for item in work]
            emits = np.array([item.emit for item in work], np.bool_)
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(f"a step takes a list of Work of requests, not {work!r}") from error
        if emits.ndim != 1:
            raise UsageError("each item of the work has one emit, a bool")
        rows, counts = self._cells(requests, counted)
        named = {
            at: _named_tokens(item.tokens, item.count)
            for at, item in enumerate(work)
            if item.tokens is not None
        }
        batch = Batch(self, requests, rows, counts, emits, named)
        follows = counts > 0
        follows[list(named)] = False
        if (counts[follows] > 1).any():
            most = int(counts[follows].max())
            raise UsageError(f"only one token can be the one sampled last, not {most}")
        self.require_sampled(rows[follows])
        return batch

    def unnamed(self, requests: "Sequence[Request]", counts: Sequence[int] | np.ndarray) -> "Batch":
        """As `batch`, for tokens that nobody names; each request samples after its last one."""
        rows, exact = self._cells(requests, counts)
        return Batch(self, requests, rows, exact, exact > 0, {})

    def _cells(
        self, requests: "Sequence[Request]", counts: Sequence[int] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of requests and their counts of new tokens, int64[requests] each.

        Raises:
          UsageError: as `batch`, but for token ids.
        """
        try:
            taken = [request.row for request in requests]
        except (AttributeError, TypeError) as error:
            raise UsageError(f"a step is of several requests, not {requests!r}") from error
        if len(set(taken)) < len(taken):
            raise UsageError("a request takes part in a step once")
        rows = np.array(taken, np.int64)
        if isinstance(counts, np.ndarray) and counts.dtype == np.int64:
            exact = counts
        else:
            exact = int32(counts, "counts of new tokens").astype(np.int64)
        if exact.shape != rows.shape:
            raise UsageError(f"{len(taken)} requests take as many counts, not {counts!r}")
        holders = self.holders
        for request in requests:
            if request.rows is not self or holders[request.row] is not request:
                self.require_held(request)  # and it raises
        most = self.limit[rows] - self.length[rows]
        is_wrong = (exact < 0) | (exact > most)
        if np.count_nonzero(is_wrong):
            at = int(np.argmax(is_wrong))
            request = requests[at]
            raise UsageError(
                f"a request of {request.limit} tokens at most cannot grow from "
                f"{request.length} by {exact[at]}"
            )
        return rows, exact

    def advance(self, batch: "Batch") -> None:
        """Counts a batch's tokens as dispatched."""
        runs = batch.counts > 0
        self.length[batch.rows] += batch.counts
        self.has_sampled[batch.rows[runs]] = batch.emits[runs]

    def require_held(self, request: "Request") -> None:
        """Raises UsageError for a request that was freed, or one of another memory."""
        if not isinstance(request, Request):
            raise UsageError(
                f"requests are what `open`, `admit` and `fork` return, not {request!r}"
            )
        if request.rows is not self:
            raise UsageError("the request is of another memory")
        if self.holders[request.row] is not request:
            raise UsageError("the request was freed")

    def require_sampled(self, rows: np.ndarray) -> None:
        """Raises UsageError unless the device holds the next token of each row's request.

        Otherwise a step would go on from a token that an earlier request left in the row.
        """
        if not self.has_sampled[rows].all():
            row = int(rows[np.argmin(self.has_sampled[rows])])
            raise UsageError(f"the request of row {row} has sampled no next token: name it")


@dataclass(slots=True, eq=False)
class Request:
    """One request's memory. Only `Memory` changes it.

    Attributes:
      rows, row: the columns, and its place in them.
      ids: page id of each page; 0 where no sub-pool ever held the page.
      has_slots: whether it holds a slot of each state sub-pool: from the first token on.
      first: per token sub-pool index, the first page still held there.
      gaps: per window sub-pool index, pages [start, end) that a long chunk left out, until it is
        settled.
      peak: committed units per sub-pool in all, or None without a commitment.
    """

    rows: Rows = field(repr=False)
    row: int
    ids: list[int] = field(default_factory=list)
    has_slots: bool = False
    first: dict[int, int] = field(default_factory=dict)
    gaps: dict[int, range] = field(default_factory=dict)
    peak: Demand | None = None

    @property
    def length(self) -> int:
        """Tokens that dispatched steps consumed."""
        return int(self.rows.length[self._held_row()])

    @property
    def limit(self) -> int:
        """Most tokens it may grow to."""
        return int(self.rows.limit[self._held_row()])

    @property
    def has_sampled(self) -> bool:
        """Whether the device holds the token that follows `length`."""
        return bool(self.rows.has_sampled[self._held_row()])

    @property
    def options(self) -> np.ndarray:
        """int32[5], the words of `Sampling.words()`."""
        return self.rows.options[self._held_row()]

    @property
    def slots(self) -> list[int]:
        """Slot id per state sub-pool; empty before the first token."""
        row = self._held_row()
        return self.rows.slots[row].tolist() if self.has_slots else []

    def mapped(self, pool: int, stop: int | None = None) -> list[int]:
        """Ids of the pages before page `stop` that sub-pool `pool` holds for the request."""
        start, gap = self.first.get(pool, 0), self.gaps.get(pool)
        if gap is None:
            return self.ids[start:stop]
        pages = range(start, len(self.ids) if stop is None else stop)
        return [self.ids[page] for page in pages if page not in gap]

    def held(self, pool: int) -> int:
        """Pages that sub-pool `pool` holds for the request."""
        return len(self.ids) - self.first.get(pool, 0) - len(self.gaps.get(pool, ()))

    def _held_row(self) -> int:
        """The row, as long as it is this request's: afterwards its cells are another's."""
        self.rows.require_held(self)
        return self.row


@dataclass(frozen=True, slots=True)
class Prefix:
    """Computed tokens that a request may begin with; somebody else holds them.

    Attributes:
      length: tokens.
      ids: the id of each page of [0, length), by page number; shared by the caller in every token
        sub-pool that still sees the page (elsewhere never read).
      slots: per state sub-pool of the plan's `slot_pools`, the id of a slot of it with the running
        state after `length` tokens.
    Raises:
      UsageError: a length, an id or a slot that is no int of at least 0.
    """

    length: int = 0
    ids: Sequence[int] = ()
    slots: Sequence[int] = ()

    def __post_init__(self) -> None:
        length = plain_int(self.length, "a prefix is a count of tokens, at least 0", least=0)
        object.__setattr__(self, "length", length)
        for name in ("ids", "slots"):
            rule = f"the {name} of a prefix are ints of at least 0"
            try:
                found = tuple(plain_int(id_, rule, 0) for id_ in getattr(self, name))
            except TypeError as error:
                raise UsageError(f"{rule}, not {getattr(self, name)!r}") from error
            object.__setattr__(self, name, found)


NO_PREFIX = Prefix()


def require_prefix(prefix: object, most: int) -> None:
    """Raises UsageError unless it is a prefix of at most so many tokens."""
    if not isinstance(prefix, Prefix) or prefix.length > most:
        raise UsageError(f"a request of {most} tokens begins with a Prefix of these, not {prefix}")


@dataclass(slots=True)  # frozen, it would take three times as long to make
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


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step, row by row of its packet.

    Attributes:
      requests: one per packet row.
      rows: int64[R], their rows of the columns.
      counts: int64[R], new tokens.
      emits: bool[R], whether a token is sampled after them.
      named: token ids int32[count] by packet row; other rows go on from the token sampled last.
    """

    columns: Rows
    requests: Sequence[Request]
    rows: np.ndarray
    counts: np.ndarray
    emits: np.ndarray
    named: dict[int, np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        """int64[R], tokens before the step; changes when the batch is dispatched."""
        return self.columns.length[self.rows]

    @property
    def most_tokens(self) -> int:
        """Most new tokens of a request."""
        return int(self.counts.max(initial=0))

    @property
    def past_tokens(self) -> int:
        """Longest past of a request."""
        return int(self.lengths.max(initial=0))

    def of_counts(self, counts: np.ndarray) -> "Batch":
        """The same requests with other numbers of new tokens, sampled last each."""
        return replace(self, counts=counts)


def _named_tokens(tokens: object, count: int) -> np.ndarray:
    """int32[count] token ids.

    Raises:
      UsageError: if they are not `count` whole numbers of 0 or more.
    """
    ids = int32(tokens, "token ids")
    if ids.shape != (count,) or (ids.size and ids.min() < 0):
        raise UsageError(f"token ids are {count} numbers that are not negative")
    return ids
