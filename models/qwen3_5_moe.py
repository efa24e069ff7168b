"""Qwen3.5 mixtures of experts (text) from a Hugging Face folder: Qwen3.5's layers, sparse.

Every layer has routed experts and a shared one that weighs itself. Folders hold the experts one by
one, or all of a layer together; both are read. The published sizes are those of Qwen3.5-35B-A3B.
"""

from functools import partial
from pathlib import Path

from . import qwen3_5
from .checkpoint import Loaded, load_folder
from .folder import OnTensor
from .sparse import read_gated_shared

read_decoder = partial(qwen3_5.read_decoder, feed=read_gated_shared)


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
) -> Loaded:  # fmt: skip
    """Loads a folder; arguments, result, errors and cost as `checkpoint.load_folder`."""
    return load_folder(
        path, read_decoder, dtype, token_dtype=token_dtype, on_tensor=on_tensor,
        nested=qwen3_5.NESTED, ignored=qwen3_5.UNREAD,
    )  # fmt: skip
