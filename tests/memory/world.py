"""An allocator beside its twins: dictionaries of sharers, granule contents, and what a device would
know.

Each method is one thing a caller can do. It asks the dictionaries what must happen, does it, and
compares; `tests/memory/recount.py` checks the state that it leaves. The Hypothesis machine and the
seeded simulation drive the same world.
"""

from tests.memory.recount import Recount
from tests.memory.twin import packs_fast
from unimem_jax.allocator import UNIFIED, Split, number_of
from unimem_jax.errors import NeverFits, OutOfMemory, UsageError

__all__ = ["UNIFIED", "Split", "World"]


class World(Recount):
    """One allocator, and what must be true of it."""

    def fits(self, demand):
        counts = [len(self.sharers[i]) + self.committed[i] + demand[i] for i in self.sub_pools]
        if self.caps is not None:
            answer = all(count <= cap for count, cap in zip(counts, self.caps, strict=True))
        else:
            geometry = self.geometry
            answer = packs_fast(
                geometry.arena_granules, geometry.unit_granules, geometry.ends, counts
            )
        assert self.allocator.fits(demand) == answer, f"fits({demand}) beside {counts}"
        return answer

    def is_possible(self, demand):
        """Whether an empty arena holds it."""
        if self.caps is not None:
            return all(count <= cap for count, cap in zip(demand, self.caps, strict=True))
        geometry = self.geometry
        return packs_fast(geometry.arena_granules, geometry.unit_granules, geometry.ends, demand)

    def most(self, pool):
        """The most units of one sub-pool that fit."""
        low, high = 0, self.geometry.unit_counts[pool] + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(self.demand([pool], middle)) else (low, middle)
        return low

    def grant(self, is_feasible, call):
        """A grant that fits may only fail while something is pinned, and then changes nothing."""
        if not is_feasible:
            self.refuse(OutOfMemory, call)
            return None
        before = self.snapshot() if self.pins else None
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
        has_ids = self.geometry.id_count - len(self.uses) >= count
        ids = self.grant(room and has_ids, call)
        if ids is None:
            return
        assert len(set(ids)) == count
        assert not set(ids) & self.uses.keys(), "a live id was granted again"
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
            assert id_ not in self.sharers[pool], "a live slot was granted again"
            self.bound(pool, id_, is_committed)

    def copy(self, ids, pools, is_committed):
        """Copies pages that are written, or one slot."""
        is_slot = self.geometry.is_slot[pools[0]]
        room = self.room(pools, len(ids), is_committed)

        def call():
            if is_slot:
                return [self.allocator.copy_slot(ids[0], pools[0], committed=is_committed)]
            return self.allocator.copy_pages(ids, pools, committed=is_committed).tolist()

        if room is None or any(
            id_ not in self.sharers[pool] or self.is_fenced(pool, id_)
            for pool in pools
            for id_ in ids
        ):
            self.refuse(UsageError, call)
            return
        has_ids = is_slot or self.geometry.id_count - len(self.uses) >= len(ids)
        copies = self.grant(room and has_ids, call)
        for id_, copy in zip(ids, copies or (), strict=False):
            for pool in pools:
                self.bound(pool, copy, is_committed)
                if (pool, id_) in self.contents:
                    self.contents[pool, copy] = self.contents[pool, id_]
                    self.unwritten.discard((pool, copy))

    def map_more(self, ids, pool, is_committed):
        room = self.room([pool], len(ids), is_committed)
        call = lambda: self.allocator.map_more(ids, pool, committed=is_committed)  # noqa: E731
        had = any(id_ in self.sharers[pool] or (pool, id_) in self.dropped for id_ in ids)
        if had or room is None:
            self.refuse(UsageError, call)
            return
        if self.grant(room, lambda: (call(), True)) is not None:
            for id_ in ids:
                self.bound(pool, id_, is_committed)

    def bound(self, pool, id_, is_committed):
        self.sharers[pool][id_] = 1
        self.holders[self.space(pool), number_of(id_)] = id_
        self.committed[pool] -= is_committed
        self.unwritten.add((pool, id_))
        self.touched.add((pool, id_))
        if not self.geometry.is_slot[pool]:
            self.uses[id_] = self.uses.get(id_, 0) + 1

    def commit(self, demand):
        if not self.is_possible(demand):
            self.refuse(NeverFits, lambda: self.allocator.commit(demand))
            return
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

    def compact(self, most_bytes):
        inner = [self.allocator.layout.inner_holes(pool) for pool in self.sub_pools]
        moved = self.allocator.compact(most_bytes)
        left = [self.allocator.layout.inner_holes(pool) for pool in self.sub_pools]
        assert moved <= most_bytes, "more than the budget was moved"
        assert all(a <= b for a, b in zip(left, inner, strict=True)), "holes grew"
        if self.caps is None and not self.pins and most_bytes >= self.geometry.arena_granules * 128:
            assert not any(left), "inner holes are left"

    def share(self, ids, pool):
        if any(id_ not in self.sharers[pool] for id_ in ids):
            self.refuse(UsageError, lambda: self.allocator.share(ids, pool))
            return
        self.allocator.share(ids, pool)
        for id_ in ids:
            self.sharers[pool][id_] += 1
            self.touched.add((pool, id_))

    def drop(self, ids, pool, is_single=False):
        named = ids[0] if is_single else ids
        is_wrong = len(set(ids)) < len(ids) or any(id_ not in self.sharers[pool] for id_ in ids)
        if is_wrong:
            self.refuse(UsageError, lambda: self.allocator.drop(named, pool))
            return
        addresses = {id_: self.address(pool, id_) for id_ in ids}
        freed = self.allocator.drop(named, pool)
        assert freed == sum(self.dropped_one(pool, id_, addresses[id_]) for id_ in ids)

    def free(self, ids, is_single=False):
        named = ids[0] if is_single else ids
        if len(set(ids)) < len(ids) or not set(ids) <= self.uses.keys():
            self.refuse(UsageError, lambda: self.allocator.free(named))
            return
        held = [(i, id_) for id_ in ids for i in self.page_pools if id_ in self.sharers[i]]
        addresses = [self.address(i, id_) for i, id_ in held]
        self.allocator.free(named)
        for (pool, id_), address in zip(held, addresses, strict=True):
            self.dropped_one(pool, id_, address)

    def dropped_one(self, pool, id_, address):
        """Takes one sharer in the dictionaries. Returns whether the unit is free now."""
        self.touched.add((pool, id_))
        self.sharers[pool][id_] -= 1
        if self.sharers[pool][id_]:
            return False
        del self.sharers[pool][id_]
        content = self.contents.pop((pool, id_), None)
        self.unwritten.discard((pool, id_))
        if (pool, address) in self.pins:
            self.pending[pool, address] = content
        self.use(pool, [address], self.allocator.ledger.dispatched)
        self.is_settled(pool, address)
        if self.geometry.is_slot[pool]:
            self.gone_now(pool, id_)
            return True
        self.dropped.add((pool, id_))
        self.uses[id_] -= 1
        if not self.uses[id_]:
            del self.uses[id_]
            self.dropped -= {(i, id_) for i in self.page_pools}
            self.gone_now(pool, id_)
        return True

    def gone_now(self, pool, id_):
        """Nobody may name it again, whatever becomes of its number."""
        del self.holders[self.space(pool), number_of(id_)]
        self.gone = [*self.gone[-30:], (pool, id_)]

    def pin(self, pool, id_, user):
        address = self.address(pool, id_)
        if self.is_fenced(pool, id_):
            self.refuse(UsageError, lambda: self.allocator.ledger.pin(pool, address, user))
            return
        self.allocator.ledger.pin(pool, address, user)
        self.pins.setdefault((pool, address), []).append(user)

    def fence(self, pool, id_, user):
        ledger = self.allocator.ledger
        address = self.address(pool, id_)
        if (pool, address) in self.pins or not self.is_settled(pool, address):
            self.refuse(UsageError, lambda: ledger.fence(pool, address, user))
            return
        ledger.fence(pool, address, user)
        self.pins[pool, address] = [user]

    def unpin(self, place, user):
        users = self.pins[place]
        self.refuse(UsageError, lambda: self.allocator.unpin(*place, "nobody"))
        self.allocator.unpin(*place, user)
        users.remove(user)
        if not users:
            del self.pins[place]
            self.pending.pop(place, None)

    def step(self):
        """Runs queued moves, learns the changes, writes what is new, and reads everything back."""
        self.queued.clear()
        self.seen_batches = 0
        for batch in self.allocator.take_moves(3):
            assert not set(batch.sources.tolist()) & set(batch.destinations.tolist())
            self.arena.move(batch.sub_pool, batch.sources.tolist(), batch.destinations.tolist())
            ticket = self.allocator.ledger.dispatch()
            self.use(batch.sub_pool, batch.sources.tolist(), ticket)
            self.use(batch.sub_pool, batch.destinations.tolist(), ticket)
            named = [*batch.sources.tolist(), *batch.destinations.tolist()]
            self.recent = [*self.recent[-8:], *((batch.sub_pool, a) for a in named)]
        for device, (ids, addresses) in zip(
            self.device, self.allocator.take_changes(), strict=True
        ):
            device[ids] = addresses
        ticket = self.allocator.ledger.dispatch()
        for pool, id_ in self.unwritten:
            self.serial += 1
            self.contents[pool, id_] = self.serial
            self.arena.write(pool, self.device[pool][number_of(id_)], self.serial)
        self.unwritten.clear()
        self.look()
        return ticket

    def retire(self, most=1):
        """The device finishes so many programs, if that many are dispatched."""
        ledger = self.allocator.ledger
        for ticket in range(ledger.retired + 1, min(ledger.retired + most, ledger.dispatched) + 1):
            ledger.retire(ticket)
            if ticket + 8 > ledger.dispatched:  # around the last moves
                for place in self.recent:
                    self.is_settled(*place)
        self.refuse(UsageError, lambda: ledger.retire(ledger.retired + 2))
