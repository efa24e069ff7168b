"""An engine that prices growth: the same tokens whoever is preempted, and whatever is given up."""

import random

import pytest

from tests.engine.conftest import CHUNK, PAGE, assert_empty
from tests.engine.test_engine import PROMPTS, assert_same_tokens, ids_of, tokens_of
from unimem_jax.engine import Engine
from unimem_jax.errors import UsageError
from unimem_jax.sampling import Sampling

GREEDY = Sampling(max_tokens=40)


@pytest.fixture(scope="module")
def predicting(hybrid):
    """An engine whose arena holds little more than its longest request."""
    return Engine(
        *hybrid, arena_bytes=64 << 10, page_tokens=PAGE, rows=8, chunk_tokens=CHUNK,
        policy="predicted",
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 3))])
def test_tokens_do_not_depend_on_who_is_preempted_or_given_up(predicting, recomputed, roomy, seed):
    """Promise 1: requests of all priorities arrive while others run, and some are given up."""
    engine, rng = predicting, random.Random(seed)
    wanted = roomy.generate(PROMPTS, GREEDY)
    line = list(enumerate(PROMPTS)) * 2
    rng.shuffle(line)
    pieces, named, given_up, preempted = {}, {}, set(), 0
    before = engine.statistics().retractions
    while line or not engine.is_idle:
        if line and rng.random() < 0.5:
            at, prompt = line.pop()
            index = engine.submit(prompt, GREEDY, priority=rng.choice([-1, 0, 0, 5]))
            named[index], pieces[index] = at, []
        if rng.random() < 0.03 and engine.queue.running:
            index = rng.choice(engine.queue.running).index
            engine.abort(index)
            given_up.add(index)
            with pytest.raises(UsageError, match=f"no request {index}"):
                engine.abort(index)
        for piece in engine.step():
            assert piece.index not in given_up
            pieces[piece.index].append(piece)
        engine.memory.check()
        served = engine.queue.running + engine.queue.waiting
        assert all(one.retractions <= 2 for one in served)
        preempted += any(one.retractions for one in engine.queue.waiting)
    assert preempted, "nobody was preempted: the test shows nothing"
    assert engine.statistics().retractions > before
    for index, at in named.items():
        if index not in given_up:
            prompt = ids_of(roomy, PROMPTS[at])
            found = tokens_of(pieces[index])
            assert_same_tokens(recomputed, prompt, wanted[at].token_ids, found)
    assert_empty(engine)


def test_a_wrong_priority_is_refused_and_submits_nothing(predicting):
    with pytest.raises(UsageError, match="a priority is a whole number from -100 to 100, not 101"):
        predicting.submit("hello", GREEDY, priority=101)
    assert_empty(predicting)


def test_an_engine_of_no_such_policy_is_refused(hybrid):
    with pytest.raises(UsageError, match="a policy is one of first-come, predicted, bounded"):
        Engine(*hybrid, arena_bytes=64 << 10, policy="fair")
