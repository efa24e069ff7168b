"""Any sequence of calls, right or wrong, beside the twins, in arenas that are often full."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.host.world import World
from unimem_jax.allocator import Split
from unimem_jax.plan import plan
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, request, window

KIB = 1 << 10


def part(layer, granules, lifetime, stride=1):
    """A part that fills so many granules of its entry."""
    return Part(Site(layer), "kept", (granules * 32,), "float32", lifetime, stride)


STATE, FAR = part(0, 30, REQUEST), part(1, 1, CONTEXT)
WORLDS = {
    "hybrid": lambda: World(plan([STATE, FAR, part(2, 2, window(5))], 22 * KIB, 3)),
    "single tokens": lambda: World(plan([STATE, FAR, part(2, 3, window(4))], 20 * KIB, 1)),
    "two windows": lambda: World(
        plan([FAR, part(2, 2, window(9)), part(3, 1, window(2))], 12 * KIB, 4), rows=4
    ),
    "windows only": lambda: World(
        plan([part(2, 3, window(3)), part(3, 1, window(8))], 6 * KIB, 2), chunk=7, fused=5
    ),
    "a window of one": lambda: World(
        plan([STATE, part(1, 1, window(1)), part(2, 2, window(2))], 18 * KIB, 4), chunk=9, fused=6
    ),
    "attention only": lambda: World(plan([FAR], 5 * KIB, 4), fused=9),
    "state only": lambda: World(plan([STATE], 16 * KIB, 4), rows=4),
    "long pages": lambda: World(plan([STATE, FAR, part(2, 2, window(5))], 31 * KIB, 16)),
    "strides and named state": lambda: World(plan([
        STATE, FAR, part(2, 2, CONTEXT, 4), part(3, 1, window(5), 2), part(4, 30, request("kept"))
    ], 30 * KIB, 4)),
    "split": lambda: World(
        plan([STATE, FAR, part(2, 2, window(5))], 32 * KIB, 3), layout=Split((3, 6, 10))
    ),
}  # fmt: skip
few = st.integers(0, 8)


class MemoryMachine(RuleBasedStateMachine):
    name: str

    @initialize()
    def begin(self):
        self.world = WORLDS[self.name]()
        self.freed = []

    def twins(self, source, **limits):
        known = [*self.world.twins, *self.freed[-1:]] if source.draw(st.booleans()) else []
        known = known or self.world.twins
        return source.draw(st.lists(st.sampled_from(known), **limits)) if known else []

    @rule(limit=st.sampled_from([None, None, 1, 7, 24]))
    def open(self, limit):
        self.world.open(limit)

    @rule(prompt=st.integers(-1, 14), new=st.integers(-1, 12))
    def admit(self, prompt, new):
        self.world.admit(prompt, new)

    @precondition(lambda self: self.world.twins)
    @rule(source=st.data(), most=st.sampled_from([1, 5, 12]), is_wrong=st.integers(0, 9))
    def run(self, source, most, is_wrong):
        twins = self.twins(source, max_size=4, unique_by=None if is_wrong == 0 else id)
        growing = []
        for twin in twins:
            # An admitted request may grow by its own chunks; others by what they like.
            most_here = min(most, self.world.memory.chunk_tokens) if twin.peak else most
            room = most_here if is_wrong <= 1 else min(most_here, twin.limit - twin.length)
            growing.append((twin, source.draw(st.integers(-(is_wrong <= 1), max(0, room)))))
        shape = {}
        if growing and source.draw(st.booleans()):
            shape = {"rows": 5, "tokens": 12, "pages": self.world.memory.tables.row_pages}
        self.world.run(growing, **shape)

    @precondition(lambda self: self.world.twins)
    @rule(source=st.data(), steps=few)
    def decode(self, source, steps):
        self.world.decode(steps, self.twins(source, max_size=3, unique_by=id))

    @precondition(lambda self: any(twin.has_sampled for twin in self.world.twins))
    @rule(source=st.data(), steps=st.integers(1, 3))
    def decode_what_is_ready(self, source, steps):
        ready = [twin for twin in self.world.twins if twin.has_sampled]
        self.world.decode(steps, source.draw(st.lists(st.sampled_from(ready), unique_by=id)))

    @precondition(lambda self: self.world.twins)
    @rule(source=st.data(), is_all=st.booleans(), count=st.integers(0, 20))
    def prefill(self, source, is_all, count):
        for twin in self.twins(source, min_size=1, max_size=1):
            if twin in self.world.twins:
                self.world.prefill(twin, twin.limit - twin.length if is_all else count)

    @precondition(lambda self: self.world.twins)
    @rule(source=st.data())
    def free(self, source):
        for twin in self.twins(source, min_size=1, max_size=1):
            self.world.free(twin)
            self.freed.append(twin)

    @precondition(lambda self: self.world.twins)
    @rule(source=st.data())
    def fork(self, source):
        for twin in self.twins(source, min_size=1, max_size=1):
            self.world.fork(twin)

    @precondition(lambda self: self.world.twins)
    @rule(source=st.data())
    def keep(self, source):
        self.world.keep(source.draw(st.sampled_from(self.world.twins)))

    @precondition(lambda self: self.world.kept)
    @rule(source=st.data(), new=st.sampled_from([None, 0, 3, 12]))
    def resume(self, source, new):
        self.world.resume(source.draw(st.sampled_from(self.world.kept)), new)

    @precondition(lambda self: self.world.kept)
    @rule(source=st.data())
    def let_go(self, source):
        self.world.let_go(source.draw(st.sampled_from(self.world.kept)))

    @rule()
    def catch_up(self):
        self.world.catch_up()

    @rule()
    def retire(self):
        self.world.memory.retire(self.world.memory.ticket)

    @invariant()
    def the_twins_agree(self):
        if hasattr(self, "world"):
            self.world.check()


def machine(name, examples):
    kind = type(f"Machine_{name}", (MemoryMachine,), {"name": name})
    case = kind.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=30)
    return case


class TestMachines:
    @pytest.mark.parametrize("examples", [12, pytest.param(50, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("name", WORLDS)
    def test_memory_follows_its_twins(self, name, examples):
        machine(name, examples)("runTest").runTest()


def traffic(name, seed, calls):
    """Seeded calls, mostly right ones, which reach fuller arenas than short examples do."""
    world, rng = WORLDS[name](), np.random.default_rng(seed)
    pick = lambda: world.twins[int(rng.integers(len(world.twins)))]  # noqa: E731
    for _ in range(calls):
        choice = rng.random()
        if choice < 0.15 or not world.twins:
            world.open()
        elif choice < 0.25:
            world.admit(int(rng.integers(1, 14)), int(rng.integers(0, 10)))
        elif choice < 0.75:
            chosen = [twin for twin in world.twins if rng.random() < 0.8]
            most = world.memory.chunk_tokens if rng.random() < 0.3 else 1
            counts = [min(int(rng.integers(0, most + 1)), t.limit - t.length) for t in chosen]
            world.run(list(zip(chosen, counts, strict=True)))
        elif choice < 0.79:
            world.fork(pick())
        elif choice < 0.82:
            world.keep(pick())
        elif choice < 0.85 and world.kept:
            kept = world.kept[int(rng.integers(len(world.kept)))]
            if rng.random() < 0.5:
                world.let_go(kept)
            else:
                world.resume(kept, None if rng.random() < 0.5 else int(rng.integers(0, 10)))
        elif choice < 0.9:
            steps = int(rng.integers(1, world.memory.fused_steps + 1))
            world.decode(steps, [twin for twin in world.twins if twin.has_sampled])
        else:
            world.free(pick())
        world.check()
    return world


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(4), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WORLDS)
def test_traffic_waits_and_moves_and_loses_nothing(name, seeds):
    worlds = [traffic(name, seed, 250) for seed in seeds]
    moved = sum(sum(world.memory.metrics()["moved_units"]) for world in worlds)
    assert sum(world.waits for world in worlds) > 0, "it never ran out"
    is_movable = name not in ("attention only", "state only", "split")
    assert (moved > 0) == is_movable
    for world in worlds:
        for twin in list(world.twins):
            world.free(twin)
        for kept in list(world.kept):
            world.let_go(kept)
        world.check()
        metrics = world.memory.metrics()
        assert not any(metrics["live"])
        assert not any(metrics["committed"])
        assert metrics["rows"] == 0


def test_more_moves_than_one_packet_carries_leave_in_several():
    """A slot of 128 granules takes the place of pages of one granule."""
    parts = [part(0, 128, REQUEST), part(1, 1, CONTEXT), part(2, 1, window(150))]
    full = 0
    for size, seed in ((80, 2), (96, 1), (128, 0)):
        world = World(plan(parts, size * KIB, 1), rows=4, context=150, chunk=40, fused=9)
        rng = np.random.default_rng(seed)
        for _ in range(40):
            if rng.random() < 0.3:
                world.open()
                # Alone, so that its packet has little room for the new addresses of the others.
                world.run([(twin, 1) for twin in world.twins[-1:] if not twin.length])
                world.check()
            for twin in list(world.twins):
                if rng.random() < 0.05:
                    world.free(twin)
            counts = [min(int(rng.integers(0, 30)), t.limit - t.length) for t in world.twins]
            world.run(list(zip(world.twins, counts, strict=True)))
            world.check()
        full += world.device.full_moves
    assert full > 0, "every batch fitted into one packet"
