"""Finds models by name, folder or file, without knowing any.

A model announces itself under the entry-point group `unimem_jax.models`: its name there, and a
loader `load(path=None) -> (model, params, tokenizer or None)`. A folder says which loader reads it
in its `config.json`, under "model_type"; a file says it by what its name ends in. A loader that can
show progress takes `on_tensor` too. A name in the group `unimem_jax.fetch` is a function that gets
what the loader of that name needs.
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

GROUP, FETCH_GROUP = "unimem_jax.models", "unimem_jax.fetch"


# Takes a tensor's name, and the bytes read so far and in all.
type OnTensor = Callable[[str, int, int], object]


def load(
    name_or_path: str | Path = "embedded", on_tensor: OnTensor | None = None
) -> tuple[Model, Any, Tokenizer | None]:
    """Loads a model.

    Args:
      name_or_path: the name of an installed model, a folder with its `config.json` and weights, or
        a file such as `model.gguf`. A text is a name before it is a path; a `Path` is no name.
      on_tensor: called after each tensor that is read, by loaders that show progress.
    Returns:
      The model, its parameters, and its tokenizer if it has one.
    Raises:
      UsageError: no such model, folder or file, one that no installed model reads, or weights that
        are missing or wrong.
    """
    found, name, path = installed(), str(name_or_path), Path(name_or_path)
    is_name = isinstance(name_or_path, str) and name in found
    place: tuple[Path, ...] = () if is_name else (path,)
    if place and path.is_dir():
        name = _model_type(path, found)
    elif place and path.is_file():
        name = path.suffix.removeprefix(".").lower()
        if name not in found:
            raise UsageError(f"no model reads files such as {path}; {_listing(found)}")
    elif place:
        raise UsageError(f"no model, folder or file is called {name!r}; {_listing(found)}")
    loader = _loader(found[name])
    if on_tensor is None or "on_tensor" not in signature(loader).parameters:
        return loader(*place)
    return loader(*place, on_tensor=on_tensor)


def fetch(name: str, say: Callable[[str], object]) -> None:
    """Gets what a model needs and does not ship, unless it is there.

    Args:
      say: told what is fetched and how much it is, before anything is.
    Raises:
      UsageError: there is nothing to fetch for this name.
      PeerError: fetching failed.
    """
    found = {entry.name: entry for entry in entry_points(group=FETCH_GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise UsageError(f"nothing is fetched for {name!r}; what can be fetched: {known}")
    _loader(found[name])(say)


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
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid JSON: {error}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str) or model_type not in found:
        raise UsageError(
            f"{file} names the model type {model_type!r}, for which no model is installed; "
            f"{_listing(found)}"
        )
    return model_type
