"""The state of each address that this host may announce, and what follows from each event. Pure.

In: the addresses that are wanted, the standings of the members on each interface, claims of other
stations, changes of links, and the time, in seconds of a monotonic clock. Out: effects, which the
process carries out in their order.

The life of an address on an interface: `learning` (probes ask whether a station has it, as in RFC
5227 and RFC 4862, but with three probes within 0.3 seconds: a user waits for a new Service, and an
address of a pool that another station has is a rare mistake, which is also noticed later), then
`silent` or `owned`; `conflict` if a station that is no member has the address; `down` while the
link is down. An address that moves from a member that died is never probed, because no host would
answer for it meanwhile.

Invariant: while all announcers can hear each other, exactly one of the candidates of an address
owns it, after the delays below; and an address moves only if its holder is lost or leaves."""

from collections.abc import Collection, Mapping
from math import inf

from fairlead.drivers.l2.entry import (
    Announce,
    Cease,
    Effect,
    Entry,
    Forget,
    Link,
    Probe,
    SetState,
    Want,
    Withdraw,
    cause_of,
    cause_of_move,
)
from fairlead.drivers.l2.ownership import Standing, decide, may_own, outranks
from fairlead.drivers.l2.records import ClaimKind, Place

PROBES = 3
PROBE_INTERVAL_S = 0.1
SKEW_S = 0.1
"""The delay for each rank after a holder is lost."""
FIRST_SKEW_S = 0.5
"""The delay for each rank at the first use of an address, when hosts do not learn of it at the same
time."""
HOLD_S = 0.5
"""A member that has just claimed an address counts as its holder for this time, whatever its last
answer said."""
OVERLAP_S = 1.0
"""A host that hands over an address still answers for it for this time after the claim."""
REPEAT_CLAIM_S = 1.0
"""The minimum interval in which this host announces again because another one uses its address."""
DEFEND_S = 10.0
"""The same if that is a station outside of Fairlead (RFC 5227, 2.4, DEFEND_INTERVAL)."""
RETRY_S = 10.0
"""The interval at which an address in conflict is probed again."""
CONFLICT_S = 60.0
"""A conflict about an owned address is over after this time without a claim."""
CUT_OFF_S = 1.0
"""If a host loses all members within this time, and at least two, it was cut off itself."""
RECOVERY_S = 2.0
"""How long a host that was cut off presents itself as returned after it hears a member again. In
this time the probes of its data plane find the nodes that it counted as dead."""
QUIET_S = 0.5
"""How long a host that was cut off announces nothing after it hears a member again. The host that
has taken an address over announces it at once, and no neighbor is diverted meanwhile."""
VERIFY_S = 150.0
"""If the holder of an address has not announced it for this time, this host asks whether it still
answers. Holders announce once a minute."""
WITHDRAWALS_S = (0.1, 0.4)
"""When this host repeats that it has withdrawn an address: frames may be lost."""


