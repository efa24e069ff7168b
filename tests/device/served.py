"""Serves random traffic through one arena, with every free byte poisoned before every packet."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from unimem_jax.allocator import number_of
from unimem_jax.errors import OutOfMemory
from unimem_jax.memory import Memory
from unimem_jax.plan import GRANULE_BYTES
from unimem_jax.requests import Work
from unimem_jax.step import DeviceState, step

ROWS, CHUNK, PAGE, CONTEXT_TOKENS = 4, 8, 4, 48
ROW_PAGES = CONTEXT_TOKENS // PAGE

# What stale bytes of another dtype can look like to each reader, as words.
POISON = {
    "float32 NaN": 0x7FC00000,
    "float32 signalling NaN": 0x7FA0FEED,
    "float32 infinity": 0x7F800000,
    "float32 minus infinity": 0xFF800000,
    "bfloat16 NaN": 0x7FC17FC1,
    "bfloat16 infinities": 0x7F80FF80,
    "float16 NaN": 0x7E017E01,
    "float16 infinities": 0x7C00FC00,
    "float8 NaN": 0x7F7F7F7F,
    "float8 infinities": 0x7CFC7CFC,
    "all ones": 0xFFFFFFFF,
    "least integers": 0x80808080,
}


class Watched(Memory):
    """Notes, between a step's grants and its drops, which bytes are live or are written."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.opened = []
        self.kept = []  # (sub-pool, id) of what is held beside requests
        self.lengths = {}

    def _begin(self, *arguments):
        request = super()._begin(*arguments)
        self.opened.append(request)
        return request

    def free(self, request):
        super().free(request)
        self.opened.remove(request)

    def begin(self):
        """Starts to watch one call."""
        self.lengths = {request.row: request.length for request in self.opened}
        self.during = self.written = None

    def _settle(self, batch):
        requests = batch.requests
        starts = {request.row: (self.lengths[request.row], request.length) for request in requests}
        self.written = entry_bytes(self, requests, starts)
        # Live while the step runs: what was live before it, wherever it lies by now.
        self.during = live_bytes(self, self.lengths)
        super()._settle(batch)


def live_bytes(memory, lengths=None):
    """bool[arena bytes]: what belongs to an entry that some later query can see, and nothing else.

    Holes, padding, unwritten rows of a page, tokens that left their window and slots without a
    token are not live. `lengths` is by row, if not what each request has now.
    """
    found = np.zeros(memory.plan.arena_bytes, np.bool_)
    entries = {pool.index: set() for pool in memory.plan.sub_pools}  # requests share some
    for request in memory.opened:
        length = request.length if lengths is None else lengths[request.row]
        for pool in memory.plan.slot_pools:
            if length:
                entries[pool.index].add(_slot(memory, pool, request))
        for pool in memory.plan.token_pools:
            for position in _written(pool, pool.lifetime.first_kept(length), length):
                entries[pool.index].add(_row(memory, pool, request, position))
    for pool in memory.plan.sub_pools:
        for entry in entries[pool.index]:
            _mark(found, pool, entry)
    units = [(i, memory.allocator.mapping[i][number_of(id_)]) for i, id_ in memory.kept]
    for batch in memory.allocator._moves:  # read by the next packets, whoever holds them by then
        units += [(batch.sub_pool, source) for source in batch.sources]
    for index, unit in units:
        width = memory.plan.sub_pools[index].unit_bytes
        found[int(unit) * width : int(unit + 1) * width] = True
    return found


def entry_bytes(memory, requests, spans):
    """bool[arena bytes]: all of the entries and slots that a step over `spans` may write."""
    found = np.zeros(memory.plan.arena_bytes, np.bool_)
    for request in requests:
        start, stop = spans[request.row]
        for pool in memory.plan.sub_pools:
            if pool.is_slot and stop > start:
                entries = [_slot(memory, pool, request)]
            elif pool.is_slot:
                continue
            else:
                kept = pool.lifetime.first_kept(stop) // memory.plan.page_tokens
                first = max(start, kept * memory.plan.page_tokens)
                entries = [_row(memory, pool, request, at) for at in _written(pool, first, stop)]
            for entry in entries:
                width = pool.entry_words * 4
                found[entry * width : (entry + 1) * width] = True
    return found


def _written(pool, start, stop):
    """Positions at which tokens complete an entry."""
    return [at for at in range(start, stop) if at % pool.stride == pool.stride - 1]


def _row(memory, pool, request, position):
    page, offset = divmod(position, memory.plan.page_tokens)
    address = int(memory.allocator.mapping[pool.index][number_of(request.ids[page])])
    assert address < pool.unit_count, f"{pool.name} holds nothing for position {position}"
    return address * pool.unit_entries + offset // pool.stride


def _slot(memory, pool, request):
    return int(memory.allocator.mapping[pool.index][number_of(request.slots[0])])


def _mark(found, pool, entry):
    for lane in pool.lanes:
        start = (int(entry) * pool.entry_words + lane.offset_words) * 4
        assert not found[start : start + lane.part.byte_count].any(), "two entries share bytes"
        found[start : start + lane.part.byte_count] = True


