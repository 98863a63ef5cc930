"""Asks other gateways for addresses that they announce, and listens to their announcements.

In: the stations to ask, each with some of its addresses. Out: which stations have become silent or
have returned, and which addresses they announce. Each question is an ARP probe (RFC 5227, 2.1.1) or
a neighbor solicitation to the station alone: it changes no entry of a neighbor, and the station's
program in the kernel (bpf/neighbor.bpf.c) answers it like the requests of clients, so the answer
proves the host, the cable, the program and its deadline at once. `question` and `read_frame` are
all that depends on ARP and neighbor discovery. Runs in a process of its own
(`roles/neighbor_process`)."""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fairlead.drivers.neighbors.protocol import (
    Heard,
    Observation,
    Watch,
    WatchReport,
    WatchRequest,
)
from fairlead.drivers.neighbors.questions import INTERVAL_S, Questions
from fairlead.errors import FairleadError, Refused
from fairlead.net import arp, ndp
from fairlead.net.address import is_ipv6
from fairlead.net.packet_socket import PacketSocket

IDLE_S = 0.2
"""The interval at which announcements are processed while no station is asked."""
ALONE_S = 2.0
"""For how long after a return other stations return for the same reason."""
BUFFER_BYTES = 4 << 20
"""The receive buffer of a socket: a gateway may announce thousands of addresses at once."""
_COUNTERS, _ADDRESSES = Path("/proc/self/net/dev"), Path("/proc/self/net/if_inet6")
_LINK_LOCAL, _UNUSABLE = 0x20, 0x48
"""The scope of an address, and the flags of one that is not verified yet, or is a duplicate."""
_FILTERS = {arp.ETHERTYPE: (), ndp.ETHERTYPE: ndp.ADVERTISES}
"""What the sockets receive. All other packets of IPv6 would be too many."""


class Seen(NamedTuple):
    """What a frame says: `station` has this address. `announced`: it announces it to all
    neighbors; otherwise it answers this host."""

    station: bytes
    address: str
    announced: bool


def question(own: bytes, source: str, station: bytes, address: str) -> bytes:
    """Return the frame that asks the station for the address. `own`, `source`: the MAC address and
    the link-local address of the interface."""
    if _ethertype_of(address) == ndp.ETHERTYPE:
        return ndp.question(own, source, address, station)
    return arp.request(own, arp.UNSPECIFIED, address, to=station)


def read_frame(own: bytes, frame: bytes) -> Seen | None:
    """Return what the frame says; None if it is neither an answer to this host nor an
    announcement."""
    if (message := ndp.parse(frame)) is not None:
        replies = message.type == ndp.ADVERTISEMENT and (message.solicited or message.announces)
        source, destination = message.from_mac, message.to_mac
        seen = Seen(message.mac, message.target, message.announces)
    elif (found := arp.parse(frame)) is not None:
        replies = found.operation == arp.REPLY
        source, destination = found.source, found.destination
        seen = Seen(found.sender_mac, found.sender, found.announces)
    else:
        return None
    # Switches that check who sends a frame check its header only.
    trusted = source == seen.station and (seen.announced or destination == own)
    return seen if replies and trusted else None


