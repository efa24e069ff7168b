"""Promise 1 through the engine: a request's tokens depend on its prompt, options and weights alone.

The reference is a full recomputation, with no past and no arena, of every token. Positions at which
the two most likely tokens are closer than `MARGIN` are left out, with all that follows them.
"""

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unimem_jax.models.embedded import EmbeddedModel, Sizes

import unimem_jax as um
from unimem_jax.allocator import Split
from unimem_jax.engine import Engine
from unimem_jax.serving import Completion
from unimem_jax.splits import default_split

NEW_TOKENS = 20
MARGIN = 1e-3
TEXT = (
    "Genesis 1\n1 In the beginning God created the heaven and the earth.\n2 And the earth was "
    "without form, and void; and darkness was upon the face of the deep. And the Spirit of God "
    "moved upon the face of the waters.\n3 And God said, Let there be light: and there was light.\n"
    "4 And God saw the light, that it was good: and God divided the light from the darkness.\n"
    "5 And God called the light Day, and the darkness he called Night. And the evening and the "
    "morning were the first day.\n6 And God said, Let there be a firmament in the midst of the "
)
LENGTHS = (1, 3, 64, 65, 200, 330, 420)  # of prompts, the start token included
ARENA_BYTES = 4 << 20
TINY_BYTES = 160 << 10  # not enough for all prompts at once: they wait, move and are retracted


@dataclass(frozen=True)
class Variant:
    """One way to serve the same requests."""

    page_tokens: int = 16
    chunk_tokens: int = 64
    arena_bytes: int = ARENA_BYTES
    rows: int = 8
    is_split: bool = False
    compaction_bytes: int = 0


VARIANTS = {
    "as usual": Variant(),
    "page 1": Variant(page_tokens=1),
    "page 8": Variant(page_tokens=8),
    "page 64": Variant(page_tokens=64),
    "chunk 1": Variant(chunk_tokens=1),
    "chunk 7": Variant(chunk_tokens=7),
    "chunk 16": Variant(chunk_tokens=16),
    "whole prompts": Variant(chunk_tokens=512),
    "two rows": Variant(rows=2),
    "split memory": Variant(is_split=True),
    "compacted": Variant(compaction_bytes=8 << 10),
    "tiny arena": Variant(arena_bytes=TINY_BYTES),
}


@pytest.fixture(scope="module")
def model() -> Any:
    """Three layers, one of each kind, with random weights; large logits make clear margins."""
    network = EmbeddedModel(
        Sizes(width=48, hidden=64, layers=("delta", "window", "full"),
              attention_heads=(2, 1, 16), delta_heads=(2, 16, 16), window_tokens=48)
    )  # fmt: skip
    rng = np.random.default_rng(7)
    params = jax.tree.map(
        lambda leaf: leaf + rng.normal(0, 0.15, leaf.shape).astype(np.float32), network.init(0)
    )
    return network, params, None


def prompts() -> list[list[int]]:
    body = TEXT.encode()
    return [[0, *body[at : at + length - 1]] for at, length in enumerate(LENGTHS)]


def options(temperature: float = 0.0) -> list[um.Sampling]:
    return [
        um.Sampling(max_tokens=NEW_TOKENS, temperature=temperature, top_p=0.95, seed=seed)
        for seed in range(len(LENGTHS))
    ]


