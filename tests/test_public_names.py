"""The package's public names: complete, lazy, and not covered by the modules they live in."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import unimem_jax

SOURCE = Path(unimem_jax.__file__).read_text(encoding="utf-8")


def names_for_type_checkers() -> dict[str, str]:
    block = next(node for node in ast.parse(SOURCE).body if isinstance(node, ast.If))
    return {
        alias.asname: statement.module.removeprefix("unimem_jax.")
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout


def test_type_checkers_and_the_running_program_see_the_same_names():
    assert names_for_type_checkers() == unimem_jax._HOMES


def test_every_public_name_is_where_the_package_says_it_is():
    for name in unimem_jax.__all__:
        assert not isinstance(getattr(unimem_jax, name), types.ModuleType), name


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(unimem_jax, "page_handler")


def test_importing_the_package_does_not_import_jax():
    assert run("import sys, unimem_jax; print('jax' in sys.modules)") == "False\n"


def test_plan_stays_the_function_after_its_module_was_imported():
    program = "import unimem_jax.plan; from unimem_jax import plan; print(callable(plan))"
    assert run(program) == "True\n"


def test_a_module_with_no_public_name_is_bound_as_usual():
    assert run("import unimem_jax.errors; print(unimem_jax.errors.__name__)") == (
        "unimem_jax.errors\n"
    )
