"""The one device program: moves and table changes, or a forward of the model over the arena.

    step packet     table changes -> reads -> forward -> one scatter per sub-pool -> sampling
    upkeep packet   moves -> table changes

A step is pure: `(params, device, packet) -> (device, out)`. Jit it with the device donated, call it
inside your own jit, or scan it over stacked packets.

T1  `tables` is one int32 vector: the mapping of every sub-pool, then every row's page table. All
    changes of a packet are one scatter, so host and device can only differ by packets not yet run.
T2  The arena that leaves is the arena that came, written in place.
T3  A padding row reads nothing that matters, computes something finite and writes nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from unimem_jax.draw import draw
from unimem_jax.errors import UsageError
from unimem_jax.packet import LAST_TOKEN, Packet, Shape, fields
from unimem_jax.page_tables import Tables, tables_of
from unimem_jax.plan import Plan, SubPool
from unimem_jax.spec import STORED_DTYPES, Part, PartKey
from unimem_jax.store import PackedStore
from unimem_jax.views import Views

jax.tree_util.register_dataclass(Packet, data_fields=["words"], meta_fields=["shape"])


class Model(Protocol):
    """Anything with parts and a pure `apply`; see docs/MODELS.md."""

    vocab_size: int

    def parts(self) -> tuple[Part, ...]:
        """What the model remembers."""
        ...

    def apply(
        self, params: Any, tokens: Array, views: Any
    ) -> tuple[Array, dict[PartKey, Array], Any]:
        """(params, int32[R, T], views) -> (logits, fresh token parts, views)."""
        ...


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arena", "tables", "last_tokens"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DeviceState:
    """All that lives on the device between steps.

    Attributes:
      arena: uint32[granules, 32].
      tables: int32[words]: mapping of each sub-pool, then the page table of each row (T1).
      last_tokens: int32[rows], the token each row sampled last.
    """

    arena: Any
    tables: Array
    last_tokens: Array


@partial(jax.tree_util.register_dataclass, data_fields=["logits", "sampled"], meta_fields=[])
@dataclass(frozen=True)
class StepOut:
    """What a step computed, in the packet's row order.

    Attributes:
      logits: float32[R, V] at each row's last new token.
      sampled: int32[R]; -1 for padding rows and for chunks that do not end their prompt.
    """

    logits: Array
    sampled: Array


def init_device(
    plan: Plan, rows: int, row_pages: int, store: PackedStore | None = None
) -> DeviceState:
    """Fresh device state for `rows` requests of up to `row_pages` pages each."""
    tables = tables_of(plan, rows, row_pages)
    return DeviceState(
        arena=(store or PackedStore(plan)).init(),
        tables=jnp.asarray(tables.blank()),
        last_tokens=jnp.zeros((rows,), jnp.int32),
    )


def step(
    model: Model, plan: Plan, store: PackedStore | None = None
) -> Callable[[Any, DeviceState, Packet], tuple[DeviceState, StepOut]]:
    """Makes the device program of a model on a plan.

    Args:
      model: anything that follows `Model`.
      plan: made from `model.parts()`; or from the parts of a target and of its draft, each of which
        then has a step of its own over the same arena. Named request state may be planned beside.
      store: how the arena is read and written; the packed one unless a benchmark compares.
    Returns:
      A pure function `(params, device, packet) -> (device, out)`; jit it with the device donated.
    Raises:
      UsageError: if the plan was made for other parts.
    """
    declared = {part.key: part for part in model.parts()}
    planned = {lane.part.key: lane.part for pool in plan.sub_pools for lane in pool.lanes}
    drafts = {part.draft for part in declared.values()}
    needed = {
        key: part
        for key, part in planned.items()
        if part.draft in drafts and (key in declared or not part.lifetime.name)
    }
    if declared != needed or not declared:
        raise UsageError("the plan was made for other parts than this model declares")
    return partial(_run, _Program(model, store or PackedStore(plan), frozenset(declared)))


@dataclass(frozen=True)
class _Program:
    """What a step is made from; static while tracing."""

    model: Model
    store: PackedStore
    declared: frozenset[PartKey]

    def forward(
        self, params: Any, device: DeviceState, field: dict[str, Array], shape: Shape
    ) -> tuple[DeviceState, StepOut]:
        """Runs the model on the packet's rows and writes what they remember."""
        rows, count, last_tokens = field["row"], field["count"], device.last_tokens
        kept = last_tokens.at[rows].get(mode="clip")
        tokens = jnp.where(field["tokens"] == LAST_TOKEN, kept[:, None], field["tokens"])
        views, table = self.views(device, field, shape)
        logits, fresh, views = self.model.apply(params, tokens, views)
        # Reads come before writes: without the tie XLA may keep a copy of the old arena for a
        # late read.
        arena, entries, logits = lax.optimization_barrier(
            (views.arena, self.stored(fresh), logits.astype(jnp.float32))
        )
        for pool in self.store.plan.token_pools:
            own = {key: entries[key] for lane in pool.lanes if (key := lane.part.key) in entries}
            if own:
                at = self.entry_rows(pool, views, table)
                arena = self.store.write_entries(arena, pool, at.reshape(-1), own)
        drawn = draw(logits, field["options"], field["position"] + count)
        emits = (field["emit"] > 0) & (count > 0)
        target = jnp.where(emits, rows, last_tokens.shape[0])
        last_tokens = last_tokens.at[target].set(drawn, mode="drop")
        out = StepOut(logits, jnp.where(emits, drawn, -1))
        return DeviceState(arena, device.tables, last_tokens), out

    def stored(self, fresh: dict[PartKey, Array]) -> dict[PartKey, Array]:
        """Fresh parts [R, T, *shape] as [R * T, *shape] in their stored dtypes."""
        wanted = {
            lane.part.key: lane.part
            for pool in self.store.plan.token_pools
            for lane in pool.lanes
            if lane.part.key in self.declared
        }
        if fresh.keys() != wanted.keys():
            wrong = ", ".join(f"{site}.{name}" for site, name in fresh.keys() ^ wanted.keys())
            raise UsageError(f"the model's fresh parts differ from those it declared: {wrong}")
        for (site, name), value in fresh.items():
            shape = wanted[site, name].shape
            if value.shape[2:] != shape:
                raise UsageError(f"{site}.{name} is {shape} per token, not {value.shape[2:]}")
        return {
            key: value.astype(STORED_DTYPES[wanted[key].dtype]).reshape(-1, *wanted[key].shape)
            for key, value in fresh.items()
        }

    def views(
        self, device: DeviceState, field: dict[str, Array], shape: Shape
    ) -> tuple[Views, "_RowTable"]:
        """The views of this packet's rows, with every page address that attention reads."""
        plan = self.store.plan
        tables = tables_of(plan, device.last_tokens.shape[0], total=device.tables.shape[0])
        position, count = field["position"], field["count"]
        step_index = np.arange(shape.tokens, dtype=np.int32)[None, :]
        table = _RowTable(tables, device.tables, field["row"])
        pages, first_page = {}, {}
        for pool in plan.token_pools:
            columns = tables.read_columns(pool.lifetime, shape.pages)
            kept = jnp.maximum(position + 1 - pool.lifetime.tokens, 0) // plan.page_tokens
            first = kept if pool.lifetime.tokens else jnp.zeros_like(position)
            at = first[:, None] + np.arange(columns, dtype=np.int32)[None, :]
            pages[pool.index] = table.addresses(pool, at)
            first_page[pool.index] = first
        slots = {}
        for ordinal, pool in enumerate(plan.slot_pools):
            ids = field["slot"][:, ordinal]
            address = device.tables.at[tables.mapping_start[pool.index] + ids].get(mode="clip")
            slots[pool.index] = jnp.where(count > 0, address, pool.unit_count)
        views = Views(
            store=self.store,
            arena=device.arena,
            positions=position[:, None] + step_index,
            valid=count[:, None] > step_index,
            # A row without tokens has no slot: it starts from zeros, not from what lies elsewhere.
            start=(field["start"] > 0) | (count == 0),
            pages=pages,
            first_page=first_page,
            slots=slots,
        )
        return views, table

    def entry_rows(self, pool: SubPool, views: Views, table: "_RowTable") -> Array:
        """int32[R, T]: the row of `pool`'s view that each new token writes, if any, else T3.

        A page that the end of the chunk makes invisible was not granted: where no other sub-pool
        holds it either, its table cell is stale and leads to a page of somebody else.
        """
        page_tokens = self.store.plan.page_tokens
        page = views.positions // page_tokens
        kept = views.valid
        if pool.lifetime.tokens:
            end = views.positions[:, 0] + views.valid.sum(axis=1, dtype=jnp.int32)
            first = jnp.maximum(end + 1 - pool.lifetime.tokens, 0) // page_tokens
            kept = kept & (page >= first[:, None])
        present = jnp.where(kept, table.addresses(pool, page), pool.unit_count)
        return self.store.entry_rows(pool, present, views.positions % page_tokens)


