"""How many granules entries are padded by, so that rounding the arena to all widths strands little.

The arena is a multiple of 8 times every entry width. Widths with an awkward common multiple would
strand up to half of it; a few granules more per entry make the multiple small. Both losses are
weighed as shares: what rounding cuts off the arena, and what padding takes of the entries together.
"""

import math
from collections.abc import Sequence

ROWS = 8  # entries that the arena is a whole number of, at least: the fast path of tiled copies
CHOICES = 8  # widths tried per entry and grain


def choose_pads(widths: Sequence[int], granules: int) -> tuple[tuple[int, ...], int]:
    """The pads that lose least, and the multiple of granules that the arena is then rounded to.

    Args:
      widths: of each token sub-pool's entry, in granules.
      granules: of the arena.
    Returns:
      One pad per width, and 8 times the common multiple of the padded widths.

    The result is the best of all pads that take every width to one of the next 8 multiples of a
    common grain, for every grain that is a power of two. The search is depth first and exact: a
    multiple of a multiple cuts off no less, so what is chosen so far bounds what follows.
    Cost: for 8 random widths at most some 10,000 steps, 20 ms [measured]; widest first matters.
    """
    order = sorted(range(len(widths)), key=lambda index: -widths[index])
    total = sum(widths)
    best_loss: float = math.inf
    best: tuple[tuple[int, ...], int] = ((), ROWS)

    def descend(multiple: int, padded: tuple[int, ...], padding: int) -> None:
        nonlocal best_loss, best
        loss = granules % multiple * total + padding * granules  # the sum of shares, in whole units
        if loss >= best_loss:
            return
        if len(padded) == len(order):
            best_loss, best = loss, (padded, multiple)
            return
        width = widths[order[len(padded)]]
        least = -(-width // grain)
        for wide in range(least * grain, (least + CHOICES) * grain, grain):
            shared = math.lcm(multiple, ROWS * wide)
            descend(shared, (*padded, wide), padding + wide - width)

    grain = 1
    while grain <= max(widths, default=1):
        descend(ROWS, (), 0)
        grain *= 2
    pads = [0] * len(widths)
    for index, wide in zip(order, best[0], strict=True):
        pads[index] = wide - widths[index]
    return tuple(pads), best[1]
