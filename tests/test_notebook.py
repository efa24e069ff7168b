"""The notebooks run from top to bottom, and are kept without what they once showed."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted(Path(__file__).parents[1].glob("docs/notebooks/*.ipynb"))
DECODE = "benchmark_decode"


def read(notebook: Path) -> list[tuple[str, str]]:
    """Kind and text of every cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def run(notebook: Path, **settings: Any) -> dict[str, Any]:
    """What the names of a notebook stand for after its code ran, as cells do, in one namespace.

    Args:
      settings: set after the first code cell, which names them too.
    """
    names: dict[str, Any] = {}
    is_first = True
    for at, (kind, text) in enumerate(read(notebook)):
        if kind == "code":
            exec(compile(text, f"{notebook.name}[{at}]", "exec"), names)
            if is_first:
                assert settings.keys() <= names.keys()
                names |= settings
                is_first = False
    return names


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda one: one.stem)
def test_a_notebook_is_a_valid_file_without_outputs(notebook: Path) -> None:
    found = json.loads(notebook.read_text(encoding="utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in found["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in found["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_decoding_is_measured_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib.use("Agg")
    (notebook,) = (one for one in NOTEBOOKS if one.stem == DECODE)
    try:
        names = run(notebook, BATCHES=(1, 2), PROMPT_TOKENS=40, NEW_TOKENS=9, ROUNDS=2)
        printed = capsys.readouterr().out
        assert "window_64" in printed
        for batch, (rounds, held) in names["measured"].items():
            assert len(rounds) == 2
            assert min(rounds) > 0
            # 48 computed tokens: a slot of 64 KiB, three pages of 16 KiB and three of 8 KiB.
            assert held == (64 + 3 * 16 + 3 * 8) << 10
            assert f"batch {batch:>3}: " in printed
        bytes_held = names["bytes_held"]
        assert len(bytes_held) == names["model"].context_tokens
        assert bytes_held[47].sum() == held
        slots, windows, contexts = bytes_held.T
        assert len(set(slots)) == 1
        # 64 tokens touch at most five pages of 16, however long the request is.
        assert windows.max() == windows[:100].max() == 5 * 16 << 10
        assert contexts[-1] == 64 * 8 << 10
        assert names["speed"].lines[0].get_xdata().tolist() == [1, 2]
        assert len(names["cost"].collections) == 3
        names["figure"].canvas.draw()
    finally:
        plt.close("all")
