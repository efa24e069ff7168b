"""`python -m bench simulate [--trace FILE] [--json FILE]`: how many requests run at once.

Three tables, none of which needs a device:

    rows        published models in one arena, a split at SGLang's default ratios and equal blocks,
                beside the figures that a replay of vLLM 0.33 and exact units gave
    published   the arena is set so that the split runs what SGLang published for separate pools;
                what one arena of these bytes runs, over that
    host        processor time of a whole step at 32, 128 and 1,024 running requests, as a + b R

All run under `first-come`. Rows that need the Azure conversation trace are left out where
it is not given. Figures of the first two depend on nothing but the code; those of the third are
processor time, on whatever machine this is.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unimem_jax.geometries import geometry
from unimem_jax.plan import plan
from unimem_jax.replay import BUDGET_TOKENS, Load, arranged, replay
from unimem_jax.schedule import Limits
from unimem_jax.simulate import Simulation
from unimem_jax.step_time import StateBytes, StepTime
from unimem_jax.trace import even_load
from unimem_jax.weights import weights

AZURE_REQUESTS = 1000  # the first ones, all at once
GIB = 1 << 30
LAYOUTS = ("unified", "split", "blocks")
HOST_RUNNING = (32, 128, 1024)
HOST_STEPS = {32: 1024, 128: 512, 1024: 96}  # that are timed
HOST_ROUNDS = 5
SEARCH_STEPS = 6  # towards the bytes at which a split runs the published number
NEAR = 0.005
POLICY = "first-come"  # of all tables


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table; a load of (input, output, requests), or None for the trace.

    `expected` is (running mean, steps) of exact units, of separate pools and of vLLM's blocks.
    """

    model: str
    gib: int
    load: tuple[int, int, int] | None
    expected: tuple[tuple[float, int], tuple[float, int], tuple[float, int]]


ROWS = (
    Row("gpt-oss-20b", 8, (512, 1536, 512), ((193.2, 4071), (140.1, 5612), (193.2, 4071))),
    Row("gpt-oss-20b", 2, None, ((61.2, 4038), (39.2, 6312), (61.2, 4039))),
    Row("qwen3.5-4b", 8, (128, 256, 256), ((127.5, 514), (64.0, 1024), (85.3, 768))),
    Row("qwen3.5-4b", 8, (1024, 256, 256), ((84.4, 777), (63.8, 1027), (69.4, 945))),
    Row("qwen3.5-4b", 8, None, ((85.5, 2892), (71.3, 3469), (78.8, 3137))),
    Row("qwen3.5-4b", 16, (16384, 512, 64), ((21.1, 1556), (15.8, 2086), (21.1, 1556))),
    Row("kimi-linear-48b-a3b", 8, None, ((126.7, 1951), (83.4, 2964), (114.6, 2158))),
    Row("nemotron-3-nano-30b-a3b", 8, None, ((122.8, 2013), (74.7, 3309), (112.0, 2208))),
    Row("gemma-3-27b", 32, None, ((66.1, 3742), (63.4, 3899), (58.9, 4200))),
)


@dataclass(frozen=True, slots=True)
class Published:
    """A load for which SGLang published what separate pools run, and what unified memory does."""

    model: str
    load: tuple[int, int, int]
    concurrency: int
    split_running: float
    ratio: float
    first_bytes: int  # where the search for the arena begins


PUBLISHED = (
    Published("gpt-oss-20b", (512, 1536, 1536), 1024, 618, 1.6, 34 * GIB),
    Published("qwen3.5-4b", (16384, 4096, 128), 64, 22, 1.45, 24 * GIB),
)


def rows(trace: Path | None, only: str) -> Iterator[dict[str, Any]]:
    """The first table, row by row and layout by layout."""
    print(f"{'model, bytes, load':50}{'layout':9}{'running':>9}{'steps':>8}{'expected':>18}")
    for row in ROWS:
        if only not in row.model or (row.load is None and trace is None):
            continue
        load = Load(trace=str(trace), limit=AZURE_REQUESTS, arrivals="at-once")
        name = "Azure conversation"
        if row.load is not None:
            name = "{:,} / {:,} x {}".format(*row.load)
            load = Load(None, None, None, *row.load)
        for layout, (mean, steps) in zip(LAYOUTS, row.expected, strict=True):
            found = replay(row.model, row.gib * GIB, load, load.read(), layout=layout)
            simulated = found.simulated
            title = f"{row.model}, {row.gib} GiB, {name}"
            print(
                f"{title:50}{layout:9}{simulated.running_mean:>9.1f}{simulated.steps:>8,}"
                f"{mean:>9.1f}, {steps:>7,}",
                flush=True,
            )
            yield {**found.to_json(), "expected_running_mean": mean, "expected_steps": steps}


