"""A layer that runs twice owns two sites; a layer that reads another's keys owns none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.device.models import NEAR, VOCABULARY, WIDTH, Attending, Mixture, Remembering
from unimem_jax.errors import UsageError
from unimem_jax.memory import Memory
from unimem_jax.plan import plan
from unimem_jax.requests import Work
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site
from unimem_jax.step import step
from unimem_jax.store import PackedStore
from unimem_jax.views import FreshViews, Views


class Looped(Mixture):
    """All layers run twice with the same weights; then one more reads the keys of layer 0."""

    visits = 2

    def parts(self):
        return tuple(
            part
            for visit in range(self.visits)
            for index, layer in enumerate(self.layers)
            for part in layer.parts(Site(index, visit))
        )

    def init(self, seed=0):
        rng = np.random.default_rng(seed + 1)
        shared = rng.normal(0, WIDTH**-0.5, (2, WIDTH, 16)).astype(np.float32)
        return {**super().init(seed), "query": shared[0], "out": shared[1].T}

    def apply(self, params, tokens, views):
        x = jnp.asarray(params["embedding"]).at[tokens].get(mode="clip")
        fresh = {}
        for visit in range(self.visits):
            for index, layer in enumerate(self.layers):
                weights = params["layers"][index]
                added, parts, views = layer.apply(Site(index, visit), weights, x, views)
                x = jnp.tanh(x + added)
                fresh |= parts
        first = Site(0)
        query = (x @ params["query"]).reshape(*x.shape[:2], 2, 8)
        mixed, views = views.attend(
            first, query, fresh[first, "key"], fresh[first, "value"], scale=8**-0.5
        )
        x = x + mixed.reshape(*x.shape[:2], -1) @ params["out"]
        return views.select(x) @ params["head"], fresh, views


MODEL = Looped(Attending(CONTEXT), Remembering(), Attending(NEAR))
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (5, 6)).astype(np.int32)


def test_every_visit_has_its_own_lanes_and_a_shared_layer_none():
    made = plan(MODEL.parts(), 1 << 17, 4)
    lanes = {pool.name: [str(lane.part.site) for lane in pool.lanes] for pool in made.sub_pools}
    assert lanes["context"] == ["L0", "L0", "L0v1", "L0v1"]
    assert lanes["window_10"] == ["L2", "L2", "L2v1", "L2v1"]
    assert lanes["request"].count("L1v1") == 2


def test_chunks_through_the_arena_give_what_the_whole_sequence_gives():
    made, params = plan(MODEL.parts(), 1 << 17, 4), MODEL.init()
    memory = Memory(made, rows=2, context_tokens=48)
    run, device = jax.jit(step(MODEL, made)), memory.init()
    views = FreshViews.of(MODEL.parts(), jnp.asarray([TOKENS.size], jnp.int32), TOKENS.size)
    whole, _, _ = jax.jit(MODEL.apply)(params, jnp.asarray(TOKENS.reshape(1, -1)), views)
    mine = memory.admit(TOKENS.size, 8)
    for at, chunk in enumerate(TOKENS):
        for packet in memory.run([Work(mine, 6, chunk)], rows=1, tokens=6, pages=12):
            device, out = run(params, device, packet)
        np.testing.assert_allclose(out.logits[0], whole[0, 6 * at + 5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [(NEAR, 1), (CONTEXT, 2)])
def test_keys_and_values_in_pages_of_their_own_are_refused(value):
    key, lifetime = Part(Site(0), "key", (2, 8), "float32", CONTEXT), value[0]
    parts = (key, Part(Site(0), "value", (2, 8), "float32", lifetime, stride=value[1]))
    require_refused(parts)


def test_keys_with_an_entry_for_several_tokens_are_refused():
    require_refused([
        Part(Site(0), name, (2, 8), "float32", CONTEXT, stride=2) for name in ("key", "value")
    ])  # fmt: skip


def require_refused(parts):
    """With a past and without: the pages of keys would be read as values."""
    fresh = jnp.zeros((1, 2, 2, 8))
    for seen in both_views(parts):
        with pytest.raises(UsageError, match="L0 needs a key and a value of one lifetime"):
            seen.attend(Site(0), fresh, fresh, fresh, scale=1.0)


def both_views(parts):
    """Of one request with two new tokens: through the arena, and without a past."""
    made, one = plan(parts, 1 << 17, 4), jnp.zeros((1,), jnp.int32)
    views = Views(
        PackedStore(made), jnp.zeros((made.arena_granules, 32), jnp.uint32),
        jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool), one > 0,
        {pool.index: one[:, None] for pool in made.token_pools},
        {pool.index: one for pool in made.token_pools},
        {pool.index: one for pool in made.slot_pools},
    )  # fmt: skip
    return views, FreshViews.of(parts, one + 2, 2)


def test_a_part_is_read_as_what_it_was_declared():
    state = Part(Site(0), "state", (2, 8), "float32", REQUEST)
    token = Part(Site(0), "key", (2, 8), "float32", CONTEXT)
    for views in both_views((state, token)):
        with pytest.raises(UsageError, match="state is request state"):
            views.past(Site(0), "state")
        with pytest.raises(UsageError, match="running state, not context"):
            views.read(Site(0), "key")
        with pytest.raises(UsageError, match="running state, not context"):
            views.write(Site(0), "key", jnp.zeros((1, 2, 8)))
        assert views.past(Site(0), "key")[0].shape[2:] == views.read(Site(0), "state")[0].shape[1:]
