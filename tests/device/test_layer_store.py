"""Steps over one array per part, as the benchmark keeps them, beside steps over the arena."""

import jax
import numpy as np
import pytest

from bench.layer_store import LayerStore
from tests.device.models import MIXTURES, VOCABULARY
from unimem_jax.memory import Memory
from unimem_jax.plan import plan
from unimem_jax.requests import Work
from unimem_jax.step import step


@pytest.mark.parametrize("name", ["hybrid", "pooled", "bytes"])
def test_both_stores_give_the_same_logits(name):
    model = MIXTURES[name]
    made = plan(model.parts(), 1 << 17, 4)
    layers = LayerStore(made, tuple(pool.unit_count for pool in made.sub_pools))
    memory, params = Memory(made, rows=2, context_tokens=48), model.init()
    runs = [jax.jit(step(model, made)), jax.jit(step(model, made, layers))]
    devices = [memory.init(), memory.init(layers)]
    mine = memory.admit(24, 8)
    for chunk in np.random.default_rng(0).integers(0, VOCABULARY, (4, 6)):
        packets = memory.run([Work(mine, 6, chunk)], rows=1, tokens=6, pages=12)
        for packet in packets:
            found = [run(params, d, packet) for run, d in zip(runs, devices, strict=True)]
            devices = [device for device, _ in found]
        np.testing.assert_allclose(found[0][1].logits, found[1][1].logits, rtol=1e-5, atol=1e-6)
