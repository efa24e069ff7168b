"""Runs Mosaic kernels without a GPU and tells whether their threads raced.

jax 0.12 can raise on a race, 0.11 only prints; both set a flag, which `has_raced` reads.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

_fields = {field.name for field in dataclasses.fields(plgpu.InterpretGPUParams)}
INTERPRETED = plgpu.InterpretGPUParams(
    detect_races=True,
    **({"on_race": "warn"} if "on_race" in _fields else {}),
)


def has_raced() -> bool:
    """Whether the last interpreted kernel raced; the next one forgets it, so ask after each.

    jax publishes no such question; this is the flag behind the warning.
    """
    return gpu_callbacks.get_races().races_found


@contextmanager
def forgotten_state() -> Iterator[None]:
    """Leaves no state of a kernel that was cut short by an exception to the next one."""
    try:
        yield
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
