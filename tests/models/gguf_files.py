"""Tiny GGUF files, written from a network in the hub's layout as llama.cpp's converter does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.qwen_twin import LLAMA, QWEN3

gguf = pytest.importorskip("gguf", reason="of the extra `gguf`")
tokenizers = pytest.importorskip("tokenizers", reason="of the extra `gguf`")

CONTROL = ["<|end|>", "<|start|>", "<|turn|>"]
USER_DEFINED = "<think>"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TRAINED_ON = ["In the beginning was the word, grün 🌍🌎 über alles 日本語 don't 12345 ☃"] * 4


def byte_level() -> Any:
    """Merges over bytes, cut as GPT-2 does."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[*CONTROL, USER_DEFINED], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    found.train_from_iterator(TRAINED_ON, trainer)
    return found


TOKENIZER = byte_level()
VOCABULARY = TOKENIZER.get_vocab_size()
# Every matrix has rows of whole blocks of 32.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8,
    "head_dim": 8, "eos_token_id": 0,
}  # fmt: skip
GGUF_LLAMA = LLAMA | SIZES
GGUF_QWEN3 = QWEN3 | SIZES | {"rope_scaling": None}

LAST_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "embed_tokens": "token_embd", "norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip
INTERLEAVED = {
    "self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads",
}  # fmt: skip


def converted(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Tensors by llama.cpp's names, with the rows of Llama's query and key heads interleaved."""
    found = {}
    for name, tensor in tensors.items():
        stem = name.removeprefix("model.").removesuffix(".weight")
        block = ""
        if stem.startswith("layers."):
            _, layer, stem = stem.split(".", 2)
            block = f"blk.{layer}."
        if config["model_type"] == "llama" and stem in INTERLEAVED:
            halves = tensor.reshape(config[INTERLEAVED[stem]], 2, -1, tensor.shape[1])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        found[f"{block}{LAST_NAMES[stem]}.weight"] = np.ascontiguousarray(tensor)
    return found


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys and values that describe a network and `TOKENIZER`."""
    name, model = config["model_type"], json.loads(TOKENIZER.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3 if token in CONTROL else 4 if token == USER_DEFINED else 1 for token in tokens]
    return {
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config["head_dim"],
        f"{name}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{name}.rope.freq_base": float(config["rope_theta"]),
        f"{name}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *,
    changed: Mapping[str, Any] | None = None, kind: str = "F32", name: str | None = None,
    beside: Mapping[str, np.ndarray] | None = None, least_axes: int = 2,
) -> Path:  # fmt: skip
    """Writes a file.

    Args:
      changed: metadata to replace, or to leave out where None.
      kind: how tensors of at least `least_axes` axes are stored; others are float32.
      name: of the architecture, by default that of the configuration.
      beside: more tensors, by llama.cpp's names.
    """
    writer = gguf.GGUFWriter(path, name or config["model_type"])
    for key, value in (metadata(config) | dict(changed or {})).items():
        if value is not None:
            add(writer, key, value)
    stored = gguf.GGMLQuantizationType[kind]
    for tensor_name, tensor in (converted(config, tensors) | dict(beside or {})).items():
        if tensor.ndim < least_axes or kind == "F32":
            writer.add_tensor(tensor_name, tensor)
        elif kind == "Q8_1":  # a type that is known, but that nobody stores
            rows = np.zeros((len(tensor), tensor.shape[1] // 32 * 40), np.uint8)
            writer.add_tensor(tensor_name, rows, raw_dtype=stored)
        else:
            writer.add_tensor(tensor_name, gguf.quants.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}
    kinds |= {list: "add_array"}
    getattr(writer, kinds[type(value)])(key, value)
