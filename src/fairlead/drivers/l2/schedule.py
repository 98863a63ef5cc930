"""When each owned address is announced. Pure.

In: the addresses that this host begins or ceases to own, and the time. Out: the addresses to
announce now. An address is announced at once and several times in the following seconds, because a
frame may be lost or limited by a switch; then once a minute, because some switches forget a MAC
address earlier than neighbors forget the address. The first announcement of each address is sent
without delay; repetitions are paced, so that a thousand addresses do not overload the control plane
of a router."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from fairlead.drivers.l2.records import Place

DELAYS_S = (0.0, 0.05, 0.15, 0.9, 1.1, 2.8)
"""The delays between the first announcements: they are sent 0, 0.05, 0.2, 1.1, 2.2 and 5 seconds
after the address is owned."""
REPEAT_S = 60.0
PER_S = 1000
"""The maximum rate of repetitions."""


class _Due(NamedTuple):
    at_s: float
    number: int
    place: Place


class Schedule:
    """The pending announcements of one host."""

    def __init__(self) -> None:
        self._due: list[_Due] = []
        self._numbers: dict[Place, int] = {}
        """The number of the valid element of each place in the heap; others are outdated."""
        self._steps: dict[Place, int] = {}
        self._count = 0
        self._paced_until_s = 0.0

    def start(self, place: Place, now_s: float, *, urgent: bool = True) -> None:
        """Announce the address now, and begin the sequence again; without `urgent`, with its second
        announcement, which is paced."""
        self._steps[place] = 0 if urgent else 1
        self._push(place, now_s)

    def stop(self, place: Place) -> None:
        """Do not announce the address any more."""
        self._steps.pop(place, None)
        self._numbers.pop(place, None)

    def next_s(self) -> float | None:
        """Return when `due` has to be called next; None if nothing is pending."""
        while self._due and self._numbers.get(self._due[0].place) != self._due[0].number:
            heapq.heappop(self._due)
        if not self._due:
            return None
        first = self._due[0]
        paced = self._steps[first.place] > 0
        return max(first.at_s, self._paced_until_s) if paced else first.at_s

    def due(self, now_s: float) -> Sequence[Place]:
        """Return the addresses to announce now."""
        found = []
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            place = heapq.heappop(self._due).place
            step = self._steps[place]
            if step:
                # A repetition that was late does not permit a burst.
                self._paced_until_s = max(self._paced_until_s, now_s - 1 / PER_S) + 1 / PER_S
            self._steps[place] = step + 1
            self._push(
                place, now_s + (DELAYS_S[step + 1] if step + 1 < len(DELAYS_S) else REPEAT_S)
            )
            found.append(place)
        return found

    def _push(self, place: Place, at_s: float) -> None:
        self._count += 1
        self._numbers[place] = self._count
        heapq.heappush(self._due, _Due(at_s, self._count, place))
