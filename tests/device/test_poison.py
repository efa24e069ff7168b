"""What lies in free bytes never reaches a result: with all of them poisoned, outputs are bit-equal.

Free is every byte that is not part of an entry that a later query can see: holes, padding, the
unwritten rows of a page, tokens that left their window, slots before their first token, and every
unit that a request gave back and another took.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unimem_jax.pallas_kernels.paged_attention import attend

from tests.device.models import MIXTURES
from tests.device.served import (
    CHUNK,
    CONTEXT_TOKENS,
    POISON,
    ROWS,
    Programs,
    Served,
    live_bytes,
    poisoned,
)
from tests.device.traffic import FUSED_TURNS, TURNS, clean, programs, same_bits
from unimem_jax import views as views_module
from unimem_jax.requests import Work
from unimem_jax.views import FreshViews, Views

# Where a rounding difference may cross a step of the stored type.
TOLERANCE = {"halves": 0.05, "bytes": 0.2, "odd shapes": 0.2, "four bits": 0.2}


@pytest.mark.parametrize("name", [*MIXTURES, "embedded"])
def test_poison_in_free_bytes_changes_no_bit(name):
    for word in POISON.values():
        served = Served(programs(name)[1], word)
        served.serve(TURNS)
        assert same_bits(served.record, clean(name).record), f"{word:#x} reached a result"


@pytest.mark.parametrize("name", ["hybrid"])
def test_poison_changes_no_bit_of_fused_steps(name):
    for word in (POISON["float32 NaN"], POISON["all ones"]):
        served = Served(programs(name)[1], word)
        served.serve(FUSED_TURNS, fused=True)
        assert same_bits(served.record, clean(name, fused=True).record)


@pytest.mark.parametrize("name", [*MIXTURES, "embedded"])
def test_the_traffic_gives_what_the_whole_sequences_give(name):
    served = clean(name)
    assert all(np.isfinite(row).all() for _, row in served.seen)
    seen = dict(served.seen)
    inner = {text[:end] for text in seen for end in range(1, len(text))}
    worst = 0.0
    for text in seen.keys() - inner:
        whole = whole_sequence(name, text)
        rows = [(whole[end - 1], seen.get(text[:end])) for end in range(1, len(text) + 1)]
        worst = max(worst, *(np.abs(a - b).max() for a, b in rows if b is not None))
    assert worst < TOLERANCE.get(name, 1e-4)


@cache
def recomputed(name):
    model, shared = programs(name)
    params = jax.tree.map(jnp.asarray, shared.params)

    def run(tokens, length):
        views = FreshViews.of(model.parts(), length, tokens.shape[1])
        return model.apply(params, tokens, views)[0]

    return jax.jit(run)


def whole_sequence(name, text):
    """Logits [len(text), V] with no past, no arena and no pages."""
    padded = np.zeros((1, CONTEXT_TOKENS), np.int32)
    padded[0, : len(text)] = text
    return np.array(recomputed(name)(padded, np.asarray([len(text)], np.int32)))[0]


def multiplying_attend(query, fresh, valid, past, mask, **options):
    """Hides the past by a weight of zero, and not by selecting."""
    scores = jnp.einsum("rthd,rchd->rtc", query, past.key) * options["scale"]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    weights = jnp.where(mask, weights, jnp.zeros_like(weights))
    mixed = jnp.einsum("rtc,rchd->rthd", weights, past.value)
    return mixed + attend(query, fresh, valid, scale=1.0)


def read_without_start(self, site, name):
    pool, _ = self.plan.locate((site, name))
    return self.store.read_state(self.arena, (site, name), self.slots[pool.index]), self


NAIVE = {
    "a mask that multiplies": ("attention only", views_module, "attend", multiplying_attend),
    "a state that is read whether it started or not": (
        "state only", Views, "read", read_without_start,
    ),
    "a past without its mask": (
        "attention only", Views, "_past_mask",
        lambda self, pool, past: jnp.ones((self.valid.shape[0], 1, past), jnp.bool_),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAIVE)
def test_poison_reaches_the_result_of(case, monkeypatch):
    name, owner, attribute, naive = NAIVE[case]
    monkeypatch.setattr(owner, attribute, naive)
    model, shared = programs(name)
    naive_programs = Programs(model, shared.params, shared.plan)
    records = []
    for word in (None, POISON["float32 NaN"]):
        served = Served(naive_programs, word)
        request = served.memory.open()
        for tokens in (np.arange(5), np.arange(2)):
            served.step([Work(request, len(tokens), tokens.astype(np.int32))], CHUNK)
        records.append(served.record)
    assert not same_bits(*records)


def test_the_poison_covers_all_but_the_parts_of_tokens_that_are_seen():
    _, shared = programs("hybrid")
    served = Served(shared)
    request = served.memory.open()
    served.step([Work(request, 7, np.arange(7, dtype=np.int32))], CHUNK)
    state, token = (8 + 1) * 4, 2 * 8 * 4
    assert live_bytes(served.memory).sum() == state + 2 * 7 * token
    served.step([Work(request, 7, np.arange(7, dtype=np.int32))], CHUNK)
    assert live_bytes(served.memory).sum() == state + (14 + 9) * token
    served.memory.free(request)
    assert not live_bytes(served.memory).any()
    arena = poisoned(served.device.arena, live_bytes(served.memory), POISON["all ones"])
    assert (np.array(arena) == 0xFFFFFFFF).all()


@pytest.mark.parametrize("name", ["hybrid", "two windows", "embedded"])
def test_the_traffic_moves_units_and_gives_their_places_to_others(name):
    served = clean(name)
    assert sum(served.memory.allocator.moved_units) > 0
    assert len(served.texts) > ROWS
