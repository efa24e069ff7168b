"""Makes the reference numbers: runs Transformers on random networks and keeps what it computes.

    PYTHON -m tests.models.references.generate [FOLDER] [NAME ...]

PYTHON is any interpreter >= 3.11 with torch, transformers and safetensors; nothing of this project
is imported but `network`, which draws the weights. For each name FOLDER gets two files:

    NAME.json   the configuration and the shape of every tensor, as Transformers names them; the
                seed; the versions used; how near the closest decisions were; how far bfloat16 is
                from float32 with the same rounded weights, prompt by prompt
    NAME.npz    prompt0 .. prompt2  token ids
                positions0 ..       of the tokens whose logits are kept
                logits0 ..          at those positions, from a run without a cache [positions, V]
                new0 ..             greedy tokens after each prompt, from runs with a cache
                new_logits0 ..      what they were taken from [tokens, V]
                LAYER.key, .value   after the first prompt, of every token that is still cached
                LAYER.conv, .state  [tokens, heads, D]; a DeltaNet's last inputs and memory
                LAYER.latent        [tokens, rank + rotated], what latent attention keeps of a token
                LAYER.index_key     [tokens, D], and what it chooses tokens by

and `mxfp4.npz` gets matrices that Transformers expanded. Computed in float32, one prompt at a time,
with eager attention and experts. A network in which two tokens, or two experts, come so near that
rounding could choose between them is refused: take another seed.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models.references.network import draw_tensors, write_folder

SEED = 1
SEEDS = {"kimi_linear": 6, "deepseek_v32": 6}  # with others, two choices come too near
PROMPT_LENGTHS = (337, 150, 5)
NEW_TOKENS = 24
STRIDE = 4  # of the positions kept; the last one of a prompt is always among them
SHARDS = 2
# Smallest gaps allowed: of logits, and of the scores that experts and past tokens are chosen by.
NEAREST = {"token": 1e-3, "expert": 1e-4, "selected": 1e-5}

COMMON = {
    "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    **COMMON, "num_hidden_layers": 4, "intermediate_size": 32, "sliding_window": 21,
    "num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 128,
    },
}  # fmt: skip
QWEN3 = {
    **COMMON, "num_hidden_layers": 2, "intermediate_size": 80,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
QWEN3_5 = {
    **COMMON, "num_hidden_layers": 4, "intermediate_size": 80, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0], "mrope_interleaved": True,
    },
}  # fmt: skip
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**SPARSE, "shared_expert_intermediate_size": 24}
TWO_KINDS = ["linear_attention", "full_attention"]
QWEN3_5_MOE = {
    **{name: value for name, value in QWEN3_5.items() if name != "intermediate_size"}, **SHARED,
    "num_hidden_layers": 2, "layer_types": TWO_KINDS,
}  # fmt: skip
QWEN3_NEXT = {
    **QWEN3_5, **SHARED, "num_hidden_layers": 2, "layer_types": TWO_KINDS, "mlp_only_layers": [1],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
LATENT = {
    **COMMON, "num_key_value_heads": 4, "intermediate_size": 48, "kv_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}  # fmt: skip
KIMI_LINEAR = {
    **LATENT, "num_hidden_layers": 3, "num_local_experts": 6, "linear_head_dim": 8,
    "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
DEEPSEEK_V32 = {
    **LATENT, "num_hidden_layers": 2, "first_k_dense_replace": 1, "q_lora_rank": 20,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "index_topk": 16, "index_head_dim": 16,
    "index_n_heads": 16, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}

# Name -> (model_type, settings, quantisation).
NETWORKS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "gpt_oss": ("gpt_oss", GPT_OSS, None),
    "gpt_oss_mxfp4": ("gpt_oss", GPT_OSS, MXFP4),
    "qwen3": ("qwen3", QWEN3, None),
    "qwen3_5": ("qwen3_5_text", QWEN3_5, None),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN3_5_MOE, None),
    "qwen3_next": ("qwen3_next", QWEN3_NEXT, None),
    "kimi_linear": ("kimi_linear", KIMI_LINEAR, None),
    "deepseek_v32": ("deepseek_v32", DEEPSEEK_V32, None),
}


def main(arguments: list[str]) -> None:
    """Writes the files of the networks named, or of all."""
    out = Path(arguments[0]) if arguments else Path(__file__).parent
    torch.set_grad_enabled(False)
    for name in arguments[1:] or [*NETWORKS, "mxfp4"]:
        if name == "mxfp4":
            np.savez_compressed(out / "mxfp4.npz", **expanded_matrices())
            continue
        described, numbers = make(*NETWORKS[name], SEEDS.get(name, SEED))
        (out / f"{name}.json").write_text(json.dumps(described, indent=1) + "\n")
        np.savez_compressed(out / f"{name}.npz", **numbers)
        print(name, described["nearest"], f"{(out / f'{name}.npz').stat().st_size} bytes")


def make(
    model_type: str, settings: dict[str, Any], quantisation: dict[str, Any] | None, seed: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Both files of one network."""
    with tempfile.TemporaryDirectory() as scratch:
        config, shapes = describe(model_type, settings, Path(scratch) / "described")
        if quantisation:
            config["quantization_config"] = quantisation
            shapes = packed(shapes)
        tensors = draw_tensors(config, shapes, seed)
        folder = write_folder(Path(scratch) / "drawn", config, tensors, SHARDS)
        model, numbers, nearest = open_network(folder), {}, Nearest()
        nearest.watch(model)
        rng = np.random.default_rng(seed)
        for at, length in enumerate(PROMPT_LENGTHS):
            prompt = rng.integers(0, config["vocab_size"], length)
            found = run(model, prompt, nearest)
            numbers |= {f"{key}{at}": value for key, value in found.items()}
            if at == 0:
                numbers |= remembered(model, prompt)
        errors = [] if quantisation else bfloat16_errors(folder, numbers)
    nearest.require()
    described = {
        "config": config, "seed": seed, "shards": SHARDS, "nearest": nearest.gaps,
        "bfloat16_errors": errors,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "tensors": shapes,
    }  # fmt: skip
    return described, numbers


