"""`python -m bench decode [--json FILE]`: tokens per second of the decode loop on the embedded
model.

Two stores run the same step over the same requests: the packed arena, and one array per part of
every layer. They take turns step by step, so that a noisy machine disturbs both alike; the ratio is
the figure to read. With `--versus transformers` it is compared with another program:
see `bench/versus.py`.
"""

import argparse
import json
import platform
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import unimem_jax as um
from bench import versus
from bench.layer_store import LayerStore
from unimem_jax.memory import Memory, Work
from unimem_jax.store import PackedStore

BATCHES = (1, 4, 16, 64)
PROMPT_TOKENS = 130  # all steps then stay within the first compiled context of 256 tokens
STEPS = 100  # decode steps of one pair of batches
PAIRS = 10  # batches of fresh requests, one in each store


class Loop:
    """A decode loop of one store at one batch size, compiled."""

    def __init__(self, model: Any, params: Any, plan: um.Plan, batch: int, store: Any):
        self.memory = Memory(plan, rows=batch, context_tokens=256, chunk_tokens=PROMPT_TOKENS)
        self.device = self.memory.init(store)
        self.step = jax.jit(um.step(model, plan, store), donate_argnums=1)
        self.params = params
        self.prompts = np.random.default_rng(batch).integers(
            1, model.vocab_size, (batch, PROMPT_TOKENS)
        )
        self.begin()

    def run(self, work: list[Work]) -> np.ndarray:
        """Runs one step and waits for its tokens, as a loop that looks for stops must."""
        for packet in self.memory.run(work):
            self.device, out = self.step(self.params, self.device, packet)
        return np.asarray(out.sampled)

    def begin(self) -> None:
        """Frees all requests, opens as many, runs their prompts and a first decode step."""
        for request in getattr(self, "requests", ()):
            self.memory.free(request)
        self.requests = [self.memory.open() for _ in self.prompts]
        pairs = zip(self.requests, self.prompts, strict=True)
        self.run([Work(request, PROMPT_TOKENS, prompt) for request, prompt in pairs])
        self.decode()

    def decode(self) -> float:
        """Decodes a token of every request; returns seconds."""
        start = time.perf_counter()
        self.run([Work(request, 1) for request in self.requests])
        return time.perf_counter() - start


def measure(model: Any, params: Any, plan: um.Plan, batch: int) -> dict[str, Any]:
    """One row of the result: both stores at one batch size, in turns."""
    # Addresses range over each sub-pool's whole grid, so every array needs as many units.
    counts = tuple(pool.unit_count for pool in plan.sub_pools)
    make = partial(Loop, model, params, plan, batch)
    loops = {"packed": make(PackedStore(plan)), "per_layer": make(LayerStore(plan, counts))}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(PAIRS):
        for loop in loops.values():
            loop.begin()
        for step in range(STEPS):
            for name in list(loops)[:: 1 if step % 2 else -1]:
                seconds[name].append(loops[name].decode())
    found: dict[str, Any] = {"batch": batch}
    for name, times in seconds.items():
        found[f"{name}_tokens_per_s"] = round(batch / statistics.median(times), 1)
    for quantile, title in ((0.5, "packed_over_per_layer"), (0.1, "of_fastest_tenth")):
        packed, layered = (float(np.quantile(times, quantile)) for times in seconds.values())
        found[title] = round(layered / packed, 3)
    return found


def main(arguments: list[str]) -> int:
    """Runs the measurement and prints its table."""
    if "--versus" in arguments:
        return versus.main(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench decode", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    options = parser.parse_args(arguments)
    model, params, _ = um.load("embedded")
    plan = um.plan(model.parts(), 64 << 20, 16)
    rows = [measure(model, params, plan, batch) for batch in options.batches]
    titles = ("packed tok/s", "per layer tok/s", "packed / per layer", "fastest tenth")
    print(f"{'batch':>6}" + "".join(f"{title:>20}" for title in titles))
    for row in rows:
        print(
            f"{row['batch']:>6}{row['packed_tokens_per_s']:>20,.0f}"
            f"{row['per_layer_tokens_per_s']:>20,.0f}{row['packed_over_per_layer']:>20.3f}"
            f"{row['of_fastest_tenth']:>20.3f}"
        )
    result = {
        "what": "decode loop, embedded model, greedy, host bookkeeping included",
        "prompt_tokens": PROMPT_TOKENS, "jax": jax.__version__,
        "platform": jax.devices()[0].platform, "machine": platform.machine(), "rows": rows,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0
