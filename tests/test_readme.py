"""What the README shows works: its Python runs, its commands run, and none is left unchecked."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line.partition("#")[0].strip()
    for language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
    if line.partition("#")[0].strip()
]
STAGES = [command for command in COMMANDS if command.startswith("make ")]
LONG = [command for command in COMMANDS if " bench " in command]
SHORT = [command for command in COMMANDS if command not in (*STAGES, *LONG)]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of the README in `folder`, with this environment's programs first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        shlex.split(command), cwd=folder, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip


def test_the_readme_has_an_example_and_commands() -> None:
    assert len(PYTHON) == 1
    assert len(STAGES) == 2
    assert LONG
    assert len(SHORT) >= 3


def test_the_python_example_runs_and_prints_text(tmp_path: Path) -> None:
    found = run(f"{sys.executable} -c {shlex.quote(PYTHON[0])}", tmp_path)
    assert found.returncode == 0, found.stderr
    assert "context" in found.stdout
    assert len(found.stdout.split()) > 30
    assert len(PYTHON[0].strip().splitlines()) <= 12


@pytest.mark.parametrize("command", SHORT)
def test_each_short_command_runs(command: str, tmp_path: Path) -> None:
    found = run(command, tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip()
    for name in re.findall(r"--json (\S+)", command):
        assert (tmp_path / name).stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("command", LONG)
def test_each_measurement_runs(command: str, tmp_path: Path) -> None:
    found = run(command, tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip()


@pytest.mark.parametrize("command", STAGES)
def test_each_make_command_is_a_stage_of_the_checks(command: str) -> None:
    stages = (ROOT / ".ci/run").read_text()
    assert re.search(rf"^stage .* {re.escape(command)}$", stages, re.MULTILINE)
