"""Promise 1 without an engine: the logits of every step depend on weights and tokens alone.

The reference is a full recomputation of the final text, with no past and no arena. Prompts are
longer than 300 tokens: several pages of 64, several chunks of the recurrence, a window that slides
many times. Weights are random; a seed with a close call would make greedy tokens a matter of
rounding, so the reference refuses it.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unimem_jax.models.embedded import EmbeddedModel, Sizes

import unimem_jax as um
from tests.device.models import Attending, Mixture, Remembering
from tests.engine.hybrid import Recomputed
from tests.laws.serving import Program, Served, Service, Way, program
from unimem_jax.allocator import Split
from unimem_jax.spec import CONTEXT, window

CONTEXT_TOKENS, NEW_TOKENS = 352, 14
LENGTHS = (311, 3, 64, 130)
TOLERANCE = 1e-4
MARGIN = 2e-3  # far above the tolerance
ARENA_BYTES, TINY_BYTES = 2 << 20, 100 << 10

WAYS = {
    "with strangers": Way(),
    "shuffled rows": Way(shuffle=1),
    "padded rows and tokens": Way(chunk=7, tokens=16),
    "single tokens": Way(chunk=1),
    "whole prompts": Way(chunk=320),
    "admitted": Way(admits=True),
    "fused steps": Way(fused=4, admits=True),
    "fused steps, retracted": Way(fused=4, retract_at={0: 5, 2: 9}),
    "retracted while it decodes": Way(retract_at={0: 7, 3: 1}),
    "retracted at its first token": Way(retract_at={1: 1, 2: 1}, shuffle=2),
}
PAGES = (1, 8, 64)


@cache
def embedded() -> Program:
    """One layer of each kind; the window slides six times and more over the longest prompt."""
    model = EmbeddedModel(
        Sizes(vocab=64, width=32, hidden=48, layers=("delta", "window", "full"),
              attention_heads=(2, 1, 16), delta_heads=(2, 8, 8), window_tokens=48)
    )  # fmt: skip
    rng = np.random.default_rng(3)
    params = jax.tree.map(
        lambda leaf: np.asarray(leaf) + rng.normal(0, 0.2, leaf.shape).astype(np.float32),
        model.init(0),
    )
    return program(model, params, ARENA_BYTES, 16)


@cache
def two_windows() -> Program:
    """Two windows, one of them shorter than a page, and neither a full number of pages."""
    model = Mixture(
        Attending(window(37), key_heads=2), Remembering((2, 3)), Attending(window(10)),
        Attending(CONTEXT),
    )  # fmt: skip
    return program(model, model.init(5), ARENA_BYTES, 16)


MODELS = {"embedded": embedded, "two windows": two_windows}


@cache
def on_pages(name: str, page_tokens: int, arena_bytes: int = ARENA_BYTES) -> Program:
    known = MODELS[name]()
    if (page_tokens, arena_bytes) == (16, ARENA_BYTES):
        return known
    return program(known.model, known.params, arena_bytes, page_tokens)


def prompts(name: str) -> list[list[int]]:
    rng = np.random.default_rng(13)
    vocabulary = MODELS[name]().model.vocab_size
    return [rng.integers(0, vocabulary, length).tolist() for length in LENGTHS]


@cache
def recomputed(name: str) -> Recomputed:
    known = MODELS[name]()
    return Recomputed(known.model, jax.tree.map(jnp.asarray, known.params), CONTEXT_TOKENS)


@cache
def reference(name: str) -> list[tuple[list[int], np.ndarray]]:
    """Per prompt its whole greedy text and the logits after each of its tokens."""
    found = []
    for prompt in prompts(name):
        known = list(prompt)
        for _ in range(NEW_TOKENS):
            logits = recomputed(name).logits(known)
            least, most = np.sort(logits[-1])[-2:]
            assert most - least > MARGIN, "a close call: choose other weights or prompts"
            known.append(int(logits[-1].argmax()))
        found.append((known, recomputed(name).logits(known)))
    return found


def serve(name: str, way: Way, shared: Program | None = None) -> Service:
    """Serves all prompts and holds every step to the reference."""
    service = Service(shared or MODELS[name](), way, CONTEXT_TOKENS)
    require_equal(service.serve(prompts(name), NEW_TOKENS), reference(name))
    return service


def require_equal(served: list[Served], wanted: list[tuple[list[int], np.ndarray]]) -> None:
    for one, (text, logits) in zip(served, wanted, strict=True):
        assert one.known == text
        decided = range(one.prompt_tokens - 1, len(text) - 1)
        assert set(decided) <= one.logits.keys(), "a step went by unseen"
        for position, row in one.logits.items():
            far = np.abs(row - logits[position]).max()
            assert far < TOLERANCE, f"{len(text)} tokens: off by {far} after token {position}"


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_serving_changes_a_step(way: str) -> None:
    service = serve("embedded", WAYS[way])
    assert service.retractions == len(WAYS[way].retract_at)


@pytest.mark.parametrize("way", ["with strangers", "padded rows and tokens"])
def test_no_way_of_serving_changes_a_step_of_two_windows(way: str) -> None:
    serve("two windows", WAYS[way])


@pytest.mark.parametrize("at", range(len(LENGTHS)))
def test_company_changes_no_step(at: int) -> None:
    """Alone among padding rows."""
    service = Service(embedded(), Way(), CONTEXT_TOKENS)
    alone = service.serve([prompts("embedded")[at]], NEW_TOKENS)
    require_equal(alone, [reference("embedded")[at]])


@pytest.mark.parametrize("page_tokens", PAGES)
def test_the_page_size_changes_no_step(page_tokens: int) -> None:
    serve("embedded", WAYS["with strangers"], on_pages("embedded", page_tokens))


def test_pages_of_one_token_and_two_windows_change_no_step() -> None:
    serve("two windows", WAYS["with strangers"], on_pages("two windows", 1))


def test_the_layout_changes_no_step() -> None:
    """Separate pools for each kind of state, with room for what one request at most needs twice."""
    known = embedded()
    prices = um.Memory(known.plan, 4, CONTEXT_TOKENS).prices
    peak = prices.peak(max(LENGTHS) + NEW_TOKENS, 16)
    caps = tuple(2 * count for count in peak)
    service = serve("embedded", replace(WAYS["with strangers"], layout=Split(caps)))
    assert service.retractions > 0, "the split was as good as everything"
    assert service.moves == 0


@pytest.mark.parametrize("way", ["with strangers", "shuffled rows", "fused steps"])
def test_an_arena_that_is_too_small_changes_no_step(way: str) -> None:
    service = serve("embedded", WAYS[way], on_pages("embedded", 16, TINY_BYTES))
    assert service.moves > 0, "the arena was not small enough to move"
    assert way == "fused steps" or service.retractions > 0, "not small enough to retract"


@pytest.mark.parametrize("name", MODELS)
def test_drawn_tokens_depend_on_seed_and_position_alone(name: str) -> None:
    options = [um.Sampling(temperature=1.0, top_p=0.9, seed=seed).words() for seed in range(4)]
    texts = []
    for way in ("with strangers", "shuffled rows", "padded rows and tokens", "admitted"):
        service = Service(MODELS[name](), WAYS[way], CONTEXT_TOKENS)
        served = service.serve(prompts(name), NEW_TOKENS, options)
        texts.append([one.known for one in served])
    assert all(text == texts[0] for text in texts)
    greedy = [text for text, _ in reference(name)]
    assert all(a != b for a, b in zip(texts[0], greedy, strict=True)), "nothing was drawn"
