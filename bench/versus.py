"""`python -m bench decode --versus transformers`: the decode loop beside Hugging Face Transformers.

Both sides decode the same prompts greedily from the same float32 weights, on the same CPU cores
with as many threads, warmed up, with no end token. They take turns, round by round. A round of ours
is one program and one wait per token, as in a loop that looks for stops, host bookkeeping included;
a round of theirs is `generate` with its cache, with the implementations of attention and experts
that were the fastest in the warm-up. Prefill is outside the clock on both sides.

"ratio" is of wall-clock seconds, "CPU" of the processor seconds that both spent. On a busy machine
read the second: the scheduler favours the side that runs shorter. Threads that wait for each other
at a barrier, as torch's do, lose far more than their share where something else runs on their
cores, so take no more threads than there are idle cores.

Transformers runs in an interpreter of its own (`--transformers-python`), which needs torch,
transformers and safetensors, for GGUF files gguf and accelerate too, and nothing of ours.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from unimem_jax.models import smollm2

import unimem_jax as um
from tests.models.references.network import rebuild
from unimem_jax.errors import UsageError
from unimem_jax.memory import Memory, Work

BATCHES = (1, 4, 16)
PROMPT_TOKENS = 200
NEW_TOKENS = 49  # 48 steps are on the clock
ROUNDS = 5
WARM_UPS = 2
PAGE_TOKENS = 16
TINY = ("gpt_oss", "qwen3", "qwen3_5")  # drawn by tests/models/references
OTHER_SIDE = Path(__file__).with_name("versus_transformers.py")
NOTES = {"qwen3_5": "Transformers runs DeltaNet in Python here: its fast kernels need a GPU."}

HEADS = (
    f"{'batch':>6}{'ours':>20}{'Transformers':>20}{'ratio':>8}{'CPU':>7}{'bytes/request':>24}"
    "  their way"
)


@dataclass(frozen=True)
class Round:
    """What one side did with one batch.

    Attributes:
      seconds: from the first new token of all requests to the last.
      cpu_seconds: that all threads of this side worked meanwhile.
      tokens: new ones of each request.
      state_bytes: of everything remembered for all requests, at the end.
    """

    seconds: float
    cpu_seconds: float
    tokens: list[list[int]]
    state_bytes: int


class Ours:
    """The arena's decode loop at one batch size."""

    def __init__(self, model: Any, params: Any, batch: int, context_tokens: int):
        plan = um.plan(model.parts(), arena_bytes(model, batch, context_tokens), PAGE_TOKENS)
        self.memory = Memory(plan, batch, context_tokens, chunk_tokens=context_tokens)
        self.device = self.memory.init()
        self.params = params
        self.step = jax.jit(um.step(model, plan), donate_argnums=1)

    def decode(self, prompts: list[list[int]], new_tokens: int) -> Round:
        """One round; frees all requests at its end."""
        memory = self.memory
        requests = [memory.admit(len(ids), new_tokens) for ids in prompts]
        found = [
            self._run([Work(r, len(ids), ids) for r, ids in zip(requests, prompts, strict=True)])
        ]
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(new_tokens - 1):
            found.append(self._run([Work(request, 1) for request in requests]))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        live = zip(memory.metrics()["live"], memory.plan.sub_pools, strict=True)
        state_bytes = sum(count * pool.unit_bytes for count, pool in live)
        for request in requests:
            memory.free(request)
        return Round(seconds, cpu_seconds, np.stack(found, axis=1).tolist(), state_bytes)

    def _run(self, work: list[Work]) -> np.ndarray:
        for packet in self.memory.run(work):
            self.device, out = self.step(self.params, self.device, packet)
        return np.asarray(out.sampled)


