"""The twins are not blind: every planted bug is caught."""

import pytest

from tests import sim
from tests.memory import test_bands, test_exhaustive, test_ledger
from tests.planted import PLANTED


def battery():
    """The checks of the memory core, short: tiny arenas, stress of several seeds, laws of bands and
    ledger.
    """
    for seed in range(6):
        sim.run(seed, steps=2000, check_every=10)
    test_exhaustive.ask_all_counts(2, (4, 7))
    test_exhaustive.serve_all_layouts(2, (4, 6))
    test_bands.test_an_empty_float_takes_no_space_and_is_not_rounded()
    test_ledger.test_a_unit_is_settled_only_when_overlapping_units_of_other_sub_pools_are()
    test_ledger.test_tickets_retire_in_order_and_only_once_dispatched()


@pytest.mark.parametrize("bug", PLANTED, ids=[bug.what for bug in PLANTED])
def test_a_planted_bug_is_caught(bug, monkeypatch):
    monkeypatch.setattr(bug.owner, bug.name, bug.plant(getattr(bug.owner, bug.name)))
    with pytest.raises(Exception) as caught:
        battery()
    assert not isinstance(caught.value, TypeError | AttributeError), "the bug itself is broken"


def test_the_battery_finds_nothing_where_nothing_is_planted():
    battery()
