"""Which links have only just returned. Pure.

In: at each look the links that are usable, those on which the other gateways count, and the time;
and whether the host itself has returned. Out: the links that settle. Each loss of a link that
others notice moves addresses to other gateways; if they came back with the link, a link or a host
that comes and goes would move them each time. Therefore a link that others have missed settles for
a period, and each further loss begins the period again. While it settles, an address stays with a
gateway whose link is steady. A loss that no other gateway
has noticed moves nothing, and neither does the return."""

from collections.abc import Collection

Link = tuple[str, str]
"""An interface, and a network on its link."""


class Steadiness:
    """The links of one gateway. `period_s`: how long a link must be usable; the duration of the
    gateway's Lease, after which others miss a gateway that cannot report its loss."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._usable: frozenset[Link] = frozenset()
        self._lost_s: dict[Link, float] = {}
        self._until_s: dict[Link, float] = {}

    def look(self, usable: Collection[Link], counted_on: Collection[Link], now_s: float) -> None:
        """Compare the usable links with those of the previous look. Links that were never usable
        before do not settle: a gateway that starts has missed nothing."""
        for link in self._usable.difference(usable):
            self._lost_s[link] = now_s
        self._usable = frozenset(usable)
        for link in self._lost_s.keys() & self._usable:
            lost_s = self._lost_s.pop(link)
            missed = link not in counted_on or now_s - lost_s > self._period_s
            if missed or now_s < self._until_s.get(link, 0.0):
                self._until_s[link] = now_s + self._period_s

    def begin(self, link: Link, now_s: float) -> None:
        """Let the link settle: the host has returned, and others have missed it."""
        self._until_s[link] = now_s + self._period_s

    def end(self, link: Link) -> None:
        """Let the link be steady: its gateway has addresses there, because no other can."""
        self._until_s.pop(link, None)

    def settles(self, link: Link, now_s: float) -> bool:
        """Return whether the link has returned less than the period ago."""
        return now_s < self._until_s.get(link, 0.0)
