"""Qwen3 (dense) from a Hugging Face folder: full attention with normalised queries and keys.

Everything but its configuration is `checkpoint`'s. Sizes are those of Qwen/Qwen3-0.6B to -32B.
"""

from pathlib import Path

from .checkpoint import Loaded, full_attention, load_folder
from .decoder import Decoder
from .fields import Fields
from .folder import OnTensor

FULL = "full_attention"


def read_decoder(fields: Fields, token_dtype: str) -> Decoder:
    """The network that a `config.json` describes.

    Args:
      token_dtype: stored dtype of keys and values, a name from `spec.STORED_DTYPES`.
    Raises:
      UsageError: a field is missing, contradicts another, or asks for what is not computed here.
    """
    fields.require(attention_bias=False, hidden_act="silu", use_sliding_window=False)
    fields.layer_kinds((FULL,))
    return full_attention(fields, token_dtype, norms_heads=True)


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
) -> Loaded:  # fmt: skip
    """Loads a Qwen3 folder; arguments, result, errors and cost as `checkpoint.load_folder`."""
    return load_folder(path, read_decoder, dtype, token_dtype=token_dtype, on_tensor=on_tensor)
