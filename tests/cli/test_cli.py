"""The command line in this process: what it prints, writes and refuses."""

import json
import os
from pathlib import Path

import pytest

from unimem_jax.cli import size
from unimem_jax.errors import UsageError

GENERATE = ("generate", "--no-cache", "--model", "tiny", "--arena", "512KiB", "--max-tokens", "6")


def test_one_prompt_prints_its_text_and_writes_json(unimem, tmp_path):
    ran = unimem(*GENERATE, "--prompt", "hello", "--json", tmp_path / "found.json")
    assert ran.code == 0
    assert ran.err == ""
    found = json.loads((tmp_path / "found.json").read_text())
    assert os.listdir(tmp_path) == ["found.json"]
    (one,) = found["completions"]
    assert ran.out == one["text"] + "\n"
    assert one["prompt"] == "hello"
    assert one["prompt_tokens"] == 6
    assert len(one["token_ids"]) == 6
    assert found["statistics"]["generated_tokens"] == 6
    assert found["arena_bytes"] == 512 << 10


def test_prompts_of_a_file_and_ids_run_together(unimem, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\nworld é\n", encoding="utf-8")
    ran = unimem(*GENERATE, "--prompts", file)
    assert ran.code == 0
    assert ran.out.count("--- ") == 2
    assert "--- 1 of 2: 6 + 6 tokens, length\nhello" in ran.out
    assert "--- 2 of 2: 9 + 6 tokens, length\nworld é" in ran.out
    ids = unimem(*GENERATE, "--ids", ",".join(map(str, [0, *b"hello"])), "--json", file)
    (one,) = json.loads(file.read_text())["completions"]
    assert one["text"] is None or ran.out.split("hello")[1].startswith(one["text"])
    assert ids.out.splitlines()[1] == ",".join(map(str, one["token_ids"]))


def test_a_model_without_text_takes_bytes_with_a_warning_or_ids_without(unimem):
    asked = (*GENERATE, "--model", "silent")
    ran = unimem(*asked, "--prompt", "hello")
    assert ran.code == 0
    assert ran.err.startswith("unimem: silent has no tokenizer, so text goes in as bytes")
    assert ran.err.count("\n") == 1
    ran = unimem(*asked, "--ids", "1,2")
    assert ran.code == 0
    assert ran.err == ""


def test_a_plan_prints_itself_and_is_json_too(unimem, tmp_path):
    ran = unimem("plan", "--model", "tiny", "--arena", "1e6", "--page", 8,
                 "--json", tmp_path / "plan.json")  # fmt: skip
    assert ran.code == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [pool["name"] for pool in found["sub_pools"]] == ["request", "window_10", "context"]
    for pool in found["sub_pools"]:
        assert pool["name"] in ran.out
    assert "outside the arena" in ran.out
    assert found["outside"]["always"]["last tokens"] == 256
    assert "a request of 160 tokens holds 1 slot of request (4 KiB)" in ran.out


def test_a_published_geometry_is_planned_without_its_model(unimem):
    ran = unimem("plan", "--geometry", "gpt-oss-20b", "--arena", "8GiB")
    assert ran.code == 0
    assert "window_128" in ran.out
    assert "24 KiB" in ran.out


WRONG = [
    ("", "COMMAND"),
    ("sing", "invalid choice: 'sing'"),
    ("generate", "--prompt --prompts --chat --ids is required"),
    ("generate --prompt a --ids 1", "not allowed with"),
    ("generate --prompt a --system b", "--system goes with --chat"),
    ("generate --prompt a --model LICENSE.md", "no model, folder or file is called 'LICENSE.md'"),
    ("generate --prompt a --model /etc/hosts", "no model reads files such as /etc/hosts"),
    ("generate --prompt a --speed 9", "unrecognized arguments: --speed 9"),
    ("generate --prompt a --top-k x", "invalid int value: 'x'"),
    ("generate --prompt a --temperature nan", "temperature is a finite"),
    ("generate --prompt a --temperature 1e400", "temperature is a finite"),
    ("generate --prompt a --temperature -1", "temperature is not negative"),
    ("generate --prompt a --top-p 0", "top_p lies above 0"),
    ("generate --prompt a --min-p inf", "min_p is a finite"),
    ("generate --prompt a --max-tokens 0", "max_tokens is at least 1"),
    ("generate --prompt a --seed 99999999999999999999999", "seed is a 64-bit integer"),
    ("generate --prompt a --stop=", "a stop text has at least one character"),
    ("generate --prompt a --model nope", "no model, folder or file is called 'nope'"),
    ("generate --prompt a --model broken", "installed but broken"),
    ("generate --prompt=", "at least one token"),
    ("generate --ids=", "at least one token"),
    ("generate --ids 1,x", "token ids are numbers"),
    ("generate --ids 1,256", "token ids go from 0 to 255; seen 256"),
    ("generate --ids=-1", "seen -1"),
    ("generate --prompts /none/such", "cannot read /none/such: No such file"),
    ("generate --prompt a --arena 0", "a size is at least one byte"),
    ("generate --prompt a --arena lots", "a size is a number"),
    ("generate --prompt a --arena 1KiB", "too small: one slot of request 4 KiB"),
    ("generate --prompt a --arena 12KiB --max-tokens 99", "2 prompt and 99 new tokens can never"),
    ("generate --prompt a --page 0", "page_tokens is a positive int"),
    ("generate --prompt a --rows -1", "rows is a positive int"),
    ("generate --prompt a --chunk 0", "chunk_tokens is a positive int"),
    ("generate --prompt a --json /none/such/file", "cannot write /none/such/file"),
    ("plan --arena -5", "a size is"),
    ("plan --page 0", "page_tokens is a positive int"),
    ("plan --model /", "config.json"),
    ("plan --geometry gpt-oss-20b", "not allowed with argument --model"),
    ("demo --json /none/such/file", "cannot write"),
    ("demo --picture /none/such/file", "cannot write"),
]


@pytest.mark.parametrize("line, message", WRONG, ids=[line or "nothing" for line, _ in WRONG])
def test_a_mistake_is_one_line_and_leaves_nothing(unimem, tmp_path, line, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, *rest = line.split() or [""]
    arguments = [command, *rest] if command else []
    if command in ("generate", "plan") and "--model" not in rest:
        arguments[1:1] = ["--model", "tiny"]
    if command == "generate":
        arguments[1:1] = ["--no-cache"]
    if command and command != "sing" and "--json" not in rest:
        arguments[1:1] = ["--json", "found.json"]
    ran = unimem(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("unimem: ")
    assert ran.err.count("\n") == 1
    assert message in ran.err
    assert not [path for path in Path(tmp_path).rglob("*") if path.is_file()]


def test_a_file_that_is_no_text_or_has_no_line_is_refused(unimem, tmp_path):
    file = tmp_path / "prompts"
    for content, message in [(b"\xff\xfe", "is not UTF-8: byte 0"), (b"\n \n", "has no prompt")]:
        file.write_bytes(content)
        ran = unimem(*GENERATE, "--prompts", file)
        assert ran.code == 2
        assert message in ran.err


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("1", 1), ("256MiB", 256 << 20), ("1GiB", 1 << 30), ("1e9", 10**9), ("64kB", 64000),
        ("1.5 KiB", 1536), ("2g", None), ("3TB", 3 * 10**12), ("7B", 7), (" 8kib ", 8192),
        ("", None), ("MiB", None), ("-1", None), ("nan", None), ("inf", None), ("0.2", None),
        ("1e400", None), ("1e99999", None), ("0x10", None), ("1_000", None), ("٣", None),
    ],
)  # fmt: skip
def test_sizes_are_numbers_with_units(text, wanted):
    if wanted is None:
        with pytest.raises(UsageError, match="a size is"):
            size(text)
    else:
        assert size(text) == wanted
