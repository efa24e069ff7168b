"""An allocator beside dictionaries of what it must hold, and every way to compare them.

`look_close` checks what the last call touched and the equations that cost nothing to check; `look`
reads all bytes; `check` verifies everything from scratch. `World` is what calls the allocator.
"""

import numpy as np

from tests.memory.twin import Arena
from unimem_jax.allocator import UNIFIED, Allocator, Split, number_of

HOLE, LIVE, PENDING, FENCED = 1, 2, 3, 5  # states of the ledger, by their number in the table
HELD = bytes(state if state in (LIVE, PENDING, FENCED) else 0 for state in range(256))


class Recount:
    def __init__(self, geometry, layout=UNIFIED):
        self.geometry = geometry
        self.allocator = Allocator(geometry, layout)
        self.caps = layout.caps if isinstance(layout, Split) else None
        self.sub_pools = range(len(geometry.ends))
        self.page_pools = [i for i in self.sub_pools if not geometry.is_slot[i]]
        self.sharers = [{} for _ in self.sub_pools]  # id -> sharers
        self.uses = {}  # page id -> sub-pools that map it
        self.holders = {}  # (space, number) -> id that has it
        self.gone = []  # (sub_pool, id) freed, the last of them
        self.dropped = set()  # (sub_pool, id) that may not be mapped again
        self.committed = [0 for _ in self.sub_pools]
        self.contents = {}  # (sub_pool, id) -> serial, once written
        self.unwritten = set()  # (sub_pool, id)
        self.pins = {}  # (sub_pool, address) -> [user]
        self.pending = {}  # (sub_pool, address) -> serial or None
        self.arena = Arena(geometry.arena_granules, geometry.unit_granules)
        self.device = [
            np.full(len(m), n)
            for m, n in zip(self.allocator.mapping, geometry.unit_counts, strict=True)
        ]
        self.used = [
            0
        ] * geometry.arena_granules  # last ticket that may touch it for a former owner
        self.queued = set()  # granules that moves without a ticket name
        self.recent = []  # (sub_pool, address) that moves and copies named last
        self.seen_batches = 0
        self.serial = 0
        self.touched = set()  # (sub_pool, id) since `look_close`
        self.is_filling = True  # what the simulation leans to now
        self.is_clogged = False  # the device finishes nothing

    def live(self, sub_pool):
        return list(self.sharers[sub_pool])

    def pages(self):
        return list(self.uses)

    def address(self, sub_pool, id_):
        return int(self.allocator.mapping[sub_pool][number_of(id_)])

    def space(self, pool):
        """What names a space of ids: the sub-pool of slots, or all page sub-pools together."""
        return pool if self.geometry.is_slot[pool] else None

    def snapshot(self):
        allocator = self.allocator
        states = [state.tobytes().translate(HELD) for state in allocator.ledger.states]
        tables = [
            (t.mapping.tobytes(), t.sharers.tobytes(), t.ids.free_count) for t in allocator.tables
        ]
        return (
            states,
            tables,
            list(allocator.held),
            list(allocator.committed),
            len(allocator._moves),
        )

    def refuse(self, error, call):
        """The call must raise and change nothing."""
        before = self.snapshot()
        try:
            call()
        except error:
            assert self.snapshot() == before, "a refused call changed something"
        else:
            raise AssertionError(f"{error.__name__} expected")

    def granules(self, pool, address):
        unit = self.geometry.unit_granules[pool]
        return range(address * unit, (address + 1) * unit)

    def is_settled(self, pool, address):
        self.notice_moves()
        ledger = self.allocator.ledger
        span = self.granules(pool, address)
        answer = all(self.used[g] <= ledger.retired and g not in self.queued for g in span)
        assert ledger.settled(pool, address) == answer, f"is unit {address} of {pool} settled?"
        return answer

    def use(self, pool, addresses, ticket):
        for address in addresses:
            for granule in self.granules(pool, address):
                self.used[granule] = max(self.used[granule], ticket)

    def notice_moves(self):
        """What moves and copies name that have no ticket yet."""
        moves = self.allocator._moves
        for batch in moves[self.seen_batches :]:
            for address in [*batch.sources.tolist(), *batch.destinations.tolist()]:
                self.queued.update(self.granules(batch.sub_pool, address))
        self.seen_batches = len(moves)

    def look(self):
        """Reads every byte where the device would look for it; then poisons all others."""
        for (pool, id_), content in self.contents.items():
            assert self.arena.read(pool, self.device[pool][number_of(id_)]) == content, (
                f"id {id_} of {pool} lost its bytes"
            )
        for (pool, address), content in self.pending.items():
            assert content is None or self.arena.read(pool, address) == content, (
                "pinned bytes were overwritten"
            )
        for pool in self.page_pools:
            known, absent = self.device[pool], self.geometry.unit_counts[pool]
            for id_ in self.uses:
                assert (known[number_of(id_)] == absent) == (id_ not in self.sharers[pool]), (
                    "the device maps what is not there"
                )
        live = [(pool, self.address(pool, id_)) for pool, id_ in self.contents]
        self.arena.poison_all_but([*live, *self.pending])

    def is_fenced(self, pool, id_):
        return self.allocator.ledger.states[pool][self.address(pool, id_)] == FENCED

    def look_close(self):
        """What the last call touched, and how many of everything there are: cheap enough for each
        step.
        """
        self.notice_moves()
        allocator, position = self.allocator, 0
        for pool, band in enumerate(allocator.layout.bands):
            live = len(self.sharers[pool])
            assert allocator.committed[pool] == self.committed[pool]
            assert allocator.held[pool] == live + self.committed[pool]
            if band.lo < band.hi:
                assert band.lo * band.unit >= position, "L4: bands overlap"
                position = band.hi * band.unit
            if band.hole_count:
                last = band.hole_view[band.hole_count - 1]
                assert allocator.ledger.states[pool][last] == HOLE
                assert band.lo <= last < band.hi
        assert position <= self.geometry.arena_granules
        free = [band.hi - band.lo - band.hole_count for band in allocator.layout.bands]
        for pool, _ in self.pending:
            free[pool] -= 1
        assert free == [len(ids) for ids in self.sharers], "L5: a band is not filled exactly"
        assert allocator.pages.free_count == self.geometry.id_count - len(self.uses)
        for pool, id_ in self.touched:
            self._look_at(pool, id_)
        self.touched.clear()

    def _look_at(self, pool, id_):
        table, address, number = (
            self.allocator.tables[pool],
            self.address(pool, id_),
            number_of(id_),
        )
        if self.holders.get((self.space(pool), number), id_) != id_:
            return  # a former life of the number; the present one is looked at by itself
        count = self.sharers[pool].get(id_, 0)
        assert max(0, table.sharers[number]) == count
        if count:
            assert table.owner[address] == number
            assert self.allocator.ledger.states[pool][address] in (LIVE, FENCED)
        else:
            assert address == self.geometry.unit_counts[pool]
        if not self.geometry.is_slot[pool]:
            assert table.ids.uses[number] == self.uses.get(id_, 0)

    def check(self):
        """The numbered invariants, and every count against the dictionaries."""
        self.allocator.check()
        self.touched = {(pool, id_) for pool in self.sub_pools for id_ in self.sharers[pool]}
        self.look_close()
        metrics = self.allocator.metrics()
        assert metrics["live"] == [len(ids) for ids in self.sharers]
        assert metrics["committed"] == self.committed
        assert sum(metrics["pinned"]) == len(self.pins)
        assert sum(metrics["pending"]) == len(self.pending)
