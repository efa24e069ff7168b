"""Pads of entries against every choice tried in turn, and how long choosing takes."""

import itertools
import math
import time

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from unimem_jax.pads import choose_pads

LARGEST = 2**31 - 1


def loss(widths, pads, granules):
    """What rounding cuts off the arena, and padding off the entries, as shares of each."""
    multiple = 8 * math.lcm(*(w + p for w, p in zip(widths, pads, strict=True)))
    return (granules % multiple) * sum(widths) + sum(pads) * granules, multiple


def tried_in_turn(widths, granules, grain):
    """The least loss of taking every width to one of the next 8 multiples of the grain."""
    choices = [
        [(-(-width // grain) + more) * grain - width for more in range(8)] for width in widths
    ]
    return min(loss(widths, pads, granules)[0] for pads in itertools.product(*choices))


arenas = st.integers(1, 4000) | st.integers(1, LARGEST)


@given(widths=st.lists(st.integers(1, 600), min_size=1, max_size=3), granules=arenas)
@example(widths=[13, 17], granules=524288)
@settings(max_examples=150, deadline=None)
def test_no_choice_of_pads_loses_less(widths, granules):
    pads, multiple = choose_pads(widths, granules)
    assert all(pad >= 0 for pad in pads)
    found, wanted = loss(widths, pads, granules)
    assert multiple == wanted
    grains = [1 << power for power in range(max(widths).bit_length())]
    assert found == min(tried_in_turn(widths, granules, grain) for grain in grains)


@given(widths=st.lists(st.integers(1, 90), min_size=4, max_size=5), granules=arenas)
@settings(max_examples=10, deadline=None)
def test_more_widths_lose_no_more_than_with_the_next_eight_of_each(widths, granules):
    found, _ = loss(widths, choose_pads(widths, granules)[0], granules)
    assert found <= tried_in_turn(widths, granules, 1)


@given(widths=st.lists(st.integers(1, 600), min_size=1, max_size=8), granules=arenas)
@settings(max_examples=50, deadline=None)
def test_widths_may_come_in_any_order(widths, granules):
    found, _ = loss(widths, choose_pads(widths, granules)[0], granules)
    turned = widths[::-1]
    assert loss(turned, choose_pads(turned, granules)[0], granules)[0] == found


def test_widths_that_divide_each_other_are_not_padded():
    assert choose_pads([192, 96, 8], 2**20) == ((0, 0, 0), 1536)
    assert choose_pads([], 2**20) == ((), 8)


# The slowest of some thousand random ones, with widths of up to half a MiB a token.
AWKWARD = [
    ([344, 90, 884, 2250, 913, 1010, 2497, 2753], 2**29),
    ([732, 629, 424, 2149, 879, 3797, 1601, 77], LARGEST),
    ([1684, 3375, 2644, 681, 3230, 2336, 1922, 2962], LARGEST),
    ([2259, 1158, 2153, 1686, 2221, 907, 3331, 211], 2**29),
    ([11, 13, 17, 19, 23, 29, 31, 37], 2**23),
]


@pytest.mark.parametrize("widths, granules", AWKWARD)
def test_eight_awkward_widths_are_padded_in_a_moment_and_lose_little(widths, granules):
    spent = []
    for _ in range(5):
        start = time.process_time()
        pads, multiple = choose_pads(widths, granules)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.05
    assert granules % multiple < granules / 32
    assert sum(pads) < sum(widths) / 16
