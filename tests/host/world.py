"""Every call of `Memory` beside its twins: the pages that each request must hold, the capacity that
must be left, and what each entry of the arena must hold after the packets ran.
"""

from collections import Counter, deque
from dataclasses import is_dataclass

import numpy as np

from tests.host.texts import Kept, Twin
from tests.host.twin import Device, code, completing, pages_during, pages_held, slot_code
from tests.memory.twin import packs_fast
from unimem_jax.allocator import number_of
from unimem_jax.errors import OutOfMemory, UsageError
from unimem_jax.memory import Memory
from unimem_jax.packet import Packet
from unimem_jax.plan import Plan
from unimem_jax.requests import Prefix, Work

SCRATCH = {"marks", "refusals"}  # may change in a call that raises


def frozen(thing, seen=None):
    """Everything that an object holds, to the bottom, as something to compare."""
    seen = {} if seen is None else seen
    if isinstance(thing, np.ndarray):
        return thing.shape, thing.dtype.str, thing.tobytes()
    if isinstance(thing, (int, float, str, bytes, type(None), np.generic)):
        return thing
    if id(thing) in seen or isinstance(thing, (memoryview, Plan)) or callable(thing):
        return seen.get(id(thing))
    seen[id(thing)] = f"object {len(seen)}"
    if isinstance(thing, dict):
        return [(frozen(key, seen), frozen(value, seen)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, range, set, frozenset, deque)):
        return [frozen(item, seen) for item in thing]
    names = getattr(thing, "__dict__", None) or [
        name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())
    ]
    assert names or is_dataclass(thing), f"cannot look into {type(thing).__name__}"
    return [(name, frozen(getattr(thing, name), seen)) for name in names if name not in SCRATCH]


