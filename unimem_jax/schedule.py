"""Who runs in the next step, decided on the host from counts alone.

`schedule` looks at the queue and returns a `StepPlan`; `Queue.apply` is the only thing that acts
on one. The engine and the simulator share both, so what a simulation shows is what the engine
does. Nothing here holds memory: capacity is one question, `fits`.

A step serves single tokens of those who decode first and chunks of prompts with what is left of its
budget. If the growth of those who run does not fit together, the last admitted of the least urgent
is retracted until it does: it loses its memory, keeps its tokens and takes its old place in line.
In a step that retracts none for that, some of those who wait are admitted. The policies differ in
whom:

* `first-come` admits in order while all the tokens that the next one knows would fit now. Growth is
  unreserved.
* `predicted` also asks the outlook (`forecast`): with the expected growth of all who run, a
  candidate has to fit until it has sampled a share of what it is expected to sample yet. Later ones
  may pass over one that does not fit, a limited number of times. One that was retracted twice is
  firm: all it can ever need is set aside, and it is not retracted again.
* `bounded` is `predicted` where everybody is expected to sample as much as allowed, and all of it
  has to fit.

With both of these a more urgent candidate may take the memory of less urgent ones that are not
firm.

C2  The first that runs makes progress in every step: once all others are retracted, one token of
    it fits wherever an empty arena holds it token by token. So every generation ends.
C3  What firm generations can ever need fits together, or one of them is alone; so nobody is
    retracted more than twice, unless the memory itself shrank.
C4  Nobody is passed over more than 32 times by later ones that are not more urgent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from unimem_jax.errors import require_positive
from unimem_jax.forecast import Expected, Outlook
from unimem_jax.memory import Memory
from unimem_jax.price import Demand, Prices, add, less, total_held
from unimem_jax.queue import FIRST_COME, PREDICTED, PRIORITIES, Generation, Queue, StepPlan

MOST_PASSES = 32  # that anybody is passed over
LOOKED_PAST = 4  # candidates that do not fit, before a step stops looking
SHARE = 0.15  # of what it is expected to sample yet, for which a candidate has to fit

# Whether so many more units of each sub-pool fit beside what is held; negative where units are
# given back.
type Fits = Callable[[Demand], bool]


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


class Reuse[G: Generation](Protocol):
    """What changes where generations resume from what others computed."""

    def start(self, generation: G) -> int:
        """Tokens after which one who waits would resume."""
        ...

    def until(self, generation: G, computed: int) -> int:
        """Where its next chunk ends at the latest, above `computed`."""
        ...

    def shared(self, generation: G, retracted: Sequence[G], admitted: Sequence[G]) -> Demand:
        """Units that one who waits need not take, or that retracting one who runs does not free,
        since others use them too: those who run without the retracted, and the admitted.
        """
        ...

    def held(self) -> Demand:
        """Units that those who run hold together; what several use counts once."""
        ...


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
      reuse: where generations resume; all begin at 0 without. One who waits is expected to hold
        alone what it will share.
    Cost: about a microsecond per running generation, and one more in steps that could admit.
    """
    draft = _Draft(queue, prices, fits, limits, reuse)
    draft.run()
    draft.make_fit()
    if queue.waiting and not draft.retracted:
        if queue.policy == FIRST_COME:
            draft.admit_in_order()
        else:
            draft.admit()
    work = tuple([item for item in draft.work if item[1]])
    starts = tuple([draft.begin(one)[0] for one in draft.admitted]) if reuse else ()
    return StepPlan(tuple(draft.retracted), tuple(draft.admitted), work, starts)


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


