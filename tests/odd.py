"""Arguments that nobody should give: each gets one typed error, or an answer, and changes nothing
that it did not answer.
"""

import inspect
import itertools

import numpy as np

from tests.host.world import frozen
from unimem_jax.errors import OutOfMemory, UsageError

ODD = (
    None, True, "1", b"1", 1.5, float("nan"), -1, 10**400, -(10**30), (), [], [None], [True],
    [1.5], ["1"], [[1]], [1, [2]], {}, {"a": 1}, object(), np.float32(1), np.int64(-3),
    np.array([0.5]), np.array([[1]]), np.array(None), iter(()), slice(1), Ellipsis, len,
)  # fmt: skip


def odd_calls(function, arguments):
    """(the odd argument, a call with it) for each argument and each odd value in its place."""
    names = list(inspect.signature(function).parameters)[: len(arguments)]
    for (at, name), odd in itertools.product(enumerate(names), ODD):
        given = [*arguments[:at], odd, *arguments[at + 1 :]]
        keywords = {
            n: value
            for n, value in zip(names, given, strict=True)
            if inspect.signature(function).parameters[n].kind == inspect.Parameter.KEYWORD_ONLY
        }
        plain = [value for n, value in zip(names, given, strict=True) if n not in keywords]
        yield f"{name}={odd!r}", lambda plain=plain, keywords=keywords: function(*plain, **keywords)


def require_typed(make, name, arguments_of):
    """Every odd argument of a method of what `make` makes is refused, typed, or answered.

    Args:
      arguments_of: right arguments for the thing that was made.
    Returns:
      How many calls were refused.
    """
    thing = make()
    refused = 0
    for what, call in odd_calls(getattr(thing, name), arguments_of(thing)):
        before = frozen(thing)
        try:
            call()
        except (UsageError, OutOfMemory) as error:
            assert "\n" not in str(error), f"{name}({what}): more than one line"
            assert frozen(thing) == before, f"{name}({what}) changed something"
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}({what}): {type(error).__name__}: {error}") from error
        else:
            thing = make() if frozen(thing) != before else thing
    return refused
