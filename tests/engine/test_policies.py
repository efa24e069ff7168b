"""Policies that price growth: what they promise, over random lines and under preemption."""

import random

import pytest

from tests.engine.test_schedule import PRICES, during, fits_in
from unimem_jax.errors import InvariantError, UsageError
from unimem_jax.plan import plan
from unimem_jax.queue import POLICIES, Generation, Queue
from unimem_jax.schedule import MOST_PASSES, Limits, schedule
from unimem_jax.simulate import simulate
from unimem_jax.spec import CONTEXT, Part, Site, window
from unimem_jax.splits import default_split

GROWING = ("predicted", "bounded")
WIDE = Limits(64, 999, 999)


class Served:
    """A queue over the toy arena of `test_schedule`, checked at every step."""

    def __init__(self, policy, total, limits=WIDE):
        self.queue, self.total, self.limits = Queue(policy), total, limits
        self.ends, self.steps, self.over = {}, 0, []

    def submit(self, prompt, output, priority=0, limit=None):
        generation = Generation(prompt, limit=limit or prompt + output, priority=priority)
        self.queue.submit(generation)
        self.ends[generation] = prompt + output
        return generation

    def abort(self, generation):
        self.queue.leave(generation)
        del self.ends[generation]

    def step(self):
        queue, fits = self.queue, fits_in(self.queue, self.total)
        decided = schedule(queue, PRICES, fits, self.limits)
        assert decided.work, "nobody makes progress (C2)"
        gone = {id(one) for one in decided.retracted}
        taken = sum(
            during(one.computed, count) for one, count in decided.work
        ) + sum(
            during(one.computed, 0) for one in queue.running
            if id(one) not in gone and all(one is not other for other, _ in decided.work)
        )  # fmt: skip
        assert taken <= self.total, "more is granted than there is"
        counts = [count for _, count in decided.work]
        assert sum(counts) <= self.limits.budget_tokens
        assert max(counts) <= self.limits.chunk_tokens
        if queue.policy != "first-come":
            assert not any(one.is_firm for one in decided.retracted), "C3"
        queue.apply(decided)
        assert len(queue.running) <= self.limits.rows
        assert not any(one.computed for one in queue.waiting)
        assert all(one.passes <= MOST_PASSES for one in queue.waiting), "C4"
        for one, _ in decided.work:
            if one.computed == one.known:
                one.known += 1
                if one.known == self.ends[one]:
                    queue.learn(one)
                    queue.leave(one)
                    self.over.append(one)
        self.steps += 1
        assert self.steps < 20_000, "the generations do not end"
        return decided

    def finish(self):
        while self.queue:
            self.step()


def enough_for(served_lengths, chunk):
    """Units that the largest alone needs with whole chunks."""
    return max(
        max(during(at, min(chunk, limit - 1 - at)) for at in range(limit - 1))
        for limit in served_lengths
    )  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_comes_everybody_ends_once_and_nothing_breaks(policy):
    """Random arrivals, priorities, limits far above the lengths, aborts, tiny budgets."""
    retracted = preempted = passed = 0
    for seed in range(60):
        rng = random.Random(seed)
        chunk = rng.randint(1, 12)
        limits = Limits(rng.randint(1, 8), rng.randint(1, 24), chunk)
        priorities = rng.choice([[0], [0], [-1, 0, 3]])
        jobs = [(rng.randint(1, 20), rng.randint(1, 16)) for _ in range(rng.randint(1, 24))]
        slack = rng.choice([0, 6])
        most = [prompt + output + slack for prompt, output in jobs]
        served = Served(policy, enough_for(most, chunk) + rng.choice([0, 10, 30]), limits)
        alive, given_up = [], 0
        while jobs or served.queue:
            while jobs and rng.random() < 0.4:
                prompt, output = jobs.pop()
                alive.append(
                    served.submit(prompt, output, rng.choice(priorities), prompt + output + slack)
                )
            if rng.random() < 0.02 and served.queue:
                served.abort(rng.choice(served.queue.running + served.queue.waiting))
                given_up += 1
            if served.queue:
                decided = served.step()
                preempted += bool(decided.retracted and decided.admitted)
        assert len(served.over) == len(set(map(id, served.over))) == len(alive) - given_up
        retracted += sum(one.retractions for one in alive)
        passed += sum(one.passes for one in alive)
    assert retracted > 20, "memory is never scarce: the test shows nothing"
    assert (preempted > 5) == (passed > 5) == (policy != "first-come")


@pytest.mark.parametrize("policy", GROWING)
def test_two_that_do_not_fit_together_run_one_after_the_other(policy):
    served = Served(policy, enough_for([30], 999))
    first, second = served.submit(20, 10), served.submit(20, 10)
    served.finish()
    assert served.over == [first, second]
    assert first.retractions + second.retractions <= 1


