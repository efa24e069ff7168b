"""Sequences of calls that other allocators got wrong; docstrings begin with the scenario's number.

A cached page is an id that nobody runs with; eviction frees the oldest until `fits` says yes.
"""

import itertools
import random
import time

import pytest

from tests import sim
from tests.memory.scenes import (
    CONTEXT,
    SLOT,
    THREE,
    WINDOW,
    address,
    by_address,
    evict,
    grant,
    moved,
    states,
    two,
)
from tests.memory.twin import POISON
from tests.memory.world import World
from unimem_jax.allocator import Allocator, number_of
from unimem_jax.bands import Geometry
from unimem_jax.errors import NeverFits, OutOfMemory, UsageError
from unimem_jax.ledger import BEYOND, HOLE, VACATED


@pytest.mark.parametrize("order", ["oldest", "random"])
def test_a_slot_evicts_as_many_cached_pages_as_its_bytes_need_and_no_more(order):
    """T1, A1."""
    for arena, slot, full, pages, expected in ((1000, 53, 990, 0, 43), (40, 8, 34, 2, 4)):
        memory = two(arena, slot, 1)
        cached = grant(memory, 1, full)
        if order == "random":
            random.Random(0).shuffle(cached)
        assert evict(memory, cached, [1, pages]) == expected
        memory.make_room([1, pages], committed=False)
        memory.grant_slot(0, committed=False)
        grant(memory, 1, pages)
        memory.check()


def test_one_evictable_page_too_few_is_one_page_evicted():
    """T2: seven units free and eight wanted, on both sides."""
    memory = two(16, 1, 1, is_slot=False)
    low, high = grant(memory, 0, 5), grant(memory, 1, 4)
    assert not memory.fits([4, 4])
    assert evict(memory, low[2:], [4, 4]) == 1
    memory.make_room([4, 4], committed=False)
    grant(memory, 0, 4), grant(memory, 1, 4)
    assert high
    memory.check()


def test_eviction_stops_at_the_first_victim_that_suffices():
    """T3."""
    memory = two(60, 1, 1, is_slot=False)
    cached = grant(memory, 1, 60)
    assert evict(memory, cached, [1, 0]) == 1


def test_ids_far_beyond_the_pages_of_a_sub_pool_are_mapped_there():
    """T4: a window page is ten context pages; ids run over its page count again and again."""
    memory = Allocator(Geometry(100, (10, 1), ("low", "high"), (False, False), 100))
    held = grant(memory, 1, 40)
    for _ in range(60):
        both = memory.grant_page(committed=False)
        assert number_of(both) >= memory.geometry.unit_counts[0]
        assert address(memory, 0, both) < 10
        memory.free(both)
    memory.free(held)
    memory.check()


@pytest.mark.parametrize("page", [1, 2, 4, 64])
@pytest.mark.parametrize("layers", [(4, 3, 1), (4, 2, 2), (6, 3, 1), (3, 5, 2)])
def test_what_an_empty_arena_says_it_has_can_be_had(page, layers):
    """T5: entry sizes that do not divide each other."""
    context, windows, state = layers
    units = (53 * state, windows * page, context * page)
    pages = 53 * 400 // min(units[1:])
    geometry = Geometry(53 * 400, units, ("low", "float", "high"), (True, False, False), pages)
    for pool in range(3):
        memory = Allocator(geometry)
        most = max(
            n
            for n in range(geometry.unit_counts[pool] + 1)
            if memory.fits([n if i == pool else 0 for i in range(3)])
        )
        assert most == geometry.unit_counts[pool]
        grant(memory, pool, most)
        memory.check()


