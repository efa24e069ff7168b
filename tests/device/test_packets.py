"""Packets that only the host writes, and an arena that only the device holds."""

import copy

import jax
import numpy as np
import pytest

from tests.device.served import CHUNK, ROW_PAGES, ROWS, Served
from tests.device.traffic import FUSED_TURNS, clean, programs, same_bits
from unimem_jax.memory import Memory
from unimem_jax.requests import Work

GARBAGE = 0x5A5A5A5A


def aligned(count):
    """int32[count] at an address that JAX takes over without a copy."""
    room = np.zeros(4 * count + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + 4 * count].view(np.int32)


def test_what_is_written_to_an_array_that_jax_was_given_reaches_the_device():
    words = aligned(64)
    given = jax.device_put(words)
    words[:] = GARBAGE
    assert (np.array(given) == GARBAGE).all(), "JAX copies now: packets could be used again"


def wrapped(shared, wrap):
    """The same compiled programs, each called through `wrap`."""
    found = copy.copy(shared)
    found.run, found.fused = wrap(shared.run), wrap(shared.fused)
    return found


def test_an_old_packet_may_be_overwritten_and_is_never_handed_out_again():
    seen = []

    def overwriting(program):
        def run(params, device, packet):
            device, out = jax.block_until_ready(program(params, device, packet))
            packet.words[:] = GARBAGE
            seen.append(packet.words)
            return device, out

        return run

    served = Served(wrapped(programs("hybrid")[1], overwriting))
    served.serve(FUSED_TURNS, fused=True)
    assert same_bits(served.record, clean("hybrid", fused=True).record)
    owners = {id(words if words.base is None else words.base) for words in seen}
    assert len(owners) == len(seen) >= 20
    assert all((words == GARBAGE).all() for words in seen)


def test_a_packet_keeps_no_array_of_the_caller_and_none_of_the_memory():
    memory = Memory(programs("hybrid")[1].plan, ROWS)
    request, prompt = memory.open(), np.arange(5, dtype=np.int32)
    (packet,) = memory.run([Work(request, 5, prompt)])
    held = [prompt, request.options, *memory.allocator.mapping]
    assert not any(np.shares_memory(packet.words, array) for array in held)


def test_a_host_view_of_the_arena_makes_the_next_step_copy_it():
    served = Served(programs("hybrid")[1])
    request = served.memory.open()
    tokens = np.arange(3, dtype=np.int32)

    def arena_after_a_step():
        packets = served.memory.run(
            [Work(request, 3, tokens)], rows=ROWS, tokens=CHUNK, pages=ROW_PAGES
        )
        served.memory.begin()
        for packet in packets:
            served.device, _ = served.programs.run(served.programs.params, served.device, packet)
        return served.device.arena

    served.memory.begin()
    first = arena_after_a_step()
    place = first.unsafe_buffer_pointer()
    second = arena_after_a_step()
    assert first.is_deleted()
    assert second.unsafe_buffer_pointer() == place
    view = np.asarray(second)
    third = arena_after_a_step()
    assert not second.is_deleted()
    assert view.ctypes.data == place != third.unsafe_buffer_pointer()


@pytest.mark.parametrize("name", ["hybrid", "state only"])
def test_the_arena_never_leaves_its_place_while_requests_come_and_go(name):
    places = set()

    def noting(program):
        def run(params, device, packet):
            device, out = program(params, device, packet)
            places.add(device.arena.unsafe_buffer_pointer())
            return device, out

        return run

    served = Served(wrapped(programs(name)[1], noting))
    served.serve(FUSED_TURNS, fused=name == "hybrid")
    assert len(places) == 1
