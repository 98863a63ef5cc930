"""The flows whose entries changed here recently, and when. Peers that could not be reached
meanwhile are sent these entries when they reconnect.

In: flows whose entries the eBPF program has reported, and the time. Out: since when the entry of
each flow is unchanged, as far as this is known. If the entries of two gateways for one flow differ,
the newer one is right: connections with the same ports follow each other, and the gateway that
received the last connection knows its node. Invariant: the number of flows is bounded. A forgotten
flow counts as unchanged for a long time.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Set

MAX_FLOWS = 200_000


class RecentFlows:
    """The most recently changed flows, at most `limit`. Times are seconds of one clock."""

    def __init__(self, limit: int = MAX_FLOWS) -> None:
        self._limit = limit
        self._changed_s: OrderedDict[bytes, float] = OrderedDict()  # in the order of the times

    @property
    def flows(self) -> Set[bytes]:
        """A live view of all flows."""
        return self._changed_s.keys()

    def record(self, flows: Iterable[bytes], now_s: float) -> None:
        """Record that the entries of these flows were created, changed or removed now."""
        for flow in flows:
            self._changed_s[flow] = now_s
            self._changed_s.move_to_end(flow)
            if len(self._changed_s) > self._limit:
                self._changed_s.popitem(last=False)

    def changed_s(self, flow: bytes) -> float:
        """Return when the flow's entry changed; minus infinity if this is not known."""
        return self._changed_s.get(flow, -math.inf)

    def forget_before(self, before_s: float) -> None:
        """Forget flows that changed before that time."""
        while self._changed_s and next(iter(self._changed_s.values())) < before_s:
            self._changed_s.popitem(last=False)
