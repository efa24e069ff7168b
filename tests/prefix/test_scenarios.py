"""Public faults of prefix caches, one sequence each; numbers as in SCENARIOS where there is one."""

import pytest

from tests.prefix.world import Running, World
from unimem_jax.allocator import Split
from unimem_jax.errors import UsageError


def computed(world, tokens, namespace=None, chunks=None):
    """A request that has computed `tokens` without the cache, chunk by chunk."""
    one = Running([], world.memory.open(), list(tokens), namespace)
    for count in chunks or [len(tokens)]:
        extend(world, one, tokens[len(one.tokens) : len(one.tokens) + count])
    world.running.append(one)
    return one


def extend(world, one, tokens):
    growth = world.memory.prices.growth(len(one.tokens), len(one.tokens) + len(tokens))
    assert world.cache.evict(growth)
    world.memory.skip([one.request], [len(tokens)])
    one.tokens += tokens
    world.write(one)


def cached(world, tokens, namespace=None):
    world.publish(computed(world, tokens, namespace), is_leaving=True)


def numbers(start, count):
    return list(range(start, start + count))


def slots_and_pages(world):
    """Demands of one slot, one page of each window and one of whole contexts, as the kind has."""
    pools = world.plan.sub_pools
    return {
        pool.lifetime.kind: tuple(int(i == pool.index) for i in range(len(pools))) for pool in pools
    }


def test_room_for_a_slot_evicts_as_many_pages_as_it_takes():
    """T1, A1: one kind starves while another has evictable pages."""
    world = World("state", 4, 160 << 10)
    one = computed(world, numbers(0, 8))
    cached(world, numbers(100, 60))
    cached(world, numbers(200, 60))
    demand = tuple(world.memory.prices.growth(0, 4))
    while world.allocator.fits(demand):
        world.allocator.grant_pages(1, committed=False)
    before = list(world.allocator.held)
    assert world.evict(demand)
    freed = [was - now for was, now in zip(before, world.allocator.held, strict=True)]
    assert sum(freed), "nothing had to go"
    assert world.match([*numbers(0, 8), 1]).length == 0
    world.write(one)


def test_one_victim_that_is_enough_is_the_only_one():
    """T3: the demand fits after the first victim of fifty."""
    world = World("whole", 1, 60 * 256)
    cached(world, numbers(0, 50))
    held = world.allocator.held[0]
    while world.allocator.fits((1,)):
        world.allocator.grant_pages(1, committed=False)
    assert world.evict((1,))
    assert world.cache.metrics()["evicted"] == 1
    assert world.match([*numbers(0, 50), 0]).length == held - 1


@pytest.mark.parametrize("page_tokens", [1, 4, 8, 16])
def test_a_mark_at_a_page_end_resumes_there_whatever_the_window(page_tokens):
    """A5: pages larger than the window."""
    world = World("window", page_tokens, 256 << 10)
    one = computed(world, numbers(0, 16))
    world.publish(one)
    extend(world, one, numbers(16, 4))
    world.publish(one, is_leaving=True)
    assert world.match(numbers(0, 17)).length == 16
    assert world.match(numbers(0, 20)).length in (16, 19)


def test_no_room_for_a_checkpoint_skips_it():
    """T19: every slot runs; what was kept without one is worth nothing and goes first."""
    world = World("state", 4, 40 << 10)
    every = [computed(world, numbers(100 * at, 6)) for at in range(5)]
    filler = []
    while world.allocator.fits((0, 1)):
        filler.append(world.allocator.grant_pages(1, committed=False))
    assert not world.allocator.fits((1, 0))
    for one in every:
        assert world.publish(one) is False
        assert world.match([*one.tokens, 0]).length == 0
    assert world.cache.metrics()["checkpoints_skipped"] == 5
    assert world.publish(every[0], is_leaving=True)
    assert world.match([*numbers(0, 6), 0]).length == 6


def test_windows_go_and_whole_contexts_stay():
    """A23: only pages of windows are short, and whole contexts may stay."""
    world = World("window", 4, 64 << 10, layout=Split((8, 24)))
    for start in (0, 100, 200):
        cached(world, numbers(start, 20))
    held = list(world.allocator.held)
    window = slots_and_pages(world)["window"]
    free = 8 - held[0]
    assert world.evict(tuple(n * (free + 2) for n in window))
    assert world.allocator.held[0] < held[0]
    assert world.allocator.held[1] == held[1], "pages of whole contexts went for nothing"


def test_what_a_request_holds_outlives_the_eviction_of_everything_else():
    """A24: the node that is held is protected itself, not only those above it."""
    world = World("whole", 4, 64 << 10)
    one = computed(world, numbers(0, 8))
    world.publish(one)
    cached(world, numbers(0, 16))
    everything = tuple(p.unit_count - 2 for p in world.plan.sub_pools)
    assert world.evict(everything)
    assert not world.evict(tuple(n + 1 for n in everything)), "a running request's page counts"
    world.write(one)
    assert world.match([*numbers(0, 16)]).length == 8
    world.end(one)
    assert world.evict(tuple(n + 2 for n in everything))
    assert not any(world.allocator.held)


def test_a_hit_is_what_every_window_can_serve():
    """A25: the smaller window has slid on, the larger has not."""
    world = World("windows alone", 4, 64 << 10)
    one = computed(world, numbers(0, 20))
    for token in numbers(20, 20):
        extend(world, one, [token])
    world.publish(one, is_leaving=True)
    assert world.match([*numbers(0, 12), 99, 98]).length == 0
    assert world.match(numbers(0, 41)).length == 40


