"""The scheduler and the allocator without bytes: what would run, and how much of it at once.

The same decisions as the engine's, over the same memory, for requests of which only the lengths are
known. It also runs them in memory that is split between the kinds of state, for comparison: pools
of fixed size, as engines have that keep one pool per kind. It models no time: a step is a step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from unimem_jax.allocator import UNIFIED, Split
from unimem_jax.errors import InvariantError, UsageError
from unimem_jax.memory import Memory
from unimem_jax.plan import Plan
from unimem_jax.requests import Request
from unimem_jax.schedule import Generation, Limits, Queue, batches, room, schedule


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
    request: Request = field(init=False)  # while it runs


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
    """
    found = simulate_within(math.inf, lengths, plan, limits, layout)
    assert found is not None
    return found


def simulate_within(
    most: float, lengths: Sequence[tuple[int, int]], plan: Plan, limits: Limits,
    layout: str | Split,
) -> Simulated | None:  # fmt: skip
    """As `simulate`; None as soon as it is certain to take more than `most` steps."""
    if not lengths or min(map(min, lengths)) < 1:
        raise UsageError("a simulation needs requests of at least one prompt and one new token")
    longest = max(map(sum, lengths))
    memory = Memory(plan, limits.rows, longest, layout=layout)
    memory.refuse_impossible(memory.prices.peak(longest - 1, 1))
    queue: Queue[_Replayed] = Queue()
    for prompt, output in lengths:
        queue.submit(_Replayed(prompt, total=prompt + output))
    fits, rows = room(memory), _most_at_once(plan, limits, layout)
    running: list[int] = []
    retractions = computed = 0
    left = sum(output for _, output in lengths)
    while queue:
        if len(running) + left / rows > most:  # a step adds at most a token to each that runs
            return None
        decided = schedule(queue, memory.prices, fits, limits)
        if not decided.work:
            raise InvariantError("C2: a step without work while requests wait")
        for replayed in decided.retracted:
            memory.free(replayed.request)
        queue.apply(decided)
        for replayed in decided.admitted:
            replayed.request = memory.open()
        for batch in batches(decided.work, limits):
            counts = [count for _, count in batch]
            memory.skip([replayed.request for replayed, _ in batch], counts)
            computed += sum(counts)
        running.append(len(queue.running))
        retractions += len(decided.retracted)
        for replayed, _ in decided.work:
            if replayed.computed == replayed.known:
                replayed.known += 1
                left -= 1
                if replayed.known == replayed.total:
                    memory.free(replayed.request)
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


def _most_at_once(plan: Plan, limits: Limits, layout: str | Split) -> int:
    """Requests that can run at once: each has a row, and a slot in every pool of running state."""
    slots = [layout.caps[pool.index] for pool in plan.slot_pools if isinstance(layout, Split)]
    return min(limits.rows, *slots) if slots else limits.rows
