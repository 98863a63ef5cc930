"""CounterIndexPool to count at: one element of the map `statistics` for each listener, on every CPU.

In: indexes that listeners name. Out: idle ones, set to zero; and where packets have been counted.
Invariant: what a listener counts begins at zero, and a place is no other listener's until it is
given back."""

from array import array
from collections.abc import Collection, Iterable

from fairlead.drivers.direct.maps.records import COUNTER, INDEX, TRAFFIC
from fairlead.errors import Refused
from fairlead.net.bpf import Map

CLEARED = 64
"""So many places are set to zero in one go: by itself each takes a system call."""


class CounterIndexPool:
    """Which are idle, and which are known to have been counted at."""

    def __init__(self, statistics: Map) -> None:
        self._statistics = statistics
        self._idle = list(range(statistics.spec.max_entries))
        self._cleared = list[int]()
        """Idle ones that are at zero."""
        self.used: set[int] = set()
        """Where packets have been counted."""

    def take(self) -> int:
        """One for a new listener. Raises Refused when there are no more."""
        if not self._cleared:
            self._cleared = self._idle[-CLEARED:]
            del self._idle[-CLEARED:]
            self._statistics.clear_all([INDEX.pack(index) for index in self._cleared])
        if not self._cleared:
            limit = self._statistics.spec.max_entries
            raise Refused(
                f"no listener is left of {limit}", fix="use more gateways with fewer Services each"
            )
        index = self._cleared.pop()
        self.used.discard(index)
        return index

    def give_back(self, index: int) -> None:
        """Its listener is gone."""
        self._idle.append(index)

    def all_but(self, counting: Collection[int]) -> None:
        """Those that are idle are all but these."""
        self._idle = [
            index for index in range(self._statistics.spec.max_entries) if index not in counting
        ]
        self._cleared = []

    def notice(self, indexes: Iterable[int]) -> None:
        """Find out of all of these where packets have been counted, many at a time."""
        unconfirmed = [index for index in indexes if index not in self.used]
        for index, counts in self._statistics.rows(unconfirmed):
            if any(
                array("Q", counts)[:: TRAFFIC.size // COUNTER.size]
            ):  # the first of a CPU's counters is that of packets
                self.used.add(index)
