"""Samples of one prompt, through an engine without a device: who reads it, and how often."""

from types import SimpleNamespace

import numpy as np
import pytest

import unimem_jax.engine as engines
from tests.prefix.world import KINDS
from unimem_jax.memory import Memory
from unimem_jax.sampling import Sampling


class Deviceless(engines.Engine):
    """Every sampled token is 0; nothing is computed."""

    is_failing = False

    def _run_batch(self, batch):
        super()._run_batch(batch)
        if self.is_failing:
            raise RuntimeError("the device is gone")
        return SimpleNamespace(sampled=np.zeros(len(batch), np.int64))


@pytest.fixture(params=["whole", "state", "hybrid"])
def engine(request, monkeypatch):
    """An engine with room for all."""
    monkeypatch.setattr(engines, "Programs", lambda *_: lambda device, packet: (device, None))
    monkeypatch.setattr(Memory, "init", lambda _: None)
    model = SimpleNamespace(vocab_size=8, context_tokens=128, parts=lambda: KINDS[request.param])
    return Deviceless(
        model, None, arena_bytes=1 << 20, page_tokens=4, rows=8, chunk_tokens=8, prefix_cache=True
    )


def submit(engine, count):
    """Lines up samples of one prompt of 80 tokens."""
    sampling = Sampling(max_tokens=4, n=count)
    served = engine.intake.check_all([[1] * 80], sampling, engine.memory)
    return served, [engine._submit(one) for one in served]


def finish(engine):
    while not engine.is_idle:
        engine.step()
        engine.memory.check()
        engine._admission.cache.check()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_when_the_one_that_reads_is_given_up_one_other_reads_on(engine, steps):
    _, numbers = submit(engine, 6)
    for _ in range(steps):
        engine.step()
    engine.abort(numbers[0])
    engine.step()
    assert len(engine.queue.running) == 1
    engine.abort(numbers[1])
    engine.abort(numbers[3])
    finish(engine)
    assert engine.statistics().computed_tokens <= 80 + 3 * 4 + 8 * 2, "who left lost a chunk each"
    assert engine.statistics().generated_tokens == 3 * 4


def test_after_a_failed_step_nobody_who_waits_has_computed_anything(engine):
    """C1, with one that was about to resume."""
    submit(engine, 1)
    finish(engine)
    served, _ = submit(engine, 3)
    engine.is_failing = True
    with pytest.raises(RuntimeError):
        engine.step()
    assert not any(one.computed for one in served)
    engine.is_failing = False
    finish(engine)
