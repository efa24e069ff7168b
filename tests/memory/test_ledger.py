"""Every arrow of the table of transitions, every absent arrow, tickets and pins."""

import itertools

import numpy as np
import pytest

from unimem_jax import ledger as law
from unimem_jax.bands import Geometry
from unimem_jax.errors import InvariantError, UsageError
from unimem_jax.ledger import Ledger

GEOMETRY = Geometry(24, (3, 2), ("low", "high"), (True, False), 12)
ARROWS = list(itertools.product(range(len(law.STATES)), range(len(law.EVENTS))))


def ledger_in(state):
    ledger = Ledger(GEOMETRY)
    ledger.states[1][:] = state
    return ledger


@pytest.mark.parametrize(
    "addresses", [5, slice(2, 6), np.array([1, 7, 3])], ids=["one", "slice", "array"]
)
def test_each_arrow_of_the_table_leads_where_it_says(addresses):
    for (state, event), following in law.TRANSITIONS.items():
        ledger = ledger_in(state)
        ledger.apply(1, addresses, event)
        assert (ledger.states[1][addresses] == following).all()
        untouched = np.setdiff1d(np.arange(12), np.arange(12)[addresses])
        assert (ledger.states[1][untouched] == state).all()


@pytest.mark.parametrize(
    "addresses", [5, slice(2, 6), np.array([1, 7, 3])], ids=["one", "slice", "array"]
)
def test_each_absent_arrow_is_refused_and_changes_nothing(addresses):
    for state, event in ARROWS:
        if (state, event) in law.TRANSITIONS:
            continue
        ledger = ledger_in(state)
        blame = UsageError if event in law.CALLER_EVENTS else InvariantError
        with pytest.raises(blame, match=law.STATES[state]):
            ledger.apply(1, addresses, event)
        assert (ledger.states[1] == state).all()


def test_one_wrong_unit_among_many_leaves_all_of_them_alone():
    ledger = ledger_in(law.HOLE)
    ledger.states[1][7] = law.LIVE
    before = ledger.states[1].copy()
    with pytest.raises(InvariantError, match="unit 7"):
        ledger.apply(1, np.array([1, 7, 3]), law.GRANT)
    assert (ledger.states[1] == before).all()


def test_every_state_can_be_reached_and_left():
    reached = set(law.TRANSITIONS.values())
    left = {state for state, _ in law.TRANSITIONS}
    assert reached == left == set(range(len(law.STATES)))


def test_tickets_retire_in_order_and_only_once_dispatched():
    ledger = Ledger(GEOMETRY)
    assert [ledger.dispatch(), ledger.dispatch()] == [1, 2]
    for wrong in (0, 2, 3):
        with pytest.raises(UsageError):
            ledger.retire(wrong)
    ledger.retire(1)
    ledger.retire(2)
    with pytest.raises(UsageError):
        ledger.retire(3)


def test_a_unit_is_settled_once_the_last_program_before_its_freeing_has_retired():
    ledger = ledger_in(law.LIVE)
    ledger.dispatch()
    ledger.free_one(1, 3)
    assert not ledger.settled(1, 3)
    assert ledger.settled(1, 6)
    ledger.retire(1)
    assert ledger.settled(1, 3)


def test_a_unit_is_settled_only_when_overlapping_units_of_other_sub_pools_are():
    ledger = ledger_in(law.LIVE)
    ledger.dispatch()
    ledger.free_one(1, 4)  # granules 8 and 9; slots 2 and 3 of three granules overlap them
    assert [ledger.settled(0, slot) for slot in range(5)] == [True, True, False, False, True]


def moved(ledger, source, destination):
    """A queued move of one unit."""
    batch = 1, np.array([source]), np.array([destination])
    ledger.move(*batch)
    return batch


