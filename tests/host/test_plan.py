"""The layout of any parts in any number of bytes, against what P1 to P6 of the plan promise."""

import json
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.memory.twin import packs_fast
from unimem_jax.cli import size
from unimem_jax.errors import UsageError
from unimem_jax.plan import plan, size_text
from unimem_jax.spec import (
    CONTEXT,
    PAIRED_DTYPES,
    REQUEST,
    STORED_DTYPES,
    Part,
    Site,
    request,
    window,
)

KIB, GIB = 1 << 10, 1 << 30
LIFETIMES = [CONTEXT, REQUEST, request("checkpoint"), window(1), window(7), window(64)]


@st.composite
def declared(draw):
    """Parts of a few sites, with the awkward shapes that nobody would choose."""
    found = {}
    for _ in range(draw(st.integers(1, 9))):
        site = Site(draw(st.integers(0, 2)), draw(st.integers(0, 1)))
        name = draw(st.sampled_from(["key", "value", "scale", "state"]))
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        dtype = draw(st.sampled_from(list(STORED_DTYPES)))
        shape = (*shape, 2) if dtype in PAIRED_DTYPES else shape
        lifetime, draft = draw(st.sampled_from(LIFETIMES)), draw(st.booleans())
        stride = 1 if lifetime.is_request else draw(st.sampled_from([1, 1, 1, 2, 4]))
        found[site, name] = Part(site, name, shape, dtype, lifetime, stride, draft)
    return draw(st.permutations(list(found.values())))


page_sizes = st.integers(1, 40) | st.integers(1, 10).map(lambda count: 4 * count)
sizes = {"arena_bytes": st.integers(1, 1 << 21), "page_tokens": page_sizes}


def planned(parts, arena_bytes, page_tokens):
    """The plan; None for an arena that is too small, or a page that a stride does not divide."""
    parts = list(parts)
    try:
        return plan(parts, arena_bytes, page_tokens)
    except UsageError as error:
        if any(page_tokens % part.stride for part in parts):
            assert "page_tokens is a multiple of" in str(error)
        else:
            assert "too small" in str(error)
        return None


@given(parts=declared(), **sizes)
@settings(max_examples=200)
def test_the_arena_is_whole_entries_of_every_sub_pool(parts, arena_bytes, page_tokens):
    made = planned(parts, arena_bytes, page_tokens)
    if made is None:
        return
    assert 0 < made.arena_bytes <= made.requested_bytes == arena_bytes
    assert made.arena_bytes == made.arena_granules * 128
    for pool in made.sub_pools:
        row_bytes = 512 if pool.is_slot else pool.entry_words * 4
        assert made.arena_bytes % row_bytes == 0
        assert pool.unit_entries == (1 if pool.is_slot else page_tokens / pool.stride)
        assert pool.unit_bytes == pool.entry_words * 4 * pool.unit_entries
        assert pool.unit_count == made.arena_bytes // pool.unit_bytes > 0
        assert pool.unit_bytes % (4 * KIB if pool.is_slot else 128) == 0


