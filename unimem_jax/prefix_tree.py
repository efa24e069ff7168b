"""A radix tree over tokens, one page a node, and the units that it keeps for them.

What it is: which prefixes are kept, by which ids, and where a request may resume. What it does not
do: it chooses nothing; `prefix` decides what is kept and what goes. The units are the allocator's,
and the tree is one more sharer of each, as a request is.

    root --(t0 .. t15)--> node --(t16 .. t31)--> node --(t32 .. t36)--> tail
                          page                   page, mark             page, mark

A node's edge is a whole page of tokens; a tail's is shorter, and a tail has no children. A mark
says that a request may resume at the node's end: everything that one of that length holds is kept.
A tree of models that remember nothing but whole contexts has no marks: a request may resume
anywhere.

Invariants (checked by `check`):
  F6  a node keeps its page in every sub-pool of whole contexts, and in one of a window exactly
      while a mark sees it there;
  F7  a mark keeps one slot of running state where there is such state;
  F8  `kept` counts what the nodes keep, and the allocator has at least so many sharers;
"""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from unimem_jax.allocator import Allocator, number_of
from unimem_jax.errors import InvariantError, UsageError
from unimem_jax.price import Demand, Prices

type Key = tuple[int, ...]  # the tokens of one page


class Node:
    """One page of tokens below its parent.

    Attributes:
      key: its tokens, a whole page or, of a tail, fewer.
      id: page id.
      position: tokens up to its end.
      children: by their keys.
      tails: how many children are tails, by their number of tokens.
      needs: per window sub-pool, how many marks see its page.
      mark: slot ids of a request that ended here; None if no request may resume here.
      age, used: what `prefix` knows of its last use.
      is_queued: whether `prefix` has it among its candidates.
    """

    __slots__ = (
        "age", "children", "id", "is_queued", "key", "mark", "needs", "parent", "position",
        "tails", "used",
    )  # fmt: skip

    def __init__(self, parent: "Node | None", key: Key, id_: int, windows: int):
        self.parent = parent
        self.key = key
        self.id = id_
        self.position: int = (parent.position if parent else 0) + len(key)
        self.children: dict[Key, Node] = {}
        self.tails: dict[int, int] = {}
        self.needs = [0] * windows
        self.mark: tuple[int, ...] | None = None
        self.age = 0.0
        self.used = 0
        self.is_queued = False

    def up(self) -> "Iterator[Node]":
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixTree:
    """Nodes, and what they keep.

    Args:
      allocator: whose units are kept.
      prices: of its plan.
    Attributes:
      whole: indices of the sub-pools of whole contexts; `windows`: of windows; `states`: of running
        state.
      kept: per sub-pool int32[ids], how many nodes keep a number.
      node_count: without roots.
    """

    def __init__(self, allocator: Allocator, prices: Prices):
        self.allocator = allocator
        self.prices = prices
        plan = prices.plan
        self.page_tokens = plan.page_tokens
        self.windows = tuple(pool for pool in plan.token_pools if pool.lifetime.kind == "window")
        self.whole = tuple(p.index for p in plan.token_pools if p.lifetime.kind != "window")
        self.states = tuple(pool.index for pool in plan.slot_pools)
        self.kept = [np.zeros(count, np.int32) for count in allocator.geometry.id_counts]
        self.node_count = 0
        self._roots: dict[Hashable, Node] = {}

    @property
    def has_pages(self) -> bool:
        """Whether anything is kept per token."""
        return bool(self.whole or self.windows)

    @property
    def has_marks(self) -> bool:
        """Whether a request may resume at marks only."""
        return bool(self.windows or self.states)

    def path(self, tokens: Sequence[int], namespace: Hashable, most: int) -> list[Node]:
        """The nodes that begin within the first `most` of `tokens`, by where they end."""
        found: list[Node] = []
        node, start = self._roots.get(namespace), 0
        end, page = len(tokens), self.page_tokens
        while node is not None and start < most:
            if node.tails:
                for count in sorted(node.tails):
                    tail = node.children.get(tuple(tokens[start : start + count]))
                    if tail is not None and start + count <= end:
                        found.append(tail)
            stop = start + page
            if stop > end:
                break
            node = node.children.get(tuple(tokens[start:stop]))
            if node is not None:
                found.append(node)
            start = stop
        return found

    def require_held(self, tokens: Sequence[int], ids: Sequence[int], slots: Sequence[int]) -> None:
        """Raises UsageError unless these are what a request of so many tokens holds."""
        length = len(tokens)
        if len(ids) != (self.prices.pages(length) if self.has_pages else 0):
            raise UsageError(f"{length} tokens do not lie on {len(ids)} pages")
        if len(slots) != len(self.states):
            raise UsageError(f"running state takes {len(self.states)} slots, not {len(slots)}")
        for pool, slot in zip(self.states, slots, strict=True):
            self.allocator.sharers([slot], pool)  # or raises, here and below
        for pool in self.whole:
            self.allocator.sharers(ids, pool)
        for window in self.windows:
            first = self.prices.first_page(window.lifetime, length)
            self.allocator.sharers(ids[first:], window.index)

    def extend(
        self, tokens: Sequence[int], ids: Sequence[int], namespace: Hashable, is_leaving: bool
    ) -> Node:
        """Adds the nodes that are missing for `tokens`. Returns the last one.

        A page that the tree alone holds gives way to one of the same tokens that a request holds,
        unless that one leaves: one of the two is freed at once.
        """
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(None, (), 0, 0)
        page, windows, fresh, stale = self.page_tokens, len(self.windows), [], []
        pages = ids or (0,) * self.prices.pages(len(tokens))  # none where only state is kept
        for id_ in pages:
            start = node.position
            key = tuple(tokens[start : start + page])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, id_, windows)
                if len(key) < page:
                    node.tails[len(key)] = node.tails.get(len(key), 0) + 1
                self.node_count += 1
                fresh.append(id_)
            elif child.id != id_ and not is_leaving and self._is_only_here(child):
                stale.append(child.id)
                child.id = id_
                fresh.append(id_)
            node = child
        for pool in self.whole if fresh else ():
            self._keep(pool, fresh)
            for id_ in stale:
                self._give(pool, id_)
        return node

    def _is_only_here(self, node: Node) -> bool:
        """Whether nobody else shares a node's page, so that taking another id frees it."""
        is_seen = not self.whole or any(node.needs)
        return not is_seen and self.is_reclaimable(self.whole[0], node.id)

    def _replace(self, node: Node, id_: int) -> None:
        """Gives a node the id of somebody else's page of the same tokens, wherever it has one."""
        needed = [w.index for w, count in zip(self.windows, node.needs, strict=True) if count]
        for pool in (*self.whole, *needed):
            self._keep(pool, [id_])
            self._give(pool, node.id)
        node.id = id_

    def set_mark(self, node: Node, ids: Sequence[int]) -> None:
        """Keeps what windows see from a node's end, out of `ids` where it is not kept yet."""
        for at, (window, pages) in enumerate(self.seen(node)):
            for above in pages:
                if not above.needs[at]:
                    id_ = ids[(above.position - 1) // self.page_tokens]
                    if above.id != id_:
                        self._replace(above, id_)
                    self._keep(window, [id_])
                above.needs[at] += 1
        node.mark = ()

    def seen(self, node: Node, length: int | None = None) -> Iterator[tuple[int, Iterator[Node]]]:
        """Per window sub-pool, the nodes whose pages a request sees that resumes after `length`
        tokens, in the page of `node`; at its end by default.
        """
        length = node.position if length is None else length
        for window in self.windows:
            count = self.prices.pages(length) - self.prices.first_page(window.lifetime, length)
            yield window.index, (above for above, _ in zip(node.up(), range(count), strict=False))

    def keep_slot(self, node: Node, pool: int, slot: int) -> None:
        """Adds a slot to a mark; the caller's share of it becomes the tree's."""
        assert node.mark is not None
        node.mark = (*node.mark, slot)
        self.kept[pool][number_of(slot)] += 1

    def clear_mark(self, node: Node) -> None:
        """Gives back what only a mark keeps: its slots, and what no other mark sees."""
        assert node.mark is not None
        for at, (window, pages) in enumerate(self.seen(node)):
            for above in pages:
                above.needs[at] -= 1
                if not above.needs[at]:
                    self._give(window, above.id)
        for pool, slot in zip(self.states, node.mark, strict=False):
            self._give(pool, slot)
        node.mark = None

    def remove(self, leaf: Node) -> Node:
        """Takes a node without children and mark out of the tree. Returns its parent."""
        parent = leaf.parent
        assert parent is not None
        assert leaf.mark is None
        assert not leaf.children
        for pool in self.whole:
            self._give(pool, leaf.id)
        del parent.children[leaf.key]
        count = len(leaf.key)
        if count < self.page_tokens:
            parent.tails[count] -= 1
            if not parent.tails[count]:
                del parent.tails[count]
        leaf.parent = None
        self.node_count -= 1
        if parent.parent is None and not parent.children:
            self._roots = {name: root for name, root in self._roots.items() if root is not parent}
        return parent

    def is_reclaimable(self, pool: int, id_: int) -> bool:
        """Whether the tree alone holds a unit."""
        number = number_of(id_)
        return self.allocator.tables[pool].sharers_of(number) == self.kept[pool][number]

    def reclaimable(self) -> Demand:
        """Units per sub-pool that the tree alone holds. Cost: a pass over the ids in NumPy."""
        tables = zip(self.allocator.tables, self.kept, strict=True)
        return tuple(
            int(np.count_nonzero((kept > 0) & (table.sharers == kept))) for table, kept in tables
        )

    def _keep(self, pool: int, ids: Sequence[int]) -> None:
        self.allocator.share(ids, pool)
        self.kept[pool][number_of(np.array(ids, np.int64))] += 1

    def _give(self, pool: int, id_: int) -> None:
        self.kept[pool][number_of(id_)] -= 1
        self.allocator.drop(id_, pool)

    def nodes(self) -> Iterator[tuple[Hashable, Key, Node]]:
        """Every node with its namespace and all tokens up to its end."""
        rows: list[tuple[Hashable, Key, Node]] = [
            (namespace, (), root) for namespace, root in self._roots.items()
        ]
        while rows:
            namespace, tokens, node = rows.pop()
            if node.parent is not None:
                yield namespace, tokens, node
            rows += [(namespace, tokens + key, child) for key, child in node.children.items()]

    def check(self) -> None:
        """Verifies F6 to F8 from scratch. Raises InvariantError. Cost: O(nodes + ids)."""
        kept = [np.zeros_like(counts) for counts in self.kept]
        needs: dict[int, list[int]] = {}
        found = [node for _, _, node in self.nodes()]
        for node in found:
            for pool in self.whole:
                kept[pool][number_of(node.id)] += 1
            if node.mark is None:
                continue
            if len(node.mark) != len(self.states):
                raise InvariantError(f"F7: a mark at {node.position} keeps {node.mark}")
            for pool, slot in zip(self.states, node.mark, strict=True):
                kept[pool][number_of(slot)] += 1
            for at, (_, pages) in enumerate(self.seen(node)):
                for above in pages:
                    needs.setdefault(id(above), [0] * len(self.windows))[at] += 1
        for node in found:
            if node.needs != needs.get(id(node), [0] * len(self.windows)):
                raise InvariantError(f"F6: marks do not see what is kept at {node.position}")
            for window, count in zip(self.windows, node.needs, strict=True):
                kept[window.index][number_of(node.id)] += bool(count)
        for pool, (counts, counted) in enumerate(zip(self.kept, kept, strict=True)):
            sharers = self.allocator.tables[pool].sharers
            if not np.array_equal(counts, counted) or (counts > np.maximum(sharers, 0)).any():
                raise InvariantError(f"F8: what is kept in sub-pool {pool} is not what nodes keep")
        if self.node_count != len(found):
            raise InvariantError(f"F8: {len(found)} nodes, not {self.node_count}")
