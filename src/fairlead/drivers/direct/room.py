"""Where the tables of listeners are in the arena's memory, and at which places their packets are counted.

In: the slots of a listener, and the record that it has now. Out: a record with room of its own, and the tables in it.
Invariant: what a record in force names is neither given to another one nor written; what was in force rests for a while.
"""

from array import array
from collections.abc import Callable, Collection
from mmap import mmap

from fairlead.drivers.direct.arena import Arena
from fairlead.drivers.direct.layout import BY_SOURCE, CHUNK_BYTES, PREVIOUS_BY_SOURCE, ListenerRecord
from fairlead.drivers.direct.places import Places
from fairlead.errors import FairleadError
from fairlead.net.transition import Slots, renumber


def _chunks(size: int) -> int:
    return -(-size * 2 // CHUNK_BYTES)


def _regions(record: ListenerRecord) -> tuple[tuple[int, int], tuple[int, int]]:
    return (
        (record.current_offset, _chunks(record.current_size)),
        (record.previous_offset, _chunks(record.previous_size)),
    )


class Room:
    """Of `chunks` chunks in `memory`, all of it free at first."""

    def __init__(self, memory: mmap, chunks: int, places: Places, clock: Callable[[], float]) -> None:
        self._memory = memory
        self._chunks = chunks
        self._places = places
        self._clock = clock
        self._arena = Arena(chunks)

    def find(self, records: Collection[ListenerRecord]) -> None:
        """See anew what is free, where these records are in force."""
        self._arena = Arena(self._chunks, (region for each in records for region in _regions(each)), self._arena.resting)
        self._places.all_but({each.statistics for each in records})

    def reserve(self, slots: Slots, old: ListenerRecord | None) -> ListenerRecord:
        """Room for the tables, and a place to count at: that of `old`, in whose place it is to come. Raises Unavailable."""
        current, previous, now_s = len(slots.current) // 2, len(slots.previous) // 2, self._clock()
        flags = BY_SOURCE * slots.by_source | PREVIOUS_BY_SOURCE * slots.previous_by_source
        statistics = old.statistics if old else self._places.take()
        record = ListenerRecord(0, 0, 0, 0, flags, statistics)
        try:
            offset = self._arena.reserve(_chunks(current), now_s) if current else 0
            record = ListenerRecord(offset, current, 0, 0, flags, statistics)
            if previous:
                offset = self._arena.reserve(_chunks(previous), now_s)
                record = record._replace(previous_offset=offset, previous_size=previous)
        except FairleadError:
            self.give_back(record, old)
            raise
        return record

    def give_back(self, reserved: ListenerRecord, old: ListenerRecord | None) -> None:
        """What was reserved in the place of `old` is not needed."""
        self.release(reserved)
        if old is None:
            self._places.give_back(reserved.statistics)

    def release(self, record: ListenerRecord) -> None:
        """Its tables are in force no more."""
        for offset, length in _regions(record):
            self._arena.give_back(offset, length, self._clock())

    def write(self, slots: Slots, record: ListenerRecord, numbers: "array[int]") -> int:
        """Put the tables where nobody reads. `numbers`: of the nodes. Their digest."""
        written = []
        for table, offset in ((slots.current, record.current_offset), (slots.previous, record.previous_offset)):
            data = renumber(array("H", table), numbers).tobytes() if table else b""
            self._memory[offset * CHUNK_BYTES : offset * CHUNK_BYTES + len(data)] = data
            written.append(data)
        return hash(tuple(written))
