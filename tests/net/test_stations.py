"""Which other stations on the links of a host have its addresses."""

import asyncio
import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest

from fairlead.lab import namespace
from fairlead.net import arp, interfaces, localroutes, stations
from fairlead.net.packet_socket import PacketSocket
from fairlead.net.routing import Routing
from fairlead.net.stations import Station, stations_at

pytestmark = pytest.mark.root

OTHER = f"flt-{os.getpid()}-other"
MAC, OTHER_MAC, OWN_MAC = "02:00:00:00:00:99", "02:00:00:00:00:98", "02:00:00:00:00:01"
TAKEN, TAKEN6 = "192.0.2.50", "2001:db8:1::50"
FREE, ELSEWHERE = "192.0.2.51", "203.0.113.7"
CAPABILITIES_V3, CAP_NET_RAW = 0x20080522, 13  # linux/capability.h


@pytest.fixture
def without_net_raw() -> Iterator[None]:
    """Run the test without the effective capability CAP_NET_RAW, so that the kernel asks."""
    libc = ctypes.CDLL(None)
    header = struct.pack("=Ii", CAPABILITIES_V3, 0)
    before = ctypes.create_string_buffer(24)
    assert libc.capget(header, before) == 0
    (effective,) = struct.unpack_from("=I", before)
    without = struct.pack("=I", effective & ~(1 << CAP_NET_RAW)) + before.raw[4:]
    assert libc.capset(header, without) == 0
    yield
    assert libc.capset(header, before) == 0


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(autouse=True)
def here() -> Iterator[None]:
    """Run each test on a link to another host."""
    name = f"flt-{os.getpid()}-stations"
    namespace.create(name)
    namespace.create(OTHER)
    try:
        with namespace.inside(name):
            ip("link", "set", "lo", "up")
            # Otherwise the link-local address, which asks for neighbors, is usable after a second.
            namespace.set_sysctls(name, {"net/ipv6/conf/default/accept_dad": 0})
            ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", OTHER)
            ip("link", "set", "eth0", "address", OWN_MAC)
            ip("-n", OTHER, "link", "set", "eth0", "address", MAC)
            for where, last in (([], "11"), (["-n", OTHER], "50")):
                ip(*where, "address", "add", f"192.0.2.{last}/24", "dev", "eth0")
                ip(*where, "address", "add", f"2001:db8:1::{last}/64", "dev", "eth0", "nodad")
                ip(*where, "link", "set", "eth0", "up")
            ip("-n", OTHER, "address", "add", f"{ELSEWHERE}/32", "dev", "eth0")
            yield
    finally:
        namespace.delete(name)
        namespace.delete(OTHER)


async def test_a_station_that_has_an_address_of_this_host_too_is_found() -> None:
    """Not for an address that is on no link: routers send it to this host, and to nobody else."""
    addresses = {TAKEN, TAKEN6, FREE, ELSEWHERE}
    await localroutes.add(addresses)
    station = Station("eth0", MAC)
    assert await stations_at(addresses) == {(TAKEN, station), (TAKEN6, station)}
    assert await stations_at({ELSEWHERE}) == set()
    assert interfaces.macs() == [OWN_MAC]


async def test_this_host_itself_is_no_other_station() -> None:
    """Two of its interfaces may be on one link, and the kernel answers on both."""
    ip("link", "add", "eth1", "type", "veth", "peer", "name", "eth2")
    for name, address in (("eth1", "198.51.100.1/24"), ("eth2", "198.51.100.2/24")):
        ip("address", "add", address, "dev", name)
        ip("link", "set", name, "up")
    await localroutes.add({"198.51.100.50"})
    assert await stations_at({"198.51.100.50"}) == set()


def add_a_second_station() -> None:
    """Have another network card with another MAC address answer on the link too."""
    ip("-n", OTHER, "link", "add", "br0", "address", MAC, "type", "bridge")
    ip("-n", OTHER, "link", "set", "eth0", "master", "br0")
    ip("-n", OTHER, "link", "add", "port", "type", "veth", "peer", "name", "card")
    ip("-n", OTHER, "link", "set", "card", "address", OTHER_MAC)
    ip("-n", OTHER, "link", "set", "port", "master", "br0")
    for name in ("br0", "port", "card"):
        ip("-n", OTHER, "link", "set", name, "up")


async def test_all_stations_that_have_an_address_are_found() -> None:
    """Beside another gateway, which answers for all its addresses, a foreign host is found too."""
    add_a_second_station()
    assert await stations_at({TAKEN, FREE}) == {
        (TAKEN, Station("eth0", MAC)),
        (TAKEN, Station("eth0", OTHER_MAC)),
    }


