"""Compiled programs that are kept in files: what is read is what was compiled, or nothing is."""

import importlib
import os
import subprocess
import sys
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from unimem_jax.models.embedded import EmbeddedModel, Sizes

import unimem_jax as um
from tests.engine.hybrid import Hybrid
from unimem_jax import program_files
from unimem_jax.packet import blank, step_shape, upkeep_shape
from unimem_jax.program_files import DIGITS, ENDING, MOST_SETS, has_name, set_folder
from unimem_jax.programs import Programs
from unimem_jax.requests import Work

ROWS, TOKENS = 1, 4
SMALL = Sizes(
    width=16, hidden=16, layers=("window",), attention_heads=(1, 1, 16), window_tokens=8
)  # fmt: skip


class Started:
    """A model, its memory and its programs, as one start of a process makes them."""

    def __init__(self, folder):
        self.model = EmbeddedModel(SMALL)
        params = self.model.init(0)
        self.plan = um.plan(self.model.parts(), 128 << 10, 4)
        self.memory = um.Memory(self.plan, ROWS, 32, chunk_tokens=TOKENS)
        self.device = self.memory.init()
        self.programs = Programs(self.model, params, self.plan, folder)
        self.lowered = 0
        lower = self.programs._jitted.lower

        class Counting:
            @staticmethod
            def lower(*arguments):
                self.lowered += 1
                return lower(*arguments)

        self.programs._jitted = Counting

    def step(self):
        """Logits of the first tokens of a request."""
        pages = self.memory.bucket_pages(1)
        work = Work(self.memory.open(), TOKENS, np.arange(TOKENS, dtype=np.int32), True)
        (packet,) = self.memory.run([work], rows=ROWS, tokens=TOKENS, pages=pages)
        return np.asarray(self.run(packet).logits)

    def upkeep(self):
        """A program without the model, which compiles soon: nothing is moved."""
        self.run(blank(upkeep_shape(self.plan, 0), self.memory.tables.words, ROWS)[0])

    def run(self, packet):
        old = self.device
        self.device, out = self.programs(self.device, packet)
        assert old.arena.is_deleted(), "the arena was not donated"
        return out


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_second_start_reads_the_program_and_gives_the_same_bits(tmp_path):
    first = Started(tmp_path)
    logits = first.step()
    assert first.lowered == 1
    assert len(files_of(tmp_path)) == 1
    second = Started(tmp_path)
    assert np.array_equal(second.step(), logits)
    assert second.lowered == 0


@pytest.mark.parametrize("content", [b"", b"not a program", None], ids=["empty", "other", "cut"])
def test_a_file_that_cannot_be_read_is_compiled_anew(content, tmp_path):
    Started(tmp_path).upkeep()
    (file,) = files_of(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000] if content is None else content)
    again = Started(tmp_path)
    again.upkeep()
    assert again.lowered == 1
    assert file.stat().st_size >= len(whole) - 100, "the file was not replaced"


def test_a_file_of_which_any_byte_changed_is_no_program(tmp_path):
    """Many such files would be read as programs that compute something else."""
    started = Started(tmp_path)
    started.upkeep()
    (file,) = files_of(tmp_path)
    whole, files = file.read_bytes(), started.programs._files(started.device)
    shape = upkeep_shape(started.plan, 0)
    assert files.load(shape) is not None
    for at in range(0, len(whole), 997):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        assert files.load(shape) is None, f"byte {at}"


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path):
    (tmp_path / "programs").write_text("a file where the folder should be")
    started = Started(tmp_path / "programs")
    started.upkeep()
    assert started.lowered == 1


def test_whatever_tells_programs_apart_is_in_their_name(tmp_path, monkeypatch):
    """B1. A name that leaves one of these out gives a stale program some day."""

    def name(model=None, settings=None):
        model = model or EmbeddedModel(SMALL)
        plan = um.plan(model.parts(), 128 << 10, 4)
        return set_folder(tmp_path, model, plan, settings)

    usual = name()
    assert name() == usual
    assert name(EmbeddedModel(SMALL, token_dtype="bfloat16")) != usual
    assert name(EmbeddedModel(Sizes())) != usual
    assert name(settings=[((4, 4), "float32")]) != usual
    with jax.numpy_dtype_promotion("standard"):
        assert name() != usual
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert name() != usual
    monkeypatch.undo()
    monkeypatch.setattr(program_files, "version", lambda name: "0.0")
    assert name() != usual
    monkeypatch.undo()
    monkeypatch.setattr(program_files, "_processor", lambda: "another")
    assert name() != usual
    monkeypatch.undo()
    source = tmp_path / "changed"
    source.mkdir()
    (source / "step.py").write_text("another step")
    monkeypatch.setattr(program_files, "IMPORTED_NS", time.time_ns() + 10**10)
    monkeypatch.setattr(um, "__path__", [*um.__path__, str(source)])
    assert name() not in (usual, None)


