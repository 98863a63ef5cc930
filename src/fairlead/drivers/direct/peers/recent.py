"""Which flows a gateway has met lately, and when: what others who could not be told meanwhile are
told when they are back.

In: flows as the program in the kernel tells of their entries, and the time. Out: since when the
entry of each is as it is, as far as that is known. Of two gateways' entries for one flow the
younger is right: connections of the same ports follow each other, and who met the last one knows
where it is. Invariant: bounded. What is forgotten counts as met long ago."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Set

MOST = 200_000


class Recent:
    """`most`: so many flows at most, those that were met last. Times are seconds of one clock."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._met: OrderedDict[bytes, float] = OrderedDict()  # in the order of the times

    @property
    def flows(self) -> Set[bytes]:
        """All of them; follows what happens later."""
        return self._met.keys()

    def meet(self, flows: Iterable[bytes], now_s: float) -> None:
        """FlowsMessage of these have come to be, or have gone."""
        for flow in flows:
            self._met[flow] = now_s
            self._met.move_to_end(flow)
            if len(self._met) > self._most:
                self._met.popitem(last=False)

    def met_s(self, flow: bytes) -> float:
        """When; long ago if it is not known."""
        return self._met.get(flow, -math.inf)

    def forget(self, before_s: float) -> None:
        """What was met before that time."""
        while self._met and next(iter(self._met.values())) < before_s:
            self._met.popitem(last=False)
