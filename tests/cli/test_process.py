"""The command line as a process of its own: signals, pipes, and a start from the cache."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "unimem_jax.cli"]


@pytest.fixture
def environment(models_folder, tmp_path):
    path = os.pathsep.join([str(models_folder), str(ROOT)])
    without = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    return without | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}


ENDLESS = ["generate", "--model", "endless", "--arena", "64MiB", "--max-tokens", "40000"]


def test_an_interrupt_keeps_the_text_so_far(environment, tmp_path):
    file = tmp_path / "found.json"
    command = [*COMMAND, *ENDLESS, "--prompt", "hello", "--json", str(file), "--no-cache"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        bufsize=0,
    ) as process:  # fmt: skip
        first = process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"unimem: interrupted\n"
    found = json.loads(file.read_text())
    (one,) = found["completions"]
    assert one["finish_reason"] == "interrupted"
    assert 0 < len(one["token_ids"]) < 40000
    text = (first + out).decode("utf-8")
    assert text == one["text"] + "\n"
    assert not list(tmp_path.glob(".*"))


def test_a_reader_that_leaves_ends_the_program_without_a_word(environment, tmp_path):
    command = [*COMMAND, *ENDLESS, "--prompt", "hello"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(4)
        process.stdout.close()
        err = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert err == b""
    # Programs were kept for the next start, where the user's caches are.
    assert list((tmp_path / "cache" / "unimem-jax").iterdir())
