"""Folders of the hub: what is read, and which of them are refused before anything is."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from unimem_jax.models.folder import INDEX, SINGLE, Folder

from tests.models.oracle import refusal, write_folder
from unimem_jax.errors import UsageError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS = {
    "a.bias": np.arange(5, dtype=np.float32),
    "a.weight": np.arange(10, dtype=np.float16).reshape(5, 2),
    "b.bias": np.zeros((0, 4), np.float32),
    "b.weight": (np.arange(6).reshape(2, 3) / 4).astype(ml_dtypes.bfloat16),
    "c": np.array(3.5, np.float32),
    "d": np.arange(7, dtype=np.uint8),
}
SHAPES = {name: tensor.shape for name, tensor in TENSORS.items()}


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "sharded", {"model_type": "x"}, TENSORS)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_tensors_come_back_bit_by_bit_from_one_file_or_several(shards, tmp_path):
    folder = Folder(write_folder(tmp_path, {"model_type": "x"}, TENSORS, shards))
    assert folder.config == {"model_type": "x"}
    assert folder.names == tuple(sorted(TENSORS))
    folder.require(SHAPES)
    for name, tensor in TENSORS.items():
        found = folder.tensor(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.tobytes() == tensor.tobytes()
        assert (folder.shape(name), folder.dtype(name)) == (tensor.shape, tensor.dtype.name)


def test_a_tensor_is_a_read_only_view_of_its_file(sharded):
    folder = Folder(sharded)
    found = folder.tensor("a.weight")
    assert not found.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0] = 1
    assert np.shares_memory(found, folder.tensor("a.weight", np.float16))


READ_ALL = """
import resource, sys
from unimem_jax.models.folder import Folder

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

folder = Folder(sys.argv[1])
before, peak = resident_bytes(), 0
kept = folder.tensor(folder.names[0])
for name in folder.names:
    assert folder.tensor(name).sum() == 1 << 20
    peak = max(peak, resident_bytes())
assert kept.sum() == 1 << 20
print(peak - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts pages as Linux does")
def test_reading_all_tensors_holds_one_at_a_time(tmp_path):
    tensors = {str(at): np.ones(1 << 20, np.float32) for at in range(16)}
    folder = write_folder(tmp_path, {}, tensors)
    command = [sys.executable, "-c", READ_ALL, folder]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 16 << 20, "more than a quarter of the 64 MiB was held at once"


def test_a_change_of_dtype_is_a_copy(sharded):
    folder = Folder(sharded)
    for wanted in ("float32", np.float32, np.dtype(np.float32)):
        found = folder.tensor("b.weight", wanted)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, np.arange(6).reshape(2, 3) / 4)
    assert folder.tensor("a.bias", "bfloat16").dtype == ml_dtypes.bfloat16


def test_one_file_goes_before_an_index(sharded):
    save_file({"only": np.ones(1, np.float32)}, sharded / SINGLE)
    assert Folder(sharded).names == ("only",)


def test_what_nobody_asked_for_is_unused(sharded):
    folder = Folder(sharded)
    assert folder.unused == tuple(sorted(TENSORS))
    wanted = {name: SHAPES[name] for name in ("a.weight", "c", "d")}
    folder.require(wanted, ignored=("b.", "a.bias"))
    folder.tensor("c")
    folder.tensor("c")
    assert folder.unused == ("a.weight", "d")


def test_progress_counts_the_bytes_of_wanted_tensors_once(sharded):
    seen = []
    folder = Folder(sharded, lambda *step: seen.append(step))
    folder.require({name: SHAPES[name] for name in ("a.bias", "d")}, ignored=("a.", "b.", "c"))
    for name in ("d", "d", "a.bias"):
        folder.tensor(name)
    assert seen == [("d", 7, 27), ("d", 7, 27), ("a.bias", 27, 27)]


def test_floats_are_not_made_of_quantised_numbers(sharded):
    folder = Folder(sharded)
    assert folder.tensor("d", np.int32).tolist() == list(range(7))
    with pytest.raises(UsageError, match="tensor d is uint8, which is quantised"):
        folder.tensor("d", "bfloat16")


