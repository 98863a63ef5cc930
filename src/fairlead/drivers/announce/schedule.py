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

DELAYS_S = (0.0, 0.05, 0.15, 0.9, 1.1, 2.8)
"""The delays between the first announcements: they are sent 0, 0.05, 0.2, 1.1, 2.2 and 5 seconds
after the address is owned."""
REPEAT_S = 60.0
PER_S = 1000
"""The maximum rate of repetitions."""


class _Due(NamedTuple):
    at_s: float
    number: int
    address: str


class Schedule:
    """The pending announcements of one host."""

    def __init__(self) -> None:
        self._due: list[_Due] = []
        self._numbers: dict[str, int] = {}
        """The number of the valid element of each address in the heap; others are outdated."""
        self._steps: dict[str, int] = {}
        self._count = 0
        self._paced_until_s = 0.0

    def start(self, address: str, now_s: float) -> None:
        """Announce the address now, and begin the sequence again."""
        self._steps[address] = 0
        self._push(address, now_s)

    def stop(self, address: str) -> None:
        """Do not announce the address any more."""
        self._steps.pop(address, None)
        self._numbers.pop(address, None)

    def next_s(self) -> float | None:
        """Return when `due` has to be called next; None if nothing is pending."""
        while self._due and self._numbers.get(self._due[0].address) != self._due[0].number:
            heapq.heappop(self._due)
        if not self._due:
            return None
        first = self._due[0]
        paced = self._steps[first.address] > 0
        return max(first.at_s, self._paced_until_s) if paced else first.at_s

    def due(self, now_s: float, *, repeat: bool = True) -> Sequence[str]:
        """Return the addresses to announce now. `repeat`: whether addresses whose first
        announcements are over are among them; otherwise their turn is left out."""
        found = []
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            address = heapq.heappop(self._due).address
            step = self._steps[address]
            if step:
                # A repetition that was late does not permit a burst.
                self._paced_until_s = max(self._paced_until_s, now_s - 1 / PER_S) + 1 / PER_S
            self._steps[address] = step + 1
            self._push(
                address, now_s + (DELAYS_S[step + 1] if step + 1 < len(DELAYS_S) else REPEAT_S)
            )
            if repeat or step < len(DELAYS_S):
                found.append(address)
        return found

    def _push(self, address: str, at_s: float) -> None:
        self._count += 1
        self._numbers[address] = self._count
        heapq.heappush(self._due, _Due(at_s, self._count, address))
