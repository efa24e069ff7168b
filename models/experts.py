"""Mixtures of experts: a router's choice, and each expert on the tokens that chose it.

Assignments (a token and one of its experts) are sorted by expert and cut into blocks of a few rows
that share an expert. A loop runs over the blocks that exist, so each expert that was chosen is read
about once and the others not at all.

    expert   0 0 0 2 2 2 2 2 7     ->   blocks of 4   [0 0 0 -] [2 2 2 2] [2 - - -] [7 - - -]

X1  What a token gets does not depend on the tokens beside it, up to rounding.
X2  An expert number past the last means no expert: padding costs nothing and gets zeros.

The loop's length depends on values, so it has no reverse derivative: this is for inference. On two
CPU cores, 16 tokens through 4 of 32 experts of 512 x 1024 take about 8 ms; gathering each token's
weights takes 160, all experts on all tokens 45, and `jax.lax.ragged_dot`, which there multiplies
every row with every expert, 170.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

LARGEST_BLOCK = 32  # rows; larger ones gain nothing on a CPU and pad more
TOTAL_EPSILON = 1e-20  # of weights in proportion, as in the reference


def choose_experts(
    logits: Float[Array, "tokens experts"], count: int
) -> tuple[Int32[Array, "tokens chosen"], Float[Array, "tokens chosen"]]:
    """The `count` experts of the largest logits, and the softmax over those logits, float32.

    Cost: sorts one row of logits per token.
    """
    largest, chosen = lax.top_k(logits.astype(jnp.float32), count)
    return chosen.astype(jnp.int32), jax.nn.softmax(largest, axis=-1)


def choose_by_sigmoid(
    logits: Float[Array, "tokens experts"],
    correction: Float[Array, " experts"],
    count: int,
    *,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
) -> tuple[Int32[Array, "tokens chosen"], Float[Array, "tokens chosen"]]:
    """The `count` experts of the largest sigmoid plus correction, and their sigmoids in proportion.

    Args:
      correction: per expert; only the choice sees it.
      groups: into how many equal groups experts fall, and how many of them a token may choose from:
        those whose two best experts have the largest sum.
      scale: what the weights of a token add up to.
    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2, without auxiliary losses.
    """
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    ranked = scores + correction.astype(jnp.float32)[None, :]
    if groups[0] > groups[1]:
        by_group = ranked.reshape(ranked.shape[0], groups[0], -1)
        best = lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(axis=-1)
        _, allowed = lax.top_k(best, groups[1])
        is_allowed = (allowed[:, :, None] == jnp.arange(groups[0])[None, None, :]).any(axis=1)
        by_group = jnp.where(is_allowed[:, :, None], by_group, -jnp.inf)
        ranked = by_group.reshape(ranked.shape)
    _, chosen = lax.top_k(ranked, count)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    total = jnp.sum(weights, axis=-1, keepdims=True) + TOTAL_EPSILON
    return chosen.astype(jnp.int32), weights / total * scale


def mix_experts(
    x: Float[Array, "tokens width"],
    chosen: Int32[Array, "tokens chosen"],
    weights: Float[Array, "tokens chosen"],
    expert: Callable[[Array, Array], Array],
    *,
    expert_count: int,
) -> Float[Array, "tokens out"]:
    """Weighted sum, in float32, of what each token's chosen experts make of it.

    Args:
      x: input of each token.
      chosen: experts of each token, no one twice; `expert_count` or more means none (X2).
      weights: of the chosen experts.
      expert: (int32[] expert, [rows, width]) -> [rows, out], row by row.
    Cost: with N * k assignments to U different experts, at most N * k + U * (block - 1) rows go
      through experts, where block is about N * k / E and at most 32.
    """
    count = chosen.shape[1]
    experts, assignments, used = _blocks(chosen, expert_count)
    flat_weights = weights.astype(jnp.float32).reshape(-1)

    def add_block(block: Array, mixed: Array) -> Array:
        assigned = assignments[block]
        tokens = assigned // count
        found = expert(experts[block], x.at[tokens].get(mode="clip")).astype(jnp.float32)
        found = found * flat_weights.at[assigned].get(mode="clip")[:, None]
        return mixed.at[tokens].add(found, mode="drop")

    out = jax.eval_shape(expert, experts[0], x[:1]).shape[1]
    return lax.fori_loop(0, used, add_block, jnp.zeros((x.shape[0], out), jnp.float32))


def _blocks(chosen: Array, expert_count: int) -> tuple[Array, Array, Array]:
    """int32[B] expert and int32[B, rows] assignments of each block; how many blocks there are.

    Assignment a is choice a % k of token a // k; one past the last fills up a block.
    """
    total = chosen.size
    rows = 1
    while rows < min(LARGEST_BLOCK, total / expert_count):
        rows *= 2
    flat = jnp.minimum(chosen.reshape(-1), expert_count)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.zeros((expert_count,), jnp.int32).at[flat].add(1, mode="drop")
    block_counts = (sizes + (rows - 1)) // rows
    ends, block_ends = jnp.cumsum(sizes), jnp.cumsum(block_counts)

    blocks = jnp.arange(min(total, total // rows + expert_count), dtype=jnp.int32)
    experts = jnp.searchsorted(block_ends, blocks, side="right").astype(jnp.int32)
    experts = jnp.minimum(experts, expert_count - 1)
    first = blocks - (block_ends - block_counts)[experts]  # number of the block within its expert
    at = (ends - sizes)[experts] + first * rows
    at = at[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
    is_filled = at < ends[experts][:, None]
    assignments = jnp.where(is_filled, order.at[at].get(mode="clip"), total)
    return experts, assignments, block_ends[-1]
