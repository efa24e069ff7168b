"""The scripts behind `make`: which Python is taken, and when an environment counts as complete.

No test here installs anything: the Pythons and uv are shell scripts that answer as told.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHELL = shutil.which("sh")

# `-c` questions are answered by exit code. `-m venv FOLDER` puts the same script into FOLDER, and
# `-m pip` leaves a line in the log, unless told to fail.
FAKE_PYTHON = """#!{shell}
case "$1 $2" in
"-c "*version_info*) exit {too_old} ;;
"-c "*ensurepip*) exit {no_ensurepip} ;;
"-c "*) exit 0 ;;
"-m venv") /bin/mkdir -p "$3/bin" && /bin/cp "$0" "$3/bin/python" ;;
"-m pip") echo "$@" >>"$FAKE_LOG"; [ ! -e "$FAKE_LOG.fail" ] ;;
esac
"""


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_python(path: Path, *, too_old: bool = False, no_ensurepip: bool = False) -> Path:
    answers = {"too_old": int(too_old), "no_ensurepip": int(no_ensurepip)}
    return write_script(path, FAKE_PYTHON.format(shell=SHELL, **answers))


def find_python(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs the search where PATH is only `tmp_path/bin` and HOME is `tmp_path`."""
    return subprocess.run(
        [SHELL, str(ROOT / ".ci/find-python")],
        env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
    )


def assert_one_line(search: subprocess.CompletedProcess, *words: str) -> None:
    assert search.returncode != 0
    assert search.stdout == ""
    assert search.stderr.count("\n") == 1
    for word in ("Python 3.12 or newer", *words):
        assert word in search.stderr


def test_no_python_at_all_is_one_line_that_says_what_to_install(tmp_path):
    assert_one_line(find_python(tmp_path), "install one", "apt-get install python3.12-venv", "uv")


def test_a_python_that_is_too_old_is_the_same_as_none(tmp_path):
    write_python(tmp_path / "bin/python3", too_old=True)
    assert_one_line(find_python(tmp_path), "install one")


def test_a_python_without_ensurepip_is_named_with_its_cure(tmp_path):
    python = write_python(tmp_path / "bin/python3.12", no_ensurepip=True)
    assert_one_line(find_python(tmp_path), str(python), "ensurepip", "venv package", "uv")


def test_a_python_without_ensurepip_does_not_hide_a_whole_one(tmp_path):
    write_python(tmp_path / "bin/python3.12", no_ensurepip=True)
    whole = write_python(tmp_path / "bin/python3.13")
    assert find_python(tmp_path).stdout == f"venv {whole}\n"


def test_a_shim_that_does_not_run_does_not_hide_the_python_in_pyenv(tmp_path):
    write_script(tmp_path / "bin/python3.12", f"#!{SHELL}\necho 'pyenv: not found' >&2\nexit 127\n")
    python = write_python(tmp_path / ".pyenv/versions/3.12.1/bin/python3")
    assert find_python(tmp_path).stdout == f"venv {python}\n"


def test_a_pyenv_in_another_place_is_found(tmp_path):
    python = write_python(tmp_path / "else where/versions/3.13.0/bin/python3")
    search = find_python(tmp_path, PYENV_ROOT=str(tmp_path / "else where"))
    assert search.stdout == f"venv {python}\n"


def test_a_python_of_unknown_age_comes_after_the_known_ones(tmp_path):
    unknown = write_python(tmp_path / "bin/python3")
    assert find_python(tmp_path).stdout == f"venv {unknown}\n"
    known = write_python(tmp_path / ".pyenv/versions/3.13.0/bin/python3")
    assert find_python(tmp_path).stdout == f"venv {known}\n"


def test_uv_alone_is_asked_for_a_python(tmp_path):
    write_script(tmp_path / "bin/uv", f"#!{SHELL}\n")
    assert find_python(tmp_path).stdout == "uv >=3.12,<3.15\n"


def test_uv_off_the_path_is_found_where_its_installer_puts_it(tmp_path):
    write_script(tmp_path / ".local/bin/uv", f"#!{SHELL}\n")
    assert find_python(tmp_path).stdout == "uv >=3.12,<3.15\n"


def test_uv_stands_in_for_a_missing_ensurepip(tmp_path):
    write_script(tmp_path / "bin/uv", f"#!{SHELL}\n")
    python = write_python(tmp_path / "bin/python3.12", no_ensurepip=True)
    assert find_python(tmp_path).stdout == f"uv {python}\n"


