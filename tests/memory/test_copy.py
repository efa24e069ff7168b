"""Copies: copy-on-write of a partly filled page, forks of a request, checkpoints of a slot."""

import pytest

from tests.memory.scenes import CONTEXT, SLOT, THREE, WINDOW, address, by_address, grant
from tests.memory.twin import Arena
from unimem_jax.allocator import Allocator, number_of
from unimem_jax.errors import OutOfMemory, UsageError


@pytest.fixture
def memory():
    return Allocator(THREE)


def test_a_copy_is_a_new_id_whose_batch_reads_the_original(memory):
    shared = memory.grant_page(committed=False)
    (own,) = memory.copy_pages(shared, committed=False).tolist()
    assert number_of(own) != number_of(shared)
    batches = memory.take_moves()
    assert [batch.sub_pool for batch in batches] == [WINDOW, CONTEXT]
    for batch in batches:
        assert batch.sources.tolist() == [address(memory, batch.sub_pool, shared)]
        assert batch.destinations.tolist() == [address(memory, batch.sub_pool, own)]
    assert memory.live(CONTEXT) == memory.live(WINDOW) == 2
    assert memory.metrics()["copied_bytes"] == 128 * 5
    assert memory.metrics()["moved_bytes"] == 0
    memory.check()


def test_a_fork_shares_whole_pages_and_copies_the_one_it_will_write(memory):
    pages = memory.grant_pages(3, committed=False).tolist()
    whole, part = pages[:2], pages[2]
    for pool in (WINDOW, CONTEXT):
        memory.share(whole, pool)
    fork = [*whole, *memory.copy_pages([part], committed=False).tolist()]
    memory.free(pages)
    assert memory.live(CONTEXT) == 3
    memory.free(fork)
    assert memory.live(CONTEXT) == memory.live(WINDOW) == 0
    memory.check()


def test_a_copy_leaves_out_what_the_original_let_go(memory):
    id_ = memory.grant_page(committed=False)
    memory.drop(id_, WINDOW)
    with pytest.raises(UsageError, match="no unit"):
        memory.copy_pages(id_, committed=False)
    (copy,) = memory.copy_pages(id_, [CONTEXT], committed=False).tolist()
    assert address(memory, WINDOW, copy) == THREE.unit_counts[WINDOW]
    memory.check()


def test_a_copy_that_has_to_move_its_original_first_reads_it_where_it_went():
    """The bytes are followed: the copy arrives whole although its source moved for it."""
    memory = Allocator(THREE)
    grant(memory, SLOT, 2)
    pages = by_address(memory, CONTEXT, grant(memory, CONTEXT, 16))
    arena = Arena(THREE.arena_granules, THREE.unit_granules)
    lowest = pages[0]
    arena.write(CONTEXT, address(memory, CONTEXT, lowest), "original")
    memory.free(pages[6:10])
    slot = memory.grant_slot(SLOT, committed=False)  # pushes the lowest pages away
    (copy,) = memory.copy_pages(lowest, [CONTEXT], committed=False).tolist()
    memory.free(lowest)  # the copy that is queued still reads it
    for batch in memory.take_moves():
        arena.move(batch.sub_pool, batch.sources.tolist(), batch.destinations.tolist())
    assert arena.read(CONTEXT, address(memory, CONTEXT, copy)) == "original"
    memory.drop(slot, SLOT)
    memory.check()


def test_what_a_queued_copy_reads_is_published_after_the_copy_has_retired(memory):
    id_ = memory.grant_page([CONTEXT], committed=False)
    place = address(memory, CONTEXT, id_)
    memory.copy_pages(id_, [CONTEXT], committed=False)
    memory.free(id_)
    again = memory.grant_page([CONTEXT], committed=False)
    assert address(memory, CONTEXT, again) == place
    memory.ledger.retire(memory.ledger.dispatch())  # another program, ahead of the copy
    for _ in range(2):
        with pytest.raises(UsageError, match="retire"):
            memory.ledger.fence(CONTEXT, place, "peer")
        memory.take_moves()
    memory.ledger.retire(memory.ledger.dispatch())
    memory.ledger.fence(CONTEXT, place, "peer")
    with pytest.raises(UsageError, match="cannot copy"):
        memory.copy_pages(again, [CONTEXT], committed=False)


def test_a_checkpoint_of_a_slot_is_a_slot(memory):
    running = memory.grant_slot(SLOT, committed=False)
    memory.commit([1, 0, 0])
    saved = memory.copy_slot(running, SLOT)
    (batch,) = memory.take_moves()
    assert batch.sources.tolist() == [address(memory, SLOT, running)]
    assert batch.destinations.tolist() == [address(memory, SLOT, saved)]
    memory.drop(running, SLOT)
    with pytest.raises(UsageError, match="was freed"):
        memory.copy_slot(running, SLOT, committed=False)


def test_a_copy_without_room_changes_nothing():
    memory = Allocator(THREE)
    pages = grant(memory, CONTEXT, 20)
    with pytest.raises(OutOfMemory):
        memory.copy_pages(pages[:2], [CONTEXT], committed=False)
    with pytest.raises(UsageError, match="committed"):
        memory.copy_pages(pages[0], [CONTEXT])
    assert memory.take_moves() == []
    assert memory.live(CONTEXT) == 20
    memory.check()


def test_a_copy_of_nothing_is_nothing(memory):
    assert memory.copy_pages([], committed=False).tolist() == []
    assert memory.take_moves() == []