@cache
def program_folder() -> str:
    """Of this run: variants that differ on the host alone share their programs."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def make(model: Any, variant: Variant) -> Engine:
    network, params, _ = model
    sizes = {
        "arena_bytes": variant.arena_bytes, "page_tokens": variant.page_tokens,
        "rows": variant.rows, "chunk_tokens": variant.chunk_tokens, "context_tokens": 512,
        "compaction_bytes": variant.compaction_bytes,
    }  # fmt: skip
    layout: Any = "unified"
    if variant.is_split:
        layout = default_split(um.plan(network.parts(), variant.arena_bytes, variant.page_tokens))
        assert isinstance(layout, Split)
    return Engine(network, params, layout=layout, program_folder=program_folder(), **sizes)


@pytest.fixture(scope="module")
def reference(model: Any) -> tuple[list[list[int]], list[int]]:
    return recompute(model)


def recompute(model: Any) -> tuple[list[list[int]], list[int]]:
    """Greedy tokens of every prompt by full recomputation, and how many have a clear margin."""
    network, params, _ = model
    rows = np.zeros((len(LENGTHS), max(LENGTHS) + NEW_TOKENS), np.int32)
    counts = np.asarray(LENGTHS, np.int32)
    for row, prompt in zip(rows, prompts(), strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def logits(params: Any, rows: Any, counts: Any) -> Any:
        views = um.FreshViews.of(network.parts(), counts, rows.shape[1])
        found, _, _ = network.apply(params, rows, views)
        return jnp.take_along_axis(found, (counts - 1)[:, None, None], axis=1)[:, 0]

    clear = np.ones(len(LENGTHS), bool)
    known = [0] * len(LENGTHS)
    for _ in range(NEW_TOKENS):
        found = np.asarray(logits(params, rows, counts))
        best = np.sort(found, axis=1)[:, -2:]
        clear &= best[:, 1] - best[:, 0] > MARGIN
        known = [count + int(is_clear) for count, is_clear in zip(known, clear, strict=True)]
        rows[np.arange(len(rows)), counts] = found.argmax(axis=1)
        counts = counts + 1
    tokens = [
        row[length : length + NEW_TOKENS].tolist()
        for row, length in zip(rows, LENGTHS, strict=True)
    ]
    return tokens, known


@pytest.fixture(scope="module")
def engines(model: Any) -> Any:
    """Engines by the name of their variant; those that several tests use compile once."""
    made: dict[str, Engine] = {}

    def get(name: str) -> Engine:
        if name not in made:
            made[name] = make(model, VARIANTS[name])
        return made[name]

    return get


def require_equal(found: list[Completion], reference: tuple[list[list[int]], list[int]]) -> None:
    tokens, known = reference
    assert sum(known) > 0.9 * NEW_TOKENS * len(LENGTHS), "the margins leave too little to compare"
    for one, wanted, count, length in zip(found, tokens, known, LENGTHS, strict=True):
        assert list(one.token_ids[:count]) == wanted[:count], f"prompt of {length} tokens"


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_do_not_depend_on_how_requests_are_served(
    name: str, engines: Any, reference: Any
) -> None:
    engine = engines(name)
    require_equal(engine.generate(prompts(), options()), reference)
    statistics = engine.statistics()
    if name == "tiny arena":
        assert statistics.moved_units > 0, "the arena was not small enough to move"
        assert statistics.retractions > 0, "the arena was not small enough to retract"
    if name == "compacted":
        assert statistics.moved_units > 0, "there was nothing to move ahead of need"
    if name in ("split memory", "as usual"):
        assert statistics.moved_units == 0
    engine.memory.check()
    assert engine.memory.metrics()["live"] == [0] * len(engine.plan.sub_pools)


def test_tokens_do_not_depend_on_company(engines: Any, reference: Any) -> None:
    engine = engines("as usual")
    alone = [
        engine.generate([prompt], option)[0]
        for prompt, option in zip(prompts(), options(), strict=True)
    ]
    require_equal(alone, reference)
    warm = options(temperature=0.8)
    drawn = [
        engine.generate([prompt], option)[0].token_ids
        for prompt, option in zip(prompts(), warm, strict=True)
    ]
    order = np.random.default_rng(0).permutation(len(LENGTHS)).tolist()
    together = engine.generate([prompts()[at] for at in order], [warm[at] for at in order])
    assert [one.token_ids for one in together] == [drawn[at] for at in order]
    assert len(set(drawn)) == len(drawn), "different prompts and seeds drew the same tokens"


def test_drawn_tokens_survive_retraction_and_moves(engines: Any) -> None:
    warm = options(temperature=0.8)
    usual = engines("as usual").generate(prompts(), warm)
    engine = engines("tiny arena")
    before = engine.statistics().retractions
    tiny = engine.generate(prompts(), warm)
    assert engine.statistics().retractions > before
    assert [one.token_ids for one in tiny] == [one.token_ids for one in usual]
