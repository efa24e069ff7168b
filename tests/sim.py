"""Seeded stress of the memory core: python -m tests.sim --seed 1 --steps 20000 [--fault clog]

Random geometries, random calls right and wrong, the faults of `tests.faults`, bytes followed
through every move. After each step what it touched is checked, and every 1,000 steps everything. A
failure prints one line that repeats it.
"""

import argparse
import random
import sys
import time
from collections import Counter
from itertools import accumulate

from tests.faults import FAULTS
from tests.memory.world import UNIFIED, Split, World
from unimem_jax.bands import Geometry

STEPS_PER_WORLD = 1000
CHECK_EVERY = 1000  # steps between two checks of everything
FAULTY = 0.02  # of all steps begin a fault, where none goes on


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
    arena = rng.randint(max(units), 160 if rng.random() < 0.97 else 1200)
    pages = [unit for unit, slot in zip(units, is_slot, strict=True) if not slot]
    ids = max(1, arena // min(pages) // rng.choice([1, 1, 1, 3])) if pages else 0
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
    pages = world.page_pools
    states = [i for i in world.sub_pools if i not in pages]
    moves = world.allocator._moves
    is_early = bool(moves) and rng.random() < 0.5  # for ids whose move has not run yet
    pool = moves[-1].sub_pool if is_early else rng.choice(world.sub_pools)
    live = world.live(pool)
    is_committed = rng.random() < 0.3
    demand = [rng.randint(0, 4) if rng.random() < 0.5 else 0 for _ in world.sub_pools]
    some = rng.sample(live, min(len(live), rng.randint(1, 6)))
    if is_early:
        owners = world.allocator.tables[pool].owner[moves[-1].destinations].tolist()
        some = [world.holders.get((world.space(pool), number)) for number in owners[:1]]
        some = [id_ for id_ in some if id_ in world.sharers[pool]]
    any_page = world.pages()
    (name,) = rng.choices(NAMES, cum_weights=FILLING if world.is_filling else DRAINING)
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
    elif name == "copy" and some:
        written = [id_ for id_ in some if (pool, id_) in world.contents]
        if pool in states:
            world.copy(written[:1] or some[:1], [pool], is_committed)
        else:
            pools = rng.sample(pages, rng.randint(1, len(pages)))
            kept = [id_ for id_ in written if all((i, id_) in world.contents for i in pools)]
            world.copy(kept or some, pools, is_committed)
    elif name == "compact":
        world.compact(rng.choice([0, 128, 500, 3000, 10**9]))
    elif name in ("pin", "fence") and live and len(world.pins) < 4:
        getattr(world, name)(pool, rng.choice(live), rng.choice(["copy", "peer"]))
    elif name == "unpin" and world.pins:
        place = rng.choice(list(world.pins))
        if world.pins[place][-1] in ("copy", "peer"):
            world.unpin(place, world.pins[place][-1])
    elif name == "step":
        world.step()
    elif name == "retire" and not world.is_clogged:
        world.retire(rng.choice([1, 2, 1000]))


# name, weight while the world fills, weight while it drains
CALLS = [
    ("grant", 40, 8), ("slot", 20, 4), ("map_more", 4, 4), ("share", 2, 2), ("drop", 4, 30),
    ("free", 3, 15), ("commit", 6, 2), ("uncommit", 2, 6), ("make_room", 5, 5), ("pin", 2, 2),
    ("compact", 4, 6), ("copy", 4, 2),
    ("fence", 2, 2), ("unpin", 6, 12), ("step", 20, 20), ("retire", 8, 8),
]  # fmt: skip
NAMES, FILLING, DRAINING = zip(*CALLS, strict=True)
FILLING, DRAINING = list(accumulate(FILLING)), list(accumulate(DRAINING))


def run(seed, steps, check_every=CHECK_EVERY, begin=0, faults=tuple(FAULTS)):
    """Drives fresh worlds from step `begin` to step `steps`. Raises what is wrong, with the line
    that repeats it.

    Args:
      begin: a multiple of STEPS_PER_WORLD; each world depends on the seed and its first step only.
    Returns:
      Sums of the metrics of all worlds and the steps of every fault, to show that the stress
      reached what it should.
    """
    totals = Counter()
    for first in range(begin, steps, STEPS_PER_WORLD):
        rng = random.Random(f"{seed}/{first}")
        world, fault, going_on = random_world(rng), "", iter(())
        for step in range(first, min(first + STEPS_PER_WORLD, steps)):
            try:
                if rng.random() < 0.02:
                    world.is_filling = rng.random() < 0.6
                if not fault and faults and rng.random() < FAULTY:
                    fault = rng.choice(faults)
                    going_on = FAULTS[fault](world, rng)
                if fault:
                    totals[fault] += 1
                    if next(going_on, "over") == "over":
                        fault = ""
                one_call(world, rng)
                world.look_close()
                if (step + 1) % check_every == 0:
                    world.check()
            except Exception as error:
                only = f" --fault {faults[0]}" if len(faults) == 1 else ""
                error.add_note(
                    f"repeat with: python -m tests.sim --seed {seed} --begin {first} "
                    f"--steps {step + 1}{only}"
                )
                raise
        metrics = world.allocator.metrics()
        totals["moved_units"] += sum(metrics["moved_units"])
        totals["move_batches"] += metrics["move_batches"]
        totals["copied_bytes"] += metrics["copied_bytes"]
        for reason, count in metrics["refusals"].items():
            totals[f"refused for {reason}"] += count
    return totals


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--begin", type=int, default=0, help="the first step, for repeating")
    parser.add_argument("--fault", choices=FAULTS, help="this fault only; all by default")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    faults = (options.fault,) if options.fault else tuple(FAULTS)
    totals = run(options.seed, options.steps, begin=options.begin, faults=faults)
    print(f"{options.steps - options.begin:,} steps in {time.monotonic() - start:.0f} s, nothing")
    print(" ".join(f"{name}={count:,}" for name, count in sorted(totals.items())))


if __name__ == "__main__":
    sys.exit(main())
