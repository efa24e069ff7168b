"""Finds models by name or by folder, without knowing any.

A model announces itself under the entry-point group `unimem_jax.models`: its name there, and a
loader `load(path=None) -> (model, params, tokenizer or None)`. A folder says which loader reads it
in its `config.json`, under "model_type". A loader that can show progress takes `on_tensor` too.
"""

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from pathlib import Path
from typing import Any

from unimem_jax.errors import UsageError
from unimem_jax.step import Model
from unimem_jax.text import Tokenizer

GROUP = "unimem_jax.models"


# Takes a tensor's name, and the bytes read so far and in all.
type OnTensor = Callable[[str, int, int], object]


def load(
    name_or_folder: str | Path = "embedded", on_tensor: OnTensor | None = None
) -> tuple[Model, Any, Tokenizer | None]:
    """Loads a model.

    Args:
      name_or_folder: the name of an installed model, or a folder with its `config.json` and
        weights.
      on_tensor: called after each tensor that is read from a folder, by loaders that show progress.
    Returns:
      The model, its parameters, and its tokenizer if it has one.
    Raises:
      UsageError: no such model or folder, a folder that names no installed model type, or weights
        that are missing or wrong.
    """
    found = installed()
    name = str(name_or_folder)
    if name in found:
        return _loader(found[name])()
    folder = Path(name_or_folder)
    if folder.is_dir():
        model_type = _model_type(folder, found)
        loader = _loader(found[model_type])
        if on_tensor is None or "on_tensor" not in signature(loader).parameters:
            return loader(folder)
        return loader(folder, on_tensor=on_tensor)
    raise UsageError(f"no model and no folder is called {name!r}; {_listing(found)}")


def installed() -> dict[str, EntryPoint]:
    """The installed models by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _listing(found: dict[str, EntryPoint]) -> str:
    return f"installed models: {', '.join(sorted(found)) or 'none'}"


def _loader(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"model {entry.name!r} is installed but broken: {error}") from error


def _model_type(folder: Path, found: dict[str, EntryPoint]) -> str:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {file}, which names the model type: {error.strerror}; {_listing(found)}"
        ) from error
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON: {error}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str) or model_type not in found:
        raise UsageError(
            f"{file} names the model type {model_type!r}, for which no model is installed; "
            f"{_listing(found)}"
        )
    return model_type
