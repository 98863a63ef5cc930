"""Where the tables of listeners are in the memory of the arena, and at which indexes their packets
are counted.

In: the slots of a listener, and its present record. Out: a record with memory of its own, and the
tables in this memory. Invariant: memory that a record in force names is neither given to another
record nor written, except by `rewrite`. Memory that was in force is not reused during a grace
period.
"""

import ctypes
from array import array
from collections.abc import Callable, Collection
from mmap import mmap

from fairlead.drivers.direct.maps.arena import Arena
from fairlead.drivers.direct.maps.counter_indexes import CounterIndexPool
from fairlead.drivers.direct.maps.records import (
    BY_SOURCE,
    CHUNK_BYTES,
    PREVIOUS_BY_SOURCE,
    ListenerRecord,
)
from fairlead.drivers.direct.maps.sizing import chunks
from fairlead.errors import FairleadError
from fairlead.net.transition import Slots, renumber, renumber_at

Encoded = tuple[bytes, bytes]
"""The tables as the arena contains them: current table, previous table."""


def regions(record: ListenerRecord) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the regions of a listener's tables: offset and length, in chunks."""
    return (
        (record.current_offset, chunks(record.current_size)),
        (record.previous_offset, chunks(record.previous_size)),
    )


class TableAllocator:
    """The memory of `size` chunks, which are all free at first."""

    def __init__(
        self, memory: mmap, size: int, counter_indexes: CounterIndexPool, clock: Callable[[], float]
    ) -> None:
        self._memory = memory
        self._size = size
        self._counter_indexes = counter_indexes
        self._clock = clock
        self._arena = Arena(size)

    def set_in_force(self, records: Collection[ListenerRecord]) -> None:
        """Set the records that are in force; all other memory is free."""
        self._arena = Arena(
            self._size,
            (region for each in records for region in regions(each)),
            self._arena.in_grace,
        )
        self._counter_indexes.set_in_use({each.statistics for each in records})

    def reserve(self, slots: Slots, old: ListenerRecord | None) -> ListenerRecord:
        """Reserve memory for the tables, and an index for counters: the index of `old`, if the
        listener replaces it. Raise OutOfMemory if there is not enough memory."""
        current, previous, now_s = len(slots.current) // 2, len(slots.previous) // 2, self._clock()
        flags = BY_SOURCE * slots.by_source | PREVIOUS_BY_SOURCE * slots.previous_by_source
        statistics = old.statistics if old else self._counter_indexes.allocate()
        record = ListenerRecord(0, 0, 0, 0, flags, statistics)
        try:
            offset = self._arena.reserve(chunks(current), now_s) if current else 0
            record = ListenerRecord(offset, current, 0, 0, flags, statistics)
            if previous:
                offset = self._arena.reserve(chunks(previous), now_s)
                record = record._replace(previous_offset=offset, previous_size=previous)
        except FairleadError:
            self.cancel(record, old)
            raise
        return record

    def cancel(self, reserved: ListenerRecord, old: ListenerRecord | None) -> None:
        """Release a reservation that was made to replace `old`, and that did not come into
        force."""
        self.release(reserved, old)
        if old is None:
            self._counter_indexes.release(reserved.statistics)

    def release(self, record: ListenerRecord, but: ListenerRecord | None = None) -> None:
        """Release the tables of a record that is no longer in force, except tables that `but` names
        as well."""
        kept = regions(but) if but else ()
        for region in regions(record):
            if region not in kept:
                self._arena.release(*region, self._clock())

    def encode(self, slots: Slots, numbers: "array[int]") -> Encoded:
        """Return the tables with the numbers of nodes."""
        current, previous = (
            renumber(array("H", table), numbers).tobytes() if table else b""
            for table in (slots.current, slots.previous)
        )
        return current, previous

    def write(self, tables: Encoded, record: ListenerRecord) -> None:
        """Write the tables to memory in which no packet is looked up."""
        for data, (offset, _) in zip(tables, regions(record), strict=True):
            self._memory[offset * CHUNK_BYTES : offset * CHUNK_BYTES + len(data)] = data

    def rewrite(self, slots: Slots, record: ListenerRecord, numbers: "array[int]") -> None:
        """Write the tables to memory in which packets are being looked up.

        Each slot is written as one store, so a packet finds either the old node or the new one. The
        previous table is written first: its nodes are also right for a slot that still has the old
        current node.
        """
        (current_at, _), (previous_at, _) = regions(record)
        for table, offset in ((slots.previous, previous_at), (slots.current, current_at)):
            if table:
                live = (ctypes.c_uint16 * (len(table) // 2)).from_buffer(
                    self._memory, offset * CHUNK_BYTES
                )
                renumber_at(array("H", table), numbers, ctypes.addressof(live))
                del live  # the memory cannot be unmapped while a reference exists
