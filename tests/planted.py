"""Bugs planted on purpose: each must be caught, or the twins are blind to its kind.

A planted bug replaces one function of the library. `PLANTED` names them;
`tests/memory/test_planted.py` plants each in turn and runs the checks of the memory core.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from unimem_jax import allocator, bands, layout, ledger, tables


@dataclass(frozen=True)
class Bug:
    """One function replaced: `owner.name` becomes `plant(original)`."""

    what: str
    owner: Any
    name: str
    plant: Any


def absent_minus_one(original):
    def __init__(self, sub_pool, ids, unit_count):
        original(self, sub_pool, ids, unit_count)
        self.absent = -1
        self.mapping[:] = -1

    return __init__


def empty_float_rounded(_):
    def packed_fits(geometry, counts, more=bands.NO_MORE):
        position = 0
        counts = [first + second for first, second in zip(counts, more, strict=False)]
        for unit, end, count in zip(geometry.unit_granules, geometry.ends, counts, strict=True):
            if end == "high":
                return position <= (geometry.arena_granules // unit - count) * unit
            position = (-(-position // unit) + count) * unit
        return position <= geometry.arena_granules

    return packed_fits


def reversed_order(original):
    return lambda sides: original(sides)[::-1]


def no_complaint(_):
    return lambda *_: None


def trim_keeps_the_holes(original):
    def _trim(self):
        stale = [band.holes[: band.hole_count].copy() for band in self.bands]
        original(self)
        for band, holes in zip(self.bands, stale, strict=True):
            band.hole_count = 0
            band.push(holes)

    return _trim


def pins_ignored(_):
    def free_one(self, sub_pool, address):
        self.apply(sub_pool, address, ledger.FREE)
        return True

    return free_one


def moved_mapping_not_sent(original):
    def move(self, sources, destinations):
        touched = self.dirty_count
        original(self, sources, destinations)
        self.dirty_count = touched

    return move


def former_life_not_cleared(original):
    def touch(self, ids):
        if (self.sharers[ids] > 0).any() or (self.sharers[ids] < 0).any():
            original(self, ids)

    return touch


def commitments_not_counted(_):
    def fits(self, demand):
        live = [self.live(index) for index in range(len(self.held))]
        return self.layout.fits([a + b for a, b in zip(live, demand, strict=True)])

    return fits


def owner_not_told(_):
    def move(self, sources, destinations):
        ids = self.owner[sources]
        self.mapping[ids] = destinations
        self.touch(ids)

    return move


def batches_lost(original):
    return lambda self, *most: original(self, *most)[:-1]


def sharers_forgotten(original):
    def drop_one(self, id_):
        self.sharers[id_] = 1
        return original(self, id_)

    return drop_one


def only_its_own_sub_pool(_):
    def settled(self, sub_pool, address):
        return bool(self._stamps[sub_pool][address] <= self.retired)

    return settled


def queued_moves_forgotten(_):
    def free_one(self, sub_pool, address):
        is_held = address in self.pins[sub_pool]
        self.apply(sub_pool, address, ledger.FREE_PINNED if is_held else ledger.FREE)
        self._stamps[sub_pool][address] = self.dispatched
        return not is_held

    return free_one


def stamps_lost(_):
    return lambda self: self._unwritten.clear()


def pins_moved(original):
    return lambda geometry, held, pinned, counts: original(
        geometry, held, [()] * len(counts), counts
    )


def one_hole_twice(original):
    def push(self, addresses):
        original(self, addresses)
        if len(addresses) > 1:
            self.holes[self.hole_count - 1] = self.holes[self.hole_count - 2]

    return push


def float_rounded_down(original):
    def _bounds(self, index, edges):
        floor, ceiling = original(self, index, edges)
        return max(0, floor - 1) if self.shares is None else floor, ceiling

    return _bounds


def source_of_a_copy_let_go(original):
    def hand_out(self, sub_pool, sources, destinations):
        original(self, sub_pool, sources, destinations)
        self._stamps[sub_pool][sources] = self.dispatched

    return hand_out


def one_ticket_for_all_batches(original):
    def hand_out(self, sub_pool, sources, destinations):
        self._handed_out = self.dispatched
        original(self, sub_pool, sources, destinations)

    return hand_out


def copies_before_moves(original):
    def is_move(self, batch):
        return self.ledger.states[batch.sub_pool][batch.sources[0]] != ledger.LIVE

    def take_moves(self, *most):
        return sorted(original(self, *most), key=lambda batch: is_move(self, batch))

    return take_moves


def twice_the_budget(original):
    return lambda self, granules: original(self, granules * 2)


def loose_targets(original):
    def tight(end, bounds, kept, count):
        lo, hi = original(end, bounds, kept, count)
        return (lo, hi - 1) if end == "low" and hi > max(lo + count, 1) else (lo, hi)

    return tight


def ids_not_returned(original):
    return lambda self, ids: original(self, np.asarray(ids)[1:])


def repeats_unnoticed(_):
    return lambda self, ids: np.asarray(ids, np.int64)


def stale_ids_accepted(original):
    def known_one(self, id_):
        return original(self, self.present_view[id_ & tables.NUMBER] if id_ >= 0 else id_)

    return known_one


def retire_releases_everything(original):
    def retire(self, ticket):
        original(self, ticket)
        self.retired = self.dispatched

    return retire


PLANTED = [
    Bug("absent is -1", tables.Table, "__init__", absent_minus_one),
    Bug("an empty float is rounded", layout, "packed_fits", empty_float_rounded),
    Bug("batches run in reverse order", layout, "batch_order", reversed_order),
    Bug("a double free of many goes unnoticed", tables.Table, "require_mapped", no_complaint),
    Bug("a stale id is taken for the present one", tables.IdSpace, "known_one", stale_ids_accepted),
    Bug("an id named twice goes unnoticed", tables.IdSpace, "known", repeats_unnoticed),
    Bug("holes beyond the frontier are handed out", layout.Layout, "_trim", trim_keeps_the_holes),
    Bug("a hole is handed out twice", layout.Band, "push", one_hole_twice),
    Bug("a pinned unit is reused at once", ledger.Ledger, "free_one", pins_ignored),
    Bug("a pinned unit is moved", layout, "choose_targets", pins_moved),
    Bug("the device does not hear of moves", tables.Table, "move", moved_mapping_not_sent),
    Bug("the device keeps a former life's page", tables.Table, "touch", former_life_not_cleared),
    Bug("commitments are not counted", allocator.Allocator, "fits", commitments_not_counted),
    Bug("the place of a moved unit has no owner", tables.Table, "move", owner_not_told),
    Bug("a batch is lost", allocator.Allocator, "take_moves", batches_lost),
    Bug("a shared page is freed by the first", tables.Table, "drop_one", sharers_forgotten),
    Bug("a float overlaps its neighbour", layout.Layout, "_bounds", float_rounded_down),
    Bug("a freed id is lost", tables.IdSpace, "give", ids_not_returned),
    Bug("overlapping units are not asked", ledger.Ledger, "settled", only_its_own_sub_pool),
    Bug("a freed unit forgets a queued move", ledger.Ledger, "free_one", queued_moves_forgotten),
    Bug("stamps of freed units are lost", ledger.Ledger, "_write_stamps", stamps_lost),
    Bug("one ticket retires all", ledger.Ledger, "retire", retire_releases_everything),
    Bug("the source of a copy settles", ledger.Ledger, "hand_out", source_of_a_copy_let_go),
    Bug("one ticket for all batches", ledger.Ledger, "hand_out", one_ticket_for_all_batches),
    Bug("copies run ahead of moves", allocator.Allocator, "take_moves", copies_before_moves),
    Bug("compaction takes more than its budget", layout.Layout, "compact", twice_the_budget),
    Bug("a band moves a unit too many", bands, "_tight", loose_targets),
    Bug("fits always says yes", bands, "packed_fits", lambda _: lambda *_: True),
]
