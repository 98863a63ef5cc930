"""What a gateway does when another one, whose addresses it would inherit, does not answer. Pure.

In: who announces each address and who is its heir; whether the watched gateways answer; the
announcements of other gateways that are heard on the link; the time. Out: what to watch, the
gateways that count as lost, and the addresses that are left to another gateway for some time.

Only what a gateway has observed on the link itself counts, and nothing that others say about it: so
a gateway whose own link is broken cannot take the addresses of all others away. The rules make two
gateways whose observations differ end with one owner of each address:

* The heir of an address watches its owner, and takes all its addresses over when it is silent.
* A gateway that hears an heir announce one of its addresses leaves the address to the heir, and
  demands it back, by an announcement, when it has heard nothing of that kind for `RETURN_S`.
* The heir gives back what a gateway demands, unless it has observed a failure of that gateway in
  the last `GIVE_BACK_S`; then it announces the address again.
* If the heir that an address was left to does not answer for it, the gateway answers itself
  again."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from fairlead.kube.presence import OnLink
from fairlead.model import Announcement
from fairlead.plan.announce import SilentLinks, link_at

RETURN_S = 30.0
GIVE_BACK_S = 25.0
"""Shorter than `RETURN_S`, so that the first demand is granted."""
MAX_ASKED = 4
"""The maximum number of addresses of one gateway about which it is asked, in turn. The addresses of
a gateway have one deadline and are set together, so any of them shows that its host, its cable and
its program work. It is asked about several, because one may have just been deleted."""
MAX_LOOKED_AT = 256
"""The maximum number of addresses of one gateway that are looked at to find these."""

Step = Literal["ignore", "leave", "insist", "give back"]


class Watched(NamedTuple):
    """An interface of another gateway that is watched. `interface`: of this gateway. `mac`, `link`:
    the MAC address and the name of the interface of the other one. `left`: whether it is asked
    about addresses that this gateway has left to it, and not about its own."""

    interface: str
    mac: str
    gateway: str
    link: str
    left: bool = False


def watched_by(
    own: str,
    announcements: Iterable[Announcement],
    links: Mapping[str, tuple[OnLink, ...]],
    left: Mapping[str, Announcement],
) -> Mapping[Watched, tuple[str, ...]]:
    """Return what the gateway `own` watches, with the addresses to ask about: the owners whose heir
    it is, those that it has found silent, and those to which it has left addresses.
    `announcements`: of all addresses. `links`: of all gateways. `left`: see `Heirs.left`."""
    found: dict[Watched, list[str]] = {}
    looked_at = Counter[tuple[str, bool]]()
    for each in announcements:
        owner = each.owner if each.heir == own else ""
        lost = each.lost if own in (each.owner, each.heir) else ""
        holder = left.get(each.address) if each.owner == own else None
        others = ((owner, False), (lost, False), (holder.owner if holder else "", True))
        for name, is_left in others:
            if name in ("", own) or looked_at[name, is_left] == MAX_LOOKED_AT:
                continue
            looked_at[name, is_left] += 1
            mine = link_at(each.address, links.get(own, ()))
            theirs = link_at(each.address, links.get(name, ()))
            if mine is None or theirs is None or not theirs.mac:
                continue
            key = Watched(mine.interface, theirs.mac, name, theirs.interface, is_left)
            asked = found.setdefault(key, [])
            if len(asked) < MAX_ASKED:
                asked.append(each.address)
    return {key: tuple(asked) for key, asked in found.items()}


def step_after_claim(
    announcement: Announcement | None, own: str, claimant: str, failed_s_ago: float
) -> Step:
    """Return what to do when the gateway `claimant` announces the address of this announcement.
    None: no Service has the address. `failed_s_ago`: how long ago the gateway was last observed to
    be lost, or to return."""
    if announcement is None or claimant in ("", own):
        return "ignore"
    owns = announcement.owner == own
    if announcement.lost != claimant:
        return "leave" if owns else "ignore"
    if failed_s_ago >= GIVE_BACK_S and own in (announcement.owner, announcement.heir):
        return "give back"
    return "insist" if owns else "ignore"


class Heirs:
    """What one gateway has observed. `own`: its name."""

    def __init__(self, own: str) -> None:
        self.left: dict[str, Announcement] = {}
        """The addresses of this gateway that are left to another one."""
        self._own = own
        self._lost: dict[tuple[str, str], float] = {}
        """When each lost link, of a gateway and with this name, was last observed to be lost or to
        return."""
        self._until_s: dict[str, float] = {}
        """Until when addresses are left to each gateway."""

    @property
    def silent(self) -> SilentLinks:
        """The links of other gateways that count as lost."""
        return frozenset(self._lost)

    def missed(self, watched: Watched, now_s: float) -> bool:
        """Process that the gateway is silent. Return whether it counts as lost since now."""
        if watched.left:
            self._take_back(watched.gateway)
            return False
        link = (watched.gateway, watched.link)
        new = link not in self._lost
        self._lost.setdefault(link, now_s)
        return new

    def answered(self, watched: Watched, now_s: float, *, alone: bool) -> None:
        """Process that a lost gateway answers again. `alone`: this gateway was the one that was cut
        off, so the other one keeps its addresses."""
        link = (watched.gateway, watched.link)
        if link in self._lost:
            self._lost[link] = now_s
            if alone:
                del self._lost[link]

    def claimed(
        self, announcement: Announcement | None, address: str, claimant: str, now_s: float
    ) -> Step:
        """Process that another gateway has announced the address. Return what this one does; see
        `step_after_claim`."""
        failed_s = max(
            (each_s for (name, _), each_s in self._lost.items() if name == claimant),
            default=float("-inf"),
        )
        step = step_after_claim(announcement, self._own, claimant, now_s - failed_s)
        if step == "leave" and announcement is not None:
            taken = Announcement(address, claimant, announcement.interface)
            self.left = {**self.left, address: taken}
            self._until_s[claimant] = now_s + RETURN_S
        elif step == "give back":
            self._lost = {link: each for link, each in self._lost.items() if link[0] != claimant}
        return step

    def end(self, now_s: float) -> bool:
        """Demand the addresses whose time is over. All that were left to one gateway come back
        together, because the first demand lets it give all of them back. Return whether there are
        any."""
        over = [name for name, until_s in self._until_s.items() if now_s >= until_s]
        for name in over:
            self._take_back(name)
        return bool(over)

    def forget(self, watched: Collection[Watched], owned: Collection[str]) -> None:
        """Forget what does not concern this gateway any more. `watched`: what it watches. `owned`:
        the addresses that are its own by the plan."""
        links = {(each.gateway, each.link) for each in watched}
        self._lost = {link: each for link, each in self._lost.items() if link in links}
        self.left = {name: each for name, each in self.left.items() if name in owned}

    def restart(self) -> None:
        """Demand all addresses: what is known from the API server is newer."""
        self.left = {}
        self._until_s.clear()

    def _take_back(self, gateway: str) -> None:
        self.left = {name: each for name, each in self.left.items() if each.owner != gateway}
        self._until_s.pop(gateway, None)
