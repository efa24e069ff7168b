"""The four kinds of error, sorted by who is to blame.

A caller who sees `UsageError` changes the call; `OutOfMemory` is nobody's fault and only the
scheduler catches it; `PeerError` names another process; `InvariantError` is a fault of this library
and is never caught. Every error is raised before anything changed.
"""


class UnimemError(Exception):
    """What all errors of this library have in common; catch this at the outermost level only."""


class UsageError(UnimemError, ValueError):
    """The caller asked for something impossible; the message has the rule, the value and a cure."""


class OutOfMemory(UnimemError):
    """The demand does not fit now; the same demand may fit later."""


class PeerError(UnimemError):
    """Another process broke its side of a transfer."""


class InvariantError(UnimemError):
    """A numbered invariant of this library does not hold. A fault of ours; never caught."""


def require_positive(**sizes: object) -> None:
    """Raises UsageError, naming the size, unless every one is a positive int and not a bool."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} is a positive int, not {value!r}")