class World:
    """One memory, one twin of the device, and the requests between them."""

    def __init__(self, plan, *, rows=5, context=24, chunk=5, fused=3, layout="unified"):
        self.plan, self.rows, self.context, self.layout = plan, rows, context, layout
        self.memory = Memory(
            plan, rows, context, chunk_tokens=chunk, fused_steps=fused, layout=layout
        )
        self.device = Device(plan, rows, context)
        self.twins, self.kept = [], []
        self.is_behind = False  # copies wait for the next packets
        self.serial = self.refusals = self.waits = 0

    # What must be.

    def held(self, length):
        """Units of each sub-pool that a request holds between steps."""
        return tuple(
            int(length > 0 and pool.name == "request") if pool.is_slot
            else len(pages_held(pool.lifetime, length, self.plan.page_tokens))
            for pool in self.plan.sub_pools
        )  # fmt: skip

    def growth(self, length, target, fused):
        """Units of each sub-pool that a step adds to what is held."""
        return tuple(
            int(target > 0 and pool.name == "request") if pool.is_slot
            else len(pages_during(pool.lifetime, length, target, self.plan.page_tokens, fused))
            for pool in self.plan.sub_pools
        )  # fmt: skip

    def packs(self, counts):
        """Whether the arena, or its split, holds so many units."""
        if self.layout != "unified":
            return all(count <= cap for count, cap in zip(counts, self.layout.caps, strict=True))
        geometry = self.plan.geometry
        return packs_fast(
            geometry.arena_granules, geometry.unit_granules, geometry.ends, tuple(counts)
        )

    def sharers(self, pool):
        """Per page of a token sub-pool its sharers and how many of them have a commitment, of all
        texts.
        """
        every, committed = Counter(), Counter()
        for twin in self.twins:
            numbers = pages_held(pool.lifetime, twin.length, self.plan.page_tokens)
            mine = [twin.pages[number] for number in numbers]
            every.update(mine)
            committed.update(mine if twin.peak else ())
        for kept in self.kept:
            every.update(kept.seen[pool.index])
        return every, committed

    def used(self):
        """Units that are held, and those that are promised, of each sub-pool."""
        held, promised = [], []
        for pool in self.plan.sub_pools:
            owed = 0
            if pool.is_slot:
                is_running = pool.name == "request"
                held.append(is_running * sum(t.length > 0 for t in self.twins))
                held[-1] += is_running * sum(len(kept.slots) for kept in self.kept)
            else:
                every, committed = self.sharers(pool)
                held.append(len(every))
                if pool.lifetime.kind == "window":
                    owed = sum(min(committed[page], count - 1) for page, count in every.items())
            promised.append(owed + sum(self.uncovered(twin)[pool.index] for twin in self.twins))
        return np.array(held), np.array(promised)

    def uncovered(self, twin):
        """What a commitment still promises."""
        mine = self.held(twin.length)
        return [max(0, most - count) for most, count in zip(twin.peak or mine, mine, strict=True)]

    def claims(self, growing=(), fused=False):
        """Units that everything claims: held, committed, and what a step is to add."""
        total = sum(self.used())
        for twin, count in growing:
            if count > 0 and twin in self.twins:
                during = self.growth(twin.length, twin.length + count, fused)
                added = np.array(during) - self.held(twin.length)
                total += np.maximum(0, added - self.uncovered(twin))
        return total.tolist()

    def claims_with(self, twin):
        """Units that everything claims beside one more request, which has nothing yet to write."""
        self.twins.append(twin)
        try:
            return self.claims()
        finally:
            self.twins.remove(twin)

    # What is done.

    def attempt(self, call, *, fits=True, is_wrong=False):
        """Calls; checks that it raises exactly when it must, and then changed nothing."""
        before = frozen(self.memory)
        try:
            result = call()
        except UsageError:
            assert is_wrong
            assert frozen(self.memory) == before, "a wrong call changed something"
            self.refusals += 1
        except OutOfMemory:
            assert not fits
            assert frozen(self.memory) == before, "a call without room changed something"
            self.waits += 1
        else:
            assert fits, "what cannot fit was granted"
            assert not is_wrong, "what is wrong was granted"
            return result
        return None

    def open(self, limit=None):
        request = self.attempt(
            lambda: self.memory.open(limit=limit), fits=len(self.twins) < self.rows
        )
        if request is not None:
            self._add(request, limit or self.context)

    def fork(self, twin):
        """One more request that goes on from where another is."""
        is_wrong = twin not in self.twins
        other = Twin(0, **twin.begun(self.plan.page_tokens), limit=twin.limit, peak=twin.peak)
        fits = len(self.twins) < self.rows and self.packs(self.claims_with(other))
        request = self.attempt(
            lambda: self.memory.fork(twin.request), fits=fits or is_wrong, is_wrong=is_wrong
        )
        if request is not None:
            self._begin(request, other)

    def keep(self, twin):
        """Shares the full pages of a request, and copies its state where it ends with one."""
        full, part = divmod(twin.length, self.plan.page_tokens)
        kept = Kept(twin.serial, full * self.plan.page_tokens, twin.pages[:full], twin.past)
        for pool in self.plan.token_pools:
            numbers = pages_held(pool.lifetime, twin.length, self.plan.page_tokens)
            kept.seen[pool.index] = [twin.pages[n] for n in sorted(numbers) if n < full]
        self.kept.append(kept)
        fits = self.packs(self.claims())
        self.kept.remove(kept)
        shares = self.attempt(lambda: self.memory.share(twin.request, 0, full), fits=fits)
        if shares is None:
            return
        kept.ids, kept.shares = tuple(twin.request.ids[:full]), shares
        assert {i: len(ids) for i, ids in shares.items()} == {
            i: len(pages) for i, pages in kept.seen.items()
        }
        self.kept.append(kept)
        copies = self.memory.copies(kept.length)
        if full and not part and sum(copies) and self.memory.fits(copies):
            pools = zip(self.plan.slot_pools, twin.request.slots, strict=True)
            copy = self.memory.allocator.copy_slot
            kept.slots = tuple(copy(slot, pool.index, committed=False) for pool, slot in pools)
            self.is_behind = True

    def resume(self, kept, new=None):
        """A request that begins with what was kept; with a commitment for `new` tokens more."""
        prefix = Prefix(kept.length, kept.ids, kept.slots)
        twin = Twin(0, **kept.begun(self.plan.page_tokens), limit=self.context)
        is_wrong = bool(kept.length and len(kept.slots) < len(self.plan.slot_pools))
        for pool in self.plan.token_pools:
            needed = pages_held(pool.lifetime, kept.length, self.plan.page_tokens)
            every, _ = self.sharers(pool)
            is_wrong |= any(kept.pages[number] not in every for number in needed)
        call = lambda: self.memory.open(prefix=prefix)  # noqa: E731
        if new is not None:
            prompt = max(1, kept.length)
            call = lambda: self.memory.admit(prompt, new, prefix=prefix)  # noqa: E731
            twin.limit = prompt + new
            is_wrong |= twin.limit > self.context
            memory = self.memory
            twin.peak = memory.prices.peak(twin.limit, memory.chunk_tokens, memory.fused_steps)
            is_wrong |= not self.packs(twin.peak)
        if not is_wrong:
            fits = len(self.twins) < self.rows and self.packs(self.claims_with(twin))
        request = self.attempt(call, fits=is_wrong or fits, is_wrong=is_wrong)
        if request is not None:
            self._begin(request, twin)

    def let_go(self, kept):
        """Gives back what was kept, windows before what is kept for longer."""
        self.kept.remove(kept)
        for index in sorted(
            kept.shares, key=lambda index: self.plan.sub_pools[index].lifetime.tokens or 1 << 30
        ):
            self.memory.drop(kept.shares[index], index)
        for pool, slot in zip(self.plan.slot_pools, kept.slots, strict=False):
            self.memory.allocator.drop(slot, pool.index)

    def catch_up(self):
        """Runs what waits for the next packets."""
        for packet in self.memory.upkeep():
            self.device.run(packet)
        self.is_behind = False

    def _begin(self, request, twin):
        self.serial += 1
        twin.serial, twin.request = self.serial, request
        self.twins.append(twin)
        self.is_behind = True

    def admit(self, prompt, new):
        total = prompt + new
        peak = (0,) * len(self.plan.sub_pools)
        if prompt >= 1 and new >= 0:
            prices = self.memory.prices
            peak = prices.peak(total, self.memory.chunk_tokens, self.memory.fused_steps)
        is_wrong = prompt < 1 or new < 0 or total > self.context or not self.packs(peak)
        claimed = [sum(pair) for pair in zip(self.claims(), peak, strict=True)]
        fits = len(self.twins) < self.rows and self.packs(claimed)
        request = self.attempt(
            lambda: self.memory.admit(prompt, new), fits=fits or is_wrong, is_wrong=is_wrong
        )
        if request is not None:
            self._add(request, total).peak = peak

    def run(self, growing, **shape):
        """One step; `growing` is twins and how many tokens each is to grow by."""
        work = [Work(t.request, count, np.arange(count)) for t, count in growing]
        is_wrong = self._is_wrong(growing)
        packets = self.attempt(
            lambda: self.memory.run(work, **shape),
            fits=is_wrong or self.packs(self.claims(growing)),
            is_wrong=is_wrong,
        )
        if packets is not None:
            self._replay(packets, growing)

    def prefill(self, twin, count):
        is_wrong = twin.peak is None or count < 1 or twin.length + count > twin.limit
        packets = self.attempt(
            lambda: self.memory.prefill(twin.request, np.arange(count)), is_wrong=is_wrong
        )
        for packet in packets or ():
            self.device.run(packet, [twin.writer] if packet.shape.rows else ())
        if packets:
            self._advance([(twin, count)])

    def decode(self, steps, twins):
        growing = [(twin, min(steps, twin.limit - twin.length)) for twin in twins]
        is_wrong = self._is_wrong(growing) or not twins or not all(t.has_sampled for t in twins)
        is_wrong = is_wrong or not 0 < steps <= self.memory.fused_steps
        packets = self.attempt(
            lambda: self.memory.decode(steps, [twin.request for twin in twins]),
            fits=is_wrong or self.packs(self.claims(growing, fused=True)),
            is_wrong=is_wrong,
        )
        for packet in packets or ():
            assert packet.words.shape[0] == (steps if packet.shape.rows else 1)
            for words in packet.words:
                one = Packet(words, packet.shape)
                self.device.run(one, [t.writer for t in twins] if one.shape.rows else ())
        if packets:
            self._advance(growing)

    def free(self, twin):
        self.attempt(lambda: self.memory.free(twin.request), is_wrong=twin not in self.twins)
        if twin in self.twins:
            self.twins.remove(twin)

    def check(self):
        """All that the twins know, after every call."""
        self.memory.check()
        self.memory.check_idle(self.used()[0] if not self.twins else None)
        allocator = self.memory.allocator
        held, committed = self.used()
        assert all(twin.request.length == twin.length for twin in self.twins)
        assert [allocator.live(pool.index) for pool in self.plan.sub_pools] == held.tolist()
        assert allocator.committed == committed.tolist()
        assert self.memory.free_rows == self.rows - len(self.twins)
        if not self.is_behind:
            entries = {}
            for unit, place, entry, content in self._live_entries():
                assert (self.device.cells[entry] == content).all()
                assert entries.setdefault((unit, *place), entry) == entry
            self.device.poison_all_but(list(entries.values()))

    def _live_entries(self):
        """(page, (sub-pool, offset), granules, code) of every entry that a later query of somebody
        may see: all of a page that is held.
        """
        page_tokens = self.plan.page_tokens
        for twin in self.twins:
            for pool in self.plan.token_pools:
                first = pool.lifetime.first_kept(twin.length) // page_tokens * page_tokens
                for at in completing(pool, first, twin.length):
                    page = at // page_tokens
                    address = self.device.page_address(pool, twin.request.row, page)
                    yield self._entry(pool, twin, at, twin.request.ids[page], address)
            for pool, id_ in zip(self.plan.slot_pools, twin.request.slots, strict=False):
                yield self._slot(pool, twin, id_)
        for kept in self.kept:
            for pool in self.plan.token_pools:
                for page in kept.seen[pool.index]:
                    number = kept.pages.index(page)
                    start = number * page_tokens
                    for at in completing(pool, start, start + page_tokens):
                        yield self._entry(pool, kept, at, kept.ids[number])
            for pool, id_ in zip(self.plan.slot_pools, kept.slots, strict=False):
                yield self._slot(pool, kept, id_)

    def _entry(self, pool, text, at, id_, address=None):
        page, offset = divmod(at, self.plan.page_tokens)
        wanted = self.memory.allocator.mapping[pool.index][number_of(id_)]
        assert address in (None, wanted)
        entry = self.device.entry(pool, int(wanted), offset)
        content = code(text.writer(at), at, pool.index)
        return text.pages[page], (pool.index, offset), entry, content

    def _slot(self, pool, text, id_):
        slot = number_of(id_)
        address = self.device.address(pool, slot)
        assert address == self.memory.allocator.mapping[pool.index][slot]
        content = slot_code(text.writer, text.length, pool.index)
        return text, (pool.index, 0), self.device.entry(pool, address, 0), content

    def _add(self, request, limit):
        self.serial += 1
        self.twins.append(Twin(self.serial, request=request, limit=limit))
        return self.twins[-1]

    def _is_wrong(self, growing):
        return len({twin.serial for twin, _ in growing}) < len(growing) or any(
            twin not in self.twins or count < 0 or twin.length + count > twin.limit
            for twin, count in growing
        )

    def _replay(self, packets, growing):
        *upkeep, step = packets
        for packet in upkeep:
            assert packet.shape.rows == 0
            self.device.run(packet)
        self.device.run(step, [twin.writer for twin, _ in growing])
        self._advance(growing)

    def _advance(self, growing):
        self.is_behind = False
        for twin, count in growing:
            twin.grow(twin.length + count, self.plan.page_tokens)
            twin.has_sampled |= count > 0
