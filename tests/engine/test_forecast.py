"""Expected growth beside a twin that goes one generation and one token at a time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unimem_jax.forecast import PRIOR, Lengths, Outlook
from unimem_jax.plan import plan
from unimem_jax.price import Prices, add
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, window

PRICES = Prices(
    plan(
        [
            Part(Site(0), "key", (32,), "float32", CONTEXT),
            Part(Site(1), "key", (32,), "float32", window(8)),
            Part(Site(2), "state", (32, 32), "float32", REQUEST),
        ],
        arena_bytes=1 << 20,
        page_tokens=4,
    )
)
ENDED = st.lists(st.integers(1, 40), max_size=30)
RUNNING = st.lists(st.integers(0, 50), max_size=20)


def alive(ended, running, length):
    """The product-limit estimate of P(more than `length` tokens)."""
    found = 1.0
    for at in range(1, length + 1):
        deaths = sum(one == at for one in ended)
        at_risk = sum(one >= at for one in ended) + sum(one >= at for one in running) + PRIOR
        found *= 1 - deaths / at_risk
    return found


def learned(ended, running):
    lengths = Lengths()
    for one in ended:
        lengths.note(one)
    lengths.learn(running)
    return lengths


@given(ENDED, RUNNING, st.integers(0, 60), st.integers(0, 60))
def test_what_is_learned_is_the_product_limit_estimate(ended, running, sampled, ahead):
    lengths = learned(ended, running)
    wanted = alive(ended, running, sampled + ahead) / alive(ended, running, sampled)
    found = lengths.outlast(np.array([sampled]), np.array([ahead]))
    assert found.tolist() == pytest.approx([wanted])


@given(ENDED, RUNNING, st.integers(0, 60), st.integers(1, 60))
def test_what_is_left_is_the_sum_of_chances_and_stays_below_the_limit(
    ended, running, sampled, most
):
    wanted = sum(alive(ended, running, sampled + at) for at in range(most))
    left = learned(ended, running).left(sampled, most)
    assert left == pytest.approx(wanted / alive(ended, running, sampled))
    assert 0 < left <= most + 1e-9


def test_those_who_still_run_keep_early_ends_from_counting_for_all():
    """Ten that ended at once say little beside ninety that went on."""
    early = learned([3] * 10, [50] * 90)
    alone = learned([3] * 10, [])
    assert early.left(0, 100) > 80
    assert alone.left(0, 100) < 20


def test_long_lengths_are_told_apart_coarsely_and_never_too_short():
    lengths = learned([100_000] * 50, [])
    assert lengths.outlast(np.array([0]), np.array([99_000]))[0] == 1
    assert lengths.left(0, 200_000) == pytest.approx(100_000, rel=0.03)


CROWD = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20), st.integers(1, 30)), min_size=1)


@given(ENDED, CROWD, st.booleans())
def test_expected_units_are_sums_over_generations(ended, crowd, is_learned):
    lengths = learned(ended, [sampled for _, sampled, _ in crowd]) if is_learned else None
    outlook = Outlook(PRICES, lengths, [left for *_, left in crowd], 25)
    known = [prompt + sampled for prompt, sampled, _ in crowd]
    found = outlook.expected(known, [s for _, s, _ in crowd], [left for *_, left in crowd])
    assert outlook.steps[0] == 0
    for row, ahead in enumerate(outlook.steps.tolist()):
        mean, variance = np.zeros((2, len(PRICES.plan.sub_pools)))
        for prompt, sampled, left in crowd:
            chance = float(ahead < left)
            if lengths is not None:
                now = np.array([sampled])
                chance *= lengths.outlast(now, np.array([ahead]))[0]
            before = prompt + sampled + ahead - 1
            held = np.array(add(PRICES.held(before), PRICES.growth(before, before + 1)))
            mean += chance * held
            variance += chance * (1 - chance) * held**2
        assert found.mean[row].tolist() == pytest.approx(mean.tolist())
        assert found.variance[row].tolist() == pytest.approx(variance.tolist(), abs=1e-9)
        wanted = [math.ceil(m + math.sqrt(v) - 1e-6) for m, v in zip(mean, variance, strict=True)]
        assert np.abs(np.array(found.demands(row + 1)[row]) - wanted).max() <= 1


def test_the_outlook_sees_the_last_step_before_a_limit():
    outlook = Outlook(PRICES, None, [7, 300], 1000)
    assert {6, 299} <= set(outlook.steps.tolist())
    assert outlook.until(0) == 1
    assert outlook.until(10**9) == len(outlook.steps)


@given(st.lists(st.integers(0, 60), min_size=1))
def test_many_lengths_are_priced_as_each_of_them(lengths):
    found = PRICES.held_at(np.array(lengths))
    assert [tuple(map(int, one)) for one in zip(*found, strict=True)] == [
        PRICES.held(length) for length in lengths
    ]
