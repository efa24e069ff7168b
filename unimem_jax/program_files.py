"""Compiled programs in files, so that a second start neither traces nor compiles.

JAX's own cache spares compilation, but to ask it a program must first be traced and lowered, which
takes longer than reading it. Here a program is named by what it is made from.

B1  A name covers all that a program depends on: the model and the plan with everything in them, the
    shapes and dtypes of parameters and device, the packet's shape, the source of this package, the
    versions of what it stands on, JAX's settings and the device. What another's code takes part in
    has no name, since its source may change unseen, and is not kept. Neither is what a process
    makes whose source was changed since it was read, nor what runs on several devices.
B2  A file is written whole or not at all, and one that cannot be read, or was changed since, as a
    disk that lost power may do, is as good as none.
B3  Where JAX keeps programs itself nothing is kept here: what was read from its cache cannot be
    written once more (jaxlib 0.12.0.1 leaves functions out, and the copy fails when it runs).
"""

import hashlib
import io
import os
import pickle
import platform
import shutil
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import jax
from jax.experimental import serialize_executable

from unimem_jax import IMPORTED_NS
from unimem_jax.output import replacing
from unimem_jax.packet import Shape

LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")  # a version says what these do
OWN = __package__ or "unimem_jax"
MOST_SETS = 8  # of programs, one per model and plan; the least recently used go
DIGITS = 32  # of the name of a set
ENDING = ".programs"
SUM_BYTES = 32  # before each program: its SHA-256
SET_NAMES = "[0-9a-f]" * DIGITS + ENDING


class ProgramFiles:
    """The programs of one model and plan in a folder.

    Args:
      folder: as `set_folder` gives it; made when the first program is saved.
      device: which runs them.
    """

    def __init__(self, folder: Path, device: jax.Device):
        self._folder, self._device = folder, device

    def load(self, shape: Shape) -> Any | None:
        """The compiled program of a packet shape, ready to run; None if there is none."""
        try:
            stored = self._file(shape).read_bytes()
            if _sum(stored[SUM_BYTES:]) != stored[:SUM_BYTES]:
                return None
            serialised, arguments, results = pickle.loads(stored[SUM_BYTES:])
            program = serialize_executable.deserialize_and_load(
                serialised, arguments, results, execution_devices=[self._device],
                backend=self._device.client,
            )  # fmt: skip
            os.utime(self._folder)
        except Exception:  # noqa: BLE001 -- whatever is wrong with a file, it is compiled anew (B2)
            return None
        return program

    def save(self, shape: Shape, program: Any) -> None:
        """Keeps a compiled program; does nothing where it or the folder cannot be written."""
        with suppress(Exception):  # a full disk; a backend or a program that cannot be serialised
            stored = pickle.dumps(serialize_executable.serialize(program))
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._file(shape)) as file:
                file.write(_sum(stored) + stored)
            sets = self._folder.parent.glob(SET_NAMES)  # what else is there is not ours
            by_use = sorted(sets, key=lambda path: path.stat().st_mtime)
            for old in by_use[:-MOST_SETS]:
                shutil.rmtree(old, ignore_errors=True)

    def _file(self, shape: Shape) -> Path:
        sizes = (getattr(shape, name) for name in Shape.__slots__)
        return self._folder / ("-".join(map(str, sizes)) + ".program")


def has_name(*described: object) -> bool:
    """Whether programs made from these objects can be kept (B1)."""
    return _description(described) is not None


def set_folder(folder: Path, *described: object) -> Path | None:
    """The folder of all programs that are made from what is described; None if they are not kept.

    Args:
      folder: of all sets.
      described: whatever tells one program from another, packet shapes apart.
    Cost: reads the source of this package, tens of milliseconds.
    """
    found = _description((described, _surroundings()))
    if found is None or jax.config.jax_compilation_cache_dir:
        return None
    digest = hashlib.sha256(found)
    for package in sorted(name for name in sys.modules if _top(name) == OWN):
        for place in sorted(getattr(sys.modules[package], "__path__", ())):
            for source in sorted(Path(place).glob("*.py")):
                if _changed_ns(source) > IMPORTED_NS:
                    return None
                digest.update(source.name.encode() + source.read_bytes())
    return folder / (digest.hexdigest()[:DIGITS] + ENDING)


def _sum(stored: bytes) -> bytes:
    return hashlib.sha256(stored).digest()


def _changed_ns(source: Path) -> int:
    """When a file became what it is; one that is replaced by an older one has a new `st_ctime`."""
    found = source.stat()
    return max(found.st_mtime_ns, found.st_ctime_ns)


def _description(described: object) -> bytes | None:
    found = io.BytesIO()
    try:
        _Describer(found).dump(described)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError):
        return None  # nested too deeply, for instance
    return found.getvalue()


class _Describer(pickle.Pickler):
    """Pickles objects, as long as all of their code is this package's, a library's or Python's."""

    def reducer_override(self, one: Any) -> Any:
        if isinstance(one, type | FunctionType | BuiltinFunctionType):
            top = _top(one.__module__ or "")
            if top != OWN and top not in LIBRARIES and not _is_python(one.__module__ or ""):
                raise pickle.PicklingError(f"{one.__module__} may change unseen")
        if isinstance(one, ModuleType):
            raise pickle.PicklingError(f"the module {one.__name__} may change unseen")
        return NotImplemented


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_python(module: str) -> bool:
    """Whether it is of Python itself, and not somebody's `code` that goes before Python's."""
    if _top(module) not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # built in
        return True
    place = Path(file)
    return place.is_relative_to(Path(os.__file__).parent) and "site-packages" not in place.parts


def _surroundings() -> tuple[object, ...]:
    """What a program depends on beside its own source."""
    versions = [(name, version(name)) for name in LIBRARIES]
    plain = (bool, int, float, str)
    settings = sorted(
        (name, value) for name, value in jax.config.values.items() if isinstance(value, plain)
    )
    devices = [(one.platform, one.device_kind, one.id) for one in jax.devices()]
    backend = jax.devices()[0].client.platform_version
    flags = os.environ.get("XLA_FLAGS", "")
    return sys.version, versions, settings, devices, backend, flags, _processor()


def _processor() -> str:
    """Programs for a CPU hold its own instructions."""
    with suppress(OSError), open("/proc/cpuinfo") as found:
        for line in found:
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"
