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

from .decoder import EMBEDDING, HEAD, Attention, Decoder, Feed, FeedForward, Norm, Shapes, Sizes
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

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def require(self, expected: Mapping[str, Sequence[int]], ignored: Collection[str] = ()) -> None:
        """Raises UsageError unless it holds tensors of exactly these names and shapes."""
        ...


def read_sizes(
    fields: Fields, *, is_tied: bool | None = None, context: str = "max_position_embeddings"
) -> Sizes:
    """What surrounds the layers of a decoder.

    Args:
      is_tied: goes before the field, if given.
      context: the field that has the longest sequence.
    """
    return Sizes(
        vocab=fields.count("vocab_size"),
        width=fields.count("hidden_size"),
        context_tokens=fields.count(context),
        is_tied=fields.flag("tie_word_embeddings") if is_tied is None else is_tied,
        start_token=fields.token("bos_token_id"),
        end_tokens=fields.tokens("eos_token_id"),
    )


def dense_feed(fields: Fields, layer: int) -> FeedForward:
    """The feed-forward of any layer of a network without experts."""
    return Feed(fields.count("hidden_size"), fields.count("intermediate_size"))


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
    blocks = [(mixer, dense_feed(fields, layer)) for layer, mixer in enumerate(mixers)]
    return Decoder(read_sizes(fields), blocks, norm)


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
    shapes, stored = decoder.shapes(), {}
    for name, ways in decoder.forms().items():
        found = [{_stored_name(n, start): shape for n, shape in way.items()} for way in ways]
        # The one of which most is there: what is missing of it is then named.
        stored[name] = max(found, key=lambda way: sum(map(checkpoint.holds, way)) / len(way))
    # A file may hold the tied head once more.
    unread = [*ignored, HEAD] if decoder.sizes.is_tied else ignored
    checkpoint.require({n: shape for way in stored.values() for n, shape in way.items()}, unread)
    # The largest comes first, while little else is held.
    return {
        name: _placed(_joined(checkpoint, stored[name], shape, dtype))
        for name, shape in sorted(shapes.items(), key=lambda one: -math.prod(one[1]))
    }


def require_served(dtype: str) -> str:
    """The dtype, or UsageError if weights are not held in it."""
    if dtype not in SERVED_DTYPES:
        raise UsageError(f"weights are {', '.join(SERVED_DTYPES)}, not {dtype!r}")
    return dtype


def _stored_name(name: str, start: str) -> str:
    return start + name.removeprefix("model.") if name.startswith("model.") else name


def _joined(
    checkpoint: Checkpoint, tensors: Shapes, shape: tuple[int, ...], dtype: str
) -> np.ndarray:
    """A parameter of this shape out of its tensors, one behind the other."""
    dtype = "float32" if len(shape) == 1 else dtype
    if len(tensors) == 1:
        (name,) = tensors
        found = checkpoint.tensor(name, dtype)
        return found if found.shape == shape else found.reshape(shape)
    joined = np.empty(shape, np.dtype(dtype))
    flat, at = joined.reshape(-1), 0
    for name in tensors:
        piece = checkpoint.tensor(name, dtype)
        flat[at : at + piece.size] = piece.reshape(-1)
        at += piece.size
    return joined


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
