"""Bugs planted in the prefix cache: its twins must catch each of them."""

import pytest

from tests.planted import Bug
from tests.prefix.test_machine import live
from tests.prefix.world import World
from unimem_jax.errors import UnimemError
from unimem_jax.prefix import PrefixCache
from unimem_jax.prefix_tree import PrefixTree


def blind_to_windows(_):
    return lambda self, node, length: True


def counts_only(original):
    def _keep_slots(self, node, slots, is_leaving):
        return original(self, node, slots, True)

    return _keep_slots


def one_space(original):
    return lambda self, tokens, namespace, most: original(self, tokens, None, most)


def one_space_kept(original):
    return lambda self, tokens, ids, _, is_leaving: original(self, tokens, ids, None, is_leaving)


def windows_of_another(original):
    def set_mark(self, node, ids):
        original(self, node, [above.id for above in node.up()][::-1])

    return set_mark


def windows_kept_for_ever(_):
    def clear_mark(self, node):
        for pool, slot in zip(self.states, node.mark, strict=False):
            self._give(pool, slot)
        node.mark = None

    return clear_mark


def mark_forgotten(original):
    def remove(self, leaf):
        parent = original(self, leaf)
        parent.is_queued = True
        return parent

    return remove


def any_of_them_is_enough(original):
    return lambda self, demand, below=1e9: original(self, tuple(n + 1 for n in demand), below)


def every_share_is_free(_):
    return lambda self: tuple(int((kept > 0).sum()) for kept in self.kept)


def loses_what_windows_see(original):
    def _replace(self, node, id_):
        for pool in self.whole:
            self._keep(pool, [id_])
            self._give(pool, node.id)
        node.id = id_

    return _replace


PLANTED = [
    Bug("resumes without a window's pages", PrefixCache, "_sees", blind_to_windows),
    Bug("shares a slot that is still written", PrefixCache, "_keep_slots", counts_only),
    Bug("mixes namespaces when asked", PrefixTree, "path", one_space),
    Bug("mixes namespaces when told", PrefixTree, "extend", one_space_kept),
    Bug("keeps a window's page of an id that has none", PrefixTree, "set_mark", windows_of_another),
    Bug("keeps windows that no mark sees", PrefixTree, "clear_mark", windows_kept_for_ever),
    Bug("forgets a node that could go", PrefixTree, "remove", mark_forgotten),
    Bug("evicts more than is asked for", PrefixCache, "_evict", any_of_them_is_enough),
    Bug("counts shared units as free", PrefixTree, "reclaimable", every_share_is_free),
    Bug("replaces a page but not for windows", PrefixTree, "_replace", loses_what_windows_see),
]


@pytest.mark.parametrize("bug", PLANTED, ids=[bug.what for bug in PLANTED])
def test_every_planted_bug_is_caught(bug, monkeypatch):
    monkeypatch.setattr(bug.owner, bug.name, bug.plant(getattr(bug.owner, bug.name)))
    with pytest.raises((AssertionError, UnimemError, KeyError)):
        explore()


def explore():
    for seed in range(3):
        for kind in ("hybrid", "windows alone", "whole"):
            live(World(kind, 4, 24 << 10, seed=seed)).finish()
