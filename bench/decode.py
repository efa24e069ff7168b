"""`python -m bench decode [--json FILE]`: tokens per second of the decode loop on the embedded
model.

Two stores run the same step over the same requests: the packed arena, and one array per part of
every layer. They take turns in short blocks of steps, so that a noisy machine disturbs both alike;
the ratio is the figure to read. With `--versus transformers` it is compared with another program:
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
BLOCK_STEPS = 100
BLOCKS = 12


class Loop:
    """A decode loop of one store at one batch size, warmed up and ready to be timed in blocks."""

    def __init__(self, model: Any, params: Any, plan: um.Plan, batch: int, store: Any):
        self.memory = Memory(plan, rows=batch, context_tokens=256, chunk_tokens=PROMPT_TOKENS)
        self.device = self.memory.init(store)
        self.step = jax.jit(um.step(model, plan, store), donate_argnums=1)
        self.params = params
        self.prompts = np.random.default_rng(batch).integers(
            1, model.vocab_size, (batch, PROMPT_TOKENS)
        )
        self.block(steps=2)

    def run(self, work: list[Work]) -> np.ndarray:
        """Runs one step and waits for its tokens, as a loop that looks for stops must."""
        for packet in self.memory.run(work):
            self.device, out = self.step(self.params, self.device, packet)
        return np.asarray(out.sampled)

    def block(self, steps: int = BLOCK_STEPS) -> float:
        """Serves a batch of fresh requests for `steps` tokens each; returns seconds of decoding."""
        requests = [self.memory.open() for _ in self.prompts]
        pairs = zip(requests, self.prompts, strict=True)
        self.run([Work(request, PROMPT_TOKENS, prompt) for request, prompt in pairs])
        self.run([Work(request, 1) for request in requests])
        start = time.perf_counter()
        for _ in range(steps):
            self.run([Work(request, 1) for request in requests])
        seconds = time.perf_counter() - start
        for request in requests:
            self.memory.free(request)
        return seconds


def measure(model: Any, params: Any, plan: um.Plan, batch: int) -> dict[str, Any]:
    """One row of the result: both stores at one batch size, in alternating blocks."""
    # Addresses range over each sub-pool's whole grid, so every array needs as many units.
    counts = tuple(pool.unit_count for pool in plan.sub_pools)
    make = partial(Loop, model, params, plan, batch)
    packed, layered = make(PackedStore(plan)), make(LayerStore(plan, counts))
    seconds: dict[str, list[float]] = {"packed": [], "per_layer": []}
    for block in range(BLOCKS):
        pair = [("packed", packed), ("per_layer", layered)]
        for name, loop in pair if block % 2 else pair[::-1]:
            seconds[name].append(loop.block())
    steps = batch * BLOCK_STEPS
    rate = {name: steps / statistics.median(times) for name, times in seconds.items()}
    ratios = [b / a for a, b in zip(seconds["packed"], seconds["per_layer"], strict=True)]
    least = {name: min(times) for name, times in seconds.items()}
    return {
        "batch": batch,
        "packed_tokens_per_s": round(rate["packed"], 1),
        "per_layer_tokens_per_s": round(rate["per_layer"], 1),
        "packed_over_per_layer": round(statistics.median(ratios), 3),
        "of_least_times": round(least["per_layer"] / least["packed"], 3),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
    }


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
    print(f"{'batch':>6}{'packed tok/s':>15}{'per layer tok/s':>18}{'packed / per layer':>21}")
    for row in rows:
        print(
            f"{row['batch']:>6}{row['packed_tokens_per_s']:>15,.0f}"
            f"{row['per_layer_tokens_per_s']:>18,.0f}{row['packed_over_per_layer']:>21.3f}"
        )
    result = {
        "what": "decode loop, embedded model, greedy, host bookkeeping included",
        "prompt_tokens": PROMPT_TOKENS, "jax": jax.__version__,
        "platform": jax.devices()[0].platform, "machine": platform.machine(), "rows": rows,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0
