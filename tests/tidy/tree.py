"""The tree as text, what a breach is, and what a module imports.

A rule sees the project as a mapping from path to text and so can be shown a made-up project too.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Files = Mapping[str, str]

# Folder at the top -> the import name that it is installed under.
PACKAGES = {
    "unimem_jax": "unimem_jax",
    "pallas_kernels": "unimem_jax.pallas_kernels",
    "models": "unimem_jax.models",
}
FOLDERS = (*PACKAGES, "tests", "bench", "examples", "docs", ".ci")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".ipynb", ""}


@dataclass(frozen=True, slots=True)
class Breach:
    """One place where the tree breaks a rule."""

    path: str
    line: int
    found: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as a sentence, what to do about a breach, and the function that finds breaches."""

    sentence: str
    cure: str
    breaches: Callable[[Files], Iterator[Breach]]


@dataclass(frozen=True, slots=True)
class Import:
    """One import: the module asked for, and whether only type checkers execute it."""

    module: str
    line: int
    is_for_types: bool
    is_relative: bool


def read_tree(root: Path) -> dict[str, str]:
    """Every file that the project is made of, by its path from `root`; "" for what is no text."""
    paths = [path for path in root.iterdir() if path.is_file()]
    for folder in FOLDERS:
        paths += (root / folder).rglob("*")
    return {
        path.relative_to(root).as_posix(): (
            path.read_text(encoding="utf-8") if path.suffix in TEXT_SUFFIXES else ""
        )
        for path in sorted(paths)
        if path.is_file() and "__pycache__" not in path.parts
    }


def python_files(files: Files, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Path and syntax tree of the Python files in `folders` (none given: in the whole tree)."""
    for path, text in files.items():
        if path.endswith(".py") and (not folders or path.split("/")[0] in folders):
            yield path, ast.parse(text, path)


def module_name(path: str) -> str:
    """The import name of a file: `models/layers.py` is `unimem_jax.models.layers`."""
    folder, *rest = path.removesuffix(".py").split("/")
    name = ".".join([PACKAGES.get(folder, folder), *rest])
    return name.removesuffix(".__init__")


def imports(path: str, tree: ast.Module, known: set[str]) -> Iterator[Import]:
    """Every import of a file, those inside functions too.

    `from package import name` asks for `package.name` if that is one of the `known` modules.
    """
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package.pop()
    for node, is_for_types in walk_imports(tree, False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, is_for_types, False)
            continue
        base = [node.module] if node.module else []
        if node.level:
            base = package[: len(package) + 1 - node.level] + base
        for alias in node.names:
            inner = ".".join([*base, alias.name])
            target = inner if inner in known else ".".join(base)
            yield Import(target, node.lineno, is_for_types, node.level > 0)


def walk_imports(node: ast.AST, is_for_types: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Import statements below `node`, each with whether it stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, is_for_types
        else:
            guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk_imports(child, is_for_types or guarded)