def _run(
    program: _Program, params: Any, device: DeviceState, packet: Packet
) -> tuple[DeviceState, StepOut]:
    shape = packet.shape
    field = {
        name: lax.slice(packet.words, (start,), (start + math.prod(dims),)).reshape(dims)
        for name, (start, dims) in fields(shape).items()
    }
    arena = device.arena
    if shape.move_pool >= 0:
        pool = program.store.plan.sub_pools[shape.move_pool]
        moves = (field["sources"], field["destinations"], field["move_count"][0])
        arena = program.store.move(arena, pool, moves)
    changed = device.tables.at[field["updates_index"]].set(field["updates_value"], mode="drop")
    device = DeviceState(arena, changed, device.last_tokens)
    if shape.rows:
        return program.forward(params, device, field, shape)
    nothing = jnp.zeros((0, program.model.vocab_size), jnp.float32), jnp.zeros((0,), jnp.int32)
    return device, StepOut(*nothing)


@dataclass(frozen=True)
class _RowTable:
    """Looks up, for the rows of a packet, the address behind a column of their page tables."""

    tables: Tables
    words: Array
    rows: Array

    def addresses(self, pool: SubPool, columns: Array) -> Array:
        """int32[R, C] page numbers -> addresses in `pool`; absent if out of range."""
        clipped = jnp.clip(columns, 0, self.tables.row_pages - 1)
        at = self.tables.table_start + self.rows[:, None] * self.tables.row_pages + clipped
        ids = self.words.at[at].get(mode="clip")
        found = self.words.at[self.tables.mapping_start[pool.index] + ids].get(mode="clip")
        return jnp.where(columns == clipped, found, pool.unit_count)
