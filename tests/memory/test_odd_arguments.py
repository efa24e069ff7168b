"""Arguments of the allocator that no caller should give."""

import pytest

from tests.memory.scenes import CONTEXT, SLOT, THREE
from tests.odd import ODD, require_typed
from unimem_jax.allocator import Allocator, Split
from unimem_jax.bands import Geometry, fits
from unimem_jax.errors import UsageError


def make():
    """An allocator with ids 0 and 1, slot 0, a commitment and a pin."""
    allocator = Allocator(THREE)
    allocator.grant_pages(2, committed=False)
    allocator.grant_slot(SLOT, committed=False)
    allocator.commit((1, 1, 1))
    allocator.ledger.dispatch()
    address = int(allocator.mapping[CONTEXT][0])
    allocator.ledger.pin(CONTEXT, address, "a user")
    return allocator


def live(allocator):
    return int(allocator.mapping[CONTEXT][0])


CALLS = {
    "fits": lambda _: [(1, 1, 1)],
    "commit": lambda _: [(1, 1, 1)],
    "uncommit": lambda _: [(1, 1, 1)],
    "make_room": lambda _: [(1, 1, 1)],
    "compact": lambda _: [4096],
    "grant_pages": lambda _: [1, [CONTEXT]],
    "grant_page": lambda _: [[CONTEXT]],
    "grant_slot": lambda _: [SLOT],
    "copy_pages": lambda _: [[0], [CONTEXT]],
    "copy_slot": lambda _: [0, SLOT],
    "map_more": lambda _: [[0], CONTEXT],
    "share": lambda _: [[0], CONTEXT],
    "sharers": lambda _: [[0], CONTEXT],
    "require_readable": lambda _: [[0], CONTEXT],
    "drop": lambda _: [0, CONTEXT],
    "free": lambda _: [0],
    "unpin": lambda memory: [CONTEXT, live(memory), "a user"],
    "take_moves": lambda _: [4],
}


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_of_the_allocator_get_typed_errors(name):
    assert require_typed(make, name, CALLS[name]) > 10


class Ledgers:
    """The ledger's calls that outsiders make, over an allocator to look into."""

    def __init__(self):
        self.allocator = make()
        ledger = self.allocator.ledger
        self.pin, self.fence, self.unpin = ledger.pin, ledger.fence, ledger.unpin
        self.retire, self.settled = ledger.retire, ledger.settled


LEDGER_CALLS = {
    "pin": lambda made: [CONTEXT, live(made.allocator), "a user"],
    "fence": lambda made: [CONTEXT, live(made.allocator), "a user"],
    "unpin": lambda made: [CONTEXT, live(made.allocator), "a user"],
    "settled": lambda made: [CONTEXT, live(made.allocator)],
    "retire": lambda made: [1],
}


@pytest.mark.parametrize("name", LEDGER_CALLS)
def test_odd_arguments_of_the_ledger_get_typed_errors(name):
    assert require_typed(Ledgers, name, LEDGER_CALLS[name]) > 10


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_odd_geometries_splits_and_counts_get_typed_errors(odd):
    right = [64, (2, 1), ("low", "high"), (True, False), 9]
    for at in range(len(right)):
        with pytest.raises(UsageError):
            Geometry(*right[:at], odd, *right[at + 1 :])
    for wrong in (
        lambda: Allocator(odd),
        lambda: Allocator(THREE, Split(odd)),
        lambda: Allocator(THREE, Split((1, 1, odd))),
        lambda: fits(THREE, odd),
    ):
        with pytest.raises(UsageError):
            wrong()


def test_a_count_without_end_is_answered():
    assert not fits(THREE, (1, 1, 10**400))
    assert not make().fits((1, 1, 10**400))


def test_a_true_is_no_id_and_a_dropped_id_is_no_number():
    allocator = make()
    assert allocator.live(CONTEXT) == 2
    for call in (allocator.free, lambda odd: allocator.drop(odd, CONTEXT)):
        with pytest.raises(UsageError, match="ids must be"):
            call(True)
    assert allocator.live(CONTEXT) == 2
