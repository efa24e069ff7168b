"""A Hugging Face folder: `config.json` beside weights in safetensors files, read tensor by tensor.

The weights are one `model.safetensors`, or shards that `model.safetensors.index.json` lists. This
module knows no architecture: a family says which tensors it wants, and asks for them one by one.

H1  Opening a folder reads no tensor, yet finds every file that is not what it claims to be: all
    headers are read, and index and shards agree on where each tensor lies.
H2  A tensor is a read-only view of its file; only a change of dtype copies it. What was read before
    is given back to the system's cache, so that a reader who keeps no tensor holds one at a time.
"""

import json
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from unimem_jax.errors import UsageError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
NAMED = 3  # tensors that one message names; the rest is counted

# Element types as a file calls them. A weight that is to become a float must be stored as one.
FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
INTEGERS = {
    code: np.dtype(name)
    for code, name in {
        "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
        "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    }.items()
}  # fmt: skip
FLOAT8 = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
STORED = FLOATS | INTEGERS | FLOAT8

# Takes a tensor's name, and the bytes asked for so far and in all.
type OnTensor = Callable[[str, int, int], object]


class Folder:
    """One checkpoint, open for reading.

    Attributes:
      config: the object in `config.json`.
      names: of all tensors, sorted.
    """

    def __init__(self, path: str | Path, on_tensor: OnTensor | None = None):
        """Opens a folder.

        Args:
          on_tensor: called after each tensor, to show progress.
        Raises:
          UsageError: no such folder, no or invalid `config.json`, no weights, or files that are
            truncated, not safetensors, missing, or disagree; the message names the file.
        Cost: reads `config.json`, the index and the headers; maps the files.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise UsageError(f"there is no folder {self.path}")
        self.config: dict[str, Any] = read_object(self.path / CONFIG)
        self._files = {file.name: _File(file) for file in _weight_files(self.path)}
        self._where = _locate(self.path, self._files)
        self.names = tuple(sorted(self._where))
        self._asked: set[str] = set()
        self._expect(self.names)
        self._on_tensor = on_tensor
        self._asked_bytes = 0

    @property
    def unused(self) -> tuple[str, ...]:
        """Tensors that nobody has asked for and that `require` was not told to ignore."""
        return tuple(name for name in sorted(self._expected) if name not in self._asked)

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor.

        Raises:
          UsageError: there is none of this name.
        """
        return self._file(name).shapes[name]

    def dtype(self, name: str) -> str:
        """Name of the type that a tensor is stored in, such as "bfloat16".

        Raises:
          UsageError: there is none of this name, or its type has no NumPy dtype.
        """
        file = self._file(name)
        if file.codes[name] not in STORED:
            raise UsageError(
                f"{file.path}: tensor {name} is {file.codes[name]}; supported are "
                f"{', '.join(STORED)}"
            )
        return STORED[file.codes[name]].name

    def tensor(self, name: str, dtype: Any = None) -> np.ndarray:
        """One tensor, as a read-only view of the file; a copy where `dtype` is another one.

        Args:
          dtype: to convert to, a NumPy dtype or its name; None leaves the stored one.
        Raises:
          UsageError: no such tensor, a stored type without a NumPy dtype, or a float asked of what
            is stored as quantised numbers.
        Cost: the bytes of the tensor.
        """
        file = self._file(name)
        stored = np.dtype(self.dtype(name))
        found = file.view(name, stored)
        if dtype is not None:
            wanted = np.dtype(dtype)
            if wanted in FLOATS.values() and stored not in FLOATS.values():
                raise UsageError(
                    f"{file.path}: tensor {name} is {stored}, which is quantised; weights are "
                    f"{', '.join(FLOATS)}"
                )
            found = found.astype(wanted, copy=False)
        if name not in self._asked:
            self._asked.add(name)
            self._asked_bytes += file.byte_count(name)
        if self._on_tensor is not None:
            self._on_tensor(name, self._asked_bytes, self._total_bytes)
        return found

    def require(self, expected: Mapping[str, Sequence[int]], ignored: Collection[str] = ()) -> None:
        """Checks that the folder holds exactly the tensors that a model wants.

        Args:
          expected: name to shape.
          ignored: names, or beginnings of names that end in a full stop, of tensors that may be
            there and are not wanted.
        Raises:
          UsageError: names the tensors that are missing, of another shape, or too many.
        """
        place = f"{self.path} does not hold what its {CONFIG}"
        require_tensors(place, {n: self.shape(n) for n in self.names}, expected, ignored)
        self._expect(expected)

    def require_unquantised(self) -> None:
        """Refuses a checkpoint whose weights are not plain floats.

        Raises:
          UsageError: `config.json` has a "quantization_config"; names the method.
        """
        settings = self.config.get("quantization_config")
        if settings:
            method = settings.get("quant_method") if isinstance(settings, dict) else settings
            raise UsageError(
                f"{self.path / CONFIG}: quantization_config.quant_method is {method!r}; this "
                f"model takes weights that are {', '.join(FLOATS)}"
            )

    def _expect(self, names: Collection[str]) -> None:
        self._expected = frozenset(names)
        self._total_bytes = sum(self._file(name).byte_count(name) for name in names)

    def _file(self, name: str) -> "_File":
        if name not in self._where:
            raise UsageError(f"{self.path} holds no tensor {name}")
        return self._files[self._where[name]]


def require_tensors(
    place: str, shapes: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]],
    ignored: Collection[str],
) -> None:  # fmt: skip
    """Checks that a checkpoint holds exactly the tensors that a model wants.

    Args:
      place: begins the message.
      shapes: of all tensors that there are.
      expected, ignored: as for `Folder.require`.
    Raises:
      UsageError: names the tensors that are missing, of another shape, or too many.
    """
    prefixes = tuple(name for name in ignored if name.endswith("."))
    misshapen = [
        f"{name} is {list(shapes[name])} and not {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != tuple(shape)
    ]
    extra = [
        name for name in sorted(shapes)
        if name not in expected and name not in ignored and not name.startswith(prefixes)
    ]  # fmt: skip
    faults = [
        f"{what} {len(names)} tensors: {_listed(names)}"
        for what, names in (
            ("it lacks", sorted(expected.keys() - shapes.keys())),
            ("it has another shape for", misshapen),
            ("nothing is known of", extra),
        )
        if names
    ]
    if faults:
        raise UsageError(f"{place} says; {'; '.join(faults)}")


