"""Prices against a request that is followed token by token.

The twin knows one rule: between steps a page is held if its last position is one that the next
query sees, or one that is not written yet.
"""

from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.host.twin import pages_during, pages_held
from unimem_jax.plan import plan
from unimem_jax.price import Prices, add, less
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, window

WINDOWS = (1, 2, 5, 8, 13)
LIFETIMES = (CONTEXT, REQUEST, *(window(tokens) for tokens in WINDOWS))


@cache
def prices(page_tokens):
    parts = [Part(Site(at), "kept", (32,), "float32", life) for at, life in enumerate(LIFETIMES)]
    return Prices(plan(parts, 1 << 22, page_tokens))


page_sizes = st.sampled_from([1, 2, 3, 4, 8, 16])
lengths = st.integers(0, 60)


@given(page_tokens=page_sizes, length=lengths)
@settings(max_examples=200)
def test_what_is_held_between_steps(page_tokens, length):
    held = prices(page_tokens).held(length)
    for pool, count in zip(prices(page_tokens).plan.sub_pools, held, strict=True):
        if pool.is_slot:
            assert count == (length > 0)
        else:
            assert count == len(pages_held(pool.lifetime, length, page_tokens)), pool.name


@given(page_tokens=page_sizes, length=lengths, count=st.integers(0, 30), fused=st.booleans())
@settings(max_examples=300)
def test_growth_is_the_pages_that_a_step_adds(page_tokens, length, count, fused):
    known = prices(page_tokens)
    growth = known.growth(length, length + count, fused)
    for pool, added in zip(known.plan.sub_pools, growth, strict=True):
        if pool.is_slot:
            assert added == (length == 0 and count > 0)
            continue
        before = pages_held(pool.lifetime, length, page_tokens)
        during = pages_during(pool.lifetime, length, length + count, page_tokens, fused)
        numbers = known.new_pages(pool, length, length + count, fused)
        assert set(numbers) == during - before, pool.name
        assert added == len(numbers)


@given(page_tokens=page_sizes, length=lengths, count=st.integers(0, 30), fused=st.booleans())
@settings(max_examples=300)
def test_additions_name_each_new_page_once_with_the_sub_pools_that_hold_it(
    page_tokens, length, count, fused
):
    known = prices(page_tokens)
    start = known.pages(length)
    ranges = list(known.additions(start, length, length + count, fused))
    numbers = [page for pages, _ in ranges for page in pages]
    assert numbers == list(range(start, known.pages(length + count)))
    holders = {page: set(pools) for pages, pools in ranges for page in pages}
    for pool in known.plan.token_pools:
        wanted = set(known.new_pages(pool, length, length + count, fused))
        assert {page for page, pools in holders.items() if pool.index in pools} == wanted


@given(
    page_tokens=page_sizes,
    chunk=st.integers(1, 20),
    fused=st.integers(1, 9),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 20)), min_size=1, max_size=12),
)
@settings(max_examples=300)
def test_no_way_to_grow_holds_more_than_the_peak(page_tokens, chunk, fused, steps):
    known = prices(page_tokens)
    growths = [(is_fused, min(count, fused if is_fused else chunk)) for is_fused, count in steps]
    total = sum(count for _, count in growths)
    peak = known.peak(total, chunk, fused)
    length = 0
    for is_fused, count in growths:
        for pool, most in zip(known.plan.sub_pools, peak, strict=True):
            if pool.is_slot:
                assert most == 1
                continue
            during = pages_during(pool.lifetime, length, length + count, page_tokens, is_fused)
            assert len(during) <= most, f"{pool.name}: {length} + {count}"
        length += count


@pytest.mark.parametrize("page_tokens", [1, 3, 4])
@pytest.mark.parametrize("tokens", WINDOWS)
@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_the_peak_of_a_window_is_reached(page_tokens, tokens, chunk):
    """A price above what can be held would refuse requests for nothing; W of 1 may cost a page."""
    known = prices(page_tokens)
    pool = next(pool for pool in known.plan.token_pools if pool.lifetime.tokens == tokens)
    most = max(
        len(pages_during(pool.lifetime, length, length + count, page_tokens, False))
        for length in range(40)
        for count in range(1, chunk + 1)
    )
    assert most <= known.peak(60, chunk)[pool.index] <= most + (chunk > 1 or tokens == 1)


@given(page_tokens=page_sizes, total=st.integers(1, 60), more=st.integers(0, 9))
def test_the_peak_grows_with_the_tokens_and_the_chunk(page_tokens, total, more):
    known = prices(page_tokens)
    small = known.peak(total, 4, 2)
    for large in (known.peak(total + more, 4, 2), known.peak(total, 4 + more, 2 + more)):
        assert all(a <= b for a, b in zip(small, large, strict=True))


def test_a_demand_reads_as_units_and_bytes():
    known = prices(16)
    demand = [0] * len(known.plan.sub_pools)
    names = [pool.name for pool in known.plan.sub_pools]
    demand[names.index("request")], demand[names.index("context")] = 1, 3
    text = known.itemise(demand)
    assert "1 slot of request (4 KiB)" in text
    assert "3 pages of context (6 KiB)" in text
    assert "0 pages of window_8 (0 B)" in text


def test_demands_of_different_length_do_not_add_up():
    assert less(add((1, 2), (3, 4)), (1, 2)) == (3, 4)
    for combine in (add, less):
        with pytest.raises(ValueError, match="zip"):
            combine((1, 2), (1,))
