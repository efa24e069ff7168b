"""How long a step would take on a device, from the bytes and operations that it cannot avoid.

A step takes the longer of two times: its bytes over the rate of memory, and its operations over
the rate of matrix products. It is a bound from below and no measurement: there are no launches, no
host, no communication, no tile that is partly used. Compare layouts with it, not devices.

    bytes       weights      each parameter that some token of the step uses, once
                past         keys and values that each request sees before its new tokens
                new          keys and values of the new tokens, written once
                state        running state of each request of the step, read and written
                moves        what the allocator moved for the step, read and written
    operations  weights      2 for each parameter that a token uses, for each token
                attention    `Weights.pair_operations` for each byte that each query sees

Experts: T tokens that each use a share s of the parameters, drawn anew each, use a share
1 - (1 - s)^T of them together. Sparse attention is counted as if it saw everything.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unimem_jax.plan import Plan
from unimem_jax.spec import Part
from unimem_jax.weights import Weights

H200_BYTES_PER_S = 4.3e12  # read and written, of a plain copy on the device, measured
H200_OPERATIONS_PER_S = 785e12  # of a bfloat16 product of 8,192^3, measured 770 to 800


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that requests need, whatever memory holds them.

    Attributes:
      context: of each token, for as long as the request lives.
      windows: (tokens, bytes of each of the last so many tokens).
      request: of a request that has begun.
    """

    context: float
    windows: tuple[tuple[int, float], ...]
    request: int

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "StateBytes":
        """What these parts need; named request state, which nobody takes by itself, is left out."""
        context, request = 0.0, 0
        windows: dict[int, float] = {}
        for part in parts:
            each = part.byte_count / part.stride
            if part.lifetime.is_request:
                request += 0 if part.lifetime.name else part.byte_count
            elif part.lifetime.kind == "window":
                windows[part.lifetime.tokens] = windows.get(part.lifetime.tokens, 0.0) + each
            else:
                context += each
        return cls(context, tuple(sorted(windows.items())), request)

    @classmethod
    def of_plan(cls, plan: Plan) -> "StateBytes":
        """What the parts of a plan need."""
        return cls.of(lane.part for pool in plan.sub_pools for lane in pool.lanes)

    def seen(self, lengths: np.ndarray) -> float:
        """Bytes of keys and values that the next tokens of requests of these lengths see."""
        seen = self.context * int(lengths.sum()) if self.context else 0.0
        for tokens, each in self.windows:
            seen += each * int(np.minimum(lengths, tokens - 1).sum())
        return seen

    def total(self, lengths: np.ndarray) -> float:
        """Bytes that requests of these computed lengths need for their next tokens."""
        return self.seen(lengths) + self.request * int(np.count_nonzero(lengths))


@dataclass(frozen=True, slots=True)
class StepTime:
    """The model of one model on one device.

    Attributes:
      bytes_per_s, operations_per_s: rates of the device.
    """

    weights: Weights
    state: StateBytes
    bytes_per_s: float = H200_BYTES_PER_S
    operations_per_s: float = H200_OPERATIONS_PER_S

    def seconds(self, past: np.ndarray, counts: np.ndarray, moved_bytes: int = 0) -> float:
        """Seconds of one step.

        Args:
          past: int64[requests], tokens before the step of each request that takes part.
          counts: int64[requests], their new tokens.
          moved_bytes: bytes that were moved for it.
        """
        weights, state = self.weights, self.state
        tokens = int(counts.sum())
        used = 1 - (1 - weights.active / weights.total) ** tokens
        each = state.context + sum(each for _, each in state.windows)
        byte_count = (
            used * weights.total * weights.bytes_each
            + state.seen(past) + tokens * each
            + 2 * (state.request * len(past) + moved_bytes)
        )  # fmt: skip
        operations = 2 * weights.active * tokens + weights.pair_operations * self._pairs(
            past, counts
        )
        return max(byte_count / self.bytes_per_s, operations / self.operations_per_s)

    def _pairs(self, past: np.ndarray, counts: np.ndarray) -> float:
        """Bytes of keys and values that the new tokens see, each its own."""
        state = self.state
        middle = past + (counts + 1) // 2  # what a token in the middle of its chunk sees
        pairs = state.context * int(counts @ middle) if state.context else 0.0
        for tokens, each in state.windows:
            pairs += each * int(counts @ np.minimum(middle, tokens))
        return pairs
