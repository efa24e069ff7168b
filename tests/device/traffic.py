"""The programs and the clean traffic of every model, compiled and served once for all tests."""

from functools import cache

import numpy as np

from tests.device.models import MIXTURES, embedded
from tests.device.served import PAGE, Programs, Served
from unimem_jax.plan import plan

ARENA_BYTES, SMALL_ARENA_BYTES = 24 << 10, 20 << 10  # the hybrids have to move units in both
TURNS, FUSED_TURNS = 40, 25


@cache
def programs(name):
    if name == "embedded":
        model, params = embedded()
    else:
        model = MIXTURES[name]
        params = model.init()
    size = SMALL_ARENA_BYTES if name == "two windows" else ARENA_BYTES
    return model, Programs(model, params, plan(model.parts(), size, PAGE))


@cache
def clean(name, fused=False):
    served = Served(programs(name)[1])
    served.serve(FUSED_TURNS if fused else TURNS, fused)
    return served


def same_bits(first, second):
    """Whether two records hold the same bits."""
    if len(first) != len(second):
        return False
    return all(
        np.array_equal(a.view(np.uint32), b.view(np.uint32))
        for steps in zip(first, second, strict=True)
        for a, b in zip(*steps, strict=True)
    )
