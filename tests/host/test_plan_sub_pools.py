"""Kinds of state side by side in one plan: what shares an entry, what has a sub-pool of its own."""

import numpy as np
import pytest

from unimem_jax.errors import OutOfMemory, UsageError
from unimem_jax.memory import Memory
from unimem_jax.plan import plan
from unimem_jax.price import Prices
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, request, window

CHECKPOINT = request("checkpoint")
RUNNING = (
    Part(Site(0), "state", (4, 32, 32), "float32", REQUEST),
    Part(Site(0), "conv", (3, 128), "bfloat16", REQUEST),
    Part(Site(0), "ring", (8, 64), "float32", REQUEST),  # rejected drafts are undone from it
)
CHECKPOINTS = (
    Part(Site(0, stream="checkpoint"), "state", (4, 32, 32), "int8", CHECKPOINT),
    Part(Site(0, stream="checkpoint"), "state_scale", (4,), "float32", CHECKPOINT),
    Part(Site(0, stream="checkpoint"), "conv", (3, 128), "bfloat16", CHECKPOINT),
)
SPARSE = (
    Part(Site(1), "latent", (512,), "bfloat16", CONTEXT),
    Part(Site(1), "rope", (64,), "bfloat16", CONTEXT),
    Part(Site(1), "index_key", (128,), "float8_e4m3fn", CONTEXT),
    Part(Site(1), "index_scale", (1,), "float32", CONTEXT),
    Part(Site(2), "index_key", (128,), "bfloat16", CONTEXT, stride=16),
)
WINDOWS = (
    Part(Site(3), "key", (2, 64), "int8", window(128)),
    Part(Site(3), "key_scale", (2,), "float16", window(128)),
    Part(Site(4), "key", (2, 64), "bfloat16", window(2048)),
)
VISITS = tuple(Part(Site(5, visit), "key", (2, 64), "bfloat16", CONTEXT) for visit in range(3))
DRAFT = (
    Part(Site(6, stream="draft"), "key", (2, 64), "bfloat16", CONTEXT, draft=True),
    Part(Site(7, stream="draft"), "key", (2, 64), "bfloat16", window(512), draft=True),
)
ALL = RUNNING + CHECKPOINTS + SPARSE + WINDOWS + VISITS + DRAFT
MODELS = {
    "everything": (ALL, {
        "request", "request_checkpoint", "context", "context_by_16", "window_128", "window_512",
        "window_2048",
    }),
    "no state": (SPARSE + WINDOWS, {"context", "context_by_16", "window_128", "window_2048"}),
    "no windows": (RUNNING + SPARSE, {"request", "context", "context_by_16"}),
    "no full attention": (RUNNING + WINDOWS, {"request", "window_128", "window_2048"}),
    "state and checkpoints alone": (RUNNING + CHECKPOINTS, {"request", "request_checkpoint"}),
    "pooled keys alone": (SPARSE[-1:], {"context_by_16"}),
    "a draft alone": (DRAFT, {"context", "window_512"}),
}  # fmt: skip


@pytest.mark.parametrize("parts, names", MODELS.values(), ids=MODELS)
def test_each_lifetime_and_stride_has_a_sub_pool(parts, names):
    made = plan(parts, 8 << 20, 16)
    assert {pool.name for pool in made.sub_pools} == names
    for name in names:
        assert f"\n{name} " in str(made)


@pytest.mark.parametrize("parts, names", MODELS.values(), ids=MODELS)
def test_requests_come_and_go_on_any_of_them(parts, names):
    """Fills the arena, with checks of all invariants, and leaves it as it was."""
    memory = Memory(plan(parts, 2 << 20, 16), rows=999, context_tokens=256, chunk_tokens=48)
    nothing = list(memory.allocator.held)
    admitted = []
    while memory.fits(memory.prices.peak(170, 48, memory.fused_steps)):
        request = memory.admit(150, 20)
        memory.prefill(request, np.arange(150))
        memory.decode(20, [request])
        admitted.append(request)
    assert len(admitted) > 1
    memory.check()
    with pytest.raises(OutOfMemory, match="does not fit now"):
        memory.admit(150, 20)
    for request in admitted:
        memory.free(request)
    memory.check()
    assert memory.allocator.held == nothing


