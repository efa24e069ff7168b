"""What the engine refuses, before anything runs, and that it serves on afterwards."""

from dataclasses import replace

import numpy as np
import pytest

from tests.engine.conftest import CHUNK, assert_empty
from unimem_jax.engine import Engine
from unimem_jax.errors import UsageError
from unimem_jax.sampling import Sampling

BAD_PROMPTS = [
    ("", "at least one token"),
    ([], "at least one token"),
    ([1, 256], "from 0 to 255; seen 256"),
    ([-1], "seen -1"),
    ([10**30], "from 0 to 255"),
    ([1.0], "whole numbers"),
    ([True], "whole numbers"),
    ([None], "whole numbers"),
    (np.ones((1, 2), np.int32), "text or a sequence of token ids"),
    (np.ones(2, np.float32), "text or a sequence of token ids"),
    (b"bytes", "text or a sequence of token ids"),
    (7, "text or a sequence of token ids"),
    (None, "text or a sequence of token ids"),
    ("\ud800", "not valid Unicode"),
    ("x" * 159, r"160 tokens leaves no room for a new one in a context of 160"),
    ("x" * 9999, "10000 tokens leaves no room"),
]


@pytest.mark.parametrize("prompt, message", BAD_PROMPTS, ids=[m for _, m in BAD_PROMPTS])
def test_one_bad_prompt_is_named_and_none_is_run(roomy, prompt, message):
    before = roomy.statistics()
    for call in (roomy.generate, roomy.stream):
        with pytest.raises(UsageError, match=message) as error:
            call(["good", prompt, "good"])
        assert str(error.value).startswith("prompt 1: ")
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=message):
        roomy.submit(prompt)
    assert roomy.statistics() == before
    assert_empty(roomy)


BAD_CALLS = [
    (7, None, "prompts are a list"),
    ([[1]], [Sampling()] * 2, "2 samplings do not match 1 prompts"),
    ([[1], [2]], [], "0 samplings do not match 2 prompts"),
    ([[1]], {"max_tokens": 3}, "sampling is one Sampling"),
    ([[1]], [3], "sampling is one Sampling"),
    ([[1]], Sampling(stop_ids=[256]), "stop ids go from 0 to 255; seen 256"),
]


@pytest.mark.parametrize("prompts, sampling, message", BAD_CALLS, ids=[m for *_, m in BAD_CALLS])
def test_a_wrong_call_is_refused_and_the_engine_serves_on(roomy, prompts, sampling, message):
    wanted = roomy.generate("ok", Sampling(max_tokens=3))
    with pytest.raises(UsageError, match=message):
        roomy.generate(prompts, sampling)
    assert roomy.generate("ok", Sampling(max_tokens=3)) == wanted


def test_no_prompts_give_no_completions(roomy):
    assert roomy.generate([]) == []


def test_a_request_that_an_empty_arena_cannot_hold_is_refused_with_what_would_fit(hybrid, tight):
    small = Engine(*hybrid, arena_bytes=40 << 10, page_tokens=4, rows=2, chunk_tokens=CHUNK)
    with pytest.raises(
        UsageError, match=r"10 prompt and 150 new tokens .*pages of context"
    ) as seen:
        small.submit([1] * 10, Sampling(max_tokens=1000))
    most = int(str(seen.value).split("at most ")[1].split()[0])
    assert 1 < most < 150
    small.submit([1] * 10, Sampling(max_tokens=most))
    with pytest.raises(UsageError, match="can never fit"):
        small.submit([1] * 10, Sampling(max_tokens=most + 1))
    with pytest.raises(UsageError, match="the prompt alone does not fit"):
        small.submit([1] * 150, Sampling(max_tokens=1))
    assert len(small.queue) == 1
    while not small.is_idle:  # alone in an arena that holds it token by token
        last = small.step()
    assert last[-1].finish_reason == "length"
    assert small.statistics().generated_tokens == most
    assert small.statistics().retractions == 0


def test_without_a_tokenizer_ids_go_in_and_out(hybrid, roomy):
    intake, roomy.intake = roomy.intake, replace(roomy.intake, tokenizer=None)
    try:
        (found,) = roomy.generate([[0, 104, 105]], Sampling(max_tokens=5))
        with pytest.raises(UsageError, match="a text needs a tokenizer"):
            roomy.generate("hi")
        with pytest.raises(UsageError, match="stop texts need a tokenizer"):
            roomy.generate([[1]], Sampling(stop="x"))
    finally:
        roomy.intake = intake
    assert found.text is None
    assert found.token_ids == roomy.generate("hi", Sampling(max_tokens=5))[0].token_ids


def test_sizes_that_make_no_engine_are_refused(hybrid):
    for name, value in [
        ("rows", 0), ("rows", True), ("chunk_tokens", -1), ("context_tokens", 0),
        ("page_tokens", 0), ("arena_bytes", 0), ("arena_bytes", 2.5),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=name):
            Engine(*hybrid, **({"arena_bytes": 1 << 20} | {name: value}))
    with pytest.raises(UsageError, match="made for 160 tokens, not for 161"):
        Engine(*hybrid, arena_bytes=1 << 20, context_tokens=161)
    with pytest.raises(UsageError, match="too small: one slot of request 4 KiB"):
        Engine(*hybrid, arena_bytes=1 << 10)