def test_missing_misshapen_and_extra_tensors_are_named_together(sharded):
    wanted = {f"z.{at}": (1,) for at in range(5)} | {"a.bias": (4,), "c": ()}
    with pytest.raises(UsageError) as error:
        Folder(sharded).require(wanted, ignored=("a.weight", "b."))
    assert "lacks 5 tensors: z.0, z.1, z.2, ...;" in str(error.value)
    assert "another shape for 1 tensors: a.bias is [5] and not [4];" in str(error.value)
    assert str(error.value).endswith("nothing is known of 1 tensors: d")


def test_an_ignored_beginning_ends_in_a_full_stop(sharded):
    folder = Folder(sharded)
    wanted = {name: SHAPES[name] for name in TENSORS if not name.startswith("a")}
    folder.require(wanted, ignored=("a.",))
    with pytest.raises(UsageError, match=r"nothing is known of 2 tensors: a\.bias, a\.weight"):
        folder.require(wanted, ignored=("a",))


def test_a_tensor_of_another_name_is_refused(sharded):
    assert "holds no tensor e" in refusal(Folder(sharded).tensor, "e")
    assert "holds no tensor e" in refusal(Folder(sharded).shape, "e")


def test_a_type_without_numpy_dtype_is_refused_when_asked_for(tmp_path):
    header = json.dumps({"x": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    folder = Folder(tmp_path)
    assert folder.shape("x") == (2,)
    assert "tensor x is F8_E8M0; supported are F64" in refusal(folder.tensor, "x")


def test_quantised_checkpoints_are_refused_by_their_method(sharded):
    Folder(sharded).require_unquantised()
    settings = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (sharded / "config.json").write_text(json.dumps(settings))
    assert "quant_method is 'gptq'" in refusal(Folder(sharded).require_unquantised)


def change_index(folder: Path, **weight_map: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= weight_map
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file}
    (folder / INDEX).write_text(json.dumps(index))


def share_a_tensor(folder: Path) -> None:
    save_file({"b.bias": np.zeros(1, np.float32), "a.bias": np.zeros(1, np.float32)},
              folder / SECOND)  # fmt: skip


def truncate(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])


def lie_about_length(file: Path) -> None:
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])


DAMAGE = {
    "no folder": (lambda f: f.rename(f.parent / "gone"), "there is no folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "cannot read"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "config is no text": (lambda f: (f / "config.json").write_bytes(b"\xff"), "not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "a JSON list and not"),
    "nothing": (lambda f: [file.unlink() for file in f.glob("model*")], f"neither {SINGLE} nor"),
    "no index": (lambda f: (f / INDEX).unlink(), "only shards without their index"),
    "index is no JSON": (lambda f: (f / INDEX).write_text("?"), "not valid JSON"),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), "no weight_map"),
    "map to numbers": (lambda f: change_index(f, c=3), "no weight_map"),
    "no shard": (lambda f: (f / SECOND).unlink(), f"lacks the shard {SECOND}"),
    "shard outside": (lambda f: change_index(f, c="../c.safetensors"), "'../c.safetensors', which"),
    "unnamed shard": (
        lambda f: save_file({}, f / "model-00003-of-00003.safetensors"),
        "does not name the shard model-00003-of-00003",
    ),
    "tensor twice": (share_a_tensor, f"a.bias is in two shards, {FIRST} and {SECOND}"),
    "other shard": (lambda f: change_index(f, c=SECOND), f"c is in {SECOND}, but it is in {FIRST}"),
    "unindexed tensor": (lambda f: change_index(f, c=None), "c is in no shard, but it is in"),
    "unstored tensor": (lambda f: change_index(f, e=FIRST), f"e is in {FIRST}, but it is in none"),
    "empty file": (lambda f: truncate(f / FIRST, 0), "not a readable safetensors file"),
    "half a header": (lambda f: truncate(f / FIRST, 30), "not a readable safetensors file"),
    "half the bytes": (lambda f: truncate(f / FIRST, -1), "not a readable safetensors file"),
    "long header": (lambda f: lie_about_length(f / FIRST), "not a readable safetensors file"),
    "other bytes": (lambda f: (f / FIRST).write_bytes(b"GGUF" * 99), "not a readable safetensors"),
    "a folder as shard": (
        lambda f: ((f / FIRST).unlink(), (f / FIRST).mkdir()),
        f"lacks the shard {FIRST}",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_on_opening(damage, sharded):
    inflict, message = DAMAGE[damage]
    inflict(sharded)
    assert message in refusal(Folder, sharded)


def test_weights_in_another_format_are_mentioned(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    assert "it has pytorch_model.bin, which is not read" in refusal(Folder, tmp_path)
