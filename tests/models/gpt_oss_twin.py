"""A slow GPT-OSS in NumPy float64, token by token, with a tiny random network in the hub's layout.

The twin of `models/gpt_oss.py`: it follows the published description and imports nothing of ours.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 11,
    "max_position_embeddings": 256,
    "rope_theta": 100,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 2.5,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an unquantised folder."""
    width, hidden, experts = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
        "lm_head.weight": (config["vocab_size"], width),
    }
    for layer in range(config["num_hidden_layers"]):
        block = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "self_attn.sinks": (config["num_attention_heads"],),
            "mlp.router.weight": (experts, width),
            "mlp.router.bias": (experts,),
            "mlp.experts.gate_up_proj": (experts, width, 2 * hidden),
            "mlp.experts.gate_up_proj_bias": (experts, 2 * hidden),
            "mlp.experts.down_proj": (experts, hidden, width),
            "mlp.experts.down_proj_bias": (experts, width),
            "self_attn.o_proj.weight": (width, queries),
            "self_attn.o_proj.bias": (width,),
        }
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            block[f"self_attn.{name}_proj.weight"] = (size, width)
            block[f"self_attn.{name}_proj.bias"] = (size,)
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return found


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Every tensor random and large enough that leaving it out shows."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        normal = rng.normal(0, 1, shape).astype(np.float32)
        if name.endswith("norm.weight"):
            tensors[name] = np.float32(1) + np.float32(0.2) * normal
        elif name.endswith(("bias", "sinks")) or "embed" in name:
            tensors[name] = normal
        else:
            inputs = shape[1]  # experts are [in, out], the others [out, in] with in last
            tensors[name] = normal * np.float32(2 * inputs**-0.5)
    return tensors


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A Hugging Face folder with these contents."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(t) for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


class Twin:
    """The network on one sequence; keeps nothing between calls."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray]):
        self.config = config
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def run(self, ids: list[int]) -> tuple[np.ndarray, dict[tuple[int, str], np.ndarray]]:
        """Logits [n, V], and the keys and values [n, Hk, D] of every layer."""
        x = self.tensors["model.embed_tokens.weight"][ids]
        remembered = {}
        for layer in range(self.config["num_hidden_layers"]):
            x, key, value = self._attend(layer, x)
            remembered[layer, "key"], remembered[layer, "value"] = key, value
            normed = self._norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
            x = x + np.stack([self._feed(layer, token) for token in normed])
        x = self._norm(x, "model.norm.weight")
        return x @ self.tensors["lm_head.weight"].T, remembered

    def _of(self, layer: int, name: str) -> np.ndarray:
        return self.tensors[f"model.layers.{layer}.{name}"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / size * self.tensors[name]

    def _project(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        weight = self._of(layer, f"self_attn.{name}_proj.weight")
        return x @ weight.T + self._of(layer, f"self_attn.{name}_proj.bias")

    def _attend(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        config, count = self.config, len(x)
        heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
        normed = self._norm(x, f"model.layers.{layer}.input_layernorm.weight")
        query, key, value = (
            self._project(layer, name, normed).reshape(count, size, config["head_dim"])
            for name, size in (("q", heads), ("k", key_heads), ("v", key_heads))
        )
        query, key = self._turn(query), self._turn(key)
        sinks = self._of(layer, "self_attn.sinks")
        is_windowed = config["layer_types"][layer] == "sliding_attention"
        mixed = np.zeros_like(query)
        for at in range(count):
            first = max(0, at - config["sliding_window"] + 1) if is_windowed else 0
            for head in range(heads):
                own = head // (heads // key_heads)
                scores = key[first : at + 1, own] @ query[at, head] / math.sqrt(config["head_dim"])
                top = max(scores.max(), sinks[head])
                weights = np.exp(scores - top)
                total = weights.sum() + np.exp(sinks[head] - top)
                mixed[at, head] = weights / total @ value[first : at + 1, own]
        return x + self._project(layer, "o", mixed.reshape(count, -1)), key, value

    def _turn(self, x: np.ndarray) -> np.ndarray:
        scaling, theta = self.config["rope_scaling"], self.config["rope_theta"]
        head, factor = self.config["head_dim"], scaling["factor"]
        trained = scaling["original_max_position_embeddings"]
        edges = [
            head * math.log(trained / beta / (2 * math.pi)) / (2 * math.log(theta))
            for beta in (scaling["beta_fast"], scaling["beta_slow"])
        ]
        low, high = max(edges[0], 0), min(edges[1], head - 1)
        scale = 0.1 * math.log(factor) + 1
        turned = np.empty_like(x)
        for pair in range(head // 2):
            frequency = theta ** (-2 * pair / head)
            slow = min(max((pair - low) / (high - low), 0), 1)
            frequency = slow * frequency / factor + (1 - slow) * frequency
            for at in range(len(x)):
                spin = scale * np.exp(1j * at * frequency)
                turned_pair = (x[at, :, pair] + 1j * x[at, :, pair + head // 2]) * spin
                turned[at, :, pair], turned[at, :, pair + head // 2] = (
                    turned_pair.real,
                    turned_pair.imag,
                )
        return turned

    def _feed(self, layer: int, token: np.ndarray) -> np.ndarray:
        limit = self.config["swiglu_limit"]
        scores = self._of(layer, "mlp.router.weight") @ token + self._of(layer, "mlp.router.bias")
        chosen = sorted(range(len(scores)), key=lambda one: -scores[one])
        chosen = chosen[: self.config["num_experts_per_tok"]]
        chances = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
        total = np.zeros_like(token)
        for expert, chance in zip(chosen, chances, strict=True):
            both = token @ self._of(layer, "mlp.experts.gate_up_proj")[expert]
            both = both + self._of(layer, "mlp.experts.gate_up_proj_bias")[expert]
            hidden = np.empty(len(both) // 2)
            for at in range(len(hidden)):
                gate = min(both[2 * at], limit)
                up = min(max(both[2 * at + 1], -limit), limit)
                hidden[at] = (up + 1) * gate / (1 + math.exp(-1.702 * gate))
            down = hidden @ self._of(layer, "mlp.experts.down_proj")[expert]
            total += chance * (down + self._of(layer, "mlp.experts.down_proj_bias")[expert])
        return total
