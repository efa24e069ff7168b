"""How much memory running generations will take, step after step: expected growth.

It learns how many tokens generations sample before they end, and from that says for those that run
how many units they are expected to hold at chosen steps ahead. It decides nothing and holds no
memory.

A generation that runs takes one token a step and holds `held(known + t)` units after t steps if it
still runs then. So the units at t are a sum of independent terms with

    mean      sum of p * held          p = P(length > sampled + t | length > sampled)
    variance  sum of p * (1 - p) * held ** 2

and what is compared with the arena is the mean and one standard deviation, at the worst t. The
lengths of those that still run are known only to be longer than what they sampled; leaving them out
would make early estimates too short, so P is the product-limit estimate of Kaplan and Meier (1958,
Journal of the American Statistical Association 53) over ended and running generations. Admission
by the peak over time of predicted lengths follows the past-future scheduler (Gong et al. 2025,
ASPLOS, arXiv:2507.10150), which samples one length each instead of taking the expectation.

F1  Nobody is expected to sample more than its limit allows.
F2  Where nothing was learned, everybody is expected to run to its limit.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unimem_jax.price import Demand, Prices

REMEMBERED = 1024  # generations that ended last
BINS = 4096  # most lengths that are told apart
PRIOR = 1  # a generation that never ends, among those observed: keeps a short tail from being sure
STEPS_AHEAD = 16  # looked at, from the next on, ever further apart
ENDS_AHEAD = 16  # and as many just before generations reach their limits
DEVIATIONS = 1.0  # of the sum, above its mean, that have to fit too


class Lengths:
    """How many tokens generations sample before they end, as far as seen."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=REMEMBERED)
        self._width = 1
        self._alive, self._summed = np.ones(1), np.zeros(2)

    def note(self, sampled: int) -> None:
        """A generation ended after so many tokens; `learn` makes it count."""
        self._ended.append(sampled)

    def learn(self, running: Sequence[int]) -> None:
        """Estimates anew, from those that ended and from what others have sampled so far.

        Cost: about 60 microseconds for 1,024 lengths up to 4,096 tokens.
        """
        if not self._ended:
            return
        ended, so_far = np.array(self._ended, np.int64), np.array(running, np.int64)
        self._width = width = 1 + int(ended.max()) // BINS
        ends = -(-ended // width)
        most = int(ends.max())
        deaths = np.bincount(ends, minlength=most + 1)
        lasted = np.bincount(np.minimum(so_far // width, most), minlength=most + 1)
        at_risk = (deaths + lasted)[::-1].cumsum()[::-1] + PRIOR
        self._alive = np.cumprod(1 - deaths / at_risk)
        self._summed = np.concatenate([[0.0], np.cumsum(self._alive)]) * width

    def outlast(self, sampled: np.ndarray, ahead: np.ndarray) -> np.ndarray:
        """P(length > sampled + ahead | length > sampled), float64 of the broadcast shape."""
        alive, last, width = self._alive, len(self._alive) - 1, self._width
        now = alive[np.minimum(sampled // width, last)]
        return alive[np.minimum((sampled + ahead) // width, last)] / now

    def left(self, sampled: int, most: int) -> float:
        """Tokens that a generation is expected to sample yet, of `most` at most (F1)."""
        last, width = len(self._alive) - 1, self._width
        now = min(sampled // width, last)
        end = min((sampled + most) // width, last)
        beyond = max(0, sampled + most - max(end * width, sampled))
        within = self._summed[end] - self._summed[now]
        return float(min(most, (within + beyond * self._alive[end]) / self._alive[now]))


@dataclass(frozen=True, slots=True)
class Expected:
    """Units per sub-pool at the steps of an outlook, float64[steps, sub-pools].

    Attributes:
      stays: of what is held at the first step, the mean that has not gone with who ended.
    """

    mean: np.ndarray
    variance: np.ndarray
    stays: np.ndarray

    def __add__(self, other: "Expected") -> "Expected":
        return Expected(
            self.mean + other.mean, self.variance + other.variance, self.stays + other.stays
        )

    def __sub__(self, other: "Expected") -> "Expected":
        variance = np.maximum(0, self.variance - other.variance)
        return Expected(self.mean - other.mean, variance, self.stays - other.stays)

    def demands(self, count: int, shared: Demand = ()) -> list[Demand]:
        """What has to fit at each of the first `count` steps.

        Args:
          shared: units counted more than once now. Who ends lets go of what others share first.
        """
        mean, variance, stays = self.mean[:count], self.variance[:count], self.stays[:count]
        wanted = np.ceil(mean + DEVIATIONS * np.sqrt(variance) - 1e-6)
        if any(shared):
            wanted -= np.floor(np.maximum(0, np.array(shared) - (stays[:1] - stays)) + 1e-6)
        return [tuple(row) for row in wanted.astype(np.int64).tolist()]


class Outlook:
    """Steps ahead at which units are counted, fit for those that run now.

    Args:
      lengths: what was learned, or None to expect all to run to their limits.
      left: tokens up to the limit of each that runs or may be asked about.
      furthest: as many steps ahead are looked at.
    """

    def __init__(
        self, prices: Prices, lengths: Lengths | None, left: Sequence[int], furthest: float
    ):
        self.prices, self.lengths = prices, lengths
        most = max(1, int(furthest))
        spread = np.geomspace(1, most, STEPS_AHEAD).astype(np.int64)
        ends = np.sort(np.array(left, np.int64)) - 1
        ends = ends[(ends > 0) & (ends <= most)]
        some = np.linspace(0, len(ends) - 1, min(len(ends), ENDS_AHEAD)).astype(np.int64)
        self.steps = np.unique(np.concatenate([[0], spread, ends[some]]))

    def expected(
        self, known: Sequence[int], sampled: Sequence[int], left: Sequence[int]
    ) -> Expected:
        """The sum over generations, each given by its tokens, those of them sampled, and those to
        its limit.

        Cost: about 1 microsecond per generation, once they are many.
        """
        ahead = self.steps[:, None]
        tokens, counts, limits = (np.array(some, np.int64) for some in (known, sampled, left))
        chance = (ahead < limits).astype(np.float64)
        if self.lengths is not None:
            chance *= self.lengths.outlast(counts, ahead)
        units = self.prices.held_at(tokens + ahead, is_running=True)
        mean = [(chance * held).sum(axis=1) for held in units]
        spread = chance * (1 - chance)
        variance = [(spread * held * held).sum(axis=1) for held in units]
        stays = [chance @ held[0].astype(np.float64) for held in units]
        return Expected(*(np.stack(some, axis=1) for some in (mean, variance, stays)))

    def until(self, tokens: float) -> int:
        """How many steps of the outlook matter to one that is to sample so many tokens."""
        return int(np.searchsorted(self.steps, tokens, side="right"))
