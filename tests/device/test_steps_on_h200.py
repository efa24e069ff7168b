"""Compiled for an H200 over a 100 GiB arena, the programs around a step are in place.

As `test_in_place` on the CPU; nothing is run.
"""

from functools import cache

import pytest
from jax import lax

from tests.aot.target import compile_for_h200, require_plugin
from tests.device.steps import FUSED_STEPS, Case, Steps
from tests.in_place import MEBIBYTE, assert_in_place

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("plugin")]

ARENA_BYTES = 100 << 30
CASES = [Case(1, 1, 16), Case(1, 7, 0), Case(2, 1, 64), Case(4, 64, 16), Case(16, 64, 64)]


@pytest.fixture(scope="module")
def plugin():
    require_plugin()


@cache
def steps(name):
    return Steps(name, ARENA_BYTES)


def assert_step_in_place(made, case, fn=None, scanned=None):
    program = compile_for_h200(fn or made.run, *made.arguments(case, scanned), donate=1)
    assert_in_place(program, made.plan.arena_bytes, case.temp_bytes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_in_place(case):
    assert_step_in_place(steps("hybrid"), case)


@pytest.mark.parametrize(
    "name", ["state only", "two windows", "odd shapes", "four bits", "pooled", "embedded"]
)
def test_a_step_of_any_model_is_in_place(name):
    assert_step_in_place(steps(name), Case(1, 1, 16))


@pytest.mark.parametrize("pool", range(3))
def test_upkeep_of_any_sub_pool_is_the_kernel_and_in_place(pool):
    made = steps("hybrid")
    program = compile_for_h200(made.run, *made.arguments(pool), donate=1)
    assert "mosaic_gpu" in program.as_text()
    assert_in_place(program, made.plan.arena_bytes, MEBIBYTE)


@pytest.mark.parametrize("rows", [1, 2])
def test_fused_steps_are_in_place(rows):
    made = steps("hybrid")
    assert_step_in_place(made, Case(rows, 1, 16), made.scanned, FUSED_STEPS)


@pytest.mark.parametrize("form", ["until_zero", "if_positive"])
def test_a_step_in_a_loop_or_branch_of_the_user_is_in_place(form):
    made = steps("hybrid")
    assert_step_in_place(made, Case(1, 1, 16), getattr(made, form))


def test_the_check_catches_reads_that_are_not_tied_to_the_next_write(monkeypatch):
    monkeypatch.setattr(lax, "optimization_barrier", lambda values: values)
    with pytest.raises(AssertionError, match="is copied"):
        assert_step_in_place(steps("hybrid"), Case(2, 1, 16))
