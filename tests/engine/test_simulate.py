"""Runs without bytes: the published first-come figures, and splits of the same bytes."""

import pytest

from unimem_jax.allocator import Split
from unimem_jax.errors import UsageError
from unimem_jax.memory import Memory
from unimem_jax.plan import plan
from unimem_jax.schedule import Limits
from unimem_jax.simulate import simulate
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, request, window
from unimem_jax.splits import best_split, default_split


def hybrid(context_bytes, window_bytes, window_tokens, slot_bytes=0):
    parts = []
    if context_bytes:
        parts.append(Part(Site(0), "key", (context_bytes,), "uint8", CONTEXT))
    if window_bytes:
        parts.append(Part(Site(1), "key", (window_bytes,), "uint8", window(window_tokens)))
    if slot_bytes:
        parts.append(Part(Site(2), "state", (slot_bytes,), "uint8", REQUEST))
    return parts


def test_a_window_hybrid_runs_as_many_requests_as_exact_units_allow():
    # GPT-OSS-20B sizes at 1/16 of the load of 512 requests in 8 GiB, first come: 193.2 of 512
    # run with exact units and 140.1 with a split; the shares scale with the load.
    wide = plan(hybrid(24576, 24576, 128), 512 << 20)
    lengths, limits = [(512, 1536)] * 32, Limits(1024, 8192, 8192)
    unified = simulate(lengths, wide, limits)
    split = simulate(lengths, wide, limits, default_split(wide))
    assert unified.running_mean == pytest.approx(193.2 / 16, rel=0.08)
    assert split.running_mean == pytest.approx(140.1 / 16, rel=0.08)
    assert unified.running_mean > 1.2 * split.running_mean
    assert unified.steps < split.steps


def test_a_state_hybrid_runs_more_than_its_default_split():
    # Qwen3.5-4B sizes, 8 GiB, 128 in, 256 out x 256: 127.5 with exact units, 64.0 split.
    mixed = plan(hybrid(32768, 0, 0, 51_511_296 // 4096 * 4096), 1 << 30)
    lengths, limits = [(128, 256)] * 32, Limits(1024, 8192, 8192)
    unified = simulate(lengths, mixed, limits)
    split = simulate(lengths, mixed, limits, default_split(mixed))
    assert unified.running_mean == pytest.approx(127.5 / 8, rel=0.12)
    assert split.running_mean == pytest.approx(64.0 / 8, rel=0.12)


SMALL = plan(hybrid(512, 512, 64, 8192), 512 << 10)
LENGTHS = [(20 + 37 * i % 90, 10 + 11 * i % 50) for i in range(14)]
LIMITS = Limits(8, 96, 32)


def test_counts_add_up_and_everything_is_computed_once_without_retractions():
    roomy = plan(hybrid(512, 512, 64, 8192), 8 << 20)
    found = simulate(LENGTHS, roomy, LIMITS)
    assert found.retractions == 0
    assert found.moved_bytes == 0
    assert found.computed_tokens == found.needed_tokens
    assert found.needed_tokens == sum(p + o - 1 for p, o in LENGTHS)
    assert found.running_max == LIMITS.rows
    tight = simulate(LENGTHS, SMALL, LIMITS)
    assert tight.computed_tokens >= tight.needed_tokens
    assert tight.running_mean < found.running_mean


def test_the_default_split_keeps_the_ratios_and_the_bytes():
    for parts in (hybrid(512, 512, 64, 8192), hybrid(512, 256, 64), hybrid(512, 0, 0, 8192)):
        whole = plan(parts, 4 << 20)
        caps = dict(zip((p.name for p in whole.sub_pools), default_split(whole).caps, strict=True))
        sizes = {p.name: p.unit_bytes for p in whole.sub_pools}
        used = sum(caps[name] * sizes[name] for name in caps)
        assert whole.arena_bytes - 2 * sum(sizes.values()) <= used <= whole.arena_bytes
        if "window_64" in caps:
            assert caps["window_64"] == pytest.approx(0.8 * caps["context"], abs=2)
        if "request" in caps:
            tokens = used - caps["request"] * sizes["request"]
            assert caps["request"] * sizes["request"] == pytest.approx(0.9 * tokens, rel=0.05)


def test_the_best_split_beats_the_default_one_and_not_the_arena():
    best, found, tried = best_split(LENGTHS, SMALL, LIMITS)
    assert tried > 5
    assert found == simulate(LENGTHS, SMALL, LIMITS, best)
    assert found.running_mean >= simulate(LENGTHS, SMALL, LIMITS, default_split(SMALL)).running_mean
    assert found.running_mean <= simulate(LENGTHS, SMALL, LIMITS).running_mean


def test_splits_leave_out_named_state_and_share_context_between_strides():
    parts = [
        *hybrid(512, 512, 64, 8192),
        Part(Site(3), "state", (4096,), "uint8", request("checkpoint")),
        Part(Site(4), "pooled", (128,), "uint8", CONTEXT, stride=16),
    ]
    whole = plan(parts, 512 << 10)
    best, found, _ = best_split(LENGTHS, whole, LIMITS)
    for split in (default_split(whole), best):
        caps = dict(zip((pool.name for pool in whole.sub_pools), split.caps, strict=True))
        assert caps.pop("request_checkpoint") == 0
        assert min(caps.values()) > 0
        assert caps["context_by_16"] == pytest.approx(caps["context"], abs=2)
        assert simulate(LENGTHS, whole, LIMITS, split).steps >= found.steps


def test_a_request_that_an_empty_pool_cannot_hold_is_refused_with_its_needs():
    with pytest.raises(UsageError, match=r"can never fit: needs 1 slot of request \(8 KiB\)"):
        simulate([(5000, 1)], SMALL, LIMITS)
    with pytest.raises(UsageError, match="can never fit"):
        simulate(LENGTHS, SMALL, LIMITS, Split((1, 1, 1)))
    with pytest.raises(UsageError, match="no split of"):
        best_split([(5000, 1)], SMALL, LIMITS)
    with pytest.raises(UsageError, match="at least one prompt"):
        simulate([(0, 1)], SMALL, LIMITS)


def test_the_default_split_of_a_small_arena_takes_from_no_share_more_than_it_has():
    """What the grid of wide pages costs can be more than the largest share."""
    parts = [
        Part(Site(0), "key", (128,), "uint8", CONTEXT),
        Part(Site(1), "key", (128,), "uint8", window(32)),
        Part(Site(2), "key", (16 * 128,), "uint8", window(8)),
        Part(Site(3), "state", (160 * 128,), "uint8", REQUEST),
    ]
    small = plan(parts, 429 * 128, page_tokens=4)
    split = default_split(small)
    assert min(split.caps) >= 0
    Memory(small, layout=split)  # lies inside the arena
