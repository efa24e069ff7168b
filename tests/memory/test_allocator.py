"""What a caller of the allocator relies on, one claim a test."""

import subprocess
import sys

import numpy as np
import pytest

from unimem_jax.allocator import Allocator, Split, number_of
from unimem_jax.bands import Geometry
from unimem_jax.errors import InvariantError, NeverFits, OutOfMemory, UsageError

# Slots of 4 granules from below, window pages of 3 between, context pages of 2 from the top.
GEOMETRY = Geometry(40, (4, 3, 2), ("low", "float", "high"), (True, False, False), 20)
SLOT, WINDOW, CONTEXT = range(3)


@pytest.fixture
def memory():
    return Allocator(GEOMETRY)


def filled(geometry=GEOMETRY):
    """Context pages down to the slots: 2 slots and 16 context pages fill 40 granules."""
    memory = Allocator(geometry)
    slots = [memory.grant_slot(SLOT, committed=False) for _ in range(2)]
    pages = memory.grant_pages(16, [CONTEXT], committed=False)
    return memory, slots, pages


def test_a_new_id_is_mapped_where_it_was_asked_for_and_absent_elsewhere(memory):
    both = memory.grant_page(committed=False)
    (context_only,) = memory.grant_pages(1, [CONTEXT], committed=False)
    assert memory.mapping[WINDOW][both] < GEOMETRY.unit_counts[WINDOW]
    assert memory.mapping[WINDOW][context_only] == GEOMETRY.unit_counts[WINDOW]
    assert memory.mapping[CONTEXT][context_only] < GEOMETRY.unit_counts[CONTEXT]
    memory.check()


def test_slots_have_ids_of_their_own(memory):
    assert memory.grant_page(committed=False) == memory.grant_slot(SLOT, committed=False) == 0
    memory.drop(0, SLOT)
    assert memory.live(SLOT) == 0
    assert memory.live(CONTEXT) == 1


def test_a_commitment_counts_as_held_and_its_grant_succeeds(memory):
    memory.commit([2, 0, 16])
    assert not memory.fits([0, 0, 1])
    with pytest.raises(OutOfMemory):
        memory.grant_page([CONTEXT], committed=False)
    assert len(memory.grant_pages(16, [CONTEXT])) == 16
    memory.grant_slot(SLOT)
    memory.uncommit([1, 0, 0])
    assert memory.fits([0, 0, 2])
    memory.check()


def test_a_shortage_of_one_slot_moves_only_the_pages_in_the_way():
    memory, _, pages = filled()
    memory.take_moves()
    lowest = sorted(pages.tolist(), key=lambda id_: memory.mapping[CONTEXT][id_])
    memory.free(lowest[6:8])  # two holes in the middle of the context band
    memory.take_changes()
    memory.grant_slot(SLOT, committed=False)
    (batch,) = memory.take_moves()
    assert batch.sub_pool == CONTEXT
    assert sorted(batch.sources.tolist()) == [4, 5]
    assert sorted(batch.destinations.tolist()) == [10, 11]
    ids, addresses = memory.take_changes()[CONTEXT]
    assert dict(zip(ids.tolist(), addresses.tolist(), strict=True)) == {
        id_: memory.mapping[CONTEXT][id_] for id_ in lowest[:2]
    }
    memory.check()


def test_nothing_moves_when_holes_or_gaps_suffice(memory):
    pages = memory.grant_pages(5, committed=False)
    memory.grant_slot(SLOT, committed=False)
    memory.free(pages[1:3])
    memory.grant_pages(2, committed=False)
    assert memory.take_moves() == []


def test_one_decision_for_many_requests_moves_once_and_the_grants_move_nothing():
    memory, _, pages = filled()
    memory.free(pages[::2])
    memory.take_moves()
    memory.commit([2, 0, 3])
    memory.make_room([2, 0, 3])
    assert len(memory.take_moves()) <= 2
    memory.grant_slot(SLOT)
    memory.grant_pages(3, [CONTEXT])
    memory.grant_slot(SLOT)
    assert memory.take_moves() == []
    memory.check()


