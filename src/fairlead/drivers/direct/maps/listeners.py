"""The map `listeners`, which the program reads through a cache on each CPU.

In: records by key. Out: nothing; once a call has returned, packets find what it has written.
Invariant: whatever changes a record changes `generation` after that, and no CPU takes for valid
what it found before. A process that ended in between left the old tables whole, which nobody frees
but the next one, and that begins with another generation."""

import ctypes
import os
from collections.abc import Mapping

from fairlead.net.bpf import Map

_UNCACHED = 0


class Listeners:
    """maps: `listeners` and `generation`. One process writes.

    kernel: what it says of itself. Where it is one for real time, programs of one CPU may interrupt
    each other, and nothing is cached."""

    def __init__(self, maps: Mapping[str, Map], *, kernel: str = os.uname().version) -> None:
        self._records = maps["listeners"]
        self._memory = maps["generation"].memory()
        self._cached = "PREEMPT_RT" not in kernel
        self.invalidate_caches()

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def set(self, records: Mapping[bytes, bytes]) -> None:
        """Have these listeners have these records. Where that fails some may have theirs, and
        packets find them."""
        try:
            self._records.update_all(records)
        finally:
            self.invalidate_caches()

    def remove(self, key: bytes) -> None:
        """Take one away."""
        try:
            self._records.delete(key)
        finally:
            self.invalidate_caches()

    def invalidate_caches(self) -> None:
        """Have each CPU read anew what it needs."""
        # One store of a word: no program may see half of it.
        number = ctypes.c_uint64.from_buffer(self._memory)
        number.value = number.value + 1 if self._cached else _UNCACHED