class _File:
    """One safetensors file: 8 bytes of header length, a JSON header, and the tensors' bytes."""

    def __init__(self, path: Path):
        self.path = path
        try:
            # The reader of the format refuses headers that lie about bytes, so we need not.
            with safe_open(path, framework="np"):
                pass
            with path.open("rb") as opened:
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"cannot read {path}: {reason}") from error
        except SafetensorError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(f"{path} is not a readable safetensors file: {reason}") from error
        self._start = 8 + int.from_bytes(self._map[:8], "little")
        header = json.loads(self._map[8 : self._start])
        header.pop("__metadata__", None)
        self.codes = {name: str(entry["dtype"]) for name, entry in header.items()}
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        self._offsets = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}

    def view(self, name: str, dtype: np.dtype) -> np.ndarray:
        # Read-only pages come back by themselves where somebody still looks at them.
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        begin, end = (self._start + offset for offset in self._offsets[name])
        stored = np.frombuffer(self._map, np.uint8)[begin:end]
        return stored.view(dtype).reshape(self.shapes[name])

    def byte_count(self, name: str) -> int:
        begin, end = self._offsets[name]
        return int(end - begin)


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      UsageError: it cannot be read, or is no JSON object.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} holds a JSON {type(found).__name__} and not an object")
    return found


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights; one file goes before an index, as in Transformers."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".gguf"))
        beside = f"; it has {others[0]}, which is not read" if others else ""
        if any(folder.glob(SHARDS)):
            beside = ", only shards without their index"
        raise UsageError(f"{folder} has neither {SINGLE} nor {INDEX}{beside}")
    listed = set(_weight_map(folder).values())
    for name in sorted(listed):
        if name != Path(name).name or name in ("", ".", ".."):
            raise UsageError(f"{folder / INDEX} names the shard {name!r}, which is no file name")
        if not (folder / name).is_file():
            raise UsageError(f"{folder} lacks the shard {name}, which its {INDEX} names")
    if unlisted := sorted({path.name for path in folder.glob(SHARDS)} - listed):
        raise UsageError(f"{folder / INDEX} does not name the shard {unlisted[0]}")
    return [folder / name for name in sorted(listed)]


def _weight_map(folder: Path) -> dict[str, str]:
    """The index: tensor to shard."""
    found = read_object(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise UsageError(f"{folder / INDEX} has no weight_map from tensors to shards")
    return found


def _locate(folder: Path, files: Mapping[str, _File]) -> dict[str, str]:
    """Tensor to file (H1)."""
    where: dict[str, str] = {}
    for file_name, file in files.items():
        for name in file.codes:
            if name in where:
                raise UsageError(
                    f"{folder}: tensor {name} is in two shards, {where[name]} and {file_name}"
                )
            where[name] = file_name
    if SINGLE in files:
        return where
    listed = _weight_map(folder)
    for name in sorted(where.keys() | listed.keys()):
        if where.get(name) != listed.get(name):
            raise UsageError(
                f"{folder / INDEX} says that tensor {name} is in {listed.get(name, 'no shard')}, "
                f"but it is in {where.get(name, 'none')}"
            )
    return where


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
