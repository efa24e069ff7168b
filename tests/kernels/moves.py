"""Random batches of moves, and what they do, in NumPy."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Moves:
    """An arena and a disjoint batch of moves in it, of which the first `count` are real."""

    arena: np.ndarray
    sources: np.ndarray
    destinations: np.ndarray
    count: int
    unit_rows: int


def random_moves(
    seed: int, unit: tuple[int, int], *, moves: int, count: int, spare_rows: int = 0
) -> Moves:
    """Moves between unsorted units of `unit` = (row words, rows), one more than are named."""
    random = np.random.default_rng(seed)
    row_words, unit_rows = unit
    units = 2 * moves + 1
    shape = (units * unit_rows + spare_rows, row_words)
    order = random.permutation(units).astype(np.int32)
    return Moves(
        random.integers(0, 2**32, shape, dtype=np.uint32),
        order[:moves],
        order[moves : 2 * moves],
        count,
        unit_rows,
    )


def moved_by_numpy(case: Moves) -> np.ndarray:
    """The arena after the moves."""
    arena = case.arena.copy()
    live = max(case.count, 0)
    for source, destination in zip(case.sources[:live], case.destinations[:live], strict=True):
        start, target = source * case.unit_rows, destination * case.unit_rows
        arena[target : target + case.unit_rows] = case.arena[start : start + case.unit_rows]
    return arena