def test_a_moved_unit_waits_for_the_program_that_moves_it():
    ledger = ledger_in(law.HOLE)
    ledger.states[1][[2, 3]] = law.LIVE
    batches = [moved(ledger, 2, 8), moved(ledger, 3, 9)]
    ledger.dispatch()  # another program, while the moves are queued
    ledger.retire(1)
    assert (ledger.states[1][[2, 3]] == law.VACATED).all()
    assert not any(ledger.settled(1, unit) for unit in (2, 3, 8, 9))
    for batch in batches:
        ledger.hand_out(*batch)
    ledger.check()
    for unit, ticket in ((2, 2), (3, 3)):
        assert not ledger.settled(1, unit + 6)
        ledger.dispatch()
        ledger.retire(ticket)
        assert ledger.states[1][unit] == law.BEYOND
        assert ledger.settled(1, unit)
        assert ledger.settled(1, unit + 6)
    ledger.check()


@pytest.mark.parametrize("is_single", [True, False])
@pytest.mark.parametrize("is_handed_out", [True, False])
def test_a_unit_freed_before_a_move_into_it_has_run_settles_with_the_move(is_single, is_handed_out):
    """Published earlier, a peer would write it and then the move would."""
    ledger = ledger_in(law.HOLE)
    ledger.states[1][2] = law.LIVE
    batch = moved(ledger, 2, 8)
    if is_handed_out:
        ledger.hand_out(*batch)
    if is_single:
        ledger.free_one(1, 8)
    else:
        ledger.free(1, np.array([8]))
    assert not ledger.settled(1, 8)
    if not is_handed_out:
        ledger.hand_out(*batch)
    ledger.retire(ledger.dispatch())
    assert ledger.settled(1, 8)


def test_a_unit_vacated_twice_waits_for_the_later_program():
    ledger = ledger_in(law.HOLE)
    ledger.states[1][2] = law.LIVE
    ledger.hand_out(*moved(ledger, 2, 8))
    ledger.dispatch()
    ledger.apply(1, 2, law.GROW)
    for batch in [moved(ledger, 8, 2), moved(ledger, 2, 9)]:
        ledger.hand_out(*batch)
    for ticket in (1, 2, 3):
        assert ledger.states[1][2] == law.VACATED
        ledger.dispatch()
        ledger.retire(ticket)
    assert ledger.states[1][2] == law.BEYOND


def test_a_unit_freed_under_two_pins_is_reusable_after_the_second():
    ledger = ledger_in(law.LIVE)
    ledger.pin(1, 4, "copy")
    ledger.pin(1, 4, "copy")
    assert not ledger.free_one(1, 4)
    assert ledger.states[1][4] == law.PENDING
    assert ledger.pending_count(1) == 1
    assert not ledger.unpin(1, 4, "copy")
    assert ledger.unpin(1, 4, "copy")
    assert ledger.states[1][4] == law.HOLE
    with pytest.raises(UsageError):
        ledger.unpin(1, 4, "copy")


def test_freeing_many_units_keeps_back_those_under_a_pin():
    ledger = ledger_in(law.LIVE)
    ledger.pin(1, 4, "copy")
    assert ledger.free(1, np.array([3, 4, 5])).tolist() == [3, 5]
    assert ledger.states[1][3:6].tolist() == [law.HOLE, law.PENDING, law.HOLE]


def test_one_unit_that_cannot_be_freed_leaves_the_pinned_ones_alone_too():
    ledger = ledger_in(law.LIVE)
    ledger.states[1][7] = law.HOLE
    ledger.pin(1, 3, "copy")
    before = ledger.states[1].copy()
    with pytest.raises(UsageError, match="unit 7"):
        ledger.free(1, np.array([3, 7]))
    assert (ledger.states[1] == before).all()


@pytest.mark.parametrize("state", [s for s in range(len(law.STATES)) if s != law.LIVE])
def test_only_a_live_unit_can_be_pinned_or_fenced(state):
    ledger = ledger_in(state)
    for call in (ledger.pin, ledger.fence):
        with pytest.raises(UsageError):
            call(1, 4, "peer")
    assert not ledger.pins[1]


@pytest.mark.parametrize("place", [(2, 0), (-1, 0), (1, 12), (1, -1)])
def test_unknown_units_cannot_be_pinned(place):
    with pytest.raises(UsageError):
        ledger_in(law.LIVE).pin(*place, "copy")


