"""Which id holds which unit: the mapping of each sub-pool, and the ids that are free.

What it is: arrays over numbers and addresses, and lists of what the device has not heard of yet.
What it does not do: it decides nothing; the allocator calls it with ids that it has checked. All of
them are int64: NumPy indexes with it three times as fast as with int32.

    id      | life, 31 bits | number, 32 bits |

Tables are indexed by number, on the device too; holders keep ids. An id that is freed begins its
next life, so the number comes back as another id, and whoever still holds the old one is refused.

Invariants (checked by `check`):
  L7  a mapping and its owner agree: owner[mapping[id]] == id for every mapped id; other ids map to
      absent, and the owner of a unit that no id holds means nothing;
  L8  sharers > 0 exactly for mapped ids;
  L9  uses[id] is the number of sub-pools that map the id; the free ids are those with 0 uses, once
      each, in a life that nobody has been given yet.
"""

from collections.abc import Sequence

import numpy as np

from unimem_jax.errors import InvariantError, UsageError

DROPPED = -1  # sharers of an id that was mapped in a sub-pool before in its present life
NUMBER = (1 << 32) - 1  # the bits of an id that are its number
LIFE = 1 << 32  # from one life of a number to the next; after 2^31 they begin again
LAST = (1 << 63) - 1  # the last number's last life
Ids = int | Sequence[int] | np.ndarray
_ONE_SHARER = np.int32(1).tobytes()
_NOTHING = np.empty(0, np.int64)


def number_of[T: (int, np.ndarray)](ids: T) -> T:
    """Where the tables have an id, the device's too: int64 as given, below 2^32."""
    return ids & NUMBER


