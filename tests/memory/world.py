"""An allocator beside its twins: dictionaries of sharers, granule contents, and what a device would
know.

Each method is one thing a caller can do. It asks the dictionaries what must happen, does it, and
compares. The Hypothesis machine and the seeded simulation drive the same world.
"""

import numpy as np

from tests.memory.twin import Arena, packs_fast
from unimem_jax.allocator import UNIFIED, Allocator, Split
from unimem_jax.errors import OutOfMemory, UsageError

__all__ = ["UNIFIED", "Split", "World"]


class World:
    def __init__(self, geometry, layout=UNIFIED):
        self.geometry = geometry
        self.allocator = Allocator(geometry, layout)
        self.caps = layout.caps if isinstance(layout, Split) else None
        self.sub_pools = range(len(geometry.ends))
        self.sharers = {}  # (sub_pool, id) -> sharers
        self.dropped = set()  # (sub_pool, id) that may not be mapped again
        self.committed = [0 for _ in self.sub_pools]
        self.contents = {}  # (sub_pool, id) -> serial, once written
        self.pins = {}  # (sub_pool, address) -> [user]
        self.pending = {}  # (sub_pool, address) -> serial or None
        self.arena = Arena(geometry.arena_granules, geometry.unit_granules)
        self.device = [
            np.full(len(m), n)
            for m, n in zip(self.allocator.mapping, geometry.unit_counts, strict=True)
        ]
        self.serial = 0
        self.is_filling = True  # what the simulation leans to now

    def live(self, sub_pool):
        return [id_ for pool, id_ in self.sharers if pool == sub_pool]

    def pages(self):
        slots = self.geometry.is_slot
        return list(dict.fromkeys(id_ for pool, id_ in self.sharers if not slots[pool]))

    def fits(self, demand):
        counts = [len(self.live(i)) + self.committed[i] + demand[i] for i in self.sub_pools]
        if self.caps is not None:
            answer = all(count <= cap for count, cap in zip(counts, self.caps, strict=True))
        else:
            geometry = self.geometry
            answer = packs_fast(
                geometry.arena_granules, geometry.unit_granules, geometry.ends, counts
            )
        assert self.allocator.fits(demand) == answer, f"fits({demand}) beside {counts}"
        return answer

    def snapshot(self):
        allocator = self.allocator
        states = [np.isin(state, (2, 3, 5)).tobytes() for state in allocator.ledger.states]
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

    def grant(self, is_feasible, call):
        """A grant that fits may only fail while something is pinned, and then changes nothing."""
        if not is_feasible:
            self.refuse(OutOfMemory, call)
            return None
        before = self.snapshot()
        failure = None
        try:
            return call()
        except OutOfMemory as error:
            failure = str(error)
        assert self.pins, f"feasible and nothing pinned, yet: {failure}"
        assert "used by" in failure, "the pins in the way are not named"
        assert self.snapshot() == before, "a refused call changed something"
        return None

    def demand(self, pools, count):
        return [count if index in pools else 0 for index in self.sub_pools]

    def room(self, pools, count, is_committed):
        """Whether so many units may be granted; None if the call itself is wrong."""
        if not is_committed:
            return self.fits(self.demand(pools, count))
        return True if all(self.committed[index] >= count for index in pools) else None

    def grant_pages(self, count, pools, is_committed, is_single=False):
        allocator = self.allocator
        room = self.room(pools, count, is_committed)

        def call():
            if is_single:
                return [allocator.grant_page(pools, committed=is_committed)]
            return allocator.grant_pages(count, pools, committed=is_committed).tolist()

        if room is None:
            self.refuse(UsageError, call)
            return
        has_ids = self.geometry.id_count - len(self.pages()) >= count
        ids = self.grant(room and has_ids, call)
        if ids is None:
            return
        assert len(set(ids)) == count
        assert not set(ids) & set(self.pages()), "a live id was granted again"
        for id_ in ids:
            for pool in pools:
                self.bound(pool, id_, is_committed)

    def grant_slot(self, pool, is_committed):
        room = self.room([pool], 1, is_committed)
        call = lambda: self.allocator.grant_slot(pool, committed=is_committed)  # noqa: E731
        if room is None:
            self.refuse(UsageError, call)
            return
        id_ = self.grant(room, call)
        if id_ is not None:
            assert (pool, id_) not in self.sharers, "a live slot was granted again"
            self.bound(pool, id_, is_committed)

    def map_more(self, ids, pool, is_committed):
        room = self.room([pool], len(ids), is_committed)
        call = lambda: self.allocator.map_more(ids, pool, committed=is_committed)  # noqa: E731
        had = any((pool, id_) in self.sharers or (pool, id_) in self.dropped for id_ in ids)
        if had or room is None:
            self.refuse(UsageError, call)
            return
        if self.grant(room, lambda: (call(), True)) is not None:
            for id_ in ids:
                self.bound(pool, id_, is_committed)

    def bound(self, pool, id_, is_committed):
        self.sharers[pool, id_] = 1
        self.committed[pool] -= is_committed

    def commit(self, demand):
        if self.grant(self.fits(demand), lambda: (self.allocator.commit(demand), True)) is not None:
            self.committed = [a + b for a, b in zip(self.committed, demand, strict=True)]

    def uncommit(self, demand):
        if any(a > b for a, b in zip(demand, self.committed, strict=True)):
            self.refuse(UsageError, lambda: self.allocator.uncommit(demand))
            return
        self.allocator.uncommit(demand)
        self.committed = [a - b for a, b in zip(self.committed, demand, strict=True)]

    def make_room(self, demand):
        if any(a > b for a, b in zip(demand, self.committed, strict=True)):
            self.refuse(UsageError, lambda: self.allocator.make_room(demand))
            return
        if self.grant(True, lambda: (self.allocator.make_room(demand), True)) is not None:
            holes = self.allocator.metrics()["holes"]
            assert all(a <= b for a, b in zip(demand, holes, strict=True)), "no room was made"

    def share(self, ids, pool):
        if any((pool, id_) not in self.sharers for id_ in ids):
            self.refuse(UsageError, lambda: self.allocator.share(ids, pool))
            return
        self.allocator.share(ids, pool)
        for id_ in ids:
            self.sharers[pool, id_] += 1

    def drop(self, ids, pool, is_single=False):
        named = ids[0] if is_single else ids
        is_wrong = len(set(ids)) < len(ids) or any((pool, id_) not in self.sharers for id_ in ids)
        if is_wrong:
            self.refuse(UsageError, lambda: self.allocator.drop(named, pool))
            return
        addresses = {id_: int(self.allocator.mapping[pool][id_]) for id_ in ids}
        freed = self.allocator.drop(named, pool)
        assert freed == sum(self.dropped_one(pool, id_, addresses[id_]) for id_ in ids)

    def free(self, ids, is_single=False):
        named = ids[0] if is_single else ids
        live = set(self.pages())
        if len(set(ids)) < len(ids) or not set(ids) <= live:
            self.refuse(UsageError, lambda: self.allocator.free(named))
            return
        pools = [i for i in self.sub_pools if not self.geometry.is_slot[i]]
        held = [(i, id_) for id_ in ids for i in pools if (i, id_) in self.sharers]
        addresses = [int(self.allocator.mapping[i][id_]) for i, id_ in held]
        self.allocator.free(named)
        for (pool, id_), address in zip(held, addresses, strict=True):
            self.dropped_one(pool, id_, address)

    def dropped_one(self, pool, id_, address):
        """Takes one sharer in the dictionaries. Returns whether the unit is free now."""
        self.sharers[pool, id_] -= 1
        if self.sharers[pool, id_]:
            return False
        del self.sharers[pool, id_]
        content = self.contents.pop((pool, id_), None)
        if (pool, address) in self.pins:
            self.pending[pool, address] = content
        self.dropped.add((pool, id_))
        if not self.geometry.is_slot[pool]:
            if id_ not in self.pages():
                self.dropped -= {(i, id_) for i in self.sub_pools if not self.geometry.is_slot[i]}
        else:
            self.dropped.discard((pool, id_))
        return True

    def pin(self, pool, id_, user):
        address = int(self.allocator.mapping[pool][id_])
        if self.allocator.ledger.states[pool][address] == 5:  # fenced
            self.refuse(UsageError, lambda: self.allocator.ledger.pin(pool, address, user))
            return
        self.allocator.ledger.pin(pool, address, user)
        self.pins.setdefault((pool, address), []).append(user)

    def fence(self, pool, id_, user):
        ledger = self.allocator.ledger
        address = int(self.allocator.mapping[pool][id_])
        if (pool, address) in self.pins or not ledger.settled(pool, address):
            self.refuse(UsageError, lambda: ledger.fence(pool, address, user))
            return
        ledger.fence(pool, address, user)
        self.pins[pool, address] = [user]

    def unpin(self, place):
        users = self.pins[place]
        self.refuse(UsageError, lambda: self.allocator.unpin(*place, "nobody"))
        self.allocator.unpin(*place, users.pop())
        if not users:
            del self.pins[place]
            self.pending.pop(place, None)

    def step(self):
        """Runs queued moves, learns the changes, writes what is new, and reads everything back."""
        for batch in self.allocator.take_moves():
            assert not set(batch.sources.tolist()) & set(batch.destinations.tolist())
            self.arena.move(batch.sub_pool, batch.sources.tolist(), batch.destinations.tolist())
        for device, (ids, addresses) in zip(
            self.device, self.allocator.take_changes(), strict=True
        ):
            device[ids] = addresses
        ticket = self.allocator.ledger.dispatch()
        for key in self.sharers:
            if key not in self.contents:
                self.serial += 1
                self.contents[key] = self.serial
                self.arena.write(key[0], self.device[key[0]][key[1]], self.serial)
        self.look()
        return ticket

    def look(self):
        for (pool, id_), content in self.contents.items():
            assert self.arena.read(pool, int(self.device[pool][id_])) == content, (
                f"id {id_} of {pool} lost its bytes"
            )
        for (pool, address), content in self.pending.items():
            assert content is None or self.arena.read(pool, address) == content, (
                "pinned bytes were overwritten"
            )
        for pool in self.sub_pools:
            if not self.geometry.is_slot[pool]:
                for id_ in self.pages():
                    is_absent = self.device[pool][id_] == self.geometry.unit_counts[pool]
                    assert is_absent == ((pool, id_) not in self.sharers), (
                        "the device maps what is not there"
                    )
        live = [(pool, int(self.allocator.mapping[pool][id_])) for pool, id_ in self.sharers]
        self.arena.poison_all_but([*live, *self.pending])

    def retire(self):
        ledger = self.allocator.ledger
        if ledger.retired < ledger.dispatched:
            ledger.retire(ledger.retired + 1)
        self.refuse(UsageError, lambda: ledger.retire(ledger.retired + 2))

    def check(self):
        """The numbered invariants, and every count against the dictionaries."""
        self.allocator.check()
        metrics = self.allocator.metrics()
        assert metrics["live"] == [len(self.live(i)) for i in self.sub_pools]
        assert metrics["committed"] == self.committed
        assert sum(metrics["pinned"]) == len(self.pins)
        assert sum(metrics["pending"]) == len(self.pending)
        for (pool, id_), count in self.sharers.items():
            assert self.allocator.tables[pool].sharers[id_] == count
