"""A target and its draft, each with a step of its own over one arena and the same pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.device.models import NEAR, VOCABULARY, Attending, Mixture, Remembering
from tests.in_place import MEBIBYTE, assert_in_place
from unimem_jax.errors import UsageError
from unimem_jax.memory import Memory
from unimem_jax.packet import Packet, step_shape, word_count
from unimem_jax.plan import plan
from unimem_jax.requests import Work
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, request, window
from unimem_jax.step import init_device, step

TARGET = Mixture(
    Remembering(), Attending(window(40)), Attending(CONTEXT, "bfloat16", key_heads=3, head=6)
)
DRAFT = Mixture(Attending(CONTEXT), Remembering((5,)), Attending(window(64)), stream="draft")
TOGETHER = plan((*TARGET.parts(), *DRAFT.parts()), 1 << 18, 4)
PROMPT = np.random.default_rng(0).integers(0, VOCABULARY, 28)


def packets_of(made):
    """A memory, and the prompt in chunks of 7 that all have one shape."""
    memory = Memory(made, rows=2, context_tokens=48, chunk_tokens=7)
    mine, found = memory.admit(28, 8), []
    for chunk in PROMPT.reshape(4, 7):
        found += memory.run([Work(mine, 7, chunk)], rows=1, tokens=7, pages=12)
    return memory, found


def alone(model):
    """Logits of each chunk in an arena of the model's own."""
    made = plan(model.parts(), 1 << 18, 4)
    memory, packets = packets_of(made)
    device, run, params = memory.init(), jax.jit(step(model, made)), model.init()
    found = []
    for packet in packets:
        device, out = run(params, device, packet)
        found.append(np.asarray(out.logits))
    return found


def test_both_give_what_they_give_alone_and_write_no_byte_of_the_other():
    memory, packets = packets_of(TOGETHER)
    device = memory.init()
    wanted = {model: alone(model) for model in (TARGET, DRAFT)}
    params = {model: model.init() for model in wanted}
    runs = {model: jax.jit(step(model, TOGETHER)) for model in wanted}
    for at, packet in enumerate(packets):
        for model, run in runs.items():
            before = np.asarray(device.arena)
            device, out = run(params[model], device, packet)
            np.testing.assert_array_equal(out.logits, wanted[model][at])
            changed = np.asarray(device.arena) != before
            assert changed.any()
            changed &= ~lanes_of(memory, draft=model is DRAFT)
            assert not changed.any(), "it wrote where the other's state lies"


def lanes_of(memory, *, draft):
    """bool[granules, 32]: words of the lanes of one of the two, in every live unit."""
    found = np.zeros(TOGETHER.arena_granules * 32, np.bool_)
    for pool in TOGETHER.sub_pools:
        mapping = memory.allocator.mapping[pool.index]
        for address in mapping[mapping < pool.unit_count].tolist():
            start = address * pool.unit_granules * 32
            for entry in range(start, start + pool.unit_granules * 32, pool.entry_words):
                if pool.is_slot:
                    for lane in pool.lanes:
                        rows = -(-lane.words // 128) * 128
                        at = entry + lane.offset_words
                        found[at : at + rows] |= lane.part.draft is draft
                elif draft:
                    found[entry + pool.target_words : entry + pool.entry_words] = True
                else:
                    found[entry : entry + pool.target_words] = True
    return found.reshape(-1, 32)


@pytest.mark.parametrize("model", [TARGET, DRAFT], ids=["target", "draft"])
@pytest.mark.parametrize("rows, tokens", [(1, 1), (4, 7)])
def test_a_step_of_either_is_in_place(model, rows, tokens):
    made = plan((*TARGET.parts(), *DRAFT.parts()), 1 << 30, 16)
    shape = step_shape(made, rows, tokens, 16)
    packet = Packet(jax.ShapeDtypeStruct((word_count(shape),), jnp.int32), shape)
    device = jax.eval_shape(lambda: init_device(made, 16, 64))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.init())
    program = jax.jit(step(model, made), donate_argnums=1).lower(params, device, packet).compile()
    assert_in_place(program, made.arena_bytes, 2 * MEBIBYTE)


def test_one_model_may_be_both():
    class Both(Mixture):
        def parts(self):
            return (*TARGET.parts(), *DRAFT.parts())

    assert callable(step(Both(), TOGETHER))


@pytest.mark.parametrize(
    "model",
    [Mixture(Attending(NEAR)), Mixture(Attending(CONTEXT), stream="draft"), Mixture()],
    ids=["part of the target", "part of the draft", "nothing"],
)
def test_a_model_that_declares_only_some_of_the_parts_is_refused(model):
    with pytest.raises(UsageError, match="other parts than this model declares"):
        step(model, TOGETHER)


def test_named_state_may_be_planned_beside_a_model_and_must_be_planned_if_declared():
    kept = Part(Site(0), "kept", (8,), "float32", request("kept"))
    made = plan((*TARGET.parts(), kept), 1 << 18, 4)
    assert callable(step(TARGET, made))

    class Keeping(Mixture):
        def parts(self):
            return (*TARGET.parts(), kept)

    assert callable(step(Keeping(), made))
    with pytest.raises(UsageError, match="other parts"):
        step(Keeping(), plan(TARGET.parts(), 1 << 18, 4))
    running = Part(Site(0), "more", (8,), "float32", REQUEST)
    with pytest.raises(UsageError, match="other parts"):
        step(TARGET, plan((*TARGET.parts(), running), 1 << 18, 4))
