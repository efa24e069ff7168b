"""A picture of the arena over time: where each band lies, what it holds, and who runs and waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from unimem_jax.memory import Memory
from unimem_jax.plan import Plan

MEBIBYTE = 1 << 20
COLOURS = ("#4477aa", "#cc6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Tol's bright set


@dataclass(frozen=True, slots=True)
class Moment:
    """The arena after one step.

    Attributes:
      edges: bytes [low, high) of each band.
      live: bytes that each sub-pool's requests hold.
      running, waiting: requests.
    """

    edges: tuple[tuple[int, int], ...]
    live: tuple[int, ...]
    running: int
    waiting: int


def observe(memory: Memory, running: int, waiting: int) -> Moment:
    """What the arena holds now."""
    pools, bands = memory.plan.sub_pools, memory.allocator.layout.bands
    live = memory.metrics()["live"]
    return Moment(
        edges=tuple(
            (band.lo * pool.unit_bytes, band.hi * pool.unit_bytes)
            for pool, band in zip(pools, bands, strict=True)
        ),
        live=tuple(count * pool.unit_bytes for pool, count in zip(pools, live, strict=True)),
        running=running,
        waiting=waiting,
    )


def draw_arena(
    plan: Plan, moments: Sequence[Moment], file: BinaryIO, at_s: Sequence[float] | None = None
) -> None:
    """Writes a PNG: bands at their addresses over steps, and below them running and waiting.

    A band is drawn light where it lies and full for the share of it that is held, so light is what
    its holes take.

    Args:
      at_s: seconds of each moment; by default moments are steps, one after another.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second, and only for pictures
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    bands, queue = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = np.arange(len(moments)) if at_s is None else np.array(at_s)
    for pool in plan.sub_pools:
        colour = COLOURS[pool.index % len(COLOURS)]
        low, high = np.array([moment.edges[pool.index] for moment in moments]).T / MEBIBYTE
        live = np.array([moment.live[pool.index] for moment in moments]) / MEBIBYTE
        start = {"low": low, "high": high - live}.get(pool.end, (low + high - live) / 2)
        bands.fill_between(steps, low, high, color=colour, alpha=0.3, lw=0, step="mid")
        bands.fill_between(
            steps, start, start + live, color=colour, lw=0, step="mid",
            label=f"{pool.name} ({'slots' if pool.is_slot else 'pages'})",
        )  # fmt: skip
    bands.axhline(plan.arena_bytes / MEBIBYTE, color="black", lw=0.8)
    bands.set(ylabel="address (MiB)", ylim=(0, plan.arena_bytes / MEBIBYTE * 1.02))
    bands.set_title("One arena: held units full, holes light, the rest free for any kind of state")
    bands.legend(loc="upper right", fontsize="small")
    queue.step(steps, [moment.running for moment in moments], where="mid", label="running")
    queue.step(steps, [moment.waiting for moment in moments], where="mid", label="waiting")
    queue.set(xlabel="step" if at_s is None else "seconds", ylabel="requests", ylim=(0, None))
    queue.legend(loc="upper right", fontsize="small")
    figure.savefig(file, format="png", dpi=120)
