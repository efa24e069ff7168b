"""What a plan says it needs outside the arena, against real arrays and compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.device.models import HYBRID, NEAR, Attending, Mixture, Remembering
from unimem_jax.draw import draw
from unimem_jax.errors import UsageError
from unimem_jax.geometries import geometry
from unimem_jax.memory import Memory
from unimem_jax.outside import SAMPLING_COPIES, outside
from unimem_jax.packet import Packet, step_shape, word_count
from unimem_jax.plan import plan
from unimem_jax.spec import CONTEXT, request
from unimem_jax.step import init_device, step

ARENA_BYTES, PAGE_TOKENS, VOCAB = 64 << 20, 16, 1000
WIDE = Attending(CONTEXT, "bfloat16", key_heads=4, head=64, value_head=64)
MODELS = {
    "hybrid": (HYBRID, 2),
    "wide": (Mixture(Remembering(), Attending(NEAR, "bfloat16", 4, 64, 64), WIDE), 8),
    "bytes": (Mixture(Attending(CONTEXT, "int8", 4, 64, 64)), 8),
    "deep": (Mixture(*[WIDE] * 12), 8),
}


def layout(name):
    return plan(MODELS[name][0].parts(), ARENA_BYTES, PAGE_TOKENS)


def sizes(items):
    return {item.name: item.byte_count for item in items}


@pytest.mark.parametrize("rows, context_tokens, chunk_tokens", [(1, 16, 1), (5, 300, 48)])
def test_tables_last_tokens_and_packets_are_the_bytes_of_the_real_ones(
    rows, context_tokens, chunk_tokens
):
    made = layout("hybrid")
    memory = Memory(made, rows, context_tokens, chunk_tokens=chunk_tokens)
    device = memory.init()
    found = outside(
        made, rows=rows, context_tokens=context_tokens, chunk_tokens=chunk_tokens, chunk_rows=1
    )
    always = sizes(found.always)
    assert always["mappings"] + always["page tables"] == device.tables.nbytes
    assert always["mappings"] == sum(map(len, memory.allocator.mapping)) * 4
    assert always["last tokens"] == device.last_tokens.nbytes
    one = memory.admit(context_tokens - 1, 1)
    packets = memory.prefill(one, np.zeros(context_tokens - 1, np.int64))
    assert sizes(found.chunk)["packet"] == packets[-1].words.nbytes
    shape = step_shape(made, rows, 1, 0)
    assert sizes(found.decode)["packet"] == word_count(shape) * 4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows, tokens", [(16, 1), (4, 64), (2, 128)])
def test_what_a_program_is_said_to_hold_is_what_xla_gives_it(name, rows, tokens):
    """Within a third, either way, of the temporaries of the program compiled for the CPU."""
    model, heads = MODELS[name]
    made = layout(name)
    found = outside(
        made, rows=rows, context_tokens=256, chunk_tokens=tokens, chunk_rows=rows,
        query_heads=heads,
    )  # fmt: skip
    said = sizes(found.chunk)
    pages = 256 // PAGE_TOKENS
    device = jax.eval_shape(lambda: init_device(made, rows, pages))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), model.init())
    shape = step_shape(made, rows, tokens, pages)
    packet = Packet(jax.ShapeDtypeStruct((word_count(shape),), jnp.int32), shape)
    run = jax.jit(step(model, made), donate_argnums=1).lower(params, device, packet).compile()
    held = run.memory_analysis().temp_size_in_bytes
    estimate = said["fresh entries"] + said["gathered past"] + said["scores"]
    assert 2 / 3 < held / estimate < 4 / 3, f"{held:,} held, {estimate:,} said"
    assert said["fresh entries"] <= held


def test_sampling_holds_as_many_copies_of_the_logits_as_stated():
    rows, vocab = 16, 5000
    arguments = [
        jax.ShapeDtypeStruct(*one)
        for one in (((rows, vocab), jnp.float32), ((rows, 5), jnp.int32), ((rows,), jnp.int32))
    ]
    held = jax.jit(draw).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    logits = rows * vocab * 4
    assert SAMPLING_COPIES - 1 < held / logits < SAMPLING_COPIES + 0.1
    said = sizes(outside(layout("hybrid"), rows=rows, vocab=vocab).decode)
    assert said["logits"] == logits
    assert said["sampling"] == SAMPLING_COPIES * logits


def test_the_larger_kind_of_step_counts():
    made = layout("hybrid")
    few = outside(made, rows=64, chunk_tokens=1, chunk_rows=1)
    many = outside(made, rows=1, chunk_tokens=4096, chunk_rows=1)
    total = lambda items: sum(sizes(items).values())  # noqa: E731
    assert few.byte_count == total(few.always) + total(few.decode) > total(few.chunk)
    assert many.byte_count == total(many.always) + total(many.chunk) > total(many.decode)


def test_the_fresh_bytes_of_a_long_chunk_are_those_of_its_entries():
    """8,192 tokens of GPT-OSS-20B: 24,576 bytes each of context and of window."""
    made = plan(geometry("gpt-oss-20b"), 8 << 30, 16)
    found = outside(made, context_tokens=131_072, chunk_tokens=8192, chunk_rows=1)
    assert sizes(found.chunk)["fresh entries"] == 8192 * 2 * 24_576


def test_every_item_is_printed_and_in_the_json():
    found = outside(layout("hybrid"), vocab=VOCAB, query_heads=2, penalties=True)
    told = found.to_json()
    for group in ("always", "decode", "chunk"):
        for item in getattr(found, group):
            assert f"  {item.name} " in str(found)
            assert told[group][item.name] == item.byte_count > 0, item.name
    assert told["bytes"] == found.byte_count
    assert told["always"]["penalties"] == 64 * VOCAB * 4


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 0}, {"context_tokens": 0}, {"chunk_tokens": -1}, {"chunk_rows": 0}, {"vocab": -1},
     {"query_heads": 1.5}, {"rows": True}],
)  # fmt: skip
def test_a_wrong_size_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        outside(layout("hybrid"), **wrong)


def test_named_state_and_strides_have_their_tables_too():
    parts = geometry("lfm2-1.2b")
    plain = plan(parts, ARENA_BYTES, PAGE_TOKENS)
    more = plan(
        (*parts, *(type(p)(p.site, "kept", p.shape, p.dtype, request("kept"))
                   for p in parts if p.lifetime.is_request)),
        ARENA_BYTES, PAGE_TOKENS,
    )  # fmt: skip
    mappings = [sizes(outside(one).always)["mappings"] for one in (plain, more)]
    kept = next(pool for pool in more.sub_pools if pool.name == "request_kept")
    assert mappings[1] - mappings[0] == kept.unit_count * 4
