"""Wrong calls of the allocator: one clear error each, at once, and nothing changed."""

import json

import numpy as np
import pytest

from tests.memory.scenes import CONTEXT, SLOT, WINDOW
from tests.memory.scenes import THREE as GEOMETRY
from unimem_jax.allocator import Allocator, number_of
from unimem_jax.errors import UsageError
from unimem_jax.tables import LIFE


@pytest.fixture
def memory():
    return Allocator(GEOMETRY)


@pytest.mark.parametrize(
    "call",
    [
        lambda memory, id_: memory.drop(id_, CONTEXT),
        lambda memory, id_: memory.drop([id_], CONTEXT),
        lambda memory, id_: memory.free(id_),
        lambda memory, id_: memory.free([id_]),
        lambda memory, id_: memory.share(id_, CONTEXT),
        lambda memory, id_: memory.map_more([id_], WINDOW, committed=False),
    ],
)
@pytest.mark.parametrize("is_single", [True, False])
def test_an_id_that_was_freed_is_refused_for_ever_though_its_number_lives_on(
    memory, call, is_single
):
    """A holder that missed the free cannot touch the page of whoever has the number now."""
    former = []
    for _ in range(5):
        id_ = memory.grant_page(committed=False)
        former.append(id_)
        memory.free(id_ if is_single else [id_])
    present = memory.grant_page(committed=False)
    assert {number_of(id_) for id_ in former} == {number_of(present)}
    for id_ in former:
        with pytest.raises(UsageError, match="was freed"):
            call(memory, id_)
    assert memory.live(CONTEXT) == 1
    memory.check()


def test_a_slot_that_was_freed_is_refused_for_ever_too(memory):
    former = memory.grant_slot(SLOT, committed=False)
    memory.drop(former, SLOT)
    present = memory.grant_slot(SLOT, committed=False)
    assert number_of(former) == number_of(present)
    with pytest.raises(UsageError, match="was freed"):
        memory.drop(former, SLOT)
    memory.drop(present, SLOT)


@pytest.mark.parametrize(
    "call",
    [
        lambda memory, ids: memory.drop(7, CONTEXT),
        lambda memory, ids: memory.drop([0, 7], CONTEXT),
        lambda memory, ids: memory.drop([0, 0], CONTEXT),
        lambda memory, ids: memory.drop([-1], CONTEXT),
        lambda memory, ids: memory.drop(20, CONTEXT),
        lambda memory, ids: memory.drop(2**40, CONTEXT),
        lambda memory, ids: memory.drop([2**40], CONTEXT),
        lambda memory, ids: memory.drop([0.5], CONTEXT),
        lambda memory, ids: memory.drop([[0]], CONTEXT),
        lambda memory, ids: memory.drop(0, 3),
        lambda memory, ids: memory.drop(0, -1),
        lambda memory, ids: memory.drop(0, SLOT),
        lambda memory, ids: memory.free([0, 7]),
        lambda memory, ids: memory.free(7),
        lambda memory, ids: memory.free(-1),
        lambda memory, ids: memory.share(7, CONTEXT),
        lambda memory, ids: memory.share([0, 0], CONTEXT),
        lambda memory, ids: memory.map_more(0, CONTEXT, committed=False),
        lambda memory, ids: memory.map_more(7, WINDOW, committed=False),
        lambda memory, ids: memory.grant_pages(1),
        lambda memory, ids: memory.grant_pages(-1, committed=False),
        lambda memory, ids: memory.grant_pages(1.0, committed=False),
        lambda memory, ids: memory.grant_pages("1", committed=False),
        lambda memory, ids: memory.grant_pages(1, [], committed=False),
        lambda memory, ids: memory.grant_pages(1, [SLOT], committed=False),
        lambda memory, ids: memory.grant_page([9], committed=False),
        lambda memory, ids: memory.grant_slot(CONTEXT, committed=False),
        lambda memory, ids: memory.grant_slot(SLOT),
        lambda memory, ids: memory.fits([1, 1]),
        lambda memory, ids: memory.fits([0, 0, -1]),
        lambda memory, ids: memory.commit([0, -1, 0]),
        lambda memory, ids: memory.commit([0, 1.5, 0]),
        lambda memory, ids: memory.commit([0, float("nan"), 0]),
        lambda memory, ids: memory.commit("abc"),
        lambda memory, ids: memory.commit(None),
        lambda memory, ids: memory.uncommit([0.0, 0.0, 0.0]),
        lambda memory, ids: memory.uncommit([1, 0, 0]),
        lambda memory, ids: memory.make_room([1, 0, 0]),
        lambda memory, ids: memory.make_room([1, 0], committed=False),
        lambda memory, ids: memory.make_room([0, 1.5, 1], committed=False),
        lambda memory, ids: memory.unpin(CONTEXT, 0, "nobody"),
    ],
)
def test_a_wrong_call_gets_one_clear_error_and_changes_nothing(memory, call):
    ids = memory.grant_pages(3, committed=False)
    before = [table.mapping.copy() for table in memory.tables], memory.metrics()
    with pytest.raises(UsageError):
        call(memory, ids)
    after = [table.mapping for table in memory.tables], memory.metrics()
    assert all((old == new).all() for old, new in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    memory.check()


def test_counts_of_numpy_leave_plain_numbers_behind(memory):
    demand = np.array([1, 2, 2])
    assert memory.fits(demand)
    memory.commit(demand)
    memory.make_room(demand)
    memory.grant_pages(np.int64(2))
    memory.uncommit(demand * np.array([1, 0, 0]))
    assert json.loads(json.dumps(memory.metrics())) == memory.metrics()
    assert memory.metrics()["live"] == [0, 2, 2]
    memory.check()


@pytest.mark.parametrize("is_single", [True, False])
def test_after_its_last_life_a_number_begins_again(memory, is_single):
    """One that is granted and freed in every step of a server gets there in weeks."""
    spare = memory.grant_page(committed=False)
    memory.free(spare)
    last = number_of(spare) + LIFE * (2**31 - 1)
    memory.pages.present[number_of(spare)] = memory.pages.free[memory.pages.free_count - 1] = last
    for expected in (last, number_of(spare), number_of(spare) + LIFE):
        id_ = memory.grant_page(committed=False)
        assert id_ == expected
        memory.free(id_ if is_single else [id_])
        memory.check()
