"""Reads of pages and writes of rows against NumPy indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unimem_jax.pallas_kernels.errors import ArgumentError
from unimem_jax.pallas_kernels.rows import gather_pages, scatter_rows

INT32_MAX = 2**31 - 1


def words(rows: int, row_words: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**32, (rows, row_words), dtype=np.uint32)


@given(st.data())
def test_a_gather_reads_the_lane_of_every_row_of_each_page(data):
    unit_rows = data.draw(st.sampled_from([1, 3, 8, 16, 64]))
    row_words = data.draw(st.integers(1, 40))
    pages = data.draw(st.integers(1, 5))
    arena = words(pages * unit_rows + data.draw(st.integers(0, unit_rows - 1)), row_words)
    offset = data.draw(st.integers(0, row_words - 1))
    width = data.draw(st.integers(1, row_words - offset))
    shape = data.draw(st.sampled_from([(), (4,), (2, 3), (0,)]))
    addresses = np.asarray(
        data.draw(st.lists(st.integers(0, pages - 1), min_size=6, max_size=6)), np.int32
    )[: np.prod(shape, dtype=int)].reshape(shape)
    found = gather_pages(
        jnp.asarray(arena), jnp.asarray(addresses),
        unit_rows=unit_rows, offset_words=offset, words=width,
    )  # fmt: skip
    by_page = arena[: pages * unit_rows].reshape(pages, unit_rows, row_words)
    np.testing.assert_array_equal(found, by_page[addresses][..., offset : offset + width])


@pytest.mark.parametrize("address", [3, 4, INT32_MAX, -1, -INT32_MAX - 1])
def test_a_gather_of_an_absent_page_stays_inside_the_arena(address):
    arena = words(26, 5)  # three pages of 8 rows, and two rows that belong to none
    found = gather_pages(jnp.asarray(arena), jnp.asarray([address], jnp.int32), unit_rows=8)
    first = 0 if address < 0 else 16
    np.testing.assert_array_equal(found[0], arena[first : first + 8])


@given(st.data())
def test_a_scatter_writes_the_named_rows_and_nothing_else(data):
    rows, row_words = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 40))
    offset = data.draw(st.integers(0, row_words - 1))
    width = data.draw(st.integers(1, row_words - offset))
    inside = data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=6))
    outside = data.draw(st.lists(st.sampled_from([rows, rows + 7, INT32_MAX, -1]), max_size=4))
    named = np.asarray(data.draw(st.permutations(inside + outside)), np.int32)
    arena, entries = words(rows, row_words), words(len(named), width) + np.uint32(1)
    expected = arena.copy()
    for row, entry in zip(named, entries, strict=True):
        if 0 <= row < rows:
            expected[row, offset : offset + width] = entry
    found = scatter_rows(
        jnp.asarray(arena), jnp.asarray(named), jnp.asarray(entries), offset_words=offset
    )
    np.testing.assert_array_equal(found, expected)


def test_the_naive_write_at_minus_one_overwrites_the_last_row():
    arena, entry = jnp.zeros((4, 2), jnp.uint32), jnp.ones((1, 2), jnp.uint32)
    rows = jnp.asarray([-1], jnp.int32)
    assert arena.at[rows].set(entry, mode="drop")[3].any()
    assert not scatter_rows(arena, rows, entry).any()


ARENA = jnp.zeros((8, 32), jnp.uint32)
ROWS = jnp.zeros((2,), jnp.int32)
ENTRIES = jnp.zeros((2, 32), jnp.uint32)


@pytest.mark.parametrize(
    "message, call",
    [
        ("arena is int32", lambda: gather_pages(ARENA.astype(jnp.int32), ROWS, unit_rows=1)),
        ("arena is uint32", lambda: gather_pages(ARENA[0], ROWS, unit_rows=1)),
        ("addresses is uint32", lambda: gather_pages(ARENA, ROWS.astype(jnp.uint32), unit_rows=1)),
        ("unit_rows is 0", lambda: gather_pages(ARENA, ROWS, unit_rows=0)),
        ("unit_rows is 9", lambda: gather_pages(ARENA, ROWS, unit_rows=9)),
        ("33", lambda: gather_pages(ARENA, ROWS, unit_rows=1, offset_words=1, words=32)),
        ("window", lambda: gather_pages(ARENA, ROWS, unit_rows=1, offset_words=-1, words=2)),
        ("window", lambda: gather_pages(ARENA, ROWS, unit_rows=1, offset_words=32)),
        ("rows is int32", lambda: scatter_rows(ARENA, ROWS[None], ENTRIES)),
        ("one per row", lambda: scatter_rows(ARENA, ROWS, ENTRIES[:1])),
        ("entries is float32", lambda: scatter_rows(ARENA, ROWS, ENTRIES.astype(jnp.float32))),
        ("window", lambda: scatter_rows(ARENA, ROWS, ENTRIES, offset_words=1)),
    ],
)
def test_bad_input_is_refused_by_name(message, call):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_an_arena_without_an_int32_absent_row_is_refused():
    arena = jax.ShapeDtypeStruct((2**31, 32), jnp.uint32)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    with pytest.raises(ArgumentError, match="2147483648 rows"):
        jax.eval_shape(lambda arena, rows: gather_pages(arena, rows, unit_rows=1), arena, rows)
