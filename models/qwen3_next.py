"""Qwen3-Next from a Hugging Face folder: gated DeltaNet with attention between, and experts.

As Qwen3.5's mixtures, but for how a DeltaNet's inputs are stored: two matrices whose rows go by key
head, each with what belongs to it.

    in_proj_qkvz x  =  per key head: query, key, values of its r heads, gates of its r heads
    in_proj_ba x    =  per key head: strengths of its r heads, rates of its r heads

The published sizes are those of Qwen3-Next-80B-A3B.
"""

from functools import partial
from pathlib import Path

import jax.numpy as jnp
from jax import Array

from . import qwen3_5
from .checkpoint import Loaded, dense_feed, load_folder
from .decoder import FeedForward, Matrix, split_heads
from .fields import Fields
from .folder import OnTensor
from .sparse import read_gated_shared


class FusedDeltaNet(qwen3_5.DeltaNet):
    """Gated DeltaNet whose input matrices are stored by key head."""

    def declare_inputs(self, width: int) -> None:
        """As `DeltaNet.declare_inputs`."""
        self.in_proj_qkvz = Matrix(self.channels + self.values, width)
        self.in_proj_ba = Matrix(2 * self.heads[1], width)

    def inputs(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """As `DeltaNet.inputs`."""
        key_heads, key_size = self.heads[0], self.sizes[0]
        values = self.values // key_heads
        bounds = [key_size, 2 * key_size, 2 * key_size + values]
        mixed = jnp.split(split_heads(self.in_proj_qkvz(x), key_heads), bounds, axis=-1)
        *inputs, gate = (part.reshape(*x.shape[:2], -1) for part in mixed)
        gates = jnp.split(split_heads(self.in_proj_ba(x), key_heads), 2, axis=-1)
        strength, rate = (part.reshape(*x.shape[:2], -1) for part in gates)
        return jnp.concatenate(inputs, axis=-1), gate, rate, strength


def read_feed(fields: Fields, layer: int) -> FeedForward:
    """Experts in every `decoder_sparse_step`-th layer, but for those that are listed as dense.

    Raises:
      UsageError: as `read_gated_shared`, or the list is none of layers.
    """
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(one, int) for one in dense):
        raise fields.refusal("mlp_only_layers", "a list of layers")
    step = fields.filled(decoder_sparse_step=1).count("decoder_sparse_step")
    is_dense = layer in dense or (layer + 1) % step
    return dense_feed(fields, layer) if is_dense else read_gated_shared(fields, layer)


read_decoder = partial(qwen3_5.read_decoder, feed=read_feed, delta_net=FusedDeltaNet)


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
) -> Loaded:  # fmt: skip
    """Loads a folder; arguments, result, errors and cost as `checkpoint.load_folder`."""
    return load_folder(
        path, read_decoder, dtype, token_dtype=token_dtype, on_tensor=on_tensor, ignored=("mtp.",)
    )
