"""The cache against its twins, over random requests in arenas where room is always short."""

import pytest

from tests.prefix.world import KINDS, STATE, World
from unimem_jax.allocator import Split

STEPS = 120


def live(world, steps=STEPS):
    """Random things that requests and schedulers do."""
    rng = world.rng
    for _ in range(steps):
        one = rng.choice(world.running) if world.running else None
        choice = rng.random()
        if one is None or choice < 0.15:
            world.start()
        elif choice < 0.5:
            if not world.grow(one):
                world.publish(one, is_leaving=True) if one.tokens else world.end(one)
        elif choice < 0.65:
            world.publish(one)
        elif choice < 0.75:
            world.publish(one, is_leaving=True) if one.tokens else world.end(one)
        elif choice < 0.8:
            world.end(one)
        elif choice < 0.95:
            tokens = world.words()
            world.match(tokens, one.namespace, rng.choice([None, None, rng.randint(0, 40)]))
            world.match(one.goal, one.namespace)
        else:
            world.evict(tuple(rng.randint(0, 4) for _ in world.plan.sub_pools))
    return world


@pytest.mark.parametrize("page_tokens", [1, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_agrees_with_its_twins(kind, page_tokens):
    evictions = hits = 0
    arena_bytes = (16 << 10) + 2048 * page_tokens + (STATE in KINDS[kind]) * (24 << 10)
    for seed in range(2):
        world = live(World(kind, page_tokens, arena_bytes, seed=seed))
        evictions += world.cache.metrics()["evicted"]
        hits += world.resumed
        world.finish()
    assert evictions, "room was never short"
    assert hits, "requests never meet what others left"


def test_two_ranks_keep_the_same_prefixes():
    """A32: what is kept and what goes depends on nothing but what was asked before."""
    first, second = (live(World("hybrid", 4, 36 << 10, seed=5)) for _ in range(2))
    assert first.cache.metrics()["evicted"]
    assert list(first.records().items()) == list(second.records().items())
    assert first.cache.metrics() == second.cache.metrics()


def test_a_cache_agrees_with_its_twins_in_shares_of_their_own():
    world = live(World("hybrid", 4, 48 << 10, layout=Split((5, 8, 12, 12))), 300)
    assert world.resumed
    world.finish()
