"""Rules about imports: they flow down, the host modules know no JAX, and there is no cycle."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.tree import PACKAGES, Breach, Files, Rule, imports, module_name, python_files

# Lowest first. Modules of one layer may import each other as long as that makes no cycle.
HOST_LAYERS = (
    ("errors", "interrupts"),
    ("spec", "sampling", "text", "options", "statistics"),
    ("bands", "geometries", "pads"),
    ("plan", "weights"),
    ("ledger", "tables"),
    ("layout",),
    ("capacity",),
    ("allocator",),
    ("packet", "page_tables", "price", "watch"),
    ("requests", "outside", "prefix_tree", "forecast"),
    ("prefix",),
    ("pending",),
    ("holdings",),
    ("memory",),
    ("queue",),
    ("schedule",),
    ("serving", "step_time", "trace"),
    ("simulate",),
    ("blocks", "splits"),
    ("admission",),
    ("output",),
)
JAX_LAYERS = (
    ("store", "draw"),
    ("views",),
    ("step", "program_files"),
    ("programs",),
    ("engine", "load"),
    ("picture",),
    ("demo", "replay"),
    ("cli",),
)
HEIGHT = {
    f"unimem_jax.{name}": height
    for height, layer in enumerate(HOST_LAYERS + JAX_LAYERS)
    for name in layer
}
HOST_MODULES = tuple(f"unimem_jax.{name}" for layer in HOST_LAYERS for name in layer)
# `Memory.init` hands out the device's first state; the import waits until it is called.
UPWARD_ON_CALL = {("unimem_jax.memory", "unimem_jax.step")}
OPEN_TO_MODELS = ("unimem_jax.errors", "unimem_jax.spec", "unimem_jax.views")
JAX_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax")

# Started with the folder to import from (or "") and then the modules.
WITHOUT_JAX = """
import importlib, sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib", "flax", "orbax")))
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}\\t{error}")
"""


def known_modules(files: Files) -> set[str]:
    return {module_name(path) for path, _ in python_files(files)}


def is_inside(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def upward_imports(files: Files) -> Iterator[Breach]:
    known = known_modules(files)
    for path, tree in python_files(files, *PACKAGES):
        importer = module_name(path)
        if importer == "unimem_jax":
            continue  # the public names, each imported on first use
        if path.startswith("unimem_jax/") and importer not in HEIGHT:
            yield Breach(path, 1, f"{importer} is in no layer of tests/tidy/layers.py")
        for asked in imports(path, tree, known):
            reason = reason_against(importer, asked.module)
            if reason and (importer, asked.module) not in UPWARD_ON_CALL:
                yield Breach(path, asked.line, f"{importer} imports {asked.module}: {reason}")


def reason_against(importer: str, asked: str) -> str:
    """Why `importer` may not import `asked`, or nothing."""
    if is_inside(asked, "tests", "bench", "examples"):
        return "the product knows nothing of what is around it"
    if importer in HOST_MODULES and is_inside(asked, *JAX_PACKAGES, "unimem_jax.pallas_kernels"):
        return "a host module does without JAX"
    if not is_inside(asked, "unimem_jax") or asked == "unimem_jax":
        return ""
    if is_inside(importer, "unimem_jax.pallas_kernels"):
        own = is_inside(asked, "unimem_jax.pallas_kernels")
        return "" if own else "kernels take arrays and know nothing of ours"
    if is_inside(importer, "unimem_jax.models"):
        own = is_inside(asked, "unimem_jax.models", "unimem_jax.pallas_kernels", *OPEN_TO_MODELS)
        return "" if own else "a model declares parts and reads views, no more"
    if is_inside(asked, "unimem_jax.models"):
        return "models are found by entry point or given as objects"
    if HEIGHT.get(asked, -1) > HEIGHT.get(importer, len(HEIGHT)):
        return "it lies higher"
    return ""


def names_of_models(files: Files) -> Iterator[Breach]:
    for path, tree in python_files(files, "unimem_jax"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and str(node.value).startswith("unimem_jax.models."):
                yield Breach(path, node.lineno, f"{node.value!r}")


def absolute_siblings(files: Files) -> Iterator[Breach]:
    known = known_modules(files)
    for path, tree in python_files(files):
        own = PACKAGES.get(path.split("/")[0], "")
        for asked in imports(path, tree, known):
            if is_inside(asked.module, "models", "pallas_kernels") and not asked.is_relative:
                yield Breach(path, asked.line, f"imports {asked.module}")
            is_sibling = own not in ("", "unimem_jax") and is_inside(asked.module, own)
            if is_sibling and not asked.is_relative:
                yield Breach(path, asked.line, f"imports its sibling {asked.module} by full name")


def cycles(files: Files) -> Iterator[Breach]:
    known = known_modules(files)
    graph = {
        module_name(path): {
            asked.module for asked in imports(path, tree, known) if not asked.is_for_types
        }
        for path, tree in python_files(files, *PACKAGES)
    }
    settled: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> Iterator[Breach]:
        if module in trail:
            circle = (*trail[trail.index(module) :], module)
            yield Breach(circle[0].replace(".", "/"), 1, " imports ".join(circle))
        elif module not in settled:
            for asked in sorted(graph.get(module, ())):
                yield from walk(asked, (*trail, module))
            settled.add(module)

    for module in sorted(graph):
        yield from walk(module, ())


def failures_without_jax(modules: list[str], folder: Path | str = "") -> str:
    """Imports `modules` where JAX is missing; one line for each that fails. About 0.3 s."""
    command = [sys.executable, "-c", WITHOUT_JAX, str(folder), *modules]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


RULES = (
    Rule(
        "imports flow down",
        "move what both need into the lower module; a new module gets its place in"
        " tests/tidy/layers.py and docs/ARCHITECTURE.md",
        upward_imports,
    ),
    Rule(
        "unimem_jax names no module of unimem_jax.models",
        "find models through the entry-point group, or take them as objects",
        names_of_models,
    ),
    Rule(
        "no module has two identities",
        "inside models/ and pallas_kernels/ import siblings relatively; elsewhere write"
        " unimem_jax.models and unimem_jax.pallas_kernels",
        absolute_siblings,
    ),
    Rule(
        "imports make no cycle",
        "move what both need into a module below them",
        cycles,
    ),
)
