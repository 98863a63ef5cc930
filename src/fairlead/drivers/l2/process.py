"""The announcing process: it checks the other announcers, decides which addresses this host owns,
and announces them.

In: the requests of the role, the answers of other announcers, the claims that the kernel reports,
and changes of links. Out: the states of addresses in the maps of the kernel, announcements, and
reports to the role. It is a process of its own, because a role that plans a thousand Services would
notice the death of another announcer too late.

Invariants: in each step, everything that has arrived is read before any announcer is declared dead
and any address is taken. The process never waits for the role. When the role has ended, for any
reason, the process ends too, and the kernel goes on with what the maps contain."""

import fcntl
import math
import os
import select
import socket
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from fairlead.drivers.l2.engine import Engine
from fairlead.drivers.l2.entry import Announce, Cease, Forget, Probe, SetState, Want, Withdraw
from fairlead.drivers.l2.liveness import Liveness
from fairlead.drivers.l2.maps import Maps
from fairlead.drivers.l2.messages import (
    Configure,
    Interface,
    MemberStatus,
    PlaceStatus,
    Report,
    Request,
    Settings,
)
from fairlead.drivers.l2.records import (
    Claim,
    HostState,
    Place,
    Presentation,
    Withdrawal,
    claim_of,
)
from fairlead.drivers.l2.schedule import Schedule
from fairlead.drivers.l2.station import Station
from fairlead.errors import Unavailable
from fairlead.net import interfaces
from fairlead.net.frames import Frames, frame
from fairlead.net.link_events import LinkEvents
from fairlead.net.memberships import join, leave
from fairlead.net.ndp import solicited_node
from fairlead.net.rtnetlink import RtnetlinkSocket

CONFIRM_S = 1.0
"""The interval at which this process confirms to the kernel that it runs."""
IDENTIFY_S = 0.25
"""How long an unknown station that claims an address has to show that it is a member."""
MAX_UNKNOWN = 1024
MAX_CLAIMS = 4096
JOINS_AT_ONCE = 32
"""The number of multicast groups that are joined between two looks at what has arrived."""
_RECEIVE_BYTES = 1 << 18


class _Unknown(msgspec.Struct):
    until_s: float
    claims: dict[Place, Claim]


