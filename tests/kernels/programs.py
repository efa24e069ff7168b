"""Small programs over an arena, for the checks that XLA compiles them in place."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from unimem_jax.pallas_kernels.cases import AttentionCase
from unimem_jax.pallas_kernels.move_units import move_units
from unimem_jax.pallas_kernels.paged_attention import Tokens, attend
from unimem_jax.pallas_kernels.rows import gather_pages, scatter_rows

from tests.in_place import MEBIBYTE

LANE_WORDS = 64
VIEWS = ((352, 16), (512, 8))  # row words and unit rows of two sub-pools of one arena


def shaped(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def read_then_write(
    arena: jax.Array, addresses: jax.Array, rows: jax.Array, *, tied: bool
) -> tuple[jax.Array, jax.Array]:
    """Reads pages, and writes rows that do not come from what was read."""
    pages = gather_pages(arena, addresses, unit_rows=16, offset_words=64, words=LANE_WORDS)
    if tied:
        arena, pages = lax.optimization_barrier((arena, pages))
    entries = jnp.ones((rows.shape[0], arena.shape[1]), jnp.uint32)
    return scatter_rows(arena, rows, entries), pages


def plain_scatter(arena: jax.Array, rows: jax.Array, entries: jax.Array) -> jax.Array:
    """`scatter_rows` as one would write it."""
    return arena.at[rows].set(entries, mode="drop", unique_indices=True)


def two_views(
    arena: jax.Array,
    units: jax.Array,
    count: jax.Array,
    rows: jax.Array,
    *,
    write: Any = scatter_rows,
    implementation: Any = "auto",
) -> tuple[jax.Array, list[jax.Array]]:
    """Moves units, reads pages and writes rows of two sub-pools, one after the other."""
    shape, found = arena.shape, []
    for row_words, unit_rows in VIEWS:
        view = arena.reshape(-1, row_words)
        view = move_units(
            view, units, units + 1, count, unit_rows=unit_rows, implementation=implementation
        )
        arena = view.reshape(shape)
    for row_words, unit_rows in VIEWS:
        view = arena.reshape(-1, row_words)
        pages = gather_pages(view, units, unit_rows=unit_rows, words=LANE_WORDS)
        view, pages = lax.optimization_barrier((view, pages))
        found.append(pages)
        entries = jnp.full((rows.shape[0], row_words), pages.sum(dtype=jnp.uint32))
        arena = write(view, rows, entries).reshape(shape)
    return arena, found


def two_views_bytes(arena_bytes: int) -> int:
    """Bytes of an arena that both views divide."""
    granules = 11 * 16
    return arena_bytes // (128 * granules) * (128 * granules)


def two_views_shapes(rows: int, arena_bytes: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    granules = two_views_bytes(arena_bytes) // 128
    return shaped(granules, 32, dtype=jnp.uint32), shaped(4), shaped(), shaped(rows)


def layer(
    arena: jax.Array,
    query: jax.Array,
    addresses: jax.Array,
    mask: jax.Array,
    rows: jax.Array,
    *,
    case: AttentionCase,
) -> tuple[jax.Array, jax.Array]:
    """One attention layer: reads its lanes, attends, writes its entries."""
    query_heads, key_heads, head, value_head = case.heads
    key_words, value_words = key_heads * head // 2, key_heads * value_head // 2

    def read(offset: int, words: int, width: int) -> jax.Array:
        pages = gather_pages(
            arena, addresses, unit_rows=case.page_tokens, offset_words=offset, words=words
        )
        typed = lax.bitcast_convert_type(pages, jnp.bfloat16)
        return typed.reshape(case.requests, case.past, key_heads, width)

    value_offset = 0 if value_words < key_words else key_words  # a latent holds its values
    past = Tokens(read(0, key_words, head), read(value_offset, value_words, value_head))
    fresh = Tokens(
        jnp.ones((case.requests, case.new, key_heads, head), jnp.bfloat16),
        jnp.ones((case.requests, case.new, key_heads, value_head), jnp.bfloat16),
    )
    sinks = jnp.zeros((query_heads,)) if case.has_sinks else None
    mixed = attend(
        query, fresh, jnp.ones((case.requests, case.new), jnp.bool_), past, mask,
        scale=head**-0.5, window=case.window, sinks=sinks, soft_cap=case.soft_cap,
    )  # fmt: skip
    arena, mixed = lax.optimization_barrier((arena, mixed))
    entries = jnp.zeros((rows.shape[0], case.row_words), jnp.uint32)
    return scatter_rows(arena, rows, entries), mixed


def layer_shapes(case: AttentionCase, arena_bytes: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    rows = arena_bytes // (4 * case.row_words) // 8 * 8
    return (
        shaped(rows, case.row_words, dtype=jnp.uint32),
        shaped(case.requests, case.new, case.heads[0], case.heads[2], dtype=jnp.float32),
        shaped(case.requests, case.past // case.page_tokens),
        shaped(case.requests, 1, case.past, dtype=jnp.bool_),
        shaped(case.requests * case.new),
    )


def layer_temp_bytes(case: AttentionCase) -> int:
    """What a layer may hold: its past in float32 and its scores three times, entries, 4 MiB."""
    query_heads, key_heads, head, value_head = case.heads
    past = 4 * case.requests * case.past * key_heads * (head + value_head)
    scores = 4 * case.requests * query_heads * case.new * (case.past + case.new)
    return 3 * past + 3 * scores + 4 * MEBIBYTE + 4 * case.requests * case.new * case.row_words
