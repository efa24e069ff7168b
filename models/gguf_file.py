"""A GGUF file: metadata and tensors, read by the package `gguf` tensor by tensor.

Shapes are given the way that NumPy and the hub give them, [out, in] for a matrix. This module knows
no architecture.

U1  Opening a file reads its metadata and no tensor, yet refuses what is truncated, no GGUF, or
    quantised in a way that cannot be undone.
U2  A tensor is dequantised to float32 when it is asked for. What was read before is given back to
    the system's cache, so that a reader who keeps no tensor holds one at a time.
"""

import mmap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unimem_jax.errors import UsageError

from .folder import OnTensor, require_tensors

FLOATS = ("F64", "F32", "F16")  # stored as such; every other type is dequantised to float32
SLICE_FLOATS = 1 << 17
EXTRA = "pip install 'unimem-jax[gguf]'"


class GgufFile:
    """One GGUF file, open for reading.

    Attributes:
      metadata: its keys with Python values.
      shapes: of all tensors, by name.
    """

    def __init__(self, path: str | Path, on_tensor: OnTensor | None = None):
        """Opens a file.

        Args:
          on_tensor: called after each tensor, to show progress.
        Raises:
          UsageError: no such file, one that is truncated or no GGUF, a tensor of a type that cannot
            be dequantised, or the package `gguf` is not installed.
        Cost: reads the metadata, about 2 seconds where it holds a vocabulary; maps the rest.
        """
        try:
            import gguf
        except ImportError as error:
            raise UsageError(f"reading {path} needs the package gguf: {EXTRA}") from error
        self.path = Path(path)
        try:
            reader = gguf.GGUFReader(self.path)
            self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
            # What the package raises where bytes lie or end too early.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(f"{path} is not a readable GGUF file: {reason}") from error
        self._dequantise = gguf.quants.dequantize
        # The reader itself goes: it holds an array for every word of a vocabulary.
        self._map: Any = reader.data.base
        self._tensors = {one.name: (one.data, one.tensor_type) for one in reader.tensors}
        self.shapes = {one.name: tuple(map(int, reversed(one.shape))) for one in reader.tensors}
        self._refuse_unreadable(gguf.GGML_QUANT_SIZES)
        self._on_tensor = on_tensor
        self._asked_bytes = 0
        self._total_bytes = sum(stored.nbytes for stored, _ in self._tensors.values())

    def dtype(self, name: str) -> str:
        """Name of the float type that a tensor is stored in, "float32" if it is quantised.

        Raises:
          UsageError: there is none of this name.
        """
        stored, kind = self._tensor(name)
        if kind.name == "BF16":
            return "bfloat16"
        return stored.dtype.name if kind.name in FLOATS else "float32"

    def tensor(self, name: str, dtype: Any = None) -> np.ndarray:
        """One tensor, dequantised, a view of the file where nothing has to change.

        Args:
          dtype: to convert to, a NumPy dtype or its name.
        Raises:
          UsageError: there is none of this name.
        Cost: the bytes of the tensor as `dtype`, and a MiB.
        """
        stored, kind = self._tensor(name)
        self._give_back()
        if kind.name in FLOATS:
            found = stored if dtype is None else stored.astype(dtype, copy=False)
        else:
            found = self._dequantised(stored, kind, self.shapes[name], dtype or np.float32)
            self._give_back()
        self._asked_bytes += stored.nbytes
        if self._on_tensor is not None:
            self._on_tensor(name, self._asked_bytes, self._total_bytes)
        return found

    def require(self, expected: Mapping[str, Sequence[int]], ignored: Collection[str] = ()) -> None:
        """Checks that the file holds exactly the tensors that a model wants; see `Folder.require`.

        Raises:
          UsageError: names the tensors that are missing, of another shape, or too many.
        """
        require_tensors(
            f"{self.path} does not hold what its metadata", self.shapes, expected, ignored
        )

    def _dequantised(
        self, stored: np.ndarray, kind: Any, shape: tuple[int, ...], dtype: Any
    ) -> np.ndarray:
        """A few rows at a time, since the package holds what it dequantises twice."""
        found = np.empty(shape, dtype)
        rows, blocks = found.reshape(-1, shape[-1]), stored.reshape(-1, stored.shape[-1])
        step = max(1, SLICE_FLOATS // shape[-1])
        for first in range(0, len(rows), step):
            taken = slice(first, first + step)
            rows[taken] = self._dequantise(blocks[taken], kind)
        return found

    def _give_back(self) -> None:
        # Read-only pages come back by themselves where somebody still looks at them.
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _tensor(self, name: str) -> tuple[np.ndarray, Any]:
        if name not in self._tensors:
            raise UsageError(f"{self.path} holds no tensor {name}")
        return self._tensors[name]

    def _refuse_unreadable(self, sizes: Mapping[Any, tuple[int, int]]) -> None:
        """Raises UsageError for a type that `gguf` reads but cannot dequantise."""
        for name, (_, kind) in self._tensors.items():
            if kind.name in FLOATS:
                continue
            try:  # one block of zeros tells
                self._dequantise(np.zeros((1, sizes[kind][1]), np.uint8), kind)
            except (NotImplementedError, KeyError) as error:
                raise UsageError(
                    f"{self.path}: tensor {name} is {kind.name}, which cannot be dequantised"
                ) from error
