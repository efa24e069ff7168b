"""Seeded stress of the memory core: python -m tests.sim --seed 1 --steps 20000

Random geometries, random calls right and wrong, bytes followed through every move. A failure prints
one line that repeats it.
"""

import argparse
import random
import sys

from tests.memory.world import UNIFIED, Split, World
from unimem_jax.bands import Geometry

STEPS_PER_WORLD = 1000


def random_geometry(rng):
    """Two to five sub-pools in a small arena, so that running out is common."""
    count = rng.randint(1, 5)
    ends = ["float"] * count
    if rng.random() < 0.8:
        ends[0] = "low"
    if count > 1 and rng.random() < 0.8:
        ends[-1] = "high"
    units = [rng.choice([1, 2, 3, 4, 6, 9]) for _ in ends]
    is_slot = [rng.random() < 0.3 for _ in ends]
    arena = rng.randint(max(units), 160)
    ids = (
        0
        if all(is_slot)
        else arena // min(u for u, slot in zip(units, is_slot, strict=True) if not slot)
    )
    return Geometry(arena, tuple(units), tuple(ends), tuple(is_slot), ids)


def random_world(rng):
    geometry = random_geometry(rng)
    if rng.random() < 0.85:
        return World(geometry, UNIFIED)
    share = geometry.arena_granules // len(geometry.ends)
    return World(
        geometry, Split(tuple(max(0, share // unit - 1) for unit in geometry.unit_granules))
    )


def one_call(world, rng):
    """One random call; about one in ten is wrong on purpose."""
    slots = world.geometry.is_slot
    pages = [i for i in world.sub_pools if not slots[i]]
    states = [i for i in world.sub_pools if slots[i]]
    pool = rng.choice(world.sub_pools)
    live = world.live(pool)
    is_committed = rng.random() < 0.3
    demand = [rng.randint(0, 4) if rng.random() < 0.5 else 0 for _ in world.sub_pools]
    some = rng.sample(live, min(len(live), rng.randint(1, 6)))
    any_page = world.pages()
    names, filling, draining = zip(*CALLS, strict=True)
    name = rng.choices(names, filling if world.is_filling else draining)[0]
    if name == "grant" and pages:
        pools = rng.sample(pages, rng.randint(1, len(pages)))
        is_single = rng.random() < 0.3
        world.grant_pages(1 if is_single else rng.randint(0, 8), pools, is_committed, is_single)
    elif name == "slot" and states:
        world.grant_slot(rng.choice(states), is_committed)
    elif name == "map_more" and any_page and pages:
        ids = rng.sample(any_page, min(len(any_page), rng.randint(1, 4)))
        world.map_more(ids, rng.choice(pages), is_committed)
    elif name in ("share", "drop") and some:
        if rng.random() < 0.1:
            some = [*some, rng.choice([some[0], 0, world.geometry.id_counts[pool] - 1])]
        if name == "drop":
            world.drop(some, pool, is_single=rng.random() < 0.4 and len(some) == 1)
        elif len(set(some)) == len(some):
            world.share(some, pool)
    elif name == "free" and any_page:
        ids = rng.sample(any_page, min(len(any_page), rng.choice([1, 2, 3, 20])))
        if rng.random() < 0.1:
            ids.append(rng.randrange(world.geometry.id_count))
        world.free(ids, is_single=rng.random() < 0.4 and len(ids) == 1)
    elif name in ("commit", "uncommit", "make_room"):
        getattr(world, name)(demand)
    elif name in ("pin", "fence") and live and len(world.pins) < 4:
        getattr(world, name)(pool, rng.choice(live), rng.choice(["copy", "peer"]))
    elif name == "unpin" and world.pins:
        world.unpin(rng.choice(list(world.pins)))
    elif name in ("step", "retire"):
        getattr(world, name)()


# name, weight while the world fills, weight while it drains
CALLS = [
    ("grant", 40, 8), ("slot", 20, 4), ("map_more", 4, 4), ("share", 2, 2), ("drop", 4, 30),
    ("free", 3, 15), ("commit", 6, 2), ("uncommit", 2, 6), ("make_room", 5, 5), ("pin", 2, 2),
    ("fence", 2, 2), ("unpin", 6, 12), ("step", 20, 20), ("retire", 8, 8),
]  # fmt: skip


def run(seed, steps, check_every=50):
    """Drives fresh worlds for so many steps in all. Raises what is wrong, with the line that
    repeats it.

    Returns:
      Sums of the metrics of all worlds, to show that the stress reached what it should.
    """
    totals = {"moved_units": 0, "move_batches": 0, "refusals": 0}
    for begin in range(0, steps, STEPS_PER_WORLD):
        rng = random.Random(f"{seed}/{begin}")
        world = random_world(rng)
        for step in range(begin, min(begin + STEPS_PER_WORLD, steps)):
            if rng.random() < 0.02:
                world.is_filling = rng.random() < 0.6
            try:
                one_call(world, rng)
                if step % check_every == 0:
                    world.check()
            except Exception as error:
                error.add_note(f"repeat with: python -m tests.sim --seed {seed} --steps {step + 1}")
                raise
        metrics = world.allocator.metrics()
        totals["moved_units"] += sum(metrics["moved_units"])
        totals["move_batches"] += metrics["move_batches"]
        totals["refusals"] += metrics["refusals"]
    return totals


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args(arguments)
    print(run(options.seed, options.steps))


if __name__ == "__main__":
    sys.exit(main())
