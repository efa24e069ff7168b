"""Moves of units by XLA against NumPy, and how an implementation is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unimem_jax.pallas_kernels.errors import ArgumentError, UnsupportedPlatform
from unimem_jax.pallas_kernels.move_units import CHUNK_BYTES, move_units

from tests.kernels.moves import Moves, moved_by_numpy, random_moves


def moved(case: Moves, implementation: str = "auto") -> jax.Array:
    return move_units(
        jnp.asarray(case.arena), jnp.asarray(case.sources), jnp.asarray(case.destinations),
        jnp.int32(case.count), unit_rows=case.unit_rows, implementation=implementation,
    )  # fmt: skip


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    unit_rows=st.sampled_from([1, 3, 8, 16, 64]),
    granules=st.sampled_from([1, 3, 11]),
    moves=st.integers(0, 4),
    count=st.integers(-1, 6),
    implementation=st.sampled_from(["auto", "xla"]),
)
def test_the_first_moves_are_made_and_no_other_byte_changes(
    seed, unit_rows, granules, moves, count, implementation
):
    case = random_moves(seed, (granules * 32, unit_rows), moves=moves, count=count)
    np.testing.assert_array_equal(moved(case, implementation), moved_by_numpy(case))


@pytest.mark.parametrize("unit_rows", [2049, 4096, 5000])
def test_a_unit_larger_than_a_chunk_arrives_whole(unit_rows):
    case = random_moves(1, (128, unit_rows), moves=2, count=2)
    assert 4 * 128 * unit_rows > CHUNK_BYTES
    np.testing.assert_array_equal(moved(case), moved_by_numpy(case))


def test_a_row_larger_than_a_chunk_arrives_whole():
    case = random_moves(1, (CHUNK_BYTES // 4 + 32, 2), moves=1, count=1)
    np.testing.assert_array_equal(moved(case), moved_by_numpy(case))


def test_index_arrays_past_the_count_may_hold_anything():
    case = random_moves(2, (32, 8), moves=4, count=2)
    case.sources[2:], case.destinations[2:] = -5, 2**31 - 1
    np.testing.assert_array_equal(moved(case), moved_by_numpy(case))


def test_the_kernel_asked_for_by_name_is_refused_where_it_does_not_exist():
    case = random_moves(0, (32, 8), moves=2, count=1)
    with pytest.raises(UnsupportedPlatform, match="traced for platform 'cpu'"):
        moved(case, "mosaic")


def test_auto_takes_xla_on_the_cpu_and_the_kernel_on_cuda():
    case = random_moves(0, (32, 8), moves=2, count=1)
    traced = jax.jit(lambda *arrays: move_units(*arrays, unit_rows=8)).trace(
        case.arena, case.sources, case.destinations, np.int32(1)
    )
    assert "mosaic_gpu" not in traced.lower().as_text()
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


ARENA = jnp.zeros((16, 32), jnp.uint32)
UNITS = jnp.zeros((2,), jnp.int32)


@pytest.mark.parametrize(
    "message, changed",
    [
        ("arena is float32", {"arena": ARENA.astype(jnp.float32)}),
        ("arena is uint32", {"arena": ARENA[None]}),
        ("sources is uint32", {"sources": UNITS.astype(jnp.uint32)}),
        ("destinations is int32", {"destinations": UNITS[None]}),
        ("2 addresses and destinations 1", {"destinations": UNITS[:1]}),
        ("count is float32", {"count": jnp.float32(1)}),
        ("count is int32", {"count": UNITS}),
        ("unit_rows is 0", {"unit_rows": 0}),
        ("unit_rows is 17", {"unit_rows": 17}),
        ("whole granules", {"arena": jnp.zeros((16, 24), jnp.uint32), "unit_rows": 2}),
        ("must be one of auto, xla, mosaic", {"implementation": "triton"}),
    ],
)
def test_bad_input_is_refused_by_name(message, changed):
    arguments = {
        "arena": ARENA, "sources": UNITS, "destinations": UNITS + 1, "count": 1, "unit_rows": 1,
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=message):
        move_units(**(arguments | changed))
