"""The other side of `python -m bench decode --versus transformers`; imports nothing of ours.

    PYTHON bench/versus_transformers.py FOLDER GGUF_FILE THREADS

Loads a folder (or, if GGUF_FILE is not empty, that file in it) in float32, says in one line of JSON
which ways there are to run it, and answers one line with another until its input ends:

    {"way": ["sdpa", "grouped_mm"], "prompts": [[1, 2]], "new_tokens": 3}
    {"seconds": of decoding, "cpu_seconds": of all threads, "tokens": [[4, 5, 6]],
     "state_bytes": of the cache at the end, for all prompts}

A way is an implementation of attention and one of experts, where the model has any. A prompt batch
goes through `generate`, greedily, with its own cache, in inference mode, with no end token. The
clock runs from the first new token to the last, so prefill is not counted.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers

ATTENTIONS = ("eager", "sdpa")
EXPERTS = ("eager", "batched_mm", "grouped_mm")


class Clock(transformers.StoppingCriteria):
    """Notes when each token was chosen; stops nothing."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Never true."""
        self.times.append((time.perf_counter(), time.process_time()))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def decode(model: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """One answer; see the module."""
    clock, ids = Clock(), torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, use_cache=True,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )  # fmt: skip
    (began, cpu_began), (ended, cpu_ended) = clock.times[0], clock.times[-1]
    return {
        "seconds": ended - began,
        "cpu_seconds": cpu_ended - cpu_began,
        "tokens": out.sequences[:, ids.shape[1] :].tolist(),
        "state_bytes": sum(one.nbytes for one in cached(out.past_key_values).values()),
    }


def cached(cache: Any) -> dict[int, torch.Tensor]:
    """Every tensor that a cache reaches, by identity."""
    found: dict[int, torch.Tensor] = {}
    waiting = [cache]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            found[id(one)] = one
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
        elif type(one).__module__ == "transformers.cache_utils":
            waiting.extend(vars(one).values())
    return found


def choose(model: Any, way: list[str]) -> bool:
    """Sets the implementations of attention and experts; whether the model has them."""
    try:
        model.set_attn_implementation(way[0])
        for experts in way[1:]:
            model.set_experts_implementation(experts)
    except (ValueError, ImportError):
        return False
    return True


def main(folder: str, gguf_file: str, threads: str) -> None:
    """Answers requests until the input ends."""
    torch.set_num_threads(int(threads))
    torch.set_num_interop_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    chosen = {"gguf_file": gguf_file} if gguf_file else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **chosen
    ).eval()
    model.generation_config = transformers.GenerationConfig()  # no limits or options of the folder
    ways = [[attention] for attention in ATTENTIONS]
    if hasattr(model.config, "num_experts_per_tok"):
        ways = [[*way, experts] for way in ways for experts in EXPERTS]
    about = {
        "transformers": transformers.__version__, "torch": torch.__version__,
        "ways": [way for way in ways if choose(model, way)],
    }  # fmt: skip
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        choose(model, asked["way"])
        print(json.dumps(decode(model, asked["prompts"], asked["new_tokens"])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
