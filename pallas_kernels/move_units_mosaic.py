"""The Mosaic GPU kernel of `move_units`: unit -> shared memory -> unit, by the TMA engine.

Units are contiguous, so the arena is seen anew as rows of at most 256 words, the widest box of the
TMA engine, whatever its own row width; a unit is a whole number of such rows. It is cut into boxes
of `BOX_BYTES` and a smaller tail. Blocks take boxes in turn, each through a ring of `STAGES`.

    box    0   1   2   3   4 ...        a box is loaded when the store that last read its stage
    stage  0   1   2   3   0 ...        has read it; the store of one box overlaps all this

Boxes need no tiling and no aligned start beyond the granule, so any number of rows per unit works.
"""

from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

GRANULE_WORDS = 32  # 128 bytes; what a TMA box into shared memory is a multiple of
BOX_ROW_WORDS = 256  # the most elements of one dimension of a TMA box
BOX_BYTES = 32 << 10  # also at most 256 rows of one granule
STAGES = 4  # 128 KiB of the 227 KiB of shared memory
BLOCKS = 132  # streaming multiprocessors of an H200; right on any other number, only slower


@partial(jax.jit, static_argnames=("unit_rows", "blocks", "box_bytes", "interpret"))
def move_units_mosaic(
    arena: Array,
    sources: Array,
    destinations: Array,
    count: Array,
    *,
    unit_rows: int,
    blocks: int = BLOCKS,
    box_bytes: int = BOX_BYTES,
    interpret: Any = None,
) -> Array:
    """`move_units` on an NVIDIA GPU; arguments as there, unchecked.

    Args:
      blocks, box_bytes: smaller in tests, so that a small arena fills the ring.
      interpret: `plgpu.InterpretGPUParams`, to run without a GPU.
    """
    unit_words = unit_rows * arena.shape[1]
    granules = gcd(unit_words, arena.size) // GRANULE_WORDS
    row_granules = max(width for width in range(1, 9) if granules % width == 0)
    view = arena.reshape(-1, row_granules * GRANULE_WORDS)
    view_unit_rows = unit_words // view.shape[1]
    box_rows = min(view_unit_rows, box_bytes // (4 * view.shape[1]))
    boxes = view_unit_rows // box_rows
    view_ref = jax.new_ref(view, memory_space=plgpu.GMEM)
    plgpu.kernel(
        partial(_move_units_body, unit_rows=view_unit_rows),
        out_type=(),
        grid=(min(blocks, sources.shape[0] * boxes),),
        grid_names=("block",),
        scratch_types={
            "ring": plgpu.SMEM((STAGES, box_rows, view.shape[1]), jnp.uint32),
            "arrived": plgpu.Barrier(num_barriers=STAGES),
        },
        interpret=interpret,
    )(view_ref, sources, destinations, count.reshape(1))
    return jax.freeze(view_ref).reshape(arena.shape)


def _move_units_body(
    arena: Any,
    sources: Any,
    destinations: Any,
    count: Any,
    ring: Any,
    arrived: Any,
    *,
    unit_rows: int,
) -> None:
    """Moves this block's share of the boxes; all arguments are Refs but `unit_rows`."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    live = jnp.clip(count[0], 0, sources.shape[0])

    def move_boxes(first_row: int, boxes: int, box_rows: int) -> None:
        def box_of(addresses: Any, index: Array) -> Any:
            number = block + index * blocks
            unit, place = lax.div(number, boxes), lax.rem(number, boxes)
            row = addresses[unit] * unit_rows + (first_row + place * box_rows)
            return arena.at[pl.ds(row, box_rows)]

        def stage_of(index: Array) -> Any:
            return ring.at[lax.rem(index, STAGES), pl.ds(0, box_rows)]

        def arrival_of(index: Array) -> Any:
            return arrived.at[lax.rem(index, STAGES)]

        def load(index: Array) -> None:
            plgpu.copy_gmem_to_smem(box_of(sources, index), stage_of(index), arrival_of(index))

        own = lax.div(jnp.maximum(live * boxes - block + blocks - 1, 0), blocks)
        for index in range(STAGES):
            pl.when(index < own)(partial(load, jnp.int32(index)))

        @pl.loop(0, own)
        def _(index: Array) -> None:
            plgpu.barrier_wait(arrival_of(index))
            plgpu.copy_smem_to_gmem(stage_of(index), box_of(destinations, index))
            # At most the store just issued still reads its stage; the one before is free.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            refill = index - 1 + STAGES
            pl.when((index > 0) & (refill < own))(partial(load, refill))

        plgpu.wait_smem_to_gmem(0)

    # [0, whole * box_rows)          whole boxes of a unit
    # [whole * box_rows, unit_rows)  its tail: one smaller box, or nothing
    box_rows = ring.shape[1]
    whole, tail_rows = divmod(unit_rows, box_rows)
    move_boxes(0, whole, box_rows)
    if tail_rows:
        move_boxes(whole * box_rows, 1, tail_rows)
