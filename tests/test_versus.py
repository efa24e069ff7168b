"""`python -m bench decode --versus transformers`, beside a stub and beside Transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import decode, versus
from unimem_jax.errors import UsageError

# Answers as Transformers does; the second way is the faster one, and tokens are zeros.
STUB = """
import json, sys
print(json.dumps({"transformers": "0", "ways": [["slow"], ["fast", "experts"]]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    rows = [[0] * asked["new_tokens"] for _ in asked["prompts"]]
    answer = {"seconds": 1000 / len(asked["way"]), "tokens": rows, "state_bytes": 10 * len(rows)}
    print(json.dumps(answer | {"cpu_seconds": 2000}), flush=True)
"""
SMALL = ("--prompt-tokens", "5", "--new-tokens", "3", "--rounds", "2", "--batches", "1", "2")


def run(out: Path, *arguments: str) -> dict[str, Any]:
    """The result of the command, run in this process on the cores that it has."""
    cores = str(len(os.sched_getaffinity(0)))
    asked = ["--versus", "transformers", "--threads", cores, "--json", str(out)]
    assert decode.main([*asked, *SMALL, *arguments]) == 0
    return json.loads(out.read_text())


def test_rows_give_both_speeds_and_the_bytes_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    monkeypatch.setattr(versus, "OTHER_SIDE", stub)
    (found,) = run(tmp_path / "found.json", "--model", "qwen3")["models"]
    assert (found["model"], found["transformers"]) == ("qwen3", "0")
    assert [row["batch"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        assert row["way"] == "fast experts"
        assert row["transformers"]["bytes_per_request"] == 10
        # Two layers' keys and values of 2 heads of 8, one page of 16 tokens.
        assert row["ours"]["bytes_per_request"] == 2 * 2 * 2 * 8 * 4 * 16
        ours, theirs = (row[side]["tokens_per_s_median"] for side in ("ours", "transformers"))
        assert theirs == round(row["batch"] * 2 / 500, 1)
        assert ours > theirs
        assert row["ratio"] > 1
        assert row["cpu_ratio"] > 1
        assert row["same_tokens"] < 1
    assert capsys.readouterr().out.count("of tokens are the same") == 2


def test_an_interpreter_without_transformers_is_told_of_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "stub.py"
    stub.write_text("raise SystemExit")
    monkeypatch.setattr(versus, "OTHER_SIDE", stub)
    with pytest.raises(UsageError, match="--transformers-python names an interpreter"):
        run(tmp_path / "found.json", "--model", "qwen3")


@pytest.mark.slow
@pytest.mark.parametrize("model", versus.TINY)
def test_both_sides_decode_the_same_tokens(model: str, tmp_path: Path) -> None:
    python = os.environ.get("UNIMEM_TRANSFORMERS_PYTHON")
    if python is None:
        pytest.skip("UNIMEM_TRANSFORMERS_PYTHON names no interpreter that has Transformers")
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench", "decode", "--versus", "transformers"]
    asked = ["--transformers-python", python, "--json", str(out), "--model", model]
    root = Path(versus.__file__).parents[1]
    subprocess.run([*command, *asked, *SMALL], cwd=root, check=True)
    (found,) = json.loads(out.read_text())["models"]
    assert [row["same_tokens"] for row in found["rows"]] == [1, 1]
    assert ("note" in found) == (model == "qwen3_5")
