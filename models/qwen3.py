"""Qwen3 (dense) from a Hugging Face folder: full attention with normalised queries and keys.

Everything but its configuration is `decoder`'s. Sizes are those of Qwen/Qwen3-0.6B to -32B.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax import Array

from unimem_jax.errors import UsageError
from unimem_jax.spec import Site

from .decoder import EMBEDDING, Attention, Decoder, Norm, Sizes, read_params
from .fields import Fields
from .folder import Folder, OnTensor
from .hub_text import HubText, read_text

FULL = "full_attention"


def read_decoder(config: Mapping[str, Any], token_dtype: str) -> Decoder:
    """The network that a `config.json` describes.

    Args:
      token_dtype: stored dtype of keys and values, a name from `spec.STORED_DTYPES`.
    Raises:
      UsageError: a field is missing, contradicts another, or asks for what is not computed here.
    """
    fields = Fields(config)
    fields.require(attention_bias=False, hidden_act="silu", use_sliding_window=False)
    fields.layer_kinds((FULL,))
    heads, width = fields.attention_heads(), fields.count("hidden_size")
    rotary, norm = fields.rotary(heads[2]), Norm(fields.positive("rms_norm_eps", 1e-6))
    mixers = [
        Attention(Site(layer), width, heads, rotary, norm, token_dtype)
        for layer in range(fields.count("num_hidden_layers"))
    ]
    return Decoder(read_sizes(fields), mixers, norm)


def read_sizes(fields: Fields, *, is_tied: bool | None = None) -> Sizes:
    """What surrounds the mixers.

    Args:
      is_tied: goes before the field, if given.
    """
    return Sizes(
        vocab=fields.count("vocab_size"),
        width=fields.count("hidden_size"),
        hidden=fields.count("intermediate_size"),
        context_tokens=fields.count("max_position_embeddings"),
        is_tied=fields.flag("tie_word_embeddings") if is_tied is None else is_tied,
        start_token=fields.token("bos_token_id"),
        end_token=fields.token("eos_token_id"),
    )


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
) -> tuple[Decoder, dict[str, Array], HubText | None]:  # fmt: skip
    """Loads a Qwen3 folder.

    Args:
      path: of the folder; this family ships no weights of its own.
      dtype: of weights and activations; by default that of the stored embedding.
      token_dtype: of stored keys and values; by default `dtype`.
      on_tensor: called after each tensor, to show progress.
    Returns:
      The model, its parameters, and its tokenizer where there is one that can be read.
    Raises:
      UsageError: no folder, a damaged one, or one that asks for what is not computed here.
    Cost: the bytes of the weights, read once.
    """
    if path is None:
        raise UsageError("qwen3 ships no weights; give a folder with config.json and safetensors")
    folder = Folder(path, on_tensor)
    folder.require_unquantised()
    dtype = dtype or folder.dtype(EMBEDDING)
    decoder = read_decoder(folder.config, token_dtype or dtype)
    text = read_text(folder.path, decoder.vocab_size)
    return decoder, read_params(decoder, folder, dtype, ignored=()), text
