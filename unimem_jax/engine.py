"""Continuous batching: many prompts at once through one arena.

The engine owns the device state and the clock. Everything it decides is decided elsewhere: who runs
(`schedule`), where state lives (`memory`), what a step computes (`step`), where text ends (`text`).
A step of the engine is at most one program for all rows that decode and a few for chunks of
prompts, each of a shape from a short list, so that nothing compiles after `warm_up`.

E1  After every call the memory holds what running generations have computed, and what the prefix
    cache keeps of others where there is one; nothing else.
E2  A generation that is retracted or restarted goes on with the same tokens: it computes what it
    knows again, and randomness comes from (seed, position) alone.
E3  Whatever is wrong with a prompt or its options is found before anything runs.
E4  SIGINT is delivered between changes, never inside one.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unimem_jax.admission import CHECKPOINT_TOKENS, Admission, PrefixAdmission
from unimem_jax.allocator import UNIFIED, Split
from unimem_jax.errors import InvariantError, UsageError, require_counts, require_positive
from unimem_jax.interrupts import interrupts_held
from unimem_jax.memory import Memory
from unimem_jax.packet import Packet, Shape, blank, step_shape, upkeep_shape
from unimem_jax.plan import plan
from unimem_jax.programs import Programs
from unimem_jax.queue import FIRST_COME, Queue, require_priority
from unimem_jax.sampling import Sampling
from unimem_jax.schedule import Limits, batches
from unimem_jax.serving import Completion, Intake, Piece, Prompt, Served, joined
from unimem_jax.statistics import Statistics
from unimem_jax.step import Model, StepOut
from unimem_jax.text import ByteText, Tokenizer

CONTEXT_TOKENS = 4096  # of a model that names no longest sequence
CHUNK_ROWS = 4  # rows of one program that runs chunks of prompts


class Engine:
    """Generates for many prompts at once.

    Args:
      model: anything that follows `step.Model`. `context_tokens`, `start_token`, `end_tokens` (each
        ends a text when sampled) and `text` are used where it has them.
      params: its parameters, a pytree of arrays.
      arena_bytes: device bytes for all token state.
      page_tokens: tokens per page.
      rows: most requests that run at once.
      chunk_tokens: most tokens of a prompt that one step computes.
      context_tokens: longest request, prompt and new tokens; the model's by default.
      layout: `UNIFIED`, or `Split(caps)` to compare with separate pools.
      compaction_bytes: most bytes that a step moves ahead of need, to pay down fragmentation.
      prefix_cache: whether what requests leave behind is kept, as long as nobody wants its bytes,
        for others that begin with the same tokens.
      checkpoint_tokens: with it, fewest tokens of a prompt that a copy of running state saves.
      tokenizer: turns text into tokens and back; a model with `text == "bytes"` needs none.
      program_folder: keeps compiled programs of models of this package, so that the next start
        neither traces nor compiles; a folder that only its owner writes, since it holds code.
      policy: of `schedule`: "predicted", "bounded" or "first-come".
    Raises:
      UsageError: wrong sizes or policy, an arena too small (itemised), or too long a context.
    """

    memory: Memory
    _admission: Admission
    _device: Any

    def __init__(
        self, model: Model, params: Any, *, arena_bytes: int, page_tokens: int = 16,
        rows: int = 64, chunk_tokens: int = 64, context_tokens: int | None = None,
        layout: str | Split = UNIFIED, compaction_bytes: int = 0,
        prefix_cache: bool = False, checkpoint_tokens: int = CHECKPOINT_TOKENS,
        tokenizer: Tokenizer | None = None, program_folder: str | Path | None = None,
        policy: str = FIRST_COME,
    ):  # fmt: skip
        (compaction_bytes,) = require_counts(compaction_bytes=compaction_bytes)
        (checkpoint_tokens,) = require_positive(checkpoint_tokens=checkpoint_tokens)
        longest = getattr(model, "context_tokens", None)
        context = longest or CONTEXT_TOKENS if context_tokens is None else context_tokens
        context, rows, chunk_tokens = require_positive(
            context_tokens=context, rows=rows, chunk_tokens=chunk_tokens
        )
        if longest is not None and context > longest:
            raise UsageError(f"the model was made for {longest} tokens, not for {context}")
        if tokenizer is None and getattr(model, "text", None) == "bytes":
            tokenizer = ByteText(getattr(model, "start_token", None))
        end_ids = frozenset(getattr(model, "end_tokens", ()))
        self.intake = Intake(tokenizer, model.vocab_size, context, end_ids)
        self.plan = plan(model.parts(), arena_bytes, page_tokens)
        chunk_tokens = min(chunk_tokens, context)
        self.limits = Limits(rows, rows + CHUNK_ROWS * chunk_tokens, chunk_tokens, CHUNK_ROWS)
        self._layout, self._compaction_bytes = layout, compaction_bytes
        self._checkpoint_tokens = checkpoint_tokens if prefix_cache else 0
        self.queue: Queue[Served] = Queue(policy)
        self._served: dict[int, Served] = {}
        self._streamed: set[int] = set()  # indices that `stream` and `generate` read
        self._unread: list[Piece] = []
        self._next_index = 0
        self._steps = self._running_sum = self._running_max = 0
        self._retractions = self._computed = self._generated = 0
        self._sums = (0, 0)  # of memories that were lost
        self._seconds = 0.0
        folder = None if program_folder is None else Path(program_folder)
        self._run = Programs(model, params, self.plan, folder)
        self._start_memory()

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits, and `step` has nothing left to return."""
        return not self._served and all(piece.index in self._streamed for piece in self._unread)

    def generate(
        self, prompts: str | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None, namespace: Hashable = None,
    ) -> list[Completion]:  # fmt: skip
        """Runs prompts to their end.

        Args:
          prompts: texts, or token ids as sequences of ints; one text alone is one prompt.
          sampling: for all prompts, or one for each; greedy by default.
          namespace: whose kept prefixes the prompts may begin with; others are never looked at.
        Returns:
          One completion per prompt, in order; of one with `n` samples that many, one after another.
        Raises:
          UsageError: for any wrong prompt, before anything runs.
        """
        served = self.intake.check_all(prompts, sampling, self.memory, namespace)
        pieces: list[list[Piece]] = [[] for _ in served]
        for piece in self._stream(served):
            pieces[piece.index].append(piece)
        return [joined(found, one.prompt_tokens) for one, found in zip(served, pieces, strict=True)]

    def stream(
        self, prompts: str | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None, namespace: Hashable = None,
    ) -> Iterator[Piece]:  # fmt: skip
        """As `generate`, piece by piece as the tokens come.

        Closing the iterator gives up its requests and frees their memory. A wrong prompt raises
        here, not at the first piece.
        """
        return self._stream(self.intake.check_all(prompts, sampling, self.memory, namespace))

    def submit(
        self, prompt: Prompt, sampling: Sampling | None = None, namespace: Hashable = None, *,
        priority: int = 0,
    ) -> int:  # fmt: skip
        """Puts one request at the end of the line of its priority; `step` runs it.

        Its priority is from -100 to 100; higher is more urgent. Returns its index.
        """
        require_priority(priority)
        served, *more = self.intake.check_all([prompt], sampling, self.memory, namespace)
        if more:
            raise UsageError("`submit` runs one sample; `generate` and `stream` run several")
        served.priority = priority
        with interrupts_held():
            return self._submit(served)

    def abort(self, index: int) -> None:
        """Gives up a request, what it generated and nobody read yet, and its memory.

        Raises:
          UsageError: no request of this index runs or waits.
        """
        if index not in self._served:
            raise UsageError(f"no request {index} runs or waits")
        with interrupts_held():
            self._leave(index)
            self._read(lambda unread: unread == index)

    def step(self) -> list[Piece]:
        """Runs one step. Returns what was added to requests of `submit`, in order of admission.

        If the device program fails, its error is raised; all requests wait then, none is lost.
        """
        if self._served:
            self._advance()
        return self._read(lambda index: index not in self._streamed)

    def warm_up(self, on_program: Callable[[int], object] | None = None) -> None:
        """Compiles and runs every program that serving can need, and changes nothing.

        A program's first run takes tens of milliseconds more than the next.

        Args:
          on_program: told 1 after each program.
        Cost: one compilation per shape that is not in JAX's cache, seconds each for a real model.
        """
        memory = self.memory
        packets = [blank(shape, memory.tables.words, memory.rows)[0] for shape in self.shapes()]
        self._run.compile(self._device, packets, on_program)
        for packet in packets:
            with self._unbroken():
                self._dispatch((packet,))

    def shapes(self) -> list[Shape]:
        """The static shapes of all packets that this engine dispatches."""
        pages = [self.memory.bucket_pages(1)]
        while pages[-1] < self.memory.tables.row_pages:
            pages.append(self.memory.bucket_pages(pages[-1] * self.plan.page_tokens + 1))
        rows = {self._row_bucket(count) for count in range(1, self.limits.rows + 1)}
        singles = [(count, 1, some) for count in sorted(rows) for some in pages]
        chunks = [
            (count, self.limits.chunk_tokens, some)
            for count in sorted({1, self._row_bucket(self.limits.chunk_rows)}) for some in pages
            if self.limits.chunk_tokens > 1
        ]  # fmt: skip
        upkeep = [upkeep_shape(self.plan, pool.index) for pool in self.plan.sub_pools]
        return upkeep + [step_shape(self.plan, *sizes) for sizes in chunks + singles]

    def statistics(self) -> Statistics:
        """Sums over all steps so far."""
        metrics = self.memory.metrics()
        return Statistics(
            steps=self._steps,
            running_mean=self._running_sum / max(1, self._steps),
            running_max=self._running_max,
            retractions=self._retractions,
            generated_tokens=self._generated,
            computed_tokens=self._computed,
            recomputed_tokens=self._sums[0] + self._admission.recomputed_tokens,
            prefix_hit_tokens=self._sums[1] + self._admission.hit_tokens,
            moved_units=sum(metrics["moved_units"]),
            moved_bytes=metrics["moved_bytes"],
            seconds=self._seconds,
            tokens_per_second=self._generated / self._seconds if self._seconds else 0.0,
        )

    def _stream(self, served: list[Served]) -> Iterator[Piece]:
        """Runs requests that were checked; pieces bear their place in `served`."""
        place: dict[int, int] = {}
        try:
            with interrupts_held():
                place |= {self._submit(one): at for at, one in enumerate(served)}
                self._streamed |= place.keys()
            while True:
                pieces = self._read(place.__contains__)
                if not pieces:
                    if self._served.keys().isdisjoint(place):
                        return
                    self._advance()
                for piece in pieces:
                    yield replace(piece, index=place[piece.index])
        finally:
            with interrupts_held():
                for index in self._served.keys() & place.keys():
                    self._leave(index)
                self._read(place.__contains__)
                self._streamed -= place.keys()

    def _advance(self) -> None:
        """One step; what it added is kept for whoever runs the request."""
        began = time.perf_counter()
        with self._unbroken():
            self._step()
            self._seconds += time.perf_counter() - began

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Holds interrupts back (E4); starts anew where a program failed and took the arena."""
        with interrupts_held():
            try:
                yield
            except BaseException:
                self._restart()
                raise

    def _read(self, is_asked: Callable[[int], bool]) -> list[Piece]:
        found = [piece for piece in self._unread if is_asked(piece.index)]
        self._unread = [piece for piece in self._unread if not is_asked(piece.index)]
        return found

    def _submit(self, served: Served) -> int:
        served.index = self._next_index
        self._next_index += 1
        self._served[served.index] = served
        if served.leader is not None and self._admission.holds_back(served):
            served.leader.followers.append(served)
        else:
            self.queue.submit(served)
        return served.index

    def _let_follow(self, served: Served) -> None:
        """Lines up the samples that waited for this one to read their prompt, or one of them to do
        it in its place.
        """
        while served.followers:
            one = served.followers.pop(0)
            self.queue.submit(one, beside=served)
            if self._admission.holds_back(one):  # this one leaves before it has read
                one.leader, one.followers, served.followers = None, served.followers, []
                for other in one.followers:
                    other.leader = one

    def _step(self) -> None:
        memory = self.memory
        decided = self._admission.decide(self.queue, self.limits)
        if not decided.work:
            raise InvariantError("C2: a step without work while requests wait")
        self._admission.enact(decided)
        outs = [(batch, self._run_batch(batch)) for batch in batches(decided.work, self.limits)]
        self.queue.apply(decided)
        self._admission.keep(decided.work)
        for served, _ in decided.work:
            if served.followers and not self._admission.holds_back(served.followers[0]):
                self._let_follow(served)
        self._steps += 1
        self._running_sum += len(self.queue.running)
        self._running_max = max(self._running_max, len(self.queue.running))
        self._retractions += len(decided.retracted)
        self._computed += sum(count for _, count in decided.work)
        sampled: dict[int, int] = {}
        for batch, out in outs:
            tokens = np.asarray(out.sampled).tolist()  # waits for the device
            sampled |= {id(item): token for (item, _), token in zip(batch, tokens, strict=False)}
        memory.retire(memory.ticket)
        memory.allocator.compact(self._compaction_bytes)
        for served, _ in decided.work:
            if served.computed == served.known:
                self._unread.append(self._accept(served, sampled[id(served)]))

    def _run_batch(self, batch: Sequence[tuple[Served, int]]) -> StepOut:
        """Dispatches one batch in the smallest of the compiled shapes that holds it."""
        tokens = 1 if batch[0][1] == 1 else self.limits.chunk_tokens
        past = max(served.computed for served, _ in batch)
        packets = self.memory.run(
            [served.work(count) for served, count in batch],
            rows=self._row_bucket(len(batch)),
            tokens=tokens,
            pages=self.memory.bucket_pages(max(past, 1)),
        )
        return self._dispatch(packets)

    def _dispatch(self, packets: Sequence[Packet]) -> StepOut:
        for packet in packets:
            self._device, out = self._run(self._device, packet)
        return out

    def _accept(self, served: Served, token: int) -> Piece:
        piece = served.accept(token)
        self._generated += 1
        if piece.finish_reason is not None:
            self.queue.learn(served)
            self._leave(served.index)
        return piece

    def _leave(self, index: int) -> None:
        served = self._served.pop(index)
        if served.leader is not None and served in served.leader.followers:
            served.leader.followers.remove(served)
            return
        self.queue.leave(served)
        self._admission.release(served)
        self._let_follow(served)
        if not self._served:
            self._admission.check_idle()

    def _row_bucket(self, count: int) -> int:
        """The smallest power of 4 that holds `count` rows, or all rows."""
        bucket = 1
        while bucket < count:
            bucket *= 4
        return min(bucket, self.limits.rows)

    def _start_memory(self) -> None:
        """Makes empty memory and fresh device state."""
        self._device = None  # the old arena goes before a new one comes
        self.memory = Memory(
            self.plan, self.limits.rows, self.intake.context_tokens,
            chunk_tokens=self.limits.chunk_tokens, layout=self._layout,
        )  # fmt: skip
        self._admission = Admission(self.memory)
        if self._checkpoint_tokens:
            self._admission = PrefixAdmission(self.memory, self._checkpoint_tokens)
        self._device = self.memory.init()

    def _restart(self) -> None:
        """After a failed step: the arena is lost, so every generation waits and will go on (E2)."""
        lost = self._admission
        self._sums = (self._sums[0] + lost.recomputed_tokens, self._sums[1] + lost.hit_tokens)
        for served in self._served.values():
            served.request, served.computed = None, 0
        for served in self.queue.running[:]:
            self.queue.send_back(served)
        self._start_memory()
