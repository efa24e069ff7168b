"""The line of those who wait, and those who run.

`Queue.apply` is the only thing that acts on what `schedule` decided. A queue holds no memory and
decides nothing; it keeps the order, counts how often somebody was retracted or passed over, and
learns how long generations get.

    waiting   the most urgent first; among equals in order of arrival, whether new or retracted
    running   in order of admission

C1  computed <= known; memory is held for computed tokens only, and a generation that waits has
    computed 0.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from unimem_jax.errors import InvariantError, UsageError
from unimem_jax.forecast import Lengths

FIRST_COME, PREDICTED, BOUNDED = POLICIES = ("first-come", "predicted", "bounded")
PRIORITIES = range(-100, 101)  # higher is more urgent
MOST_RETRACTIONS = 2  # of a generation that is not firm yet


@dataclass(slots=True, eq=False)
class Generation:
    """A prompt and what was generated after it, as far as scheduling cares.

    Attributes:
      known: tokens of the prompt and those sampled.
      computed: tokens whose state is in memory; 0 while it waits.
      retractions: how often its memory was taken.
      limit: most tokens that it may ever know; `first-come` does without.
      priority: one of `PRIORITIES`; more urgent ones go first.
      passes: how often later ones were admitted before it.
      place, prompt_tokens: in the order of arrival, and known then; the queue sets both.
    """

    known: int
    computed: int = 0
    retractions: int = 0
    limit: int = 0
    priority: int = 0
    passes: int = 0
    place: int = 0
    prompt_tokens: int = 0

    @property
    def is_firm(self) -> bool:
        """Whether it is not retracted any more."""
        return self.retractions >= MOST_RETRACTIONS


@dataclass(frozen=True, slots=True)
class StepPlan[G: Generation]:
    """What one step does.

    Attributes:
      retracted: their memory is freed before anything is granted.
      admitted: in order; each takes a row.
      work: (generation, new tokens), in order of admission.
      starts: of those admitted, tokens after which each resumes; none where all begin at 0.
    """

    retracted: tuple[G, ...]
    admitted: tuple[G, ...]
    work: tuple[tuple[G, int], ...]
    starts: tuple[int, ...] = ()


class Queue[G: Generation]:
    """Those who run, in order of admission, and those who wait.

    Args:
      policy: one of `POLICIES`.
    Attributes:
      waiting: the most urgent first; among equals in order of arrival.
      lengths: of those that ended.
    Raises:
      UsageError: another policy.
    """

    def __init__(self, policy: str = FIRST_COME) -> None:
        if policy not in POLICIES:
            raise UsageError(f"a policy is one of {', '.join(POLICIES)}, not {policy!r}")
        self.policy = policy
        self.running: list[G] = []
        self.waiting: list[G] = []
        self._lengths = Lengths()
        self._arrived = 0
        self._is_stale = False

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def lengths(self) -> Lengths:
        """What is known of lengths, brought up to date when somebody has ended."""
        if self._is_stale:
            begun = [one for one in self.waiting if one.retractions]
            self._lengths.learn([one.known - one.prompt_tokens for one in self.running + begun])
            self._is_stale = False
        return self._lengths

    def submit(self, generation: G, beside: G | None = None) -> None:
        """Puts a generation at the end of the line.

        Args:
          beside: one that came with it, and whose place in line it shares.
        Raises:
          UsageError: a priority that there is not, or no room for a new token below the limit that
            the policy needs.
        """
        require_priority(generation.priority)
        if self.policy != FIRST_COME and generation.limit <= generation.known:
            raise UsageError(
                f"the policy {self.policy} needs a limit above the {generation.known} tokens "
                f"known, not {generation.limit}"
            )
        self._arrived += 1
        generation.place = self._arrived if beside is None else beside.place
        generation.prompt_tokens = generation.known
        self._wait(generation)

    def apply(self, plan: StepPlan[G]) -> None:
        """Makes a plan true; afterwards `computed` counts the tokens of its work."""
        self.retract(plan.retracted)
        for order, generation in enumerate(plan.admitted):
            if generation not in self.waiting:
                raise InvariantError("C1: the plan admits one who does not wait in this queue")
            at = self.waiting.index(generation)
            for other in self.waiting[:at]:
                if other.priority == generation.priority:
                    other.passes += 1
            del self.waiting[at]
            generation.computed = plan.starts[order] if plan.starts else 0
            self.running.append(generation)
        for generation, count in plan.work:
            generation.computed += count
            if generation.computed > generation.known:
                raise InvariantError("C1: a step computes tokens that nobody knows yet")

    def retract(self, generations: Iterable[G]) -> None:
        """Sends generations back to their places in line, for others to take their memory."""
        for generation in generations:
            self.send_back(generation)
            generation.retractions += 1

    def send_back(self, generation: G) -> None:
        """Sends one that runs back to its place in line, its memory lost."""
        if generation not in self.running:
            raise InvariantError("C1: only one that runs is retracted")
        self.running.remove(generation)
        generation.computed = 0
        self._wait(generation)

    def leave(self, generation: G) -> None:
        """Forgets a generation that was given up."""
        line = self.running if generation in self.running else self.waiting
        line.remove(generation)

    def learn(self, generation: G) -> None:
        """Learns from the length of a generation that has ended."""
        self._lengths.note(generation.known - generation.prompt_tokens)
        self._is_stale = True

    def _wait(self, generation: G) -> None:
        insort(self.waiting, generation, key=lambda one: (-one.priority, one.place))


def require_priority(priority: object) -> None:
    """Raises UsageError for what is no priority."""
    is_int = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_int or priority not in PRIORITIES:
        least, most = PRIORITIES[0], PRIORITIES[-1]
        raise UsageError(f"a priority is a whole number from {least} to {most}, not {priority!r}")
