"""One arena for every kind of token state of a hybrid language model.

This module holds the public names. A name is imported from its home when it is first used, so that
the host modules (spec, plan, allocator, memory, schedule, ...) import with no JAX.

Some public functions (`plan`, `step`) bear the name of the module that they live in. Here the name
is always the function; `from unimem_jax.plan import ...` reaches into the module.
"""

import importlib
import sys
import time
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unimem_jax.engine import Engine as Engine
    from unimem_jax.errors import InvariantError as InvariantError
    from unimem_jax.errors import OutOfMemory as OutOfMemory
    from unimem_jax.errors import PeerError as PeerError
    from unimem_jax.errors import UnimemError as UnimemError
    from unimem_jax.errors import UsageError as UsageError
    from unimem_jax.geometries import geometry as geometry
    from unimem_jax.load import load as load
    from unimem_jax.memory import Memory as Memory
    from unimem_jax.outside import outside as outside
    from unimem_jax.plan import Plan as Plan
    from unimem_jax.plan import plan as plan
    from unimem_jax.sampling import Sampling as Sampling
    from unimem_jax.spec import CONTEXT as CONTEXT
    from unimem_jax.spec import REQUEST as REQUEST
    from unimem_jax.spec import Lifetime as Lifetime
    from unimem_jax.spec import Part as Part
    from unimem_jax.spec import Site as Site
    from unimem_jax.spec import request as request
    from unimem_jax.spec import window as window
    from unimem_jax.step import step as step
    from unimem_jax.views import FreshViews as FreshViews

IMPORTED_NS = time.time_ns()  # what is changed on disk after this may not be what runs

# The same names at run time: name -> home. tests/test_public_names.py keeps the two lists equal.
_HOMES = {
    "CONTEXT": "spec",
    "Engine": "engine",
    "FreshViews": "views",
    "InvariantError": "errors",
    "Lifetime": "spec",
    "Memory": "memory",
    "OutOfMemory": "errors",
    "Part": "spec",
    "PeerError": "errors",
    "Plan": "plan",
    "REQUEST": "spec",
    "Sampling": "sampling",
    "Site": "spec",
    "UnimemError": "errors",
    "UsageError": "errors",
    "geometry": "geometries",
    "load": "load",
    "outside": "outside",
    "plan": "plan",
    "request": "spec",
    "step": "step",
    "window": "spec",
}


class _PublicNames(types.ModuleType):
    """The package itself, where a public name is never covered by the module of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds each submodule under its name once it is loaded, which would
        # turn `unimem_jax.plan` from the function into the module.
        if name in _HOMES and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


__all__ = sorted(_HOMES)
sys.modules[__name__].__class__ = _PublicNames
