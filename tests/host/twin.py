"""Slow twins of the host side: which pages a request holds, and a device that is a NumPy array.

The device twin replays packets as the device program does, and fails where a step would read
something else than what its own request wrote. Every granule holds the code of what was written
there last, or poison.
"""

import numpy as np

from unimem_jax.packet import fields

POISON = -1
POSITIONS, POOLS = 1024, 8  # more than any world has


def pages_held(lifetime, length, page_tokens):
    """Numbers of the pages held between steps: those with a position that the next query sees, or
    one that is not written yet.
    """
    pages = -(-length // page_tokens)
    seen_from = length - lifetime.tokens + 1 if lifetime.kind == "window" else 0
    return {page for page in range(pages) if page * page_tokens + page_tokens - 1 >= seen_from}


def pages_during(lifetime, length, target, page_tokens, fused):
    """Numbers of the pages held while a step, or fused steps, go from `length` to `target`."""
    before = pages_held(lifetime, length, page_tokens)
    if fused:  # the page of each token is there when it is written
        return before | {at // page_tokens for at in range(length, target)}
    return before | pages_held(lifetime, target, page_tokens)


def code(serial, position, pool):
    """What the twin writes for one entry of one request."""
    return (serial * POSITIONS + position) * POOLS + pool


def slot_code(writer, length, pool):
    """What a slot of state holds after `length` tokens, by who ran the last of them."""
    return code(writer(length - 1), length, pool)


def completing(pool, start, stop):
    """Positions of the tokens that complete an entry; with a stride of 1 all."""
    return [at for at in range(start, stop) if (at + 1) % pool.stride == 0]


class Device:
    """The arena as one code per granule, and the tables as the plan's numbers place them."""

    def __init__(self, plan, rows, context_tokens):
        self.plan, self.rows = plan, rows
        self.full_moves = 0  # packets that could not carry one more move
        self.cells = np.full(plan.arena_granules, POISON, np.int64)
        self.row_pages = -(-context_tokens // plan.page_tokens)
        ids = [pool.unit_count if pool.is_slot else plan.id_count for pool in plan.sub_pools]
        self.starts = np.cumsum([0, *ids]).tolist()
        self.table_start = self.starts.pop()
        self.tables = np.zeros(self.table_start + rows * self.row_pages, np.int64)
        for pool, start, count in zip(plan.sub_pools, self.starts, ids, strict=True):
            self.tables[start : start + count] = pool.unit_count

    def run(self, packet, writers=()):
        """Runs a packet of one step; `writers[i]` tells the serial of the request that wrote a
        position of row i's text.
        """
        found = {
            name: packet.words[start : start + int(np.prod(dims))].reshape(dims)
            for name, (start, dims) in fields(packet.shape).items()
        }
        if packet.shape.move_pool >= 0:
            count = int(found["move_count"][0])
            self.full_moves += count == len(found["sources"])
            pool = self.plan.sub_pools[packet.shape.move_pool]
            self._move(pool, found["sources"][:count], found["destinations"][:count])
        index, value = found["updates_index"], found["updates_value"]
        assert index.min(initial=0) >= 0, "addressed from the end"
        kept = index < self.tables.size
        assert len(set(index[kept].tolist())) == kept.sum(), "a cell is changed twice at once"
        self.tables[index[kept]] = value[kept]
        if packet.shape.rows:
            self._forward(found, writers)

    def address(self, pool, id_):
        """What the device's mapping holds for an id."""
        return int(self.tables[self.starts[pool.index] + id_])

    def page_address(self, pool, row, page):
        """The address behind one cell of a row's page table."""
        return self.address(pool, int(self.tables[self.table_start + row * self.row_pages + page]))

    def entry(self, pool, address, offset):
        """Granules of the entry of the token at an offset of a page, or of a slot at offset 0."""
        assert 0 <= address < pool.unit_count, f"{pool.name} holds nothing here"
        width = pool.entry_words // 32
        start = address * pool.unit_granules + offset // pool.stride * width
        return slice(start, start + width)

    def poison_all_but(self, spans):
        """Poisons every granule outside the slices of `spans`."""
        fresh = np.full_like(self.cells, POISON)
        for span in spans:
            assert (fresh[span] == POISON).all(), "two entries share a granule"
            fresh[span] = self.cells[span]
        self.cells = fresh

    def _move(self, pool, sources, destinations):
        assert not set(sources.tolist()) & set(destinations.tolist())
        units = self.cells[: pool.unit_count * pool.unit_granules].reshape(pool.unit_count, -1)
        units[destinations] = units[sources]

    def _forward(self, found, writers):
        count = found["count"]
        assert not count[len(writers) :].any()
        assert (found["row"][len(writers) :] == self.rows).all(), "padding that names a row"
        assert not found["emit"][count == 0].any(), "a row without a token samples one"
        rows = [at for at in range(len(writers)) if count[at]]
        writes = []
        for at in rows:
            span = found["row"][at], int(found["position"][at]), int(count[at])
            assert bool(found["start"][at]) == (span[1] == 0)
            for pool in self.plan.token_pools:
                self._read_tokens(pool, *span[:2], writers[at])
                writes += self._token_writes(pool, *span, writers[at])
            for ordinal, pool in enumerate(self.plan.slot_pools):
                slot = self.entry(pool, self.address(pool, int(found["slot"][at, ordinal])), 0)
                if span[1]:
                    wanted = slot_code(writers[at], span[1], pool.index)
                    assert (self.cells[slot] == wanted).all(), f"{pool.name} is not its own"
                writes.append((slot, slot_code(writers[at], span[1] + span[2], pool.index)))
        written = np.zeros(self.cells.size, np.int32)
        for span, content in writes:  # all reads came before
            written[span] += 1
            self.cells[span] = content
        assert written.max(initial=0) <= 1, "two entries are written to one granule"

    def _read_tokens(self, pool, row, position, writer):
        for at in completing(pool, pool.lifetime.first_kept(position), position):
            page, offset = divmod(at, self.plan.page_tokens)
            entry = self.entry(pool, self.page_address(pool, row, page), offset)
            found = self.cells[entry]
            assert (found == code(writer(at), at, pool.index)).all(), (
                f"{pool.name}: token {at} of request {writer(at)} reads {found.tolist()}"
            )

    def _token_writes(self, pool, row, position, count, writer):
        """What a step writes: a page that the end of the chunk makes invisible is left out."""
        first = pool.lifetime.first_kept(position + count) // self.plan.page_tokens
        for at in completing(pool, position, position + count):
            page, offset = divmod(at, self.plan.page_tokens)
            if page >= first:
                address = self.page_address(pool, row, page)
                yield self.entry(pool, address, offset), code(writer(at), at, pool.index)
