"""Compiled for the CPU, every program around a step gives back the arena's bytes and copies none.

Nothing is run and no arena is allocated.
"""

import itertools
from functools import cache

import jax
import pytest

from tests.device.models import MIXTURES
from tests.device.steps import FUSED_STEPS, Case, Steps
from tests.in_place import MEBIBYTE, assert_in_place
from tests.kernels.programs import plain_scatter
from unimem_jax import store
from unimem_jax.views import Views

ARENA_BYTES = 4 << 30
ROWS, TOKENS, PAGES = (1, 2, 4, 16), (1, 7, 64), (0, 16, 64)
GRID = [Case(*sizes) for sizes in itertools.product(ROWS, TOKENS, PAGES)]
# Every row count, token count and page count, and one row with each of the others.
USUAL = [
    Case(1, 1, 0), Case(1, 1, 16), Case(1, 7, 64), Case(1, 64, 0),
    Case(2, 1, 64), Case(4, 7, 16), Case(16, 64, 64),
]  # fmt: skip
USUAL_MODELS = [
    "state only", "window only", "two windows", "odd shapes", "four bits", "pooled", "embedded",
]  # fmt: skip


@cache
def steps(name):
    return Steps(name, ARENA_BYTES)


def compiled(fn, arguments):
    return jax.jit(fn, donate_argnums=1).lower(*arguments).compile()


def assert_step_in_place(made, case, fn=None, scanned=None):
    program = compiled(fn or made.run, made.arguments(case, scanned))
    assert_in_place(program, made.plan.arena_bytes, case.temp_bytes)


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_a_step_is_in_place(case):
    assert_step_in_place(steps("hybrid"), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in GRID if case not in USUAL], ids=str)
def test_a_step_of_any_shape_is_in_place(case):
    assert_step_in_place(steps("hybrid"), case)


@pytest.mark.parametrize("name", USUAL_MODELS)
def test_a_step_of_any_model_is_in_place(name):
    assert_step_in_place(steps(name), Case(1, 1, 16))


def test_a_step_of_a_model_that_reads_entries_itself_is_in_place_where_there_are_none():
    assert_step_in_place(steps("pooled"), Case(1, 1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID[::9], ids=str)
@pytest.mark.parametrize("name", [*MIXTURES, "embedded"])
def test_a_step_of_any_model_and_any_shape_is_in_place(name, case):
    assert_step_in_place(steps(name), case)


@pytest.mark.parametrize("pool", range(4))
def test_upkeep_of_any_sub_pool_is_in_place(pool):
    made = steps("two windows")
    program = compiled(made.run, made.arguments(pool))
    assert_in_place(program, made.plan.arena_bytes, MEBIBYTE)


@pytest.mark.parametrize("rows", [1, 2])
def test_fused_steps_are_in_place(rows):
    made = steps("hybrid")
    assert_step_in_place(made, Case(rows, 1, 16), made.scanned, FUSED_STEPS)


@pytest.mark.parametrize("form", ["until_zero", "if_positive"])
def test_a_step_in_a_loop_or_branch_of_the_user_is_in_place(form):
    made = steps("hybrid")
    assert_step_in_place(made, Case(1, 1, 16), getattr(made, form))


tied_read = Views.read


def read_without_a_tie(self, site, name):
    found, _ = tied_read(self, site, name)
    return found, self


def test_the_check_catches_a_state_that_is_read_without_a_tie(monkeypatch):
    monkeypatch.setattr(Views, "read", read_without_a_tie)
    with pytest.raises(AssertionError, match="is copied"):
        assert_step_in_place(steps("state only"), Case(2, 1, 0))


@pytest.mark.parametrize("scanned", [None, FUSED_STEPS])
def test_the_check_catches_one_row_that_is_written_plainly(monkeypatch, scanned):
    monkeypatch.setattr(store, "scatter_rows", plain_scatter)
    made = steps("state only")
    with pytest.raises(AssertionError, match="is copied"):
        assert_step_in_place(made, Case(1, 1, 0), scanned and made.scanned, scanned)


def test_the_check_catches_a_device_that_is_not_donated():
    made, case = steps("attention only"), Case(1, 1, 0)
    program = jax.jit(made.run).lower(*made.arguments(case)).compile()
    with pytest.raises(AssertionError, match="are aliased"):
        assert_in_place(program, made.plan.arena_bytes, case.temp_bytes)
