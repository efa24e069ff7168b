"""`unimem simulate`: its figures, its picture, and one line for every mistake."""

import json

import pytest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:46.7951690,3960,12
2023-11-16 18:15:47.2951690,1400,30
"""
EVEN = ("--input", "128", "--output", "64", "--requests", "64")
KEYS = {
    "running_mean", "running_max", "steps", "retractions_per_1000", "prefix_hit_tokens",
    "moved_bytes", "waste_fraction", "host_us_per_request_step", "tokens_per_s", "ttft_p50_s",
    "ttft_p99_s", "model", "arena_bytes", "layout", "policy", "page_tokens", "trace", "limit",
    "arrivals", "input_tokens", "output_tokens", "requests", "concurrency",
}  # fmt: skip


def simulated(unimem, folder, *arguments, model="qwen3.5-4b", arena="1GiB"):
    ran = unimem(
        "simulate", "--model", model, "--arena", arena, *arguments, "--json", str(folder / "out")
    )
    assert ran.code == 0, ran.err
    assert ran.err == ""  # quiet when piped
    return json.loads((folder / "out").read_text()), ran.out


def test_layouts_of_the_same_bytes_are_compared(unimem, tmp_path):
    found = {
        layout: simulated(unimem, tmp_path, *EVEN, "--layout", layout)[0]
        for layout in ("unified", "split", "split:4", "blocks")
    }
    for layout, figures in found.items():
        assert figures.keys() >= KEYS
        assert figures["layout"] == layout
        assert figures["prefix_hit_tokens"] == 0
        assert 0 < figures["waste_fraction"] < 1
        assert figures["tokens_per_s"] > 0
    assert found["unified"]["steps"] < min(found[name]["steps"] for name in ("split", "blocks"))
    assert found["unified"]["waste_fraction"] < found["split"]["waste_fraction"]
    assert found["split:4"]["running_max"] > found["split"]["running_max"]
    assert found["blocks"]["moved_bytes"] == found["split"]["moved_bytes"] == 0


def test_a_trace_is_replayed_with_its_times_or_at_once(unimem, tmp_path):
    (tmp_path / "trace.csv").write_text(AZURE)
    trace = ("--trace", str(tmp_path / "trace.csv"))
    timed, text = simulated(unimem, tmp_path, *trace, "--plot", str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert (timed["requests"], timed["arrivals"]) == (3, "trace")
    assert timed["seconds"] > 0.614  # the last arrival
    for figure in ("qwen3.5-4b, 1 GiB", "unified, first-come", f"{timed['running_mean']:.1f}"):
        assert figure in text
    once, _ = simulated(unimem, tmp_path, *trace, "--arrivals", "at-once")
    assert once["seconds"] < timed["seconds"]
    assert once["steps"] < timed["steps"]
    first, _ = simulated(unimem, tmp_path, *trace, "--limit", "1")
    assert (first["requests"], first["steps"]) == (1, 44)


def test_a_closed_loop_never_has_more_requests_than_it_says(unimem, tmp_path):
    found, _ = simulated(unimem, tmp_path, *EVEN, "--concurrency", "3", model="gpt-oss-20b")
    assert found["running_max"] == 3
    assert found["retractions_per_1000"] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "there is no --input"),
        (("--input", "8", "--output", "8"), "there is no --requests"),
        (("--input", "0", "--output", "8", "--requests", "1"), "input is a positive int, not 0"),
        ((*EVEN, "--concurrency", "0"), "concurrency is a positive int"),
        ((*EVEN, "--limit", "3"), "go with --trace"),
        ((*EVEN, "--trace", "T"), "--input goes with requests of one length"),
        (("--trace", "T", "--concurrency", "2"), "--concurrency goes with requests of one length"),
        (("--trace", "T", "--arrivals", "never"), "arrivals are trace or at-once"),
        (("--trace", "T", "--limit", "0"), "limit is a positive int"),
        (("--trace", "NONE"), "cannot read NONE"),
        ((*EVEN, "--layout", "bands"), "a layout is unified, split, split:RATIO or blocks"),
        ((*EVEN, "--layout", "blocks:2"), "a layout is unified"),
        ((*EVEN, "--layout", "split:-1"), "the ratio of a split is a positive number"),
        ((*EVEN, "--layout", "split:"), "the ratio of a split is a positive number"),
        ((*EVEN, "--policy", "luck"), "a policy is one of first-come, predicted"),
        ((*EVEN, "--page", "0"), "page_tokens is a positive int"),
        ((*EVEN, "--model", "gpt-5"), "no geometry is named 'gpt-5'"),
        ((*EVEN, "--model", "deepseek-v3.2", "--layout", "split"), "nothing to split"),
        ((*EVEN, "--arena", "0"), "a size is at least one byte"),
        ((*EVEN, "--arena", "1MiB"), "is too small"),
        (("--input", "40000", "--output", "8", "--requests", "2"), "can never fit"),
        ((*EVEN, "--plot", "/none/p.png"), "cannot write /none/p.png"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(
    unimem, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "T").write_text(AZURE)
    ran = unimem(
        "simulate", "--model", "qwen3.5-4b", "--arena", "1GiB", "--json", "out", *arguments
    )
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["T"]
