"""Checkpoints: state in a sub-pool of its own, which steps neither take nor touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.device.models import VOCABULARY, Attending, Mixture, Remembering
from unimem_jax.allocator import number_of
from unimem_jax.errors import UsageError
from unimem_jax.memory import Memory
from unimem_jax.plan import plan
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, request
from unimem_jax.step import DeviceState, step
from unimem_jax.store import PackedStore

RUNNING, SAVED = (Site(0), "state"), (Site(0, stream="checkpoint"), "state")


class Checkpointed(Mixture):
    """A hybrid whose recurrent state can be kept."""

    def parts(self):
        saved = Part(*SAVED, (8,), "float32", request("checkpoint"))
        return (*super().parts(), saved)


class Prying(Checkpointed):
    """Reads a checkpoint from inside a step."""

    def apply(self, params, tokens, views):
        _, views = views.read(*SAVED)
        return super().apply(params, tokens, views)


@pytest.fixture(scope="module")
def made():
    model = Checkpointed(Remembering(), Attending(CONTEXT))
    return model, plan(model.parts(), 1 << 17, 4)


def serve(run, device, packets, params):
    for packet in packets:
        device, out = run(params, device, packet)
    return device, out


def copied(store, device, source, target):
    """Copies (key, slot address) to (key, slot address)."""
    at = [jnp.asarray([address], jnp.int32) for _, address in (source, target)]
    state = store.read_state(device.arena, source[0], at[0])
    arena = store.write_state(device.arena, target[0], at[1], state)
    return DeviceState(arena, device.tables, device.last_tokens)


def test_a_checkpoint_is_put_back_to_the_bit_after_steps_of_other_requests(made):
    model, layout = made
    params, store = model.init(), PackedStore(layout)
    run = jax.jit(step(model, layout))
    memory = Memory(layout, rows=2, context_tokens=64, chunk_tokens=8)
    running, named = layout.locate(RUNNING)[0].index, layout.locate(SAVED)[0].index
    device = memory.init()
    mine = memory.admit(8, 8)
    prompt = np.arange(8) % VOCABULARY
    device, _ = serve(run, device, memory.prefill(mine, prompt), params)
    kept = memory.allocator.grant_slot(named, committed=False)
    live = (RUNNING, memory.allocator.mapping[running][number_of(mine.slots[0])])
    saved = (SAVED, memory.allocator.mapping[named][number_of(kept)])
    before = store.read_state(device.arena, RUNNING, jnp.asarray([live[1]], jnp.int32))
    device = copied(store, device, live, saved)
    other = memory.admit(8, 8)  # its steps write around the checkpoint
    device, _ = serve(run, device, memory.prefill(other, prompt[::-1]), params)
    device, _ = serve(run, device, memory.prefill(mine, prompt[:2]), params)
    changed = store.read_state(device.arena, RUNNING, jnp.asarray([live[1]], jnp.int32))
    assert (changed != before).any()
    device = copied(store, device, saved, live)
    again = store.read_state(device.arena, RUNNING, jnp.asarray([live[1]], jnp.int32))
    np.testing.assert_array_equal(again, before)


def test_a_step_does_not_read_a_checkpoint():
    model = Prying(Remembering(), Attending(CONTEXT))
    layout = plan(model.parts(), 1 << 17, 4)
    memory = Memory(layout, rows=2, context_tokens=64, chunk_tokens=8)
    mine = memory.admit(8, 8)
    packet = memory.prefill(mine, np.arange(8))[-1]
    with pytest.raises(UsageError, match="running state, not request_checkpoint"):
        step(model, layout)(model.init(), memory.init(), packet)


def test_the_running_state_is_the_only_one_in_a_packet(made):
    _, layout = made
    memory = Memory(layout, rows=2, context_tokens=64, chunk_tokens=8)
    (packet,) = memory.prefill(memory.admit(8, 8), np.arange(8))
    assert packet.shape.slots == 1
    assert [pool.lifetime for pool in layout.slot_pools] == [REQUEST]
