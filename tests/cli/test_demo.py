"""The demonstration on a tiny model: its table, its figures, its picture."""

import importlib
import json
from dataclasses import replace

from tests.engine.hybrid import Hybrid
from unimem_jax.demo import demo_prompts


def short_prompts():
    """The demonstration's prompts, cut to what the tiny model holds."""
    return [
        (prompt[:90], replace(options, max_tokens=options.max_tokens // 3))
        for prompt, options in demo_prompts()
    ]


def test_a_demonstration_prints_a_table_and_draws_the_arena(unimem, tmp_path, monkeypatch):
    load = importlib.import_module("unimem_jax.load")
    demo = importlib.import_module("unimem_jax.demo")
    monkeypatch.setattr(load, "load", lambda: (Hybrid(), Hybrid().init(), None))
    monkeypatch.setattr(demo, "demo_prompts", short_prompts)
    monkeypatch.setattr(demo, "ARENA_BYTES", 384 << 10)
    monkeypatch.chdir(tmp_path)
    ran = unimem("demo", "--no-cache", "--json", "found.json")
    assert ran.code == 0, ran.err
    assert ran.err == ""
    assert ran.out.endswith("out/arena.png\n")
    assert (tmp_path / "out" / "arena.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "found.json").read_text())
    run, simulated = found["statistics"], found["simulated"]
    assert len(found["completions"]) == 32
    for name in ("steps", "running_mean", "running_max", "retractions", "moved_bytes"):
        assert run[name] == simulated["unified"][name], name
    # Memory matters: not all rows run at once, units move, and a split as others have runs fewer.
    assert run["running_mean"] < run["running_max"] <= demo.ROWS
    assert run["moved_units"] > 0
    assert simulated["default"]["running_mean"] < run["running_mean"]
    assert simulated["default"]["running_mean"] <= simulated["best"]["running_mean"]
    for figure in (f"{run['running_mean']:.1f} and {run['running_max']}", "384 KiB"):
        assert figure in ran.out


def test_the_prompts_are_32_of_mixed_lengths():
    prompts = [prompt for prompt, _ in demo_prompts()]
    lengths = [len(prompt) for prompt in prompts]
    assert len(set(prompts)) == 32
    assert min(lengths) < 20
    assert sum(length > 500 for length in lengths) == 4
    assert all(1 + len(prompt) + options.max_tokens <= 1024 for prompt, options in demo_prompts())
