"""The demonstration on a tiny model: its table, its figures, its picture."""

import importlib
import json

from tests.engine.hybrid import Hybrid


class Long(Hybrid):
    """Long enough for the demonstration's longest prompts."""

    context_tokens = 1024


def test_a_demonstration_prints_a_table_and_draws_the_arena(unimem, tmp_path, monkeypatch):
    load = importlib.import_module("unimem_jax.load")
    demo = importlib.import_module("unimem_jax.demo")
    monkeypatch.setattr(load, "load", lambda: (Long(), Long().init(), None))
    monkeypatch.setattr(demo, "ROWS", 16)
    monkeypatch.setattr(demo, "ARENA_BYTES", 1 << 20)
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
    # Memory matters: some wait, some move, and a split of the same bytes runs fewer.
    assert run["running_mean"] < 16
    assert run["moved_units"] > 0
    assert simulated["best"]["running_mean"] < run["running_mean"]
    assert simulated["default"]["running_mean"] < simulated["best"]["running_mean"]
    for figure in (f"{run['running_mean']:.1f} and {run['running_max']}", "1 MiB"):
        assert figure in ran.out


def test_the_prompts_are_32_of_mixed_lengths():
    from unimem_jax.demo import demo_prompts

    lengths = [len(prompt) for prompt, _ in demo_prompts()]
    assert len(lengths) == 32
    assert len({prompt for prompt, _ in demo_prompts()}) == 32
    assert min(lengths) < 20
    assert sum(length > 500 for length in lengths) == 4
    assert max(length + 1 + options.max_tokens for length, (_, options) in
               zip(lengths, demo_prompts(), strict=True)) <= 1024  # fmt: skip