class Engine:
    """The addresses of one host. Every method takes the present time; `effects` collects the
    effects that the process has to carry out."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._ready = False
        self._leaving = False
        self._links: dict[int, Link] = {}
        self.entries: dict[Place, Entry] = {}
        self.effects: list[Effect] = []
        self._withdrawals: dict[Place, list[float]] = {}
        """When the withdrawals of addresses are repeated."""
        self.takes = 0
        """How often this host took an address that another member had before."""
        self.changed: set[Place] = set()
        """The entries that changed since the caller cleared the set."""

    @property
    def owned(self) -> Collection[Place]:
        """The addresses that this host owns."""
        return [place for place, entry in self.entries.items() if entry.phase == "owned"]

    def next_s(self) -> float | None:
        """Return when `tick` has to be called next."""
        times = [each.next_s for each in self.entries.values() if each.next_s is not None]
        times += [each[0] for each in self._withdrawals.values()]
        return min(times, default=None)

    def tick(self, now_s: float) -> None:
        """Judge the entries that are due."""
        for place, entry in self.entries.items():
            if entry.next_s is not None and entry.next_s <= now_s:
                self._judge(place, entry, now_s)
        for place, times in list(self._withdrawals.items()):
            if times[0] <= now_s:
                self.effects.append(Withdraw(place))
                del times[0]
            if not times:
                del self._withdrawals[place]

    def add_link(self, interface: int, settled_s: float) -> None:
        """Use an interface, whose members are known from `settled_s` on."""
        self._links[interface] = Link(settled_s=settled_s, former={}, lost={})

    def remove_link(self, interface: int, now_s: float) -> None:
        """Do not use an interface any more."""
        self._links.pop(interface, None)
        self.want({}, [place for place in self.entries if place.interface == interface], now_s)

    def set_ready(self, now_s: float, *, ready: bool, leaving: bool) -> None:
        """Set whether this host may own addresses, and whether it hands over its addresses."""
        if (ready, leaving) != (self._ready, self._leaving):
            self._ready, self._leaving = ready, leaving
            self._judge_all(now_s)

    def want(
        self,
        wanted: Mapping[Place, Want],
        gone: Collection[Place],
        now_s: float,
        *,
        owned: Collection[Place] = (),
    ) -> None:
        """Add, change and remove addresses. `owned`: those for which the kernel already answers,
        because a previous process owned them."""
        for place in gone:
            entry = self.entries.pop(place, None)
            if entry is not None:
                self.changed.add(place)
                self.effects += [Cease(place), Forget(place)]
                if entry.phase == "owned" and entry.yield_s is None:
                    self.withdraw(place, now_s)
        for place, want in wanted.items():
            self._withdrawals.pop(place, None)
            entry = self.entries.get(place)
            if entry is None:
                entry = self.entries[place] = Entry(want)
                self.changed.add(place)
                if place in owned:
                    entry.phase, entry.holder = "owned", self._me
                    self.effects.append(Announce(place, urgent=False))
                else:
                    self.effects.append(SetState(place, False))
            entry.want = want
            self._judge(place, entry, now_s)

    def withdraw(self, place: Place, now_s: float) -> None:
        """Tell other members that this host, which stays a member, has ceased to answer for an
        address."""
        self.effects.append(Withdraw(place))
        self._withdrawals[place] = [now_s + each for each in WITHDRAWALS_S]

    def withdrawn(self, place: Place, name: str, now_s: float) -> None:
        """A member has withdrawn an address. Ask at once whether it is free. Until the answers are
        due, a Service that is deleted is deleted here too, and nothing moves."""
        entry = self.entries.get(place)
        if entry is not None and entry.phase == "silent" and entry.holder == name:
            self._learn(place, entry)
            entry.before = name
            self._judge(place, entry, now_s)

    def members(self, interface: int, standings: Mapping[str, Standing], now_s: float) -> None:
        """Take the standings of the members that are alive on an interface."""
        link = self._links[interface]
        returned = standings.keys() - link.standings.keys()
        gone = link.standings.keys() - standings.keys()
        link.lost = {name: at for name, at in link.lost.items() if now_s - at < CUT_OFF_S}
        link.lost |= dict.fromkeys(gone, now_s)
        if gone and not standings and len(link.lost) > 1:
            link.cut_off_until_s = inf
        elif standings and link.cut_off_until_s == inf:
            link.cut_off_until_s = now_s + RECOVERY_S
        for name, before in link.standings.items():
            if standings.get(name) != before:
                link.former[name] = cause_of(name, standings.get(name))
        link.standings = dict(standings)
        cut_off = self.was_cut_off(interface, now_s)
        for place, entry in self.entries.items():
            if place.interface == interface:
                self._judge(place, entry, now_s)
                if returned and entry.phase == "owned" and entry.yield_s is None:
                    # A member that was away may hold the address too, or not know its holder.
                    if not cut_off:
                        self.effects.append(Announce(place, urgent=False))
                    elif entry.claimant in returned:
                        self._claimed(place, entry, entry.claimant, now_s)
                    else:
                        self._be_quiet(place, entry, now_s)
        # The other names explain no move, and any station of the link can invent names.
        needed = {
            name
            for place, entry in self.entries.items()
            if place.interface == interface
            for name in (entry.holder, entry.before)
        }
        link.former = {name: cause for name, cause in link.former.items() if name in needed}

    def was_cut_off(self, interface: int, now_s: float) -> bool:
        """Return whether this host is cut off from all members on an interface, or was until a
        moment ago. With a single other member it is unknown which of the two was cut off."""
        link = self._links.get(interface)
        return link is not None and now_s < link.cut_off_until_s

    def set_usable(self, interface: int, now_s: float, *, usable: bool, settled_s: float) -> None:
        """Take the state of a link. `settled_s`: when its members are known again."""
        link = self._links[interface]
        if link.usable == usable:
            return
        link.usable, link.settled_s = usable, settled_s
        for place, entry in self.entries.items():
            if place.interface == interface:
                self._judge(place, entry, now_s)

    def announce_again(self, interface: int) -> None:
        """The MAC address or the active port of an interface has changed."""
        self.effects += [
            Announce(place)
            for place, entry in self.entries.items()
            if place.interface == interface and entry.phase == "owned" and entry.yield_s is None
        ]

    def claim(
        self, place: Place, name: str | None, mac: bytes, kind: ClaimKind, now_s: float
    ) -> None:
        """Another station uses an address. `name`: the member; None: the station is no member."""
        entry = self.entries.get(place)
        if entry is None or entry.phase == "down":
            return
        if name is None:
            self._foreign(place, entry, mac, kind, now_s)
        elif kind == "announced":
            self._claimed(place, entry, name, now_s)
        elif kind == "used" and entry.phase == "owned":
            # The stack of another member used the address as its own, and has diverted neighbors.
            self._repeat(place, entry, REPEAT_CLAIM_S, now_s)

    def suspect(self, place: Place, until_s: float) -> None:
        """A station uses an address, and is being asked whether it is a member."""
        if (entry := self.entries.get(place)) is not None:
            entry.suspect_s = until_s

    def identified(self, interface: int, mac: bytes, now_s: float) -> None:
        """A station is a member now: what it did before is no conflict any more."""
        for place, entry in self.entries.items():
            if place.interface == interface and entry.foreign == mac:
                entry.foreign = b""
                self.changed.add(place)
                if entry.phase == "conflict":
                    self._learn(place, entry)
                self._judge(place, entry, now_s)

    def yielded(self, place: Place, now_s: float) -> None:
        """The kernel has stopped to answer, because this process was away for too long and another
        station claimed the address."""
        if (entry := self.entries.get(place)) is not None and entry.phase == "owned":
            entry.phase, entry.holder = "silent", None
            self.changed.add(place)
            self.effects.append(Cease(place))
            self._judge(place, entry, now_s)

    def _be_quiet(self, place: Place, entry: Entry, now_s: float) -> None:
        """Do not announce an owned address for a moment, because this host was cut off: another
        host announces it, unless no host has taken it over."""
        if entry.resume_s is None:
            entry.resume_s = now_s + QUIET_S
            self.effects.append(Cease(place))
        self._judge(place, entry, now_s)

    def _claimed(self, place: Place, entry: Entry, name: str, now_s: float) -> None:
        if entry.phase == "owned" and entry.yield_s is None:
            known = name in self._links[place.interface].standings
            if not known and self.was_cut_off(place.interface, now_s):
                # Decide when the member has answered, and its standing is known.
                entry.claimant = name
                self._be_quiet(place, entry, now_s)
                return
            theirs = self._may_own(place, entry, name)
            if self._may_own(place, entry, self._me):
                if not theirs or self._stays(place, name, now_s):
                    self._repeat(place, entry, REPEAT_CLAIM_S, now_s)
                    return
                self._release(place, entry)
            else:
                entry.yield_s = now_s + OVERLAP_S
                self.effects.append(Cease(place))
        elif entry.phase in ("learning", "conflict"):
            entry.phase, entry.foreign = "silent", b""
        if entry.holder != name or entry.phase != "silent":
            self.changed.add(place)
        entry.holder, entry.lost_s, entry.claimed_s = name, None, now_s
        entry.held_until_s = now_s + HOLD_S
        self._judge(place, entry, now_s)

    def _stays(self, place: Place, name: str, now_s: float) -> bool:
        """Return whether this host stays if it and the member both hold the address."""
        mine = not self.was_cut_off(place.interface, now_s)
        theirs = self._links[place.interface].standings.get(name) != "returned"
        return mine if mine != theirs else outranks(place.address, self._me, name)

    def _foreign(
        self, place: Place, entry: Entry, mac: bytes, kind: ClaimKind, now_s: float
    ) -> None:
        if entry.phase == "silent" or (entry.phase == "owned" and kind == "probed"):
            return
        if entry.foreign != mac or entry.phase == "learning":
            self.changed.add(place)
        entry.foreign, entry.foreign_s = mac, now_s
        if entry.phase == "owned":
            self._repeat(place, entry, DEFEND_S, now_s)
        else:
            entry.phase, entry.next_s = "conflict", now_s + RETRY_S

    def _repeat(self, place: Place, entry: Entry, interval_s: float, now_s: float) -> None:
        if now_s - entry.announced_s >= interval_s:
            entry.announced_s = now_s
            # The kernel may have yielded, and its report may have been lost.
            self.effects += [SetState(place, True), Announce(place)]

    def _judge_all(self, now_s: float) -> None:
        for place, entry in self.entries.items():
            self._judge(place, entry, now_s)

    def _judge(self, place: Place, entry: Entry, now_s: float) -> None:
        link = self._links.get(place.interface)
        if link is None or not link.usable:
            if entry.phase != "down":
                if entry.phase == "owned":
                    self._release(place, entry)
                entry.phase, entry.next_s, entry.holder = "down", None, None
                self.changed.add(place)
            return
        if entry.phase == "down":
            self._learn(place, entry)
        if entry.phase == "conflict" and entry.next_s is not None and entry.next_s <= now_s:
            self._learn(place, entry)
        if entry.phase == "learning":
            self._ask(place, entry, link, now_s)
        if entry.phase == "owned":
            self._judge_owned(place, entry, now_s)
        elif entry.phase == "silent":
            self._judge_silent(place, entry, link, now_s)

    def _learn(self, place: Place, entry: Entry) -> None:
        entry.phase, entry.probes, entry.next_s, entry.holder = "learning", 0, None, None
        entry.lost_s, entry.foreign, entry.before = None, b"", ""
        self.changed.add(place)

    def _ask(self, place: Place, entry: Entry, link: Link, now_s: float) -> None:
        """Send the next probe. After the last one, the address is free."""
        if entry.next_s is not None and now_s < entry.next_s:
            return
        if entry.probes < PROBES:
            entry.probes += 1
            entry.next_s = now_s + PROBE_INTERVAL_S
            self.effects.append(Probe(place))
        elif now_s < (known_s := max(link.settled_s, entry.suspect_s)):
            entry.next_s = known_s
        else:
            entry.phase, entry.holder, entry.next_s = "silent", None, None
            self.changed.add(place)

    def _judge_owned(self, place: Place, entry: Entry, now_s: float) -> None:
        entry.next_s = None
        if entry.want.candidates == () or (entry.yield_s is not None and entry.yield_s <= now_s):
            self._release(place, entry)
            return
        if entry.yield_s is not None:
            entry.next_s = entry.yield_s
        elif entry.resume_s is not None:
            if entry.resume_s <= now_s:
                entry.resume_s, entry.claimant = None, ""
                self.effects.append(Announce(place, urgent=False))
            else:
                entry.next_s = entry.resume_s
        if entry.foreign:
            if now_s - entry.foreign_s >= CONFLICT_S:
                entry.foreign = b""
                self.changed.add(place)
            else:
                over_s = entry.foreign_s + CONFLICT_S
                entry.next_s = min(entry.next_s or over_s, over_s)

    def _judge_silent(self, place: Place, entry: Entry, link: Link, now_s: float) -> None:
        entry.next_s = None
        if entry.holder is not None:
            if now_s < entry.held_until_s:
                entry.next_s = entry.held_until_s
                return
            if self._may_own(place, entry, entry.holder):
                entry.lost_s = None
                if now_s - entry.claimed_s < VERIFY_S:
                    entry.next_s = entry.claimed_s + VERIFY_S
                else:
                    self._learn(place, entry)
                    self._ask(place, entry, link, now_s)
                return
            entry.before = entry.holder
        if entry.lost_s is None:
            entry.lost_s = now_s
        decision = decide(
            place.address,
            self._me,
            None,
            self._standings(link, entry),
            entry.want.candidates,
        )
        if decision.rank is None:
            return
        skew_s = SKEW_S if entry.before else FIRST_SKEW_S
        take_s = entry.lost_s + decision.rank * skew_s
        if now_s < take_s:
            entry.next_s = take_s
            return
        self._take(place, entry, link)

    def _take(self, place: Place, entry: Entry, link: Link) -> None:
        entry.cause, entry.taken = cause_of_move(entry, link), True
        self.takes += bool(entry.cause)
        entry.phase, entry.holder, entry.before = "owned", self._me, ""
        entry.lost_s = entry.yield_s = entry.next_s = entry.resume_s = None
        entry.claimant = ""
        entry.announced_s = float("-inf")
        self.changed.add(place)
        self.effects += [SetState(place, True), Announce(place)]

    def _release(self, place: Place, entry: Entry) -> None:
        entry.phase, entry.foreign = "silent", b""
        entry.yield_s = entry.resume_s = None
        entry.claimant = ""
        if entry.holder == self._me:
            entry.holder = None
        entry.lost_s = entry.next_s = None
        self.changed.add(place)
        self.effects += [SetState(place, False), Cease(place)]

    def _may_own(self, place: Place, entry: Entry, name: str) -> bool:
        link = self._links[place.interface]
        return may_own(name, self._standings(link, entry), entry.want.candidates)

    def _standings(self, link: Link, entry: Entry) -> Mapping[str, Standing]:
        own: Standing = "ready" if self._ready else "starting"
        if self._leaving or entry.want.leaving:
            own = "leaving"
        return {**link.standings, self._me: own}
