"""Check mode: notes every decision that reads how much of one sub-pool is free.

Capacity is one question, `fits`, over what is held. Free units of one sub-pool answer another one:
room can come from any band, so who decides by them refuses what would fit, or grants what does not.

What it is: for tests and for a service that is being searched for such a fault; an allocator under
watch does the same at half the speed. What it does not do: it changes no answer, and reports for
people (printing `metrics()`) are not noted, only code that takes a number of holes out of them.
"""

import sys
from collections.abc import Iterator
from typing import Any

from unimem_jax.allocator import Allocator
from unimem_jax.layout import Band, Layout

# What places units has to count holes; none of these decides who may have how many.
_PLACING = frozenset(
    function.__code__
    for function in (
        Band.push,
        Layout.take,
        Layout.take_one,
        Layout.give_one,
        Layout.inner_holes,
        Layout.compact,
        Layout._grow,
        Layout._trim,
        Layout._shift,
        Layout.check,
        Layout.check_counts,
        Allocator._make_room,
        Allocator.metrics,
    )
)
_COUNT: Any = Band.__dict__["hole_count"]  # the slot that a watched band hides


def watch(allocator: Allocator) -> list[str]:
    """Watches an allocator from now on.

    Returns:
      A list that grows by one line for each read: the place in the code and what was read. Empty as
      long as every decision asked `fits`.
    """
    notes: list[str] = []

    def note(what: str) -> None:
        reader = sys._getframe(2)
        if reader.f_code not in _PLACING:
            place = f"{reader.f_code.co_filename}:{reader.f_lineno}"
            notes.append(f"{place} in {reader.f_code.co_name} reads {what}")

    class WatchedBand(Band):
        __slots__ = ()

        @property
        def hole_count(self) -> int:
            note("the holes of one band")
            return int(_COUNT.__get__(self))

        @hole_count.setter
        def hole_count(self, count: int) -> None:
            _COUNT.__set__(self, count)

    class Counts(list[int]):
        def __getitem__(self, index: Any) -> Any:
            note("a count of holes from the metrics")
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[int]:
            note("a count of holes from the metrics")
            return super().__iter__()

    class WatchedAllocator(Allocator):
        def metrics(self) -> dict[str, Any]:
            found = super().metrics()
            return {**found, "holes": Counts(found["holes"])}

    for band in allocator.layout.bands:
        band.__class__ = WatchedBand
    allocator.__class__ = WatchedAllocator
    return notes
