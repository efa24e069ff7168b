"""Padding computes something finite, and nothing of it reaches a row that is real."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.device.models import MIXTURES
from tests.device.served import CHUNK, POISON, ROW_PAGES, ROWS, Served, poisoned
from tests.device.traffic import programs, same_bits
from unimem_jax.packet import Packet, fields
from unimem_jax.requests import Work
from unimem_jax.step import DeviceState


def two_of_four(name, word=None):
    """Two requests in packets of four rows: a memory with a past, and the packet that follows."""
    served = Served(programs(name)[1], word)
    first, second = served.memory.open(), served.memory.open()
    prompts = np.arange(6, dtype=np.int32), np.asarray([7, 3], np.int32)
    chunks = [Work(first, 6, prompts[0]), Work(second, 2, prompts[1])]
    served.step(chunks, CHUNK)
    (packet,) = served.memory.run(
        [Work(first, 5, prompts[0][:5]), Work(second, 1)], rows=ROWS, tokens=CHUNK, pages=ROW_PAGES
    )
    return served, packet


def run(served, packet):
    """What a packet gives from the present device, which stays as it is."""
    copy = DeviceState(*(jnp.array(leaf) for leaf in jax.tree.leaves(served.device)))
    device, out = served.programs.run(served.programs.params, copy, packet)
    return np.array(device.arena), np.array(out.logits), np.array(out.sampled)


@pytest.mark.parametrize("name", [*MIXTURES, "embedded"])
def test_logits_of_padding_are_finite_in_an_arena_of_nan(name):
    served = Served(programs(name)[1])
    nowhere = np.zeros(served.memory.plan.arena_bytes, np.bool_)
    arena = poisoned(served.device.arena, nowhere, POISON["float32 NaN"])
    served.device = DeviceState(arena, served.device.tables, served.device.last_tokens)
    request = served.memory.open()
    served.memory.begin()
    (packet,) = served.memory.run(
        [Work(request, 3, np.arange(3, dtype=np.int32))], rows=ROWS, tokens=CHUNK, pages=ROW_PAGES
    )
    _, logits, sampled = run(served, packet)
    assert np.isfinite(logits).all()
    assert sampled.tolist()[1:] == [-1] * (ROWS - 1)


SCRAMBLED = {
    "tokens of padding rows": lambda words: words["tokens"][2:].fill(11),
    "tokens after the last of a row": lambda words: words["tokens"][0, 5:].fill(12),
    "positions of padding rows": lambda words: words["position"][2:].fill(9),
    "slots of padding rows": lambda words: words["slot"][2:].fill(1),
    "options of padding rows": lambda words: words["options"][2:].fill(5),
    "rows of padding rows": lambda words: words["row"][2:].fill(0),
    "starts of padding rows": lambda words: words["start"][2:].fill(1),
    "emits of padding rows": lambda words: words["emit"][2:].fill(1),
}


@pytest.mark.parametrize("name", ["hybrid", "embedded", "odd shapes"])
def test_whatever_padding_holds_real_rows_and_the_arena_stay_bit_for_bit(name):
    served, packet = two_of_four(name, POISON["all ones"])
    arena, logits, sampled = run(served, packet)
    for what, scramble in SCRAMBLED.items():
        words = packet.words.copy()
        scramble({
            field: words[start : start + int(np.prod(dims))].reshape(dims)
            for field, (start, dims) in fields(packet.shape).items()
        })  # fmt: skip
        assert not np.array_equal(words, packet.words), what
        found, seen, drawn = run(served, Packet(words, packet.shape))
        assert same_bits([(logits[:2], sampled[:2])], [(seen[:2], drawn[:2])]), what
        assert np.array_equal(found, arena), what


def test_the_neighbours_of_a_row_change_no_bit_of_it():
    served, packet = two_of_four("hybrid")
    start, _ = fields(packet.shape)["tokens"]
    _, logits, _ = run(served, packet)
    words = packet.words.copy()
    words[start : start + 5] = [12, 11, 10, 9, 8]
    _, seen, _ = run(served, Packet(words, packet.shape))
    assert not np.array_equal(seen[0], logits[0])
    assert np.array_equal(seen[1].view(np.uint32), logits[1].view(np.uint32))
