"""Choices by corrected sigmoids beside NumPy's sort, and what padding takes."""

import jax.numpy as jnp
import numpy as np
import pytest
from unimem_jax.models.experts import choose_by_sigmoid
from unimem_jax.models.sparse import of_valid


def choose(logits, correction, count, groups, scale):
    """One token at a time; ties go to the lowest number."""
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    ranked = scores + correction
    chosen, weights = [], []
    for row, own in zip(ranked, scores, strict=True):
        by_group = row.reshape(groups[0], -1)
        best = np.sort(by_group, axis=1)[:, -2:].sum(axis=1)
        allowed = np.argsort(-best, kind="stable")[: groups[1]]
        hidden = np.full(by_group.shape, -np.inf)
        hidden[allowed] = by_group[allowed]
        order = np.argsort(-hidden.reshape(-1), kind="stable")[:count]
        chosen.append(order)
        weights.append(own[order] / own[order].sum() * scale)
    return np.stack(chosen), np.stack(weights)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (6, 1), (3, 3), (12, 5)])
def test_choices_and_weights_are_those_of_the_slow_twin(groups):
    rng = np.random.default_rng(groups[0])
    logits = rng.normal(size=(64, 12)).astype(np.float32)
    correction = rng.normal(0, 0.3, 12).astype(np.float32)
    count = min(3, 12 // groups[0] * groups[1])
    chosen, weights = choose_by_sigmoid(
        jnp.asarray(logits), jnp.asarray(correction), count, groups=groups, scale=2.5
    )
    wanted, wanted_weights = choose(logits, correction, count, groups, 2.5)
    np.testing.assert_array_equal(chosen, wanted)
    np.testing.assert_allclose(weights, wanted_weights, rtol=1e-5)


def test_the_correction_moves_choices_and_no_weights():
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
    plain, _ = choose_by_sigmoid(logits, jnp.zeros(4), 2)
    moved, weights = choose_by_sigmoid(logits, jnp.asarray([0.0, 0.0, 0.0, 5.0]), 2)
    assert plain.tolist() == [[0, 1]]
    assert moved.tolist() == [[3, 0]]
    own = 1 / (1 + np.exp([1.0, -2.0]))
    np.testing.assert_allclose(weights[0], own / own.sum(), rtol=1e-6)


def test_a_group_is_as_good_as_its_two_best():
    # The best expert is in the first group, the best pair in the second.
    logits = jnp.asarray([[3.0, -3.0, 2.0, 2.0]])
    chosen, _ = choose_by_sigmoid(logits, jnp.zeros(4), 2, groups=(2, 1))
    assert chosen.tolist() == [[2, 3]]


def test_padding_chooses_no_expert():
    chosen = jnp.asarray([[0, 1], [2, 3], [4, 5], [6, 7]])
    valid = jnp.asarray([[True, False], [True, True]])
    assert of_valid(chosen, valid, 8).tolist() == [[0, 1], [8, 8], [4, 5], [6, 7]]
