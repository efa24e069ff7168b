"""Which id holds which unit: the mapping of each sub-pool, and the ids that are free.

What it is: arrays over ids and addresses, and lists of what the device has not heard of yet. What
it does not do: it decides nothing; the allocator calls it with ids that it has checked. Ids and
addresses are int64 throughout: NumPy indexes with them three times as fast as with int32.

Invariants (checked by `check`):
  L7  a mapping and its owner agree: owner[mapping[id]] == id for every mapped id; other ids map to
      absent, and the owner of a unit that no id holds means nothing;
  L8  sharers > 0 exactly for mapped ids;
  L9  uses[id] is the number of sub-pools that map the id; the free ids are those with 0 uses, once
      each.
"""

from collections.abc import Sequence

import numpy as np

from unimem_jax.errors import InvariantError, UsageError

DROPPED = -1  # sharers of an id that was mapped in a sub-pool before in its present life
_NOTHING = np.empty(0, np.int64)


class IdSpace:
    """A space of ids: which are free, and in how many sub-pools each other is mapped."""

    __slots__ = ("count", "free", "free_count", "free_view", "uses", "uses_view")

    def __init__(self, count: int):
        self.count = count
        self.free = np.arange(count, dtype=np.int64)[::-1].copy()
        self.free_view = memoryview(self.free)
        self.free_count = count
        self.uses = np.zeros(count, np.uint8)
        self.uses_view = memoryview(self.uses)

    def take(self, count: int, uses: int) -> np.ndarray:
        """Hands out ids. Returns int64[count]."""
        left = self.free_count - count
        ids = self.free[left : self.free_count].copy()
        self.free_count = left
        self.uses[ids] = uses
        return ids

    def give(self, ids: np.ndarray) -> None:
        """Takes back ids whose uses are 0."""
        self.free[self.free_count : self.free_count + len(ids)] = ids
        self.free_count += len(ids)

    def take_one(self, uses: int) -> int:
        """`take` for one id."""
        self.free_count -= 1
        id_ = self.free_view[self.free_count]
        self.uses_view[id_] = uses
        return id_

    def give_one(self, id_: int) -> None:
        """`give` for one id."""
        self.free_view[self.free_count] = id_
        self.free_count += 1

    def known(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The ids as an int64 array. Raises UsageError if one is out of range or named twice."""
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise UsageError(f"ids must be one integer or a flat sequence of integers, not {ids!r}")
        if not array.size:
            return np.empty(0, np.int64)
        ascending = np.sort(array)
        if ascending[0] < 0 or ascending[-1] >= self.count:
            raise UsageError(
                f"ids go from 0 to {self.count - 1}; seen {ascending[0]} to {ascending[-1]}"
            )
        if np.count_nonzero(ascending[1:] == ascending[:-1]):
            raise UsageError("an id is named twice in one call")
        return array.astype(np.int64, copy=False)

    def known_one(self, id_: int) -> int:
        """One id. Raises UsageError if it is out of range."""
        if not 0 <= id_ < self.count:
            raise UsageError(f"ids go from 0 to {self.count - 1}; seen {id_}")
        return id_

    def check(self, sharers: Sequence[np.ndarray]) -> None:
        """Verifies L9 against the sharers in every sub-pool of this space. Cost: O(ids)."""
        uses = sum((counts > 0).astype(np.uint8) for counts in sharers)
        if not np.array_equal(self.uses, uses):
            raise InvariantError("L9: uses are not the number of sub-pools that map an id")
        if not np.array_equal(np.sort(self.free[: self.free_count]), np.flatnonzero(uses == 0)):
            raise InvariantError("L9: the free ids are not those without uses")


class Table:
    """The mapping of one sub-pool and what belongs to it: owners, sharers, and entries the device
    has not seen.
    """

    __slots__ = (
        "absent",
        "dirty",
        "dirty_count",
        "ids",
        "mapping",
        "marks",
        "owner",
        "sharers",
        "views",
    )

    def __init__(self, ids: IdSpace, unit_count: int):
        self.ids = ids
        self.absent = unit_count
        self.mapping = np.full(ids.count, unit_count, np.int64)
        self.owner = np.full(unit_count, -1, np.int64)
        self.sharers = np.zeros(ids.count, np.int32)
        self.dirty = np.empty(ids.count, np.int64)  # with repeats
        self.dirty_count = 0
        self.marks = np.empty(ids.count, np.int64)  # scratch: the last place of an id in `dirty`
        arrays = (self.mapping, self.owner, self.sharers, self.dirty)
        self.views: tuple[memoryview[int], ...] = tuple(memoryview(array) for array in arrays)

    def bind(self, ids: np.ndarray, addresses: np.ndarray) -> None:
        """Maps fresh ids, one sharer each."""
        self.sharers[ids] = 1
        self.mapping[ids] = addresses
        self.owner[addresses] = ids
        self.touch(ids)

    def leave_out(self, ids: np.ndarray) -> None:
        """Notes that fresh ids have nothing here; the device may know a page of a former life."""
        self.sharers[ids] = 0
        self.touch(ids)

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Redirects the ids of moved units; sources and destinations are disjoint."""
        ids = self.owner[sources]
        self.owner[destinations] = ids
        self.mapping[ids] = destinations
        self.touch(ids)

    def touch(self, ids: np.ndarray) -> None:
        """Notes that the device has to hear of these entries; of all, once there is no room."""
        start = self.dirty_count
        self.dirty_count += len(ids)
        if self.dirty_count <= len(self.dirty):
            self.dirty[start : self.dirty_count] = ids

    def bind_one(self, id_: int, address: int) -> None:
        """`bind` for one id."""
        mapping, owner, sharers, _ = self.views
        mapping[id_] = address
        owner[address] = id_
        sharers[id_] = 1
        self.touch_one(id_)

    def leave_out_one(self, id_: int) -> None:
        """`leave_out` for one id."""
        self.views[2][id_] = 0
        self.touch_one(id_)

    def touch_one(self, id_: int) -> None:
        """`touch` for one id."""
        if self.dirty_count < len(self.dirty):
            self.views[3][self.dirty_count] = id_
        self.dirty_count += 1

    def sharers_of(self, id_: int) -> int:
        """Sharers of one known id, DROPPED or 0 where it is not mapped."""
        return self.views[2][id_]

    def drop(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Takes one sharer from each id that is mapped here and unmaps those that have none left.

        The caller lowers `uses` and touches ids that live on elsewhere.

        Returns:
          The addresses set free, and bool[ids]: which of the ids lost their last sharer.
        """
        sharers = self.sharers[ids]
        is_last = sharers == 1
        if np.count_nonzero(is_last) < len(ids):
            self.sharers[ids[sharers > 1]] -= 1
            ids = ids[is_last]
        addresses = self.mapping[ids]
        self.mapping[ids] = self.absent
        self.sharers[ids] = DROPPED
        return addresses, is_last

    def drop_one(self, id_: int) -> int:
        """`drop` for one id: the address set free, or absent."""
        mapping, _, sharers, _ = self.views
        left = sharers[id_] - 1
        sharers[id_] = left or DROPPED
        if left:
            return self.absent
        address = mapping[id_]
        mapping[id_] = self.absent
        self.touch_one(id_)
        self.ids.uses_view[id_] -= 1
        return address

    def take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids, addresses) touched since last taken, each once; ids that are free are left out."""
        count, self.dirty_count = self.dirty_count, 0
        if not count:
            return _NOTHING, _NOTHING
        if count > len(self.dirty):
            ids = np.flatnonzero(self.ids.uses)
        else:
            ids, ranks = self.dirty[:count], np.arange(count)
            self.marks[ids] = ranks
            ids = ids[(self.marks[ids] == ranks) & (self.ids.uses[ids] > 0)]
        return ids, self.mapping[ids]

    def check(self, held: np.ndarray) -> None:
        """Verifies L7 and L8 against the addresses that hold something. Cost: O(ids + units)."""
        ids = np.flatnonzero(self.mapping != self.absent)
        addresses = self.mapping[ids]
        if not np.array_equal(np.sort(addresses), held):
            raise InvariantError("L7: the mapped addresses are not the live units")
        if not np.array_equal(self.owner[addresses], ids):
            raise InvariantError("L7: mapping and owner disagree")
        if not np.array_equal(np.flatnonzero(self.sharers > 0), ids):
            raise InvariantError("L8: sharers are counted for other ids than the mapped ones")
