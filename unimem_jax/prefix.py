"""Computed prefixes that nobody uses, kept until somebody does or their bytes are wanted.

What it is: which prefix a request may resume from, what is kept when one ends or passes a place
that pays, and what goes first. What it does not do: it runs nothing and gives nobody a page; the
tree (`prefix_tree`) is one more sharer of what requests computed.

One rule decides what stays. Every prefix is worth the tokens it saves from being computed again,
over the bytes that it keeps, and the least worth goes first. What the last one to go was worth is
added to whatever is used from then on, so that what nobody uses ages (GreedyDual-Size: Cao and
Irani, 1997, "Cost-aware WWW proxy caching algorithms"). A checkpoint of running state is taken
where it is worth more than what has to go for it, and never otherwise.

F1  `match` changes nothing, and its tokens are compared, not their hashes.
F2  `evict` gives back one thing after the other until the demand fits and not one more; nothing if
    it fits already or cannot, whatever goes.
F3  Dropping a share takes nothing from a request that holds the unit too. What requests hold is no
    candidate as long as something else frees bytes.
F4  `publish` never fails for want of room: without it no checkpoint is taken.
F5  Every node that has a mark or no children is a candidate to go, so that everything can.
"""

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from unimem_jax.allocator import Allocator
from unimem_jax.errors import InvariantError, OutOfMemory, UsageError, require_counts
from unimem_jax.prefix_tree import Node, PrefixTree
from unimem_jax.price import Demand, Prices, add, less


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request may resume, and how far its tokens are known.

    Attributes:
      length: tokens that it need not compute again.
      ids: the id of each page of [0, length); empty for a model without token state.
      slots: per state sub-pool, a slot of running state after `length` tokens; empty where
        `length` is 0.
      known: tokens that the tree has, whether or not a request may resume there.
      node: where it ends.
    """

    length: int = 0
    ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    known: int = 0
    node: Node | None = None


NO_MATCH = Match()


class PrefixCache:
    """Prefixes on one allocator, of requests that hold no commitments.

    Args:
      allocator: whose units are kept.
      prices: of its plan.
    """

    def __init__(self, allocator: Allocator, prices: Prices):
        self.allocator = allocator
        self.tree = PrefixTree(allocator, prices)
        self._unit_bytes = [pool.unit_bytes for pool in prices.plan.sub_pools]
        self._page_bytes = sum(self._unit_bytes[pool] for pool in self.tree.whole)
        self._heap: list[tuple[float, int, int, Node]] = []  # worth, last use, order, candidate
        self._age = 0.0  # worth of the last one that went
        self._clock = 0
        self._hit_tokens = self._hits = self._asked_tokens = 0
        self._evicted = self._marks = self._skipped = 0

    def match(
        self, tokens: Sequence[int], namespace: Hashable = None, most: int | None = None
    ) -> Match:
        """The deepest place where every kind of state can resume.

        Args:
          tokens: all that the request knows.
          namespace: whose prefixes; others never match.
          most: tokens to resume after at most; all but the last by default, since a token must be
            computed to sample the next.
        Raises:
          UsageError: a namespace that cannot be hashed, or a negative `most`.
        Cost: one look-up per page.
        """
        most = max(0, len(tokens) - 1) if most is None else most
        require_counts(most=most)
        require_hashable(namespace)
        tree = self.tree
        path = tree.path(_plain(tokens), namespace, most)
        for node in reversed(path):
            length = min(node.position, most)
            is_exact = node.mark is not None and length == node.position
            if (is_exact or not tree.states) and self._sees(node, length):
                ids = tuple(above.id for above in node.up())[::-1] if tree.has_pages else ()
                slots = (node.mark or ()) if tree.states else ()
                return Match(length, ids, slots, path[-1].position, node)
        return Match(known=path[-1].position) if path else NO_MATCH

    def _sees(self, node: Node, length: int) -> bool:
        """Whether every window of a request that resumes within a node's page is kept."""
        return all(
            above.needs[at]
            for at, (_, pages) in enumerate(self.tree.seen(node, length))
            for above in pages
        )

    @contextmanager
    def held(self, matches: Sequence[Match]) -> Iterator[None]:
        """Keeps what matches name from going while room is made for those who begin there."""
        tree = self.tree
        shares: list[tuple[int, Sequence[int]]] = []
        for match in matches:
            first = [tree.prices.first_page(w.lifetime, match.length) for w in tree.windows]
            shares += [(pool, match.ids) for pool in tree.whole]
            shares += [(w.index, match.ids[at:]) for w, at in zip(tree.windows, first, strict=True)]
            shares += [(p, [slot]) for p, slot in zip(tree.states, match.slots, strict=False)]
        for pool, ids in shares:
            self.allocator.share(ids, pool)
        try:
            yield
        finally:
            for pool, ids in shares:
                self.allocator.drop(ids, pool)

    def use(self, match: Match, tokens: int) -> None:
        """Notes that a request of so many tokens resumes from a match: it is worth keeping."""
        self._asked_tokens += tokens
        if match.node is None or not match.length:
            return
        self._hits += 1
        self._hit_tokens += match.length
        self._touch(match.node)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        for above in node.up() if not self.tree.has_marks else (node,):
            above.age, above.used = self._age, self._clock

    def publish(
        self, tokens: Sequence[int], ids: Sequence[int], slots: Sequence[int] = (), *,
        namespace: Hashable = None, is_leaving: bool = False,
    ) -> bool:  # fmt: skip
        """Keeps what a request holds that has computed exactly `tokens`.

        Args:
          tokens: at least one.
          ids: the id of each of their pages, in order.
          slots: its slot of running state, where there is such state.
          is_leaving: the request frees what it holds next, so that its slot can be kept itself;
            otherwise a copy is taken.
        Returns:
          Whether a request may resume there now; False where there was no room for a checkpoint.
        Raises:
          UsageError: what is named is not what a request of so many tokens holds.
        Cost: one look-up per page, and one share per page that is new.
        """
        known, pages = _plain(tokens), _plain(ids)
        if not known:
            raise UsageError("a prefix has at least one token")
        require_hashable(namespace)
        self.tree.require_held(known, pages, slots)
        node = self.tree.extend(known, pages, namespace, is_leaving)
        is_new = self.tree.has_marks and node.mark is None
        self._touch(node)
        if is_new:
            self.tree.set_mark(node, pages)
            if not self._keep_slots(node, slots, is_leaving):
                self.tree.clear_mark(node)
                self._skipped += 1
            else:
                self._marks += 1
        self._offer(node)
        return not self.tree.has_marks or node.mark is not None

    def _keep_slots(self, node: Node, slots: Sequence[int], is_leaving: bool) -> bool:
        """Gives a mark its slots: the request's own, or copies if they are worth their room."""
        for pool, slot in zip(self.tree.states, slots, strict=True):
            if is_leaving:
                self.allocator.share(slot, pool)
            else:
                wanted = tuple(int(i == pool) for i in range(len(self._unit_bytes)))
                if not self._evict(wanted, self._worth(node)):
                    return False
                try:
                    slot = self.allocator.copy_slot(slot, pool, committed=False)
                except OutOfMemory:  # pins are in the way
                    return False
            self.tree.keep_slot(node, pool, slot)
        return True

    def fits(self, demand: Demand) -> bool:
        """Whether a demand fits beside what requests hold, once everything else may go.

        Negative counts are units that somebody will give back. Cost: as `reclaimable`.
        """
        allocator = self.allocator
        held = allocator.held
        return allocator.layout.fits(add(held, demand)) or allocator.layout.fits(
            less(add(held, demand), self.tree.reclaimable())
        )

    def evict(self, demand: Demand) -> bool:
        """Gives back what is worth least until `demand` fits.

        Returns:
          Whether it fits now; if not, nothing was given back.
        Raises:
          UsageError: not one count of at least 0 per sub-pool.
        """
        return self.allocator.fits(demand) or (self.fits(demand) and self._evict(demand))

    def _evict(self, demand: Demand, below: float = math.inf) -> bool:
        """As `evict`, but only of what is worth less than `below`."""
        fits, passed = self.allocator.fits, deque[Node]()
        while not fits(demand):
            node = self._weakest(below)
            if node is None:
                if not passed or below < math.inf:
                    break
                node = passed.popleft()
                if not self._is_candidate(node):  # it came back when a child went, and went itself
                    continue
            elif not self._is_useful(node, demand):
                passed.append(node)
                continue
            self._let_go(node)
        for node in passed:
            self._offer(node)
        return fits(demand)

    def _weakest(self, below: float) -> Node | None:
        """Takes the candidate that is worth least from the heap."""
        while self._heap and self._heap[0][0] < below:
            worth, used, _, node = heapq.heappop(self._heap)
            node.is_queued = False
            if self._is_candidate(node):
                if (self._worth(node), node.used) <= (worth, used):
                    return node
                self._offer(node)  # it was used since
        return None

    def _is_candidate(self, node: Node) -> bool:
        if node.parent is None:
            return False
        # A mark that has no slots yet is the one for which room is made.
        return not node.children if node.mark is None else len(node.mark) == len(self.tree.states)

    def _offer(self, node: Node) -> None:
        """Makes a node a candidate to go, if it is one."""
        if not node.is_queued and self._is_candidate(node):
            self._clock += 1
            heapq.heappush(self._heap, (self._worth(node), node.used, self._clock, node))
            node.is_queued = True

    def _worth(self, node: Node) -> float:
        """Tokens saved per byte kept, and what such things were worth at its last use."""
        if not self.tree.has_marks:
            return node.age + len(node.key) / self._page_bytes
        if node.mark is None:
            return 0.0  # nobody can resume there
        byte_count = sum(self._unit_bytes[pool] for pool in self.tree.states)
        for window, pages in self.tree.seen(node):
            byte_count += self._unit_bytes[window] * sum(1 for _ in pages)
        previous, is_alone = 0, not node.children
        for above in node.up():
            if above is not node and above.mark is not None:
                previous = above.position
                break
            is_alone = is_alone and len(above.children) < 2
            byte_count += self._page_bytes * is_alone
        return node.age + (node.position - previous) / max(1, byte_count)

    def _is_useful(self, node: Node, demand: Demand) -> bool:
        """Whether letting a candidate go frees a unit of which there are too few."""
        tree, held = self.tree, self.allocator.held
        if node.mark is None:
            frees = {pool for pool in tree.whole if tree.is_reclaimable(pool, node.id)}
        else:
            frees = set(tree.states)
            for at, (window, pages) in enumerate(tree.seen(node)):
                if any(p.needs[at] == 1 and tree.is_reclaimable(window, p.id) for p in pages):
                    frees.add(window)
        empty = (0,) * len(held)
        short = {
            pool
            for pool, count in enumerate(demand)
            if not self.allocator.layout.fits(
                (*empty[:pool], held[pool] + count, *empty[pool + 1 :])
            )
        }
        return bool(frees & short if short else frees)

    def _let_go(self, node: Node) -> None:
        """Clears a mark, or takes away a node that has none."""
        self._age = max(self._age, self._worth(node))
        self._evicted += 1
        if node.mark is not None:
            self.tree.clear_mark(node)
            self._offer(node)
        else:
            self._offer(self.tree.remove(node))

    def clear(self) -> None:
        """Gives back everything."""
        while (node := self._weakest(math.inf)) is not None:
            self._let_go(node)

    def metrics(self) -> dict[str, Any]:
        """Plain numbers: `reclaimable` per sub-pool, the others counted since the start.

        Cost: as `PrefixTree.reclaimable`.
        """
        return {
            "nodes": self.tree.node_count,
            "reclaimable": list(self.tree.reclaimable()),
            "hits": self._hits,
            "hit_tokens": self._hit_tokens,
            "asked_tokens": self._asked_tokens,
            "evicted": self._evicted,
            "checkpoints": self._marks,
            "checkpoints_skipped": self._skipped,
        }

    def check(self) -> None:
        """Verifies F6 to F8 and F5 from scratch. Raises InvariantError. Cost: O(nodes + ids)."""
        self.tree.check()
        queued = {id(node) for *_, node in self._heap}
        for _, _, node in self.tree.nodes():
            if self._is_candidate(node) and id(node) not in queued:
                raise InvariantError(f"F5: a node at {node.position} can never go")


def _plain(values: Sequence[int]) -> list[int]:
    """A list of plain ints: they are what compares and hashes fast."""
    return values if isinstance(values, list) else np.asarray(values).tolist()


def require_hashable(namespace: Hashable) -> None:
    """Raises UsageError for a namespace that cannot be told from others."""
    if not isinstance(namespace, Hashable):
        raise UsageError(f"a namespace can be hashed: text, or a tuple of texts, not {namespace!r}")
