"""Faults by name, for the seeded simulation: what a bad hour in production does to the allocator.

A fault is a generator over one `World`: each `next` is one more step of it, and its last step
cleans up after it. Ordinary calls go on between the steps.

    starve      one sub-pool promises itself all that is left; every other one runs out
    stampede    many requests want pages in the same step, and all leave in the next
    flicker     a transfer pins a unit and lets go, over and over; capacity may not flicker with it
    clog        the device finishes nothing for a while, then everything at once
    pin-storm   up to half of all live units are pinned by several users
    liar        a caller frees twice, names ids that it does not hold, and unpins what others hold
"""

from unimem_jax.errors import NeverFits, UsageError


def starve(world, rng):
    pool = rng.choice(world.sub_pools)
    most = world.most(pool)
    if not most:
        return
    greed = world.demand([pool], most)
    world.commit(greed)
    assert not world.fits(world.demand([pool], 1))
    for _ in range(rng.randint(5, 30)):
        for index in world.sub_pools:
            world.fits(world.demand([index], 1))
        yield
    world.uncommit(world.demand([pool], min(most, world.committed[pool])))


def stampede(world, rng):
    if not world.page_pools:
        return
    for _ in range(rng.randint(1, 4)):
        share = max(1, min(world.most(pool) for pool in world.page_pools) // 6)
        for _ in range(8):
            world.grant_pages(share, world.page_pools, False)
        world.step()
        yield
        ids = world.pages()
        world.free(rng.sample(ids, len(ids) * 3 // 4))
        yield


def flicker(world, rng):
    questions = [world.demand([pool], most) for pool in world.sub_pools for most in (1, 3, 9)]
    for _ in range(rng.randint(5, 20)):
        pool = rng.choice(world.sub_pools)
        live = [id_ for id_ in world.live(pool) if not world.is_fenced(pool, id_)]
        if live:
            before = [world.fits(demand) for demand in questions]
            place = pool, world.address(pool, rng.choice(live))
            world.allocator.ledger.pin(*place, "flicker")
            assert [world.fits(demand) for demand in questions] == before
            world.allocator.unpin(*place, "flicker")
        yield


def clog(world, rng):
    world.is_clogged = True
    for _ in range(rng.randint(10, 60)):
        yield
    world.is_clogged = False
    world.retire(world.allocator.ledger.dispatched)


def pin_storm(world, rng):
    mine = []
    for _ in range(rng.randint(2, 6)):
        for pool in world.sub_pools:
            live = [id_ for id_ in world.live(pool) if not world.is_fenced(pool, id_)]
            for id_ in rng.sample(live, min(len(live) // 8, 6)):
                mine.append(((pool, world.address(pool, id_)), f"storm {len(mine)}"))
                world.pin(pool, id_, mine[-1][1])
        yield
    for _ in range(rng.randint(5, 20)):
        yield
    rng.shuffle(mine)
    for place, user in mine:
        world.unpin(place, user)


def liar(world, rng):
    greed = [units + 1 for units in world.geometry.unit_counts]
    for _ in range(rng.randint(5, 20)):
        world.refuse(UsageError, rng.choice(lies(world, rng)))
        world.refuse(NeverFits, lambda: world.allocator.commit(greed))
        yield


def lies(world, rng):
    """Calls that no honest caller makes."""
    allocator, pool = world.allocator, rng.choice(world.sub_pools)
    count = world.geometry.id_counts[pool]
    known, live = world.live(pool), world.pages()
    strange = [id_ for id_ in range(min(count, 40)) if id_ not in world.sharers[pool]]
    twice = rng.choice(known) if known else 0
    there, stale = rng.choice(world.gone or [(pool, -1)])
    return [
        lambda: allocator.drop(stale, there),
        lambda: allocator.drop([stale], there),
        lambda: allocator.share([stale], there),
        lambda: allocator.free(stale if not world.geometry.is_slot[there] else -1),
        lambda: allocator.drop([twice, twice], pool),
        lambda: allocator.drop(rng.choice([-1, count, 2**31, 2**40]), pool),
        lambda: allocator.share([2**31 + 1], pool),
        lambda: allocator.drop(strange[0] if strange else -1, pool),
        lambda: allocator.share(strange[:3] or [-1], pool),
        lambda: allocator.free(live[:2] + live[:1] if live else [-1]),
        lambda: allocator.map_more(live[:1] or [-1], world.sub_pools[-1] + 1, committed=False),
        lambda: allocator.fits([-1] * len(world.sub_pools)),
        lambda: allocator.commit([0] * (len(world.sub_pools) + 1)),
        lambda: allocator.uncommit([count + 1 for count in world.committed]),
        lambda: allocator.grant_pages(-1, committed=False),
        lambda: allocator.unpin(pool, 0, "a liar"),
        lambda: allocator.ledger.pin(pool, world.geometry.unit_counts[pool], "a liar"),
        lambda: allocator.ledger.retire(allocator.ledger.dispatched + 1),
    ]


FAULTS = {
    "starve": starve, "stampede": stampede, "flicker": flicker, "clog": clog,
    "pin-storm": pin_storm, "liar": liar,
}  # fmt: skip
