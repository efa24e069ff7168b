"""The same bytes in separate pools of fixed size, as engines have that keep one per kind of state.

For comparison with one arena under the same scheduler: the split that SGLang's default ratios make,
and a search for the split that serves given requests best.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from unimem_jax.allocator import Split
from unimem_jax.errors import UsageError
from unimem_jax.plan import Plan
from unimem_jax.price import Demand, Prices
from unimem_jax.schedule import Limits
from unimem_jax.simulate import Simulated, simulate_within

STATE_PER_TOKEN_BYTES = 0.9  # default ratios of SGLang 0.5: state bytes per byte of token state
WINDOW_PER_CONTEXT = 0.8  # and window tokens per token of whole context
COARSE_COUNTS = 5  # where the search for the best split begins
FILLS = 40  # shares of full windows that are told apart
COARSE_FILLS = (20, 32)
FILL_STEPS = (4, 1)  # of the search, coarse then fine


def default_split(
    plan: Plan,
    *,
    state_per_token: float = STATE_PER_TOKEN_BYTES,
    window_per_context: float = WINDOW_PER_CONTEXT,
) -> Split:
    """The split of a plan's bytes at SGLang's default ratios, or at others.

    Args:
      state_per_token: bytes of request state for each byte of token state. Named request state,
        which no request takes by itself, gets none.
      window_per_context: tokens of each window for each token of whole context.
    """
    granules = plan.arena_granules
    slots = 0
    if plan.slot_pools:
        share = granules * state_per_token / (1 + state_per_token)
        share = share if plan.token_pools else granules
        slots = int(share / sum(pool.unit_granules for pool in plan.slot_pools))
        granules -= slots * sum(pool.unit_granules for pool in plan.slot_pools)
    ratios = [1 if pool.lifetime.kind == "context" else window_per_context
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
                found[split] = simulate_within(least, lengths, plan, limits, split)
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
