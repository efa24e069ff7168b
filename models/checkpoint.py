"""From a checkpoint to a decoder and its parameters, whatever the checkpoint is stored as.

A family says how it reads a configuration; everything after that is the same for all of them.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from unimem_jax.errors import UsageError
from unimem_jax.spec import Site

from .decoder import EMBEDDING, HEAD, Attention, Decoder, Norm, Sizes
from .fields import Fields
from .folder import Folder, OnTensor, read_object
from .hub_text import HubText, read_text

SERVED_DTYPES = ("float32", "bfloat16", "float16")
GENERATION = "generation_config.json"

type Loaded = tuple[Decoder, dict[str, Array], HubText | None]

# Gives the network that a configuration describes, given the stored dtype of keys and values.
type ReadDecoder = Callable[[Fields, str], Decoder]


class Checkpoint(Protocol):
    """Tensors by the names of a hub folder; see `Folder`, which is one."""

    def tensor(self, name: str, dtype: Any = None) -> np.ndarray:
        """One tensor, converted to `dtype` if given."""
        ...

    def require(self, expected: Mapping[str, Sequence[int]], ignored: Collection[str] = ()) -> None:
        """Raises UsageError unless it holds tensors of exactly these names and shapes."""
        ...


def read_sizes(fields: Fields, *, is_tied: bool | None = None) -> Sizes:
    """What surrounds the mixers of a decoder.

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
        end_tokens=fields.tokens("eos_token_id"),
    )


def full_attention(fields: Fields, token_dtype: str, *, norms_heads: bool) -> Decoder:
    """A decoder whose every layer attends over the whole context.

    Args:
      norms_heads: whether queries and keys are normalised, head by head, before they turn.
    """
    width, heads = fields.count("hidden_size"), fields.attention_heads()
    norm = partial(Norm, epsilon=fields.positive("rms_norm_eps", 1e-6))
    rotary, of_heads = fields.rotary(heads[2]), norm if norms_heads else None
    mixers = [
        Attention(Site(layer), width, heads, rotary=rotary, token_dtype=token_dtype, norm=of_heads)
        for layer in range(fields.layers())
    ]
    return Decoder(read_sizes(fields), mixers, norm)


def load_folder(
    path: str | Path | None, read: ReadDecoder, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
    nested: str = "model.", ignored: Collection[str] = (),
) -> Loaded:  # fmt: skip
    """Loads a hub folder.

    Args:
      path: of the folder; a family ships no weights of its own.
      dtype: of weights and activations; by default that of the stored embedding.
      token_dtype: of stored keys and values; by default `dtype`.
      on_tensor: called after each tensor, to show progress.
      nested: what some folders have where `Decoder.shapes` has "model.".
      ignored: as for `Folder.require`.
    Returns:
      The model, its parameters, and its tokenizer where there is one that can be read.
    Raises:
      UsageError: no folder, a damaged one, or one that asks for what is not computed here.
    Cost: the bytes of the weights, read once.
    """
    if path is None:
        raise UsageError("this family ships no weights; give a folder with config.json and weights")
    folder = Folder(path, on_tensor)
    folder.require_unquantised()
    start = nested if any(name.startswith(nested) for name in folder.names) else "model."
    dtype = require_served(dtype or folder.dtype(start + EMBEDDING.removeprefix("model.")))
    decoder = read(Fields(folder.config), token_dtype or dtype)
    decoder.end_tokens = all_ends(folder, decoder.end_tokens)
    text = read_text(folder.path, decoder.vocab_size)
    return decoder, read_params(decoder, folder, dtype, start=start, ignored=ignored), text


def read_params(
    decoder: Decoder, checkpoint: Checkpoint, dtype: str, *,
    start: str = "model.", ignored: Collection[str] = (),
) -> dict[str, Array]:  # fmt: skip
    """The parameters of a decoder, one tensor at a time.

    Args:
      dtype: of matrices, one of `SERVED_DTYPES`.
      start: what the checkpoint's names have where `Decoder.shapes` has "model.".
      ignored: as for `Folder.require`.
    Raises:
      UsageError: a tensor that is missing, extra, misshapen or quantised.
    Cost: the bytes of all tensors, and of the largest once more where it is converted.
    """
    shapes = decoder.shapes()
    stored = {
        name: start + name.removeprefix("model.") if name.startswith("model.") else name
        for name in shapes
    }
    # A file may hold the tied head once more.
    unread = [*ignored, HEAD] if decoder.sizes.is_tied else ignored
    checkpoint.require({stored[name]: shape for name, shape in shapes.items()}, unread)
    # The largest comes first, while little else is held.
    return {
        name: _placed(checkpoint.tensor(stored[name], "float32" if len(shape) == 1 else dtype))
        for name, shape in sorted(shapes.items(), key=lambda one: -math.prod(one[1]))
    }


def require_served(dtype: str) -> str:
    """The dtype, or UsageError if weights are not held in it."""
    if dtype not in SERVED_DTYPES:
        raise UsageError(f"weights are {', '.join(SERVED_DTYPES)}, not {dtype!r}")
    return dtype


def _placed(tensor: np.ndarray) -> Array:
    """On the device; a view of a file is copied, since the file may change once it is loaded."""
    return jax.device_put(tensor) if tensor.flags.owndata else jnp.array(tensor)


def all_ends(folder: Folder, configured: Sequence[int]) -> tuple[int, ...]:
    """The end tokens of a configuration, and those that only the settings for generation name.

    Raises:
      UsageError: the folder has such settings, but they cannot be read.
    """
    file = folder.path / GENERATION
    more = Fields(read_object(file), GENERATION).tokens("eos_token_id") if file.exists() else ()
    return tuple(dict.fromkeys((*configured, *more)))
