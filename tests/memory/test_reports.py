"""Faults that were reported in public, as small scenarios; docstrings begin with their number."""

import itertools
import random

import numpy as np
import pytest

from tests.memory.scenes import (
    CONTEXT,
    SLOT,
    THREE,
    WINDOW,
    address,
    grant,
    states,
    two,
)
from unimem_jax.allocator import Allocator, number_of
from unimem_jax.bands import Geometry, fits
from unimem_jax.errors import NeverFits, OutOfMemory, UsageError
from unimem_jax.spec import window


def test_two_ranges_that_meet_inside_a_page_free_it_once():
    """A3: pages of 8; tokens [8, 12) and [12, 22) share one."""
    for cap, length in itertools.product((4, 8, 12, 16, 20), range(4, 25)):
        memory = two(16, 1, 1, is_slot=False)
        pages = grant(memory, 1, -(-length // 8))
        kept = min(cap, length) // 8
        first = range(kept, -(-min(cap, length) // 8))
        second = range(min(cap, length) // 8, len(pages))
        both = sorted(set(first) | set(second))
        if first and first[-1] in second:
            with pytest.raises(UsageError, match="twice"):
                memory.free([pages[page] for page in [*first, *second]])
        if both:
            memory.free([pages[page] for page in both])
        assert memory.live(1) == kept
        memory.check()


def test_a_repaired_page_is_a_new_id_and_the_old_one_frees_nothing_of_it():
    """A4: the window page that was let go has a new owner when the old node is freed."""
    memory = Allocator(THREE)
    node = memory.grant_page(committed=False)
    memory.drop(node, WINDOW)
    repaired = memory.grant_page(committed=False)
    place = address(memory, WINDOW, repaired)
    assert address(memory, WINDOW, node) == THREE.unit_counts[WINDOW]
    memory.free(node)
    assert memory.live(WINDOW) == 1
    assert place not in [address(memory, WINDOW, id_) for id_ in grant(memory, WINDOW, 3)]
    memory.check()


@pytest.mark.parametrize("page", [1, 4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 3, 4, 8, 9, 10, 64])
def test_a_window_keeps_what_the_next_query_sees_and_never_more_pages_than_its_bound(page, tokens):
    """A5, A6, A9: query q sees keys q - W + 1 to q, wherever the window starts within a page."""
    kept_most = 0
    for length in range(1, 200):
        first = window(tokens).first_kept(length) // page
        seen = range(max(0, length - tokens + 1), length + 1)
        assert first <= seen[0] // page
        kept_most = max(kept_most, seen[-1] // page - first + 1)
    assert kept_most == (tokens + 2 * page - 2) // page


def test_a_mapping_is_never_rebound_under_a_live_id():
    """A7: so a free that was queued by id cannot meet another page than it meant."""
    memory = Allocator(THREE)
    id_ = memory.grant_page(committed=False)
    with pytest.raises(UsageError):
        memory.map_more(id_, WINDOW, committed=False)
    memory.drop(id_, WINDOW)
    with pytest.raises(UsageError):
        memory.map_more(id_, WINDOW, committed=False)


@pytest.mark.parametrize("wrong", [-1, 2**31 - 1, 2**31, 2**32, 2**32 + 5, 2**63, 2**64])
def test_a_value_that_no_table_holds_is_refused_before_anything_is_read(wrong):
    """A8: none is cut down to 32 bits on the way."""
    memory = Allocator(THREE)
    memory.grant_pages(6, committed=False)
    before = states(memory)
    calls = [
        lambda: memory.drop(wrong, CONTEXT),
        lambda: memory.drop([wrong], CONTEXT),
        lambda: memory.free(wrong),
        lambda: memory.free([0, wrong]),
        lambda: memory.share([wrong], CONTEXT),
        lambda: memory.map_more([wrong], WINDOW, committed=False),
        lambda: memory.ledger.pin(CONTEXT, wrong, "copy"),
        lambda: memory.unpin(CONTEXT, wrong, "copy"),
        lambda: memory.drop(0, wrong),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()
    with pytest.raises(UsageError if wrong < 0 else NeverFits):
        memory.commit([0, 0, wrong])
    assert states(memory) == before


def test_an_arena_whose_addresses_do_not_fit_32_bits_is_refused():
    """A8: absent is one past the last address, and goes to the device as an int32 too."""
    Geometry(2**31 - 1, (1,), ("low",), (False,), 2**31 - 1)
    for arena, ids in ((2**31, 5), (5, 2**31)):
        with pytest.raises(UsageError, match="32 bits"):
            Geometry(arena, (1,), ("low",), (False,), ids)


def test_a_hundred_failed_admissions_lose_no_slot():
    """A10: what was taken for a request goes back when the rest of it does not fit."""
    memory = Allocator(THREE)
    grant(memory, CONTEXT, 14)
    for _ in range(100):
        slot = memory.grant_slot(SLOT, committed=False)
        with pytest.raises(OutOfMemory):
            grant(memory, CONTEXT, 5)
        memory.drop(slot, SLOT)
        assert memory.metrics()["live"] == [0, 0, 14]
        memory.check()
    assert memory.fits([3, 0, 0])


@pytest.mark.parametrize("first", range(1, 81, 7))
def test_admission_counts_pages_and_no_grant_fails_after_it(first):
    """A22: pages of 16 tokens, five of them."""
    for second in range(1, 81):
        memory = two(5, 1, 1, is_slot=False)
        running = []
        for tokens in (first, second):
            pages = -(-tokens // 16)
            if memory.fits([0, pages]):
                memory.commit([0, pages])
                running.append(pages)
        assert len(running) == 1 + (-(-first // 16) - (-second // 16) <= 5)
        for pages in running:
            memory.grant_pages(pages, [1])


def test_windows_are_evicted_where_windows_are_short():
    """A23: context pages of the same nodes stay cached."""
    geometry = Geometry(64 + 8 * 8, (8, 1), ("low", "high"), (False, False), 128)
    memory = Allocator(geometry)
    nodes = memory.grant_pages(8, committed=False).tolist()
    grant(memory, 1, 56)
    assert not memory.fits([3, 0])
    assert memory.drop(nodes[:3], 0) == 3
    assert memory.fits([3, 0])
    grant(memory, 0, 3)
    assert memory.live(1) == 64


def test_a_window_that_slides_over_shared_pages_leaves_the_share_of_the_others():
    """A31: the prefix shares the pages that A inserted; A slides on."""
    memory = Allocator(THREE)
    pages = memory.grant_pages(4, committed=False).tolist()
    for pool in (WINDOW, CONTEXT):
        memory.share(pages, pool)  # the prefix
    assert memory.drop(pages[:2], WINDOW) == 0  # A
    assert memory.live(WINDOW) == 4
    memory.share(pages[:2], WINDOW)  # B hits the prefix
    memory.drop(pages[2:], WINDOW)
    memory.drop(pages, CONTEXT)  # A ends
    assert memory.drop(pages, WINDOW) == 2  # the prefix evicts; B still holds two
    memory.check()


def test_an_empty_float_takes_no_room_and_is_not_rounded():
    """An empty float between bands that meet: nothing is lost to its grid."""
    geometry = Geometry(11, (3, 4, 2), ("low", "float", "high"), (True, False, False), 5)
    assert fits(geometry, (1, 0, 3))
    memory = Allocator(geometry)
    grant(memory, SLOT, 1), grant(memory, CONTEXT, 3)
    memory.check()


def test_what_is_absent_is_one_past_the_last_address_and_never_minus_one():
    memory = Allocator(THREE)
    memory.grant_pages(3, [CONTEXT], committed=False)
    for pool, (ids, addresses) in enumerate(memory.take_changes()):
        if pool != SLOT:
            assert len(ids) == 3
            assert (addresses == THREE.unit_counts[pool]).all() == (pool == WINDOW)
        assert (memory.mapping[pool] >= 0).all()
        assert np.max(memory.mapping[pool]) <= THREE.unit_counts[pool]


class Drafting:
    """A request that drafts three tokens ahead, in pages of 4, with a window of 8 tokens."""

    def __init__(self, memory, prompt, donor=None):
        self.memory, self.length, self.ids, self.first = memory, prompt, [], 0
        if donor is not None and not donor.first:
            self.ids = donor.ids[: prompt // 4]
            memory.share(self.ids, 0)
            memory.share(self.ids, 1)
        self.reach(prompt)

    def reach(self, tokens):
        lack = max(0, -(-tokens // 4) - len(self.ids))
        self.ids += self.memory.grant_pages(lack, committed=False).tolist()

    def step(self, accepted):
        self.reach(self.length + 1 + 3)  # drafts may all be accepted: the bound above
        self.length += 1 + accepted
        kept = window(8).first_kept(self.length) // 4  # of what is accepted: the bound below
        if kept > self.first:
            self.memory.drop(self.ids[self.first : kept], 0)
            self.first = kept

    def end(self):
        self.memory.drop(self.ids[self.first :], 0)
        self.memory.drop(self.ids, 1)


def test_drafts_over_windows_with_shared_prefixes_and_aborts_lose_no_page():
    """A12: recounted after every step, not only when idle."""
    rng = random.Random(3)
    memory, running = two(900, 1, 1, is_slot=False), []
    for _ in range(200):
        donor = rng.choice(running) if running and rng.random() < 0.5 else None
        most = donor.length if donor else 40
        running.append(Drafting(memory, rng.randint(1, most), donor))
        for request in list(running):
            request.step(rng.randint(0, 3))
            if rng.random() < 0.2 or request.length > 60:
                running.remove(request)
                request.end()
        windows = {id_ for request in running for id_ in request.ids[request.first :]}
        pages = {id_ for request in running for id_ in request.ids}
        assert [memory.live(0), memory.live(1)] == [len(windows), len(pages)]
        memory.check()
    for request in running:
        request.end()
    assert memory.metrics()["live"] == [0, 0]
    assert memory.pages.free_count == 900


def test_what_can_be_evicted_is_what_the_cache_alone_holds_after_every_call():
    """A11: a split moves no count, since pages are counted one by one and nodes hold none."""
    rng, memory = random.Random(4), two(60, 1, 1, is_slot=False)
    stored, locks = [], []  # pages of the cache; lists of pages that a request holds as well
    for _ in range(5000):
        name = rng.choice(["insert", "match", "unlock", "evict"])
        if name == "insert" and memory.fits([0, 4]):
            stored += memory.grant_pages(4, [1], committed=False).tolist()
        elif name == "match" and stored and len(locks) < 8:
            locks.append(stored[: rng.randint(1, len(stored))][-6:])
            memory.share(locks[-1], 1)
        elif name == "unlock" and locks:
            assert memory.drop(locks.pop(rng.randrange(len(locks))), 1) == 0
        elif name == "evict":
            locked = set(itertools.chain(*locks))
            gone = [id_ for id_ in stored if id_ not in locked][-4:]
            assert memory.drop(gone, 1) == len(gone)
            stored = [id_ for id_ in stored if id_ not in gone]
        sharers = memory.tables[1].sharers[number_of(np.array(stored, np.int64))]
        locked = set(itertools.chain(*locks))
        assert (sharers == 1).sum() == len(stored) - len(locked)
        assert memory.live(1) == len(stored)
    memory.check()
