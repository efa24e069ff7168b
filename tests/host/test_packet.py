"""The words of packets and of the device's tables: each has a place of its own, and fits int32."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from unimem_jax.errors import UsageError
from unimem_jax.packet import (
    OPTION_WORDS,
    UPKEEP_MOVES,
    UPKEEP_UPDATES,
    Shape,
    blank,
    fields,
    int32,
    step_shape,
    upkeep_shape,
    word_count,
)
from unimem_jax.page_tables import tables_of
from unimem_jax.plan import plan
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, window

PARTS = [
    Part(Site(0), "key", (32,), "float32", CONTEXT),
    Part(Site(1), "key", (64,), "float32", window(5)),
    Part(Site(2), "state", (9,), "float32", REQUEST),
]
PLAN = plan(PARTS, 64 << 10, 4)
TABLE_WORDS, ROWS = 999, 7

shapes = st.builds(
    Shape, rows=st.integers(1, 5), tokens=st.integers(1, 9), pages=st.integers(0, 9),
    slots=st.integers(0, 2), updates=st.integers(0, 9),
) | st.integers(0, 2).map(lambda pool: upkeep_shape(PLAN, pool))  # fmt: skip


@given(shape=shapes)
def test_each_word_belongs_to_one_field(shape):
    used = np.zeros(word_count(shape), np.int32)
    for start, dims in fields(shape).values():
        used[start : start + int(np.prod(dims, dtype=np.int64))] += 1
    assert (used == 1).all()


@given(shape=shapes)
def test_a_blank_packet_addresses_nothing(shape):
    packet, words = blank(shape, TABLE_WORDS, ROWS)
    assert packet.words.dtype == np.int32
    assert (words["updates_index"] == TABLE_WORDS).all()
    if shape.rows:
        assert (words["row"] == ROWS).all()
        assert not words["count"].any()
        assert not words["emit"].any()
    else:
        assert words["move_count"].tolist() == [0]
        assert words["sources"].shape == words["destinations"].shape == (UPKEEP_MOVES,)
        assert words["updates_index"].shape == (UPKEEP_UPDATES,)
    assert (packet.words >= 0).all(), "something is addressed from the end"


@given(shape=shapes)
def test_a_field_that_is_written_is_written_in_the_packet_and_in_no_other(shape):
    first, words = blank(shape, TABLE_WORDS, ROWS)
    second, _ = blank(shape, TABLE_WORDS, ROWS)
    kept = second.words.copy()
    for number, field in enumerate(words.values()):
        field[...] = 1000 + number
    counts = np.bincount(first.words - 1000, minlength=len(words))
    assert counts.tolist() == [field.size for field in words.values()]
    assert np.array_equal(second.words, kept)


@pytest.mark.parametrize("tokens", [1, 4, 5, 64])
@pytest.mark.parametrize("rows", [1, 6])
def test_a_step_packet_has_room_for_what_its_rows_can_change(rows, tokens):
    """Per row: table cell and two mappings of each new page, each window's drops, and a slot."""
    shape = step_shape(PLAN, rows, tokens, 9)
    pages = -(-(tokens - 1) // 4) + 1
    assert shape.updates >= rows * (pages * 3 + pages + 1)
    assert (shape.rows, shape.tokens, shape.pages, shape.slots) == (rows, tokens, 9, 1)
    assert fields(shape)["options"][1] == (rows, OPTION_WORDS)


LEAST, MOST = -(2**31), 2**31 - 1


@given(values=st.lists(st.integers(LEAST, MOST), max_size=5))
def test_whole_numbers_stay_what_they_are(values):
    for given_as in (values, np.array(values, np.int64), tuple(values)):
        found = int32(given_as, "ids")
        assert found.dtype == np.int32
        assert found.tolist() == values


@pytest.mark.parametrize(
    "values, seen",
    [
        ([MOST + 1], str(MOST + 1)),
        ([LEAST - 1], str(LEAST - 1)),
        ([2**63], str(2**63)),
        ([0, 2**63], "int32"),
        ([2**64], "int32"),
        ([-(2**70)], "int32"),
        (np.array([2**32], np.uint64), str(2**32)),
        ([1.0], "float64"),
        ([float("nan")], "float64"),
        (["1"], "<U1"),
        ([True], "bool"),
        ([None], "object"),
        ([[1], [2, 3]], "[[1], [2, 3]]"),
        ({"a": 1}, "object"),
    ],
)
def test_what_is_no_int32_is_refused_with_the_value_seen(values, seen):
    with pytest.raises(UsageError) as caught:
        int32(values, "ids")
    assert "ids" in str(caught.value)
    assert seen in str(caught.value)


@given(rows=st.integers(1, 9), row_pages=st.integers(1, 9))
def test_each_cell_of_the_tables_belongs_to_one_mapping_or_row(rows, row_pages):
    tables = tables_of(PLAN, rows, row_pages)
    used = np.zeros(tables.words, np.int32)
    blank_words = tables.blank()
    assert blank_words.dtype == np.int32
    for pool, start in zip(PLAN.sub_pools, tables.mapping_start, strict=True):
        ids = pool.unit_count if pool.is_slot else PLAN.id_count
        used[start : start + ids] += 1
        assert (blank_words[start : start + ids] == pool.unit_count).all(), "not absent at first"
        assert tables.absent[pool.index] == pool.unit_count
    cells = [tables.cell(row, page) for row in range(rows) for page in range(row_pages)]
    np.add.at(used, cells, 1)
    assert (used == 1).all()
    assert tables_of(PLAN, rows, total=tables.words) == tables


@given(
    page_tokens=st.integers(1, 20),
    window_tokens=st.integers(1, 50),
    row_pages=st.integers(1, 12),
)
def test_the_columns_of_a_window_hold_the_past_of_any_query(page_tokens, window_tokens, row_pages):
    life = window(window_tokens)
    made = plan([Part(Site(0), "key", (32,), "float32", life)], 1 << 20, page_tokens)
    columns = tables_of(made, 1, row_pages).read_columns(life, 3)
    widest = 0
    for position in range(1, row_pages * page_tokens):
        past = range(max(0, position - window_tokens + 1), position)
        if past:
            touched = (past[-1] // page_tokens) - (past[0] // page_tokens) + 1
            widest = max(widest, touched)
    assert widest <= columns <= max(row_pages, widest)
    assert tables_of(made, 1, row_pages).read_columns(CONTEXT, 3) == 3
