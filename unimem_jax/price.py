"""What tokens cost, in units of every sub-pool. The one place where memory is priced.

A request that has computed `length` tokens holds, in each token sub-pool, the pages of tokens that
its next query still sees, and one slot of running state:

    context   [0, length)                          all pages
    window    [first_kept(length), length)         a suffix, rounded out to whole pages
    request   one slot, from the first token on; of named request state none by itself

R1  While a chunk runs a request holds what it held before and the new pages that are still wanted
    after it.
R2  A page is dropped by the step after which no query sees it; it can be granted again from the
    next step on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from unimem_jax.plan import Plan, SubPool, size_text
from unimem_jax.spec import Lifetime

GROWTHS = 4096  # kept, of those priced last

type Demand = tuple[int, ...]  # units per sub-pool, in the plan's order


@dataclass(frozen=True)
class Prices:
    """Prices of one plan. All methods are pure and cost a few operations per sub-pool."""

    plan: Plan
    _growths: Callable[[int, int, bool], Demand] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Most are of one token onto a new page, and come again for every request.
        object.__setattr__(self, "_growths", lru_cache(GROWTHS)(self._growth))

    def pages(self, tokens: int) -> int:
        """Pages that `tokens` tokens touch."""
        return -(-tokens // self.plan.page_tokens)

    def first_page(self, lifetime: Lifetime, length: int) -> int:
        """First page that a query at position `length` still sees."""
        return lifetime.first_kept(length) // self.plan.page_tokens

    def new_pages(self, pool: SubPool, length: int, target: int, fused: bool = False) -> range:
        """Page numbers that growing from `length` to `target` tokens adds in a token sub-pool.

        A chunk skips pages that its own end makes invisible; `fused` decode steps write and read
        each of them.
        """
        first = self.pages(length)
        if not fused:
            first = max(first, self.first_page(pool.lifetime, target))
        return range(first, max(first, self.pages(target)))

    def additions(
        self, start: int, length: int, target: int, fused: bool = False
    ) -> Iterator[tuple[range, list[int]]]:
        """Page numbers from `start` on that growing adds, with the sub-pools that hold them.

        Yields:
          Consecutive ranges and, for each, the indices of the same token sub-pools.
        """
        end = self.pages(target)
        firsts = {
            pool.index: min(end, self.new_pages(pool, length, target, fused).start)
            for pool in self.plan.token_pools
        }
        for first, stop in pairwise(sorted({start, end, *firsts.values()} if firsts else ())):
            if start <= first:
                yield range(first, stop), [i for i, page in firsts.items() if page <= first]

    def growth(self, length: int, target: int, fused: bool = False) -> Demand:
        """Units to grant before a step that takes a request from `length` to `target` tokens."""
        return self._growths(length, target, fused)

    def _growth(self, length: int, target: int, fused: bool) -> Demand:
        return tuple(
            int(pool.is_running and length == 0 < target) if pool.is_slot
            else len(self.new_pages(pool, length, target, fused))
            for pool in self.plan.sub_pools
        )  # fmt: skip

    def held(self, length: int) -> Demand:
        """Units that a request of `length` computed tokens holds between steps."""
        pages = self.pages(length)
        return tuple(
            int(pool.is_running and length > 0)
            if pool.is_slot
            else pages - min(pages, self.first_page(pool.lifetime, length))
            for pool in self.plan.sub_pools
        )

    def held_at(self, lengths: np.ndarray, is_running: bool = False) -> list[np.ndarray]:
        """As `held` for many lengths at once: one array of their shape per sub-pool.

        With `is_running` while the last of those tokens is computed (R1).
        """
        pages, seen = -(-lengths // self.plan.page_tokens), lengths + int(not is_running)
        found = []
        for pool in self.plan.sub_pools:
            if pool.is_slot:
                found.append((lengths > 0) & pool.is_running)
            elif pool.lifetime.kind == "window":
                first = np.maximum(0, seen - pool.lifetime.tokens) // self.plan.page_tokens
                found.append(pages - np.minimum(pages, first))
            else:
                found.append(pages)
        return found

    def peak(self, total: int, chunk: int, fused: int = 1) -> Demand:
        """Most units that a request of `total` tokens ever holds.

        It grows by chunks of at most `chunk` tokens, or by at most `fused` decode steps granted
        ahead.
        """
        found = []
        for pool in self.plan.sub_pools:
            if pool.is_slot:
                found.append(int(pool.is_running))
                continue
            pages = self.pages(total)
            if pool.lifetime.kind == "window":
                # A page that is not full is held even where a window of 1 sees none of it.
                is_partly_full = self.plan.page_tokens > 1
                seen = pool.lifetime.tokens - 1
                before = max(self._touched(seen), int(is_partly_full))
                apart = before + self._touched(max(min(chunk, pool.lifetime.tokens), fused))
                pages = min(pages, apart, self._touched(seen + max(chunk, fused)))
            found.append(pages)
        return tuple(found)

    def itemise(self, demand: Sequence[int]) -> str:
        """A demand as text: each sub-pool's units and bytes."""
        return ", ".join(
            f"{count} {'slot' if pool.is_slot else 'page'}{'' if count == 1 else 's'} of "
            f"{pool.name} ({size_text(count * pool.unit_bytes)})"
            for pool, count in zip(self.plan.sub_pools, demand, strict=True)
        )

    def _touched(self, tokens: int) -> int:
        """Most pages that `tokens` consecutive tokens touch at any offset."""
        return -(-(tokens + self.plan.page_tokens - 1) // self.plan.page_tokens) if tokens else 0


def total_held(prices: Prices, lengths: Sequence[int]) -> Demand:
    """What requests of these lengths hold together between steps."""
    return tuple(int(held.sum()) for held in prices.held_at(np.array(lengths, np.int64)))


def add(first: Sequence[int], second: Sequence[int]) -> Demand:
    """The sum of two demands."""
    return tuple([a + b for a, b in zip(first, second, strict=True)])


def less(first: Sequence[int], second: Sequence[int]) -> Demand:
    """What of the first demand the second leaves."""
    return tuple([a - b for a, b in zip(first, second, strict=True)])
