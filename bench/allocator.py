"""`python -m bench allocator [--json FILE]`: microseconds that memory decisions take on the host.

No device takes part. A figure is the median of several rounds, all from the same kind of state,
with the garbage collector on; the smallest round is printed beside it. Places are random, so that
no round profits from a warm cache. Nothing here waits, so what is counted is processor time, user
and system: on an idle machine it is the time that passes, on a busy one it leaves out others.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from unimem_jax.allocator import Allocator, number_of
from unimem_jax.bands import Geometry
from unimem_jax.memory import Memory
from unimem_jax.plan import GRANULE_BYTES, plan
from unimem_jax.requests import Work
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, window

GOALS = {
    "allocate_1_two_subpools": 4, "allocate_1_half_holes": 4, "free_1_two_subpools": 4,
    "allocate_512": 25, "free_512": 25, "fits": 1, "step_128": 256, "step_1024": 1024,
    "short_one_page": 200, "short_float_page": 200, "compact_idle": 20, "compact_10_pages": 1000,
}  # fmt: skip
CALLS = 1000  # of one unit in a round
BATCH = 512  # pages of one request
ROUNDS = 9
STEPS = 128  # in a round: two page crossings of every request
PAGE_TOKENS = 64
WINDOW_TOKENS = 1024
PAST_TOKENS = 2048  # of every request before the first step that is timed

type Rounds = Iterator[float]  # microseconds per call, one for each round


def two_sub_pools(pool_pages: int) -> Allocator:
    """A window at the low end and the whole context at the high end; pages of one size."""
    return Allocator(Geometry(pool_pages, (1, 1), ("low", "high"), (False, False), pool_pages))


def half_holes(pool_pages: int, seed: int) -> tuple[Allocator, np.ndarray]:
    """The arena full, then half of the ids freed at random; with the live ids in random order."""
    allocator = two_sub_pools(pool_pages)
    ids = np.random.default_rng(seed).permutation(
        allocator.grant_pages(pool_pages // 2, committed=False)
    )
    gone, live = np.split(ids, 2)
    allocator.free(gone)
    allocator.take_changes()
    return allocator, live


def allocate_1(pool_pages: int) -> Rounds:
    """New ids with a page in both sub-pools; the bands grow as they fill."""
    for _ in range(ROUNDS):
        allocator = two_sub_pools(pool_pages)
        start = time.thread_time()
        for _ in range(CALLS):
            allocator.grant_page(committed=False)
        yield (time.thread_time() - start) * 1e6 / CALLS


def allocate_1_half_holes(pool_pages: int) -> Rounds:
    """The same from holes at random places."""
    for seed in range(ROUNDS):
        allocator, _ = half_holes(pool_pages, seed)
        start = time.thread_time()
        for _ in range(CALLS):
            allocator.grant_page(committed=False)
        yield (time.thread_time() - start) * 1e6 / CALLS


def free_1(pool_pages: int) -> Rounds:
    """Ids with pages in both sub-pools, at random places."""
    for seed in range(ROUNDS):
        allocator, live = half_holes(pool_pages, seed)
        ids = live[:CALLS].tolist()
        start = time.thread_time()
        for id_ in ids:
            allocator.free(id_)
        yield (time.thread_time() - start) * 1e6 / CALLS


def many(pool_pages: int, is_freeing: bool) -> Rounds:
    """All holes to requests of 512 pages in both sub-pools, or all of them freed again."""
    count = pool_pages // 4 // BATCH
    for seed in range(ROUNDS):
        allocator, _ = half_holes(pool_pages, seed)
        start = time.thread_time()
        granted = [allocator.grant_pages(BATCH, committed=False) for _ in range(count)]
        middle = time.thread_time()
        for ids in granted:
            allocator.free(ids)
        end = time.thread_time()
        yield (end - middle if is_freeing else middle - start) * 1e6 / count


def fits(pool_pages: int) -> Rounds:
    """Whether a demand fits, over three sub-pools; another demand each time."""
    ends, is_slot = ("low", "float", "high"), (True, False, False)
    allocator = Allocator(Geometry(4 * pool_pages, (8, 3, 2), ends, is_slot, pool_pages))
    allocator.commit((9, 1000, 1000))
    demands = [(index % 3, index % 7, index) for index in range(CALLS)]
    for _ in range(ROUNDS):
        start = time.thread_time()
        for demand in demands:
            allocator.fits(demand)
        yield (time.thread_time() - start) * 1e6 / CALLS


def step(rows: int) -> Rounds:
    """Everything that one decode step of `rows` requests costs in `Memory`: asking, granting,
    dropping what windows no longer see, the packet, retirement.

    The requests stand at random places within their pages, so each step has its share of crossings.
    """
    parts = [
        Part(Site(0), "state", (2048,), "float32", REQUEST),
        Part(Site(1), "key", (64,), "bfloat16", window(WINDOW_TOKENS)),
        Part(Site(2), "key", (64,), "bfloat16", CONTEXT),
    ]
    tokens = PAST_TOKENS + PAGE_TOKENS + STEPS * ROUNDS
    memory = Memory(plan(parts, rows * (16384 + 512 * tokens), PAGE_TOKENS), rows, tokens)
    requests = [memory.open() for _ in range(rows)]
    within = random.Random(rows)
    for request in requests:
        past = PAST_TOKENS + within.randrange(PAGE_TOKENS)
        memory.run([Work(request, past, np.zeros(past, np.int32))])
    memory.retire(memory.ticket)
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(STEPS):
            memory.run([Work(request, 1) for request in requests])
            memory.retire(memory.ticket)
        yield (time.thread_time() - start) * 1e6 / STEPS


def short_one_page(pool_pages: int) -> Rounds:
    """One sub-pool is a page short; the other has 16,000 holes, and a live page at its edge."""
    for seed in range(ROUNDS):
        allocator = two_sub_pools(pool_pages)
        ids = allocator.grant_pages(pool_pages, [1], committed=False)
        inner = ids[allocator.mapping[1][number_of(ids)] > 0]
        allocator.free(np.random.default_rng(seed).permutation(inner)[: pool_pages // 3])
        yield _one_move(allocator)


def short_float_page(pool_pages: int) -> Rounds:
    """One sub-pool is a page short; beside it a float fills the arena but for one page inside."""
    ends = ("low", "float", "high")
    for _ in range(ROUNDS):
        allocator = Allocator(Geometry(pool_pages, (1, 1, 1), ends, (False,) * 3, pool_pages))
        ids = allocator.grant_pages(pool_pages, [1], committed=False)
        allocator.free(ids[allocator.mapping[1][number_of(ids)] == pool_pages // 3])
        yield _one_move(allocator)


def compact(pool_pages: int, is_idle: bool) -> Rounds:
    """One call within a budget of ten pages, over a float and an end band that are half holes, or
    that have none.
    """
    ends, is_slot = ("low", "float", "high"), (True, False, False)
    for seed in range(ROUNDS):
        allocator = Allocator(Geometry(4 * pool_pages, (8, 3, 2), ends, is_slot, pool_pages))
        ids = allocator.grant_pages(pool_pages // 2, committed=False)
        if not is_idle:
            allocator.free(np.random.default_rng(seed).permutation(ids)[: pool_pages // 4])
        start = time.thread_time()
        for _ in range(20):
            assert bool(allocator.compact(30 * GRANULE_BYTES)) != is_idle
        yield (time.thread_time() - start) * 1e6 / 20


def _one_move(allocator: Allocator) -> float:
    """Microseconds that a page of sub-pool 0 takes where another's has to move first."""
    allocator.take_changes()
    start = time.thread_time()
    allocator.grant_page([0], committed=False)
    elapsed = time.thread_time() - start
    moved = [len(batch.sources) for batch in allocator.take_moves()]
    assert sum(moved) == 1, f"one page has to move, not {moved}"
    return elapsed * 1e6


