"""What the device has not heard of yet: moves, and changes of its tables.

Changes gather here while the host grants and frees, and leave in packets. A change that is
overwritten before it left is sent once. Whatever does not fit the next step packet goes ahead of it
in upkeep packets.
"""

from collections.abc import Sequence

import numpy as np

from unimem_jax.allocator import Allocator
from unimem_jax.packet import UPKEEP_MOVES, UPKEEP_UPDATES, Packet, Shape, blank, upkeep_shape
from unimem_jax.page_tables import Tables
from unimem_jax.plan import Plan
from unimem_jax.requests import Work


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
        self._changes.update(zip(range(cell, cell + len(ids)), ids, strict=True))

    def upkeep(self, room: int) -> list[Packet]:
        """Packets for all moves, and for table changes beyond the `room` of the packet that
        follows.
        """
        packets = []
        for batch in self.allocator.take_moves():
            for at in range(0, len(batch.sources), UPKEEP_MOVES):
                packet, words = self._blank(upkeep_shape(self.plan, batch.sub_pool))
                sources = batch.sources[at : at + UPKEEP_MOVES]
                words["move_count"][0] = len(sources)
                words["sources"][: len(sources)] = sources
                words["destinations"][: len(sources)] = batch.destinations[at : at + UPKEEP_MOVES]
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

    def step_packet(self, shape: Shape, work: Sequence[Work], ids: Sequence[np.ndarray]) -> Packet:
        """One step packet: pending changes, and row by row what `work` does with tokens `ids`."""
        packet, words = self._blank(shape)
        self._write_changes(words, shape.updates)
        count = len(work)
        requests = [item.request for item in work]
        words["row"][:count] = [request.row for request in requests]
        words["position"][:count] = [request.length for request in requests]
        words["count"][:count] = [item.count for item in work]
        words["emit"][:count] = [item.emit and item.count > 0 for item in work]
        words["start"][:count] = words["position"][:count] == 0
        for at, (request, tokens) in enumerate(zip(requests, ids, strict=True)):
            words["options"][at] = request.options
            words["tokens"][at, : len(tokens)] = tokens
        if shape.slots and requests:
            none = [0] * shape.slots  # of a request without a token, which addresses nothing
            words["slot"][:count] = [request.slots or none for request in requests]
        return packet

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
            taken = {index: self._changes.pop(index) for index in list(self._changes)[:most]}
        words["updates_index"][: len(taken)] = list(taken)
        words["updates_value"][: len(taken)] = list(taken.values())