class IdSpace:
    """A space of ids: which are free, and in how many sub-pools each other is mapped."""

    __slots__ = (
        "count",
        "free",
        "free_count",
        "free_view",
        "marks",
        "present",
        "present_view",
        "uses",
        "uses_view",
    )

    def __init__(self, count: int):
        self.count = count
        self.present = np.arange(count, dtype=np.int64)  # the id of each number; if free, the next
        self.present_view = memoryview(self.present)
        self.free = self.present[::-1].copy()
        self.free_view = memoryview(self.free)
        self.free_count = count
        self.marks = np.empty(count, np.int64)  # scratch: the last place of a number in a call
        self.uses = np.zeros(count, np.uint8)
        self.uses_view = memoryview(self.uses)

    def take(self, count: int, uses: int) -> tuple[np.ndarray, np.ndarray]:
        """Hands out ids. Returns int64[count] ids and their numbers."""
        left = self.free_count - count
        ids = self.free[left : self.free_count].copy()
        numbers = ids & NUMBER
        self.free_count = left
        self.uses[numbers] = uses
        return ids, numbers

    def give(self, numbers: np.ndarray) -> None:
        """Takes back numbers whose uses are 0; each begins its next life."""
        following = self.present[numbers] + LIFE & LAST
        self.present[numbers] = following
        self.free[self.free_count : self.free_count + len(numbers)] = following
        self.free_count += len(numbers)

    def take_one(self, uses: int) -> int:
        """`take` for one id."""
        self.free_count -= 1
        id_ = self.free_view[self.free_count]
        self.uses_view[id_ & NUMBER] = uses
        return id_

    def give_one(self, number: int) -> None:
        """`give` for one number."""
        following = self.present_view[number] + LIFE & LAST
        self.present_view[number] = following
        self.free_view[self.free_count] = following
        self.free_count += 1

    def known(self, ids: Ids) -> np.ndarray:
        """Numbers of ids. Raises UsageError if one is unknown, of a former life, or named twice."""
        try:
            array = np.asarray([ids] if isinstance(ids, int | np.integer) else ids)
        except ValueError:  # lists of different lengths
            array = np.empty((0, 0))
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise UsageError(f"ids must be one integer or a flat sequence of integers, not {ids!r}")
        if not array.size:
            return np.empty(0, np.int64)
        exact = array.astype(np.int64, copy=False)
        numbers = exact & NUMBER
        try:
            # Comparing bytes is twice as fast as comparing so few numbers.
            is_present = self.present[numbers].tobytes() == exact.tobytes()
        except IndexError:
            is_present = False
        if not is_present:
            for id_ in array.tolist():
                self.known_one(id_)
        ranks = np.arange(len(numbers))
        self.marks[numbers] = ranks
        if self.marks[numbers].tobytes() != ranks.tobytes():
            raise UsageError("an id is named twice in one call")
        return numbers

    def known_one(self, id_: int) -> int:
        """The number of one id. Raises UsageError if it is unknown or of a former life."""
        number = id_ & NUMBER
        if number >= self.count or self.present_view[number] != id_:
            raise UsageError(
                f"id {id_} was freed, or never granted: its number is {number} of {self.count}"
            )
        return number

    def check(self, sharers: Sequence[np.ndarray]) -> None:
        """Verifies L9 against the sharers in every sub-pool of this space. Cost: O(ids)."""
        uses = sum((counts > 0).astype(np.uint8) for counts in sharers)
        if not np.array_equal(self.uses, uses):
            raise InvariantError("L9: uses are not the number of sub-pools that map an id")
        free = np.flatnonzero(uses == 0)
        if not np.array_equal(np.sort(self.free[: self.free_count]), np.sort(self.present[free])):
            raise InvariantError("L9: the free ids are not those without uses, in their next life")
        if not np.array_equal(self.present & NUMBER, np.arange(self.count)):
            raise InvariantError("L9: an id has the number of another")


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
        "sub_pool",
        "views",
    )

    def __init__(self, sub_pool: int, ids: IdSpace, unit_count: int):
        self.sub_pool = sub_pool
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

    def bind(self, numbers: np.ndarray, addresses: np.ndarray) -> None:
        """Maps fresh ids, one sharer each."""
        self.sharers[numbers] = 1
        self.mapping[numbers] = addresses
        self.owner[addresses] = numbers
        self.touch(numbers)

    def leave_out(self, numbers: np.ndarray) -> None:
        """Notes that fresh ids have nothing here; the device may know a page of a former life."""
        self.sharers[numbers] = 0
        self.touch(numbers)

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Redirects the ids of moved units; sources and destinations are disjoint."""
        numbers = self.owner[sources]
        self.owner[destinations] = numbers
        self.mapping[numbers] = destinations
        self.touch(numbers)

    def touch(self, numbers: np.ndarray) -> None:
        """Notes that the device has to hear of these entries; of all, once there is no room."""
        start = self.dirty_count
        self.dirty_count += len(numbers)
        if self.dirty_count <= len(self.dirty):
            self.dirty[start : self.dirty_count] = numbers

    def bind_one(self, number: int, address: int) -> None:
        """`bind` for one id."""
        mapping, owner, sharers, _ = self.views
        mapping[number] = address
        owner[address] = number
        sharers[number] = 1
        self.touch_one(number)

    def leave_out_one(self, number: int) -> None:
        """`leave_out` for one id."""
        self.views[2][number] = 0
        self.touch_one(number)

    def touch_one(self, number: int) -> None:
        """`touch` for one id."""
        if self.dirty_count < len(self.dirty):
            self.views[3][self.dirty_count] = number
        self.dirty_count += 1

    def sharers_of(self, number: int) -> int:
        """Sharers of one known id, DROPPED or 0 where it is not mapped."""
        return self.views[2][number]

    def require_mapped(self, numbers: np.ndarray) -> None:
        """Raises UsageError unless each number has a unit here."""
        is_missing = self.sharers[numbers] <= 0
        if is_missing.any():
            ids = self.ids.present[numbers[is_missing]].tolist()
            raise UsageError(f"ids {ids} have no unit in sub-pool {self.sub_pool}")

    def drop(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray | np.uint8]:
        """Takes one sharer from each id that is mapped here and unmaps those that have none left.

        The caller lowers `uses` and touches ids that live on elsewhere.

        Returns:
          The addresses set free, and bool[numbers]: which of the numbers lost their last sharer; 1
          if all did.
        """
        sharers = self.sharers[numbers]
        is_last: np.ndarray | np.uint8 = np.uint8(1)
        if sharers.tobytes() != _ONE_SHARER * len(numbers):
            is_last = sharers == 1
            self.sharers[numbers[sharers > 1]] -= 1
            numbers = numbers[is_last]
        addresses = self.mapping[numbers]
        self.mapping[numbers] = self.absent
        self.sharers[numbers] = DROPPED
        return addresses, is_last

    def drop_one(self, number: int) -> int:
        """`drop` for one id: the address set free, or absent."""
        mapping, _, sharers, _ = self.views
        left = sharers[number] - 1
        sharers[number] = left or DROPPED
        if left:
            return self.absent
        address = mapping[number]
        mapping[number] = self.absent
        self.touch_one(number)
        self.ids.uses_view[number] -= 1
        return address

    def take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """(numbers, addresses) touched since last taken, each once; free ids are left out."""
        count, self.dirty_count = self.dirty_count, 0
        if not count:
            return _NOTHING, _NOTHING
        if count > len(self.dirty):
            numbers = np.flatnonzero(self.ids.uses)
        else:
            numbers, ranks = self.dirty[:count], np.arange(count)
            self.marks[numbers] = ranks
            numbers = numbers[(self.marks[numbers] == ranks) & (self.ids.uses[numbers] > 0)]
        return numbers, self.mapping[numbers]

    def check(self, held: np.ndarray) -> None:
        """Verifies L7 and L8 against the addresses that hold something. Cost: O(ids + units)."""
        numbers = np.flatnonzero(self.mapping != self.absent)
        addresses = self.mapping[numbers]
        if not np.array_equal(np.sort(addresses), held):
            raise InvariantError("L7: the mapped addresses are not the live units")
        if not np.array_equal(self.owner[addresses], numbers):
            raise InvariantError("L7: mapping and owner disagree")
        if not np.array_equal(np.flatnonzero(self.sharers > 0), numbers):
            raise InvariantError("L8: sharers are counted for other ids than the mapped ones")
