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
from pathlib import Path
from typing import Any

import jax

from unimem_jax.packet import Packet, Shape
from unimem_jax.plan import Plan
from unimem_jax.program_files import ProgramFiles, set_folder
from unimem_jax.step import DeviceState, Model, StepOut, step

MOST_THREADS = 4  # a compiler takes memory of its own, and XLA has threads besides


class Programs:
    """What runs packets on the device.

    Args:
      model: anything that follows `step.Model`.
      params: its parameters, a pytree of arrays; they are put on the device.
      plan: made from `model.parts()`.
      folder: where compiled programs are kept between starts; None keeps none.
    """

    def __init__(self, model: Model, params: Any, plan: Plan, folder: Path | None = None):
        leaves, structure = jax.tree.flatten(params)
        self._folder, self._made_from = folder, (model, plan, structure)
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
        """Compiles the programs that run packets of these shapes, or reads them, and runs none.

        Programs are traced one by one, under Python's lock, and compiled in threads meanwhile.

        Args:
          device: its shapes matter, and not what it holds.
          on_program: told 1 after each program.
        Cost: one compilation per shape that is not in JAX's cache, seconds each for a real model.
        """
        wanted = {packet.shape: packet for packet in packets}
        files = self._files(device)
        threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
        kept, running = {}, deque[tuple[Shape, Future[Any]]]()

        def keep(shape: Shape, program: Any) -> None:
            self._compiled[shape] = program
            if on_program is not None:
                on_program(1)

        def compiled(shape: Shape, lowered: jax.stages.Lowered) -> Any:
            program = lowered.compile()
            if files is not None:
                files.save(shape, program)
            return program

        try:
            if files is not None:
                missing = wanted.keys() - self._compiled.keys()
                kept = {shape: threads.submit(files.load, shape) for shape in missing}
            for shape, packet in wanted.items():
                found = self._compiled.get(shape) or (shape in kept and kept[shape].result())
                if found:
                    keep(shape, found)
                else:
                    lowered = self._jitted.lower(self._leaves, device, packet)
                    running.append((shape, threads.submit(compiled, shape, lowered)))
                while running and running[0][1].done():
                    keep(running[0][0], running.popleft()[1].result())
            for shape, future in running:
                keep(shape, future.result())
        finally:
            threads.shutdown(cancel_futures=True)

    def _files(self, device: DeviceState) -> ProgramFiles | None:
        if self._folder is None:
            return None
        leaves = jax.tree.leaves((self._leaves, device))
        places = {place for leaf in leaves for place in leaf.devices()}
        if len(places) > 1:
            return None
        sizes = [(x.shape, str(x.dtype), x.weak_type, str(x.sharding)) for x in leaves]
        found = set_folder(self._folder, *self._made_from, sizes)
        return None if found is None else ProgramFiles(found, *places)