def poisoned(arena, live, word):
    """A copy of the arena in which every byte that is not live is that of the pattern."""
    old = np.array(arena)
    assert old.nbytes == live.size == old.shape[0] * GRANULE_BYTES
    pattern = np.full(old.shape, word, np.uint32).view(np.uint8).reshape(-1)
    fresh = np.where(live, old.view(np.uint8).reshape(-1), pattern)
    return jnp.asarray(fresh.view(np.uint32).reshape(old.shape))


class Programs:
    """The compiled step of one model on one plan; shared by all who serve with it."""

    def __init__(self, model, params, plan):
        self.params, self.plan = params, plan
        self.run = jax.jit(step(model, plan), donate_argnums=1)
        self.fused = jax.jit(partial(_scan, step(model, plan)), donate_argnums=1)


def _scan(run, params, device, packets):
    return jax.lax.scan(lambda device, packet: run(params, device, packet), device, packets)


class Served:
    """One memory and one device, and a record of all that came out of it.

    Attributes:
      word: pattern of every free byte, written before every packet; None leaves bytes alone.
      record: per step, the logits and the token of each row that is not padding.
      stray_writes: bytes changed, in `steps` steps, that belong to no entry that was to be written.
      seen: (all tokens up to here, logits after them) of every row of every step.
    """

    def __init__(self, programs, word=None, seed=0):
        self.programs, self.word, self.record = programs, word, []
        self.memory = Watched(programs.plan, ROWS, CONTEXT_TOKENS, chunk_tokens=CHUNK)
        self.device = self.memory.init()
        self.rng = np.random.default_rng(seed)
        self.prompts = {}
        self.seen, self.texts = [], {}
        self.stray_writes = self.steps = 0

    def step(self, work, tokens):
        """One step of up to `ROWS` rows, padded."""
        live = live_bytes(self.memory)
        self.memory.begin()
        packets = self.memory.run(work, rows=ROWS, tokens=tokens, pages=ROW_PAGES)
        for packet in packets[:-1]:
            self._poison(live)
            self._dispatch(packet)
            live = None  # moves may follow moves: only after the last one is it known again
        self._poison(self.memory.during)
        before = np.array(self.device.arena)
        out = self._dispatch(packets[-1])
        self._watch_writes(before)
        count = len(work)
        self._note(work, np.array(out.logits)[:count], np.array(out.sampled)[:count])

    def decode(self, steps, requests):
        """Some fused steps, in one program."""
        live = live_bytes(self.memory)
        self.memory.begin()
        starts = [request.length for request in requests]
        packets = self.memory.decode(steps, requests)
        for packet in packets:
            self._poison(live)
            live = None
            self.device, out = self.programs.fused(self.programs.params, self.device, packet)
        for index, (logits, sampled) in enumerate(zip(out.logits, out.sampled, strict=True)):
            work = [
                Work(request, int(start + index < request.length))
                for request, start in zip(requests, starts, strict=True)
            ]
            self._note(work, np.array(logits), np.array(sampled))

    def serve(self, turns, fused=False):
        """Random turns: a chunk or a decode step of some requests, a start, an end."""
        for _ in range(turns):
            opened = self.memory.opened
            if opened and (self.memory.free_rows == 0 or self.rng.random() < 0.15):
                self.memory.free(opened[int(self.rng.integers(len(opened)))])
            if self.memory.free_rows and self.rng.random() < 0.6:
                request = self.memory.open()
                prompt = self.rng.integers(0, 13, int(self.rng.integers(1, 24)))
                self.prompts[request.row] = prompt.astype(np.int32)
            self._turn(fused)
            self.memory.check()

    def _turn(self, fused):
        opened = self.memory.opened
        unread = [r for r in opened if r.length < len(self.prompts[r.row])]
        ready = [r for r in opened if r not in unread and r.length < r.limit]
        try:
            if unread and (not ready or self.rng.random() < 0.5):
                self.step([self._chunk(r) for r in unread] + [Work(r, 1) for r in ready], CHUNK)
            elif fused and len(ready) >= 2 and self.rng.random() < 0.5:
                self.decode(3, ready[:2])
            elif ready:
                self.step([Work(r, 1) for r in ready], 1)
        except OutOfMemory:
            self.memory.free(opened[0])

    def _chunk(self, request):
        prompt = self.prompts[request.row]
        tokens = prompt[request.length : request.length + CHUNK]
        return Work(request, len(tokens), tokens, request.length + len(tokens) == len(prompt))

    def _note(self, work, logits, sampled):
        self.record.append((logits, sampled))
        for item, row, token in zip(work, logits, sampled, strict=True):
            if item.count == 0:
                continue
            text, last = self.texts.get(item.request, ((), None))
            text = (*text, *((last,) if item.tokens is None else item.tokens.tolist()))
            self.texts[item.request] = text, int(token)
            self.seen.append((text, row))

    def _dispatch(self, packet):
        self.device, out = self.programs.run(self.programs.params, self.device, packet)
        return out

    def _poison(self, live):
        if self.word is not None and live is not None:
            arena = poisoned(self.device.arena, live, self.word)
            self.device = DeviceState(arena, self.device.tables, self.device.last_tokens)

    def _watch_writes(self, before):
        after = np.array(self.device.arena).view(np.uint8).reshape(-1)
        changed = before.view(np.uint8).reshape(-1) != after
        self.steps += 1
        self.stray_writes += int((changed & ~self.memory.written).sum())
