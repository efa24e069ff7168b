"""The step-time model beside sums by hand, and equal blocks beside published figures."""

import numpy as np
import pytest

from unimem_jax.blocks import block_plan
from unimem_jax.errors import UsageError
from unimem_jax.geometries import geometry, geometry_names
from unimem_jax.schedule import Limits
from unimem_jax.simulate import Simulation, simulate
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, request, window
from unimem_jax.step_time import StateBytes, StepTime
from unimem_jax.trace import Traced
from unimem_jax.weights import Weights, weights

PARTS = [
    Part(Site(0), "key", (100,), "uint8", CONTEXT),
    Part(Site(1), "key", (10,), "uint8", window(8)),
    Part(Site(2), "state", (1000,), "uint8", REQUEST),
    Part(Site(2), "state_kept", (999,), "uint8", request("checkpoint")),
]
STATE = StateBytes.of(PARTS)


def test_requests_need_their_tokens_their_windows_and_their_state():
    assert StateBytes(100, ((8, 10),), 1000) == STATE
    alone = [STATE.total(np.array([length])) for length in (0, 1, 7, 50)]
    assert alone == [0, 1110, 1770, 6070]
    lengths = np.array([0, 1, 7, 50])
    assert STATE.total(lengths) == sum(alone)


def test_a_step_takes_the_longer_of_its_bytes_and_its_operations():
    dense = Weights(5e4, 5e4, 2, 3)
    past, counts = np.array([20, 0]), np.array([1, 4])
    byte_count = 1e5 + (20 * 100 + 7 * 10) + 5 * 110 + 2 * 2 * 1000
    by_bytes = StepTime(dense, STATE, bytes_per_s=1e3, operations_per_s=1e18)
    assert by_bytes.seconds(past, counts) == pytest.approx(byte_count / 1e3)
    assert by_bytes.seconds(past, counts, 500) == pytest.approx((byte_count + 1000) / 1e3)
    # The decode sees 21 tokens, 8 of them in the window; the chunk's 4 see 2 each in the middle.
    operations = 2 * 5e4 * 5 + 3 * (100 * (21 + 4 * 2) + 10 * (8 + 4 * 2))
    by_operations = StepTime(dense, STATE, bytes_per_s=1e18, operations_per_s=1e3)
    assert by_operations.seconds(past, counts) == pytest.approx(operations / 1e3)


def test_few_tokens_read_their_experts_and_many_read_all():
    sparse = StepTime(Weights(1e6, 1e5, 1, 0), StateBytes(0, (), 0), 1.0, 1e30)
    one, many = (sparse.seconds(np.array([0]), np.array([n])) for n in (1, 1000))
    assert one == pytest.approx(1e5)
    assert many == pytest.approx(1e6)


def test_every_geometry_has_weights():
    for name in geometry_names():
        assert 0 < weights(name).active <= weights(name).total
    with pytest.raises(UsageError, match="no model is named 'gpt-5'"):
        weights("gpt-5")


def test_requests_arrive_when_they_do_and_wait_for_their_first_token():
    clock = StepTime(Weights(1, 1, 1, 0), StateBytes(0, (), 0), 1.0, 1e30)  # a second a step
    plan = block_plan(PARTS[:1], 1 << 20)
    requests = [Traced(0.0, 4, 3), Traced(1.5, 4, 2), Traced(60.0, 4, 1)]
    run = Simulation(requests, plan, Limits(8, 64, 64), clock=clock)
    while not run.is_over:
        run.step()
    timing = run.found().timing
    # Steps at 0, 1, 2 and 3; then the third request is awaited.
    assert run.steps == 5
    assert timing.seconds == 61
    assert timing.ttft_p50_s == 1
    assert timing.ttft_p99_s == pytest.approx(1.49)  # nearly the second's, from 1.5 to 3
    assert timing.tokens_per_s == pytest.approx(6 / 61)


def test_so_many_requests_are_there_at_a_time():
    plan = block_plan(PARTS[:1], 1 << 20)
    requests = [Traced(0.0, 4, 3)] * 7
    clock = StepTime(Weights(1, 1, 1, 0), StateBytes(0, (), 0), 1.0, 1e30)
    run = Simulation(requests, plan, Limits(8, 64, 64), clock=clock, concurrency=2)
    while not run.is_over:
        run.step()
        assert len(run.queue) <= 2
    assert run.found().running_max == 2
    assert run.found().timing.ttft_p99_s == 1  # nobody waits: each comes when another has left


def test_blocks_of_a_state_hybrid_are_as_large_as_its_state():
    # 528 tokens, 17,301,504 bytes a block, three blocks of state a request.
    slots, pages = block_plan(geometry("qwen3.5-4b"), 8 << 30).sub_pools
    assert pages.unit_bytes == 17_301_504
    assert pages.unit_entries == 528
    assert slots.unit_bytes == 3 * pages.unit_bytes
    assert pages.unit_count == (8 << 30) // 17_301_504 - 1


def test_layers_of_the_more_frequent_kind_are_padded_to_groups():
    # 10 layers of whole context; 52 windows are 6 groups of 10, the last one mostly empty.
    windows, pages = block_plan(geometry("gemma-3-27b"), 32 << 30).sub_pools
    assert windows.unit_bytes == 6 * pages.unit_bytes
    # 7 latents and 6 states of equal count share one size of group: the larger.
    parts = [Part(Site(i), "latent", (64,), "uint8", CONTEXT) for i in range(6)]
    parts += [Part(Site(6 + i), "key", (64,), "uint8", window(32)) for i in range(7)]
    assert len({pool.unit_bytes for pool in block_plan(parts, 1 << 20).sub_pools}) == 1


def test_equal_blocks_run_what_their_scheduler_published():
    # Qwen3.5-4B, 8 GiB, 128 / 256 x 256: 85.3 running and 768 steps.
    plan = block_plan(geometry("qwen3.5-4b"), 8 << 30)
    found = simulate([(128, 256)] * 256, plan, Limits(256, 8192, 8192, 256))
    assert (round(found.running_mean, 1), found.steps) == (85.3, 768)


@pytest.mark.parametrize(
    "parts, arena_bytes, message",
    [
        (geometry("inkling-975b-a41b"), 8 << 30, "token layers of one size"),
        (PARTS, 8 << 30, "no place for L2.state_kept"),
        (geometry("qwen3.5-4b"), 20 << 20, "are not two blocks"),
        (PARTS[2:3], 8 << 30, "token layers of one size"),
    ],
)
def test_what_has_no_equal_blocks_is_refused(parts, arena_bytes, message):
    with pytest.raises(UsageError, match=message):
        block_plan(parts, arena_bytes)