class Watcher:
    """The watch over other gateways. `report`: called with what is observed."""

    def __init__(self, report: Callable[[WatchReport], None]) -> None:
        self._report = report
        self._request = WatchRequest((), (), ())
        self._questions: dict[tuple[str, str, bool], Questions] = {}
        self._sockets: dict[tuple[str, int], PacketSocket] = {}
        """By interface and EtherType."""
        self._sources: dict[str, str] = {}
        """The link-local address of each interface that has had one since its socket was opened."""
        self._refused = ""
        self._alone_until_s: dict[str, float] = {}
        self._misses = self._reported_misses = 0
        self._observed: list[Observation] = []
        self._heard: list[Heard] = []

    def change(self, request: WatchRequest) -> None:
        """Carry the request out."""
        self._request = request
        wanted = {each.key: each for each in request.watches}
        self._questions = {key: each for key, each in self._questions.items() if key in wanted}
        for key, each in wanted.items():
            if key in self._questions:
                self._questions[key].replace(each.addresses)
            else:
                self._questions[key] = Questions(each.addresses, known=self._known(each))
        for interface, mac in request.trusted:
            if (found := self._questions.get((interface, mac, False))) is not None:
                found.trust()
        for name in {name for name, _ in self._sockets} - {*request.interfaces}:
            self._close(name)

    def _known(self, watch: Watch) -> Collection[str]:
        """Return the families of which a new watch expects answers at once. A station that has
        announced an address answers for it, but switches may drop the questions of IPv6."""
        if not watch.left:
            return ()
        asked = self._questions.get((watch.interface, watch.mac, False))
        return {"IPv4", *(asked.known if asked is not None else ())}

    def run(self, wait: Callable[[float], bool]) -> None:
        """Ask and listen, until `wait` returns False. It waits for this number of seconds, and may
        call `change` meanwhile."""
        try:
            # From the last question, so that an interval that is late does not shorten the next
            # one.
            while wait(INTERVAL_S if self._request.watches else IDLE_S):
                for name in self._request.interfaces:
                    for ethertype in _FILTERS:
                        self._receive(name, ethertype)
                for each in self._request.watches:
                    self._judge(each)
                self._flush()
                for each in self._request.watches:
                    self._ask(each)
        finally:
            for opened in self._sockets.values():
                opened.close()

    def _receive(self, interface: str, ethertype: int) -> None:
        """Process the frames that have arrived."""
        try:
            link = self._open(interface, ethertype)
            while link is not None and (frame := link.receive()) is not None:
                if (seen := read_frame(link.mac, frame)) is not None:
                    self._process(interface, seen)
        except FairleadError:
            self._close(interface)

    def _process(self, interface: str, seen: Seen) -> None:
        mac = seen.station.hex(":")
        if seen.announced:
            if mac in self._request.stations:
                self._heard.append(Heard(interface, mac, seen.address))
            return
        for left in (False, True):
            found = self._questions.get((interface, mac, left))
            if found is None or seen.address not in found.addresses:
                continue
            alone = found.silent and self._is_alone(interface, found)
            if found.answered(seen.address):
                self._observed.append(Observation(interface, mac, left, silent=False, alone=alone))

    def _is_alone(self, interface: str, returned: Questions) -> bool:
        """Return whether this host was cut off, and not the station that returns now: nothing had
        arrived from anybody, or several other stations were all silent."""
        now_s = time.monotonic()
        others = [
            each
            for (name, _, left), each in self._questions.items()
            if name == interface and not left
        ]
        if returned.unheard or (len(others) > 1 and all(each.silent for each in others)):
            self._alone_until_s[interface] = now_s + ALONE_S
        return now_s < self._alone_until_s.get(interface, 0.0)

    def _judge(self, watch: Watch) -> None:
        questions = self._questions[watch.key]
        if questions.judge():
            self._misses += 1
            if questions.silent:
                self._observed.append(Observation(*watch.key, silent=True))

    def _ask(self, watch: Watch) -> None:
        for address in self._questions[watch.key].due():
            self._ask_about(watch, address)

    def _ask_about(self, watch: Watch, address: str) -> None:
        questions = self._questions[watch.key]
        # A question that cannot be sent is no evidence against the station.
        try:
            if (link := self._open(watch.interface, _ethertype_of(address))) is not None:
                station = bytes.fromhex(watch.mac.replace(":", ""))
                source = self._source(watch.interface) if is_ipv6(address) else ""
                source = source or ndp.link_local(link.mac)
                link.send(question(link.mac, source, station, address))
                questions.asked(address, received(watch.interface) if questions.silent else 0)
        except FairleadError:
            self._close(watch.interface)

    def _flush(self) -> None:
        if self._observed or self._heard or self._misses != self._reported_misses:
            self._report(WatchReport(tuple(self._observed), tuple(self._heard), self._misses))
            self._observed, self._heard = [], []
            self._reported_misses = self._misses

    def _open(self, interface: str, ethertype: int) -> PacketSocket | None:
        """Return the socket of the interface; None if there is no such interface now."""
        if (interface, ethertype) not in self._sockets:
            try:
                opened = PacketSocket(interface, ethertype, _FILTERS[ethertype])
            except FairleadError as error:
                if isinstance(error, Refused) and self._refused != str(error):
                    self._refused = str(error)
                    self._report(WatchReport((), (), self._misses, str(error)))
                return None
            opened.reserve(BUFFER_BYTES)
            self._sockets[interface, ethertype] = opened
        return self._sockets[interface, ethertype]

    def _source(self, interface: str) -> str:
        """Return the link-local address of the interface; empty as long as the kernel has not
        verified one."""
        if interface not in self._sources and (found := link_local(interface)):
            self._sources[interface] = found
        return self._sources.get(interface, "")

    def _close(self, interface: str) -> None:
        self._sources.pop(interface, None)
        for ethertype in _FILTERS:
            if (opened := self._sockets.pop((interface, ethertype), None)) is not None:
                opened.close()


def _ethertype_of(address: str) -> int:
    return ndp.ETHERTYPE if is_ipv6(address) else arp.ETHERTYPE


def link_local(interface: str) -> str:
    """Return the link-local address of the interface; empty if it has none."""
    with suppress(OSError):
        for line in _ADDRESSES.read_text().splitlines():
            number, _, _, scope, flags, name = line.split()
            usable = int(scope, 16) == _LINK_LOCAL and not int(flags, 16) & _UNUSABLE
            if name == interface and usable and number.startswith("fe8"):
                return ":".join(number[at : at + 4] for at in range(0, len(number), 4))
    return ""


def received(interface: str) -> int:
    """Return how many frames have arrived at the interface; 0 if there is no such interface."""
    with suppress(OSError):
        for line in _COUNTERS.read_text().splitlines()[2:]:
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return int(counters.split()[1])
    return 0
