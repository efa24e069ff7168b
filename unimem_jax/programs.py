"""The compiled programs of one model: one per packet shape, with the parameters bound.

A program is compiled before it first runs and then looked up by the packet's shape. Nothing else
can reach the device, so what `compile` was told of runs without tracing or compiling again.

R1  Modules and nested dictionaries stay outside: only a flat list of parameters crosses into a
    program.
R2  The device state is donated: after a call only what it returned is alive.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from unimem_jax.packet import Packet, Shape
from unimem_jax.plan import Plan
from unimem_jax.step import DeviceState, Model, StepOut, step

MOST_THREADS = 4  # a compiler takes memory of its own, and XLA has threads besides


class Programs:
    """What runs packets on the device.

    Args:
      model: anything that follows `step.Model`.
      params: its parameters, a pytree of arrays; they are put on the device.
      plan: made from `model.parts()`.
    """

    def __init__(self, model: Model, params: Any, plan: Plan):
        leaves, structure = jax.tree.flatten(params)
        self._leaves = jax.device_put(leaves)
        run = step(model, plan)
        self._jitted = jax.jit(
            lambda flat, device, packet: run(jax.tree.unflatten(structure, flat), device, packet),
            donate_argnums=1,
        )
        self._compiled: dict[Shape, Any] = {}

    def __call__(self, device: DeviceState, packet: Packet) -> tuple[DeviceState, StepOut]:
        """Dispatches a packet; compiles its program if nobody did."""
        found = self._compiled.get(packet.shape)
        if found is None:
            self.compile(device, [packet])
            found = self._compiled[packet.shape]
        return found(self._leaves, device, packet)

    def compile(
        self,
        device: DeviceState,
        packets: Iterable[Packet],
        on_program: Callable[[int], object] | None = None,
    ) -> None:
        """Compiles the programs that run packets of these shapes, and runs none.

        Programs are traced one by one, under Python's lock, and compiled in threads meanwhile.

        Args:
          device: its shapes matter, and not what it holds.
          on_program: told 1 after each program.
        Cost: one compilation per shape that is not in JAX's cache, seconds each for a real model.
        """
        threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
        running: deque[tuple[Shape, Future[Any]]] = deque()

        def collect(wait: bool) -> None:
            while running and (wait or running[0][1].done()):
                shape, future = running.popleft()
                self._compiled[shape] = future.result()
                if on_program is not None:
                    on_program(1)

        try:
            for packet in packets:
                if packet.shape in self._compiled:
                    if on_program is not None:
                        on_program(1)
                    continue
                lowered = self._jitted.lower(self._leaves, device, packet)
                running.append((packet.shape, threads.submit(lowered.compile)))
                collect(wait=False)
            collect(wait=True)
        finally:
            threads.shutdown(cancel_futures=True)
