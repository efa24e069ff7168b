"""Llama from a Hugging Face folder: plain full attention. SmolLM2 is a Llama too.

Everything but its configuration is `decoder`'s. Sizes are those of meta-llama/Llama-3.2-1B or
HuggingFaceTB/SmolLM2-135M, among others.
"""

from pathlib import Path

from .checkpoint import Loaded, full_attention, load_folder
from .decoder import Decoder
from .fields import Fields
from .folder import OnTensor


def read_decoder(fields: Fields, token_dtype: str) -> Decoder:
    """The network that a `config.json` describes.

    Args:
      token_dtype: stored dtype of keys and values, a name from `spec.STORED_DTYPES`.
    Raises:
      UsageError: a field is missing, contradicts another, or asks for what is not computed here.
    """
    fields.require(
        attention_bias=False, mlp_bias=False, hidden_act="silu", rope_interleaved=False
    )  # fmt: skip
    width, query_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    fields = fields.filled(
        num_key_value_heads=query_heads, head_dim=width // query_heads, rope_theta=10_000.0
    )
    return full_attention(fields, token_dtype, norms_heads=False)


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
) -> Loaded:  # fmt: skip
    """Loads a Llama folder; arguments, result, errors and cost as `checkpoint.load_folder`."""
    return load_folder(path, read_decoder, dtype, token_dtype=token_dtype, on_tensor=on_tensor)
