"""What serving takes on the device beside the arena and the weights, itemised.

    always        tables, last tokens, and penalty counts where sampling keeps them
    one program   the packet, fresh entries, the gathered past, logits, sampling

A program gives its memory back when it ends, so of the two kinds of step, a decode step of all rows
and a step of some rows' chunks, the larger one counts. All sizes are bytes.

Sizes of arrays that the library makes itself are exact. What a compiled program holds for itself is
an estimate for the XLA implementation of attention, which gathers pages and scores in full; a
kernel that reads pages in place needs neither.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unimem_jax.errors import plain_int
from unimem_jax.packet import step_shape, word_count
from unimem_jax.page_tables import Tables, tables_of
from unimem_jax.plan import Plan, SubPool, size_text
from unimem_jax.spec import STORED_DTYPES, Site

WORD_BYTES = 4
SAMPLING_COPIES = 9  # of the logits, while a row that is not greedy is drawn [measured, CPU]
SCORE_COPIES = 2  # scores and what softmax makes of them, float32


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of one thing, and what they are for."""

    name: str
    byte_count: int
    use: str


@dataclass(frozen=True)
class Outside:
    """What a plan needs outside the arena. Prints itself as a table.

    Attributes:
      always: held as long as the memory is.
      decode, chunk: held while one step of that kind runs.
      title: for how many rows and tokens.
    """

    always: tuple[Item, ...]
    decode: tuple[Item, ...]
    chunk: tuple[Item, ...]
    title: str

    @property
    def byte_count(self) -> int:
        """Most bytes at any time."""
        return _sum(self.always) + max(_sum(self.decode), _sum(self.chunk))

    def to_json(self) -> dict[str, Any]:
        """All items as plain numbers and strings."""
        groups = {"always": self.always, "decode": self.decode, "chunk": self.chunk}
        found: dict[str, Any] = {"for": self.title, "bytes": self.byte_count}
        for group, items in groups.items():
            found[group] = {item.name: item.byte_count for item in items}
        return found

    def __str__(self) -> str:
        lines = [f"outside the arena {size_text(self.byte_count)}, for {self.title}"]
        for title, items in (
            ("always", self.always), ("decode step", self.decode), ("chunk step", self.chunk)
        ):  # fmt: skip
            lines.append(f"{title:<16} {size_text(_sum(items))}")
            lines += [
                f"  {item.name:<14} {size_text(item.byte_count):<9}  {item.use}"
                for item in items
                if item.byte_count
            ]
        return "\n".join(lines)


def outside(
    plan: Plan, *, rows: int = 64, context_tokens: int = 4096, chunk_tokens: int = 64,
    chunk_rows: int = 4, vocab: int = 0, query_heads: int = 0, penalties: bool = False,
) -> Outside:  # fmt: skip
    """Itemises what requests take on the device outside the arena.

    Args:
      rows: most requests that hold memory at once, and rows of a decode step.
      context_tokens: longest request.
      chunk_tokens, chunk_rows: prompt tokens of a row, and rows, of one chunk step.
      vocab: tokens that the model knows; 0 leaves logits and sampling out.
      query_heads: of the widest layer of attention; 0 leaves its scores out.
      penalties: whether sampling counts each row's tokens, int32[rows, vocab].
    Raises:
      UsageError: sizes that are not positive, or negative counts.
    """
    rows = plain_int(rows, "rows is a positive int")
    context_tokens = plain_int(context_tokens, "context_tokens is a positive int")
    chunk_tokens = plain_int(chunk_tokens, "chunk_tokens is a positive int")
    chunk_rows = plain_int(chunk_rows, "chunk_rows is a positive int")
    vocab = plain_int(vocab, "vocab is a number of tokens", least=0)
    query_heads = plain_int(query_heads, "query_heads is a number of heads", least=0)
    tables = tables_of(plan, rows, -(-context_tokens // plan.page_tokens))
    counted = rows * vocab * WORD_BYTES if penalties else 0
    always = (
        Item("mappings", tables.table_start * WORD_BYTES, "id to address, every sub-pool"),
        Item("page tables", rows * tables.row_pages * WORD_BYTES, "ids of every row's pages"),
        Item("last tokens", rows * WORD_BYTES, "one per row"),
        Item("penalties", counted, "tokens counted per row"),
    )
    program = _Program(plan, tables, context_tokens, vocab, query_heads)
    chunk_rows = min(chunk_rows, rows)
    return Outside(
        always,
        tuple(program.items(rows, 1)),
        tuple(program.items(chunk_rows, min(chunk_tokens, context_tokens))),
        f"{rows} rows of {context_tokens:,} tokens, chunks of {chunk_rows} x {chunk_tokens}",
    )


@dataclass(frozen=True, slots=True)
class _Program:
    """One step's own arrays, by its rows and new tokens per row."""

    plan: Plan
    tables: Tables
    context_tokens: int
    vocab: int
    query_heads: int

    def items(self, rows: int, tokens: int) -> Iterator[Item]:
        pages = self.tables.bucket(self.context_tokens)
        words = word_count(step_shape(self.plan, rows, tokens, pages))
        entry_bytes = sum(pool.entry_words * WORD_BYTES for pool in self.plan.token_pools)
        logits = rows * self.vocab * WORD_BYTES
        past = [
            (pool, self.tables.read_columns(pool.lifetime, pages) * pool.unit_entries)
            for pool in self.plan.token_pools
        ]
        gathered = max((rows * count * _gathered_bytes(pool) for pool, count in past), default=0)
        seen = tokens + max((count for _, count in past), default=0)
        scores = SCORE_COPIES * rows * self.query_heads * tokens * seen * WORD_BYTES
        yield Item("packet", words * WORD_BYTES, "what the host decided")
        yield Item(
            "fresh entries", rows * tokens * entry_bytes, "new tokens until they are written"
        )
        yield Item("gathered past", gathered, "of the widest site; none with a paged kernel")
        yield Item("scores", scores, "of one layer of attention; none with a paged kernel")
        yield Item("logits", logits, "float32, one row of the vocabulary per row")
        yield Item(
            "sampling", SAMPLING_COPIES * logits, "sorted copies, unless all rows are greedy"
        )


def _gathered_bytes(pool: SubPool) -> int:
    """Bytes of the widest site's parts of one entry: as stored, and in float32 to compute with."""
    sites: dict[Site, int] = {}
    for lane in pool.lanes:
        part = lane.part
        wide = 0 if STORED_DTYPES[part.dtype].itemsize == WORD_BYTES else part.elements * WORD_BYTES
        sites[part.site] = sites.get(part.site, 0) + part.byte_count + wide
    return max(sites.values())


def _sum(items: tuple[Item, ...]) -> int:
    return sum(item.byte_count for item in items)
