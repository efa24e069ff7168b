"""The store beside NumPy: bytes of every dtype, and addresses where nothing is."""

import jax.numpy as jnp
import numpy as np
import pytest

from unimem_jax.plan import plan
from unimem_jax.spec import CONTEXT, PAIRED_DTYPES, REQUEST, STORED_DTYPES, Part, Site
from unimem_jax.store import PackedStore, pack

SITE, PAGE = Site(0), 5
SHAPES = {"small": (3,), "large": (2, 77)}
INT32_MAX = 2**31 - 1


def store_of(lifetime):
    parts = [
        Part(SITE, f"{size}_{dtype}", (*shape, 1 + (dtype in PAIRED_DTYPES)), dtype, lifetime)
        for dtype in STORED_DTYPES
        for size, shape in SHAPES.items()
    ]
    return PackedStore(plan(parts, 256 << 10, PAGE))


def bits(array):
    """The bytes of an array, each entry's in a row; two elements of 4 bits in each."""
    found = np.ascontiguousarray(np.asarray(array))
    found = found.reshape(found.shape[0], -1)
    if found.dtype.name in PAIRED_DTYPES:
        codes = found.view(np.uint8) & 15  # NumPy keeps each element in a byte of its own
        return codes[:, 0::2] | codes[:, 1::2] << 4
    return found.view(np.uint8)


def decoded(raw, dtype):
    """Bytes as elements of a stored dtype, by NumPy."""
    if dtype not in PAIRED_DTYPES:
        return raw.view(STORED_DTYPES[dtype])
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
    if dtype == "int4":
        codes = codes.astype(np.int8)
        return np.where(codes < 8, codes, codes - 16).astype(STORED_DTYPES[dtype])
    return codes.view(STORED_DTYPES[dtype])


def filled(store):
    """An arena of random bytes."""
    size = 4 * store.init().size
    raw = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    return jnp.asarray(without_float8_nan(raw).view(np.uint32).reshape(-1, 32))


def without_float8_nan(raw):
    """Bytes that are no NaN of a float8: XLA may give one NaN for another there."""
    return np.where(raw & 0x7C == 0x7C, raw ^ 0x40, raw).astype(np.uint8)


def values_of(part, count):
    """Random bits as values of the part."""
    rng = np.random.default_rng(part.byte_count)
    raw = without_float8_nan(rng.integers(0, 256, (count, part.byte_count), np.uint8))
    return jnp.asarray(decoded(raw, part.dtype).reshape(count, *part.shape))


def test_an_entry_is_the_bytes_of_its_parts_side_by_side_and_zeros():
    store = store_of(CONTEXT)
    (pool,) = store.plan.sub_pools
    rows = np.asarray([7, 2], np.int32)
    values = {lane.part.key: values_of(lane.part, 2) for lane in pool.lanes}
    before = filled(store)
    after = store.write_entries(before, pool, jnp.asarray(rows), values)
    expected = np.array(before).reshape(-1, pool.entry_words)
    expected[rows] = 0
    expected = expected.view(np.uint8)
    for lane in pool.lanes:
        start = lane.offset_words * 4
        expected[rows, start : start + lane.part.byte_count] = bits(values[lane.part.key])
    found = np.array(after).reshape(-1, pool.entry_words).view(np.uint8)
    np.testing.assert_array_equal(found, expected)