class Theirs:
    """Transformers in another process."""

    def __init__(self, python: str, checkpoint: Path, threads: int):
        is_file = checkpoint.is_file()
        folder = checkpoint.parent if is_file else checkpoint
        # -P: this folder's `kernels` is not the package that Transformers looks for.
        script = [python, "-P", str(OTHER_SIDE)]
        command = [*script, str(folder), checkpoint.name if is_file else "", str(threads)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        self._process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        about = self._answer()
        self._ways: list[list[str]] = about.pop("ways")
        self.versions: dict[str, str] = about
        self.way: list[str] = []

    def choose(self, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        """Warms up, and keeps the way that decodes fastest; seconds of each."""
        seconds = {}
        for way in self._ways:
            rounds = [self._ask(way, prompts, new_tokens) for _ in range(WARM_UPS)]
            seconds[" ".join(way)] = min(one["seconds"] for one in rounds)
        self.way = min(seconds, key=lambda way: seconds[way]).split()
        return seconds

    def decode(self, prompts: list[list[int]], new_tokens: int) -> Round:
        """One round, in the way chosen."""
        return Round(**self._ask(self.way, prompts, new_tokens))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _ask(self, way: list[str], prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        asked = {"way": way, "prompts": prompts, "new_tokens": new_tokens}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_answer` says that it ended
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise UsageError(
                f"{self._process.args[0]} ended without an answer; --transformers-python names an "
                "interpreter that has torch, transformers and safetensors"
            )
        return json.loads(line)


def arena_bytes(model: Any, batch: int, context_tokens: int) -> int:
    """Room for `batch` requests and one more."""
    per_token = sum(
        int(np.prod(part.shape)) * 4 * (1 if part.lifetime == um.REQUEST else context_tokens)
        for part in model.parts()
    )
    return max(1 << 20, 2 * (batch + 1) * per_token)


def measure(
    model: Any, params: Any, theirs: Theirs, batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One row of the result: both sides at one batch size, in alternating rounds."""
    new_tokens, shape = options.new_tokens, (batch, options.prompt_tokens)
    prompts = np.random.default_rng(batch).integers(1, model.vocab_size, shape).tolist()
    ours = Ours(model, params, batch, options.prompt_tokens + new_tokens)
    for _ in range(WARM_UPS):
        ours.decode(prompts, new_tokens)
    warm = theirs.choose(prompts, new_tokens)
    rounds: dict[str, list[Round]] = {"ours": [], "transformers": []}
    sides = [("ours", ours), ("transformers", theirs)]
    for at in range(options.rounds):
        for name, side in sides if at % 2 else sides[::-1]:
            rounds[name].append(side.decode(prompts, new_tokens))
    pairs = list(zip(rounds["ours"], rounds["transformers"], strict=True))
    made = batch * (new_tokens - 1)
    same = np.equal(pairs[0][0].tokens, pairs[0][1].tokens)
    row = {
        "batch": batch,
        "way": " ".join(theirs.way),
        "warm_up_seconds": {name: round(one, 4) for name, one in warm.items()},
        "ratio": round(statistics.median(b.seconds / a.seconds for a, b in pairs), 2),
        "cpu_ratio": round(statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in pairs), 2),
        "same_tokens": round(float(same.mean()), 4),
    }
    for name, found in rounds.items():
        seconds = [one.seconds for one in found]
        row[name] = {
            "tokens_per_s_median": round(made / statistics.median(seconds), 1),
            "tokens_per_s_best": round(made / min(seconds), 1),
            "tokens_per_cpu_s": round(
                made / statistics.median(one.cpu_seconds for one in found), 1
            ),
            "bytes_per_request": round(found[-1].state_bytes / batch),
        }
    return row


def find(name: str, scratch: Path) -> Path:
    """The folder or file that both sides load.

    Raises:
      UsageError: SmolLM2 has not been fetched.
    """
    if name in TINY:
        return rebuild(name, scratch)
    if name == "smollm2":
        file = smollm2.installed()
        if file is None:
            raise UsageError("smollm2 is not here yet; `unimem fetch smollm2` gets it")
        return file
    return Path(name)


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All batch sizes of one model, printed as they come."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = find(name, Path(scratch))
        model, params, _ = um.load(checkpoint)
        print(f"{name}: tokens/s, median of rounds (best)\n{HEADS}")
        theirs = Theirs(options.transformers_python, checkpoint, options.threads)
        rows: list[dict[str, Any]] = []
        try:
            for batch in options.batches:
                rows.append(measure(model, params, theirs, batch, options))
                show(rows[-1])
        finally:
            theirs.close()
    found = {"model": name, **theirs.versions, "rows": rows}
    if name in NOTES:
        print(NOTES[name])
        found["note"] = NOTES[name]
    return found


def show(row: dict[str, Any]) -> None:
    """Prints one row of a table under `HEADS`."""
    speeds = [
        f"{row[side]['tokens_per_s_median']:,.0f} ({row[side]['tokens_per_s_best']:,.0f})"
        for side in ("ours", "transformers")
    ]
    sizes = " / ".join(f"{row[side]['bytes_per_request']:,}" for side in ("ours", "transformers"))
    figures = f"{row['ratio']:>8.2f}{row['cpu_ratio']:>7.2f}{sizes:>24}  {row['way']}"
    doubt = "" if row["same_tokens"] == 1 else f"  {row['same_tokens']:.0%} of tokens are the same"
    print(f"{row['batch']:>6}{speeds[0]:>20}{speeds[1]:>20}{figures}{doubt}", flush=True)


def main(arguments: list[str]) -> int:
    """Runs the comparison and prints its tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench decode --versus transformers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--versus", choices=["transformers"], required=True)
    parser.add_argument(
        "--model", nargs="+", default=["gpt_oss", "qwen3"], metavar="MODEL",
        help=f"{', '.join(TINY)} (tiny random networks), smollm2, a folder or a GGUF file",
    )  # fmt: skip
    parser.add_argument("--transformers-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=1, help="and cores, of each side")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    if load + options.threads > len(os.sched_getaffinity(0)):
        print(f"the machine is busy (load {load:.1f}): do not trust what follows", file=sys.stderr)
    # XLA makes as many threads as it sees cores; the other process inherits the same cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    found = [compare(name, options) for name in options.model]
    result = {
        "what": "greedy decode, float32, beside Transformers' generate; prefill not counted",
        "prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens,
        "rounds": options.rounds, "threads": options.threads, "load_before": round(load, 1),
        "jax": jax.__version__, "platform": jax.devices()[0].platform,
        "machine": platform.machine(), "models": found,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0
