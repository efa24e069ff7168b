"""Who runs in the next step, decided on the host from counts alone.

`schedule` looks at the queue and returns a `StepPlan`; `Queue.apply` is the only thing that acts
on one. The engine and the simulator share both, so what a simulation shows is what the engine
does. Nothing here holds memory: capacity is one question, `fits`.

The policy is first come, first served, with growth unreserved:

* Running generations, in order of admission, each compute what they know and have not computed, up
  to a budget of tokens. If their growth does not fit together, the last one that runs is retracted
  until it does; the first, alone, computes fewer tokens instead.
* A retracted generation loses its memory, keeps its tokens and waits at the front of the line.
* In a step that retracts none, those who wait are admitted in order while budget is left and all
  the tokens that they know would fit now. They then hold only what the step computes.

C1  computed <= known; memory is held for computed tokens only, and a generation that waits has
    computed 0.
C2  The first that runs makes progress in every step: once all others are retracted, one token of
    it fits wherever an empty arena holds it token by token. So every generation ends.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from unimem_jax.errors import InvariantError, require_positive
from unimem_jax.memory import Memory
from unimem_jax.price import Demand, Prices, add, less

# Whether so many more units of each sub-pool fit beside what is held; negative where units are
# given back.
type Fits = Callable[[Demand], bool]


@dataclass(slots=True, eq=False)
class Generation:
    """A prompt and what was generated after it, as far as scheduling cares.

    Attributes:
      known: tokens of the prompt and those sampled.
      computed: tokens whose state is in memory; 0 while it waits.
      retractions: how often its memory was taken.
    """

    known: int
    computed: int = 0
    retractions: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one step beside memory.

    Attributes:
      rows: most generations that run at once.
      budget_tokens: most tokens that one step computes.
      chunk_tokens: most tokens that one generation computes in a step.
      chunk_rows: most rows of one program that runs chunks.
    """

    rows: int
    budget_tokens: int
    chunk_tokens: int
    chunk_rows: int = 4

    def __post_init__(self) -> None:
        require_positive(
            rows=self.rows,
            budget_tokens=self.budget_tokens,
            chunk_tokens=self.chunk_tokens,
            chunk_rows=self.chunk_rows,
        )


@dataclass(frozen=True, slots=True)
class StepPlan[G: Generation]:
    """What one step does.

    Attributes:
      retracted: the last that ran first; their memory is freed before anything is granted.
      admitted: in order; each takes a row.
      work: (generation, new tokens), in order of admission.
      starts: of those admitted, tokens after which each resumes; none where all begin at 0.
    """

    retracted: tuple[G, ...]
    admitted: tuple[G, ...]
    work: tuple[tuple[G, int], ...]
    starts: tuple[int, ...] = ()


class Reuse[G: Generation](Protocol):
    """What changes where generations resume from what others computed."""

    def start(self, generation: G) -> int:
        """Tokens after which one who waits would resume."""
        ...

    def until(self, generation: G, computed: int) -> int:
        """Where its next chunk ends at the latest, above `computed`."""
        ...

    def shared(self, generation: G) -> Demand:
        """Units that one who waits need not take, or that retracting one who runs does not free,
        since others use them too.
        """
        ...


class Queue[G: Generation]:
    """Those who run, in order of admission, and those who wait."""

    def __init__(self) -> None:
        self.running: list[G] = []
        self.waiting: deque[G] = deque()

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def submit(self, generation: G) -> None:
        """Puts a generation at the end of the line."""
        self.waiting.append(generation)

    def submit_first(self, generations: Sequence[G]) -> None:
        """Puts generations at the front of the line, in order."""
        self.waiting.extendleft(reversed(generations))

    def apply(self, plan: StepPlan[G]) -> None:
        """Makes a plan true; afterwards `computed` counts the tokens of its work."""
        self.retract(plan.retracted)
        for at, generation in enumerate(plan.admitted):
            if self.waiting.popleft() is not generation:
                raise InvariantError("C1: the plan admits out of order; it is of another queue")
            generation.computed = plan.starts[at] if plan.starts else 0
            self.running.append(generation)
        for generation, count in plan.work:
            generation.computed += count
            if generation.computed > generation.known:
                raise InvariantError("C1: a step computes tokens that nobody knows yet")

    def retract(self, generations: Iterable[G]) -> None:
        """Sends generations, the last that runs first, back to the front of the line."""
        for generation in generations:
            if self.running.pop() is not generation:
                raise InvariantError("C1: only the last that runs is retracted")
            generation.computed = 0
            generation.retractions += 1
            self.waiting.appendleft(generation)

    def leave(self, generation: G) -> None:
        """Forgets a generation that has ended or was given up."""
        line = self.running if generation in self.running else self.waiting
        line.remove(generation)


