"""Whether a station answers, by what is asked and what is answered. Pure.

In: the addresses to ask a station about; the moments at which a question is due; its answers. Out:
the address to ask about, and whether the station has become silent or has returned. A station that
has never answered cannot become silent: the network may drop such questions, or it does not have
the addresses yet. Invariant: each question has a whole interval to be answered in, however late the
process is that asks, because the caller processes what has arrived before it asks again."""

from collections.abc import Sequence

MISSES = 4
"""How many questions in a row have no answer when a station is silent."""
INTERVAL_S = 0.05
SLOW = 4
"""Every how many intervals a station is asked that is silent, or has never answered."""
UNHEARD = 2
"""At how many questions in a row nothing must have arrived before a silent station returns, so that
it was this host that was cut off."""
AGAIN = 20
"""After how many intervals the return of a station is reported again while it still counts as
lost."""


class Questions:
    """The questions to one station. `known`: whether it has shown that it answers."""

    def __init__(self, addresses: Sequence[str], *, known: bool = False) -> None:
        self.addresses = addresses
        self.known = known
        self.silent = False
        self._open = False
        """Whether a question waits for its answer."""
        self._missed = 0
        self._turn = 0
        self._pause = 0
        self._reported = 0
        self._received: list[int] = []
        """What the interface had received when the station became silent, and at each question
        since then."""

    def replace(self, addresses: Sequence[str]) -> None:
        """Ask about these addresses. If all are new, the station has yet to answer."""
        if not set(addresses) & set(self.addresses):
            self.known, self._missed, self._open = False, 0, False
        self.addresses = addresses

    def trust(self) -> None:
        """Let the station be one that answers, and has not been silent."""
        self.known, self.silent, self._missed, self._open = True, False, 0, False

    def judge(self) -> bool:
        """Count the last question if it was not answered. Call it at each interval, before `due`.
        Return whether it was missed. If the station is silent then, it has become so now."""
        self._reported = max(0, self._reported - 1)
        if not (self._open and self.is_quick):
            return False
        self._open = False
        self._missed += 1
        if self._missed == MISSES:
            self.silent, self._received, self._pause = True, [], 0
        return True

    @property
    def is_quick(self) -> bool:
        """Whether the station is asked at each interval."""
        return self.known and not self.silent

    def due(self) -> str | None:
        """Return the address to ask about in this interval; None: it is not asked."""
        self._pause = (self._pause + 1) % SLOW
        if not self.is_quick and self._pause:
            return None
        self._turn += 1
        return self.addresses[self._turn % len(self.addresses)]

    def asked(self, received: int) -> None:
        """Record that the question was sent. `received`: how many frames had arrived at the
        interface before."""
        self._open = True
        if self.silent:
            self._received.append(received)
            del self._received[1:-UNHEARD]

    def answered(self) -> bool:
        """Process an answer. Return whether the station counts as lost, and its return has to be
        reported."""
        self.known, self._open, self._missed = True, False, 0
        if not self.silent or self._reported:
            return False
        self._reported = AGAIN
        return True

    @property
    def unheard(self) -> bool:
        """Whether nothing had arrived at the interface while the station was silent. What arrived
        since the last but one question may have come after the return."""
        return len(self._received) > UNHEARD and self._received[0] == self._received[-UNHEARD]
