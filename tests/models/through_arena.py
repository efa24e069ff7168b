"""Serves prompts through one arena with few compiled shapes, keeping every step's logits."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import unimem_jax as um
from unimem_jax.allocator import number_of
from unimem_jax.requests import Request, Work
from unimem_jax.spec import PartKey

# Compiling takes nearly all of the time of these tests, and this a third less.
QUICK = {"xla_backend_optimization_level": 0}


class Service:
    """A model over an arena: one program for chunks and one for single tokens.

    Args:
      rows: of both programs; fewer requests leave padding rows.
    """

    def __init__(
        self, model: Any, params: Any, *, page_tokens: int, chunk_tokens: int, rows: int,
        context_tokens: int, arena_bytes: int = 1 << 20,
    ):  # fmt: skip
        self.plan = um.plan(model.parts(), arena_bytes, page_tokens)
        self.memory = um.Memory(
            self.plan, rows=rows, context_tokens=context_tokens, chunk_tokens=chunk_tokens
        )
        self.params, self.rows, self.chunk_tokens = params, rows, chunk_tokens
        self.device = self.memory.init()
        self._pages = self.memory.bucket_pages(context_tokens)
        self._run = jax.jit(um.step(model, self.plan), donate_argnums=1, compiler_options=QUICK)

    def prefill(self, known: Sequence[Sequence[int]], room: int) -> tuple[list[Request], Any]:
        """Admits one request per list of tokens and runs them in chunks, all rows together.

        Returns:
          The requests, and the logits [rows, V] at their last tokens.
        """
        requests = [self.memory.admit(len(ids), room) for ids in known]
        last = [np.zeros(0)] * len(known)
        while left := [at for at, ids in enumerate(known) if requests[at].length < len(ids)]:
            work = []
            for at in left:
                start = requests[at].length
                chunk = np.asarray(known[at][start : start + self.chunk_tokens], np.int32)
                work.append(Work(requests[at], len(chunk), chunk))
            logits = self._step(work, self.chunk_tokens)
            for row, at in enumerate(left):
                last[at] = logits[row]
        return requests, np.stack(last)

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, retracted: tuple[int, int] | None = None
    ) -> tuple[list[list[int]], np.ndarray]:
        """Greedy tokens of each prompt, and the logits [prompts, count, V] they were taken from.

        Args:
          retracted: (prompt, token): this prompt loses its memory before that token is computed,
            and computes what it knows again.
        """
        requests, logits = self.prefill(prompts, count)
        found = [logits]
        new = [[int(row.argmax())] for row in logits]
        while len(found) < count:
            if retracted is not None and len(found) == retracted[1]:
                at = retracted[0]
                self.memory.free(requests[at])
                known = [*prompts[at], *new[at][:-1]]
                (requests[at],), _ = self.prefill([known], count)
            work = [
                Work(request, 1, np.asarray(tokens[-1:], np.int32))
                for request, tokens in zip(requests, new, strict=True)
            ]
            found.append(self._step(work, 1)[: len(prompts)])
            for tokens, row in zip(new, found[-1], strict=True):
                tokens.append(int(row.argmax()))
            self.memory.check()
        for request in requests:
            self.memory.free(request)
        assert not any(self.memory.metrics()["live"]), "something is still held"
        return new, np.stack(found, axis=1)

    def stored(self, request: Request, key: PartKey, positions: range) -> np.ndarray:
        """What the arena holds of a float32 part [positions, *shape], read byte by byte through
        the host's mapping.
        """
        pool, lane = self.plan.locate(key)
        arena = np.asarray(self.device.arena).view(np.uint32).reshape(-1, pool.entry_words)
        entries = []
        for position in positions:
            page, offset = divmod(position, self.plan.page_tokens)
            address = int(self.memory.allocator.mapping[pool.index][number_of(request.ids[page])])
            assert 0 <= address < pool.unit_count, f"{key} of token {position} is absent"
            row = arena[address * self.plan.page_tokens + offset]
            entries.append(row[lane.offset_words : lane.offset_words + lane.words])
        return np.stack(entries).view(np.float32).reshape(len(positions), *lane.part.shape)

    def _step(self, work: Sequence[Work], tokens: int) -> np.ndarray:
        packets = self.memory.run(work, rows=self.rows, tokens=tokens, pages=self._pages)
        for packet in packets:
            self.device, out = self._run(self.params, self.device, packet)
        logits = np.array(out.logits)
        assert np.asarray(out.sampled)[: len(work)].tolist() == (
            logits[: len(work)].argmax(axis=1).tolist()
        )
        return logits
