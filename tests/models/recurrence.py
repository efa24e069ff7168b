"""Slow twins of the gated DeltaNet: a float64 recurrence in NumPy, and views that keep state."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import Array

from unimem_jax.spec import Site


def recur(tokens: tuple[Any, ...], memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [R, T, H, Dv] and the memory [R, H, Dk, Dv] after the last token."""
    query, key, value, decay, strength = (np.asarray(part, np.float64) for part in tokens)
    memory = np.array(memory, np.float64)
    mixed = np.zeros(value.shape)
    for row, token, head in np.ndindex(decay.shape):
        at = row, token, head
        held = memory[row, head] * np.exp(decay[at])
        change = strength[at] * (value[at] - key[at] @ held)
        memory[row, head] = held + np.outer(key[at], change)
        mixed[at] = query[at] @ memory[row, head]
    return mixed, memory


def convolve(inputs: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """[T, C] from [T, C]: y_t = sum_j w_j x_(t - K + 1 + j), nothing before the first input."""
    count = len(taps)
    outputs = np.zeros(inputs.shape)
    for token in range(len(inputs)):
        for tap in range(count):
            source = token - count + 1 + tap
            if source >= 0:
                outputs[token] += taps[tap] * inputs[source]
    return outputs


@dataclass(frozen=True)
class StateViews:
    """Views of request state alone, kept in a dictionary."""

    state: dict[tuple[Site, str], Any]
    valid: Array

    def read(self, site: Site, name: str) -> tuple[Any, "StateViews"]:
        return self.state[site, name], self

    def write(self, site: Site, name: str, value: Any) -> "StateViews":
        return replace(self, state={**self.state, (site, name): value})
