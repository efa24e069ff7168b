"""`python -m bench prefix [--json FILE]`: what keeping prefixes costs the host, and what it saves.

Two tables. Microseconds per 1,000 tokens for a request that looks its prompt up, and for one that
leaves its prefix behind, on the shapes of published models: no device takes part. Then the embedded
model serving prompts with one beginning, and conversations, with kept prefixes and without.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unimem_jax as um
from unimem_jax.memory import Memory
from unimem_jax.prefix import PrefixCache
from unimem_jax.requests import Prefix

GEOMETRIES = ("gpt-oss-20b", "qwen3.5-4b", "kimi-linear-48b-a3b")
PROMPT_TOKENS = 8192
SHARED_TOKENS = 4096
ROUNDS = 20
ARENA_BYTES = 3 << 30
NEW_TOKENS = 16
CONTEXT_TOKENS = 512


class Clock:
    """Processor microseconds by what they were spent on."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def time(self, what: str, call: Callable[[], Any], units: Callable[[], float]) -> Any:
        """Calls, and notes the time per unit; nothing where there were none."""
        start = time.process_time()
        found = call()
        spent, count = time.process_time() - start, units()
        if count:
            self.times.setdefault(what, []).append(spent * 1e6 / count)
        return found


def host(name: str, page_tokens: int) -> dict[str, Any]:
    """Medians over prompts that share half their tokens, in an arena that holds a few of them."""
    plan = um.plan(um.geometry(name), ARENA_BYTES, page_tokens)
    memory, clock = Memory(plan, 4, PROMPT_TOKENS), Clock()
    cache = PrefixCache(memory.allocator, memory.prices)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 100_000, SHARED_TOKENS).tolist()

    def turn(tokens: list[int], clock: Clock) -> None:
        thousands = len(tokens) / 1000
        found = clock.time("match", lambda: cache.match(tokens), lambda: thousands)
        demand, before = memory.prices.growth(0, len(tokens)), cache.metrics()["evicted"]
        with cache.held([found]):
            clock.time(
                "evict_one", lambda: cache.evict(demand),
                lambda: cache.metrics()["evicted"] - before,
            )  # fmt: skip
            request = memory.open(prefix=Prefix(found.length, found.ids, found.slots))
        left = np.asarray(tokens[found.length :])
        memory.skip([request], [len(left)])

        def publish() -> bool:
            return cache.publish(tokens, request.ids, request.slots, is_leaving=True)

        clock.time("publish", publish, lambda: thousands)
        clock.time("publish_again", publish, lambda: thousands)
        memory.free(request)

    turn(shared, Clock())
    for _ in range(ROUNDS):
        new = rng.integers(0, 100_000, PROMPT_TOKENS - SHARED_TOKENS).tolist()
        turn(shared + new, clock)
    medians = {f"{what}_us": round(statistics.median(t), 1) for what, t in clock.times.items()}
    hits = cache.metrics()
    return {"model": name, "page_tokens": page_tokens, **medians, "nodes": hits["nodes"]}


def served(rounds: list[list[list[int]]], folder: str, is_kept: bool) -> dict[str, Any]:
    """One engine over prompts, round by round; its programs are made before the clock starts."""
    model, params, _ = um.load("embedded")
    engine = um.Engine(
        model, params, arena_bytes=8 << 20, rows=4, context_tokens=CONTEXT_TOKENS,
        program_folder=folder, prefix_cache=is_kept, checkpoint_tokens=64,
    )  # fmt: skip
    engine.warm_up()
    for prompts in rounds:
        engine.generate(prompts, um.Sampling(max_tokens=NEW_TOKENS))
    found = engine.statistics()
    return {
        "steps": found.steps, "computed_tokens": found.computed_tokens,
        "prefix_hit_tokens": found.prefix_hit_tokens, "seconds": round(found.seconds, 2),
    }  # fmt: skip


def workloads() -> dict[str, list[list[list[int]]]]:
    """Prompts with one beginning, that come one after another, and conversations of four turns."""
    rng = np.random.default_rng(0)
    system = [0, *rng.integers(32, 127, 255).tolist()]
    ask = lambda count: rng.integers(32, 127, count).tolist()  # noqa: E731
    talks = [[0, *ask(60)] for _ in range(4)]
    turns = []
    for _ in range(4):
        turns.append([list(talk) for talk in talks])
        talks = [talk + ask(NEW_TOKENS + 40) for talk in talks]
    return {
        "one beginning": [[system + ask(24) for _ in range(4)] for _ in range(4)],
        "no beginning in common": [[ask(280) for _ in range(4)] for _ in range(4)],
        "longer each turn": turns,
    }


def main(arguments: list[str]) -> int:
    """Runs the measurement and prints its tables."""
    parser = argparse.ArgumentParser(prog="python -m bench prefix", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--host", action="store_true", help="the first table alone")
    options = parser.parse_args(arguments)
    rows = [host(name, page) for name in GEOMETRIES for page in (16, 64)]
    for row in rows:
        print(json.dumps(row))
    result: dict[str, Any] = {"machine": platform.machine(), "host": rows, "served": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, rounds in workloads().items() if not options.host else ():
            for kept in (False, True):
                row = {"workload": name, "prefix_cache": kept, **served(rounds, folder, kept)}
                result["served"].append(row)
                print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0
