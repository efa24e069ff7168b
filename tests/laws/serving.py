"""Serves prompts through one memory, step by step, and keeps the logits of every step.

No engine: every choice that may not matter (company, order of rows, chunks, padding, fused steps,
when memory is taken away) is an argument here.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

import unimem_jax as um
from unimem_jax.errors import OutOfMemory
from unimem_jax.memory import GREEDY_WORDS
from unimem_jax.requests import Request, Work


@dataclass(frozen=True)
class Program:
    """A model on one plan; its compiled steps are shared by all who serve with it."""

    model: Any
    params: Any
    plan: um.Plan

    @cached_property
    def run(self) -> Any:
        """The step, with the device donated."""
        return jax.jit(um.step(self.model, self.plan), donate_argnums=1)

    @cached_property
    def fused(self) -> Any:
        """As many steps as a packet has, in one program."""
        step = um.step(self.model, self.plan)

        def scanned(params: Any, device: Any, packet: Any) -> Any:
            return jax.lax.scan(partial(step, params), device, packet)

        return jax.jit(scanned, donate_argnums=1)


@dataclass(frozen=True)
class Way:
    """One way to serve the same prompts.

    Attributes:
      chunk: prompt tokens per step; more than any prompt has is whole prompts.
      rows, tokens: compiled shape of steps with prompt tokens; by default `chunk` tokens.
      fused: decode steps per program while no prompt is left to read; 1: none are fused.
      admits: whether requests commit all they need at once.
      shuffle: seed of the order of rows, anew in each step; None keeps it.
      late: steps after which each further request comes.
      retract_at: memory of a request is taken away once it has so many new tokens.
    """

    chunk: int = 16
    rows: int = 4
    tokens: int | None = None
    fused: int = 1
    admits: bool = False
    shuffle: int | None = None
    late: int = 3
    retract_at: dict[int, int] = field(default_factory=dict)
    layout: Any = "unified"


@dataclass
class Served:
    """One prompt on its way."""

    number: int
    known: list[int]
    prompt_tokens: int
    options: Any
    request: Request | None = None
    logits: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def new(self) -> list[int]:
        """Tokens after the prompt."""
        return self.known[self.prompt_tokens :]


class Service:
    """Serves prompts one `Way`; `moves` and `retractions` say what it took."""

    def __init__(self, program: Program, way: Way, context_tokens: int):
        self.program, self.way, self.context = program, way, context_tokens
        self.memory = um.Memory(
            program.plan, way.rows, context_tokens, chunk_tokens=min(way.chunk, context_tokens),
            fused_steps=max(8, way.fused), layout=way.layout,
        )  # fmt: skip
        self.device = self.memory.init()
        self.pages = self.memory.tables.row_pages
        self.rng = np.random.default_rng(way.shuffle)
        self.retractions = 0

    @property
    def moves(self) -> int:
        """Units moved so far."""
        return sum(self.memory.metrics()["moved_units"])

    def serve(
        self, prompts: list[list[int]], count: int, options: list[Any] | None = None
    ) -> list[Served]:
        """`count` new tokens of every prompt."""
        words = options or [GREEDY_WORDS] * len(prompts)
        every = [
            Served(number, list(prompt), len(prompt), words[number])
            for number, prompt in enumerate(prompts)
        ]
        retract_at, turn = dict(self.way.retract_at), 0
        most_turns = 50 * sum(len(one.known) + count for one in every)
        while any(len(one.new) < count for one in every):
            for at, one in enumerate(every):
                if one.request is not None and len(one.new) >= retract_at.get(at, count):
                    del retract_at[at]
                    self._retract(one)
                if turn >= at * self.way.late and one.request is None and len(one.new) < count:
                    self._begin(one, count)
            running = [one for one in every if one.request is not None]
            if running:
                self._turn(running, count)
            for one in running:
                if one.request is not None and len(one.new) >= count:
                    self.memory.free(one.request)
                    one.request = None
            self.memory.check()
            turn += 1
            assert turn < most_turns, "requests take each other's memory for ever"
        assert not retract_at, "nothing was retracted"
        assert not any(self.memory.metrics()["live"]), "something is still held"
        return every

    def _begin(self, one: Served, count: int) -> None:
        most = one.prompt_tokens + count
        try:
            if self.way.admits:
                room = most - len(one.known)
                one.request = self.memory.admit(len(one.known), room, one.options)
            else:
                one.request = self.memory.open(one.options, most)
        except OutOfMemory:
            assert self.memory.free_rows < self.memory.rows, "an empty memory refuses"

    def _retract(self, one: Served) -> None:
        assert one.request is not None
        self.memory.free(one.request)
        one.request = None
        self.retractions += 1

    def _turn(self, running: list[Served], count: int) -> None:
        if self.way.shuffle is not None:
            running = [running[at] for at in self.rng.permutation(len(running))]
        while True:
            try:
                return self._advance(running, count)
            except OutOfMemory:
                # The oldest always goes on, so every request ends.
                assert len(running) > 1, "one request alone does not fit"
                youngest = max(running, key=lambda one: one.number)
                self._retract(youngest)
                running = [one for one in running if one is not youngest]

    def _advance(self, running: list[Served], count: int) -> None:
        left = min(count - len(one.new) for one in running)
        is_ready = all(self._unread(one) == 1 and one.new for one in running)
        if 1 < self.way.fused <= left and is_ready:
            self._decode(running, self.way.fused)
        else:
            self._step(running)

    def _unread(self, one: Served) -> int:
        assert one.request is not None
        return len(one.known) - one.request.length

    def _step(self, running: list[Served]) -> None:
        work = []
        for one in running:
            request = one.request
            assert request is not None
            if self._unread(one) == 1 and request.has_sampled:
                work.append(Work(request, 1))  # the token stays on the device
                continue
            chunk = np.asarray(one.known[request.length :][: self.way.chunk], np.int32)
            work.append(Work(request, len(chunk), chunk, self._unread(one) == len(chunk)))
        tokens = 1 if all(item.count == 1 for item in work) else self.way.tokens or self.way.chunk
        packets = self.memory.run(work, rows=self.way.rows, tokens=tokens, pages=self.pages)
        for packet in packets:
            self.device, out = self.program.run(self.program.params, self.device, packet)
        self._note(running, np.array(out.logits), np.array(out.sampled))

    def _decode(self, running: list[Served], steps: int) -> None:
        requests = [one.request for one in running]
        starts = [one.request.length for one in running if one.request is not None]
        for packet in self.memory.decode(steps, [request for request in requests if request]):
            self.device, out = self.program.fused(self.program.params, self.device, packet)
        for at in range(steps):
            for one, start, logits in zip(running, starts, np.array(out.logits)[at], strict=True):
                one.logits[start + at] = logits
            for one, token in zip(running, np.array(out.sampled)[at], strict=True):
                one.known.append(int(token))

    def _note(self, running: list[Served], logits: np.ndarray, sampled: np.ndarray) -> None:
        assert (sampled[len(running) :] == -1).all(), "padding sampled a token"
        for one, row, token in zip(running, logits, sampled, strict=False):
            assert one.request is not None
            one.logits[one.request.length - 1] = row
            if one.request.has_sampled:
                one.known.append(int(token))
            else:
                assert token == -1, "a chunk that does not end its prompt sampled a token"


def program(model: Any, params: Any, arena_bytes: int, page_tokens: int) -> Program:
    """A model on an arena of its own plan."""
    return Program(model, params, um.plan(model.parts(), arena_bytes, page_tokens))