def test_a_demand_may_need_two_bands_to_move_one_after_the_other():
    """The float can only give way upward after the context band has left."""
    memory = Allocator(GEOMETRY)
    memory.grant_slot(SLOT, committed=False)
    memory.grant_pages(5, [WINDOW], committed=False)
    context = memory.grant_pages(9, [CONTEXT], committed=False).tolist()
    context.sort(key=lambda id_: memory.mapping[CONTEXT][id_])
    memory.free(context[5:])  # what stays begins at granule 22, right above the float
    memory.take_moves()
    memory.grant_slot(SLOT, committed=False)
    assert [batch.sub_pool for batch in memory.take_moves()] == [CONTEXT, WINDOW]
    memory.check()


def test_a_pin_in_the_way_is_named_and_nothing_changes():
    memory, _, pages = filled()
    low = min(pages.tolist(), key=lambda id_: memory.mapping[CONTEXT][id_])
    memory.free([id_ for id_ in pages.tolist() if id_ != low][:4])
    address = int(memory.mapping[CONTEXT][low])
    memory.ledger.pin(CONTEXT, address, "copy to host")
    before = [table.mapping.copy() for table in memory.tables]
    assert memory.fits([2, 0, 0])
    with pytest.raises(OutOfMemory, match="copy to host"):
        memory.grant_slot(SLOT, committed=False)
    assert all((old == new).all() for old, new in zip(before, memory.mapping, strict=True))
    assert memory.take_moves() == []
    memory.unpin(CONTEXT, address, "copy to host")
    memory.grant_slot(SLOT, committed=False)
    memory.check()


def test_moves_go_around_a_pin_that_is_not_in_the_way():
    memory, _, pages = filled()
    high = max(pages.tolist(), key=lambda id_: memory.mapping[CONTEXT][id_])
    memory.ledger.pin(CONTEXT, int(memory.mapping[CONTEXT][high]), "copy")
    memory.free([id_ for id_ in pages.tolist() if id_ != high][:4])
    memory.grant_slot(SLOT, committed=False)
    assert memory.mapping[CONTEXT][high] == GEOMETRY.unit_counts[CONTEXT] - 1
    memory.check()


def test_a_page_freed_under_a_pin_is_not_granted_again_until_unpinned():
    memory, _, pages = filled()
    address = int(memory.mapping[CONTEXT][pages[3]])
    memory.ledger.pin(CONTEXT, address, "copy")
    memory.free(pages[3:4])
    assert memory.fits([0, 0, 1])
    with pytest.raises(OutOfMemory, match="copy"):
        memory.grant_page([CONTEXT], committed=False)
    memory.unpin(CONTEXT, address, "copy")
    again = memory.grant_page([CONTEXT], committed=False)
    assert memory.mapping[CONTEXT][number_of(again)] == address


def test_a_shared_page_lives_until_its_last_sharer_drops_it(memory):
    ids = memory.grant_pages(2, committed=False)
    memory.share(ids, CONTEXT)
    assert memory.drop(ids, CONTEXT) == 0
    assert memory.drop(ids, WINDOW) == 2
    assert memory.live(CONTEXT) == 2
    assert memory.drop(ids, CONTEXT) == 2
    memory.check()


def test_a_dropped_page_is_repaired_by_a_new_id_only(memory):
    id_ = memory.grant_page(committed=False)
    memory.drop(id_, WINDOW)
    with pytest.raises(UsageError, match="had one"):
        memory.map_more(id_, WINDOW, committed=False)
    memory.free(id_)
    again = memory.grant_page([CONTEXT], committed=False)
    assert number_of(again) == number_of(id_) != again  # its next life may be mapped anywhere
    memory.map_more(again, WINDOW, committed=False)
    memory.check()


