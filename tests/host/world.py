"""Every call of `Memory` beside its twins: the pages that each request must hold, the capacity that
must be left, and what each entry of the arena must hold after the packets ran.
"""

from collections import deque
from dataclasses import dataclass, is_dataclass

import numpy as np

from tests.host.twin import Device, code, completing, pages_during, pages_held
from tests.memory.twin import packs_fast
from unimem_jax.allocator import number_of
from unimem_jax.errors import OutOfMemory, UsageError
from unimem_jax.memory import Memory
from unimem_jax.packet import Packet
from unimem_jax.plan import Plan
from unimem_jax.requests import Request, Work

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


@dataclass
class Twin:
    """What a request is, without looking into it."""

    request: Request
    serial: int
    limit: int
    length: int = 0
    peak: tuple[int, ...] | None = None


class World:
    """One memory, one twin of the device, and the requests between them."""

    def __init__(self, plan, *, rows=5, context=24, chunk=5, fused=3, layout="unified"):
        self.plan, self.rows, self.context, self.layout = plan, rows, context, layout
        self.memory = Memory(
            plan, rows, context, chunk_tokens=chunk, fused_steps=fused, layout=layout
        )
        self.device = Device(plan, rows, context)
        self.twins = []
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

    def claims(self, growing=(), fused=False):
        """Units that everything claims: held, committed, and what a step is to add."""
        targets = {twin.serial: twin.length + count for twin, count in growing}
        total = np.zeros(len(self.plan.sub_pools), np.int64)
        for twin in self.twins:
            target = targets.get(twin.serial, twin.length)
            during = self.growth(twin.length, target, fused)
            total += np.maximum(during, twin.peak) if twin.peak else np.array(during)
        return total.tolist()

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
            self.device.run(packet, [twin.serial] if packet.shape.rows else ())
        twin.length += count if packets else 0

    def decode(self, steps, twins):
        growing = [(twin, min(steps, twin.limit - twin.length)) for twin in twins]
        is_wrong = self._is_wrong(growing) or not twins or any(t.length == 0 for t in twins)
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
                self.device.run(one, [t.serial for t in twins] if one.shape.rows else ())
        for twin, count in growing:
            twin.length += count if packets else 0

    def free(self, twin):
        self.attempt(lambda: self.memory.free(twin.request), is_wrong=twin not in self.twins)
        if twin in self.twins:
            self.twins.remove(twin)

    def check(self):
        """All that the twins know, after every call."""
        self.memory.check()
        allocator = self.memory.allocator
        held = np.zeros(len(self.plan.sub_pools), np.int64)
        committed = np.zeros_like(held)
        for twin in self.twins:
            mine = np.array(self.held(twin.length))
            held += mine
            committed += np.maximum(0, np.array(twin.peak) - mine) if twin.peak else 0
            assert twin.request.length == twin.length
        assert [allocator.live(pool.index) for pool in self.plan.sub_pools] == held.tolist()
        assert allocator.committed == committed.tolist()
        assert self.memory.free_rows == self.rows - len(self.twins)
        self.device.poison_all_but(list(self._live_entries()))

    def _live_entries(self):
        """Granules of every entry that a later query sees, checked to hold their own code."""
        mapping = self.memory.allocator.mapping
        for twin in self.twins:
            request = twin.request
            for pool in self.plan.token_pools:
                for at in completing(pool, pool.lifetime.first_kept(twin.length), twin.length):
                    page, offset = divmod(at, self.plan.page_tokens)
                    address = self.device.page_address(pool, request.row, page)
                    assert address == mapping[pool.index][number_of(request.ids[page])]
                    entry = self.device.entry(pool, address, offset)
                    assert (self.device.cells[entry] == code(twin.serial, at, pool.index)).all()
                    yield entry
            for pool, id_ in zip(self.plan.slot_pools, request.slots, strict=False):
                slot = number_of(id_)
                address = self.device.address(pool, slot)
                assert address == mapping[pool.index][slot]
                entry = self.device.entry(pool, address, 0)
                wanted = code(twin.serial, twin.length, pool.index)
                assert (self.device.cells[entry] == wanted).all()
                yield entry

    def _add(self, request, limit):
        self.serial += 1
        self.twins.append(Twin(request, self.serial, limit))
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
        self.device.run(step, [twin.serial for twin, _ in growing])
        for twin, count in growing:
            twin.length += count