def test_pooled_keys_have_one_entry_for_their_tokens_and_the_same_pages():
    made = plan(SPARSE, 4 << 20, 32)
    pooled, _ = made.locate((Site(2), "index_key"))
    whole, _ = made.locate((Site(1), "index_key"))
    assert (pooled.unit_entries, whole.unit_entries) == (2, 32)
    assert pooled.unit_bytes == 2 * 256
    prices = Prices(made)
    for length in (1, 31, 32, 33, 500):
        held = dict(zip((pool.name for pool in made.sub_pools), prices.held(length), strict=True))
        assert held["context"] == held["context_by_16"]


def test_a_latent_and_its_index_key_of_another_dtype_share_an_entry():
    made = plan(SPARSE, 4 << 20, 16)
    found = {made.locate((Site(1), name))[0].name for name in ("latent", "rope", "index_scale")}
    assert found == {"context"}
    (lanes,) = (pool.lanes for pool in made.sub_pools if pool.name == "context")
    assert [lane.part.name for lane in lanes] == ["index_key", "latent", "rope", "index_scale"]


def test_a_draft_is_behind_the_target_and_its_window_stands_alone():
    made = plan(ALL, 8 << 20, 16)
    pool, lane = made.locate(DRAFT[0].key)
    assert lane is pool.lanes[-1]
    assert lane.offset_words == pool.target_words
    own, _ = made.locate(DRAFT[1].key)
    assert (own.name, own.target_words, len(own.lanes)) == ("window_512", 0, 1)


def test_visits_of_a_layer_have_lanes_of_their_own():
    made = plan(VISITS, 4 << 20, 16)
    assert len({made.locate(part.key)[1].offset_words for part in VISITS}) == 3


def test_a_layer_that_reads_anothers_keys_costs_nothing():
    made = plan(SPARSE[:3], 4 << 20, 16)
    assert made.sub_pools[0].entry_words * 4 == 1024 + 128 + 128
    with pytest.raises(UsageError, match="no part 'key' was declared at site L9"):
        made.locate((Site(9), "key"))


@pytest.fixture
def memory():
    return Memory(plan(RUNNING + CHECKPOINTS, 1 << 20, 8), rows=4, context_tokens=64)


def counts(memory):
    pools = memory.plan.sub_pools
    return {pool.name: memory.allocator.live(pool.index) for pool in pools}


def test_a_request_takes_running_state_and_no_checkpoint(memory):
    request = memory.admit(8, 8)
    named = next(pool.index for pool in memory.plan.sub_pools if pool.name == "request_checkpoint")
    assert request.peak[named] == 0
    memory.prefill(request, list(range(8)))
    assert counts(memory) == {"request": 1, "request_checkpoint": 0}
    prices = memory.prices
    for demand in (prices.held(8), prices.growth(0, 8), prices.peak(16, 8)):
        assert sum(demand) == 1
        assert demand[named] == 0


def test_checkpoints_are_granted_by_name_and_outlive_the_request(memory):
    request = memory.admit(8, 8)
    memory.prefill(request, list(range(8)))
    named = next(pool.index for pool in memory.plan.sub_pools if pool.name == "request_checkpoint")
    kept = [memory.allocator.grant_slot(named, committed=False) for _ in range(3)]
    assert counts(memory) == {"request": 1, "request_checkpoint": 3}
    memory.check()
    memory.free(request)
    assert counts(memory) == {"request": 0, "request_checkpoint": 3}
    memory.allocator.drop(kept, named)
    assert counts(memory) == {"request": 0, "request_checkpoint": 0}
    memory.check()
