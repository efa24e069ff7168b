"""Check mode: whoever decides by the free units of one sub-pool is noted."""

import random

import pytest

from tests import sim
from tests.memory.recount import Recount
from unimem_jax import holdings as home
from unimem_jax.allocator import Allocator
from unimem_jax.bands import Geometry
from unimem_jax.capacity import Capacity
from unimem_jax.layout import Layout
from unimem_jax.plan import plan
from unimem_jax.schedule import Limits
from unimem_jax.simulate import simulate
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, window
from unimem_jax.watch import watch

GEOMETRY = Geometry(40, (4, 3, 2), ("low", "float", "high"), (True, False, False), 20)


def serve(monkeypatch):
    """A whole run of the scheduler in a tight arena. Returns the notes of its allocator."""
    notes = []

    def watched(*arguments):
        allocator = Allocator(*arguments)
        notes.append(watch(allocator))
        return allocator

    monkeypatch.setattr(home, "Allocator", watched)
    parts = [
        Part(Site(0), "key", (512,), "uint8", CONTEXT),
        Part(Site(1), "key", (512,), "uint8", window(64)),
        Part(Site(2), "state", (8192,), "uint8", REQUEST),
    ]
    lengths = [(20 + 37 * i % 90, 10 + 11 * i % 50) for i in range(14)]
    found = simulate(lengths, plan(parts, 512 << 10), Limits(8, 96, 32))
    assert found.retractions, "the arena was not tight"
    return [line for found in notes for line in found]


def test_no_decision_of_a_served_trace_reads_a_free_count(monkeypatch):
    assert serve(monkeypatch) == []


def by_one_band(self, counts, more=(0,) * 9):
    """A planted breach: asks each band for holes."""
    return all(band.hole_count >= count for band, count in zip(self.bands, more, strict=False))


def by_live_and_holes(self, demand):
    """A planted breach: knows better than `fits`."""
    return all(count <= self.layout.bands[i].hole_count + 99 for i, count in enumerate(demand))


@pytest.mark.parametrize(
    "owner, breach",
    [(Layout, by_one_band), (Capacity, by_live_and_holes)],
    ids=["one", "other"],
)
def test_a_planted_decision_by_one_sub_pool_is_noted_with_its_place(owner, breach, monkeypatch):
    allocator = Allocator(GEOMETRY)
    notes = watch(allocator)
    monkeypatch.setattr(owner, "fits", breach)
    allocator.fits([0, 1, 0])
    assert notes
    assert f"test_watch.py:{breach.__code__.co_firstlineno + 2}" in notes[0]
    assert notes[0].endswith("reads the holes of one band")


def test_a_number_of_holes_taken_from_the_metrics_is_noted_and_a_report_is_not():
    allocator = Allocator(GEOMETRY)
    notes = watch(allocator)
    report = {"rows": 3, **allocator.metrics()}
    assert "holes" in str(report)
    assert report["live"][0] == 0
    assert notes == []
    assert report["holes"][2] >= 0
    assert sum(report["holes"]) >= 0
    assert [line.endswith("from the metrics") for line in notes] == [True, True]


def test_an_allocator_under_watch_does_the_same(monkeypatch):
    """The same seeded calls, watched and not, with every check of the simulation."""
    begin = Recount.__init__

    def watched(self, *arguments):
        begin(self, *arguments)
        watch(self.allocator)

    worlds = []
    for init in (begin, watched):
        monkeypatch.setattr(Recount, "__init__", init)
        rng = random.Random(5)
        world = sim.random_world(rng)
        for _ in range(600):
            sim.one_call(world, rng)
        world.check()
        worlds.append(world)
    assert worlds[0].snapshot() == worlds[1].snapshot()
    assert worlds[0].sharers == worlds[1].sharers
