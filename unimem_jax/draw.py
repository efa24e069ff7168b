"""Draws the next token from logits, on the device.

Each row's randomness comes from its own seed and the position of the token to be drawn, so
neighbours, padding, chunks and restarts change nothing. Filters apply in the usual order:
temperature, top-k, top-p, min-p.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

GREEDY_TEMPERATURE = 1e-5  # at or below this a draw is the most likely token


def draw(
    logits: Float[Array, "rows vocabulary"],
    options: Int32[Array, "rows 5"],
    positions: Int32[Array, " rows"],
) -> Int32[Array, " rows"]:
    """Draws one token per row.

    Args:
      logits: float32.
      options: per row temperature, top_p, min_p as float32 bits, then top_k (0: all) and seed.
      positions: position, in its request, of the token to be drawn.
    Returns:
      The most likely token (lowest id among equals) where the temperature is 0.
    Cost: one sort of the vocabulary if any row is not greedy.
    Source: nucleus sampling, Holtzman et al. 2020 (arXiv:1904.09751); min-p, Nguyen et al. 2024
    (arXiv:2407.01082);
      the Gumbel-max form of a categorical draw.
    """
    temperature = lax.bitcast_convert_type(options[:, 0], jnp.float32)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sampled = lax.cond(
        jnp.any(temperature > GREEDY_TEMPERATURE),
        lambda: jax.vmap(_draw_row)(logits, options, positions),
        lambda: greedy,
    )
    return jnp.where(temperature > GREEDY_TEMPERATURE, sampled, greedy)


def _draw_row(logits: Array, options: Array, position: Array) -> Array:
    temperature, top_p, min_p = lax.bitcast_convert_type(options[:3], jnp.float32)
    top_k, seed = options[3], options[4]
    scaled = logits / jnp.maximum(temperature, GREEDY_TEMPERATURE)
    order = jnp.argsort(scaled, descending=True, stable=True)
    ordered = scaled[order]
    rank = jnp.arange(order.shape[0], dtype=jnp.int32)
    in_top_k = (top_k <= 0) | (rank < top_k)
    chance = jax.nn.softmax(jnp.where(in_top_k, ordered, -jnp.inf))
    # A token is in the nucleus if those more likely than it do not reach top_p by themselves;
    # top_p = 1 keeps everything, whatever rounding does to the sum.
    before = jnp.cumsum(chance) - chance
    in_nucleus = (before < top_p) | (top_p >= 1) | (rank == 0)
    kept = in_top_k & in_nucleus & (chance >= min_p * chance[0])
    key = jax.random.fold_in(jax.random.key(seed), position)
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)[order]
    return order[jnp.argmax(jnp.where(kept, ordered + noise, -jnp.inf))].astype(jnp.int32)
