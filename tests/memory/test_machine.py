"""Any sequence of calls, right or wrong, against the dictionary twins, in arenas where running out
is common.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests import sim
from tests.memory.world import UNIFIED, Split, World
from unimem_jax.bands import Geometry

GEOMETRIES = [
    Geometry(12, (3, 1, 2), ("low", "float", "high"), (True, False, False), 12),
    Geometry(20, (4, 3, 2), ("low", "float", "high"), (True, False, False), 10),
    Geometry(17, (2, 3), ("low", "high"), (False, False), 8),
    Geometry(22, (5, 3, 2, 2), ("low", "float", "float", "high"), (True, True, False, False), 11),
    Geometry(15, (4, 2), ("low", "float"), (True, False), 7),
    Geometry(9, (2,), ("low",), (False,), 4),
]
few = st.integers(0, 3)
flag = st.booleans()


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(
        geometry=st.sampled_from(GEOMETRIES), is_split=st.sampled_from([False, False, True])
    )
    def begin(self, geometry, is_split):
        share = geometry.arena_granules // len(geometry.ends)
        caps = tuple(max(0, share // unit - 1) for unit in geometry.unit_granules)
        self.world = World(geometry, Split(caps) if is_split else UNIFIED)
        self.pages = self.world.page_pools
        self.states = [i for i in self.world.sub_pools if geometry.is_slot[i]]

    def pick(self, source, pool):
        return source.draw(st.sampled_from(self.world.live(pool)))

    @rule(source=st.data(), count=few, is_committed=flag)
    def grant_pages(self, source, count, is_committed):
        pools = source.draw(st.lists(st.sampled_from(self.pages), min_size=1, unique=True))
        is_single = count == 1 and source.draw(flag)
        self.world.grant_pages(count, pools, is_committed, is_single)

    @precondition(lambda self: self.states)
    @rule(source=st.data(), is_committed=flag)
    def grant_slot(self, source, is_committed):
        self.world.grant_slot(source.draw(st.sampled_from(self.states)), is_committed)

    @precondition(lambda self: self.world.pages())
    @rule(source=st.data(), is_committed=flag)
    def map_more(self, source, is_committed):
        ids = source.draw(st.lists(st.sampled_from(self.world.pages()), min_size=1, unique=True))
        self.world.map_more(ids, source.draw(st.sampled_from(self.pages)), is_committed)

    @precondition(lambda self: self.world.contents)
    @rule(source=st.data(), is_committed=flag)
    def copy(self, source, is_committed):
        pool, id_ = source.draw(st.sampled_from(sorted(self.world.contents)))
        self.world.copy([id_], [pool], is_committed)

    @rule(source=st.data(), is_single=flag, is_share=flag)
    def share_or_drop(self, source, is_single, is_share):
        pool = source.draw(st.sampled_from(self.world.sub_pools))
        known = st.integers(0, self.world.geometry.id_counts[pool] - 1)
        live = self.world.live(pool)
        ids = source.draw(
            st.lists(st.sampled_from(live) if live else known, max_size=3, unique=is_share)
        )
        if is_share:
            self.world.share(ids, pool)
        else:
            self.world.drop(ids, pool, is_single and len(ids) == 1)

    @rule(source=st.data(), is_single=flag)
    def free(self, source, is_single):
        known = st.integers(0, self.world.geometry.id_count - 1)
        live = self.world.pages()
        ids = source.draw(st.lists(st.sampled_from(live) if live else known, max_size=4))
        self.world.free(ids, is_single and len(ids) == 1)

    @rule(source=st.data(), name=st.sampled_from(["commit", "uncommit", "make_room"]))
    def promise(self, source, name):
        count = len(self.world.geometry.ends)
        getattr(self.world, name)(source.draw(st.lists(few, min_size=count, max_size=count)))

    @rule(
        source=st.data(),
        name=st.sampled_from(["pin", "fence"]),
        user=st.sampled_from(["copy", "peer"]),
    )
    def pin(self, source, name, user):
        pool = source.draw(st.sampled_from(self.world.sub_pools))
        if self.world.live(pool):
            getattr(self.world, name)(pool, self.pick(source, pool), user)

    @precondition(lambda self: self.world.pins)
    @rule(source=st.data())
    def unpin(self, source):
        place = source.draw(st.sampled_from(sorted(self.world.pins)))
        self.world.unpin(place, self.world.pins[place][-1])

    @rule(most_bytes=st.sampled_from([0, 128, 400, 10**6]))
    def compact(self, most_bytes):
        self.world.compact(most_bytes)

    @rule()
    def step(self):
        self.world.step()

    @rule()
    def retire(self):
        self.world.retire()

    @invariant()
    def every_invariant_holds(self):
        if hasattr(self, "world"):
            self.world.check()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestAllocatorMachineAtLength(AllocatorMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def test_a_seeded_simulation_finds_nothing():
    totals = sim.run(seed=0, steps=300_000)
    assert totals["moved_units"] > 1000, "hardly ever had to move anything"
    for reason in ("bytes", "ids", "pins", "never"):
        assert totals[f"refused for {reason}"] > 300, f"hardly ever refused for {reason}"
    assert totals["copied_bytes"] > 100_000, "hardly ever copied anything"
    assert all(totals[fault] > 1000 for fault in sim.FAULTS), "a fault hardly happened"


@pytest.mark.slow
def test_a_seeded_simulation_of_a_million_steps_finds_nothing():
    sim.run(seed=1, steps=1_000_000)


def test_a_failing_simulation_prints_the_line_that_repeats_it(monkeypatch):
    def broken(world, rng):
        raise ValueError("planted")

    monkeypatch.setattr(sim, "one_call", broken)
    with pytest.raises(ValueError) as caught:
        sim.run(seed=7, steps=10)
    assert caught.value.__notes__ == [
        "repeat with: python -m tests.sim --seed 7 --begin 0 --steps 1"
    ]


def test_a_failure_far_into_a_simulation_repeats_from_the_world_that_failed(monkeypatch):
    calls = []

    def broken(world, rng):
        calls.append(rng.random())
        if len(calls) == 2345:
            raise ValueError("planted")

    monkeypatch.setattr(sim, "one_call", broken)
    with pytest.raises(ValueError) as caught:
        sim.run(seed=7, steps=10_000, faults=("clog",))
    (note,) = caught.value.__notes__
    assert note.endswith("python -m tests.sim --seed 7 --begin 2000 --steps 2345 --fault clog")
    before = calls[2000:]
    calls[:] = [None] * 2000
    with pytest.raises(ValueError):
        sim.main(note.split()[5:])
    assert calls[2000:] == before


@pytest.mark.parametrize("fault", sim.FAULTS)
def test_each_fault_alone_is_survived(fault, capsys):
    sim.main(["--seed", "3", "--steps", "2000", "--fault", fault])
    assert f"{fault}=" in capsys.readouterr().out
