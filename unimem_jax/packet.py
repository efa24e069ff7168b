"""The int32 layout of a packet: everything the host decided for one step, in one array and one
transfer.

A packet has a static shape, so that few programs serve all traffic, and one array of words. Packets
are of two kinds. A step packet runs the model for up to `rows` requests of up to `tokens` new
tokens each. An upkeep packet runs no model: it carries moves of one sub-pool and changes of the
tables that did not fit the next step packet.

    updates | row | slot | position | count | start | emit | options | tokens      step
    updates | move_count | sources | destinations                                upkeep

K1  A packet's words are a fresh array, written once: JAX may still read a NumPy array after a call
    returned.
K2  A row that is padding has count 0 and `row` one past the last; an update that is padding has the
    index one past the last. Nothing is ever addressed by -1.
K3  Values are int32; floats travel as their bits. A value that does not fit raises on the host.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unimem_jax.errors import UsageError
from unimem_jax.plan import Plan

OPTION_WORDS = 5  # temperature, top_p, min_p as float32 bits; top_k and seed as int32
UPKEEP_UPDATES = 256  # table changes one upkeep packet carries
MOST_WORDS = 2**28  # of a packet: 1 GiB
UPKEEP_MOVES = 64  # moves one upkeep packet carries
LAST_TOKEN = -1  # in `tokens`: the token this row sampled last, which lives on the device


@dataclass(frozen=True, slots=True)
class Shape:
    """The static part of a packet; one compiled program per value.

    Attributes:
      rows: request rows, padding included; 0 in an upkeep packet.
      tokens: new tokens per row, padding included.
      pages: page-table columns that whole-context attention reads.
      slots: state sub-pools, one slot id each per row.
      updates: table changes.
      move_pool: sub-pool whose units an upkeep packet moves, or -1.
    """

    rows: int
    tokens: int
    pages: int
    slots: int
    updates: int
    move_pool: int = -1


@dataclass(frozen=True, slots=True)
class Packet:
    """One step's decisions: `words` int32[n] for `shape`; stacked packets are int32[steps, n]."""

    words: np.ndarray
    shape: Shape


def step_shape(plan: Plan, rows: int, tokens: int, pages: int) -> Shape:
    """The shape of a step packet: room for all table changes that `rows * tokens` new tokens can
    cause.

    Raises:
      UsageError: more than 1 GiB.
    """
    new_pages = -(-tokens // plan.page_tokens) + 1
    token_pools = len(plan.token_pools)
    per_row = new_pages * (2 * token_pools + 1) + len(plan.slot_pools)
    if rows * (per_row + tokens) > MOST_WORDS:
        raise UsageError(f"a packet of {rows} rows of {tokens} tokens is over 1 GiB; take fewer")
    return Shape(rows, tokens, pages, len(plan.slot_pools), rows * per_row)


def upkeep_shape(plan: Plan, pool: int) -> Shape:
    """The shape of an upkeep packet that moves units of sub-pool `pool`."""
    return Shape(0, 0, 0, len(plan.slot_pools), UPKEEP_UPDATES, pool)


@lru_cache(maxsize=256)
def fields(shape: Shape) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name -> (first word, dimensions) of every field of a packet of this shape, in order."""
    rows = shape.rows
    sizes: dict[str, tuple[int, ...]] = {
        "updates_index": (shape.updates,),
        "updates_value": (shape.updates,),
    }
    if shape.move_pool >= 0:
        moves = {"move_count": (1,), "sources": (UPKEEP_MOVES,), "destinations": (UPKEEP_MOVES,)}
        sizes |= moves
    else:
        sizes |= {
            "row": (rows,), "slot": (rows, shape.slots), "position": (rows,), "count": (rows,),
            "start": (rows,), "emit": (rows,), "options": (rows, OPTION_WORDS),
            "tokens": (rows, shape.tokens),
        }  # fmt: skip
    found, at = {}, 0
    for name, dims in sizes.items():
        found[name] = (at, dims)
        at += math.prod(dims)
    return found


def word_count(shape: Shape) -> int:
    """Words of a packet of this shape."""
    start, dims = list(fields(shape).values())[-1]
    return start + math.prod(dims)


def blank(shape: Shape, table_words: int, row_count: int) -> tuple[Packet, dict[str, np.ndarray]]:
    """A fresh packet that does nothing (K2), and writable views of its fields by name."""
    words = np.zeros(word_count(shape), np.int32)
    views = {
        name: words[start : start + math.prod(dims)].reshape(dims)
        for name, (start, dims) in fields(shape).items()
    }
    views["updates_index"][:] = table_words
    if shape.rows:
        views["row"][:] = row_count
    return Packet(words, shape), views


def int32(values: object, what: str) -> np.ndarray:
    """Checks that whole numbers fit int32 and converts them (K3).

    Raises:
      UsageError: if one does not fit, or is not a whole number.
    """
    try:
        found = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise UsageError(f"{what} are whole numbers that fit int32, not {values!r}") from error
    if found.size == 0:
        return np.zeros(found.shape, np.int32)
    if found.dtype.kind not in "iu":
        raise UsageError(f"{what} are whole numbers that fit int32, not {found.dtype}")
    limits = np.iinfo(np.int32)
    if found.min() < limits.min or found.max() > limits.max:
        raise UsageError(f"{what}: {found.min()} .. {found.max()} does not fit int32")
    return found.astype(np.int32)
