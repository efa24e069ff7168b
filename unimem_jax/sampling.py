"""How the next tokens of one request are chosen and when they end.

A `Sampling` is checked once, when it is made, so nothing below has to ask again. It draws no token
itself: `words` gives the five numbers that travel to the device, where `draw` uses them.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unimem_jax.errors import UsageError

INT32_MAX = 2**31 - 1
SEED_RANGE = range(-(2**63), 2**64)  # what users pass as a 64-bit seed, signed or not


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of one request.

    Attributes:
      max_tokens: most new tokens, at least 1; clipped to what the context has left.
      temperature: divides the logits, at least 0; at 0 (or so near that float32 logits cannot
        tell) the most likely token is taken and the filters mean nothing.
      top_k: only the k most likely tokens; 0 is all.
      top_p: only the most likely tokens that reach this probability together, in (0, 1].
      min_p: only tokens at least this share as likely as the most likely one, in [0, 1].
      seed: with the position in the request, the only source of randomness. Any 64-bit integer;
        one that does not fit 32 bits is folded (halves xored), so two of those may draw alike.
      stop: texts that end the request; they are not part of its text. One text or several.
      stop_ids: token ids that end the request.
      n: samples of one prompt, each a request of its own; the j-th draws with `seed + j`.
    Raises:
      UsageError: a value of the wrong type or outside its range, named with what was seen.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: str | Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    n: int = 1

    def __post_init__(self) -> None:
        top_p, min_p = _real("top_p", self.top_p), _real("min_p", self.min_p)
        seed = _whole("seed", self.seed, SEED_RANGE.start)
        if not 0 < top_p <= 1:
            raise UsageError(f"top_p lies above 0 and at most at 1, not at {self.top_p!r}")
        if min_p > 1:
            raise UsageError(f"min_p lies between 0 and 1, not at {self.min_p!r}")
        if seed not in SEED_RANGE:
            raise UsageError(f"seed is a 64-bit integer, not {_short(seed)}")
        checked = {
            "max_tokens": _whole("max_tokens", self.max_tokens, 1),
            "temperature": _real("temperature", self.temperature),
            "top_k": _whole("top_k", self.top_k, 0),
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "stop": _stop_texts(self.stop),
            "stop_ids": _stop_ids(self.stop_ids),
            "n": _whole("n", self.n, 1),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def samples(self) -> "list[Sampling]":
        """One `Sampling` for each of the `n` samples."""
        seeds = [self.seed + at for at in range(self.n)]
        wrapped = [seed if seed in SEED_RANGE else seed - 2**64 for seed in seeds]
        return [replace(self, n=1, seed=seed) for seed in wrapped]

    def words(self) -> tuple[int, int, int, int, int]:
        """Temperature, top_p and min_p as float32 bits, then top_k and seed: five int32."""
        bits = np.asarray([self.temperature, self.top_p, self.min_p], np.float32).view(np.int32)
        seed = self.seed
        if not -INT32_MAX - 1 <= seed <= INT32_MAX:
            seed %= 2**64
            seed = (seed ^ seed >> 32) % 2**32
            seed -= 2**32 * (seed > INT32_MAX)
        return (int(bits[0]), int(bits[1]), int(bits[2]), min(self.top_k, INT32_MAX), seed)


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise UsageError(f"{name} is a whole number, not {value!r}")
    found = operator.index(value)
    if found < least:
        raise UsageError(f"{name} is at least {least}, not {_short(found)}")
    return found


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise UsageError(f"{name} is a number, not {value!r}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    # The device computes in float32, where a larger number is infinite.
    if not abs(found) <= float(np.finfo(np.float32).max):
        raise UsageError(f"{name} is a finite float32 number, not {_short(value)}")
    if found < 0:
        raise UsageError(f"{name} is not negative; seen {_short(value)}")
    return found


def _stop_texts(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"stop is a text or several texts, not {stop!r}")
    if not all(texts):
        raise UsageError("a stop text has at least one character; seen an empty one")
    return tuple(texts)


def _stop_ids(stop_ids: object) -> tuple[int, ...]:
    if isinstance(stop_ids, str) or not isinstance(stop_ids, Sequence | np.ndarray):
        raise UsageError(f"stop_ids is a sequence of token ids, not {stop_ids!r}")
    return tuple(_whole("a stop id", stop_id, 0) for stop_id in stop_ids)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print very long integers
        text = "an integer of thousands of digits"
    return text if len(text) <= 40 else f"{text[:40]}..."
