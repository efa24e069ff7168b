"""Promise 1 with kept prefixes: hits, chunks, pages and scarcity change no token and no logit.

The embedded model's shape (DeltaNet, a window, full attention) beside its full recomputation, and
two families beside the numbers of Transformers.
"""

import numpy as np
import pytest

import unimem_jax as um
from tests.laws import test_engine as laws
from tests.models.oracle import TOLERANCE
from tests.models.reference import CONTEXT_TOKENS, open_reference
from tests.prefix.watched import sampled_logits
from unimem_jax.engine import Engine

model, reference = laws.model, laws.reference  # the fixtures

EMBEDDED = {
    "as usual": laws.Variant(),
    "page 1, chunk 7": laws.Variant(page_tokens=1, chunk_tokens=7),
    "tiny arena": laws.Variant(arena_bytes=laws.TINY_BYTES, page_tokens=8, chunk_tokens=32),
}


def check(engine):
    """Only prefixes remain, and nothing once they go."""
    engine.memory.check()
    cache = engine._admission.cache
    cache.check()
    assert cache.tree.reclaimable() == tuple(engine.memory.allocator.held)
    cache.clear()
    assert not any(engine.memory.allocator.held)


# Pages of one token have four times the programs.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.exhaustive if "page 1" in n else pytest.mark.slow)
        for n in EMBEDDED
    ],
)
def test_the_embedded_shape_gives_the_same_tokens_from_prefixes(name, model, reference):
    variant = EMBEDDED[name]
    engine = Engine(
        *model[:2], arena_bytes=variant.arena_bytes, page_tokens=variant.page_tokens, rows=8,
        chunk_tokens=variant.chunk_tokens, context_tokens=512, prefix_cache=True,
        checkpoint_tokens=32,
    )  # fmt: skip
    engine._row_bucket = lambda count: 8  # fewer programs: compiling is what costs
    prompts, options = laws.prompts(), laws.options()
    tokens, known = reference
    laws.require_equal(engine.generate(prompts, options), reference)
    # Again, and with what was generated as part of the prompt, which only moves the boundary.
    for moved in (0, 1, 5, 13):
        longer = [prompt + row[:moved] for prompt, row in zip(prompts, tokens, strict=True)]
        left = um.Sampling(max_tokens=laws.NEW_TOKENS - moved)
        for found, row, count in zip(engine.generate(longer, left), tokens, known, strict=True):
            assert list(found.token_ids[: max(0, count - moved)]) == row[moved:count]
    assert engine.statistics().prefix_hit_tokens > (0 if name == "tiny arena" else 2000)
    if name == "tiny arena":
        assert engine.statistics().retractions
    check(engine)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5"])
def test_a_family_gives_the_numbers_of_transformers_from_prefixes(family, tmp_path):
    made = open_reference(family, tmp_path)
    engine = Engine(
        made.model, made.params, arena_bytes=8 << 20, page_tokens=8, rows=4, chunk_tokens=64,
        context_tokens=CONTEXT_TOKENS, prefix_cache=True, checkpoint_tokens=64,
    )  # fmt: skip
    engine._row_bucket = lambda count: 4
    prompts, new = made.oracle.prompts, made.oracle.new
    options = um.Sampling(max_tokens=len(new[0]))
    for _ in range(2):
        with sampled_logits(engine) as seen:
            found = engine.generate(prompts, options)
        rows = zip(prompts, found, new, made.oracle.new_logits, strict=True)
        for prompt, completion, tokens, logits in rows:
            assert list(completion.token_ids) == list(tokens)
            for at, wanted in enumerate(logits):
                got = seen[(*prompt, *tokens[:at])]
                np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert engine.statistics().prefix_hit_tokens > 0.8 * sum(map(len, prompts)) - 3 * 64
    check(engine)
