"""What the scenarios have in common: small allocators, and a cache of pages that may be evicted."""

from unimem_jax.allocator import Allocator, number_of
from unimem_jax.bands import Geometry

THREE = Geometry(40, (4, 3, 2), ("low", "float", "high"), (True, False, False), 20)
SLOT, WINDOW, CONTEXT = range(3)


def two(arena, low, high, is_slot=True):
    """A low end of states (or windows) and a high end of context pages."""
    return Allocator(
        Geometry(arena, (low, high), ("low", "high"), (is_slot, False), arena // min(low, high))
    )


def grant(memory, pool, count):
    if memory.geometry.is_slot[pool]:
        return [memory.grant_slot(pool, committed=False) for _ in range(count)]
    return memory.grant_pages(count, [pool], committed=False).tolist()


def evict(memory, cached, demand):
    """Frees the oldest pages until the demand fits. Returns how many."""
    count = 0
    while not memory.fits(demand):
        memory.free(cached.pop(0))
        count += 1
    return count


def moved(memory):
    return sum(len(batch.sources) for batch in memory.take_moves())


def by_address(memory, pool, ids):
    return sorted(ids, key=lambda id_: memory.mapping[pool][number_of(id_)])


def address(memory, pool, id_):
    return int(memory.mapping[pool][number_of(id_)])


def states(memory):
    return [state.tobytes() for state in memory.ledger.states], list(memory.held)
