"""Attention of new tokens over the past and over each other: the XLA reference, and the CPU's path.

The past is given already gathered from its pages, with a mask; new tokens attend to it and,
causally, to themselves. The parts share one maximum, which is their merge by log-sum-exp (Milakov
and Gimelshein 2018, arXiv:1805.02867); sinks (Xiao et al. 2023, arXiv:2309.17453) enter the
denominator once.

    [ past 0 .. C ) [ fresh 0 .. T ) [ sink ]      one softmax over all three; a sink has no value

A1. What a mask hides never reaches a result, NaN and infinity included: scores and values are
    selected before they are used.
A2. A query that sees nothing gives zeros.
A3. Softmax and both products accumulate in float32.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from .errors import ArgumentError

FLOOR = -1e30  # stands for the maximum of no score at all; finite, so that exp(-inf - FLOOR) is 0


class Tokens(NamedTuple):
    """Keys [R, N, Hk, D] and values [R, N, Hk, Dv] of N tokens per request, any float dtype."""

    key: Float[Array, "requests tokens key_heads head"]
    value: Float[Array, "requests tokens key_heads value_head"]


def attend(
    query: Float[Array, "requests new query_heads head"],
    fresh: Tokens,
    valid: Bool[Array, "requests new"],
    past: Tokens | None = None,
    past_mask: Bool[Array, "requests new_or_1 past"] | None = None,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " query_heads"] | None = None,
    soft_cap: float | None = None,
    fresh_mask: Bool[Array, "requests new new"] | None = None,
) -> Float[Array, "requests new query_heads value_head"]:
    """Attention over (past, fresh); query head h reads key head `h // (Hq // Hk)`.

    Args:
      fresh: the new tokens themselves; token t sees the valid tokens s <= t.
      valid: which new tokens are real. Queries that are not return something finite.
      past: tokens before the new ones, or None.
      past_mask: which past tokens each query may see, window included; required with `past`.
      scale: factor of the scores before `soft_cap`.
      window: a fresh token s is seen by t only if t - s < window; None: no limit.
      sinks: score, one per query head, of a token without a value.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
      fresh_mask: which of the fresh tokens (last axis) that a query (middle axis) sees it is left
        with, the token itself included; None: all.
    Returns:
      The dtype of `query`.
    Raises:
      ArgumentError: at trace time, if shapes or options do not fit together.
    Cost: holds float32 scores [R, Hq, T, C + T], and K and V once more with heads before tokens: on
      a CPU 1.2 to 4 times as fast as one einsum, since both products run on contiguous matrices.
    """
    _require_options(query, fresh, valid, window=window, sinks=sinks, soft_cap=soft_cap)
    _require_past(query, fresh, past, past_mask)
    seen = _fresh_mask(valid, window)
    if fresh_mask is not None:
        _require_fresh_mask(query, fresh_mask)
        seen &= fresh_mask
    parts = [(fresh, seen)]
    if past is not None and past_mask is not None:
        parts.insert(0, (past, past_mask))
    return _attend(query, tuple(parts), sinks, scale, soft_cap)


@partial(jax.jit, static_argnames=("scale", "soft_cap"))  # layers of one shape are traced once
def _attend(
    query: Array,
    parts: tuple[tuple[Tokens, Array], ...],
    sinks: Array | None,
    scale: float,
    soft_cap: float | None,
) -> Array:
    """Attention over all parts, each with its mask, under one softmax."""
    requests, new, query_heads, head = query.shape
    fresh = parts[-1][0]
    key_heads, value_head = fresh.value.shape[2:]
    grouped = query.reshape(requests, new, key_heads, query_heads // key_heads, head)
    grouped = jnp.swapaxes(grouped, 1, 2)

    scores = [_scores(grouped, part.key, mask, scale, soft_cap) for part, mask in parts]
    top = jnp.float32(FLOOR)
    for score in scores:
        top = jnp.maximum(top, jnp.max(score, axis=-1, keepdims=True, initial=FLOOR))
    total = jnp.zeros_like(top)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, key_heads, 1, -1, 1)
        top = jnp.maximum(top, sink)
    # The result does not depend on `top`, so neither does its gradient.
    top = lax.stop_gradient(top)
    if sinks is not None:
        total = total + jnp.exp(sink - top)

    mixed = jnp.float32(0)
    for score, (part, mask) in zip(scores, parts, strict=True):
        weight = jnp.exp(score - top)
        total = total + jnp.sum(weight, axis=-1, keepdims=True)
        mixed = mixed + _mix(weight, part.value, mask)
    mixed = mixed / jnp.where(total > 0, total, jnp.ones_like(total))
    return (
        jnp.swapaxes(mixed, 1, 2)
        .reshape(requests, new, query_heads, value_head)
        .astype(query.dtype)
    )


def _fresh_mask(valid: Array, window: int | None) -> Array:
    """bool[R, T, T]: which new token (last axis) each new token (middle axis) sees."""
    index = jnp.arange(valid.shape[1])
    age = index[:, None] - index[None, :]
    seen = age >= 0
    if window is not None:
        seen &= age < window
    return seen[None] & valid[:, None, :]


def _scores(grouped: Array, key: Array, mask: Array, scale: float, soft_cap: float | None) -> Array:
    """float32[R, Hk, T, G, N], minus infinity where the mask hides a token."""
    requests, key_heads, new, group, head = grouped.shape
    score = jnp.matmul(
        grouped.reshape(requests, key_heads, new * group, head),
        jnp.transpose(key.astype(grouped.dtype), (0, 2, 3, 1)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    score = score.reshape(requests, key_heads, new, group, -1) * scale
    if soft_cap is not None:
        score = soft_cap * jnp.tanh(score / soft_cap)
    return jnp.where(mask[:, None, :, None, :], score, -jnp.inf)


def _mix(weight: Array, value: Array, mask: Array) -> Array:
    """float32[R, Hk, T, G, Dv]: weights times values, a value that no query sees taken as zero."""
    requests, key_heads, new, group, tokens = weight.shape
    seen = mask.any(axis=1)[:, :, None, None]
    value = jnp.where(seen, value.astype(jnp.float32), jnp.float32(0))
    mixed = jnp.matmul(
        weight.reshape(requests, key_heads, new * group, tokens),
        jnp.swapaxes(value, 1, 2),
        precision=lax.Precision.HIGHEST,
    )
    return mixed.reshape(requests, key_heads, new, group, -1)


def _require_options(
    query: Array,
    fresh: Tokens,
    valid: Array,
    *,
    window: int | None,
    sinks: Array | None,
    soft_cap: float | None,
) -> None:
    if query.ndim != 4 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ArgumentError(
            f"query is {query.dtype}{list(query.shape)}; it must be float[R, T, Hq, D]"
        )
    requests, new, query_heads, _ = query.shape
    _require_tokens("fresh", fresh, query, new)
    if valid.dtype != jnp.bool_ or valid.shape != (requests, new):
        raise ArgumentError(
            f"valid is {valid.dtype}{list(valid.shape)}; it must be bool[{requests}, {new}]"
        )
    if window is not None and window < 1:
        raise ArgumentError(f"window is {window}; it must be at least 1, or None for no limit")
    if soft_cap is not None and not soft_cap > 0:
        raise ArgumentError(f"soft_cap is {soft_cap}; it must be positive, or None")
    if sinks is not None and sinks.shape != (query_heads,):
        raise ArgumentError(f"sinks is {list(sinks.shape)}; it must be [{query_heads}]")


def _require_fresh_mask(query: Array, fresh_mask: Array) -> None:
    wanted = (*query.shape[:2], query.shape[1])
    if fresh_mask.dtype != jnp.bool_ or fresh_mask.shape != wanted:
        raise ArgumentError(
            f"fresh_mask is {fresh_mask.dtype}{list(fresh_mask.shape)}; it must be "
            f"bool{list(wanted)}"
        )


def _require_past(
    query: Array, fresh: Tokens, past: Tokens | None, past_mask: Array | None
) -> None:
    if past is None or past_mask is None:
        if past is not None or past_mask is not None:
            raise ArgumentError("past and past_mask go together; one is None")
        return
    requests, new = query.shape[:2]
    _require_tokens("past", past, query, past.key.shape[1])
    if past.value.shape[2:] != fresh.value.shape[2:]:
        raise ArgumentError(
            f"past has values of {list(past.value.shape[2:])}, fresh of "
            f"{list(fresh.value.shape[2:])}; heads and head size must be equal"
        )
    allowed = [(requests, count, past.key.shape[1]) for count in (new, 1)]
    if past_mask.dtype != jnp.bool_ or past_mask.shape not in allowed:
        raise ArgumentError(
            f"past_mask is {past_mask.dtype}{list(past_mask.shape)}; "
            f"it must be bool, one of {allowed}"
        )


def _require_tokens(name: str, part: Tokens, query: Array, tokens: int) -> None:
    key, value = part
    requests, _, query_heads, head = query.shape
    fits = (
        key.ndim == value.ndim == 4
        and key.shape[:3] == value.shape[:3]
        and key.shape[:2] == (requests, tokens)
        and key.shape[3] == head
        and key.shape[2] > 0
        and query_heads % key.shape[2] == 0
    )
    if not fits:
        raise ArgumentError(
            f"{name} has key {list(key.shape)} and value {list(value.shape)}; they must be "
            f"[{requests}, {tokens}, Hk, {head}] and [{requests}, {tokens}, Hk, Dv], "
            f"with Hk a divisor of {query_heads} query heads"
        )
