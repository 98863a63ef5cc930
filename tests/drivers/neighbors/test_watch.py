"""The watch over other gateways, with real packets: the process asks a station at the other end of
a cable, which answers or not."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.l2 import Dot1Q, Ether
from tests.drivers.announce.test_packets import (  # noqa: F401
    DEADLINE_S,
    MAC,
    NAME,
    ROUTER,
    ROUTER_MAC,
    VIP,
    cleaned,
    ip,
    made_site,
    until,
)

from fairlead.drivers.neighbors.protocol import (
    Heard,
    Observation,
    Watch,
    WatchReport,
    WatchRequest,
)
from fairlead.drivers.neighbors.questions import MISSES, SLOW, UNHEARD
from fairlead.drivers.neighbors.watch import NeighborWatch
from fairlead.errors import Unavailable
from fairlead.lab import namespace
from fairlead.net import arp, ndp
from fairlead.net.packet_socket import PacketSocket
from fairlead.roles.neighbor_process import command

pytestmark = pytest.mark.root

STATION, STRANGER = ROUTER_MAC, b"\2\0\0\0\0\x77"
SECOND = "192.0.2.240"
WATCH = Watch("eth0", STATION.hex(":"), False, (VIP, SECOND))
VIP6, SECOND6 = "2001:db8:1::e0", "2001:db8:1::f0"
WATCH6 = Watch("eth0", STATION.hex(":"), False, (VIP6, SECOND6))
VLAN = 5


class Station:
    """The other end of the cable. It answers for `owned`, and counts what it is asked."""

    def __init__(self) -> None:
        with namespace.inside(ROUTER):
            self._sockets = [PacketSocket("eth0", each.ETHERTYPE) for each in (arp, ndp)]
        self.owned = {*WATCH.addresses, *WATCH6.addresses}
        self.asked = Counter[str]()
        self.sources: list[str] = []
        """Of the solicitations."""

    async def run(self) -> None:
        while True:
            for each in self._sockets:
                while (frame := each.receive()) is not None:
                    self._answer(frame)
            await asyncio.sleep(0.001)

    def _answer(self, frame: bytes) -> None:
        if (found := arp.parse(frame)) and found.destination == STATION:
            assert found.sender == arp.UNSPECIFIED
            target, mac, source = found.target, found.sender_mac, found.sender
            answer = arp.reply(STATION, target, mac, source)
        elif (asked := ndp.parse(frame)) and asked.to_mac == STATION:
            self.sources.append(asked.source)
            target, mac, source = asked.target, asked.from_mac, asked.source
            answer = ndp.advertisement(STATION, target, mac, source)
        else:
            return
        self.asked[target] += 1
        if target in self.owned:
            self._send(answer)

    def forge(self, mac: bytes) -> None:
        """Announce other addresses for this MAC address, in frames of another station."""
        for frame in announcements(mac, SECOND, SECOND6):
            self._send(frame[:6] + STRANGER + frame[12:])

    def announce(self, *macs: bytes) -> None:
        for mac in macs:
            self._send(*announcements(mac, VIP, VIP6))

    def announce_in_vlan(self, mac: bytes) -> None:
        """Announce other addresses to the hosts of a VLAN."""
        for frame in announcements(mac, SECOND, SECOND6):
            tagged = Ether(frame)
            tagged.payload = Dot1Q(vlan=VLAN, type=tagged.type) / tagged.payload
            tagged.type = 0x8100
            self._send(bytes(tagged))

    def _send(self, *frames: bytes) -> None:
        for each in frames:
            self._sockets[0].send(each)

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def announcements(mac: bytes, ipv4: str, ipv6: str) -> list[bytes]:
    return [*arp.announcement(mac, ipv4), ndp.announcement(mac, ipv6)]


@pytest.fixture
def station(site: None) -> Iterator[Station]:
    with namespace.inside(ROUTER):
        # Its kernel sends frames of its own accord.
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    made = Station()
    yield made
    made.close()


class Watching:
    """A watch, and what it has reported."""

    def __init__(self) -> None:
        self.reports: list[WatchReport] = []
        self.watch = NeighborWatch(command(), self._observed)

    async def _observed(self, report: WatchReport) -> None:
        self.reports.append(report)

    @property
    def observations(self) -> list[Observation]:
        return [each for report in self.reports for each in report.observations]

    @property
    def heard(self) -> list[Heard]:
        return [each for report in self.reports for each in report.heard]


@asynccontextmanager
async def watching(station: Station) -> AsyncIterator[Watching]:
    made = Watching()
    tasks = [asyncio.create_task(station.run()), asyncio.create_task(made.watch.run())]
    try:
        async with asyncio.timeout(DEADLINE_S):
            await until(lambda: bool(made.reports))
            yield made
    finally:
        for each in tasks:
            each.cancel()
            with suppress(asyncio.CancelledError, Unavailable):
                await each


def request(*watches: Watch, trusted: bool = False) -> WatchRequest:
    known = (("eth0", STATION.hex(":")),) if trusted else ()
    return WatchRequest(watches, (WATCH.mac,), ("eth0",), known)


@pytest.mark.parametrize("watch", [WATCH, WATCH6])
def test_a_station_is_lost_after_four_questions_without_an_answer(
    run: Any, station: Station, watch: Watch
) -> None:
    vip, second = watch.addresses

    async def scenario() -> None:
        async with watching(station) as made:
            made.watch.set(request(watch))
            await until(lambda: min(station.asked[each] for each in watch.addresses) > 1)
            assert made.observations == []
            station.owned = {second}
            before = station.asked[vip]
            await until(lambda: station.asked[vip] > before + MISSES)
            assert made.observations == [], "one address may have been deleted"
            assert made.watch.misses > 0
            missed = made.watch.misses
            station.owned = set()
            await until(lambda: bool(made.observations))
            assert made.observations == [Observation(*watch.key, silent=True)]
            assert missed + MISSES - 1 <= made.watch.misses <= missed + MISSES + 1
            station.owned = {vip}
            await until(lambda: len(made.observations) > 1)
            assert made.observations[1].silent is False
            again = len(made.observations)
            await until(lambda: len(made.observations) > again)
            assert not made.observations[-1].silent, "it still counts as lost, and answers"
            made.watch.set(request(watch, trusted=True))
            station.owned = set()
            await until(lambda: made.observations[-1].silent)

    run(scenario)


def test_a_station_that_has_never_answered_is_not_lost(run: Any, station: Station) -> None:
    async def scenario() -> None:
        station.owned = set()
        async with watching(station) as made:
            made.watch.set(request(WATCH))
            await until(lambda: station.asked.total() > 2)
            assert made.observations == []
            left = Watch(WATCH.interface, WATCH.mac, True, (VIP,))
            made.watch.set(request(WATCH, left))
            await until(lambda: bool(made.observations))
            assert made.observations == [Observation(*left.key, silent=True)], "it announced it"

    run(scenario)


def test_a_station_whose_network_drops_solicitations_is_lost_by_arp_alone(
    run: Any, station: Station
) -> None:
    """This holds for its own addresses, and for those that were left to it."""
    both = Watch(WATCH.interface, WATCH.mac, False, (VIP, *WATCH6.addresses))
    left = Watch(WATCH.interface, WATCH.mac, True, WATCH6.addresses)

    async def scenario() -> None:
        station.owned = {VIP}
        async with watching(station) as made:
            made.watch.set(request(both, left))
            await until(lambda: min(station.asked[each] for each in both.addresses) > MISSES)
            assert (made.observations, made.watch.misses) == ([], 0)
            station.owned = set()
            await until(lambda: bool(made.observations))
            assert made.observations == [Observation(*both.key, silent=True)]

    run(scenario)


def test_solicitations_come_from_the_link_local_address_as_soon_as_there_is_one(
    run: Any, station: Station
) -> None:
    """The kernel verifies an address for a second or two before it is used."""
    default, other = ndp.link_local(MAC), "fe80::99"

    async def scenario() -> None:
        async with watching(station) as made:
            made.watch.set(request(WATCH6))
            await until(lambda: len(station.sources) > 2)
            assert {*station.sources} == {default}
            ip(NAME, "address", "add", f"{other}/64", "dev", "eth0", "nodad")
            await until(lambda: other in station.sources)

    ip(NAME, "-6", "address", "flush", "dev", "eth0", "scope", "link")
    try:
        run(scenario)
    finally:
        ip(NAME, "-6", "address", "flush", "dev", "eth0", "scope", "link")
        ip(NAME, "address", "add", f"{default}/64", "dev", "eth0", "nodad")


def test_announcements_of_known_gateways_are_reported(run: Any, station: Station) -> None:
    async def scenario() -> None:
        async with watching(station) as made:
            made.watch.set(request())
            station.announce(STRANGER, STATION)

            def heard() -> bool:
                station.forge(STATION)
                station.announce(STRANGER, STATION)
                return bool(made.heard)

            await until(heard)
            assert {*made.heard} == {Heard("eth0", WATCH.mac, each) for each in (VIP, VIP6)}

    run(scenario)


def test_announcements_to_other_vlans_are_ignored(run: Any, station: Station) -> None:
    """The kernel removes the tag before the watch gets the frame."""

    async def scenario() -> None:
        async with watching(station) as made:
            made.watch.set(request())

            def heard() -> bool:
                station.announce_in_vlan(STATION)
                station.announce(STATION)
                return len(made.heard) > 2

            await until(heard)
            assert {each.address for each in made.heard} == {VIP, VIP6}

    run(scenario)


@pytest.mark.parametrize("alone", [True, False])
def test_a_host_that_was_cut_off_itself_knows_it(run: Any, station: Station, alone: bool) -> None:
    """Nothing arrives while it is cut off; otherwise other stations go on talking."""

    async def scenario() -> None:
        async with watching(station) as made:
            made.watch.set(request(WATCH))
            await until(lambda: station.asked.total() > 2 * SLOW)
            station.owned = set()
            await until(lambda: bool(made.observations))
            lost = station.asked.total()

            def asked_often() -> bool:
                if not alone:
                    station.announce(STRANGER)
                return station.asked.total() > lost + UNHEARD + 1

            await until(asked_often)
            station.owned = {VIP, SECOND}
            await until(lambda: len(made.observations) > 1)
            assert made.observations[1] == Observation(*WATCH.key, silent=False, alone=alone)

    run(scenario)


async def test_the_watch_ends_with_its_process() -> None:
    made = NeighborWatch(("/bin/false",), Watching()._observed)
    with pytest.raises(Unavailable, match="ended by itself, with status 1"):
        await made.run()