def room(memory: Memory) -> Fits:
    """The question `fits` of a memory, asked about growth less what a retraction gives back."""
    allocator = memory.allocator

    def fits(demand: Demand) -> bool:
        return allocator.layout.fits(add(allocator.held, demand))

    return fits


def schedule[G: Generation](
    queue: Queue[G], prices: Prices, fits: Fits, limits: Limits, reuse: Reuse[G] | None = None
) -> StepPlan[G]:
    """Decides the next step. Pure: changes nothing.

    Args:
      fits: whether more units fit beside those held now, less where the demand is negative.
      reuse: where generations resume; all begin at 0 without.
    Cost: a few microseconds per running generation.
    """
    budget, demand = limits.budget_tokens, (0,) * len(prices.plan.sub_pools)
    page_tokens, chunk_tokens = prices.plan.page_tokens, limits.chunk_tokens
    work = []
    for generation in queue.running:  # the hot loop: no call for who stays within a page
        computed = generation.computed
        count = generation.known - computed
        if count > 1 and reuse is not None:
            count = reuse.until(generation, computed) - computed
        if count > chunk_tokens:
            count = chunk_tokens
        if count > budget:
            count = budget
        budget -= count
        work.append((generation, count))
        if count > -computed % page_tokens:
            demand = add(demand, prices.growth(computed, computed + count))
    retracted = []
    while work and not fits(demand):
        generation, count = work.pop()
        if not work and count > 1:
            others = less(demand, _growth(generation, count, prices))  # what the retracted give
            while count > 1 and not fits(demand):
                count //= 2
                demand = add(others, _growth(generation, count, prices))
            work = [(generation, count)]
            break
        retracted.append(generation)
        computed = generation.computed
        given_back = add(prices.held(computed), prices.growth(computed, computed + count))
        if reuse is not None:
            given_back = less(given_back, reuse.shared(generation))
        demand = less(demand, given_back)
    admitted, starts = [], []
    for generation in queue.waiting if not retracted else ():
        if not budget or len(work) == limits.rows:
            break
        start, until, whole = 0, generation.known, prices.held(generation.known)
        if reuse is not None:
            start = reuse.start(generation)
            until = reuse.until(generation, start)
        count = min(budget, limits.chunk_tokens, until - start)
        growth = prices.growth(start, start + count)
        if start and reuse is not None:
            shared = reuse.shared(generation)
            growth, whole = less(add(growth, prices.held(start)), shared), less(whole, shared)
        whole = tuple(map(max, whole, growth))
        if not fits(add(demand, whole)):
            break
        budget -= count
        demand = add(demand, growth)
        work.append((generation, count))
        admitted.append(generation)
        starts.append(start)
    working = tuple([item for item in work if item[1]])
    return StepPlan(tuple(retracted), tuple(admitted), working, tuple(starts))


def _growth(generation: Generation, count: int, prices: Prices) -> Demand:
    return prices.growth(generation.computed, generation.computed + count)


def batches[G: Generation](
    work: Sequence[tuple[G, int]], limits: Limits
) -> list[list[tuple[G, int]]]:
    """Splits a step's work into device programs: all single tokens at once, longer chunks apart.

    A padded row costs as much as a full one, so tokens of decoding rows do not ride along with
    chunks. What fits together also fits one batch after another.
    """
    single = [item for item in work if item[1] == 1]
    chunks = [item for item in work if item[1] > 1]
    found = [single] if single else []
    rows = limits.chunk_rows
    return found + [chunks[at : at + rows] for at in range(0, len(chunks), rows)]