@pytest.mark.parametrize("short", [1, 2, 3])
def test_slots_beside_a_float_move_only_the_pages_in_their_way(short):
    """T6."""
    geometry = Geometry(400, (7, 3, 2), ("low", "float", "high"), (True, False, False), 200)
    memory = Allocator(geometry)
    pages = grant(memory, WINDOW, 40)
    gap = memory.layout.bands[WINDOW].lo * 3 // 7
    assert memory.layout.bands[WINDOW].lo > 0
    memory.free(by_address(memory, WINDOW, pages)[10:20])
    memory.make_room([gap + short, 0, 0], committed=False)
    assert moved(memory) <= -(-short * 7 // 3) + 1
    memory.check()


def test_a_page_moved_under_a_reader_is_published_after_the_move_has_retired():
    """T7: step 1 reads the page; the batch that moves it runs as step 2."""
    memory = Allocator(THREE)
    grant(memory, SLOT, 2)
    pages = grant(memory, CONTEXT, 16)
    memory.ledger.dispatch()
    lowest = by_address(memory, CONTEXT, pages)
    source = address(memory, CONTEXT, lowest[0])
    memory.free(lowest[6:8])
    slot = memory.grant_slot(SLOT, committed=False)  # takes the bytes of the page at once
    assert moved(memory) == 2
    place = address(memory, SLOT, slot)
    assert place * 4 <= source * 2 < place * 4 + 4
    memory.ledger.retire(1)
    with pytest.raises(UsageError, match="retire"):
        memory.ledger.fence(SLOT, place, "peer")
    memory.ledger.retire(memory.ledger.dispatch())
    memory.ledger.fence(SLOT, place, "peer")


def test_a_page_freed_while_a_step_writes_it_reaches_no_peer_before_the_step_retires():
    """T8: device programs follow in order; a host copy in and a peer have to wait."""
    memory = Allocator(THREE)
    first = memory.grant_page([CONTEXT], committed=False)
    ticket = memory.ledger.dispatch()  # writes the page
    place = address(memory, CONTEXT, first)
    memory.free(first)
    second = memory.grant_page([CONTEXT], committed=False)
    assert address(memory, CONTEXT, second) == place
    with pytest.raises(UsageError, match="retire"):
        memory.ledger.fence(CONTEXT, place, "remote write")
    memory.ledger.retire(ticket)
    memory.ledger.fence(CONTEXT, place, "remote write")
    memory.unpin(CONTEXT, place, "remote write")


def test_capacity_follows_no_pin_however_often_it_comes_and_goes():
    """T9, A21: `fits` reads counts; while the pin is there the grant waits, and changes nothing."""
    memory = Allocator(THREE)
    grant(memory, SLOT, 2)
    pages = grant(memory, CONTEXT, 16)
    lowest = by_address(memory, CONTEXT, pages)
    memory.free(lowest[4:14])
    place = address(memory, CONTEXT, lowest[0])
    for _ in range(100):
        memory.ledger.pin(CONTEXT, place, "copy")
        assert memory.fits([5, 0, 0])
        assert not memory.fits([6, 0, 0])
        before = states(memory)
        with pytest.raises(OutOfMemory, match="copy"):
            memory.grant_slot(SLOT, committed=False)
        assert states(memory)[1] == before[1]
        memory.unpin(CONTEXT, place, "copy")
        assert memory.fits([5, 0, 0])
        assert not memory.fits([6, 0, 0])
    grant(memory, SLOT, 5)
    memory.check()


def test_two_batches_of_moves_behind_one_event_both_come_back():
    """T10, A2: three pages and then two are moved before one event tells that both have run."""
    memory = two(40, 1, 1, is_slot=False)
    low, high = grant(memory, 0, 20), grant(memory, 1, 20)
    memory.ledger.retire(memory.ledger.dispatch())
    memory.free(by_address(memory, 1, high)[10:])
    sources = []
    for count in (3, 2):
        grant(memory, 0, count)
        for batch in memory.take_moves():
            sources += batch.sources.tolist()
            assert batch.sub_pool == 1
    assert len(sources) == 5
    assert all(memory.ledger.states[1][a] == VACATED for a in sources)
    assert not any(memory.ledger.settled(1, a) for a in sources)
    tickets = [memory.ledger.dispatch(), memory.ledger.dispatch()]
    assert not any(memory.ledger.settled(1, a) for a in sources)
    for ticket in tickets:
        memory.ledger.retire(ticket)
    assert all(memory.ledger.states[1][a] in (BEYOND, HOLE) for a in sources)
    assert all(memory.ledger.settled(1, a) for a in sources)
    assert len(grant(memory, 0, 5)) == 5
    assert low
    memory.check()


def test_with_a_pin_in_every_band_all_that_the_pins_leave_can_be_had():
    """T11: half of everything is holes."""
    memory = Allocator(THREE)
    ids = [grant(memory, SLOT, 4), grant(memory, WINDOW, 4), grant(memory, CONTEXT, 5)]
    for pool, held in enumerate(ids):
        held = by_address(memory, pool, held)
        edge = 0 if pool < CONTEXT else -1  # where the band begins, so nothing is blocked
        memory.ledger.pin(pool, address(memory, pool, held[edge]), "transfer")
        kept = held[edge]
        memory.drop([id_ for id_ in held[::2] if id_ != kept], pool)
    asks = itertools.product(range(11), range(1), range(21))
    most = max(filter(memory.fits, asks), key=lambda ask: 4 * ask[0] + 2 * ask[2])
    memory.make_room(most, committed=False)
    memory.check()


def test_a_move_between_translation_and_transfer_is_seen_by_the_transfer():
    """T12: the address that was read before is refused; the id gives the final one."""
    memory = Allocator(THREE)
    grant(memory, SLOT, 2)
    pages = by_address(memory, CONTEXT, grant(memory, CONTEXT, 16))
    before = address(memory, CONTEXT, pages[0])
    memory.free(pages[6:8])
    memory.grant_slot(SLOT, committed=False)
    after = address(memory, CONTEXT, pages[0])
    assert after != before
    with pytest.raises(UsageError, match="cannot pin"):
        memory.ledger.pin(CONTEXT, before, "transfer")
    memory.ledger.pin(CONTEXT, after, "transfer")


def test_what_fits_on_every_side_but_not_together_is_refused_and_changes_nothing():
    """T14."""
    memory = Allocator(THREE)
    grant(memory, WINDOW, 4)
    demands = [[6, 0, 0], [0, 9, 0], [0, 0, 14]]
    assert all(memory.fits(demand) for demand in demands)
    before = states(memory)
    with pytest.raises(OutOfMemory):
        memory.commit([6, 5, 14])
    assert states(memory) == before


def test_addresses_beyond_two_gibi_elements_are_exact():
    """T16: units of a mebi granules; the last one begins at granule 2^31 - 2^20."""
    geometry = Geometry(2**31, (2**20, 2**19), ("low", "high"), (True, False), 4096)
    memory = Allocator(geometry)
    slots, pages = grant(memory, 0, 1000), grant(memory, 1, 2096)
    assert not memory.fits([0, 1])
    begins = [address(memory, 0, id_) * 2**20 for id_ in slots]
    begins += [address(memory, 1, id_) * 2**19 for id_ in pages]
    assert max(begins) == 2**31 - 2**19
    ends = [begin + 2**20 for begin in begins[:1000]] + [begin + 2**19 for begin in begins[1000:]]
    spans = sorted(zip(begins, ends, strict=True))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    memory.free(pages[:2])
    memory.grant_slot(0, committed=False)
    memory.check()


def test_a_demand_over_the_arena_is_refused_with_its_items():
    """T17."""
    with pytest.raises(NeverFits, match=r"9 \* 512 \+ 3 \* 256 bytes") as caught:
        Allocator(THREE).commit([9, 0, 3])
    assert "the arena has 5,120 bytes" in str(caught.value)


def test_a_page_freed_twice_or_after_its_window_went_is_refused_at_once():
    """T20, A13: finish and abort both free; and again after the number has a new owner."""
    memory = Allocator(THREE)
    id_, other = memory.grant_pages(2, committed=False).tolist()
    memory.drop(id_, WINDOW)
    calls = [lambda: memory.drop(id_, WINDOW), lambda: memory.drop([other, id_], WINDOW)]
    memory.check()
    for again in range(2):
        before = states(memory)
        for call in calls:
            with pytest.raises(UsageError):
                call()
        assert states(memory) == before
        if not again:
            memory.free(id_)
            calls += [lambda: memory.free(id_), lambda: memory.free([id_, other])]
        present = memory.grant_page(committed=False)
        assert number_of(present) == number_of(id_) or again
    memory.check()


def test_thousands_of_holes_serve_one_page_with_at_most_one_move():
    """T21."""
    memory = two(12_000, 1, 1, is_slot=False)
    pages = grant(memory, 1, 12_000)
    memory.free(random.Random(0).sample(by_address(memory, 1, pages)[1:], 4000))
    grant(memory, 0, 1)
    assert moved(memory) == 1
    grant(memory, 1, 1)
    assert moved(memory) == 0


def test_a_hole_inside_a_float_takes_one_edge_page_in_one_batch():
    """T22."""
    geometry = Geometry(16_000, (1, 1, 1), ("low", "float", "high"), (False,) * 3, 16_000)
    memory = Allocator(geometry)
    pages = by_address(memory, 1, grant(memory, 1, 16_000))
    memory.free(pages[5333])
    grant(memory, 0, 1)
    (batch,) = memory.take_moves()
    assert len(batch.sources) == 1


def test_a_float_grows_into_both_gaps_without_a_move():
    """T23."""
    geometry = Geometry(100, (1, 1, 1), ("low", "float", "high"), (False,) * 3, 100)
    memory = Allocator(geometry)
    grant(memory, 0, 10), grant(memory, 1, 10), grant(memory, 2, 10)
    grant(memory, 1, 70)
    assert moved(memory) == 0
    assert not memory.fits([0, 1, 0])


def test_random_states_serve_the_most_tokens_and_the_most_slots():
    """T24: through every call of the allocator; `test_exhaustive` has the larger numbers."""
    rng = random.Random(1)
    for _ in range(300):
        units = (rng.randint(3, 9), rng.randint(1, 4), rng.randint(1, 3))
        geometry = Geometry(150, units, ("low", "float", "high"), (True, False, False), 150)
        memory = Allocator(geometry)
        ids = [grant(memory, pool, rng.randint(0, 50 // units[pool])) for pool in range(3)]
        for pool, held in enumerate(ids):
            if held:
                memory.drop(rng.sample(held, len(held) // 2), pool)
        for pool in rng.sample(range(3), 2):
            asks = [[n if i == pool else 0 for i in range(3)] for n in range(151)]
            most = sum(memory.fits(ask) for ask in asks) - 1
            assert len(grant(memory, pool, most)) == most
        memory.check()


def test_one_sub_pool_outgrows_its_share_five_times_and_gives_it_back():
    """T25: context and windows in turn; what fits is never negative and never capped."""
    memory = Allocator(Geometry(120, (2, 1), ("low", "high"), (False, False), 120))
    for _ in range(3):
        for pool, most in ((1, 120), (0, 60)):
            held = grant(memory, pool, most)
            assert not memory.fits([1, 0])
            assert not memory.fits([0, 1])
            memory.free(held)
            memory.check()
            assert memory.fits([60, 0])


def test_freeing_a_page_costs_the_same_in_a_pool_500_times_as_large():
    """T30: two million ids. A factor of ten leaves room for caches and a busy machine."""

    def microseconds(pages):
        memory = two(pages, 1, 1, is_slot=False)
        ids = memory.grant_pages(pages // 2, committed=False)[:3000].tolist()
        found = []
        for some in itertools.batched(ids, 100):
            start = time.thread_time_ns()
            for id_ in some:
                memory.free(id_)
            found.append(time.thread_time_ns() - start)
        return min(found)

    assert microseconds(2_000_000) < 10 * microseconds(4000)


def test_no_holder_ever_reads_a_byte_that_is_free():
    """T15: every free granule is poison, and neighbours have units of other sizes."""
    world, rng = World(THREE), random.Random(6)
    for _ in range(1500):
        sim.one_call(world, rng)
        world.look_close()
    world.step()
    assert world.contents
    assert POISON in world.arena.cells
    world.check()