@given(parts=declared(), **sizes)
@settings(max_examples=200)
def test_every_part_has_bytes_of_its_own_at_its_alignment(parts, arena_bytes, page_tokens):
    made = planned(parts, arena_bytes, page_tokens)
    if made is None:
        return
    assert sorted(lane.part.key for p in made.sub_pools for lane in p.lanes) == sorted(
        part.key for part in parts
    )
    for pool in made.sub_pools:
        used = np.zeros(pool.entry_words * 4, np.int32)
        for lane in pool.lanes:
            assert (lane.part.lifetime, lane.part.stride) == (pool.lifetime, pool.stride)
            start, size = lane.offset_words * 4, lane.part.byte_count
            small = 16 if size < 128 else 128
            assert start % (512 if pool.is_slot else small) == 0
            assert lane.words == -(-size // 4)
            # Words, not bytes: a write covers the last word whole.
            used[start : start + lane.words * 4] += 1
            assert start + lane.words * 4 <= used.size
        assert used.max() == 1, "two parts share a word"
        parts_bytes = sum(lane.part.byte_count for lane in pool.lanes)
        assert pool.padding_bytes == pool.entry_words * 4 - parts_bytes, "padding is hidden"


@given(parts=declared(), page_tokens=st.sampled_from([4, 8]))
@settings(max_examples=200)
def test_the_parts_of_a_draft_move_none_of_the_targets(parts, page_tokens):
    made = plan(parts, 1 << 22, page_tokens)
    for pool in made.sub_pools:
        flags = [lane.part.draft for lane in pool.lanes]
        assert flags == sorted(flags), "a draft lane lies before one of the target"
        assert pool.target_words % 32 == 0, "a draft lane shares a granule with the target"
        drafts = [lane.offset_words for lane in pool.lanes if lane.part.draft]
        assert pool.target_words == min(drafts, default=pool.entry_words)
    target = [part for part in parts if not part.draft]
    if target:
        alone = plan(target, 1 << 22, page_tokens)
        for part in target:
            assert alone.locate(part.key)[1] == made.locate(part.key)[1]


@given(parts=declared(), **sizes)
@settings(max_examples=200)
def test_a_plan_that_is_made_holds_one_of_everything(parts, arena_bytes, page_tokens):
    made = planned(parts, arena_bytes, page_tokens)
    if made is not None:
        units, ends = made.geometry.unit_granules, made.geometry.ends
        assert packs_fast(made.arena_granules, units, ends, (1,) * len(units))


def test_sizes_that_fit_in_sum_but_not_on_their_grids_are_refused():
    """72 granules: a slot at [0, 32); the only page of 40 at [0, 40)."""
    parts = [
        Part(Site(0), "state", (1024,), "float32", REQUEST),
        Part(Site(1), "key", (32,), "float32", CONTEXT),
    ]
    with pytest.raises(UsageError, match="one slot of request 4 KiB, one page of context 5 KiB"):
        plan(parts, 72 * 128, page_tokens=40)
    assert plan(parts, 80 * 128, page_tokens=40).arena_granules == 80


@given(parts=declared(), arena_bytes=st.integers(1, 1 << 16), page_tokens=st.integers(1, 40))
@settings(max_examples=200)
def test_a_refused_arena_is_told_a_size_that_is_enough(parts, arena_bytes, page_tokens):
    parts = [part for part in parts if page_tokens % part.stride == 0]
    if not parts or planned(parts, arena_bytes, page_tokens):
        return
    with pytest.raises(UsageError) as caught:
        plan(parts, arena_bytes, page_tokens)
    *_, enough = str(caught.value).split("; ")
    assert enough.endswith(" are enough")
    made = plan(parts, size(enough.removesuffix(" are enough")), page_tokens)
    one_of_each = sum(pool.unit_bytes for pool in made.sub_pools)
    assert made.requested_bytes < 4 * one_of_each + (64 << 10)


def test_a_page_that_no_device_holds_is_refused():
    """Not one granule of it is asked for."""
    part = Part(Site(0), "key", (1 << 20, 1 << 20), "float32", CONTEXT)
    with pytest.raises(UsageError, match=r"page of context 64 TiB; more than the 256 GiB"):
        plan([part], 1 << 30, 16)


@given(parts=declared(), **sizes)
@settings(max_examples=100)
def test_the_same_arguments_give_the_same_plan(parts, arena_bytes, page_tokens):
    made = planned(parts, arena_bytes, page_tokens)
    assert made == planned(iter(parts), arena_bytes, page_tokens)


@given(parts=declared(), **sizes)
@settings(max_examples=100)
def test_physical_order_has_the_ends_where_the_allocator_wants_them(
    parts, arena_bytes, page_tokens
):
    made = planned(parts, arena_bytes, page_tokens)
    if made is None:
        return
    pools = made.sub_pools
    kinds = {pool.lifetime.kind for pool in pools}
    assert [pool.index for pool in pools] == list(range(len(pools)))
    assert pools[0].end == "low"
    assert all(pool.end == "float" for pool in pools[1:-1])
    assert len(pools) == 1 or pools[-1].end == "high"
    assert pools[0].is_slot or "request" not in kinds
    assert len(pools) == 1 or pools[-1].lifetime == CONTEXT or "context" not in kinds
    floats = [pool.unit_granules for pool in pools[1:-1]]
    assert floats == sorted(floats, reverse=True)
    assert made.token_pools == tuple(pool for pool in pools if not pool.is_slot)
    assert made.slot_pools == tuple(pool for pool in pools if pool.lifetime == REQUEST)
    assert len({pool.name for pool in pools}) == len(pools)


@given(parts=declared(), **sizes)
@settings(max_examples=100)
def test_json_and_text_say_everything(parts, arena_bytes, page_tokens):
    made = planned(parts, arena_bytes, page_tokens)
    if made is None:
        return
    read = json.loads(json.dumps(made.to_json()))
    assert read["arena_bytes"] == made.arena_bytes
    for pool, found in zip(made.sub_pools, read["sub_pools"], strict=True):
        assert found["unit_bytes"] * found["unit_count"] <= made.arena_bytes
        used = sum(lane["bytes"] for lane in found["lanes"])
        assert found["entry_bytes"] - used == found["padding_bytes"]
        rows = [line for line in str(made).splitlines() if line.startswith(f"{pool.name} ")]
        assert len(rows) == 1
        assert size_text(pool.unit_bytes) in rows[0]
        assert size_text(pool.padding_bytes) in rows[0]
        for lane, shown in zip(pool.lanes, found["lanes"], strict=True):
            where = (shown["site"], shown["part"], tuple(shown["shape"]), shown["dtype"])
            part = lane.part
            assert where == (str(part.site), part.name, part.shape, part.dtype)


@given(parts=declared())
def test_locate_finds_each_part_and_names_what_there_is(parts):
    made = plan(parts, 1 << 22, 4)
    for part in parts:
        pool, lane = made.locate(part.key)
        assert lane in pool.lanes
        assert lane.part == part
    site = parts[0].site
    with pytest.raises(UsageError) as caught:
        made.locate((site, "absent"))
    assert "'absent'" in str(caught.value)
    assert all(part.name in str(caught.value) for part in parts if part.site == site)


KEY = Part(Site(0), "key", (32,), "float32", CONTEXT)
POOLED = Part(Site(0), "pooled", (32,), "float32", CONTEXT, stride=16)
WRONG = [
    ([], 1 << 20, 16, "at least one part"),
    ([KEY, KEY], 1 << 20, 16, "L0.key is declared twice"),
    ([KEY, Part(Site(0), "key", (2,), "int8", REQUEST)], 1 << 20, 16, "L0.key"),
    ([KEY, "value"], 1 << 20, 16, "str"),
    (None, 1 << 20, 16, "not NoneType"),
    (KEY, 1 << 20, 16, "not Part"),
    ([KEY], 0, 16, "arena_bytes is a positive int, not 0"),
    ([KEY], -4096, 16, "-4096"),
    ([KEY], 1e9, 16, "1000000000.0"),
    ([KEY], True, 16, "True"),
    ([KEY], 1 << 20, 0, "page_tokens is a positive int, not 0"),
    ([KEY], 1 << 20, 2.5, "2.5"),
    ([KEY], 1 << 20, np.float64(16), "16.0"),
    ([KEY], 1 << 20, np.True_, "True"),
    ([KEY, POOLED], 1 << 20, 24, "L0.pooled has one entry for 16 tokens"),
    ([KEY, POOLED], 1 << 20, 24, "a multiple of 16, not 24; the next is 32"),
    ([KEY], 1 << 20, None, "None"),
    ([KEY], 257 * GIB, 16, "257 GiB"),
    ([KEY], 127, 1, "127 B"),
    ([KEY], 2048 - 1, 16, "one page of context 2 KiB"),
]


@pytest.mark.parametrize("parts, arena_bytes, page_tokens, seen", WRONG)
def test_a_wrong_argument_is_refused_with_the_value_seen(parts, arena_bytes, page_tokens, seen):
    with pytest.raises(UsageError) as caught:
        plan(parts, arena_bytes, page_tokens)
    assert seen in str(caught.value)


def test_numpy_integers_are_sizes_and_leave_plain_ints_behind():
    made = plan([KEY], np.int64(1 << 20), np.int32(16))
    assert made == plan([KEY], 1 << 20, 16)
    assert json.dumps(made.to_json())
    assert type(window(np.int16(8)).tokens) is int
    assert Part(Site(0), "key", (np.int64(32),), "float32", CONTEXT) == KEY


def test_the_row_past_the_last_of_the_largest_arena_is_an_int32():
    made = plan([KEY], 256 * GIB, 16)
    assert made.sub_pools[0].entry_words == 32
    assert made.arena_granules <= np.iinfo(np.int32).max
    assert made.requested_bytes - made.arena_bytes < 4 * KIB


@pytest.mark.parametrize("granules", [(13, 17), (31, 37, 41), (7, 11, 13, 17), (3, 5, 7, 11, 13)])
def test_awkward_widths_strand_few_bytes(granules):
    """Their common multiple alone would round an arena of 64 MiB down by up to half of it."""
    parts = [
        Part(Site(at), "key", (width * 32,), "float32", window(at + 1))
        for at, width in enumerate(granules)
    ]
    made = plan(parts, 64 << 20, 16)
    assert made.requested_bytes - made.arena_bytes < made.requested_bytes / 16
    padded = sum(pool.padding_bytes for pool in made.sub_pools)
    assert padded <= sum(granules) * 128 / 4
    assert padded == sum(pool.entry_words * 4 for pool in made.sub_pools) - sum(granules) * 128


def test_five_token_sub_pools_are_planned_in_a_moment():
    parts = [
        Part(Site(at), "key", (width * 32,), "float32", window(at + 1))
        for at, width in enumerate((11, 13, 17, 19, 23))
    ]
    start = time.process_time()
    plan(parts, 1 << 34, 16)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (512, "512 B"), (24 * KIB, "24 KiB"), (3.5 * (1 << 20), "3.5 MiB"),
     (256 * GIB, "256 GiB")],
)  # fmt: skip
def test_sizes_read_as_short_texts(size, text):
    assert size_text(size) == text


@given(parts=declared())
@settings(max_examples=50)
def test_page_ids_are_as_many_as_pages_of_the_longest_lifetime(parts):
    made = plan(parts, 1 << 22, 4)
    token_pools = [pool for pool in made.sub_pools if not pool.is_slot]
    if not token_pools:
        assert made.id_count == 0
        return
    context = [pool for pool in token_pools if pool.lifetime == CONTEXT]
    most = max(pool.lifetime.tokens for pool in token_pools)
    longest = context or [pool for pool in token_pools if pool.lifetime.tokens == most]
    assert made.id_count == min(pool.unit_count for pool in longest)
