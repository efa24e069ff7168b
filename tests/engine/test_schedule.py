"""The scheduler beside a twin that visits one generation after another, and its two promises."""

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unimem_jax.errors import InvariantError, UsageError
from unimem_jax.plan import plan
from unimem_jax.price import Prices
from unimem_jax.queue import Generation, Queue, StepPlan
from unimem_jax.schedule import Limits, batches, schedule
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, window

PAGE, WINDOW = 4, 8
PLAN = plan(
    [
        Part(Site(0), "key", (32,), "float32", CONTEXT),
        Part(Site(1), "key", (32,), "float32", window(WINDOW)),
        Part(Site(2), "state", (32, 32), "float32", REQUEST),
    ],
    arena_bytes=1 << 20,
    page_tokens=PAGE,
)
PRICES = Prices(PLAN)
WEIGHTS = [{"context": 1, "request": 3}.get(pool.name, 1) for pool in PLAN.sub_pools]
COSTS = dict(zip((pool.name for pool in PLAN.sub_pools), WEIGHTS, strict=True))


@dataclass(eq=False)
class Twin:
    known: int
    computed: int = 0


def units(first, stop):
    """Pages that tokens [first, stop) touch."""
    return -(-stop // PAGE) - first // PAGE if stop > first else 0


def held(computed):
    """What computed tokens hold, in a toy's bytes: whole pages, the last W - 1 tokens, one slot."""
    if not computed:
        return 0
    return (
        units(0, computed) * COSTS["context"]
        + (-(-computed // PAGE) - max(0, computed + 1 - WINDOW) // PAGE) * COSTS["window_8"]
        + COSTS["request"]
    )


def during(computed, count):
    """What is held while `count` more tokens are computed: the old, and new pages still wanted."""
    after = computed + count
    old, new = -(-computed // PAGE), -(-after // PAGE)
    kept = max(old, max(0, after + 1 - WINDOW) // PAGE)
    slot = COSTS["request"] * (computed == 0 < count)
    return (
        held(computed) + (new - old) * COSTS["context"]
        + max(0, new - kept) * COSTS["window_8"] + slot
    )  # fmt: skip


def twin_step(running, waiting, limits, total):
    """One step of the policy, one generation at a time. Returns (retracted, admitted, work)."""
    budget, retracted, work = limits.budget_tokens, [], []
    grown = {id(twin): held(twin.computed) for twin in running}
    shares, left = {}, limits.budget_tokens
    for is_chunk in (False, True):  # single tokens take their share of the budget first
        for twin in running:
            needed = twin.known - twin.computed
            if (needed > 1) == is_chunk:
                shares[id(twin)] = min(left, limits.chunk_tokens, needed)
                left -= shares[id(twin)]
    for twin in list(running):
        if twin not in running:
            continue
        count = shares[id(twin)]
        grown[id(twin)] = during(twin.computed, count)
        while running and sum(grown[id(other)] for other in running) > total:
            if running == [twin] and count > 1:
                count //= 2
                grown[id(twin)] = during(twin.computed, count)
                continue
            last = running.pop()
            retracted.append(last)
        if twin in running:
            budget -= count
            work.append((twin, count))
    admitted = []
    while not retracted and waiting and budget and len(running) < limits.rows:
        twin = waiting[0]
        count = min(budget, limits.chunk_tokens, twin.known)
        taken = sum(grown[id(other)] for other in running)
        # Pool by pool the larger of the whole and the chunk; the toy adds slots and pages apart.
        context = units(0, twin.known) * COSTS["context"]
        windows = max(
            held(twin.known) - context, during(0, count) - units(0, count) * COSTS["context"]
        )
        if taken + context + windows > total:
            break
        waiting.popleft()
        running.append(twin)
        grown[id(twin)] = during(0, count)
        budget -= count
        admitted.append(twin)
        work.append((twin, count))
    return retracted, admitted, [(twin, count) for twin, count in work if count]


def fits_in(queue, total):
    """The toy's one capacity question: weighted units of all that run, and the demand."""

    def fits(demand):
        counts = [0] * len(WEIGHTS)
        for generation in queue.running:
            for index, count in enumerate(PRICES.held(generation.computed)):
                counts[index] += count
        return sum(w * (c + d) for w, c, d in zip(WEIGHTS, counts, demand, strict=True)) <= total

    return fits


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 16)), min_size=1, max_size=8)
LIMITS = st.builds(Limits, st.integers(1, 8), st.integers(1, 24), st.integers(1, 12))


@given(LENGTHS, LIMITS, st.just(0) | st.integers(0, 30))
def test_every_step_is_what_visiting_one_after_another_gives(lengths, limits, spare):
    # Just enough for the longest request alone, token by token, and a little more: running out is
    # common, and chunks that are cut too.
    most = max(
        max(during(at, 1) for at in range(p + o) if at + 1 <= p + o - 1 or at == 0)
        for p, o in lengths
    )  # fmt: skip
    total = most + spare
    queue = Queue()
    ends, twins = {}, {}
    for prompt, output in lengths:
        generation = Generation(prompt)
        queue.submit(generation)
        ends[id(generation)] = prompt + output
        twins[id(generation)] = Twin(prompt)
    running, waiting = [], deque(twins[id(generation)] for generation in queue.waiting)
    steps = 0
    while queue:
        decided = schedule(queue, PRICES, fits_in(queue, total), limits)
        retracted, admitted, work = twin_step(running, waiting, limits, total)
        named = lambda items: [twins[id(item)] for item in items]  # noqa: E731
        assert named(decided.retracted) == retracted
        assert named(decided.admitted) == admitted
        assert [(twins[id(g)], n) for g, n in decided.work] == work
        assert decided.work, "the first that runs makes no progress (C2)"
        queue.apply(decided)
        for twin in retracted:
            twin.computed = 0
            waiting.appendleft(twin)
        for twin, count in work:
            twin.computed += count
        for generation in [g for g, _ in decided.work if g.computed == g.known]:
            generation.known += 1
            twins[id(generation)].known += 1
            if generation.known == ends[id(generation)]:
                queue.leave(generation)
                running.remove(twins[id(generation)])
        steps += 1
        assert steps < 5000, "the generations do not end"


def test_the_first_alone_computes_as_much_of_a_chunk_as_fits():
    queue = Queue()
    queue.submit(Generation(20))
    limits = Limits(4, 99, 12)
    queue.apply(schedule(queue, PRICES, lambda demand: True, limits))
    total = max(during(at, 1) for at in range(20))
    assert during(12, 8) > total
    counts = []
    while queue.running[0].computed < 20:
        decided = schedule(queue, PRICES, fits_in(queue, total), limits)
        assert decided.retracted == ()
        counts += [count for _, count in decided.work]
        queue.apply(decided)
    assert sum(counts) == 8
    assert 1 < len(counts) < 8


def test_a_chunk_is_cut_to_what_fits_without_those_that_were_retracted():
    """What the last one held is given back before the step: the first may use it."""
    first, last = Generation(58, computed=29), Generation(9, computed=4)
    queue = Queue()
    queue.running = [first, last]
    limits = Limits(8, 40, 29)
    total = during(29, 14)
    assert during(29, 29) > total
    decided = schedule(queue, PRICES, fits_in(queue, total), limits)
    assert decided.retracted == (last,)
    assert decided.work == ((first, 14),)


def test_a_decision_changes_nothing_until_it_is_applied():
    queue = Queue()
    generations = [Generation(5), Generation(6)]
    for generation in generations:
        queue.submit(generation)
    limits = Limits(4, 8, 8)
    first = schedule(queue, PRICES, lambda demand: True, limits)
    assert schedule(queue, PRICES, lambda demand: True, limits) == first
    assert list(queue.waiting) == generations
    assert first.work == ((generations[0], 5), (generations[1], 3))
    queue.apply(first)
    assert [g.computed for g in queue.running] == [5, 3]


def test_the_retracted_return_to_the_front_in_their_old_order():
    queue = Queue()
    generations = [Generation(4) for _ in range(4)]
    for generation in generations:
        queue.submit(generation)
    queue.apply(schedule(queue, PRICES, lambda demand: True, Limits(3, 100, 100)))
    assert queue.running == generations[:3]
    for generation in queue.running:
        generation.known += 1
    # Room for one slot, and so for the first alone.
    fits = fits_in(queue, during(4, 1))
    decided = schedule(queue, PRICES, fits, Limits(3, 100, 100))
    assert decided.retracted == (generations[2], generations[1])
    assert decided.admitted == ()
    queue.apply(decided)
    assert list(queue.waiting) == generations[1:]
    assert [g.retractions for g in generations] == [0, 1, 1, 0]
    assert [g.computed for g in generations] == [5, 0, 0, 0]


def test_a_plan_of_another_queue_is_refused():
    queue, stranger = Queue(), Generation(3)
    queue.submit(Generation(3))
    with pytest.raises(InvariantError, match="C1"):
        queue.apply(StepPlan((), (stranger,), ()))


def test_single_tokens_go_together_and_chunks_in_small_groups():
    generations = [Generation(9) for _ in range(6)]
    counts = [1, 7, 1, 2, 5, 1]
    work = list(zip(generations, counts, strict=True))
    limits = Limits(8, 99, 9, chunk_rows=2)
    assert batches(work, limits) == [
        [work[0], work[2], work[5]], [work[1], work[3]], [work[4]],
    ]  # fmt: skip
    assert batches([], limits) == []


@pytest.mark.parametrize("name", ["rows", "budget_tokens", "chunk_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_limit_that_is_no_positive_int_is_refused(name, value):
    with pytest.raises(UsageError, match=name):
        Limits(**({"rows": 1, "budget_tokens": 1, "chunk_tokens": 1} | {name: value}))
