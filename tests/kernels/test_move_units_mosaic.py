"""The Mosaic kernel of `move_units`, interpreted on the CPU with race detection."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unimem_jax.pallas_kernels import move_units_mosaic as kernel

from tests.kernels.moves import Moves, moved_by_numpy, random_moves
from tests.kernels.races import INTERPRETED, forgotten_state, has_raced


def moved(case: Moves, blocks: int = 2, box_bytes: int = 1024) -> np.ndarray:
    """The arena after an interpreted run, traced anew; boxes of 1 KiB lap the ring."""
    run = partial(
        kernel.move_units_mosaic.__wrapped__,
        unit_rows=case.unit_rows, blocks=blocks, box_bytes=box_bytes, interpret=INTERPRETED,
    )  # fmt: skip
    arrays = (case.arena, case.sources, case.destinations, np.int32(case.count))
    return np.asarray(jax.jit(run)(*map(jnp.asarray, arrays)))


@pytest.mark.parametrize(
    "row_words, unit_rows, moves, count, blocks",
    [
        (32, 1, 3, 2, 1),  # one granule
        (352, 1, 2, 2, 2),  # a unit of 11 granules
        (352, 3, 2, 2, 1),  # 33 granules: view rows of 1 granule, boxes of 8 rows and a tail of 1
        (64, 8, 3, 3, 2),  # boxes of two rows
        (128, 16, 2, 1, 1),  # the ring is lapped: 8 boxes through 4 stages
        (128, 16, 3, 2, 3),  # blocks share the boxes of one unit
        (160, 64, 1, 1, 1),  # 40 boxes through one ring
    ],
)
def test_the_kernel_moves_what_numpy_moves_without_a_race(
    row_words, unit_rows, moves, count, blocks
):
    case = random_moves(unit_rows, (row_words, unit_rows), moves=moves, count=count)
    np.testing.assert_array_equal(moved(case, blocks), moved_by_numpy(case))
    assert not has_raced()


@pytest.mark.parametrize("count", [-1, 0, 1, 2, 3, 4])
def test_only_the_first_moves_are_made(count):
    case = random_moves(count + 1, (64, 4), moves=3, count=count)
    case.sources[max(count, 0) :] = 2**31 - 1
    np.testing.assert_array_equal(moved(case), moved_by_numpy(case))
    assert not has_raced()


@pytest.mark.parametrize("unit", [(96, 3), (32, 8)])
def test_rows_after_the_last_whole_unit_are_untouched(unit):
    case = random_moves(0, unit, moves=2, count=2, spare_rows=1)
    np.testing.assert_array_equal(moved(case), moved_by_numpy(case))
    assert not has_raced()


def test_a_load_that_is_not_waited_for_is_a_race(monkeypatch):
    monkeypatch.setattr(kernel.plgpu, "barrier_wait", lambda barrier: None)
    assert races(random_moves(0, (128, 4), moves=1, count=1))


def test_a_stage_refilled_before_its_store_has_read_it_is_a_race(monkeypatch):
    case = random_moves(0, (128, 32), moves=1, count=1)  # 8 boxes for each block
    assert not races(case)
    wait = kernel.plgpu.wait_smem_to_gmem
    late = kernel.STAGES  # the wait at the end, for no store at all, stays as it is

    def wait_too_little(stores: int, **options) -> None:
        wait(stores and stores + late, **options)

    monkeypatch.setattr(kernel.plgpu, "wait_smem_to_gmem", wait_too_little)
    assert races(case)


def test_a_batch_that_is_not_disjoint_is_a_race():
    case = random_moves(0, (128, 4), moves=2, count=2)
    case.sources[1] = case.destinations[0]
    assert races(case)


def races(case: Moves) -> bool:
    """Whether a run races."""
    with forgotten_state():
        moved(case)
        return has_raced()