def test_a_process_whose_source_was_changed_meanwhile_keeps_nothing(tmp_path, monkeypatch):
    """What it runs is the old source, and its name would be that of the new one."""
    source = tmp_path / "package"
    source.mkdir()
    (source / "step.py").write_text("as it is imported")
    os.utime(source / "step.py", (0, 0))
    monkeypatch.setattr(um, "__path__", [*um.__path__, str(source)])
    monkeypatch.setattr(program_files, "IMPORTED_NS", time.time_ns() + 10**10)
    assert set_folder(tmp_path, 1) is not None
    monkeypatch.undo()
    monkeypatch.setattr(um, "__path__", [*um.__path__, str(source)])
    assert set_folder(tmp_path, 1) is None, "the file is newer than the process, old as it says"


def test_the_shape_of_a_packet_names_its_file(tmp_path):
    started = Started(tmp_path)
    files = started.programs._files(started.device)
    shapes = [step_shape(started.plan, ROWS, 1, 4), step_shape(started.plan, ROWS, 1, 8)]
    shapes += [upkeep_shape(started.plan, pool) for pool in range(2)]
    assert len({files._file(shape) for shape in shapes}) == len(shapes)


def test_programs_of_somebody_else_s_code_are_not_kept(tmp_path):
    """Its source may change unseen."""
    model = Hybrid()
    plan = um.plan(model.parts(), 128 << 10, 4)
    assert set_folder(tmp_path, model, plan) is None
    assert set_folder(tmp_path, lambda: None) is None
    assert set_folder(tmp_path, files_of) is None
    assert set_folder(tmp_path, plan) is not None


def test_where_jax_keeps_programs_none_are_kept_here(tmp_path):
    """B3."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "of jax"))
    try:
        assert set_folder(tmp_path, 1) is None
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert set_folder(tmp_path, 1) is not None


def test_the_least_recently_used_sets_go(tmp_path):
    names = [f"{at:0{DIGITS}x}{ENDING}" for at in range(MOST_SETS + 2)]
    for at, name in enumerate(names):
        old = tmp_path / name
        old.mkdir()
        os.utime(old, (at, at))
    Started(tmp_path).upkeep()
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == MOST_SETS
    assert {*names[3:]} < left


def test_what_is_no_set_stays_in_the_folder(tmp_path):
    others = [tmp_path / f"thesis {at}" for at in range(MOST_SETS + 2)]
    for other in others:
        other.mkdir()
        (other / "chapter").write_text("years of work")
        os.utime(other, (0, 0))
    Started(tmp_path).upkeep()
    assert all((other / "chapter").exists() for other in others)
    assert len(files_of(tmp_path)) == len(others) + 1


SECOND_START = """
import jax
from tests.engine.test_program_files import Path, Started
for place, lowered in (0, 1), (0, 0), (1, 1), (1, 0):
    with jax.default_device(jax.devices()[place]):
        started = Started(Path("programs"))
        started.upkeep()
    assert started.lowered == lowered, (place, started.lowered)
    assert started.device.arena.devices() == {jax.devices()[place]}
started = Started(Path("programs"))
started.programs._leaves = jax.device_put(started.programs._leaves, jax.devices()[1])
assert started.programs._files(started.device) is None
"""


def test_a_program_runs_on_the_device_it_was_made_for(tmp_path):
    flags = "--xla_force_host_platform_device_count=2"
    root = str(Path(__file__).parents[2])
    subprocess.run(
        [sys.executable, "-c", SECOND_START], check=True, cwd=tmp_path,
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": root},
    )  # fmt: skip


def test_a_program_that_cannot_be_serialised_is_run_all_the_same(tmp_path, monkeypatch):
    def refuse(program):
        raise NotImplementedError("as of programs with constants")

    monkeypatch.setattr(program_files.serialize_executable, "serialize", refuse)
    Started(tmp_path).upkeep()
    assert files_of(tmp_path) == []


def test_somebody_s_module_with_the_name_of_one_of_python_is_not_python(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "__init__.py").write_text("class Network:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "code", raising=False)
    network = importlib.import_module("code").Network
    try:
        assert not has_name(network())
    finally:
        del sys.modules["code"]
    assert has_name(OrderedDict(a=1), partial(sorted), Path("a"))


def test_what_is_nested_too_deeply_has_no_name():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert not has_name(deep)
