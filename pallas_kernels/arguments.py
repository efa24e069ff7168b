"""Checks of what every op is given, at trace time.

A message names the argument and says what is allowed. Values, not known while tracing, are not
looked at.
"""

import jax.numpy as jnp
from jax import Array

from .errors import ArgumentError

ROW_LIMIT = 2**31  # rows are int32 on the device, and one past the last row must be one too


def require_arena(arena: Array) -> None:
    """Raises ArgumentError unless `arena` is uint32[rows, row_words] with int32 row numbers."""
    if arena.dtype != jnp.uint32 or arena.ndim != 2:
        raise ArgumentError(
            f"arena is {arena.dtype}{list(arena.shape)}; it must be uint32[rows, row_words]"
        )
    if arena.shape[0] >= ROW_LIMIT:
        raise ArgumentError(
            f"arena has {arena.shape[0]} rows; int32 rows allow fewer than {ROW_LIMIT}"
        )


def require_int32(name: str, value: Array, ndim: int | None = None) -> None:
    """Raises ArgumentError unless `value` is int32 of rank `ndim` (None: any rank)."""
    if value.dtype != jnp.int32 or (ndim is not None and value.ndim != ndim):
        rank = "" if ndim is None else f" of rank {ndim}"
        raise ArgumentError(f"{name} is {value.dtype}{list(value.shape)}; it must be int32{rank}")


def require_unit_rows(unit_rows: int, rows: int) -> None:
    """Raises ArgumentError unless 1 <= unit_rows <= rows."""
    if not 1 <= unit_rows <= rows:
        raise ArgumentError(
            f"unit_rows is {unit_rows}; it must be from 1 to the arena's {rows} rows"
        )


def require_words(offset_words: int, words: int, row_words: int) -> None:
    """Raises ArgumentError unless words [offset_words, offset_words + words) lie inside a row."""
    if offset_words < 0 or words < 1 or offset_words + words > row_words:
        raise ArgumentError(
            f"words [{offset_words}, {offset_words + words}) are not a window of a row "
            f"of {row_words} words"
        )
