"""The other announcers on one interface, and whether they are alive. Pure.

In: answers to hello requests, and the time. Out: the requests to send, and the standing of each
member. The kernel of a member answers, so an answer shows that its interface, its link and its
program work.

Invariants: a member is gone only after `multiplier` requests in a row have not been answered, so a
process that was not scheduled for a while declares no member dead: it sent no requests meanwhile.
The caller reads the answers that have arrived before it asks for a verdict. Requests to all members
together do not exceed a rate; with many members, each is asked less often."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fairlead.drivers.l2.ownership import Standing
from fairlead.drivers.l2.records import Hello

MAX_REQUESTS_PER_S = 1000
DISCOVERY_S = 1.0
"""The interval of the requests to all stations, which discover new members."""
DISCOVERY_PER_MEMBER_S = 0.02
"""With many members, requests to all stations are sent less often, because each has many answers.
"""
GONE_EVERY = 4
"""A member that is gone gets every fourth request, so that its return is noticed soon."""
FORGET_S = 600.0
"""After this time a member that is gone is forgotten."""
MAX_MEMBERS = 4096
"""Further members are ignored: any station of the link can invent names, and each member makes the
checks of the others rarer."""


class Member(NamedTuple):
    """Another announcer. `standing`: None: it is gone. `round`: of the last answer, or, for a
    member that is gone, of the verdict. `changed_s`: when the standing changed last."""

    name: str
    mac: bytes
    standing: Standing | None
    round: int
    changed_s: float


class Requests(NamedTuple):
    """The hello requests of one round: its number, the MAC addresses, and whether to ask all
    stations too."""

    round: int
    macs: Sequence[bytes]
    everyone: bool


class Liveness:
    """The members on one interface.

    - `interval_s`: between two requests to a member, while there are few members;
    - `multiplier`: the number of unanswered requests after which a member is gone."""

    def __init__(self, me: str, interval_s: float, multiplier: int, now_s: float) -> None:
        self._me = me
        self._interval_s = interval_s
        self._multiplier = multiplier
        self.round = 0
        """The number of the last round of requests."""
        self._sent_s = now_s
        self._next_s = now_s
        self._discovery_s = now_s
        self.settled_s = now_s + multiplier * interval_s
        """From this time on, the members that are alive are known."""
        self.members: dict[str, Member] = {}
        self.names: dict[bytes, str] = {}
        """The members by MAC address, including former MAC addresses."""

    @property
    def standings(self) -> Mapping[str, Standing]:
        """The standings of the members that are alive."""
        return {
            each.name: each.standing for each in self.members.values() if each.standing is not None
        }

    @property
    def interval_s(self) -> float:
        """The present interval between two requests to a member."""
        gone = sum(each.standing is None for each in self.members.values())
        asked = len(self.members) - gone + gone / GONE_EVERY
        return max(self._interval_s, asked / MAX_REQUESTS_PER_S)

    def _forget(self, now_s: float) -> None:
        """Forget the members that have been gone for long: nodes come and go."""
        old = {
            each.name
            for each in self.members.values()
            if each.standing is None and now_s - each.changed_s >= FORGET_S
        }
        if old:
            self.members = {name: each for name, each in self.members.items() if name not in old}
            self.names = {mac: name for mac, name in self.names.items() if name not in old}

    def restart(self, now_s: float) -> None:
        """Forget the verdicts, because the link of this host has returned: discover the members
        again."""
        self._next_s = self._discovery_s = now_s
        self.settled_s = now_s + self._multiplier * self._interval_s
        self.members = {
            name: each._replace(standing=None, changed_s=now_s)
            for name, each in self.members.items()
        }

    def heard(self, hello: Hello, now_s: float) -> bool:
        """Take an answer. Return whether the standing of a member has changed."""
        if hello.name == self._me or hello.token > self.round:
            return False
        before = self.members.get(hello.name)
        if before is None and len(self.members) >= MAX_MEMBERS:
            return False
        standing: Standing = hello.state
        if standing in ("ready", "returned") and not hello.remaining_ms:
            standing = "stale"
        if before is not None and before.standing is None and hello.token <= before.round:
            return False  # the answer is older than the verdict
        changed = before is None or before.standing != standing
        if len(self.names) < 2 * MAX_MEMBERS:
            self.names[hello.mac] = hello.name
        self.members[hello.name] = Member(
            hello.name,
            hello.mac,
            standing,
            max(hello.token, before.round if before else 0),
            now_s if before is None or changed else before.changed_s,
        )
        return changed

    def next_s(self) -> float:
        """Return when `verdicts` and `requests` have to be called next."""
        return min(self._next_s, self._verdict_s())

    def verdicts(self, now_s: float) -> bool:
        """Declare gone the members that have not answered the last requests. Return whether there
        is any. All answers that have arrived must have been passed to `heard`."""
        if now_s < self._verdict_s():
            return False
        silent = [
            each
            for each in self.members.values()
            if each.standing is not None and self._is_silent(each)
        ]
        for each in silent:
            self.members[each.name] = each._replace(
                standing=None, round=self.round, changed_s=now_s
            )
        return bool(silent)

    def requests(self, now_s: float) -> Requests | None:
        """Return the requests of the next round, if it is due."""
        if now_s < self._next_s:
            return None
        self.round += 1
        self._sent_s = now_s
        # Keep the rhythm if this call is only a little late.
        due_s = self._next_s + self.interval_s
        self._next_s = due_s if due_s > now_s else now_s + self.interval_s
        everyone = now_s >= self._discovery_s
        if everyone:
            self._forget(now_s)
            first = now_s < self.settled_s
            pause_s = max(DISCOVERY_S, DISCOVERY_PER_MEMBER_S * len(self.members))
            self._discovery_s = now_s + (0.0 if first else pause_s)
        asked = [
            each.mac
            for each in self.members.values()
            if each.standing is not None or self.round % GONE_EVERY == 0
        ]
        return Requests(self.round, asked, everyone)

    def _is_silent(self, member: Member) -> bool:
        return self.round - member.round >= self._multiplier

    def _verdict_s(self) -> float:
        """Return when the answers to the last requests are overdue, if that decides about a
        member."""
        if any(each.standing and self._is_silent(each) for each in self.members.values()):
            return self._sent_s + self.interval_s / 2
        return self._next_s