def describe(
    model_type: str, settings: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """`config.json` and the tensors' shapes, as Transformers saves such a network."""
    config = transformers.AutoConfig.for_model(model_type, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    written = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in written.items() if "version" not in key}, shapes


def packed(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """The shapes where experts [experts, in, out] are stored as MXFP4."""
    found = {}
    for name, shape in shapes.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = shape
            continue
        experts, inputs, outputs = shape
        found[name + "_blocks"] = [experts, outputs, inputs // 32, 16]
        found[name + "_scales"] = [experts, outputs, inputs // 32]
    return found


def open_network(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The network, as Transformers reads the folder."""
    is_packed = "quantization_config" in json.loads((folder / "config.json").read_text())
    expanding = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True, **(expanding if is_packed else {}),
    )  # fmt: skip
    faults = {key: value for key, value in loading.items() if value}
    if faults:
        raise SystemExit(f"{folder} was not read as it was written: {faults}")
    return model.to(dtype).eval()


def run(model: Any, prompt: np.ndarray, nearest: "Nearest") -> dict[str, np.ndarray]:
    """Logits without a cache, then greedy tokens with one."""
    ids = torch.from_numpy(prompt)[None]
    logits = model(ids, use_cache=False).logits[0].numpy()
    positions = np.arange((len(prompt) - 1) % STRIDE, len(prompt), STRIDE)
    out = model.generate(
        ids, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    new_logits = torch.cat(out.logits).numpy()
    nearest.note("token", new_logits, 1)
    return {
        "prompt": prompt.astype(np.int32),
        "positions": positions.astype(np.int32),
        "logits": logits[positions],
        "new": out.sequences[0, len(prompt) :].numpy().astype(np.int32),
        "new_logits": new_logits,
    }


def bfloat16_errors(folder: Path, numbers: dict[str, np.ndarray]) -> list[float]:
    """Root mean square errors of logits, in standard deviations of the exact ones."""
    prompts = [
        torch.from_numpy(numbers[f"prompt{at}"]).long()[None] for at in range(len(PROMPT_LENGTHS))
    ]
    model = open_network(folder, torch.bfloat16)
    rounded = [model(ids, use_cache=False).logits.float() for ids in prompts]
    model = model.float()
    exact = [model(ids, use_cache=False).logits for ids in prompts]
    pairs = zip(rounded, exact, strict=True)
    return [float((one - two).square().mean().sqrt() / two.std()) for one, two in pairs]


def remembered(model: Any, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """What the cache holds after the prompt."""
    out = model(torch.from_numpy(prompt)[None], use_cache=True)
    kept = {}
    for layer, state in enumerate(out.cache.layers):
        if getattr(state, "conv_states", None) is not None:
            (tail,), (memory,) = state.conv_states.values(), state.recurrent_states.values()
            # Transformers keeps one input more than the next convolution sees.
            kept[f"{layer}.conv"] = tail[0, :, 1:].T.numpy()
            kept[f"{layer}.state"] = memory[0].numpy()
        elif hasattr(model.config, "kv_lora_rank"):
            pair = (state.keys[0, 0], state.values[0, 0])  # latent, and the part that may turn
            kept[f"{layer}.latent"] = torch.cat(pair, -1).numpy()
            if hasattr(model.config, "index_topk"):
                kept[f"{layer}.index_key"] = state.indexer_keys[0].numpy()
        else:
            kept[f"{layer}.key"] = state.keys[0].swapaxes(0, 1).numpy()
            kept[f"{layer}.value"] = state.values[0].swapaxes(0, 1).numpy()
    return kept


class Nearest:
    """The smallest gap between what was chosen and what was not."""

    def __init__(self) -> None:
        self.gaps: dict[str, float] = {}

    def note(self, kind: str, logits: np.ndarray, chosen: int) -> None:
        """Logits [n, choices], of which the `chosen` largest are taken."""
        ordered = np.sort(logits, axis=-1)
        gap = float((ordered[:, -chosen] - ordered[:, -chosen - 1]).min())
        self.gaps[kind] = min(gap, self.gaps.get(kind, gap))

    def watch(self, model: Any) -> None:
        """Notes every choice of experts, and of past tokens, of a model that chooses."""

        def note_experts(router: Any, inputs: Any, _: Any) -> None:
            hidden = inputs[0].reshape(-1, router.weight.shape[1])
            bias = getattr(router, "bias", None)
            ranked = torch.nn.functional.linear(hidden, router.weight, bias)
            if hasattr(router, "e_score_correction_bias"):
                ranked = ranked.sigmoid() + router.e_score_correction_bias
                groups = ranked.reshape(len(ranked), router.num_group, -1)
                if router.num_group > router.topk_group:
                    best = groups.topk(2)[0].sum(-1)
                    self.note("expert", best.numpy(), router.topk_group)
                    worst = best.topk(router.topk_group)[0][:, -1:]
                    ranked = groups.masked_fill((best < worst)[..., None], -1e9).flatten(1)
            self.note("expert", ranked.numpy(), router.top_k)

        for name, module in model.named_modules():
            if name.endswith(("router", "mlp.gate")):
                module.register_forward_hook(note_experts)
            if name.endswith("indexer"):
                self.watch_selection(module)

    def watch_selection(self, indexer: Any) -> None:
        """Notes which past tokens are chosen; their scores are seen only where they are sorted."""
        forward, topk = indexer.forward, torch.Tensor.topk

        def note_and_choose(scores: Any, count: int, dim: int) -> Any:
            rows = scores.reshape(-1, scores.shape[-1]).clamp_min(-1e9)
            rows = rows[(rows > -1e9).sum(-1) > count]
            if len(rows):
                self.note("selected", rows.numpy(), count)
            return topk(scores, count, dim=dim)

        def watched(*inputs: Any, **settings: Any) -> Any:
            torch.Tensor.topk = note_and_choose
            try:
                return forward(*inputs, **settings)
            finally:
                torch.Tensor.topk = topk

        indexer.forward = watched

    def require(self) -> None:
        """Refuses a network whose choices hang on rounding."""
        for kind, gap in self.gaps.items():
            if gap < NEAREST[kind]:
                raise SystemExit(f"two choices of one {kind} are {gap:.1e} apart; change the seed")


def expanded_matrices() -> dict[str, np.ndarray]:
    """MXFP4 matrices that Transformers expanded, float32 of its bfloat16.

    Each scale from the smallest to the largest that float32 holds has a block with all 16 codes in
    both halves of its bytes; a second pair is random.
    """
    codes = np.arange(16, dtype=np.uint8)
    every = np.tile(codes | (codes[::-1] << 4), (1, 1, 253, 1))
    extremes = np.arange(253, dtype=np.uint8).reshape(1, 1, 253)
    rng = np.random.default_rng(0)
    random = rng.integers(0, 256, (3, 8, 2, 16), np.uint8)
    scales = rng.integers(0, 253, (3, 8, 2), np.uint8)
    found = {"every_blocks": every, "every_scales": extremes}
    found |= {"random_blocks": random, "random_scales": scales}
    for kind in ("every", "random"):
        pair = (torch.from_numpy(found[f"{kind}_{part}"]) for part in ("blocks", "scales"))
        found[kind] = convert_moe_packed_tensors(*pair).float().numpy()
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
