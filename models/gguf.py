"""Models from GGUF files: the families that are read from hub folders, under llama.cpp's names.

    metadata  ->  the fields of a config.json  ->  the family's decoder
    tensors   ->  the names and rows of a hub folder  ->  its parameters

llama.cpp turns neighbouring rows of a query or key head together where the hub turns row i with row
i + half. For the architectures that it does so for, a file holds those rows interleaved; they are
put back here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unimem_jax.errors import UsageError

from . import llama, qwen3
from .checkpoint import Loaded, ReadDecoder, read_params, require_served
from .fields import Fields
from .folder import OnTensor
from .gguf_file import GgufFile
from .gguf_text import read_text

EMBEDDING, HEAD, FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
NAMES = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": HEAD,
}
LAYER = "model.layers."
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What llama.cpp calls a family.

    Attributes:
      is_interleaved: its files hold the rows of query and key heads interleaved.
    """

    read: ReadDecoder
    is_interleaved: bool


ARCHITECTURES = {
    "llama": Architecture(llama.read_decoder, is_interleaved=True),
    "qwen3": Architecture(qwen3.read_decoder, is_interleaved=False),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a GGUF file as a `checkpoint.Checkpoint`.

    Attributes:
      interleaved: heads of the tensors whose rows are to be put back, by their name in a layer.
    """

    file: GgufFile
    interleaved: Mapping[str, int]

    def tensor(self, name: str, dtype: Any = None) -> np.ndarray:
        """One tensor by its name in a hub folder."""
        stored = gguf_name(name)
        found = self.file.tensor(stored, dtype)
        heads = self.interleaved.get(stored.split(".")[-2])
        return found if heads is None else paired_halves(found, heads)

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of this name in a hub folder."""
        return gguf_name(name) in self.file.shapes

    def require(self, expected: Mapping[str, Sequence[int]], ignored: Collection[str] = ()) -> None:
        """As `Folder.require`; names the tensors as the file does."""
        self.file.require(
            {gguf_name(name): shape for name, shape in expected.items()},
            [*map(gguf_name, ignored), FACTORS],
        )


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
) -> Loaded:  # fmt: skip
    """Loads a GGUF file.

    Args:
      dtype: of weights and activations; by default that of the stored embedding, float32 if it is
        quantised.
      token_dtype: of stored keys and values; by default `dtype`.
      on_tensor: called after each tensor, to show progress.
    Returns:
      The model, its parameters, and the file's tokenizer with its chat template.
    Raises:
      UsageError: no file, a damaged one, one of an architecture, quantisation or tokenizer that is
        not computed here, or the packages of the extra `gguf` are not installed. No tensor but its
        rotary factors has been read then.
    Cost: the bytes of the file, and one dequantised tensor beside the parameters.
    """
    if path is None:
        raise UsageError("gguf ships no weights; give a .gguf file")
    file = GgufFile(path, on_tensor)
    fields = Fields(file.metadata, str(file.path))
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UsageError(
            f"{path} is of the architecture {name!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    architecture, config = ARCHITECTURES[name], read_config(file, fields, name)
    dtype = require_served(dtype or file.dtype(EMBEDDING))
    decoder = architecture.read(Fields(config, str(file.path)), token_dtype or dtype)
    text = read_text(fields, decoder.vocab_size)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = Weights(file, heads if architecture.is_interleaved else {})
    return decoder, read_params(decoder, weights, dtype), text


def read_config(file: GgufFile, fields: Fields, name: str) -> dict[str, Any]:
    """The fields of a `config.json`, out of the metadata of architecture `name`.

    Raises:
      UsageError: a key is missing, contradicts a tensor, or asks for what is not computed here.
    """

    def key(rest: str) -> str:
        return f"{name}.{rest}"

    if fields.get("split.count", 1) != 1:
        raise fields.refusal("split.count", "1; join the files with llama-gguf-split --merge")
    if EMBEDDING not in file.shapes:
        raise UsageError(f"{file.path} holds no tensor {EMBEDDING}")
    width, heads = (fields.count(key(k)) for k in ("embedding_length", "attention.head_count"))
    fields = fields.filled(
        **{key("attention.head_count_kv"): heads, key("attention.key_length"): width // heads}
    )
    head, vocab = fields.count(key("attention.key_length")), file.shapes[EMBEDDING][0]
    computed = {
        "attention.value_length": head,
        "attention.sliding_window": 0,
        "expert_count": 0,
        "rope.dimension_count": head,
        "rope.scale_linear": 1,
        "rope.scaling.factor": 1,
        "rope.scaling.type": "none",
        "vocab_size": vocab,
    }
    fields.require(**{key(rest): value for rest, value in computed.items()})
    rotary: dict[str, Any] = {"rope_theta": fields.positive(key("rope.freq_base"), 10_000.0)}
    if FACTORS in file.shapes:
        rotary |= {"rope_type": "factors", "factors": file.tensor(FACTORS).tolist()}
    ends = [token for end in END_KEYS for token in fields.tokens(f"tokenizer.ggml.{end}")]
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": fields.count(key("feed_forward_length")),
        "num_hidden_layers": fields.count(key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count(key("attention.head_count_kv")),
        "head_dim": head,
        "max_position_embeddings": fields.count(key("context_length")),
        "rope_parameters": rotary,
        "rms_norm_eps": fields.positive(key("attention.layer_norm_rms_epsilon"), 1e-5),
        "tie_word_embeddings": HEAD not in file.shapes,
        "bos_token_id": fields.token("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)),
    }


def gguf_name(name: str) -> str:
    """What a GGUF file calls a tensor of a hub folder."""
    if not name.startswith(LAYER):
        return NAMES[name]
    layer, inside = name.removeprefix(LAYER).split(".", 1)
    stem, kind = inside.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[stem]}.{kind}"


def paired_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head, in] whose neighbours turn together, in the order in which row i of a head
    turns with row i + half.

    Source: the inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
