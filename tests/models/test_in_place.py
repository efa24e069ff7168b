"""Compiled for the CPU, a step of every family that reads its past by itself copies no arena.

Nothing is run and no arena is allocated. Families that attend through views are covered by the tiny
models of `tests/device`, where the check itself is checked. Without the ties of `Views.read` these
programs happen to copy nothing either (seen on one of them).
"""

import jax
import jax.numpy as jnp
import pytest
from unimem_jax.models import deepseek_v32, kimi_linear, qwen3_next
from unimem_jax.models.fields import Fields

from tests.device.steps import PAGE_TOKENS, ROW_PAGES, Case
from tests.in_place import assert_in_place
from tests.models.reference import described
from tests.models.through_arena import QUICK
from unimem_jax.packet import Packet, step_shape, word_count
from unimem_jax.plan import plan
from unimem_jax.step import init_device, step

ARENA_BYTES = 4 << 30
READERS = {
    "qwen3_next": qwen3_next.read_decoder,
    "kimi_linear": kimi_linear.read_decoder,
    "deepseek_v32": deepseek_v32.read_decoder,
}
ONE, CHUNK = Case(1, 1, 16), Case(4, 7, 64)


def require_in_place(family, case):
    model = READERS[family](Fields(described(family)[0]), "bfloat16")
    laid_out = plan(model.parts(), ARENA_BYTES, PAGE_TOKENS)
    shape = step_shape(laid_out, case.rows, case.tokens, case.pages)
    params = {n: jax.ShapeDtypeStruct(one, jnp.float32) for n, one in model.shapes().items()}
    device = jax.eval_shape(lambda: init_device(laid_out, 16, ROW_PAGES))
    packet = Packet(jax.ShapeDtypeStruct((word_count(shape),), jnp.int32), shape)
    run = jax.jit(step(model, laid_out), donate_argnums=1, compiler_options=QUICK)
    program = run.lower(params, device, packet).compile()
    assert_in_place(program, laid_out.arena_bytes, case.temp_bytes + 8 * packet_bytes(case))


def packet_bytes(case):
    """What a chunk gathers of the past of one layer, float32: entries of up to 512 bytes."""
    return case.rows * case.pages * PAGE_TOKENS * 512


@pytest.mark.parametrize("family", ["kimi_linear", "deepseek_v32"])
def test_a_step_of_one_token_is_in_place(family):
    require_in_place(family, ONE)


@pytest.mark.slow
@pytest.mark.parametrize("family", READERS)
def test_a_step_of_a_chunk_is_in_place(family):
    require_in_place(family, CHUNK)
