"""Reads of whole pages and writes of whole rows of the arena, by XLA, on every platform.

The arena is seen through one sub-pool's view, uint32[rows, row_words]; a page is `unit_rows`
consecutive rows. Words are moved as they are: the caller bitcasts the small result.

K1. A read never leaves the arena: addresses are clamped, and the caller masks what it reads.
K2. A write outside the arena is dropped; one past the last row is the usual absent row.
K3. No buffer grows with the arena. `scatter_rows` writes in place if the arena is donated.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32, UInt32

from .arguments import require_arena, require_int32, require_unit_rows, require_words
from .errors import ArgumentError


def gather_pages(
    arena: UInt32[Array, "rows row_words"],
    addresses: Int32[Array, "*batch"],
    *,
    unit_rows: int,
    offset_words: int = 0,
    words: int | None = None,
) -> UInt32[Array, "*batch unit_rows words"]:
    """Reads words [offset_words, offset_words + words) of every row of each page.

    Args:
      addresses: page numbers of any shape; one outside the arena reads some page that is inside.
      unit_rows: rows of a page; page `a` is rows [a * unit_rows, (a + 1) * unit_rows).
      words: words of the lane; None means all that follow `offset_words`.
    Raises:
      ArgumentError: at trace time, for a wrong dtype or a lane that leaves the row.
    Cost: reads and writes `addresses.size * unit_rows * words * 4` bytes. On a CPU one slice
      per page takes 0.5 to 0.9 times what one slice per row takes.
    """
    require_arena(arena)
    require_int32("addresses", addresses)
    rows, row_words = arena.shape
    require_unit_rows(unit_rows, rows)
    words = row_words - offset_words if words is None else words
    require_words(offset_words, words, row_words)
    # Clamped before the product: the absent address times unit_rows may not be an int32.
    first_rows = jnp.clip(addresses, 0, rows // unit_rows - 1) * unit_rows
    starts = jnp.stack([first_rows, jnp.full_like(first_rows, offset_words)], axis=-1)
    batch_rank = addresses.ndim
    return lax.gather(
        arena,
        starts,
        lax.GatherDimensionNumbers(
            offset_dims=(batch_rank, batch_rank + 1),
            collapsed_slice_dims=(),
            start_index_map=(0, 1),
        ),
        slice_sizes=(unit_rows, words),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def scatter_rows(
    arena: UInt32[Array, "rows row_words"],
    rows: Int32[Array, " writes"],
    entries: UInt32[Array, "writes words"],
    *,
    offset_words: int = 0,
) -> UInt32[Array, "rows row_words"]:
    """Writes one packed entry, or one lane of it, per named row.

    Args:
      rows: row of each entry; rows inside the arena differ from each other; one outside is dropped.
      entries: the words of columns [offset_words, offset_words + words).
    Returns:
      The arena, in place if donated; other rows and other columns are untouched.
    Raises:
      ArgumentError: at trace time, for a wrong dtype, unequal counts or a lane that leaves the row.
    Cost: writes `entries.size * 4` bytes, reads no row, copies nothing.
    """
    require_arena(arena)
    require_int32("rows", rows, ndim=1)
    if entries.dtype != jnp.uint32 or entries.ndim != 2 or entries.shape[0] != rows.shape[0]:
        raise ArgumentError(
            f"entries is {entries.dtype}{list(entries.shape)}; "
            f"it must be uint32[{rows.shape[0]}, words], one per row named"
        )
    require_words(offset_words, entries.shape[1], arena.shape[1])
    if rows.shape[0] == 1:
        # XLA turns a scatter of one row into a slice update, and two of those through two views of
        # the arena copy it; a second row, which is dropped, keeps this a scatter.
        rows = jnp.concatenate([rows, jnp.full_like(rows, arena.shape[0])])
        entries = jnp.concatenate([entries, entries])
    starts = jnp.stack([rows, jnp.full_like(rows, offset_words)], axis=-1)
    return lax.scatter(
        arena,
        starts,
        entries,
        lax.ScatterDimensionNumbers(
            update_window_dims=(1,),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, 1),
        ),
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
