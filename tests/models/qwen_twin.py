"""Slow Qwen3, Qwen3.5 and Llama in NumPy float64, token by token, with tiny random networks in
the hub's layout.

The twin of `models/qwen3.py`, `models/qwen3_5.py`, `models/llama.py` and `models/decoder.py`: it
follows the published descriptions and imports nothing of ours.
"""

import math
from typing import Any

import numpy as np

from tests.models.recurrence import convolve, recur

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 100,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "eos_token_id": [7, 9],
}
LLAMA: dict[str, Any] = {
    **{name: value for name, value in QWEN3.items() if name != "use_sliding_window"},
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "eos_token_id": 7,
}
QWEN3_5: dict[str, Any] = {
    **{name: value for name, value in QWEN3.items() if name not in ("rope_theta", "architectures")},
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 100, "partial_rotary_factor": 0.5,
        "mrope_interleaved": True, "mrope_section": [1, 1, 0],
    },
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 5,
}  # fmt: skip


def kinds(config: dict[str, Any]) -> list[str]:
    return config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]


def is_newer(config: dict[str, Any]) -> bool:
    return config["model_type"] not in ("qwen3", "llama")


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a folder."""
    width, hidden, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], width)
    for layer, kind in enumerate(kinds(config)):
        block = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "mlp.gate_proj.weight": (hidden, width),
            "mlp.up_proj.weight": (hidden, width),
            "mlp.down_proj.weight": (width, hidden),
        }
        if kind == "full_attention":
            block |= {
                "self_attn.q_proj.weight": (queries * (2 if is_newer(config) else 1), width),
                "self_attn.k_proj.weight": (keys, width),
                "self_attn.v_proj.weight": (keys, width),
                "self_attn.o_proj.weight": (width, queries),
            }
            if config["model_type"] != "llama":
                block |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        else:
            block |= {f"linear_attn.{name}": shape for name, shape in delta_shapes(config).items()}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return found


def delta_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, width = config["linear_num_value_heads"], config["hidden_size"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    return {
        "in_proj_qkv.weight": (2 * keys + values, width),
        "in_proj_z.weight": (values, width),
        "in_proj_a.weight": (heads, width),
        "in_proj_b.weight": (heads, width),
        "conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config["linear_value_head_dim"],),
        "out_proj.weight": (width, values),
    }


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Every tensor random and large enough that leaving it out shows."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        normal = rng.normal(0, 1, shape)
        is_centred = is_newer(config) and "linear_attn.norm" not in name
        if "norm" in name:
            normal = normal * 0.2 + (0 if is_centred else 1)
        elif len(shape) > 1 and "embed" not in name:
            normal = normal * (1.5 * math.prod(shape[1:]) ** -0.5)
        tensors[name] = normal.astype(np.float32)
    return tensors


class Twin:
    """A network on one sequence; keeps nothing between calls."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray]):
        self.config = config
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def run(self, ids: list[int]) -> tuple[np.ndarray, dict[tuple[int, str], np.ndarray]]:
        """Logits [n, V]; keys and values [n, Hk, D], tails [K - 1, C] and states of the layers."""
        x = self.tensors["model.embed_tokens.weight"][ids]
        kept: dict[tuple[int, str], np.ndarray] = {}
        for layer, kind in enumerate(kinds(self.config)):
            normed = self._norm(x, f"model.layers.{layer}.input_layernorm.weight")
            mix = self._attend if kind == "full_attention" else self._recur
            added, remembered = mix(layer, normed)
            kept |= {(layer, name): value for name, value in remembered.items()}
            x = x + added
            normed = self._norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
            gate, up = (normed @ self._of(layer, f"mlp.{n}_proj.weight").T for n in ("gate", "up"))
            x = x + (silu(gate) * up) @ self._of(layer, "mlp.down_proj.weight").T
        x = self._norm(x, "model.norm.weight")
        head = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return x @ self.tensors[f"{head}.weight"].T, kept

    def _of(self, layer: int, name: str) -> np.ndarray:
        return self.tensors[f"model.layers.{layer}.{name}"]

    def _norm(self, x: np.ndarray, name: str, plain: bool = False) -> np.ndarray:
        size = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        shift = 0 if plain or not is_newer(self.config) else 1
        return x / size * (shift + self.tensors[name])

    def _attend(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        count, head = len(x), self.config["head_dim"]
        heads, key_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        query, key, value = (
            (x @ self._of(layer, f"self_attn.{name}_proj.weight").T).reshape(count, size, -1)
            for name, size in (("q", heads), ("k", key_heads), ("v", key_heads))
        )
        weigh = np.ones(query[..., :head].shape)
        if is_newer(self.config):
            weigh = sigmoid(query[..., head:])
        query = query[..., :head]
        if self.config["model_type"] != "llama":
            start = f"model.layers.{layer}.self_attn."
            query = self._norm(query, f"{start}q_norm.weight")
            key = self._norm(key, f"{start}k_norm.weight")
        query, key = self._turn(query), self._turn(key)
        mixed = np.zeros((count, heads, head))
        for at, one in np.ndindex(count, heads):
            own = one // (heads // key_heads)
            scores = np.exp(key[: at + 1, own] @ query[at, one] / math.sqrt(head))
            mixed[at, one] = scores / scores.sum() @ value[: at + 1, own]
        added = (mixed * weigh).reshape(count, -1) @ self._of(layer, "self_attn.o_proj.weight").T
        return added, {"key": key, "value": value}

    def _turn(self, x: np.ndarray) -> np.ndarray:
        newer = self.config.get("rope_parameters")
        theta = newer["rope_theta"] if newer else self.config["rope_theta"]
        channels = int(x.shape[-1] * (newer["partial_rotary_factor"] if newer else 1))
        half, turned = channels // 2, x.copy()
        for at, pair in np.ndindex(len(x), half):
            spin = np.exp(1j * at * self.slowed(theta ** (-2 * pair / channels)))
            both = (x[at, :, pair] + 1j * x[at, :, pair + half]) * spin
            turned[at, :, pair], turned[at, :, pair + half] = both.real, both.imag
        return turned

    def slowed(self, rate: float) -> float:
        """As Llama 3 does: by waves within the context of training."""
        settings = self.config.get("rope_scaling")
        if not settings:
            return rate
        waves = settings["original_max_position_embeddings"] * rate / (2 * math.pi)
        few, many = settings["low_freq_factor"], settings["high_freq_factor"]
        if waves < few:
            return rate / settings["factor"]
        if waves > many:
            return rate
        share = (waves - few) / (many - few)
        return (1 - share) * rate / settings["factor"] + share * rate

    def _recur(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        config, count = self.config, len(x)
        key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size, taps = config["linear_key_head_dim"], config["linear_conv_kernel_dim"]
        inputs = x @ self._of(layer, "linear_attn.in_proj_qkv.weight").T
        mixed = silu(convolve(inputs, self._of(layer, "linear_attn.conv1d.weight")[:, 0].T))
        query, key, value = np.split(mixed, [key_heads * size, 2 * key_heads * size], axis=1)
        own = np.arange(heads) // (heads // key_heads)
        query, key = (length_one(part.reshape(count, key_heads, size)) for part in (query, key))
        rate = x @ self._of(layer, "linear_attn.in_proj_a.weight").T
        rate = np.log1p(np.exp(rate + self._of(layer, "linear_attn.dt_bias")))
        tokens = (
            query[:, own] / math.sqrt(size), key[:, own], value.reshape(count, heads, -1),
            -np.exp(self._of(layer, "linear_attn.A_log")) * rate,
            sigmoid(x @ self._of(layer, "linear_attn.in_proj_b.weight").T),
        )  # fmt: skip
        start = np.zeros((1, heads, size, config["linear_value_head_dim"]))
        read, state = recur(tuple(part[None] for part in tokens), start)
        name = f"model.layers.{layer}.linear_attn.norm.weight"
        read = self._norm(read[0], name, plain=True).reshape(count, -1)
        read = read * silu(x @ self._of(layer, "linear_attn.in_proj_z.weight").T)
        tail = np.concatenate([np.zeros((taps - 1, inputs.shape[1])), inputs])[-(taps - 1) :]
        added = read @ self._of(layer, "linear_attn.out_proj.weight").T
        return added, {"conv": tail, "state": state[0]}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def length_one(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)