def test_pages_are_read_as_they_lie_in_every_dtype():
    store = store_of(CONTEXT)
    (pool,) = store.plan.sub_pools
    arena = filled(store)
    rows = np.array(arena).reshape(-1, pool.entry_words).view(np.uint8)
    addresses = np.asarray([[1, 0], [3, 1]], np.int32)
    for lane in pool.lanes:
        found = store.read_pages(arena, lane.part.key, jnp.asarray(addresses))
        assert found.shape == (2, 2 * PAGE, *lane.part.shape)
        assert found.dtype == STORED_DTYPES[lane.part.dtype]
        start = lane.offset_words * 4
        tokens = (addresses[:, :, None] * PAGE + np.arange(PAGE)).reshape(2, -1)
        lanes = rows[tokens, start : start + lane.part.byte_count]
        np.testing.assert_array_equal(bits(found), lanes.reshape(2, -1))


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_tokens_that_share_an_entry_are_written_by_the_last_of_them(stride):
    """Two pages of 8 tokens, the second not complete, through pages that lie elsewhere."""
    part = Part(SITE, "pooled", (3, 7), "bfloat16", CONTEXT, stride)
    store = PackedStore(plan([part], 64 << 10, 8))
    (pool,) = store.plan.sub_pools
    addresses, count = np.asarray([5, 2], np.int32), 13
    at = np.arange(16, dtype=np.int32)
    pages = np.where(at < count, addresses[at // 8], pool.unit_count)
    rows = store.entry_rows(pool, jnp.asarray(pages), jnp.asarray(at % 8))
    before, values = filled(store), values_of(part, 16)
    after = store.write_entries(before, pool, rows, {part.key: values})
    found = store.read_pages(after, part.key, jnp.asarray(addresses[None]))[0]
    assert found.shape == (16 // stride, 3, 7)
    complete = count // stride
    last = np.arange(complete) * stride + stride - 1
    np.testing.assert_array_equal(bits(found[:complete]), bits(values)[last])
    old = store.read_pages(before, part.key, jnp.asarray(addresses[None]))[0]
    np.testing.assert_array_equal(bits(found[complete:]), bits(old[complete:]))
    changed = np.array(before != after).reshape(-1, pool.entry_words).any(axis=1)
    assert changed.sum() == complete


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_state_is_written_over_its_own_part_and_read_back(dtype):
    store = store_of(REQUEST)
    (pool,) = store.plan.sub_pools
    before = filled(store)
    (lane,) = [lane for lane in pool.lanes if lane.part.name == f"large_{dtype}"]
    values = values_of(lane.part, 2)
    slots = jnp.asarray([3, 0], jnp.int32)
    after = store.write_state(before, lane.part.key, slots, values)
    np.testing.assert_array_equal(bits(store.read_state(after, lane.part.key, slots)), bits(values))
    changed = np.array(before != after).reshape(-1)[: pool.unit_count * pool.entry_words]
    changed = changed.reshape(-1, pool.entry_words).any(axis=0)
    first = lane.offset_words
    rest = -(-lane.words // 128) * 128  # a part owns whole rows of its view
    assert not changed[:first].any()
    assert not changed[first + rest :].any()
    for other in pool.lanes:
        if other is not lane:
            old, new = (store.read_state(a, other.part.key, slots) for a in (before, after))
            np.testing.assert_array_equal(bits(old), bits(new))


def test_values_are_cast_to_the_stored_dtype_as_numpy_casts_them():
    wide = np.asarray([[0.1, -2.5, 300.0]], np.float32)
    for dtype in ("float32", "bfloat16", "float16", "float8_e5m2"):
        part = Part(SITE, "part", (3,), dtype, CONTEXT)
        words = np.array(pack(jnp.asarray(wide), part))
        stored = wide.astype(STORED_DTYPES[dtype])
        np.testing.assert_array_equal(words.view(np.uint8)[:, : part.byte_count], bits(stored))


@pytest.mark.parametrize("dtype", PAIRED_DTYPES)
@pytest.mark.parametrize("lifetime", [CONTEXT, REQUEST], ids=str)
def test_all_pairs_of_4_bit_codes_survive_and_lie_two_in_a_byte(dtype, lifetime):
    part = Part(SITE, "part", (4, 128), dtype, lifetime)
    assert part.byte_count == 256
    store = PackedStore(plan([part], 64 << 10, PAGE))
    (pool,) = store.plan.sub_pools
    pairs = np.stack([np.arange(256), 255 - np.arange(256)]).astype(np.uint8)
    values = jnp.asarray(decoded(pairs, dtype).reshape(2, 4, 128))
    at = jnp.asarray([3, 1], jnp.int32)
    if lifetime.is_request:
        after = store.write_state(filled(store), part.key, at, values)
        read = store.read_state(after, part.key, at)
    else:
        after = store.write_entries(filled(store), pool, at * PAGE, {part.key: values})
        read = store.read_pages(after, part.key, at[:, None])[:, 0]
    units = np.array(after).reshape(-1)[: pool.unit_count * pool.unit_granules * 32]
    units = units.reshape(pool.unit_count, -1).view(np.uint8)
    np.testing.assert_array_equal(units[[3, 1], :256], pairs)
    np.testing.assert_array_equal(bits(read), pairs)
    np.testing.assert_array_equal(
        np.asarray(read.astype(jnp.float32)), np.asarray(values).astype(np.float32)
    )


@pytest.mark.parametrize("dtype, largest", [("int8", 127), ("int4", 7), ("float8_e4m3fn", 448),
                                            ("float4_e2m1fn", 6)])  # fmt: skip
def test_values_and_their_scales_go_through_one_entry(dtype, largest):
    """Quantised per head: what is read back is what NumPy makes of it, to the last bit."""
    key = Part(SITE, "key", (2, 64), dtype, CONTEXT)
    scale = Part(SITE, "key_scale", (2,), "float16", CONTEXT)
    store = PackedStore(plan([key, scale], 64 << 10, PAGE))
    (pool,) = store.plan.sub_pools
    wide = np.random.default_rng(3).normal(size=(PAGE, 2, 64)).astype(np.float32)
    scales = (np.abs(wide).max(axis=-1) / largest).astype(np.float16)
    small = np.clip(wide / scales[..., None].astype(np.float32), -largest, largest)
    if "int" in dtype:
        small = np.rint(small)
    rows = jnp.arange(PAGE, dtype=jnp.int32) + 2 * PAGE
    new = {key.key: jnp.asarray(small), scale.key: jnp.asarray(scales)}
    after = store.write_entries(filled(store), pool, rows, new)
    page = jnp.asarray([[2]], jnp.int32)
    found, found_scales = (store.read_pages(after, part.key, page)[0] for part in (key, scale))
    np.testing.assert_array_equal(bits(found), bits(small.astype(STORED_DTYPES[dtype])))
    np.testing.assert_array_equal(bits(found_scales), bits(scales))


def uneven(lifetime):
    """A store whose arena has rows above its last whole unit, and one part."""
    part = Part(SITE, "part", (32,), "float32", lifetime)
    store = PackedStore(plan([part], 72 << 7, PAGE))
    (pool,) = store.plan.sub_pools
    assert pool.unit_count * pool.unit_granules < store.plan.arena_granules
    return store, pool, part


ABSENT = ["one past the last", "minus one", "least", "greatest"]


def absent(pool, which):
    return {
        "one past the last": pool.unit_count,
        "minus one": -1,
        "least": -INT32_MAX - 1,
        "greatest": INT32_MAX,
    }[which]


@pytest.mark.parametrize("which", ABSENT)
def test_an_entry_without_a_page_is_dropped(which):
    store, pool, part = uneven(CONTEXT)
    addresses = jnp.full((PAGE,), absent(pool, which), jnp.int32)
    rows = store.entry_rows(pool, addresses, jnp.arange(PAGE, dtype=jnp.int32))
    arena = filled(store)
    after = store.write_entries(arena, pool, rows, {part.key: values_of(part, PAGE)})
    np.testing.assert_array_equal(after, arena)


@pytest.mark.parametrize("which", ABSENT)
def test_state_without_a_slot_is_dropped(which):
    store, pool, part = uneven(REQUEST)
    arena = filled(store)
    slots = jnp.asarray([absent(pool, which)], jnp.int32)
    after = store.write_state(arena, part.key, slots, values_of(part, 1))
    np.testing.assert_array_equal(after, arena)


def test_the_row_that_the_absent_page_would_have_is_another_s():
    store, pool, part = uneven(CONTEXT)
    arena, values = filled(store), {part.key: values_of(part, 1)}
    naive = jnp.asarray([pool.unit_count * PAGE], jnp.int32)
    assert (store.write_entries(arena, pool, naive, values) != arena).any()


def test_the_row_before_the_first_is_the_last_one_to_a_plain_scatter():
    store, pool, part = uneven(CONTEXT)
    rows = filled(store).reshape(-1, pool.entry_words)
    changed = rows.at[jnp.asarray([-1])].set(pack(values_of(part, 1), part), mode="drop") != rows
    assert changed[-1].any()
    assert not changed[:-1].any()


def test_a_page_that_is_absent_is_read_from_inside_the_arena():
    store, pool, part = uneven(CONTEXT)
    arena = filled(store)
    last = store.read_pages(arena, part.key, jnp.asarray([[pool.unit_count - 1]], jnp.int32))
    for which in ("one past the last", "greatest"):
        addresses = jnp.asarray([[absent(pool, which)]], jnp.int32)
        found = store.read_pages(arena, part.key, addresses)
        np.testing.assert_array_equal(bits(found), bits(last))
