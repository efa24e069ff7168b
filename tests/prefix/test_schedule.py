"""Who runs where prefixes are shared: the scheduler over a real memory and cache, and no device."""

import random

import pytest

import unimem_jax as um
from tests.prefix.world import KINDS
from unimem_jax.admission import PrefixAdmission
from unimem_jax.memory import GREEDY_WORDS, Memory
from unimem_jax.queue import POLICIES, Queue
from unimem_jax.schedule import Limits, batches
from unimem_jax.serving import Served

PAGE = 4


class Line:
    """An engine without a device: tokens are drawn, nothing is computed.

    Every step is held to what was decided: nobody is granted more than was asked about.
    """

    def __init__(self, kind, arena_bytes, policy="predicted", rows=8, chunk=64, checkpoint=256):
        plan = um.plan(KINDS[kind], arena_bytes, PAGE)
        self.memory = Memory(plan, rows, 128, chunk_tokens=chunk)
        self.admission = PrefixAdmission(self.memory, checkpoint)
        self.queue = Queue(policy)
        self.limits = Limits(rows, rows + 4 * chunk, chunk)
        self.rng = random.Random(0)

    def submit(self, tokens, new, **options):
        count = len(tokens)
        self.memory.refuse_impossible(self.memory.prices.peak(count + new - 1, 1))
        served = Served(
            count, limit=count + new, tokens=list(tokens), words=GREEDY_WORDS,
            **options,
        )  # fmt: skip
        self.queue.submit(served)
        return served

    def step(self):
        decided = self.admission.decide(self.queue, self.limits)
        assert decided.work, "nobody makes progress (C2)"
        self.admission.enact(decided)
        for batch in batches(decided.work, self.limits):
            self.memory.skip([served.request for served, _ in batch], [n for _, n in batch])
        self.queue.apply(decided)
        self.admission.keep(decided.work)
        for served, _ in decided.work:
            if served.computed < served.known:
                continue
            if served.accept(self.rng.randrange(8)).finish_reason:
                self.queue.learn(served)
                self.queue.leave(served)
                self.admission.release(served)
        self.memory.retire(self.memory.ticket)
        self.memory.check()
        self.admission.cache.check()
        return decided

    def drain(self, most=999):
        while self.queue:
            most -= 1
            assert most, "it goes on for ever"
            self.step()
        self.admission.check_idle()


def test_a_victim_frees_nothing_of_what_the_one_it_makes_way_for_begins_with():
    line = Line("whole", 24 << 10)
    line.submit([7] * 20, 4, priority=9)
    line.submit([1] * 16 + [2] * 17, 9)
    line.step()
    line.submit([1] * 16 + [3] * 6, 9)
    line.step()
    urgent = line.submit([1] * 16 + [2] * 16 + [4] * 48, 2, priority=5)
    assert not line.step().admitted, "20 pages beside 6 of 24"
    while urgent in line.queue.waiting:
        line.step()
    line.drain()


def test_one_that_fits_only_without_its_prefix_begins_without_it():
    """Y3: a slot beside the one that it would copy is more than there is."""
    line = Line("state alone", 4 << 10, chunk=4)
    line.submit([1] * 9, 1)
    line.drain()
    assert line.admission.cache.match([1] * 20).length
    second = line.submit([1] * 20, 3)
    line.step()
    assert second in line.queue.running
    line.drain()
    assert line.admission.hit_tokens == 0


def test_victims_that_share_free_it_together():
    line = Line("whole", 34 << 10)
    for _ in range(2):
        line.submit([1] * 61, 3)
        line.step()
    urgent = line.submit([2] * 118, 2, priority=1)
    assert len(line.queue.running) == 2
    assert line.step().admitted == (urgent,), "30 pages of 34"
    line.drain()


def test_what_others_share_is_no_room_for_the_firm():
    """C3."""
    line = Line("whole", 40 << 10)
    for at in range(4):
        line.submit([1] * 40 + [2 + at], 8)
        line.step()
    firm = [line.submit([at] * 9, 90, retractions=2) for at in (6, 7)]
    while line.queue:
        line.step()
        assert all(one.retractions == 2 for one in firm), "retracted a third time"


def test_what_two_share_stays_when_one_of_them_ends():
    line = Line("whole", 48 << 10, "bounded")
    line.submit([1] * 80, 10)
    line.step()
    line.step()
    line.submit([1] * 80, 47)
    line.step()
    line.submit([3] * 60, 60)
    assert len(line.queue.running) == 2
    while line.queue:
        assert not line.step().retracted, "all of it was to fit"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_crowds_that_share_are_granted_what_was_asked_about(kind, policy):
    rng = random.Random(f"{kind}/{policy}")
    for _ in range(5):
        line = Line(
            kind, rng.choice([12, 16, 24]) << 10, policy, chunk=rng.choice([3, 16]),
            checkpoint=rng.choice([1, 8]),
        )  # fmt: skip
        bases = [[rng.randrange(2) for _ in range(40)] for _ in range(2)]
        coming = 10
        while coming or line.queue:
            if coming and rng.random() < 0.5:
                coming -= 1
                base = rng.choice(bases)[: rng.randint(1, 40)]
                try:
                    line.submit(
                        base + [rng.randrange(2) for _ in range(rng.randint(0, 9))],
                        rng.randint(1, 20), priority=rng.choice([0, 0, 3]),
                    )  # fmt: skip
                except um.UsageError:
                    continue  # not even alone
            if line.queue:
                line.step()
                if policy != "first-come":
                    everybody = line.queue.running + line.queue.waiting
                    assert all(one.retractions <= 2 for one in everybody), "C3"
        line.admission.check_idle()
