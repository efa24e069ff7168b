"""The built wheel: it holds what the tree holds, and it generates text wherever it is started.

The wheel is built from a copy of the tree, since a build leaves files beside its sources. No test
but the slow one needs a network: the wheel is installed into an empty environment that sees the
dependencies of the environment that runs the tests, and not its editable installation.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import jax
import pytest

from tests.tidy.tree import PACKAGES

ROOT = Path(__file__).parent.parent
GENERATE = ("generate", "--model", "embedded", "--prompt", "In the beginning", "--max-tokens", "8")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what a wheel is made of."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    return build_wheel(sources, tmp_path_factory.mktemp("wheel"))


def pip(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, arguments)],
        check=True,
    )


def build_wheel(sources: Path, folder: Path) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, sources)
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, *options: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", *options, folder], check=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The `bin` of an environment with the wheel, where only our editable installation is hidden.

    A path file gives it the dependencies. Path files inside that folder, which is how an editable
    installation is found, are not followed.
    """
    bin_folder = make_environment(tmp_path_factory.mktemp("environment"), "--without-pip")
    (site_packages,) = bin_folder.parent.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip("--python", bin_folder / "python", "install", "--no-deps", wheel)
    return bin_folder


def files_in_wheel(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def files_in_tree(tree: Path) -> set[str]:
    """Every file of the three folders, under the name that the wheel gives it."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(tree / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for path in (tree / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def surprises(wheel: Path, tree: Path) -> set[str]:
    """Files that only one of the two holds, the wheel's own records aside."""
    return {
        name
        for name in files_in_wheel(wheel) ^ files_in_tree(tree)
        if not name.split("/")[0].endswith(".dist-info")
    }


def assert_generates(folder: Path, *command: str | Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(
        [*command, *GENERATE], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), run.stderr


def test_the_wheel_holds_what_the_tree_holds_and_no_more(wheel, sources):
    assert not surprises(wheel, sources)
    assert "unimem_jax/models/embedded.py" in files_in_wheel(wheel)


def test_a_file_that_the_wheel_leaves_out_is_noticed(wheel, sources, tmp_path):
    tree = shutil.copytree(sources, tmp_path / "tree")
    (tree / "models" / "vocabulary.bin").touch()
    assert surprises(wheel, tree) == {"unimem_jax/models/vocabulary.bin"}


def test_the_wheel_installs_nothing_beside_its_package(wheel):
    tops = {name.split("/")[0] for name in files_in_wheel(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"unimem_jax"}


def test_the_wheel_carries_its_licence_and_the_weights_with_their_card(wheel):
    names = files_in_wheel(wheel)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    weights = [name for name in names if name.endswith(".safetensors")]
    assert weights
    assert all(f"{name.rpartition('/')[0]}/MODEL_CARD.md" in names for name in weights)


def test_the_installed_wheel_is_what_runs_and_not_the_clone(installed):
    program = "import unimem_jax.models.embedded as e, unimem_jax; print(e.__file__, unimem_jax)"
    run = subprocess.run(
        [installed / "python", "-P", "-c", program], capture_output=True, text=True, cwd=installed
    )
    assert run.stdout.count(str(installed.parent)) == 2, run.stderr
    assert str(ROOT) not in run.stdout


def test_it_generates_text_from_an_empty_folder(installed, tmp_path):
    assert_generates(tmp_path, installed / "unimem")


def test_a_models_module_of_the_user_does_not_break_it(installed, tmp_path):
    (tmp_path / "models.py").write_text("raise RuntimeError('the wrong models was imported')\n")
    # With -c, unlike with the script, the folder comes first where Python looks for modules.
    start = "import sys, unimem_jax.cli; sys.exit(unimem_jax.cli.main())"
    assert_generates(tmp_path, installed / "python", "-c", start)


@pytest.mark.slow
def test_it_generates_text_where_pip_installed_it_with_its_dependencies(wheel, tmp_path):
    bin_folder = make_environment(tmp_path / "environment")
    # The same JAX as here, so that what the default suite fetched serves again.
    pip("--python", bin_folder / "python", "install", wheel, f"jax=={jax.__version__}")
    (tmp_path / "empty").mkdir()
    assert_generates(tmp_path / "empty", bin_folder / "unimem")