def published(only: str) -> Iterator[dict[str, Any]]:
    """The second table: bytes at which the split runs the published number, and the ratio there."""
    print(f"\n{'model, load, concurrent':50}{'bytes':>16}{'split':>8}{'unified':>9}{'ratio':>7}")
    for case in PUBLISHED:
        if only not in case.model:
            continue
        arena_bytes = case.first_bytes
        split = _steady(case, arena_bytes, "split")
        for _ in range(SEARCH_STEPS):
            lack = case.split_running / split
            if abs(lack - 1) < NEAR:
                break
            arena_bytes = int(arena_bytes * lack)  # running grows nearly as bytes do
            split = _steady(case, arena_bytes, "split")
        unified = _steady(case, arena_bytes, "unified")
        title = "{}, {:,} / {:,}, {}".format(case.model, *case.load[:2], case.concurrency)
        print(
            f"{title:50}{arena_bytes:>16,}{split:>8.1f}{unified:>9.1f}{unified / split:>7.2f}",
            flush=True,
        )
        yield {
            **asdict(case), "arena_bytes": arena_bytes, "split": split, "unified": unified,
            "measured_ratio": unified / split,
        }  # fmt: skip


def host(only: str) -> Iterator[dict[str, Any]]:
    """The third table: decode steps at places within pages that differ, prompts computed before."""
    for model in ("gpt-oss-20b", "qwen3.5-4b"):
        if only not in model:
            continue
        us = {}
        for running in HOST_RUNNING:
            us[running] = min(_step_us(model, running) for _ in range(HOST_ROUNDS))
            print(f"{model:50}{running:>6,} running{us[running]:>10.0f} us a step", flush=True)
        each = (us[1024] - us[32]) / (1024 - 32)
        print(f"{model:50}{us[32] - 32 * each:.0f} us + {each:.2f} us a running request")
        yield {"model": model, "us": us, "fixed_us": us[32] - 32 * each, "per_request_us": each}


def _steady(case: Published, arena_bytes: int, layout: str) -> float:
    """Mean running requests until the last one has arrived; afterwards the load is another."""
    made, split = arranged(case.model, arena_bytes, layout, 16)
    requests = even_load(*case.load)
    count = len(requests)
    clock = StepTime(weights(case.model), StateBytes.of(geometry(case.model)))
    run = Simulation(
        requests, made, Limits(count, BUDGET_TOKENS, BUDGET_TOKENS, count), split,
        clock=clock, concurrency=case.concurrency, policy=POLICY,
    )  # fmt: skip
    running = 0
    while not run.has_arrived:
        run.step()
        running += len(run.queue.running)
    return running / run.steps


def _step_us(model: str, running: int) -> float:
    """Microseconds of processor time of one step, all of them decoding."""
    steps = HOST_STEPS[running]
    requests = [one for past in range(64, 80) for one in even_load(past, steps + 64, running // 16)]
    made = plan(geometry(model), 120 * GIB)
    run = Simulation(requests, made, Limits(running, 1 << 20, 1 << 20, running))
    for _ in range(32):
        run.step()
    begin = time.process_time()
    for _ in range(steps):
        run.step()
    return (time.process_time() - begin) * 1e6 / steps


def main(arguments: list[str]) -> int:
    """Runs the measurement and prints its tables."""
    parser = argparse.ArgumentParser(prog="python -m bench simulate", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--trace", type=Path, help="the Azure conversation trace, a CSV file")
    parser.add_argument("--table", choices=("rows", "published", "host"), help="only this one")
    parser.add_argument("--only", default="", help="models whose names contain this")
    options = parser.parse_args(arguments)
    tables = {
        "rows": lambda: rows(options.trace, options.only),
        "published": lambda: published(options.only),
        "host": lambda: host(options.only),
    }
    found = {name: list(table()) for name, table in tables.items() if options.table in (None, name)}
    if options.json:
        options.json.write_text(json.dumps({**found, "load": os.getloadavg()[0]}, indent=1) + "\n")
    return 0
