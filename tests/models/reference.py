"""Opens the reference numbers of `references/`: rebuilds a network's folder and loads it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import unimem_jax as um
from tests.models.oracle import Oracle
from tests.models.references.network import FOLDER, draw_tensors, rebuild

PAGES = (1, 8, 16, 64)  # tokens
CHUNKS = (1, 7, 16, 337)  # tokens; the last is the whole longest prompt
# Each page size and each chunk once; the other pairs are slow tests.
PAIRS = ((1, 7), (8, 16), (16, 337), (64, 1))
CONTEXT_TOKENS = 384


@dataclass(frozen=True)
class Reference:
    """A rebuilt network beside what Transformers made of it.

    Attributes:
      oracle: its logits are those at `positions` of each prompt.
    """

    model: Any
    params: Any
    oracle: Oracle
    positions: list[np.ndarray]


def open_reference(name: str, folder: Path) -> Reference:
    """The network `name`, rebuilt in `folder`, and its numbers."""
    model, params, _ = um.load(rebuild(name, folder))
    numbers = np.load(FOLDER / f"{name}.npz")
    layers: dict[int, dict[str, np.ndarray]] = {}
    for key in numbers.files:
        layer, _, part = key.partition(".")
        if part:
            layers.setdefault(int(layer), {})[part] = numbers[key]
    oracle = Oracle(
        folder,
        [numbers[f"prompt{at}"].tolist() for at in range(3)],
        [numbers[f"logits{at}"] for at in range(3)],
        [numbers[f"new{at}"].tolist() for at in range(3)],
        [numbers[f"new_logits{at}"] for at in range(3)],
        [layers[layer] for layer in sorted(layers)],
    )
    return Reference(model, params, oracle, [numbers[f"positions{at}"] for at in range(3)])


def described(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and the tensors of the network `name`."""
    found = json.loads((FOLDER / f"{name}.json").read_text())
    return found["config"], draw_tensors(found["config"], found["tensors"], found["seed"])