def test_the_device_hears_of_grants_and_drops_but_not_of_free_ids(memory):
    first, second = memory.grant_pages(2, committed=False).tolist()
    memory.take_changes()
    memory.drop(first, WINDOW)
    memory.free(second)
    changes = memory.take_changes()
    assert changes[WINDOW][0].tolist() == [first]
    assert changes[WINDOW][1].tolist() == [GEOMETRY.unit_counts[WINDOW]]
    assert second not in changes[CONTEXT][0]
    assert all(not len(ids) for ids, _ in memory.take_changes())


@pytest.mark.parametrize("is_single", [True, False])
def test_more_touches_than_ids_send_every_live_id_once(memory, is_single):
    """The list of touched ids is full; which of them changed is not known any more."""
    kept = memory.grant_pages(3, committed=False)
    memory.take_changes()
    for _ in range(GEOMETRY.id_count + 1):
        if is_single:
            memory.free(memory.grant_page(committed=False))
        else:
            memory.free(memory.grant_pages(2, committed=False))
    memory.drop(int(kept[1]), WINDOW)
    for pool, (ids, addresses) in enumerate(memory.take_changes()):
        expected = [] if pool == SLOT else sorted(kept.tolist())
        assert sorted(ids.tolist()) == expected
        assert addresses.tolist() == memory.mapping[pool][ids].tolist()
    assert all(not len(ids) for ids, _ in memory.take_changes())


def test_the_device_forgets_the_page_of_a_former_life(memory):
    id_ = memory.grant_page(committed=False)
    memory.take_changes()
    memory.free(id_)
    assert number_of(memory.grant_page([CONTEXT], committed=False)) == number_of(id_)
    ids, addresses = memory.take_changes()[WINDOW]
    assert (ids.tolist(), addresses.tolist()) == ([id_], [GEOMETRY.unit_counts[WINDOW]])


def test_refusals_are_counted_by_reason_and_change_nothing(memory):
    memory.commit([1, 0, 0])
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="do not fit"):
            memory.grant_pages(19, [CONTEXT], committed=False)
    with pytest.raises(OutOfMemory, match="ids"):
        (few := Allocator(Geometry(9, (1,), ("low",), (False,), 1))).grant_pages(2, None, False)
    assert few.metrics()["refusals"] == {"bytes": 0, "ids": 1, "pins": 0, "never": 0}
    assert memory.metrics()["refusals"] == {"bytes": 2, "ids": 0, "pins": 0, "never": 0}
    assert memory.metrics()["live"] == [0, 0, 0]


def test_a_demand_that_can_never_fit_says_what_it_needs_and_what_there_is(memory):
    for call in (memory.commit, lambda demand: memory.make_room(demand, committed=False)):
        with pytest.raises(NeverFits, match="can never fit") as caught:
            call([2, 0, 21])
        assert "2 * 512 + 21 * 256 bytes" in str(caught.value)
        assert "5,120 bytes" in str(caught.value)
    assert memory.metrics()["refusals"]["never"] == 2
    assert memory.metrics()["committed"] == [0, 0, 0]


def test_ids_that_run_out_before_bytes_are_out_of_memory_too():
    memory = Allocator(Geometry(40, (2,), ("low",), (False,), 3))
    memory.grant_pages(3, committed=False)
    with pytest.raises(OutOfMemory, match="ids"):
        memory.grant_page(committed=False)


def test_a_split_never_lends_and_never_moves():
    memory = Allocator(GEOMETRY, Split((3, 4, 8)))
    memory.grant_pages(4, committed=False)
    assert memory.fits([3, 0, 4])
    assert not memory.fits([0, 1, 0])
    with pytest.raises(OutOfMemory):
        memory.grant_page([WINDOW], committed=False)
    memory.grant_pages(4, [CONTEXT], committed=False)
    assert memory.mapping[WINDOW][:4].min() == 4  # after slots [0, 12)
    assert memory.mapping[CONTEXT][:8].min() == 12  # after window pages [12, 24)
    assert memory.take_moves() == []
    memory.check()


