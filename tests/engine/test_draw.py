"""Drawing tokens beside a NumPy reference of the filters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unimem_jax.draw import draw
from unimem_jax.sampling import Sampling

VOCABULARY = 40
FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10**6},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
    {"seed": 2**63},
    {"seed": -1},
]


def kept_by_reference(logits, sampling):
    """Ids that the filters keep: temperature, top-k, top-p, min-p, one after another."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    chance = np.exp(scaled[order] - scaled[order].max())
    chance /= chance.sum()
    count = 1
    while sampling.top_p < 1 and count < len(order) and chance[:count].sum() < sampling.top_p:
        count += 1
    count = count if sampling.top_p < 1 else len(order)
    return {int(i) for i, c in zip(order[:count], chance, strict=False)
            if c >= sampling.min_p * chance[0]}  # fmt: skip


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(5).normal(0, 2, VOCABULARY).astype(np.float32)


@pytest.fixture(scope="module")
def drawn(logits):
    """Per filter, the tokens drawn at 1,500 positions, all in one program."""
    run = jax.jit(jax.vmap(draw, in_axes=(None, None, 1), out_axes=1))
    options = [Sampling(**({"temperature": 1.0} | filters)) for filters in FILTERS]
    words = np.asarray([one.words() for one in options], np.int32)
    positions = np.tile(np.arange(1500, dtype=np.int32), (len(options), 1))
    rows = np.tile(logits, (len(options), 1))
    found = np.asarray(run(rows, words, positions))
    return list(zip(options, found, strict=True))


@pytest.mark.parametrize("at", range(len(FILTERS)), ids=[str(f) for f in FILTERS])
def test_draws_are_what_the_filters_keep_by_the_share_of_each(logits, drawn, at):
    sampling, tokens = drawn[at]
    kept = kept_by_reference(logits, sampling)
    assert set(tokens.tolist()) <= kept
    scaled = logits.astype(np.float64) / sampling.temperature
    ids = sorted(kept)
    chance = np.exp(scaled[ids] - scaled[ids].max())
    wanted = chance / chance.sum() * len(tokens)
    seen = np.asarray([(tokens == i).sum() for i in ids])
    # Each count within five standard deviations of a binomial one.
    assert (np.abs(seen - wanted) <= 5 * np.sqrt(wanted + 1)).all()


def test_seeds_and_positions_draw_differently(drawn):
    plain, folded = drawn[0][1], drawn[-1][1]
    assert (plain != folded).mean() > 0.5
    assert (plain[1:] != plain[:-1]).mean() > 0.5


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6])
def test_no_temperature_takes_the_lowest_of_the_most_likely(logits, temperature):
    logits = logits.copy()
    logits[[30, 7]] = logits.max() + 1
    sampling = Sampling(temperature=temperature, top_k=3, seed=8)
    hot = Sampling(temperature=1.0, top_k=1)
    words = np.asarray([sampling.words(), hot.words()], np.int32)
    found = draw(np.stack([logits, logits]), words, np.asarray([4, 4], np.int32))
    assert found[0] == 7
    assert found[1] == 7


def test_a_row_draws_the_same_whatever_is_beside_it(logits):
    words = np.asarray([Sampling(temperature=1.0, seed=3).words()] * 3, np.int32)
    other = np.asarray([Sampling().words(), *words[1:]], np.int32)
    rows, at = np.tile(logits, (3, 1)), np.asarray([9, 9, 10], np.int32)
    alone = draw(rows[1:2], words[1:2], at[1:2])
    together = draw(jnp.asarray(rows), other, at)
    assert alone[0] == together[1]


def test_an_impossible_token_is_never_drawn(logits):
    logits = np.full_like(logits, -np.inf)
    logits[[3, 9]] = 0.0
    words = np.tile(np.asarray(Sampling(temperature=1.0).words(), np.int32), (30, 1))
    found = draw(np.tile(logits, (30, 1)), words, np.arange(30, dtype=np.int32))
    assert set(np.asarray(found).tolist()) == {3, 9}
