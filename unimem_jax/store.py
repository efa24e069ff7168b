"""Typed reads and writes of the packed arena.

The arena is uint32[granules, 32]. Each token sub-pool sees it as rows of its own entry width,
request state as rows of 128 words; both are free reshapes (plan P1). Lanes are gathered as words
and the small result is bitcast: a bitcast or a slice of the arena itself would be materialised.

S1  Every write is a scatter that XLA performs in place if the arena is donated.
S2  An absent address becomes one past the last row: a write there is dropped, a read is clamped and
    must be masked. `unit_count * rows_per_unit` is not that row: rows above the last whole unit
    exist and may be another's bytes.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from unimem_jax.errors import UsageError
from unimem_jax.pallas_kernels.move_units import Implementation, move_units
from unimem_jax.pallas_kernels.rows import gather_pages, scatter_rows
from unimem_jax.plan import GRANULE_WORDS, Lane, Plan, SubPool
from unimem_jax.spec import STORED_DTYPES, Part, PartKey, element_bits

SLOT_ROW_WORDS = 128  # request state is read as rows of this many words


@dataclass(frozen=True)
class PackedStore:
    """How a plan's arena is read and written; holds no bytes itself.

    Attributes:
      plan: the layout.
      implementation: "auto", "xla" or "mosaic", passed to every kernel.
    """

    plan: Plan
    implementation: Implementation = "auto"

    def init(self) -> Array:
        """A zeroed arena, uint32[granules, 32]."""
        return jnp.zeros((self.plan.arena_granules, GRANULE_WORDS), jnp.uint32)

    def read_pages(self, arena: Array, key: PartKey, addresses: Array) -> Array:
        """Reads one part of all entries of some pages.

        Args:
          addresses: int32[R, C], page addresses; absent ones read some other page and must be
            masked.
        Returns:
          [R, C * pool.unit_entries, *part.shape] in the stored dtype.
        """
        pool, lane = self.plan.locate(key)
        view = arena.reshape(-1, pool.entry_words)
        words = gather_pages(
            view, addresses, unit_rows=pool.unit_entries,
            offset_words=lane.offset_words, words=lane.words,
        )  # fmt: skip
        rows, pages, entries, _ = words.shape
        return unpack(words.reshape(rows, pages * entries, lane.words), lane.part)

    def read_state(self, arena: Array, key: PartKey, addresses: Array) -> Array:
        """Reads one part of request state: int32[R] slot addresses -> [R, *part.shape]."""
        pool, lane = self.plan.locate(key)
        view = arena.reshape(-1, SLOT_ROW_WORDS)
        rows = _state_rows(pool, lane, addresses, view.shape[0])
        words = gather_pages(view, rows, unit_rows=1).reshape(addresses.shape[0], -1)
        return unpack(words[:, : lane.words], lane.part)

    def write_state(self, arena: Array, key: PartKey, addresses: Array, values: Array) -> Array:
        """Writes one part of request state in place; absent addresses are dropped."""
        pool, lane = self.plan.locate(key)
        view = arena.reshape(-1, SLOT_ROW_WORDS)
        rows = _state_rows(pool, lane, addresses, view.shape[0])
        if values.shape[1:] != lane.part.shape:
            site, name = key
            raise UsageError(
                f"{site}.{name} is {lane.part.shape} per request, not {values.shape[1:]}"
            )
        words = pack(values, lane.part)
        spare = rows.shape[1] * SLOT_ROW_WORDS - words.shape[1]
        words = _widened(words, spare).reshape(-1, SLOT_ROW_WORDS)
        # The old state was read from this arena; the tie keeps XLA from copying it for the read.
        arena, words = lax.optimization_barrier((arena, words))
        view = scatter_rows(arena.reshape(-1, SLOT_ROW_WORDS), rows.reshape(-1), words)
        return view.reshape(arena.shape)

    def write_entries(
        self, arena: Array, pool: SubPool, rows: Array, values: dict[PartKey, Array]
    ) -> Array:
        """Writes one packed entry per token with one scatter: the whole row, or the lanes of the
        target or of the draft alone (P5), whichever `values` has.

        Args:
          rows: int32[N], from `entry_rows`; rows past the end are dropped.
          values: every part of the target, of the draft, or of both, [N, *part.shape].
        """
        drafts = {lane.part.draft for lane in pool.lanes if lane.part.key in values}
        start = 0 if False in drafts else pool.target_words
        stop = pool.entry_words if True in drafts else pool.target_words
        columns, at = [], start
        for lane in pool.lanes:
            if lane.part.draft not in drafts:
                continue
            if lane.offset_words > at:
                columns.append(jnp.zeros((rows.shape[0], lane.offset_words - at), jnp.uint32))
            columns.append(pack(values[lane.part.key], lane.part))
            at = lane.offset_words + lane.words
        if at < stop:
            columns.append(jnp.zeros((rows.shape[0], stop - at), jnp.uint32))
        entries = jnp.concatenate(columns, axis=1)
        view = scatter_rows(arena.reshape(-1, pool.entry_words), rows, entries, offset_words=start)
        return view.reshape(arena.shape)

    def entry_rows(self, pool: SubPool, addresses: Array, offsets: Array) -> Array:
        """The row that each token writes, given its page and its offset in tokens there.

        Of the tokens that share an entry only the last writes it, when the entry is complete. One
        past the last row for the others, and where the page is absent (S2).
        """
        total = self.plan.arena_granules * GRANULE_WORDS // pool.entry_words
        writes = (addresses >= 0) & (addresses < pool.unit_count)
        writes = writes & (offsets % pool.stride == pool.stride - 1)
        return jnp.where(writes, addresses * pool.unit_entries + offsets // pool.stride, total)

    def move(self, arena: Array, pool: SubPool, moves: tuple[Array, Array, Array]) -> Array:
        """Copies units in place; `moves` is sources int32[M], destinations int32[M] and a count."""
        words = SLOT_ROW_WORDS if pool.is_slot else pool.entry_words
        view = move_units(
            arena.reshape(-1, words),
            *moves,
            unit_rows=pool.unit_granules * GRANULE_WORDS // words,
            implementation=self.implementation,
        )
        return view.reshape(arena.shape)


def pack(values: Array, part: Part) -> Array:
    """[N, *part.shape] in any dtype -> uint32[N, words]: cast to the stored dtype, padded to whole
    words; the first element in the lowest bits.
    """
    flat = values.astype(STORED_DTYPES[part.dtype])
    flat = flat.reshape(values.shape[0], math.prod(part.shape))
    ratio = 32 // element_bits(part.dtype)
    if ratio == 1:
        return lax.bitcast_convert_type(flat, jnp.uint32)
    spare = -flat.shape[1] % ratio
    padded = _widened(flat, spare)
    return lax.bitcast_convert_type(padded.reshape(flat.shape[0], -1, ratio), jnp.uint32)


def _widened(rows: Array, spare: int) -> Array:
    """[N, words] -> [N, words + spare], with zeros. `jnp.pad` takes far longer to trace."""
    return lax.pad(rows, np.zeros((), rows.dtype), ((0, 0, 0), (0, spare, 0)))


def unpack(words: Array, part: Part) -> Array:
    """uint32[..., words] -> [..., *part.shape] in the stored dtype."""
    stored = STORED_DTYPES[part.dtype]
    typed: Any = lax.bitcast_convert_type(words, stored)
    # Not -1: there may be no entry at all.
    flat = typed.reshape(*words.shape[:-1], words.shape[-1] * 32 // element_bits(part.dtype))
    return flat[..., : math.prod(part.shape)].reshape(*words.shape[:-1], *part.shape)


def _state_rows(pool: SubPool, lane: Lane, addresses: Array, total: int) -> Array:
    """int32[R, lane rows] of the view of 128-word rows; `total` where the slot is absent (S2)."""
    return _slot_rows(
        addresses, lane.offset_words // SLOT_ROW_WORDS, pool.entry_words // SLOT_ROW_WORDS,
        -(-lane.words // SLOT_ROW_WORDS), (pool.unit_count, total),
    )  # fmt: skip


# Parts of one size are traced once, wherever they lie.
@partial(jax.jit, static_argnames=("slot_rows", "lane_rows", "absent"))
def _slot_rows(
    addresses: Array, offset_rows: int, slot_rows: int, lane_rows: int, absent: tuple[int, int]
) -> Array:
    unit_count, total = absent
    first = addresses * slot_rows + offset_rows
    rows = first[:, None] + np.arange(lane_rows, dtype=np.int32)[None, :]
    present = (addresses >= 0) & (addresses < unit_count)
    return jnp.where(present[:, None], rows, total)