@pytest.mark.parametrize("policy", GROWING)
def test_a_more_urgent_one_displaces_one_and_equals_never_displace_each_other(policy):
    served = Served(policy, 2 * enough_for([30], 999))
    running = [served.submit(26, 4) for _ in range(2)]
    served.step()
    assert served.queue.running == running
    equal = served.submit(26, 4)
    assert served.step().admitted == ()
    urgent = served.submit(26, 4, priority=1)
    decided = served.step()
    assert decided.retracted == (running[1],)
    assert decided.admitted == (urgent,)
    assert served.queue.waiting == [running[1], equal], "the victim lost its place"
    served.finish()
    assert [one.retractions for one in (*running, equal, urgent)] == [0, 1, 0, 0]


def test_a_victim_is_taken_only_if_that_makes_room():
    served = Served("predicted", enough_for([30], 999))
    low = served.submit(20, 10)
    served.step()
    high = served.submit(20, 10, priority=5)
    served.step()
    assert low.retractions == 1  # the most urgent of all takes the whole arena
    small = served.submit(2, 2, priority=4)
    assert served.step().retracted == ()
    assert high.retractions == 0
    served.finish()
    assert set(served.over) == {low, high, small}


def test_one_that_was_retracted_twice_is_not_retracted_for_anybody():
    served = Served("predicted", enough_for([30], 999))
    low = served.submit(20, 10)
    for priority in range(1, 8):
        served.step()
        served.submit(2, 3, priority=priority)
        served.submit(20, 10, priority=priority)
    served.finish()
    assert low.retractions <= 2
    assert len(served.over) == 15


def test_a_cold_one_is_passed_over_a_bounded_number_of_times():
    """Small ones keep coming and always fit; a large one waits for room that never comes."""
    served = Served("predicted", enough_for([60], 999))
    served.submit(4, 12)
    served.step()
    cold = served.submit(58, 2)
    passes = []
    for _ in range(200):
        served.submit(4, 12)
        served.step()
        passes.append(cold.passes)
        if cold in served.queue.running or cold in served.over:
            break
    assert MOST_PASSES // 2 < cold.passes <= MOST_PASSES
    assert cold in served.queue.running or cold in served.over
    served.finish()


def test_chunks_never_spend_the_share_of_those_who_decode():
    """The oldest has a long prompt; with its chunks first the others would get no token."""
    queue = Queue()
    oldest, decoding = Generation(60, computed=20), [Generation(9, computed=8) for _ in range(6)]
    queue.running = [oldest, *decoding]
    decided = schedule(queue, PRICES, lambda demand: True, Limits(8, 10, 10))
    assert decided.work == ((oldest, 4), *((one, 1) for one in decoding))
    decided = schedule(queue, PRICES, lambda demand: True, Limits(8, 4, 10))
    assert decided.work == tuple((one, 1) for one in decoding[:4])


def test_growth_is_priced_where_first_come_runs_into_it():
    """Eight fit when they start and three when they end; first come, all start and most start anew.

    With limits that are met exactly `bounded` retracts nobody.
    """
    found = {}
    for name in POLICIES:
        served = Served(name, 3 * enough_for([40], 999))
        generations = [served.submit(4, 36) for _ in range(8)]
        served.finish()
        found[name] = sum(one.retractions for one in generations)
    assert found["first-come"] > 8
    assert found["bounded"] == 0
    assert 0 < found["predicted"] < found["first-come"]


@pytest.mark.parametrize("priority", [-101, 101, 1.0, True, None, "high"])
def test_a_priority_that_there_is_not_is_refused(priority):
    queue = Queue("predicted")
    with pytest.raises(UsageError, match=r"a priority is a whole number from -100 to 100"):
        queue.submit(Generation(3, limit=9, priority=priority))
    assert not queue


def test_a_policy_that_there_is_not_and_one_without_its_limit_are_refused():
    with pytest.raises(UsageError, match="a policy is one of first-come, predicted, bounded"):
        Queue("fair")
    with pytest.raises(UsageError, match="needs a limit above the 3 tokens known, not 3"):
        Queue("bounded").submit(Generation(3, limit=3))
    with pytest.raises(InvariantError, match="only one that runs"):
        Queue().retract([Generation(3)])


def test_fewer_steps_and_fewer_retractions_than_a_split_on_a_window_hybrid():
    """GPT-OSS-20B sizes at 1/16 of the load of 512 requests in 8 GiB; most is growth."""
    parts = [
        Part(Site(0), "key", (24576,), "uint8", CONTEXT),
        Part(Site(1), "key", (24576,), "uint8", window(128)),
    ]
    wide, limits = plan(parts, 512 << 20), Limits(1024, 8192, 8192)
    lengths = [(512, 1536)] * 32
    first_come = simulate(lengths, wide, limits)
    split = simulate(lengths, wide, limits, default_split(wide))
    found = simulate(lengths, wide, limits, policy="predicted")
    assert found.retractions_max <= 2
    assert found.retractions <= 0.4 * split.retractions
    assert found.steps <= first_come.steps < split.steps
    assert found.computed_tokens < first_come.computed_tokens