def test_a_chosen_python_is_the_only_one_considered(tmp_path):
    write_python(tmp_path / "bin/python3.12")
    chosen = write_python(tmp_path / "chosen")
    assert find_python(tmp_path, PYTHON=str(chosen)).stdout == f"venv {chosen}\n"
    too_old = write_python(tmp_path / "old", too_old=True)
    assert_one_line(find_python(tmp_path, PYTHON=str(too_old)), f"PYTHON={too_old}")


class Clone:
    """A clone of only the scripts, and a log of what pip was asked to install."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.python = write_python(folder.parent / "python")
        self.log = folder.parent / "log"
        shutil.copytree(ROOT / ".ci", folder / ".ci")
        (folder / "pyproject.toml").write_text("[project]\n")

    def install(self, *requirements: str) -> int:
        return subprocess.run(
            [self.folder / ".ci/environment", ".venv", "test", *requirements],
            env={**os.environ, "PYTHON": str(self.python), "FAKE_LOG": str(self.log)},
            capture_output=True,
        ).returncode

    @property
    def installations(self) -> int:
        return self.log.read_text().count("\n") if self.log.exists() else 0


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path / "a clone")


def test_a_second_run_installs_nothing(clone):
    assert clone.install() == 0
    assert clone.install() == 0
    assert clone.installations == 1
    assert "-e .[test]" in clone.log.read_text()


def test_an_interrupted_installation_is_not_taken_for_a_complete_one(clone):
    failure = Path(f"{clone.log}.fail")
    failure.touch()
    assert clone.install() != 0
    leftover = clone.folder / ".venv/leftover"
    leftover.touch()
    failure.unlink()
    assert clone.install() == 0
    assert clone.installations == 2
    assert not leftover.exists()


def test_a_changed_pyproject_is_installed_into_the_environment_that_is_there(clone):
    clone.install()
    kept = clone.folder / ".venv/kept"
    kept.touch()
    (clone.folder / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    assert clone.install() == 0
    assert clone.installations == 2
    assert kept.exists()


def test_another_request_makes_the_environment_anew(clone):
    clone.install("jax==1")
    leftover = clone.folder / ".venv/leftover"
    leftover.touch()
    assert clone.install("jax==2") == 0
    assert not leftover.exists()
    assert "jax==2" in clone.log.read_text()


def test_a_clone_that_was_moved_is_installed_again(clone):
    clone.install()
    clone.folder = clone.folder.rename(clone.folder.parent / "moved")
    assert clone.install() == 0
    assert clone.installations == 2


def test_an_environment_whose_python_is_gone_is_made_anew(clone):
    clone.install()
    (clone.folder / ".venv/bin/python").unlink()
    assert clone.install() == 0
    assert clone.installations == 2


def test_no_python_leaves_no_environment_behind(clone):
    clone.python.unlink()
    assert clone.install() != 0
    assert not (clone.folder / ".venv").exists()


@pytest.fixture
def stages(clone):
    """Runs `.ci/run` where every stage only writes down that it ran, and `make lint` fails."""
    folder, log = clone.folder, clone.folder / "ran"
    (folder / "pyproject.toml").write_text('  "jax>=1.2.3,<2",\n')
    for name in ("oldest", "h200"):
        write_script(folder / f".ci/{name}", f"#!{SHELL}\necho {name} $* >>{str(log)!r}\n")
    write_script(folder / "bin/make", f'#!{SHELL}\necho make $* >>{str(log)!r}\n[ "$*" != lint ]\n')
    run = subprocess.run(
        ["bash", folder / ".ci/run"],
        env={**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    return run, log.read_text().splitlines()


def test_a_stage_that_fails_fails_the_run_and_hides_no_other(stages):
    run, ran = stages
    assert run.returncode == 1
    assert {"make test", "make lint", "make types", "h200"} <= set(ran)
    (line,) = [line for line in run.stdout.splitlines() if "FAILED" in line]
    assert line.startswith("lint ")
    assert line.endswith("FAILED (exit code 1)")


def test_the_oldest_jax_is_the_lower_bound_that_users_get(stages):
    assert {"oldest 1.2.3", "h200 1.2.3"} <= set(stages[1])
