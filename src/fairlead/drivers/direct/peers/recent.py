"""Which flows a gateway has met lately, and when: what others who could not be told meanwhile are
told when they are back.

In: flows as the program in the kernel tells of their entries, and the time. Out: since when the
entry of each is as it is, as far as that is known. Of two gateways' entries for one flow the
younger is right: connections of the same ports follow each other, and who met the last one knows
where it is. Invariant: bounded. What is forgotten counts as met long ago."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Set

MAX_FLOWS = 200_000


class RecentFlows:
    """`most`: so many flows at most, those that were met last. Times are seconds of one clock."""

    def __init__(self, limit: int = MAX_FLOWS) -> None:
        self._limit = limit
        self._changed_s: OrderedDict[bytes, float] = OrderedDict()  # in the order of the times

    @property
    def flows(self) -> Set[bytes]:
        """All of them; follows what happens later."""
        return self._changed_s.keys()

    def record(self, flows: Iterable[bytes], now_s: float) -> None:
        """FlowsMessage of these have come to be, or have gone."""
        for flow in flows:
            self._changed_s[flow] = now_s
            self._changed_s.move_to_end(flow)
            if len(self._changed_s) > self._limit:
                self._changed_s.popitem(last=False)

    def changed_s(self, flow: bytes) -> float:
        """When; long ago if it is not known."""
        return self._changed_s.get(flow, -math.inf)

    def forget_before(self, before_s: float) -> None:
        """What was met before that time."""
        while self._changed_s and next(iter(self._changed_s.values())) < before_s:
            self._changed_s.popitem(last=False)
