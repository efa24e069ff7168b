"""SmolLM2 as it is shipped: what it answers, and its perplexity however its state is stored.

Runs where `unimem fetch smollm2` has been; `.ci/chat` sees to it.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unimem_jax.models import smollm2

import unimem_jax as um
from unimem_jax.allocator import UNIFIED, Split
from unimem_jax.cli import main
from unimem_jax.requests import Work

if smollm2.installed() is None and "UNIMEM_REQUIRE_SMOLLM2" not in os.environ:
    pytest.skip("the weights are not here; `unimem fetch smollm2` gets them", True)

FACTS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is the chemical formula of water?": "H2O",
    "In which country are the pyramids of Giza?": "Egypt",
    "What is the largest ocean on Earth?": "Pacific",
}
REAL_TEXT = Path(__file__).parents[1] / "models" / "held_out.txt"  # the King James Bible
ROWS, TOKENS = 7, 66  # stretches of the text, each longer than the longest page
# Of Transformers 5.24 with PyTorch 2.13 in float32, which read the same file.
WORDS = "It's 2024, wörld ☃🌍\n\n  def f(x):\n\treturn x<|im_end|>"
WORD_IDS = [
    1589, 506, 216, 34, 32, 34, 36, 28, 267, 29989, 400, 4636, 242, 221, 10813, 230, 231, 8866, 753,
    275, 24, 104, 727, 198, 197, 5406, 1792, 2,
]  # fmt: skip
NATS = 4.006545


@pytest.fixture(scope="module")
def loaded():
    return smollm2.load()


def test_greedy_answers_hold_the_facts_that_were_asked_for(tmp_path, capsys):
    file = tmp_path / "found.json"
    questions = [part for question in FACTS for part in ("--chat", question)]
    options = ["--max-tokens", "40", "--rows", str(len(FACTS)), "--json", str(file)]
    assert main(["generate", "--no-cache", "--model", "smollm2", *options, *questions]) == 0
    assert capsys.readouterr().err == ""
    found = json.loads(file.read_text())["completions"]
    assert [one["prompt"] for one in found] == list(FACTS)
    for one in found:
        assert FACTS[one["prompt"]] in one["text"]
        assert "\N{REPLACEMENT CHARACTER}" not in one["text"]
        assert "<|im" not in one["text"]
    assert [one["finish_reason"] for one in found[:2]] == ["stop", "stop"]


def test_text_is_cut_into_the_tokens_of_transformers(loaded):
    assert loaded[2].encode(WORDS) == WORD_IDS


def test_perplexity_does_not_depend_on_how_state_is_stored(loaded):
    model, params, text = loaded
    ids = np.asarray(text.encode(REAL_TEXT.read_text())[: ROWS * TOKENS], np.int32)
    ids = ids.reshape(ROWS, TOKENS)
    wanted = whole_nats(model, params, ids)
    assert wanted == pytest.approx(NATS, abs=1e-4)
    for page_tokens in (1, 8, 16, 64):
        unified, split = stored_nats(model, params, ids, page_tokens)
        assert unified == pytest.approx(wanted, abs=1e-4), page_tokens
        assert split == pytest.approx(wanted, abs=1e-4), page_tokens


def whole_nats(model, params, ids: np.ndarray) -> float:
    """Nats per token, with no past and no arena."""
    views = um.FreshViews.of(model.parts(), jnp.full(ROWS, TOKENS, jnp.int32), TOKENS)
    logits = jax.jit(lambda params: model.apply(params, jnp.asarray(ids), views)[0])(params)
    return float(np.mean(surprise(np.asarray(logits)[:, :-1], ids[:, 1:])))


def stored_nats(model, params, ids: np.ndarray, page_tokens: int) -> Sequence[float]:
    """Nats per token, token by token through one arena: unified, and split."""
    plan = um.plan(model.parts(), 64 << 20, page_tokens)
    run = jax.jit(um.step(model, plan), donate_argnums=1)
    found = []
    for layout in (UNIFIED, Split(tuple(pool.unit_count for pool in plan.sub_pools))):
        memory = um.Memory(plan, rows=ROWS, context_tokens=TOKENS + 1, layout=layout)
        device, pages = memory.init(), memory.bucket_pages(TOKENS)
        requests = [memory.admit(TOKENS, 1) for _ in ids]
        nats = []
        for at in range(TOKENS - 1):
            work = [
                Work(request, 1, row[at : at + 1])
                for request, row in zip(requests, ids, strict=True)
            ]
            for packet in memory.run(work, rows=ROWS, tokens=1, pages=pages):
                device, out = run(params, device, packet)
            nats.append(surprise(np.asarray(out.logits), ids[:, at + 1]))
        memory.check()
        found.append(float(np.mean(nats)))
    return found


def surprise(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """-log p of each token, in nats."""
    wide = logits.astype(np.float64)
    total = np.log(np.exp(wide - wide.max(axis=-1, keepdims=True)).sum(axis=-1))
    chosen = np.take_along_axis(wide, tokens[..., None], axis=-1)[..., 0]
    return total + wide.max(axis=-1) - chosen
