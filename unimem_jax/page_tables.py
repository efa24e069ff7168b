"""Where each mapping and page table lies in the one int32 vector that the device keeps.

    mapping of sub-pool 0 | mapping of sub-pool 1 | ... | page table of row 0 | page table of row 1
    | ...

The mapping turns ids into addresses; a row's page table holds the ids of its request's pages, in
order. Both change only by the index-value pairs of packets, so one scatter brings the device up to
date.
"""

from dataclasses import dataclass

import numpy as np

from unimem_jax.bands import INT32_MAX
from unimem_jax.errors import UsageError
from unimem_jax.plan import Plan
from unimem_jax.spec import Lifetime

SMALLEST_BUCKET_TOKENS = 256  # context that the smallest compiled shape reads


@dataclass(frozen=True, slots=True)
class Tables:
    """Offsets into the vector, in words.

    Attributes:
      mapping_start: first word of each sub-pool's mapping, by sub-pool index.
      absent: what a mapping holds where there is nothing, by sub-pool index.
      table_start: first word of row 0's page table.
      row_pages: words of one row's page table.
      words: length of the vector.
    """

    mapping_start: tuple[int, ...]
    absent: tuple[int, ...]
    table_start: int
    row_pages: int
    words: int
    page_tokens: int

    def blank(self) -> np.ndarray:
        """The vector before anything is granted: every mapping absent, every page table zero."""
        found = np.zeros(self.words, np.int32)
        bounds = (*self.mapping_start[1:], self.table_start)
        for start, end, absent in zip(self.mapping_start, bounds, self.absent, strict=True):
            found[start:end] = absent
        return found

    def cell(self, row: int, page: int) -> int:
        """Index of one cell of a row's page table."""
        return self.table_start + row * self.row_pages + page

    def bucket(self, tokens: int) -> int:
        """Columns that a compiled shape reads for a past of `tokens`: a power-of-4 bucket."""
        if not tokens:
            return 0
        bucket = SMALLEST_BUCKET_TOKENS
        while bucket < tokens:
            bucket *= 4
        return min(-(-bucket // self.page_tokens), self.row_pages)

    def read_columns(self, lifetime: Lifetime, pages: int) -> int:
        """Page-table columns that hold the past a query sees: `pages` for whole context, fewer for
        a window.
        """
        if lifetime.kind != "window":
            return pages
        # W - 1 past tokens at any offset within a page.
        reach = -(-(lifetime.tokens - 2) // self.page_tokens) + 1 if lifetime.tokens > 1 else 0
        return min(reach, self.row_pages)


def tables_of(
    plan: Plan, rows: int, row_pages: int | None = None, *, total: int | None = None
) -> Tables:
    """The tables of a plan for `rows` requests; of `total` words in all, or `row_pages` pages per
    row.

    Raises:
      UsageError: more words than int32 can index, which is what packets name them by.
    """
    starts, at = [], 0
    for pool in plan.sub_pools:
        starts.append(at)
        at += pool.unit_count if pool.is_slot else plan.id_count
    if row_pages is None:
        assert total is not None
        row_pages = (total - at) // rows
    words = at + rows * row_pages
    if words > INT32_MAX:
        raise UsageError(
            f"{rows} rows of {row_pages} pages make tables of {words:,} words; packets can name "
            f"{INT32_MAX:,}: fewer rows, a shorter context or larger pages"
        )
    absent = tuple(pool.unit_count for pool in plan.sub_pools)
    return Tables(tuple(starts), absent, at, row_pages, words, plan.page_tokens)