def test_tokens_decide_and_not_their_hashes():
    """A30: in Python -1 and -2 have one hash, and equal hashes are no hit."""
    world = World("whole", 1)
    one = computed(world, numbers(0, 3))
    assert hash((-1,)) == hash((-2,))
    assert world.cache.publish([-1, -1, -1], one.request.ids)
    assert world.cache.match([-2, -2, -2, 0]).length == 0
    assert world.cache.match([-1, -1, -1, 0]).length == 3


def test_a_window_that_slides_takes_nothing_from_the_tree():
    """A31: the request decodes on after its prompt was kept."""
    world = World("window", 4, 64 << 10)
    one = computed(world, numbers(0, 16))
    world.publish(one)
    for token in numbers(16, 44):
        extend(world, one, [token])
        assert world.match([*numbers(0, 16), 99]).length == 16
    world.end(one)
    assert world.match([*numbers(0, 16), 99]).length == 16


def test_running_state_resumes_exactly_where_it_was_kept():
    """A35: checkpoints at 16 and 32 of 40 tokens; a state cannot be trimmed."""
    world = World("hybrid", 4, 256 << 10)
    one = computed(world, numbers(0, 16))
    world.publish(one)
    extend(world, one, numbers(16, 16))
    world.publish(one)
    extend(world, one, numbers(32, 8))
    world.publish(one, is_leaving=True)
    assert world.match([*numbers(0, 24), 99, 98]).length == 16
    assert world.match([*numbers(0, 15), 99]).length == 0
    assert world.match(numbers(0, 40)).length == 32
    assert world.match(numbers(0, 41)).length == 40


def test_conversations_in_turn_keep_their_windows():
    """A36: four conversations, three turns each."""
    world = World("window", 4, 96 << 10)
    talks = [numbers(100 * at, 16) for at in range(4)]
    for turn in range(3):
        for talk in talks:
            match = world.match([*talk, 99])
            assert match.length == (0 if turn == 0 else len(talk) - 8)
            cached(world, talk)
            talk += numbers(talk[0] + 50 + 8 * turn, 8)
            talk[-8:] = numbers(talk[0] + 20 + 8 * turn, 8)


def test_namespaces_are_told_apart_by_what_they_are():
    """A37: a salt and an adapter of the same name are not the same."""
    world = World("state", 4, 256 << 10)
    spaces = [(None, None), ("x", None), (None, "x"), ("x", "x"), "x", None]
    for at, space in enumerate(spaces):
        assert world.match([*numbers(0, 12), 99], space).length == 0
        cached(world, numbers(0, 12), space)
        assert world.match([*numbers(0, 12), 99], space).length == 12
        assert world.cache.tree.node_count == 3 * (at + 1)


def test_pages_without_the_state_are_no_hit():
    """A39: the checkpoint went, the pages are still there."""
    world = World("state", 4, 64 << 10)
    cached(world, numbers(0, 32))
    node = world.match(numbers(0, 33)).node
    world.cache.tree.clear_mark(node)
    match = world.match(numbers(0, 33))
    assert (match.length, match.known) == (0, 32)


def test_a_page_that_comes_again_is_held_once():
    """Two requests compute the same tokens: once neither runs, one copy is left."""
    world = World("hybrid", 4, 256 << 10)
    first, second = computed(world, numbers(0, 14)), computed(world, numbers(0, 14))
    world.publish(first)
    world.publish(second)
    world.publish(first, is_leaving=True)
    world.publish(second, is_leaving=True)
    assert world.allocator.held == list(world.memory.prices.held(14))


def test_eviction_that_cannot_help_takes_nothing():
    """What fits already, and what no empty arena holds, evict nothing."""
    world = World("hybrid", 4, 64 << 10)
    cached(world, numbers(0, 14))
    none = (0,) * len(world.plan.sub_pools)
    assert world.evict(none)
    assert not world.evict(tuple(pool.unit_count + 1 for pool in world.plan.sub_pools))
    assert world.match(numbers(0, 15)).length == 14


@pytest.mark.parametrize("wrong", range(7))
def test_wrong_calls_say_what_is_wrong_and_change_nothing(wrong):
    world = World("hybrid", 4, 64 << 10)
    one = computed(world, numbers(0, 14))
    gone = computed(world, numbers(50, 14))
    ids, slots = list(gone.request.ids), list(gone.request.slots)
    world.end(gone)
    tokens, cache, request = one.tokens, world.cache, one.request
    calls = [
        lambda: cache.publish([], []),
        lambda: cache.publish(tokens, request.ids[:-1], request.slots),
        lambda: cache.publish(tokens, request.ids, []),
        lambda: cache.publish(tokens, ids, request.slots),
        lambda: cache.publish(tokens, request.ids, slots),
        lambda: cache.publish(tokens, request.ids, request.slots, namespace=["x"]),
        lambda: cache.match(tokens, {}, None),
    ]
    held = list(world.allocator.held)
    with pytest.raises(UsageError):
        calls[wrong]()
    assert world.allocator.held == held
    assert not list(cache.tree.nodes())
    world.check()
    with pytest.raises(UsageError):
        cache.match(tokens, None, -1)
    with pytest.raises(UsageError):
        cache.evict((1,))