class Process:
    """The process. `control`: the socket to the role, which has sent the settings."""

    def __init__(self, control: socket.socket, settings: Settings) -> None:
        self._control = control
        self._settings = settings
        control.setblocking(False)
        self._directory = os.open(settings.directory, os.O_RDONLY | os.O_DIRECTORY)
        # A former process of this role may not have noticed yet that its role has ended.
        fcntl.flock(self._directory, fcntl.LOCK_EX)
        self._maps = Maps.open_pinned(Path(settings.directory))
        self._reports = self._maps.reports()
        self._adopted = self._maps.states()
        self._engine = Engine(settings.name)
        self._schedule = Schedule()
        self._links = LinkEvents()
        self._kernel = RtnetlinkSocket()
        self._stations: dict[int, Station] = {}
        self._wanted: dict[Place, Want] = {}
        """What the role has requested, also on interfaces that are not there yet."""
        self._unknown: dict[tuple[int, bytes], _Unknown] = {}
        self._groups = dict.fromkeys(_groups_of(self._adopted), True)
        """The multicast groups by interface, and whether the kernel reports the membership. A
        previous process has joined those of its addresses."""
        self._to_join: dict[tuple[int, str], None] = {}
        self._frames = Frames(msgspec.msgpack.Decoder(Request))
        self._outgoing = b""
        self._confirm_s = 0.0
        self._ready = settings.ready
        self._leaving = False
        self._sequence, self._reported_sequence = 0, -1
        self._members_changed = False
        self._sent = 0
        """The number of announcements on interfaces that are not used any more."""
        self._engine.set_ready(0.0, ready=self._ready, leaving=False)
        self._poll = select.poll()
        for each in (control, self._reports.descriptor, self._links):
            self._poll.register(each, select.POLLIN)

    def run(self) -> None:
        """Work until the role has ended."""
        self._report()
        while True:
            now_s = time.monotonic()
            wait_s = max(0.0, self._next_s() - now_s)
            self._poll.poll(math.ceil(wait_s * 1000))
            self._read_answers()
            self._read_links()
            self._read_claims()
            if not self._read_requests():
                return
            self._advance(time.monotonic())
            self._carry_out()
            self._report()

    def close(self) -> None:
        """Release everything. The kernel goes on."""
        for station in self._stations.values():
            station.close()
        self._reports.close()
        self._maps.close()
        self._links.close()
        self._kernel.close()
        os.close(self._directory)

    def _next_s(self) -> float:
        times = [self._confirm_s, *(each.until_s for each in self._unknown.values())]
        times += [each.liveness.next_s() for each in self._stations.values() if each.usable]
        times += [each for each in (self._engine.next_s(), self._schedule.next_s()) if each]
        return 0.0 if self._to_join else min(times)

    # What has arrived

    def _read_answers(self) -> None:
        for station in self._stations.values():
            now_s = time.monotonic()
            changed = False
            for hello in station.answers():
                if isinstance(hello, Withdrawal):
                    if (name := station.liveness.names.get(hello.mac)) is not None:
                        self._engine.withdrawn(Place(station.index, hello.address), name, now_s)
                    continue
                if hello.name == self._settings.name:
                    self._meet_namesake(station, hello.mac, now_s)
                    continue
                new = hello.mac not in station.liveness.names
                changed |= station.liveness.heard(hello, now_s)
                if new:
                    self._engine.identified(station.index, hello.mac, now_s)
                if hello.address:
                    place = Place(station.index, hello.address)
                    self._engine.claim(place, hello.name, hello.mac, "announced", now_s)
                waiting = self._unknown.pop((station.index, hello.mac), None)
                if waiting is not None:
                    self._engine.members(station.index, station.liveness.standings, now_s)
                    for claim in waiting.claims.values():
                        self._claimed(claim, hello.name, now_s)
            if changed:
                self._tell_members(station, now_s)

    def _meet_namesake(self, station: Station, mac: bytes, now_s: float) -> None:
        """Another host has the name of this one, so no decision about owners can tell the two
        apart: it counts as a station outside of Fairlead. Its probes are no conflict: if they were,
        two such hosts that start together would both do without the address. Answers of other
        interfaces of this host come here too, and claim nothing."""
        waiting = self._unknown.pop((station.index, mac), None)
        for claim in waiting.claims.values() if waiting is not None else ():
            if claim.kind != "probed":
                self._claimed(claim, None, now_s)

    def _read_claims(self) -> None:
        now_s = time.monotonic()
        for record in self._reports.read(MAX_CLAIMS):
            claim = claim_of(record)
            station = self._stations.get(claim.place.interface)
            if station is None or any(claim.mac == each.mac for each in self._stations.values()):
                continue
            if claim.yielded:
                self._engine.yielded(claim.place, now_s)
            name = station.liveness.names.get(claim.mac)
            if name is not None:
                self._claimed(claim, name, now_s)
            elif claim.place in self._engine.entries and len(self._unknown) < MAX_UNKNOWN:
                self._identify(station, claim, now_s)

    def _claimed(self, claim: Claim, name: str | None, now_s: float) -> None:
        self._engine.claim(claim.place, name, claim.mac, claim.kind, now_s)
        if claim.place not in self._engine.entries and self._adopted.get(claim.place):
            # A previous process owned it, and nothing has requested it again yet.
            self._adopted[claim.place] = False
            self._maps.set_states({claim.place: False})

    def _identify(self, station: Station, claim: Claim, now_s: float) -> None:
        """Ask a station that claims an address whether it is a member."""
        key = (station.index, claim.mac)
        waiting = self._unknown.get(key)
        if waiting is None:
            waiting = self._unknown[key] = _Unknown(now_s + IDENTIFY_S, {})
            station.ask(station.liveness.round, claim.mac)
        waiting.claims[claim.place] = claim
        self._engine.suspect(claim.place, waiting.until_s)

    def _read_links(self) -> None:
        changes = self._links.received()
        if not changes.lost and changes.devices.isdisjoint(
            station.name for station in self._stations.values()
        ):
            return
        now_s = time.monotonic()
        try:
            present = {link.index: link for link in interfaces.links().values()}
        except Unavailable:
            return
        for station in self._stations.values():
            link = present.get(station.index)
            self._set_usable(station, link is not None and link.up and link.carrier, now_s)
            if link is None:
                continue
            mac = _mac(link.mac)
            if mac != station.mac or link.name in changes.moved:
                station.mac = mac
                self._present(station, now_s)
                self._engine.announce_again(station.index)

    def _set_usable(self, station: Station, usable: bool, now_s: float) -> None:
        if usable == station.usable:
            return
        station.usable = usable
        # What is known about the members is out of date, whether the link has gone or returned.
        station.liveness.restart(now_s)
        self._engine.set_usable(
            station.index, now_s, usable=usable, settled_s=station.liveness.settled_s
        )
        self._tell_members(station, now_s)
        if usable:  # a device that goes down forgets the addresses that it had
            self._join_again(station.index)

    def _read_requests(self) -> bool:
        """Carry out the requests of the role. Return False if the role has ended."""
        while True:
            try:
                data = self._control.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not data:
                return False
            for request in self._frames.take(data):
                if isinstance(request, Configure):
                    self._configure(request)

    # Requests

    def _configure(self, request: Configure) -> None:
        now_s = time.monotonic()
        before = set(self._stations.values())
        self._use(request.interfaces, now_s)
        if (request.ready, request.leaving) != (self._ready, self._leaving):
            self._ready, self._leaving = request.ready, request.leaving
            for station in self._stations.values():
                self._present(station, now_s)
            self._engine.set_ready(now_s, ready=request.ready, leaving=request.leaving)
        gone = set(request.gone)
        for place in gone:
            self._wanted.pop(place, None)
        changed = {each.place: Want(each.candidates, each.leaving) for each in request.wanted}
        self._wanted |= changed
        # An interface that is used again, such as one with a new name, has lost its addresses.
        fresh = {each.index for each in self._stations.values() if each not in before}
        known = {
            place: want
            for place, want in self._wanted.items()
            if place.interface in fresh or (place in changed and place.interface in self._stations)
        }
        owned = [place for place in known if self._adopted.pop(place, False)]
        self._engine.want(known, gone, now_s, owned=owned)
        left = {place: self._adopted.pop(place) for place in gone if place in self._adopted}
        # The maps know the address until its group is left, so that a process that is killed
        # meanwhile leaves no membership that its successor does not know.
        self._set_groups()
        self._maps.forget(left)
        for place, answered in left.items():
            if answered:
                self._engine.withdraw(place, now_s)
        self._sequence = request.sequence

    def _use(self, wanted: Collection[Interface], now_s: float) -> None:
        """Use exactly these interfaces."""
        stay = {(each.index, each.name) for each in wanted}
        for station in list(self._stations.values()):
            if (station.index, station.name) not in stay:
                self._drop(station, now_s)
        new = [each for each in wanted if each.index not in self._stations]
        present = {link.index: link for link in interfaces.links().values()} if new else {}
        for each in new:
            link = present.get(each.index)
            if link is None or link.name != each.name:
                continue  # it has just gone, and the role will say so
            usable = link.up and link.carrier
            settings = self._settings
            liveness = Liveness(settings.name, settings.interval_s, settings.multiplier, now_s)
            try:
                station = Station(
                    each.index, each.name, _mac(link.mac), settings.group, liveness, usable=usable
                )
            except OSError:
                continue
            self._stations[each.index] = station
            self._poll.register(station, select.POLLIN)
            self._join_again(each.index)
            self._engine.add_link(each.index, liveness.settled_s)
            if not usable:
                self._engine.set_usable(each.index, now_s, usable=False, settled_s=now_s)
            self._present(station, now_s)

    def _drop(self, station: Station, now_s: float) -> None:
        self._engine.remove_link(station.index, now_s)
        self._set_groups()
        self._carry_out()
        self._sent += station.announcements
        self._poll.unregister(station)
        station.close()
        del self._stations[station.index]
        self._maps.withdraw(station.index)
        self._members_changed = True

    def _set_groups(self) -> None:
        """Join the solicited-node groups of all addresses, also of addresses that other hosts own:
        then a take-over has to wait for nothing. Leave the groups of no address, also on interfaces
        that are not used any more."""
        wanted = _groups_of([*self._engine.entries, *self._adopted])
        for key in self._groups.keys() - wanted:
            with suppress(OSError):  # the interface is gone
                leave(self._kernel, key[0], socket.if_indextoname(key[0]), key[1])
            del self._groups[key]
            self._to_join.pop(key, None)
        for key in wanted - self._groups.keys():
            self._groups[key] = False
            self._to_join[key] = None

    def _join_again(self, interface: int) -> None:
        mine = [each for each in self._groups if each[0] == interface]
        self._groups.update(dict.fromkeys(mine, False))
        self._to_join.update(dict.fromkeys(mine))

    def _join_some(self) -> None:
        for key in list(self._to_join)[:JOINS_AT_ONCE]:
            del self._to_join[key]
            station = self._stations.get(key[0])
            if station is not None and key in self._groups:
                with suppress(OSError):
                    self._groups[key] = join(self._kernel, station.index, station.name, key[1])

    # Time

    def _advance(self, now_s: float) -> None:
        if now_s >= self._confirm_s:
            self._confirm_s = now_s + CONFIRM_S
            for station in self._stations.values():
                self._present(station, now_s)
        for station in self._stations.values():
            if not station.usable:
                continue
            if station.liveness.verdicts(now_s):
                self._tell_members(station, now_s)
            if (requests := station.liveness.requests(now_s)) is not None:
                for mac in requests.macs:
                    station.ask(requests.round, mac)
                if requests.everyone:
                    station.ask(requests.round)
        for key, waiting in list(self._unknown.items()):
            if now_s >= waiting.until_s:
                del self._unknown[key]
                for claim in waiting.claims.values():
                    self._claimed(claim, None, now_s)
        self._engine.tick(now_s)
        self._join_some()

    def _tell_members(self, station: Station, now_s: float) -> None:
        self._members_changed = True
        self._engine.members(station.index, station.liveness.standings, now_s)
        self._present(station, now_s)

    def _present(self, station: Station, now_s: float) -> None:
        state: HostState = "leaving" if self._leaving else "ready" if self._ready else "starting"
        if state == "ready" and self._engine.was_cut_off(station.index, now_s):
            state = "returned"
        deadline_ns = int((now_s + self._settings.stale_s) * 1e9)
        if station.mac:
            self._maps.present(
                station.index,
                Presentation(
                    self._settings.group, station.mac, self._settings.name, state, deadline_ns
                ),
            )

    # Effects

    def _carry_out(self) -> None:
        now_s = time.monotonic()
        effects, self._engine.effects = self._engine.effects, []
        states: dict[Place, bool] = {}
        forgotten, probes, withdrawn = [], [], []
        for effect in effects:
            match effect:
                case SetState(place, owned):
                    states[place] = owned
                case Forget(place):
                    states.pop(place, None)
                    forgotten.append(place)
                case Announce(place, urgent):
                    self._schedule.start(place, now_s, urgent=urgent)
                case Cease(place):
                    self._schedule.stop(place)
                case Probe(place):
                    probes.append(place)
                case Withdraw(place):
                    withdrawn.append(place)
        # The kernel answers before other hosts are told to ask here, and it records the answers to
        # probes only for addresses that it knows.
        self._maps.forget(forgotten)
        self._maps.set_states(states)
        for place in probes:
            self._stations[place.interface].probe(place.address)
        for place in withdrawn:
            if (station := self._stations.get(place.interface)) is not None:
                station.withdraw(place.address)
        for place in self._schedule.due(now_s):
            if (station := self._stations.get(place.interface)) is not None:
                station.announce(place.address)

    def _report(self) -> None:
        """Report what has changed, unless the role has not read the last report yet: then the next
        report contains it."""
        changed = self._engine.changed
        new = changed or self._members_changed or self._sequence != self._reported_sequence
        if new and not self._outgoing:
            statuses = tuple(self._status(place) for place in changed)
            self._outgoing = frame(
                Report(
                    self._sequence,
                    statuses,
                    tuple(self._member_statuses()) if self._members_changed else None,
                    self._sent + sum(each.announcements for each in self._stations.values()),
                    self._engine.takes,
                    sum(not each for each in self._groups.values()) - len(self._to_join),
                )
            )
            self._engine.changed = set()
            self._members_changed = False
            self._reported_sequence = self._sequence
        with suppress(BlockingIOError, ConnectionError):
            while self._outgoing:
                self._outgoing = self._outgoing[self._control.send(self._outgoing) :]
        interest = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
        self._poll.modify(self._control, interest)

    def _status(self, place: Place) -> PlaceStatus:
        entry = self._engine.entries.get(place)
        if entry is None:
            return PlaceStatus(place, "gone", "", "", False, "")
        return PlaceStatus(
            place,
            entry.phase,
            entry.holder or "",
            entry.cause,
            entry.taken,
            entry.foreign.hex(":"),
        )

    def _member_statuses(self) -> Iterable[MemberStatus]:
        for station in self._stations.values():
            for each in station.liveness.members.values():
                yield MemberStatus(station.index, each.name, each.mac.hex(":"), each.standing)


def _groups_of(places: Iterable[Place]) -> set[tuple[int, str]]:
    """Return the solicited-node groups of addresses, by interface."""
    return {
        (place.interface, solicited_node(place.address)) for place in places if ":" in place.address
    }


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def serve(control: socket.socket) -> None:
    """Read the settings, and work until the role has ended."""
    frames = Frames(msgspec.msgpack.Decoder(Request))
    while data := control.recv(_RECEIVE_BYTES):
        for request in frames.take(data):
            if isinstance(request, Settings):
                process = Process(control, request)
                try:
                    process.run()
                finally:
                    process.close()
                return
