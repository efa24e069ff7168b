"""What the host keeps of one request's memory, and what a request does in one step.

Plain values without behaviour of their own: `Memory` alone changes a `Request`, and a `Work` is
made for one step.
"""

from dataclasses import dataclass, field

import numpy as np

from unimem_jax.errors import UsageError
from unimem_jax.packet import LAST_TOKEN, int32
from unimem_jax.price import Demand


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
      gaps: per window sub-pool index, pages [start, end) that a long chunk left out, until it is
        settled.
      peak: committed units per sub-pool in all, or None without a commitment.
      has_sampled: whether the device holds the token that follows `length`.
      settle_at: length from which on some window page is no longer seen.
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
    has_sampled: bool = False
    settle_at: int = 0
    is_open: bool = True

    def require_sampled(self) -> None:
        """Raises UsageError unless the device holds the request's next token.

        Otherwise a step would go on from a token that an earlier request left in the row.
        """
        if not self.has_sampled:
            raise UsageError(f"the request of row {self.row} has sampled no next token: name it")

    def mapped(self, pool: int, start: int, stop: int) -> list[int]:
        """Ids of pages [start, stop) that sub-pool `pool` holds something for."""
        gap = self.gaps.get(pool)
        if gap is None:
            return self.ids[start:stop]
        return [self.ids[page] for page in range(start, stop) if page not in gap]

    def held(self, pool: int) -> int:
        """Pages that sub-pool `pool` holds for the request."""
        return len(self.ids) - self.first.get(pool, 0) - len(self.gaps.get(pool, ()))


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

    def token_ids(self) -> np.ndarray:
        """int32[count] for the packet.

        Raises:
          UsageError: a negative count or id, ids that are not `count` whole numbers, or more than
            one token that is to be the one sampled last.
        """
        if self.tokens is None:
            if not 0 <= self.count <= 1:
                raise UsageError(f"only one token can be the one sampled last, not {self.count}")
            if self.count:
                self.request.require_sampled()
            return np.full(self.count, LAST_TOKEN, np.int32)
        ids = int32(self.tokens, "token ids")
        if ids.shape != (self.count,) or (ids.size and ids.min() < 0):
            raise UsageError(f"token ids are {self.count} numbers that are not negative")
        return ids

    def advance(self) -> None:
        """Counts the tokens as dispatched."""
        self.request.length += self.count
        if self.count:
            self.request.has_sampled = self.emit
