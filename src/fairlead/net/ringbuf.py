"""Read the records that an eBPF program writes into a ring buffer map.

In: a map of type BPF_MAP_TYPE_RINGBUF. Out: records, in the order in which they were reserved. A
slow reader does not block the program: when the ring is full, the program drops the record and may
count the drop. Invariant: a record is copied before its space is released. One reader at a time, in
one thread. Follows Documentation/bpf/ringbuf.rst: a page with the consumer's position, a page with
the producer's position, then the data, which is mapped twice in a row so that a record that wraps
around is contiguous."""

import mmap
import struct

from fairlead.net.bpf import Map, failure

_POSITION = struct.Struct("=Q")
_HEADER = struct.Struct("=II")
_BUSY, _DISCARD = 1 << 31, 1 << 30


class RingBuffer:
    """The reader of a ring buffer. `descriptor` is readable (poll, epoll) while there are
    records."""

    def __init__(self, ring: Map) -> None:
        self.descriptor = ring.descriptor
        self._mask = ring.spec.max_entries - 1
        try:
            self._consumer = mmap.mmap(
                ring.descriptor, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
            size = mmap.PAGESIZE + 2 * ring.spec.max_entries
            self._producer = mmap.mmap(
                ring.descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ, offset=mmap.PAGESIZE
            )
        except OSError as error:
            raise failure(error, f"mapping {ring.name} into memory") from error

    def read(self, max_records: int) -> list[bytes]:
        """Return up to `max_records` records without waiting."""
        records: list[bytes] = []
        (begun,) = _POSITION.unpack_from(self._consumer)
        at = begun
        (end,) = _POSITION.unpack_from(self._producer)
        while at < end and len(records) < max_records:
            start = mmap.PAGESIZE + (at & self._mask)
            length, _ = _HEADER.unpack_from(self._producer, start)
            if length & _BUSY:  # still being written; later records have to wait
                break
            size = length & ~_DISCARD
            if not length & _DISCARD:
                records.append(self._producer[start + _HEADER.size : start + _HEADER.size + size])
            at += -(-(size + _HEADER.size) // 8) * 8
        if at != begun:
            _POSITION.pack_into(self._consumer, 0, at)
        return records

    def close(self) -> None:
        """Unmap the memory; the map stays."""
        self._consumer.close()
        self._producer.close()
