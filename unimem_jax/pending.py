"""What the device has not heard of yet: moves, and changes of its tables.

Changes gather here while the host grants and frees, and leave in packets. A change that is
overwritten before it left is sent once. Whatever does not fit the next step packet goes ahead of it
in upkeep packets.
"""

from collections.abc import Sequence

import numpy as np

from unimem_jax.allocator import Allocator, number_of
from unimem_jax.packet import (
    LAST_TOKEN,
    UPKEEP_MOVES,
    UPKEEP_UPDATES,
    Packet,
    Shape,
    blank,
    upkeep_shape,
)
from unimem_jax.page_tables import Tables
from unimem_jax.plan import Plan
from unimem_jax.requests import Batch


class Pending:
    """Gathers changes of the device's tables and writes them, with the allocator's moves, into
    packets.
    """

    def __init__(self, plan: Plan, tables: Tables, rows: int, allocator: Allocator):
        self.plan = plan
        self.tables = tables
        self.rows = rows
        self.allocator = allocator
        self._changes: dict[int, int] = {}

    def set_pages(self, row: int, page: int, ids: Sequence[int]) -> None:
        """Notes that pages `page`, `page + 1`, ... of a row have these ids."""
        cell = self.tables.cell(row, page)
        self._changes.update(zip(range(cell, cell + len(ids)), map(number_of, ids), strict=True))

    def upkeep(self, room: int) -> list[Packet]:
        """Packets for all moves, and for table changes beyond the `room` of the packet that
        follows.
        """
        packets = []
        for batch in self.allocator.take_moves(UPKEEP_MOVES):
            packet, words = self._blank(upkeep_shape(self.plan, batch.sub_pool))
            count = len(batch.sources)
            words["move_count"][0] = count
            words["sources"][:count] = batch.sources
            words["destinations"][:count] = batch.destinations
            packets.append(packet)
        for start, (ids, addresses) in zip(
            self.tables.mapping_start, self.allocator.take_changes(), strict=True
        ):
            if len(ids):
                self._changes.update(zip((start + ids).tolist(), addresses.tolist(), strict=True))
        while len(self._changes) > room:
            packet, words = self._blank(upkeep_shape(self.plan, 0))
            self._write_changes(words, UPKEEP_UPDATES)
            packets.append(packet)
        return packets

    def step_packet(self, shape: Shape, batch: Batch) -> Packet:
        """One step packet: pending changes, and row by row what a batch does."""
        packet, words = self._blank(shape)
        self._write_changes(words, shape.updates)
        count, columns, lengths = len(batch.rows), batch.columns, batch.lengths
        if not count:
            return packet
        words["row"][:count] = batch.rows
        words["position"][:count] = lengths
        words["count"][:count] = batch.counts
        words["emit"][:count] = batch.emits & (batch.counts > 0)
        words["start"][:count] = lengths == 0
        words["options"][:count] = columns.options[batch.rows]
        words["tokens"][:count, 0] = np.where(batch.counts > 0, LAST_TOKEN, 0)
        for at, tokens in batch.named.items():
            words["tokens"][at, : len(tokens)] = tokens
        words["slot"][:count] = number_of(columns.slots[batch.rows])
        return packet

    def forget(self) -> None:
        """Drops what the device has not heard of, where there is no device."""
        ledger = self.allocator.ledger
        for _ in self.allocator.take_moves():
            ledger.retire(ledger.dispatch())
        for table in self.allocator.tables:
            table.dirty_count = 0
        self._changes.clear()

    def _blank(self, shape: Shape) -> tuple[Packet, dict[str, np.ndarray]]:
        """A fresh packet and the next ticket: packets run in the order they are made."""
        self.allocator.ledger.dispatch()
        return blank(shape, self.tables.words, self.rows)

    def _write_changes(self, words: dict[str, np.ndarray], most: int) -> None:
        """Moves up to `most` pending changes into a packet."""
        if not self._changes:
            return
        if len(self._changes) <= most:
            taken, self._changes = self._changes, {}
        else:
            taken = dict(self._changes.popitem() for _ in range(most))
        words["updates_index"][: len(taken)] = list(taken)
        words["updates_value"][: len(taken)] = list(taken.values())
