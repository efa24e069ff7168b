"""The scheduler and the allocator without bytes: what would run, and how much of it at once.

The same decisions as the engine's, over the same memory, for requests of which only the lengths are
known. It also runs them in memory that is split between the kinds of state, for comparison: pools
of fixed size, as engines have that keep one pool per kind. It models no time: a step is a step.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from unimem_jax.allocator import UNIFIED, Split
from unimem_jax.errors import InvariantError, UsageError
from unimem_jax.memory import Memory
from unimem_jax.plan import Plan
from unimem_jax.price import Demand, Prices
from unimem_jax.requests import Request, Work
from unimem_jax.schedule import Generation, Limits, Queue, batches, room, schedule

STATE_PER_TOKEN_BYTES = 0.9  # default ratios of SGLang 0.5: state bytes per byte of token state
WINDOW_PER_CONTEXT = 0.8  # and window tokens per token of whole context
COARSE_COUNTS = 5  # where the search for the best split begins
FILLS = 40  # shares of full windows that are told apart
COARSE_FILLS = (20, 32)
FILL_STEPS = (4, 1)  # of the search, coarse then fine


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulated run did.

    Attributes:
      steps: until the last request ended.
      running_mean, running_max: requests that run, counted in each step before those that ended
        leave.
      retractions: how often a request lost its memory.
      computed_tokens: in all; more than `needed_tokens` where state was computed again.
      needed_tokens: what a run without retractions computes.
      moved_bytes: bytes that the allocator moved.
    """

    steps: int
    running_mean: float
    running_max: int
    retractions: int
    computed_tokens: int
    needed_tokens: int
    moved_bytes: int


@dataclass(slots=True, eq=False)
class _Replayed(Generation):
    total: int = 0  # tokens known at the end
    request: Request | None = None


def simulate(
    lengths: Sequence[tuple[int, int]], plan: Plan, limits: Limits, layout: str | Split = UNIFIED
) -> Simulated:
    """Runs requests that all arrive at once.

    Args:
      lengths: prompt and generated tokens of each request, both at least 1.
      limits: of each step.
      layout: `UNIFIED`, or a `Split` of the same bytes.
    Raises:
      UsageError: a length below 1, or a request that the empty memory cannot hold (itemised).
    Cost: about 10 microseconds per running request and step.
    """
    found = _simulate(lengths, plan, limits, layout, math.inf)
    assert found is not None
    return found


def _simulate(
    lengths: Sequence[tuple[int, int]], plan: Plan, limits: Limits, layout: str | Split, most: float
) -> Simulated | None:
    """As `simulate`; None as soon as it takes more than `most` steps."""
    if not lengths or min(map(min, lengths)) < 1:
        raise UsageError("a simulation needs requests of at least one prompt and one new token")
    memory = Memory(plan, limits.rows, max(map(sum, lengths)), layout=layout)
    queue: Queue[_Replayed] = Queue()
    for prompt, output in lengths:
        memory.refuse_impossible(memory.prices.peak(prompt + output - 1, 1))
        queue.submit(_Replayed(prompt, total=prompt + output))
    running: list[int] = []
    retractions = computed = 0
    while queue:
        if len(running) >= most:
            return None
        decided = schedule(queue, memory.prices, room(memory), limits)
        if not decided.work:
            raise InvariantError("C2: a step without work while requests wait")
        for replayed in decided.retracted:
            _leave(memory, replayed)
        queue.apply(decided)
        for replayed in decided.admitted:
            replayed.request = memory.open()
        for batch in batches(decided.work, limits):
            memory.skip([_work(*item) for item in batch])
        running.append(len(queue.running))
        retractions += len(decided.retracted)
        computed += sum(count for _, count in decided.work)
        for replayed in [item for item, _ in decided.work if item.computed == item.known]:
            replayed.known += 1
            if replayed.known == replayed.total:
                _leave(memory, replayed)
                queue.leave(replayed)
    return Simulated(
        steps=len(running),
        running_mean=sum(running) / len(running),
        running_max=max(running),
        retractions=retractions,
        computed_tokens=computed,
        needed_tokens=sum(prompt + output - 1 for prompt, output in lengths),
        moved_bytes=memory.metrics()["moved_bytes"],
    )


def default_split(plan: Plan) -> Split:
    """The split of a plan's bytes at SGLang's default ratios.

    For each token of whole context there are 0.8 tokens of each window, and 0.9 bytes of request
    state for each byte of token state. Named request state, which no request takes by itself, gets
    none.
    """
    granules = plan.arena_granules
    slots = 0
    if plan.slot_pools:
        share = granules * STATE_PER_TOKEN_BYTES / (1 + STATE_PER_TOKEN_BYTES)
        share = share if plan.token_pools else granules
        slots = int(share / sum(pool.unit_granules for pool in plan.slot_pools))
        granules -= slots * sum(pool.unit_granules for pool in plan.slot_pools)
    ratios = [1 if pool.lifetime.kind == "context" else WINDOW_PER_CONTEXT
              for pool in plan.token_pools]  # fmt: skip
    page_sum = sum(
        pool.unit_granules * ratio for pool, ratio in zip(plan.token_pools, ratios, strict=True)
    )
    pages = granules / page_sum if page_sum else 0
    by_pool = {pool.index: int(pages * r) for pool, r in zip(plan.token_pools, ratios, strict=True)}
    caps = [by_pool.get(pool.index, slots if pool.is_running else 0) for pool in plan.sub_pools]
    return _inside(plan, caps)


