"""The scheduler and the allocator without bytes: what would run, and how much of it at once.

The same decisions as the engine's, over the same memory, for requests of which only the lengths are
known. It also runs them in memory that is split between the kinds of state, for comparison: pools
of fixed size, as engines have that keep one pool per kind.

Without a `StepTime` a step is a step: all requests arrive before the first one, and nothing is said
about seconds. With one, requests arrive when they do, and steps take as long as the model says.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from unimem_jax.allocator import UNIFIED, Split
from unimem_jax.errors import InvariantError, UsageError
from unimem_jax.memory import Memory
from unimem_jax.plan import Plan
from unimem_jax.queue import FIRST_COME, Generation, Queue
from unimem_jax.requests import Request
from unimem_jax.schedule import Limits, batches, room, schedule
from unimem_jax.step_time import StateBytes, StepTime
from unimem_jax.trace import Traced


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a simulated run, by its step-time model.

    Attributes:
      seconds: from the first arrival to the end.
      tokens_per_s: generated tokens over these seconds.
      ttft_p50_s, ttft_p99_s: from the arrival of a request to its first token.
    """

    seconds: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulated run did.

    Attributes:
      steps: until the last request ended.
      running_mean, running_max: requests that run, counted in each step before those that ended
        leave.
      retractions: how often a request lost its memory.
      retractions_max: of one request.
      computed_tokens: in all; more than `needed_tokens` where state was computed again.
      needed_tokens: what a run without retractions computes.
      moved_bytes: bytes that the allocator moved.
      waste_fraction: share of the arena that holds nothing that a running request needs, on
        average over the steps in which a request waits for memory; 0 if none ever does.
      host_us_per_request_step: processor time of the run (scheduling, bookkeeping, the step-time
        model and whatever else the process did) for each running request of each step.
      timing: with a step-time model.
    """

    steps: int
    running_mean: float
    running_max: int
    retractions: int
    retractions_max: int
    computed_tokens: int
    needed_tokens: int
    moved_bytes: int
    waste_fraction: float
    host_us_per_request_step: float = field(compare=False)
    timing: Timing | None = None


@dataclass(slots=True, eq=False)
class _Replayed(Generation):
    total: int = 0  # tokens known at the end
    arrival_s: float = 0.0
    request: Request = field(init=False)  # while it runs


def simulate(
    lengths: Sequence[tuple[int, int]], plan: Plan, limits: Limits,
    layout: str | Split = UNIFIED, policy: str = FIRST_COME,
) -> Simulated:  # fmt: skip
    """Runs requests that all arrive at once. Each declares the longest output as its limit.

    Args:
      lengths: prompt and generated tokens of each request, both at least 1.
      limits: of each step.
      layout: `UNIFIED`, or a `Split` of the same bytes.
      policy: of `schedule`.
    Raises:
      UsageError: a length below 1, another policy, or a request that the empty memory cannot
        hold (itemised).
    """
    found = simulate_within(math.inf, lengths, plan, limits, layout, policy=policy)
    assert found is not None
    return found


def simulate_within(
    most: float, lengths: Sequence[tuple[int, int]], plan: Plan, limits: Limits,
    layout: str | Split, *, policy: str = FIRST_COME,
) -> Simulated | None:  # fmt: skip
    """As `simulate`; None as soon as it is certain to take more than `most` steps."""
    requests = [Traced(0.0, prompt, new) for prompt, new in lengths]
    simulation = Simulation(requests, plan, limits, layout, policy=policy)
    rows = _most_at_once(plan, limits, layout)
    while not simulation.is_over:
        # A step adds at most a token to each that runs.
        if simulation.steps + simulation.left / rows > most:
            return None
        simulation.step()
    return simulation.found()


class Simulation:
    """One run, step by step.

    Args:
      requests: in order of arrival, with at least one prompt and one new token each.
      limits: of each step.
      layout: `UNIFIED`, or a `Split` of the same bytes.
      clock: how long steps take; without one, requests do not wait for their arrival.
      concurrency: most requests in the system at once; each further one arrives when another ends.
      policy: of `schedule`; every request declares the longest output of all as its limit.
      state: what requests need of the arena; by default what `plan` holds.
    Attributes:
      steps, ended: so far.
      left: tokens that are still to be generated.
      now_s: time by the clock.
      memory, queue: as the engine's.
    Raises:
      UsageError: no request, a length below 1, another policy, or a request that the empty memory
        cannot hold (itemised).
    """

    def __init__(
        self, requests: Sequence[Traced], plan: Plan, limits: Limits,
        layout: str | Split = UNIFIED, *, clock: StepTime | None = None,
        concurrency: int | None = None, state: StateBytes | None = None,
        policy: str = FIRST_COME,
    ):  # fmt: skip
        if not requests or min(min(one.prompt_tokens, one.new_tokens) for one in requests) < 1:
            raise UsageError("a simulation needs requests of at least one prompt and one new token")
        totals = [one.prompt_tokens + one.new_tokens for one in requests]
        self.memory = Memory(plan, limits.rows, max(totals), layout=layout)
        self._refuse_impossible(requests, totals)
        self.queue: Queue[_Replayed] = Queue(policy)
        self._most_new = max(one.new_tokens for one in requests)
        self.limits, self.clock = limits, clock
        self._state = state or StateBytes.of_plan(plan)
        self._coming = deque(requests)
        self._concurrency = concurrency
        self._fits = room(self.memory)
        self._unit_bytes = [pool.unit_bytes for pool in plan.sub_pools]
        self._needed = sum(totals) - len(totals)
        self.left = self._generated = sum(one.new_tokens for one in requests)
        self.steps = self.ended = self._running = self._most = self._retractions = 0
        self._retractions_max = self._computed = self._moved_bytes = 0
        self.now_s = self._wasted = 0.0
        self._began_s = time.process_time()  # asked once: it is a system call
        self._crowded = 0  # steps in which a request waits for memory
        self._first_s: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether every request has ended."""
        return not self.queue and not self._coming

    @property
    def has_arrived(self) -> bool:
        """Whether every request has arrived."""
        return not self._coming

    def step(self) -> None:
        """Lets requests arrive, and runs one step."""
        memory, queue = self.memory, self.queue
        self._arrive()
        decided = schedule(queue, memory.prices, self._fits, self.limits)
        if not decided.work:
            raise InvariantError("C2: a step without work while requests wait")
        for replayed in decided.retracted:
            memory.free(replayed.request)
        queue.apply(decided)
        for replayed in decided.admitted:
            replayed.request = memory.open()
        self.steps += 1
        self._running += len(queue.running)
        self._most = max(self._most, len(queue.running))
        self._retractions += len(decided.retracted)
        lengths, counts = self._compute(decided.work)
        self._spend(lengths, counts)
        self._emit(decided.work)

    def found(self) -> Simulated:
        """What the run did, once it is over."""
        timing = None
        if self.clock is not None:
            p50, p99 = np.percentile(self._first_s, (50, 99)).tolist()
            timing = Timing(self.now_s, self._generated / self.now_s, p50, p99)
        return Simulated(
            steps=self.steps,
            running_mean=self._running / self.steps,
            running_max=self._most,
            retractions=self._retractions,
            retractions_max=self._retractions_max,
            computed_tokens=self._computed,
            needed_tokens=self._needed,
            moved_bytes=self.memory.metrics()["moved_bytes"],
            waste_fraction=self._wasted / self._crowded if self._crowded else 0.0,
            host_us_per_request_step=(time.process_time() - self._began_s) * 1e6 / self._running,
            timing=timing,
        )

    def _arrive(self) -> None:
        """Puts at the end of the line who has come by now; if nobody is there, waits for the
        next.
        """
        coming, queue = self._coming, self.queue
        if self.clock is not None and not queue:
            self.now_s = max(self.now_s, coming[0].arrival_s)
        while coming and (self.clock is None or coming[0].arrival_s <= self.now_s):
            if self._concurrency is not None and len(queue) >= self._concurrency:
                break
            one = coming.popleft()
            queue.submit(
                _Replayed(
                    one.prompt_tokens,
                    limit=one.prompt_tokens + self._most_new,
                    total=one.prompt_tokens + one.new_tokens,
                    arrival_s=one.arrival_s if self._concurrency is None else self.now_s,
                )
            )

    def _compute(self, work: Sequence[tuple[_Replayed, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Grants what the work needs; int64 lengths after it and new tokens of each request."""
        lengths, counts = [], []
        for batch in batches(work, self.limits):
            new = np.array([count for _, count in batch], np.int64)
            lengths.append(self.memory.skip([replayed.request for replayed, _ in batch], new))
            counts.append(new)
        if len(lengths) == 1:
            return lengths[0], counts[0]
        return np.concatenate(lengths), np.concatenate(counts)

    def _spend(self, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Adds up what a step takes."""
        tokens = int(counts.sum())
        self._computed += tokens
        if self.queue.waiting and tokens < self.limits.budget_tokens:  # for memory, that is
            self._crowded += 1
            held = lengths
            if len(held) < len(self.queue.running):  # the budget left some without a token
                held = np.array([one.computed for one in self.queue.running])
            self._wasted += 1 - self._state.total(held) / self.memory.plan.arena_bytes
        if self.clock is not None:
            moved = zip(self.memory.allocator.moved_units, self._unit_bytes, strict=True)
            moved_bytes = sum(count * size for count, size in moved)
            self.now_s += self.clock.seconds(
                lengths - counts, counts, moved_bytes - self._moved_bytes
            )
            self._moved_bytes = moved_bytes

    def _emit(self, work: Sequence[tuple[_Replayed, int]]) -> None:
        """Samples a token after each that has computed all it knows."""
        left = self.left
        for replayed, _ in work:
            known = replayed.known
            if replayed.computed == known:
                if known == replayed.prompt_tokens:
                    self._first_s.append(self.now_s - replayed.arrival_s)
                replayed.known = known = known + 1
                left -= 1
                if known == replayed.total:
                    self.memory.free(replayed.request)
                    self.queue.learn(replayed)
                    self.queue.leave(replayed)
                    self._retractions_max = max(self._retractions_max, replayed.retractions)
                    self.ended += 1
        self.left = left

    def _refuse_impossible(self, requests: Sequence[Traced], totals: Sequence[int]) -> None:
        """Raises UsageError if an empty memory cannot hold the longest request."""
        at = int(np.argmax(totals))
        try:
            self.memory.refuse_impossible(self.memory.prices.peak(totals[at] - 1, 1))
        except UsageError as error:
            one = requests[at]
            raise UsageError(
                f"request {at + 1} of {len(requests)}, {one.prompt_tokens:,} + "
                f"{one.new_tokens:,} tokens, {error}"
            ) from error


def _most_at_once(plan: Plan, limits: Limits, layout: str | Split) -> int:
    """Requests that can run at once: each has a row, and a slot in every pool of running state."""
    slots = [layout.caps[pool.index] for pool in plan.slot_pools if isinstance(layout, Split)]
    return min(limits.rows, *slots) if slots else limits.rows
