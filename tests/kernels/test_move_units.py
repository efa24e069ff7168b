"""Moves of units by XLA against NumPy, and how an implementation is chosen."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unimem_jax.pallas_kernels.errors import ArgumentError, UnsupportedPlatform
from unimem_jax.pallas_kernels.move_units import CHUNK_BYTES, move_units

from tests.aot.target import traced_for
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
    with pytest.raises(UnsupportedPlatform, match="traced for cpu"):
        moved(case, "mosaic")


def test_auto_takes_xla_on_the_cpu_and_the_kernel_on_cuda():
    case = random_moves(0, (32, 8), moves=2, count=1)
    traced = jax.jit(lambda *arrays: move_units(*arrays, unit_rows=8)).trace(
        case.arena, case.sources, case.destinations, np.int32(1)
    )
    assert "mosaic_gpu" not in traced.lower().as_text()
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def lowered_for(device_kind: str, implementation: str) -> str:
    case = random_moves(0, (32, 8), moves=2, count=1)
    arrays = case.arena, case.sources, case.destinations, np.int32(1)
    move = jax.jit(partial(move_units, unit_rows=8, implementation=implementation))
    with jax.sharding.use_abstract_mesh(traced_for(device_kind)):
        return move.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_a_card_without_a_tma_engine_gets_xla_and_refuses_the_kernel():
    assert "mosaic_gpu" not in lowered_for("NVIDIA A100-SXM4-80GB", "auto")
    with pytest.raises(UnsupportedPlatform, match="traced for NVIDIA A100"):
        lowered_for("NVIDIA A100-SXM4-80GB", "mosaic")


@pytest.mark.parametrize("implementation", ["auto", "mosaic"])
def test_a_card_with_a_tma_engine_gets_the_kernel(implementation):
    assert "mosaic_gpu" in lowered_for("NVIDIA H200", implementation)


@pytest.mark.parametrize(
    "device_kind, capability, is_kernel",
    [
        ("Tesla V100-SXM2-16GB", "7.0", False),
        ("NVIDIA H100 80GB HBM3", "9.0", True),
        ("NVIDIA B200", "10.0", True),
        ("AMD Instinct MI300X", "gfx942", None),
    ],
)
def test_the_default_device_decides(monkeypatch, device_kind, capability, is_kernel):
    card = SimpleNamespace(device_kind=device_kind, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [card])
    case = random_moves(0, (32, 8), moves=2, count=1)
    shapes = case.arena, case.sources, case.destinations, np.int32(1)

    def lowered(implementation: str) -> str:
        move = jax.jit(partial(move_units, unit_rows=8, implementation=implementation))
        return move.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    if is_kernel is not None:
        assert ("mosaic_gpu" in lowered("auto")) == is_kernel
    if not is_kernel:
        with pytest.raises(UnsupportedPlatform, match=device_kind):
            lowered("mosaic")


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