@pytest.mark.parametrize("layout", [Split((3, 4)), Split((3, -1, 8)), Split((3, 4, 9)), "walls"])
def test_a_split_that_does_not_lie_in_the_arena_is_refused(layout):
    with pytest.raises(UsageError):
        Allocator(GEOMETRY, layout)


def test_a_unit_at_the_edge_of_a_float_leaves_room_on_both_sides(memory):
    """The first page of a float lies in the middle, so both neighbours can grow without a move."""
    memory.grant_page([WINDOW], committed=False)
    while memory.fits([1, 0, 1]) and memory.live(SLOT) < 3:
        memory.grant_slot(SLOT, committed=False)
        memory.grant_page([CONTEXT], committed=False)
    assert memory.take_moves() == []


def test_metrics_tell_what_happened():
    memory, slots, pages = filled()
    memory.free(pages[6:8])
    memory.ledger.pin(CONTEXT, int(memory.mapping[CONTEXT][pages[0]]), "copy")
    memory.drop(slots, SLOT)
    metrics = memory.metrics()
    assert metrics["live"] == [0, 0, 14]
    assert metrics["high_water"] == [2, 0, 16]
    assert metrics["pinned"] == [0, 0, 1]
    assert metrics["holes"][CONTEXT] == 2
    assert metrics["freed_bytes"] == 128 * (2 * 2 + 2 * 4)
    assert metrics["moved_per_freed"] == 0
    memory.ledger.pin(CONTEXT, int(memory.mapping[CONTEXT][pages[1]]), "another")
    memory.grant_pages(1, [WINDOW], committed=False)
    assert memory.metrics()["pinned"] == [0, 0, 2]


def test_metrics_tell_what_room_costs_in_moved_bytes():
    memory, _, pages = filled()
    lowest = sorted(pages.tolist(), key=lambda id_: memory.mapping[CONTEXT][id_])
    memory.free(lowest[6:8])
    memory.grant_slot(SLOT, committed=False)
    assert memory.metrics()["moved_bytes"] == memory.metrics()["freed_bytes"] == 512
    assert memory.metrics()["moved_per_freed"] == 1


@pytest.mark.parametrize(
    "number, change",
    [
        ("L4", lambda m: setattr(m.layout.bands[SLOT], "hi", 20)),
        ("L5", lambda m: m.ledger.states[CONTEXT].__setitem__(0, 1)),
        ("L6", lambda m: setattr(m.layout.bands[CONTEXT], "hole_count", 0)),
        ("L7", lambda m: m.tables[CONTEXT].owner.__setitem__(m.mapping[CONTEXT][0], 5)),
        ("L7", lambda m: m.mapping[CONTEXT].__setitem__(0, 2)),
        ("L8", lambda m: m.tables[CONTEXT].sharers.__setitem__(0, 0)),
        ("L9", lambda m: m.pages.uses.__setitem__(0, 2)),
        ("L9", lambda m: setattr(m.pages, "free_count", 3)),
        ("L9", lambda m: m.pages.free.__setitem__(0, 18)),
        ("L9", lambda m: m.pages.present.__setitem__(0, 1)),
        ("L10", lambda m: m.held.__setitem__(CONTEXT, 3)),
        ("L10", lambda m: (m.held.__setitem__(SLOT, 12), m.committed.__setitem__(SLOT, 10))),
    ],
)
def test_check_names_the_invariant_that_fails(number, change):
    memory, _, pages = filled()
    memory.free(pages[4:6])
    memory.check()
    change(memory)
    with pytest.raises(InvariantError, match=number):
        memory.check()


def test_ids_come_back_as_copies(memory):
    ids = memory.grant_pages(3, committed=False)
    ids[:] = 99
    assert np.sort(memory.pages.free[: memory.pages.free_count]).max() < 20
    memory.check()


def test_the_memory_core_imports_no_jax():
    code = "import sys; sys.modules['jax'] = None; import unimem_jax.allocator"
    subprocess.run([sys.executable, "-c", code], check=True)
