"""Compiled for the CPU, every op that takes the arena gives back its bytes and copies none of it.

Each claim stands beside a form of the same thing that copies, which the check must catch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unimem_jax.pallas_kernels.cases import ATTENTION, UNITS
from unimem_jax.pallas_kernels.move_units import CHUNK_BYTES, move_units
from unimem_jax.pallas_kernels.rows import scatter_rows

from tests.in_place import MEBIBYTE, assert_in_place
from tests.kernels.programs import (
    layer,
    layer_shapes,
    layer_temp_bytes,
    plain_scatter,
    read_then_write,
    shaped,
    two_views,
    two_views_bytes,
    two_views_shapes,
)

ARENA_BYTES = 4 << 30  # nothing is allocated: these programs are compiled and not run
ROW_WORDS, UNIT_ROWS = 512, 16


ARENA = shaped(ARENA_BYTES // (4 * ROW_WORDS), ROW_WORDS, dtype=jnp.uint32)


def compiled(fn, *shapes) -> jax.stages.Compiled:
    return jax.jit(fn, donate_argnums=0).lower(*shapes).compile()


@pytest.mark.parametrize("case", UNITS, ids=lambda case: case.name)
def test_moves_copy_no_more_than_a_chunk(case):
    program = compiled(
        functools.partial(move_units, unit_rows=case.unit_rows),
        shaped(case.rows(ARENA_BYTES), case.row_words, dtype=jnp.uint32),
        shaped(case.moves), shaped(case.moves), shaped(),
    )  # fmt: skip
    arena_bytes = 4 * case.row_words * case.rows(ARENA_BYTES)
    assert_in_place(program, arena_bytes, min(case.unit_bytes, CHUNK_BYTES) + 4096)


@pytest.mark.parametrize("count", [1, 2, 64])
def test_a_scatter_is_in_place_whatever_the_number_of_rows(count):
    program = compiled(
        scatter_rows, ARENA, shaped(count), shaped(count, ROW_WORDS, dtype=jnp.uint32)
    )
    assert_in_place(program, ARENA_BYTES, 2 * 4 * ROW_WORDS + 4096)


def test_a_read_tied_to_the_arena_lets_the_next_write_be_in_place():
    program = compiled(
        functools.partial(read_then_write, tied=True), ARENA, shaped(16, 8), shaped(16)
    )
    assert_in_place(program, ARENA_BYTES, MEBIBYTE)


def test_the_check_catches_a_read_that_is_not_tied():
    program = compiled(
        functools.partial(read_then_write, tied=False), ARENA, shaped(16, 8), shaped(16)
    )
    with pytest.raises(AssertionError, match="is copied"):
        assert_in_place(program, ARENA_BYTES, MEBIBYTE)


def test_the_check_catches_an_arena_that_is_not_donated():
    rows, entries = shaped(2), shaped(2, ROW_WORDS, dtype=jnp.uint32)
    program = jax.jit(scatter_rows).lower(ARENA, rows, entries).compile()
    with pytest.raises(AssertionError, match="are aliased"):
        assert_in_place(program, ARENA_BYTES, MEBIBYTE)


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_moves_and_writes_through_two_views_are_in_place(rows):
    program = compiled(two_views, *two_views_shapes(rows, ARENA_BYTES))
    assert_in_place(program, two_views_bytes(ARENA_BYTES), MEBIBYTE)


def test_the_check_catches_one_row_written_plainly_through_two_views():
    program = compiled(
        functools.partial(two_views, write=plain_scatter), *two_views_shapes(1, ARENA_BYTES)
    )
    with pytest.raises(AssertionError, match="is copied"):
        assert_in_place(program, two_views_bytes(ARENA_BYTES), MEBIBYTE)


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_a_layer_of_attention_reads_and_writes_in_place(case):
    shapes = layer_shapes(case, ARENA_BYTES)
    program = compiled(functools.partial(layer, case=case), *shapes)
    assert_in_place(program, shapes[0].size * 4, layer_temp_bytes(case))


def test_the_arena_stays_where_it_is_when_the_programs_run():
    arena = jnp.zeros((4096, ROW_WORDS), jnp.uint32)
    where = arena.unsafe_buffer_pointer()
    moves, rows = jnp.asarray([1, 2], jnp.int32), jnp.asarray([5, 4096], jnp.int32)
    move = jax.jit(functools.partial(move_units, unit_rows=UNIT_ROWS), donate_argnums=0)
    moved = move(arena, moves, moves + 2, jnp.int32(1))
    write = jax.jit(scatter_rows, donate_argnums=0)
    written = write(moved, rows, jnp.ones((2, ROW_WORDS), jnp.uint32))
    assert arena.is_deleted()
    assert moved.is_deleted()
    assert written.unsafe_buffer_pointer() == where
    assert np.asarray(written).sum() == ROW_WORDS