async def test_a_flood_of_frames_does_not_occupy_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of replies few are read at once; requests the kernel discards."""
    operations: set[int] = set()
    reply = arp.reply(bytes.fromhex(MAC.replace(":", "")), TAKEN, bytes(6), "192.0.2.11")

    class Flooded(PacketSocket):
        received = 0

        def receive(self, timeout_s: float = 0.0) -> bytes | None:
            self.received += 1
            assert self.received < 100_000, "the drain does not end"
            frame = super().receive(timeout_s)
            if frame and (said := arp.parse(frame)):
                operations.add(said.operation)
            return frame or reply

    monkeypatch.setattr(stations, "PacketSocket", Flooded)
    monkeypatch.setattr(stations, "WAIT_S", 0.2)
    checking = asyncio.ensure_future(stations_at({TAKEN}))
    await asyncio.sleep(0)
    with namespace.inside(OTHER), PacketSocket("eth0") as other:
        other.send(arp.probe(other.mac, FREE))
    assert await checking == {(TAKEN, Station("eth0", MAC))}
    assert operations == {arp.REPLY}


@pytest.mark.usefixtures("without_net_raw")
async def test_without_the_capability_one_station_is_found() -> None:
    add_a_second_station()
    await localroutes.add({TAKEN, TAKEN6, FREE})
    ((address, station),) = await stations_at({TAKEN, FREE})
    assert address == TAKEN
    assert station.mac in (MAC, OTHER_MAC)


@pytest.mark.usefixtures("without_net_raw")
async def test_few_neighbours_are_asked_for_at_once_and_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel keeps 1,024 in all network namespaces together. A neighbour that the host has
    anyway stays."""
    monkeypatch.setattr(stations, "AT_ONCE", 8)
    monkeypatch.setattr(stations, "WAIT_S", 0.2)
    known = "192.0.2.60"
    ip("neigh", "add", known, "lladdr", "02:00:00:00:00:60", "nud", "permanent", "dev", "eth0")
    addresses = {TAKEN, TAKEN6, *(f"192.0.2.{number}" for number in range(51, 100))}
    await localroutes.add(addresses)
    seen: list[set[str]] = []

    def neighbours() -> set[str]:
        with closing(Routing()) as routing:
            return {each for _, each in routing.neighbours()} & addresses

    checking = asyncio.ensure_future(stations_at(addresses))
    while not checking.done():
        seen.append(neighbours())
        await asyncio.sleep(0.02)
    assert await checking == {
        (TAKEN, Station("eth0", MAC)),
        (TAKEN6, Station("eth0", MAC)),
        (known, Station("eth0", "02:00:00:00:00:60")),
    }
    assert set().union(*seen) > {TAKEN, FREE}
    assert max(map(len, seen)) <= 8 + 1
    assert neighbours() == {known}
    assert "PERMANENT" in ip("neigh", "show", known)


@pytest.mark.parametrize("by", ["probes", "kernel"])
async def test_addresses_of_a_link_that_is_gone_end_no_check(
    by: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "kernel":
        request.getfixturevalue("without_net_raw")
    monkeypatch.setattr(stations, "AT_ONCE", 1)
    monkeypatch.setattr(stations, "WAIT_S", 0.3)
    ip("link", "add", "eth1", "type", "veth", "peer", "name", "eth2")
    ip("address", "add", "10.0.0.1/24", "dev", "eth1")
    for name in ("eth1", "eth2"):
        ip("link", "set", name, "up")
    gone = {"10.0.0.5", "10.0.0.6"}
    checking = asyncio.ensure_future(stations_at({TAKEN, *gone}))
    await asyncio.sleep(0.1)
    ip("link", "delete", "eth1")
    assert await checking == {(TAKEN, Station("eth0", MAC))}


def test_a_card_without_an_address_answers_too_and_the_network_of_a_pod_does_not() -> None:
    """Otherwise the second card of a gateway on the same network would pass for a stranger. Each
    pod has a device with a link-local address."""
    ip("link", "add", "card", "address", "02:00:00:00:00:02", "type", "bridge")
    ip("link", "add", "pod", "type", "veth", "peer", "name", "pod", "netns", OTHER)
    for name in ("card", "pod"):
        ip("link", "set", name, "up")
    assert interfaces.macs() == [OWN_MAC, "02:00:00:00:00:02"]
