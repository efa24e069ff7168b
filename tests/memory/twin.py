"""Slow twins of the host memory core: plain loops and dictionaries, sharing no code with what they
mirror.

`packs` tries every start of every band. `least_moved` tries every interval of every band. `Arena`
follows the contents of each granule through moves, with every free granule poisoned.
"""

from functools import lru_cache

POISON = -1


def packs(arena, units, ends, counts):
    """Whether some placement holds all counts: tries every start of every band."""

    def place(index, position):
        if index == len(units):
            return position <= arena
        unit, count = units[index], counts[index]
        if not count:
            return place(index + 1, position)
        last = arena // unit - count
        starts = {"low": [0], "high": [last], "float": range(last + 1)}[ends[index]]
        return any(
            place(index + 1, (start + count) * unit)
            for start in starts
            if start * unit >= position and 0 <= start <= last
        )

    return place(0, 0)


def packs_fast(arena, units, ends, counts):
    """The same answer by counting granules up; checked against `packs` on tiny arenas."""
    position = 0
    for unit, end, count in zip(units, ends, counts, strict=True):
        if not count:
            continue
        if end == "high":
            top = 0
            while (top + 1) * unit <= arena:
                top += 1
            return position <= (top - count) * unit
        while position % unit:
            position += 1
        position += count * unit
    return position <= arena


def least_moved(arena, units, ends, occupied, pinned, counts):
    """Fewest granules of occupied units outside their intervals, over all disjoint intervals; None
    if none exist.
    """

    @lru_cache(None)
    def place(index, position):
        if index == len(units):
            return 0
        unit, count, end = units[index], counts[index], ends[index]
        if not count:
            return place(index + 1, position)
        top = arena // unit
        best = None
        for lo in [0] if end == "low" else range(top + 1):
            for hi in [top] if end == "high" else range(lo + count, top + 1):
                if lo * unit < position or hi - lo < count:
                    continue
                if any(not lo <= address < hi for address in pinned[index]):
                    continue
                rest = place(index + 1, hi * unit)
                if rest is not None:
                    cost = rest + unit * sum(not lo <= a < hi for a in occupied[index])
                    best = cost if best is None else min(best, cost)
        return best

    return place(0, 0)


class Arena:
    """Every granule holds the serial number of what was written there last, or poison."""

    def __init__(self, granules, units):
        self.cells = [POISON] * granules
        self.units = units

    def write(self, sub_pool, address, content):
        unit = self.units[sub_pool]
        for granule in range(unit):
            self.cells[address * unit + granule] = (content, granule)

    def read(self, sub_pool, address):
        """The content of a unit, or None if it is not whole."""
        unit = self.units[sub_pool]
        cells = self.cells[address * unit : (address + 1) * unit]
        if POISON in cells or cells != [(cells[0][0], granule) for granule in range(unit)]:
            return None
        return cells[0][0]

    def move(self, sub_pool, sources, destinations):
        """One batch: all reads, then all writes."""
        unit = self.units[sub_pool]
        held = [self.cells[a * unit : (a + 1) * unit] for a in sources]
        for address, cells in zip(destinations, held, strict=True):
            self.cells[address * unit : (address + 1) * unit] = cells

    def poison_all_but(self, kept):
        """Poisons every granule outside the (sub_pool, address) units of `kept`."""
        cells = [POISON] * len(self.cells)
        for sub_pool, address in kept:
            unit = self.units[sub_pool]
            span = slice(address * unit, (address + 1) * unit)
            cells[span] = self.cells[span]
        self.cells = cells
