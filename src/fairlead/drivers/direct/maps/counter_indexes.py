"""The elements of the map `statistics`, one for each listener, in which the data plane counts.

In: the indexes that listeners name. Out: free indexes whose counters are zero, and the indexes at
which packets were counted. Invariant: the counters of a listener begin at zero, and no other
listener uses its index until the index is released.
"""

from array import array
from collections.abc import Collection, Iterable

from fairlead.drivers.direct.maps.records import COUNTER, INDEX, TRAFFIC
from fairlead.errors import Refused
from fairlead.net.bpf import Map

CLEAR_BATCH = 64
"""Indexes whose counters are cleared together. Cleared one by one, each would take a system
call."""


class CounterIndexPool:
    """The free indexes of the map `statistics`."""

    def __init__(self, statistics: Map) -> None:
        self._statistics = statistics
        self._idle = list(range(statistics.spec.max_entries))
        self._cleared = list[int]()
        """Free indexes whose counters are zero."""
        self.used: set[int] = set()
        """Indexes at which packets were counted."""

    def allocate(self) -> int:
        """Return a free index for a new listener. Raise Refused if none is left."""
        if not self._cleared:
            self._cleared = self._idle[-CLEAR_BATCH:]
            del self._idle[-CLEAR_BATCH:]
            self._statistics.clear_all([INDEX.pack(index) for index in self._cleared])
        if not self._cleared:
            limit = self._statistics.spec.max_entries
            raise Refused(
                f"all {limit} listeners of this gateway are in use",
                fix="use more gateways with fewer Services each",
            )
        index = self._cleared.pop()
        self.used.discard(index)
        return index

    def release(self, index: int) -> None:
        """Make the index of a removed listener free."""
        self._idle.append(index)

    def set_in_use(self, in_use: Collection[int]) -> None:
        """Set the indexes that are in use; all other indexes are free."""
        self._idle = [
            index for index in range(self._statistics.spec.max_entries) if index not in in_use
        ]
        self._cleared = []

    def find_used(self, indexes: Iterable[int]) -> None:
        """Read the counters of these indexes, and add the indexes with packets to `used`."""
        unknown = [index for index in indexes if index not in self.used]
        for index, counts in self._statistics.rows(unknown):
            # The first counter of each CPU is the number of packets.
            if any(array("Q", counts)[:: TRAFFIC.size // COUNTER.size]):
                self.used.add(index)
