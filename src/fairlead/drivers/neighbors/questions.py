"""Whether a station answers, by what is asked and what is answered. Pure.

In: the addresses to ask a station about; the moments at which questions are due; its answers. Out:
the addresses to ask about, and whether the station has become silent or has returned. Only
questions of a family of which the station has answered one count: the network may drop those of the
other family, or of both, or the station does not have the addresses yet. An answer of either family
shows that the station is alive. Invariant: each question has a whole interval to be answered in,
however late the process is that asks, because the caller processes what has arrived before it asks
again."""

from collections import Counter
from collections.abc import Collection, Sequence

from fairlead.net.address import family_of

MISSES = 4
"""How many questions in a row have no answer when a station is silent, or, if it answers those of
the other family, when the network drops those of this one."""
INTERVAL_S = 0.05
SLOW = 4
"""Every how many intervals a station is asked that is silent, or about a family of which it has
never answered."""
UNHEARD = 2
"""At how many questions in a row nothing must have arrived before a silent station returns, so that
it was this host that was cut off."""
AGAIN = 20
"""After how many intervals the return of a station is reported again while it still counts as
lost."""


class Questions:
    """The questions to one station. `known`: the families of which it has shown that it answers."""

    def __init__(self, addresses: Sequence[str], *, known: Collection[str] = ()) -> None:
        self.addresses = addresses
        self.known = frozenset(known)
        self.silent = False
        self._open = ""
        """The family of the question that waits for its answer and counts; empty: there is none."""
        self._missed = 0
        self._missed_of = Counter[str]()
        """The missed questions in a row of each family."""
        self._turn = -1
        self._reported = 0
        self._received: list[int] = []
        """What the interface had received when the station became silent, and at each question
        since then."""

    def replace(self, addresses: Sequence[str]) -> None:
        """Ask about these addresses. If all of a family are new, the station has yet to answer."""
        kept = {family_of(each) for each in {*addresses} & {*self.addresses}}
        self.addresses = addresses
        self.known &= kept
        if self._open not in self.known:
            self._open = ""
        if not self.known:
            self._missed = 0

    def trust(self) -> None:
        """Let the station be one that has not been silent."""
        self.silent, self._missed, self._open = False, 0, ""
        self._missed_of.clear()

    def judge(self) -> bool:
        """Count the last question if it was not answered. Call it at each interval, before `due`.
        Return whether it was missed. If the station is silent then, it has become so now."""
        self._reported = max(0, self._reported - 1)
        if not (self._open and self.is_quick):
            return False
        self._missed_of[self._open] += 1
        self._open = ""
        self._missed += 1
        if self._missed == MISSES:
            self.silent, self._received, self._turn = True, [], 0
        return True

    @property
    def is_quick(self) -> bool:
        """Whether the station is asked at each interval."""
        return bool(self.known) and not self.silent

    def due(self) -> Sequence[str]:
        """Return the addresses to ask about in this interval, at most one of those that count and
        one other."""
        self._turn += 1
        turn, later = divmod(self._turn, SLOW)
        known = [each for each in self.addresses if family_of(each) in self.known]
        others = [each for each in self.addresses if family_of(each) not in self.known]
        quick = known if self.is_quick else []
        slow = others if quick else known or others
        found = [quick[self._turn % len(quick)]] if quick else []
        return [*found, slow[turn % len(slow)]] if slow and not later else found

    def asked(self, address: str, received: int) -> None:
        """Record that the question about this address was sent. `received`: how many frames had
        arrived at the interface before."""
        if self.silent:
            self._received.append(received)
            del self._received[1:-UNHEARD]
        elif family_of(address) in self.known:
            self._open = family_of(address)

    def answered(self, address: str) -> bool:
        """Process the answer about this address. Return whether the station counts as lost, and its
        return has to be reported."""
        family = family_of(address)
        self._missed_of[family] = 0
        dropped = {each for each, missed in self._missed_of.items() if missed >= MISSES}
        self.known = self.known - dropped | {family}
        self._open, self._missed = "", 0
        if not self.silent or self._reported:
            return False
        self._reported = AGAIN
        return True

    @property
    def unheard(self) -> bool:
        """Whether nothing had arrived at the interface while the station was silent. What arrived
        since the last but one question may have come after the return."""
        return len(self._received) > UNHEARD and self._received[0] == self._received[-UNHEARD]
