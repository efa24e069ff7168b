"""The four kinds of error, sorted by who is to blame.

A caller who sees `UsageError` changes the call; `OutOfMemory` is nobody's fault and only the
scheduler catches it; `PeerError` names another process; `InvariantError` is a fault of this library
and is never caught. Every error is raised before anything changed.
"""

import operator


class UnimemError(Exception):
    """What all errors of this library have in common; catch this at the outermost level only."""


class UsageError(UnimemError, ValueError):
    """The caller asked for something impossible; the message has the rule, the value and a cure."""


class OutOfMemory(UnimemError):
    """The demand does not fit now; the same demand may fit later."""


class NeverFits(OutOfMemory):
    """Not even an empty arena holds the demand: it is no use to wait."""


class PeerError(UnimemError):
    """Another process broke its side of a transfer."""


class InvariantError(UnimemError):
    """A numbered invariant of this library does not hold. A fault of ours; never caught."""


def plain_int(value: object, rule: str, least: int = 1) -> int:
    """The value as a plain int, whichever integer type it has (NumPy's too).

    Raises:
      UsageError: `rule` and the value seen, if it is less or no integer; a bool is none.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = None
    if found is None or found < least:
        raise UsageError(f"{rule}, not {value!r}")
    return found


def require_positive(**sizes: object) -> tuple[int, ...]:
    """The sizes as plain ints. Raises UsageError, naming the first that is no positive int."""
    return tuple(plain_int(size, f"{name} is a positive int") for name, size in sizes.items())


def require_counts(**counts: object) -> tuple[int, ...]:
    """The counts as plain ints. Raises UsageError, naming the first that is no int or below 0."""
    return tuple(
        plain_int(count, f"{name} is an int that is not negative", 0)
        for name, count in counts.items()
    )
