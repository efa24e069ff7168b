"""Rules about the shape of code: sizes, names, docstrings, and what a library must not do."""

import ast
import re
from collections.abc import Iterator

from tests.tidy.tree import PACKAGES, Breach, Files, Rule, python_files

MODULE_LINES = 400
FUNCTION_LINES = 60
KERNEL_LINES = 120
POSITIONAL_PARAMETERS = 5
COLUMNS = 100
TEST_NAME_WORDS = 3

CLASS_WORDS = {"Manager", "Handler", "Util", "Utils", "Helper", "Base", "Abstract", "Impl"}
BANNED_NAME = re.compile(r"_*(do_.*|process_.*|num_.*|tmp|data)")
BANNED_MODULE = re.compile(r"(utils?|helpers?|common|misc|base|manager|handler)\.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, outer: Function | None = None) -> Iterator[tuple[Function, bool]]:
    """Every function below `node`, with whether it is nested in another function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child, outer is not None
            yield from functions(child, child)
        else:
            yield from functions(child, outer)


def is_kernel_body(path: str, function: Function, is_nested: bool) -> bool:
    named = function.name.endswith(("kernel", "body"))
    return path.startswith("pallas_kernels/") and (is_nested or named)


def own_lines(path: str, function: Function) -> int:
    """Lines of a function without its docstring and without the kernel bodies inside it."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    for inner, is_nested in functions(function, function):
        if is_kernel_body(path, inner, is_nested):
            lines -= inner.end_lineno - inner.lineno + 1
    return lines


def long_modules(files: Files) -> Iterator[Breach]:
    for path, _ in python_files(files):
        lines = files[path].count("\n")
        if lines > MODULE_LINES:
            yield Breach(path, 1, f"{lines} lines")


def long_functions(files: Files) -> Iterator[Breach]:
    for path, tree in python_files(files):
        for function, is_nested in functions(tree):
            is_kernel = is_kernel_body(path, function, is_nested)
            lines = own_lines(path, function)
            if lines > (KERNEL_LINES if is_kernel else FUNCTION_LINES):
                yield Breach(path, function.lineno, f"{function.name} has {lines} lines")


def many_parameters(files: Files) -> Iterator[Breach]:
    for path, tree in python_files(files, *PACKAGES, "bench", "examples"):
        for function, is_nested in functions(tree):
            names = [arg.arg for arg in function.args.posonlyargs + function.args.args]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > POSITIONAL_PARAMETERS and not is_kernel_body(path, function, is_nested):
                yield Breach(path, function.lineno, f"{function.name} takes {count} by position")


def wide_lines(files: Files) -> Iterator[Breach]:
    for path, text in files.items():
        if path.endswith((".py", ".toml")) or path.startswith(".ci/"):
            for line, content in enumerate(text.splitlines(), 1):
                if len(content) > COLUMNS:
                    yield Breach(path, line, f"{len(content)} columns")


def bound_names(node: ast.AST) -> Iterator[str]:
    """The names that a node gives to something, as far as its author chose them."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def banned_names(files: Files) -> Iterator[Breach]:
    for path, tree in python_files(files):
        if BANNED_MODULE.fullmatch(path.split("/")[-1]):
            yield Breach(path, 1, "a module is named for its idea")
        for node in ast.walk(tree):
            for name in bound_names(node):
                words = set(re.findall(r"[A-Z]+[a-z]*", name))
                if name == "data" and isinstance(node, ast.arg) and path.startswith("tests/"):
                    continue  # Hypothesis' word for examples drawn inside a test
                is_class = isinstance(node, ast.ClassDef)
                if (is_class and words & CLASS_WORDS) or BANNED_NAME.fullmatch(name):
                    yield Breach(path, node.lineno, name)


def public_definitions(
    body: list[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith("_"):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node.body, f"{prefix}{node.name}.")


def missing_docstrings(files: Files) -> Iterator[Breach]:
    for path, tree in python_files(files):
        if tree.body and ast.get_docstring(tree) is None:
            yield Breach(path, 1, "the module has no docstring")
    for path, tree in python_files(files, *PACKAGES):
        for name, node in public_definitions(tree.body):
            if ast.get_docstring(node) is None:
                yield Breach(path, node.lineno, f"{name} has no docstring")


def bare_excepts(files: Files) -> Iterator[Breach]:
    for path, tree in python_files(files):
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                yield Breach(path, node.lineno, "except:")


# XLA_FLAGS changes compiled programs, whoever set it.
READ_ENVIRONMENT = ("unimem_jax/cli.py", "unimem_jax/program_files.py")


def environment_reads(files: Files) -> Iterator[Breach]:
    for path, tree in python_files(files, *PACKAGES):
        for node in ast.walk(tree):
            is_read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if is_read and path not in READ_ENVIRONMENT:
                yield Breach(path, node.lineno, ast.unparse(node))


def terse_test_names(files: Files) -> Iterator[Breach]:
    for path, tree in python_files(files, "tests"):
        for function, _ in functions(tree):
            _, *words = function.name.split("_")
            if function.name.startswith("test_") and len(words) < TEST_NAME_WORDS:
                yield Breach(path, function.lineno, function.name)


RULES = (
    Rule(
        f"a module has at most {MODULE_LINES} lines",
        "split it by idea; one home per idea",
        long_modules,
    ),
    Rule(
        f"a function has at most {FUNCTION_LINES} lines, a kernel body {KERNEL_LINES}"
        " (docstrings not counted)",
        "name a part of it and move it out",
        long_functions,
    ),
    Rule(
        f"a function takes at most {POSITIONAL_PARAMETERS} positional parameters",
        "make the later ones keyword-only, or group what belongs together in a value",
        many_parameters,
    ),
    Rule(
        f"a line has at most {COLUMNS} columns",
        "wrap it; `make format` wraps code, not comments and docstrings",
        wide_lines,
    ),
    Rule(
        "names say what a thing is",
        "take a noun of docs/GLOSSARY.md for a class, a verb for a function, `x_count` for a count",
        banned_names,
    ),
    Rule(
        "modules and public things have docstrings",
        "say what it is; for what is called: shapes, units, errors, cost, source",
        missing_docstrings,
    ),
    Rule(
        "no except is bare",
        "name the errors that are expected; let the others through",
        bare_excepts,
    ),
    Rule(
        "only the command line and the names of kept programs read the environment",
        "take the value as an argument",
        environment_reads,
    ),
    Rule(
        "the name of a test is a sentence",
        f"say what holds, in {TEST_NAME_WORDS} words or more",
        terse_test_names,
    ),
)
