"""Compiled for an H200 over a 100 GiB arena, every op is in place; nothing is run.

What this cannot tell: speed, and faults that only the card shows. docs/KERNELS.md lists both.
"""

import functools
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from unimem_jax.pallas_kernels.cases import ARENA_BYTES, ATTENTION, UNITS, UnitCase
from unimem_jax.pallas_kernels.move_units import CHUNK_BYTES, move_units
from unimem_jax.pallas_kernels.rows import scatter_rows

from tests.aot.target import compile_for_h200, require_plugin
from tests.in_place import MEBIBYTE, assert_in_place
from tests.kernels.programs import (
    layer,
    layer_shapes,
    layer_temp_bytes,
    read_then_write,
    shaped,
    two_views,
    two_views_bytes,
    two_views_shapes,
)

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("plugin")]

KERNEL_TEMP_BYTES = 4096
ROW_WORDS = 512


@pytest.fixture(scope="module")
def plugin() -> None:
    require_plugin()


def compiled_move(case: UnitCase, implementation: str) -> jax.stages.Compiled:
    return compile_for_h200(
        functools.partial(
            move_units, unit_rows=case.unit_rows, implementation=implementation
        ),
        shaped(case.rows(ARENA_BYTES), case.row_words, dtype=jnp.uint32),
        shaped(case.moves), shaped(case.moves), shaped(),
        donate=0,
    )  # fmt: skip


@pytest.mark.parametrize("case", UNITS, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", ["auto", "mosaic", "xla"])
def test_moves_are_in_place(case, implementation):
    program = compiled_move(case, implementation)
    is_kernel = "mosaic_gpu" in program.as_text()
    assert is_kernel == (implementation != "xla")
    chunk = min(case.unit_bytes, max(CHUNK_BYTES, 4 * case.row_words))
    temp_bytes = KERNEL_TEMP_BYTES if is_kernel else chunk + KERNEL_TEMP_BYTES
    assert_in_place(program, 4 * case.row_words * case.rows(ARENA_BYTES), temp_bytes)


def test_the_check_catches_a_move_by_gather_and_scatter():
    def move(arena, sources, destinations):
        pages = arena.reshape(-1, 16, ROW_WORDS)
        return pages.at[destinations].set(pages[sources]).reshape(arena.shape)

    arena = shaped(1 << 18, ROW_WORDS, dtype=jnp.uint32)
    program = compile_for_h200(move, arena, shaped(8), shaped(8), donate=0)
    with pytest.raises(AssertionError, match="is copied"):
        assert_in_place(program, arena.size * 4, 64 * MEBIBYTE)


@pytest.mark.parametrize("case", [UNITS[0], UNITS[3], UNITS[5], UNITS[-1]], ids=lambda c: c.name)
def test_the_kernel_is_tma_copies_at_64_bit_addresses_without_spills(case, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    # jax compiles, and so writes, a kernel once: this one differs from those of other tests.
    compiled_move(replace(case, moves=case.moves + 1), "mosaic")
    code = only_dump(tmp_path, "ptx")
    assert "cp.async.bulk.tensor.2d.shared" in code  # loads name int32 rows and columns
    stores = re.findall(r"cp\.async\.bulk\.(?:global|tensor\.2d\.global)", code)
    assert stores
    if "cp.async.bulk.global" in stores:  # stores name a byte: row times width in 64 bits
        assert re.search(r"mul\.wide\.s32\s+%rd\d+, %r\d+, \d+;", code)
    assert "st.global" not in code
    report = only_dump(tmp_path, "ptxas")
    assert "sm_90a" in report
    assert "0 bytes spill stores, 0 bytes spill loads" in report


def only_dump(folder: Path, kind: str) -> str:
    (file,) = folder.glob(f"*.{kind}")
    return file.read_text()


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_writes_are_in_place(rows):
    arena = shaped(ARENA_BYTES // (4 * ROW_WORDS), ROW_WORDS, dtype=jnp.uint32)
    entries = shaped(rows, ROW_WORDS, dtype=jnp.uint32)
    program = compile_for_h200(scatter_rows, arena, shaped(rows), entries, donate=0)
    assert_in_place(program, ARENA_BYTES, KERNEL_TEMP_BYTES)


def test_a_read_tied_to_the_arena_lets_the_next_write_be_in_place():
    arena = shaped(ARENA_BYTES // (4 * ROW_WORDS), ROW_WORDS, dtype=jnp.uint32)
    program = compile_for_h200(
        functools.partial(read_then_write, tied=True), arena, shaped(16, 8), shaped(16), donate=0
    )
    assert_in_place(program, ARENA_BYTES, MEBIBYTE)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_moves_and_writes_through_two_views_are_in_place(rows, implementation):
    program = compile_for_h200(
        functools.partial(two_views, implementation=implementation),
        *two_views_shapes(rows, ARENA_BYTES),
        donate=0,
    )
    assert_in_place(program, two_views_bytes(ARENA_BYTES), MEBIBYTE)


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_a_layer_of_attention_reads_and_writes_in_place(case):
    shapes = layer_shapes(case, ARENA_BYTES)
    program = compile_for_h200(functools.partial(layer, case=case), *shapes, donate=0)
    assert_in_place(program, shapes[0].size * 4, layer_temp_bytes(case))