class _Draft[G: Generation]:
    """A step while it is decided.

    Attributes:
      work: (generation, new tokens) of all who will run.
      demand: units that the work adds to what is held, less what the retracted give back.
      budget: tokens left.
    """

    def __init__(
        self, queue: Queue[G], prices: Prices, fits: Fits, limits: Limits, reuse: Reuse[G] | None
    ):  # fmt: skip
        self.queue, self.prices, self.fits, self.limits = queue, prices, fits, limits
        self.reuse = reuse
        self._begins: dict[int, tuple[int, int]] = {}
        self.demand: Demand = (0,) * len(prices.plan.sub_pools)
        self.budget = limits.budget_tokens
        self.work: list[tuple[G, int]] = []
        self.retracted: list[G] = []
        self.admitted: list[G] = []

    def run(self) -> None:
        """Gives everybody who runs its next tokens: single ones first, then chunks."""
        page_tokens, most = self.prices.plan.page_tokens, self.limits.chunk_tokens
        running, work = self.queue.running, self.work
        singles = sum([one.known - one.computed == 1 for one in running])
        left = max(0, self.budget - singles)  # for chunks
        singles = self.budget - left
        for generation in running:  # the hot loop: no call for who stays within a page
            computed = generation.computed
            count = generation.known - computed
            if count == 1:
                count = 1 if singles else 0
                singles -= count
            else:
                if self.reuse is not None and count:
                    count = self.reuse.until(generation, computed) - computed
                count = min(count, most, left)
                left -= count
            work.append((generation, count))
            if count > -computed % page_tokens:
                self.demand = add(self.demand, self.prices.growth(computed, computed + count))
        self.budget = left

    def make_fit(self) -> None:
        """Retracts until the growth of the others fits; the last one left computes less instead."""
        while self.work and not self.fits(self.demand):
            victims = [] if len(self.work) == 1 else self.victims()
            if victims:
                self.retract(victims[0])
                continue
            longest = max(range(len(self.work)), key=lambda at: self.work[at][1])
            generation, count = self.work[longest]
            if count <= 1:
                self.retract(self.work[-1][0])
                continue
            self.demand = less(self.demand, self._growth(generation, count))
            self.demand = add(self.demand, self._growth(generation, count // 2))
            self.work[longest] = generation, count // 2

    def admit_in_order(self) -> None:
        """Admits while the next in line fits with all that it knows."""
        for generation in self.queue.waiting:
            if not self.budget or not self.has_room(generation):
                break
            self.admit_one(generation)

    def admit(self) -> None:
        """Admits those whose expected growth fits too, some of them before others that wait."""
        refused: list[G] = []
        crowd: _Crowd[G] | None = None
        least = min((one.priority for one, _ in self.work), default=PRIORITIES.stop)
        for generation in self.queue.waiting:
            if not self.budget or len(refused) > LOOKED_PAST:
                break
            if any(self._passes(one, generation) >= MOST_PASSES for one in refused):
                break
            is_hopeless = generation.priority <= least and not self.has_room(generation)
            if not is_hopeless and crowd is None:
                crowd = _Crowd(self)
            if is_hopeless or crowd is None or not crowd.admit(generation):
                refused.append(generation)

    def _passes(self, refused: G, generation: G) -> int:
        """How often one was passed over by now."""
        if refused.priority != generation.priority:
            return 0
        later = sum(one.place > refused.place for one in self.admitted)
        return refused.passes + later

    def victims(self, below: int = PRIORITIES.stop) -> list[G]:
        """Who may be retracted, who goes first: the last admitted of the least urgent."""
        is_bound = self.queue.policy != FIRST_COME
        found = [
            one for one, _ in self.work[::-1]
            if one.priority < below and not (is_bound and one.is_firm)
        ]  # fmt: skip
        return sorted(found, key=lambda one: one.priority)

    def has_room(self, generation: G) -> bool:
        """Whether there is a row, and all that a candidate knows fits now."""
        if len(self.work) == self.limits.rows:
            return False
        _, growth, shared = self._first(generation)
        whole = less(self.prices.held(generation.known), shared)
        return self.fits(add(self.demand, tuple(map(max, whole, growth))))

    def begin(self, generation: G) -> tuple[int, int]:
        """Where a candidate resumes, and where its first chunk ends at the latest."""
        if self.reuse is None:
            return 0, generation.known
        found = self._begins.get(id(generation))
        if found is None:
            start = self.reuse.start(generation)
            found = self._begins[id(generation)] = start, self.reuse.until(generation, start)
        return found

    def _first(self, generation: G) -> tuple[int, Demand, Demand]:
        """New tokens of a candidate's first chunk, the units that it adds, and what it shares."""
        start, until = self.begin(generation)
        count = min(self.budget, self.limits.chunk_tokens, until - start)
        growth = self.prices.growth(start, start + count)
        shared = self._shared(generation) if start else (0,) * len(growth)
        if start:
            growth = less(add(growth, self.prices.held(start)), shared)
        return count, growth, shared

    def _shared(self, generation: G) -> Demand:
        """As of `Reuse`, at this point of the draft: whoever is asked about later counts on what
        was decided before, so that `demand` is exact whoever shares with whom.
        """
        if self.reuse is None:
            return (0,) * len(self.demand)
        return self.reuse.shared(generation, self.retracted, self.admitted)

    def admit_one(self, generation: G) -> None:
        count, growth, _ = self._first(generation)
        self.budget -= count
        self.demand = add(self.demand, growth)
        self.work.append((generation, count))
        self.admitted.append(generation)

    def retract(self, generation: G) -> Demand:
        """Takes a generation out of the step. Returns what it shares with those who stay."""
        at = next(at for at, item in enumerate(self.work) if item[0] is generation)
        _, count = self.work.pop(at)
        shared = self._shared(generation)
        held = less(self.prices.held(generation.computed), shared)
        self.demand = less(self.demand, add(held, self._growth(generation, count)))
        self.budget += count
        self.retracted.append(generation)
        return shared

    def _growth(self, generation: G, count: int) -> Demand:
        return self.prices.growth(generation.computed, generation.computed + count)


class _Crowd[G: Generation]:
    """Those who run, as far as their future matters to a candidate.

    Attributes:
      held: units of all who ran before the step; what is asked of `fits` is beside these.
      shared: units that those who run are expected to hold, counted more than once.
      expected: units at the steps of the outlook.
      promised: all that firm ones can ever need, as if they shared nothing.
    """

    def __init__(self, draft: _Draft[G]):
        queue, prices = draft.queue, draft.prices
        self.draft = draft
        self.lengths = queue.lengths if queue.policy == PREDICTED else None
        running = [one for one, _ in draft.work]
        near = queue.waiting[: LOOKED_PAST + 1]
        left = [one.limit - one.known for one in running + near]
        self.outlook = Outlook(prices, self.lengths, left, max(map(self._horizon, near)))
        total = total_held(prices, [one.computed for one in queue.running])
        self.held = draft.reuse.held() if draft.reuse else total
        self.shared = less(total, self.held)
        self.expected = self._expected(running)
        self.promised: Demand = (0,) * len(self.held)
        for generation in running:
            if generation.is_firm:
                self.promised = add(self.promised, self._peak(generation))

    def admit(self, generation: G) -> bool:
        """Admits a candidate if it suits, beside all who run or instead of less urgent ones."""
        draft = self.draft
        before = draft.demand, draft.budget, draft.work[:], draft.retracted[:]
        expected, shared = self.expected, self.shared
        victims = draft.victims(below=generation.priority)[::-1]
        while not self._suits(generation):
            if not victims:
                draft.demand, draft.budget, draft.work, draft.retracted = before
                self.expected, self.shared = expected, shared
                return False
            victim = victims.pop()
            self.shared = less(self.shared, draft.retract(victim))
            self.expected -= self._expected([victim])
        draft.admit_one(generation)
        self.expected += self._expected([generation])
        if generation.is_firm:
            self.promised = add(self.promised, self._peak(generation))
        return True

    def _suits(self, generation: G) -> bool:
        draft = self.draft
        if not draft.has_room(generation):
            return False
        if not draft.work:
            return True  # alone it goes token by token (C2)
        if generation.is_firm:
            promised = add(self.promised, self._peak(generation))
            if not draft.fits(less(promised, self.held)):
                return False
        total = self.expected + self._expected([generation])
        demands = total.demands(self.outlook.until(self._horizon(generation)), self.shared)
        return all(draft.fits(less(demand, self.held)) for demand in demands)

    def _horizon(self, generation: G) -> float:
        """How many tokens a candidate is to sample before it may be in the way."""
        left = generation.limit - generation.known
        if self.lengths is None or generation.is_firm:
            return left
        return SHARE * self.lengths.left(generation.known - generation.prompt_tokens, left)

    def _expected(self, generations: Sequence[G]) -> Expected:
        return self.outlook.expected(
            [one.known for one in generations],
            [one.known - one.prompt_tokens for one in generations],
            [one.limit - one.known for one in generations],
        )

    def _peak(self, generation: G) -> Demand:
        limits = self.draft.limits
        chunk = min(limits.chunk_tokens, limits.budget_tokens)
        return self.draft.prices.peak(generation.limit - 1, chunk)