def test_a_fence_needs_a_settled_unit_without_other_users():
    ledger = ledger_in(law.LIVE)
    ledger.pin(1, 4, "copy")
    with pytest.raises(UsageError, match="pinned"):
        ledger.fence(1, 4, "peer")
    ledger.dispatch()
    ledger.free_one(1, 5)
    ledger.apply(1, 5, law.GRANT)
    with pytest.raises(UsageError, match="ticket"):
        ledger.fence(1, 5, "peer")
    ledger.retire(1)
    ledger.fence(1, 5, "peer")
    assert ledger.states[1][5] == law.FENCED
    ledger.check()
    assert not ledger.unpin(1, 5, "peer")
    assert ledger.states[1][5] == law.LIVE


def test_a_fenced_unit_that_is_freed_waits_for_its_peer():
    ledger = ledger_in(law.LIVE)
    ledger.fence(1, 5, "peer")
    assert not ledger.free_one(1, 5)
    assert ledger.unpin(1, 5, "peer")
    assert ledger.states[1][5] == law.HOLE


def broken(change):
    ledger = ledger_in(law.LIVE)
    change(ledger)
    return ledger


@pytest.mark.parametrize(
    "number, change",
    [
        ("L1", lambda ledger: ledger.states[1].__setitem__(3, law.PENDING)),
        ("L1", lambda ledger: ledger.states[1].__setitem__(3, 77)),
        ("L2", lambda ledger: ledger.pins[0].__setitem__(3, ["copy"])),
        ("L2", lambda ledger: ledger.pins[1].__setitem__(3, [])),
        ("L3", lambda ledger: setattr(ledger, "retired", 4)),
        ("L3", lambda ledger: ledger._stamps[0].__setitem__(2, 9)),
    ],
)
def test_check_names_the_invariant_that_fails(number, change):
    with pytest.raises(InvariantError, match=number):
        broken(change).check()


@pytest.mark.parametrize(
    ("source", "destination"), [(law.LIVE, law.LIVE), (law.HOLE, law.HOLE), (law.LIVE, law.BEYOND)]
)
def test_a_move_that_is_refused_on_either_side_changes_nothing(source, destination):
    ledger = Ledger(GEOMETRY)
    ledger.states[1][:3], ledger.states[1][5:8] = law.LIVE, law.HOLE
    ledger.states[1][2], ledger.states[1][6] = source, destination
    before = ledger.states[1].copy(), [stamps.copy() for stamps in ledger._stamps]
    with pytest.raises(InvariantError):
        ledger.move(1, np.array([0, 1, 2]), np.array([5, 6, 7]))
    assert (ledger.states[1] == before[0]).all()
    assert all((a == b).all() for a, b in zip(ledger._stamps, before[1], strict=True))
    assert not ledger._is_queued


def back_and_forth(ledger, turns, retires):
    """Moves unit 0 to 5 and back, as a loop does that compacts without end."""
    for turn in range(turns):
        sources, destinations = np.array([5 * (turn % 2)]), np.array([5 - 5 * (turn % 2)])
        if ledger.states[1][destinations[0]] != law.HOLE:
            ledger.apply(1, destinations, law.GROW)
        ledger.move(1, sources, destinations)
        ledger.hand_out(1, sources, destinations)
        ledger.dispatch()
        if retires:
            ledger.retire(ledger.dispatched)


def test_a_loop_that_never_retires_does_not_remember_every_move(monkeypatch):
    monkeypatch.setattr(law, "MOST_VACATED", 16)
    ledger, other = Ledger(GEOMETRY), Ledger(GEOMETRY)
    for one, retires in ((ledger, False), (other, True)):
        one._most_vacated = 16
        one.apply(1, np.array([0, 5]), law.GROW)
        one.apply(1, 0, law.GRANT)
        back_and_forth(one, 1000, retires)
    assert len(ledger._vacated) <= 16
    assert ledger.states[1][5] == law.VACATED
    for ticket in range(1, 1000):
        ledger.retire(ticket)
        assert ledger.states[1][5] == law.VACATED
    ledger.retire(1000)  # what has not been used again is not forgotten
    assert ledger.states[1][5] == law.BEYOND
    assert (ledger.states[1] == other.states[1]).all()
    ledger.check()
