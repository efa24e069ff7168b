"""Moves units (pages or slots) inside the arena, in place: what compaction and copies run.

A unit is contiguous, so a move is a copy of whole granules and its dtype does not matter. Two
implementations give the same bytes: XLA everywhere, and a Mosaic kernel on NVIDIA GPUs from compute
capability 9.0. `implementation="auto"` takes the kernel where it exists, decided by the platform
that the program is compiled for, so it also does so when compiled for a GPU that is not there.

U1. The batch is disjoint: no destination is a source or another destination.
U2. Only the first `count` moves happen; what follows in the index arrays is not looked at.
U3. The arena is updated in place if donated; buffers beside it stay under `CHUNK_BYTES`.
"""

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32, UInt32

from .arguments import require_arena, require_int32, require_unit_rows
from .errors import ArgumentError, UnsupportedPlatform
from .move_units_mosaic import GRANULE_WORDS, move_units_mosaic

CHUNK_BYTES = 1 << 20  # a large unit is copied in pieces of at most this, one row at least
MOSAIC_CAPABILITY = 9.0  # compute capability of the first NVIDIA GPU with a TMA engine
# Of cards that a program may be traced for while none is there.
COMPUTE_CAPABILITY = {
    "A100": 8.0,
    "L40S": 8.9,
    "H100": 9.0,
    "H200": 9.0,
    "GH200": 9.0,
    "B200": 10.0,
    "GB200": 10.0,
}

Implementation = Literal["auto", "xla", "mosaic"]


def move_units(
    arena: UInt32[Array, "rows row_words"],
    sources: Int32[Array, " moves"],
    destinations: Int32[Array, " moves"],
    count: Int32[Array, ""] | int,
    *,
    unit_rows: int,
    implementation: Implementation = "auto",
) -> UInt32[Array, "rows row_words"]:
    """Copies unit `sources[i]` over unit `destinations[i]` for every `i < count`.

    Args:
      sources, destinations: addresses; unit `a` is rows [a * unit_rows, (a + 1) * unit_rows). The
        first `count` lie inside the arena (not checked; others corrupt units inside it) and U1.
      count: at most the length of the index arrays; more means all of them.
      unit_rows: rows of a unit, any number; a unit is a whole number of granules of 128 bytes.
    Returns:
      The arena, in place if donated.
    Raises:
      ArgumentError: at trace time, for a wrong dtype, shape, unit or implementation.
      UnsupportedPlatform: at trace time, for "mosaic" where no such kernel exists.
    Cost: reads and writes `count` units; the time does not depend on `moves` or on the arena.
    """
    count = jnp.asarray(count)
    _require_arguments(arena, sources, destinations, count, unit_rows)
    if implementation not in get_args(Implementation):
        allowed = ", ".join(get_args(Implementation))
        raise ArgumentError(f"implementation is {implementation!r}; it must be one of {allowed}")
    target, capability = _target()
    if implementation == "mosaic" and (capability is None or capability < MOSAIC_CAPABILITY):
        raise UnsupportedPlatform(
            f"implementation 'mosaic' needs an NVIDIA GPU of compute capability "
            f"{MOSAIC_CAPABILITY} or more; the program is traced for {target}; use 'auto' or 'xla'"
        )
    if sources.shape[0] == 0:
        return arena
    xla = partial(move_units_xla, unit_rows=unit_rows)
    mosaic = partial(move_units_mosaic, unit_rows=unit_rows)
    if implementation == "mosaic":
        return mosaic(arena, sources, destinations, count)
    is_old_gpu = capability is not None and capability < MOSAIC_CAPABILITY
    if implementation == "xla" or is_old_gpu:
        return xla(arena, sources, destinations, count)
    return lax.platform_dependent(arena, sources, destinations, count, cuda=mosaic, default=xla)


@partial(jax.jit, static_argnames="unit_rows")
def move_units_xla(
    arena: Array, sources: Array, destinations: Array, count: Array, *, unit_rows: int
) -> Array:
    """`move_units` as a loop of slices; arguments as there, unchecked."""
    row_words = arena.shape[1]
    chunk_rows = max(1, min(unit_rows, CHUNK_BYTES // (4 * row_words)))
    chunks = -(-unit_rows // chunk_rows)

    def move_chunk(index: Array, arena: Array) -> Array:
        unit, chunk = lax.div(index, chunks), lax.rem(index, chunks)
        # The last chunk ends with the unit and may copy some rows of the one before it again.
        row = jnp.minimum(chunk * chunk_rows, unit_rows - chunk_rows)
        source = sources[unit] * unit_rows + row
        destination = destinations[unit] * unit_rows + row
        rows = lax.dynamic_slice(arena, (source, 0), (chunk_rows, row_words))
        return lax.dynamic_update_slice(arena, rows, (destination, 0))

    live = jnp.clip(count, 0, sources.shape[0])
    return lax.fori_loop(0, live * chunks, move_chunk, arena)


def _require_arguments(
    arena: Array, sources: Array, destinations: Array, count: Array, unit_rows: int
) -> None:
    require_arena(arena)
    require_int32("sources", sources, ndim=1)
    require_int32("destinations", destinations, ndim=1)
    require_int32("count", count, ndim=0)
    if sources.shape != destinations.shape:
        raise ArgumentError(
            f"sources has {sources.shape[0]} addresses and destinations {destinations.shape[0]}; "
            f"they must have as many"
        )
    rows, row_words = arena.shape
    require_unit_rows(unit_rows, rows)
    if unit_rows * row_words % GRANULE_WORDS or rows * row_words % GRANULE_WORDS:
        raise ArgumentError(
            f"arena is uint32[{rows}, {row_words}] with units of {unit_rows} rows; units and arena "
            f"must be whole granules of {GRANULE_WORDS} words"
        )


def _target() -> tuple[str, float | None]:
    """What the program is traced for, and its compute capability if it is a known NVIDIA GPU.

    A device named by `jax.sharding.use_abstract_mesh` counts before the default device.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        model = abstract.device_kind.removeprefix("NVIDIA ").replace("-", " ").split(" ")[0]
        return abstract.device_kind, COMPUTE_CAPABILITY.get(model)
    device = jax.devices()[0]
    # On an AMD GPU this is a name such as "gfx942".
    number = getattr(device, "compute_capability", "")
    is_nvidia = number.replace(".", "").isdecimal()
    return device.device_kind, float(number) if is_nvidia else None