def best_split(
    lengths: Sequence[tuple[int, int]], plan: Plan, limits: Limits
) -> tuple[Split, Simulated, int]:
    """The split of a plan's bytes that ends these requests in the fewest steps.

    Steps, and not how many run at once: that figure also counts those that compute again what a
    retraction took from them.

    A split is named by how many requests its state is made for, and by the share of those, in
    fortieths, that have full windows at once; whole context gets the rest. From the best of a
    coarse grid the search goes to better neighbours until there is none.

    Returns:
      The split, what it did, and how many splits were tried.
    Raises:
      UsageError: no split that was tried holds every request.
    Cost: one simulation per split, 20 to 60 of them, most cut short.
    """
    found: dict[Split, Simulated | None] = {}
    windows = Prices(plan).peak(max(map(sum, lengths)) - 1, limits.chunk_tokens)
    most = min(limits.rows, len(lengths))

    @cache
    def score(count: int, fill: int) -> float:
        split = None
        if 0 < count <= most and 0 < fill <= FILLS:
            split = _made_for(plan, windows, count, fill / FILLS)
        if split is None:
            return 0.0
        if split not in found:
            try:  # what takes more steps than the best so far need not run to its end
                least = min((one.steps for one in found.values() if one), default=math.inf)
                found[split] = _simulate(lengths, plan, limits, split, least)
            except UsageError:  # one of the requests alone is too long for it
                return 0.0
        simulated = found[split]
        return 1 / simulated.steps if simulated else 0.0

    counts = np.unique(np.geomspace(1, most, COARSE_COUNTS).round().astype(int)).tolist()
    coarse = list(itertools.product(counts, COARSE_FILLS))
    for named in coarse[::-1]:  # those for few requests take the most steps, and are then cut short
        score(*named)
    best = max(coarse, key=lambda named: score(*named))
    for step in FILL_STEPS:
        start = None
        while best != start:
            start = best
            near = itertools.product((-1, 0, 1), (-step, 0, step))
            around = [start, *((start[0] + count, start[1] + fill) for count, fill in near)]
            best = max(around, key=lambda named: score(*named))
    ended = {split: simulated for split, simulated in found.items() if simulated}
    if not ended:
        raise UsageError(f"no split of {plan.arena_bytes:,} bytes holds each of the requests")
    split = min(ended, key=lambda split: (ended[split].steps, ended[split].computed_tokens))
    return split, ended[split], len(found)


def _work(replayed: _Replayed, count: int) -> Work:
    assert replayed.request is not None
    follows = count == 1 and replayed.request.has_sampled
    return Work(replayed.request, count, None if follows else np.zeros(count, np.int32))


def _leave(memory: Memory, replayed: _Replayed) -> None:
    assert replayed.request is not None
    memory.free(replayed.request)
    replayed.request = None


def _made_for(plan: Plan, windows: Demand, count: int, fill: float) -> Split | None:
    """State for `count` requests, windows for a share `fill` of them, the rest whole context."""
    caps = [count if pool.is_running else 0 for pool in plan.sub_pools]
    for pool in plan.token_pools:
        if pool.lifetime.kind == "window":
            caps[pool.index] = max(windows[pool.index], int(windows[pool.index] * count * fill))
    taken = sum(cap * pool.unit_granules for cap, pool in zip(caps, plan.sub_pools, strict=True))
    left = plan.arena_granules - taken
    contexts = [pool for pool in plan.token_pools if pool.lifetime.kind == "context"]
    for pool in contexts:
        caps[pool.index] = left // sum(one.unit_granules for one in contexts)
    is_served = all(caps[pool.index] > 0 for pool in (*plan.token_pools, *plan.slot_pools))
    return _inside(plan, caps) if left >= 0 and is_served else None


def _inside(plan: Plan, caps: list[int]) -> Split:
    """Takes pages away until the shares, each on its own grid, lie inside the arena."""
    while True:
        end = 0
        for pool, cap in zip(plan.sub_pools, caps, strict=True):
            if cap:
                end = (-(-end // pool.unit_granules) + cap) * pool.unit_granules
        if end <= plan.arena_granules:
            return Split(tuple(caps))
        largest = max(plan.token_pools or plan.sub_pools, key=lambda pool: caps[pool.index])
        caps[largest.index] -= 1
