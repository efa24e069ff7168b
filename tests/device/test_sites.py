"""A layer that runs twice owns two sites; a layer that reads another's keys owns none."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.device.models import NEAR, VOCABULARY, WIDTH, Attending, Mixture, Remembering
from unimem_jax.memory import Memory
from unimem_jax.plan import plan
from unimem_jax.requests import Work
from unimem_jax.spec import CONTEXT, Site
from unimem_jax.step import step
from unimem_jax.views import FreshViews


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
