"""Every example runs as a user would run it, and says what the engine says."""

import subprocess
import sys
from pathlib import Path

import pytest

import unimem_jax as um

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(name: str, folder: Path) -> str:
    found = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_decode_loop_writes_what_the_engine_writes(tmp_path: Path) -> None:
    printed = run("decode_loop.py", tmp_path)
    model, params, _ = um.load("embedded")
    engine = um.Engine(model, params, arena_bytes=8 << 20, rows=4)
    prompts = ["In the beginning", "And the LORD said unto Moses,", "Blessed are"]
    # The loop draws one token after the prompt and 64 in its scans; the engine counts all of them.
    for prompt, done in zip(
        prompts, engine.generate(prompts, um.Sampling(max_tokens=65)), strict=True
    ):
        assert f"{prompt}{done.text}" in printed


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