def cases() -> Iterator[tuple[str, int, Callable[[], Rounds]]]:
    """Name, pages of the pool, and what measures it; a step has a page table for every row."""
    for pages in (4096, 65536, 524288):
        yield "allocate_1_two_subpools", pages, partial(allocate_1, pages)
        yield "allocate_1_half_holes", pages, partial(allocate_1_half_holes, pages)
        yield "free_1_two_subpools", pages, partial(free_1, pages)
    yield "allocate_512", 65536, partial(many, 65536, False)
    yield "free_512", 65536, partial(many, 65536, True)
    yield "fits", 65536, partial(fits, 65536)
    for rows in (128, 1024):
        pages = rows * -(-(PAST_TOKENS + STEPS * ROUNDS) // PAGE_TOKENS)
        yield f"step_{rows}", pages, partial(step, rows)
    yield "short_one_page", 48000, partial(short_one_page, 48000)
    yield "short_float_page", 16001, partial(short_float_page, 16001)
    yield "compact_idle", 65536, partial(compact, 65536, True)
    yield "compact_10_pages", 65536, partial(compact, 65536, False)


def main(arguments: list[str]) -> int:
    """Runs the measurement and prints its table."""
    parser = argparse.ArgumentParser(prog="python -m bench allocator", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    rows = []
    print(f"{'':24}{'pool pages':>11}{'us':>10}{'smallest':>10}{'goal':>7}")
    for name, pages, measure in cases():
        if options.only not in name:
            continue
        found = list(measure())
        rows.append({"name": name, "pool_pages": pages, "us": round(statistics.median(found), 3)})
        print(f"{name:24}{pages:>11,}{rows[-1]['us']:>10.2f}{min(found):>10.2f}{GOALS[name]:>7,}")
    us = {row["name"]: row["us"] for row in rows}
    result = {"rows": rows, "load": load, "machine": platform.machine(), "numpy": np.__version__}
    if {"step_128", "step_1024"} <= us.keys():
        each = (us["step_1024"] - us["step_128"]) / (1024 - 128)
        result["step"] = {"fixed_us": us["step_128"] - 128 * each, "per_request_us": each}
        print(
            "a step of R requests: {fixed_us:.0f} us + {per_request_us:.2f} us * R".format(
                **result["step"]
            )
        )
    print(f"load average {load:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0
