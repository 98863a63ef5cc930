"""The map `listeners`, which the eBPF program reads through a cache on each CPU.

In: records by key. When a call has returned, packets find the records that it has written.
Invariant: every change of a record is followed by a change of `generation`, which invalidates the
records that CPUs have cached. If a process ends between the two, the old tables are still intact:
only the next process could free them, and it begins with a new generation.
"""

import ctypes
import os
from collections.abc import Mapping

from fairlead.net.bpf import Map

_UNCACHED = 0


class Listeners:
    """The maps `listeners` and `generation`, which one process writes.

    `kernel`: the version string of the kernel. On a real-time kernel, programs on one CPU may
    interrupt each other, so nothing is cached.
    """

    def __init__(self, maps: Mapping[str, Map], *, kernel: str = os.uname().version) -> None:
        self._records = maps["listeners"]
        self._memory = maps["generation"].memory()
        self._cached = "PREEMPT_RT" not in kernel
        self.invalidate_caches()

    def close(self) -> None:
        """Release the memory of `generation`."""
        self._memory.close()

    def set(self, records: Mapping[bytes, bytes]) -> None:
        """Write these records. After an error, some of them may be written and in effect."""
        try:
            self._records.update_all(records)
        finally:
            self.invalidate_caches()

    def remove(self, key: bytes) -> None:
        """Remove one record."""
        try:
            self._records.delete(key)
        finally:
            self.invalidate_caches()

    def invalidate_caches(self) -> None:
        """Make each CPU read the records again."""
        # The number must be written as one 64-bit store, so that no program reads half of it.
        number = ctypes.c_uint64.from_buffer(self._memory)
        number.value = number.value + 1 if self._cached else _UNCACHED
