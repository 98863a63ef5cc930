"""The watch over other gateways, with real packets: the process asks a station at the other end of
a cable, which answers or not."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.drivers.announce.test_packets import (  # noqa: F401
    DEADLINE_S,
    MAC,
    NAME,
    ROUTER,
    ROUTER_MAC,
    VIP,
    cleaned,
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
from fairlead.net import arp
from fairlead.net.packet_socket import PacketSocket
from fairlead.roles.neighbor_process import command

pytestmark = pytest.mark.root

STATION, STRANGER = ROUTER_MAC, b"\2\0\0\0\0\x77"
SECOND = "192.0.2.240"
WATCH = Watch("eth0", STATION.hex(":"), False, (VIP, SECOND))


class Station:
    """The other end of the cable. It answers for `owned`, and counts what it is asked."""

    def __init__(self) -> None:
        with namespace.inside(ROUTER):
            self._socket = PacketSocket("eth0", arp.ETHERTYPE)
        self.owned = {VIP, SECOND}
        self.asked = Counter[str]()

    async def run(self) -> None:
        while True:
            while (frame := self._socket.receive()) is not None:
                found = arp.parse(frame)
                if found is None or (found.sender, found.destination) != ("0.0.0.0", STATION):
                    continue
                self.asked[found.target] += 1
                if found.target in self.owned:
                    self._socket.send(
                        arp.reply(STATION, found.target, found.sender_mac, found.sender)
                    )
            await asyncio.sleep(0.001)

    def forge(self, mac: bytes) -> None:
        """Announce another address for this MAC address, in frames of another station."""
        for frame in arp.announcement(mac, SECOND):
            self._socket.send(frame[:6] + STRANGER + frame[12:])

    def announce(self, *macs: bytes) -> None:
        for mac in macs:
            for frame in arp.announcement(mac, VIP):
                self._socket.send(frame)

    def close(self) -> None:
        self._socket.close()


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
    known = (("eth0", WATCH.mac),) if trusted else ()
    return WatchRequest(watches, (WATCH.mac,), ("eth0",), known)


def test_a_station_is_lost_after_four_questions_without_an_answer(
    run: Any, station: Station
) -> None:
    async def scenario() -> None:
        async with watching(station) as made:
            made.watch.set(request(WATCH))
            await until(lambda: min(station.asked[each] for each in WATCH.addresses) > 1)
            assert made.observations == []
            station.owned = {SECOND}
            before = station.asked[VIP]
            await until(lambda: station.asked[VIP] > before + MISSES)
            assert made.observations == [], "one address may have been deleted"
            assert made.watch.misses > 0
            missed = made.watch.misses
            station.owned = set()
            await until(lambda: bool(made.observations))
            assert made.observations == [Observation(*WATCH.key, silent=True)]
            assert missed + MISSES - 1 <= made.watch.misses <= missed + MISSES + 1
            station.owned = {VIP}
            await until(lambda: len(made.observations) > 1)
            assert made.observations[1].silent is False
            again = len(made.observations)
            await until(lambda: len(made.observations) > again)
            assert not made.observations[-1].silent, "it still counts as lost, and answers"
            made.watch.set(request(WATCH, trusted=True))
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
            assert {*made.heard} == {Heard("eth0", WATCH.mac, VIP)}

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
