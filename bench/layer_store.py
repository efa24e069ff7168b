"""One array per part of every layer, as JAX engines usually keep their state: the other side of a
comparison.

`LayerStore` answers the same calls as `PackedStore` over the same addresses, so the same step,
views, tables and memory run on it, and what is measured is the packing alone. It cannot move units
between sub-pools and does not try.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from unimem_jax.plan import Plan, SubPool
from unimem_jax.spec import STORED_DTYPES, PartKey

type Arrays = dict[PartKey, Array]


@dataclass(frozen=True)
class LayerStore:
    """Arrays [units, unit_entries, *shape] for token parts and [units, *shape] for request state.

    Attributes:
      plan: gives parts and unit counts.
      unit_counts: units per sub-pool; every sub-pool its own memory, as in split pools.
    """

    plan: Plan
    unit_counts: tuple[int, ...]

    def init(self) -> Arrays:
        """Zeroed arrays, one per part."""
        found = {}
        for pool, count in zip(self.plan.sub_pools, self.unit_counts, strict=True):
            entries = () if pool.is_slot else (pool.unit_entries,)
            for lane in pool.lanes:
                shape = (count, *entries, *lane.part.shape)
                found[lane.part.key] = jnp.zeros(shape, STORED_DTYPES[lane.part.dtype])
        return found

    def read_pages(self, arena: Arrays, key: PartKey, addresses: Array) -> Array:
        """As `PackedStore.read_pages`."""
        pages = arena[key].at[addresses].get(mode="clip")
        rows, columns, entries, *shape = pages.shape
        return pages.reshape(rows, columns * entries, *shape)

    def read_state(self, arena: Arrays, key: PartKey, addresses: Array) -> Array:
        """As `PackedStore.read_state`."""
        return arena[key].at[addresses].get(mode="clip")

    def write_state(self, arena: Arrays, key: PartKey, addresses: Array, values: Array) -> Arrays:
        """As `PackedStore.write_state`."""
        array = arena[key]
        new = array.at[addresses].set(values.astype(array.dtype), mode="drop", unique_indices=True)
        return {**arena, key: new}

    def write_entries(
        self, arena: Arrays, pool: SubPool, rows: Array, values: dict[PartKey, Array]
    ) -> Arrays:
        """As `PackedStore.write_entries`: one scatter per part."""
        page, offset = rows // pool.unit_entries, rows % pool.unit_entries
        new = {
            key: arena[key]
            .at[page, offset]
            .set(value.astype(arena[key].dtype), mode="drop", unique_indices=True)
            for key, value in values.items()
        }
        return {**arena, **new}

    def entry_rows(self, pool: SubPool, addresses: Array, offsets: Array) -> Array:
        """As `PackedStore.entry_rows`."""
        count = self.unit_counts[pool.index]
        writes = (addresses >= 0) & (addresses < count)
        writes = writes & (offsets % pool.stride == pool.stride - 1)
        rows = addresses * pool.unit_entries + offsets // pool.stride
        return jnp.where(writes, rows, count * pool.unit_entries)
