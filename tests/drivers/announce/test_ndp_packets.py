"""The program that answers neighbor solicitations, with real packets: a host and its router,
connected by a cable."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6NDOptSrcLLAddr,
    ICMPv6NDOptUnknown,
    IPv6,
    IPv6ExtHdrDestOpt,
)
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw
from tests.drivers.announce.test_packets import (  # noqa: F401
    DEADLINE_S,
    DROPPED,
    FOREIGN_MAC,
    LEFT_ALONE,
    LOOPBACK,
    MAC,
    NAME,
    PINS,
    REDIRECTED,
    ROUTER,
    ROUTER_MAC,
    cleaned,
    ip,
    made_site,
    responder,
    until,
)
from tests.drivers.announce.test_packets import VIP as IPV4

from fairlead.drivers.announce import maps as announce_maps
from fairlead.drivers.announce.gratuitous import Gratuitous
from fairlead.drivers.announce.maps import Maps
from fairlead.drivers.announce.responder import directory_of, remove_responder
from fairlead.lab import namespace
from fairlead.net import bpffs, ndp
from fairlead.net.packet_socket import PacketSocket
from fairlead.net.program import TEST_CHECKSUM_COMPLETE

pytestmark = pytest.mark.root

HOST, ASKER = "2001:db8:1::10", "2001:db8:1::1"
VIP, OTHERS, UNKNOWN = "2001:db8:1::e0", "2001:db8:1::e1", "2001:db8:1::e2"
OTHER_VIP, SAME_GROUP = "2001:db8:1::1:e1", "2001:db8:1::2:1:e1"
GROUP = ndp.solicited_node(VIP)
MAPPED = f"::ffff:{IPV4}"


class Router:
    """Asks for addresses from the router's end of the cable."""

    def __init__(self) -> None:
        with namespace.inside(ROUTER):
            self._socket = PacketSocket("eth0", ndp.ETHERTYPE)

    def close(self) -> None:
        self._socket.close()

    def send(self, *frames: bytes) -> None:
        for each in frames:
            self._socket.send(each)

    def ask(self, *requests: bytes) -> list[ndp.Message]:
        """Send the requests. Return the answers.

        The last request, for the address of the host itself, shows that all have arrived."""
        self.send(*requests, ndp.solicitation(ROUTER_MAC, ASKER, HOST))
        found: list[ndp.Message] = []
        while (frame := self._socket.receive(DEADLINE_S)) is not None:
            answer = ndp.parse(frame)
            if answer is None or answer.type != ndp.ADVERTISEMENT or answer.mac == ROUTER_MAC:
                continue
            if answer.target == HOST:
                return found
            found.append(answer)
        raise AssertionError("the host does not answer for its own address")

    def received(self) -> list[ndp.Message]:
        """Return the announcements that have arrived."""
        found = map(ndp.parse, iter(self._socket.receive, None))
        return [each for each in found if each and each.announces]

    def answers(self, address: str) -> list[bytes]:
        """Return the MAC addresses in the answers to one request."""
        return [each.mac for each in self.ask(ndp.solicitation(ROUTER_MAC, ASKER, address))]


@pytest.fixture(name="dual", scope="module")
def made_dual(site: None) -> None:
    """Give the host addresses of its own. Its kernel answers for all but VIP."""
    for each in (f"{HOST}/64", f"{OTHERS}/128", f"{UNKNOWN}/128"):
        ip(NAME, "address", "add", each, "dev", "eth0", "nodad")


@pytest.fixture(name="router")
def made_router(dual: None) -> Iterator[Router]:
    made = Router()
    yield made
    made.close()


def answer(address: str) -> ndp.Message:
    return ndp.Message(ndp.ADVERTISEMENT, address, ASKER, address, MAC, True, True, MAC, ROUTER_MAC)


def to_all(address: str) -> ndp.Message:
    everybody = ndp.multicast_mac(ndp.ALL_NODES)
    return ndp.Message(
        ndp.ADVERTISEMENT, address, ndp.ALL_NODES, address, MAC, False, True, MAC, everybody
    )


def test_only_the_owner_answers(run: Any, router: Router) -> None:
    async def scenario() -> None:
        assert (router.answers(VIP), router.answers(OTHERS)) == ([], [MAC])
        made = responder()
        await made.open()
        await made.set({VIP: "eth0"}, {OTHERS})
        before = made.counts()
        asked = ndp.solicitation(ROUTER_MAC, ASKER, VIP)
        assert router.ask(*[asked] * 20) == [answer(VIP)] * 20
        assert router.ask(ndp.solicitation(ROUTER_MAC, ASKER, VIP, to=MAC)) == [answer(VIP)]
        assert router.ask(ndp.probe(ROUTER_MAC, VIP)) == [to_all(VIP)]
        assert router.answers(OTHERS) == []
        assert router.ask(ndp.probe(ROUTER_MAC, OTHERS)) == []
        assert router.answers(UNKNOWN) == [MAC]
        counted = made.counts()
        assert {name: counted[name] - before[name] for name in counted} == {
            "answered": 22,
            "dropped": 2,
        }
        assert made.answered() == {VIP: "eth0"}
        assert made.last_request("eth0") is not None
        assert router.ask(ndp.question(ROUTER_MAC, ASKER, VIP, MAC)) == [answer(VIP)]
        assert made.counts() == counted, "another gateway is no client"
        await made.set({OTHERS: "eth0"}, {VIP})
        assert (router.answers(OTHERS), router.answers(VIP)) == ([MAC], [])
        assert made.counts()["answered"] == counted["answered"] + 1
        await made.set({VIP: "eth1"}, ())
        assert router.answers(VIP) == [], "it is owned on another interface"
        await made.close()

    run(scenario)


def test_past_its_deadline_an_entry_has_no_effect(run: Any, router: Router) -> None:
    async def scenario() -> None:
        made = responder(lifetime_s=0.0)
        await made.open()
        await made.set({VIP: "eth0"}, {OTHERS})
        assert (router.answers(VIP), router.answers(OTHERS)) == ([], [MAC])
        assert made.counts() == {"answered": 0, "dropped": 0}
        await made.close()

    run(scenario)


def test_the_kernel_of_a_neighbor_resolves_and_refuses_an_owned_address(
    run: Any, router: Router
) -> None:
    """It sends packets to the address, and cannot have it itself."""

    async def scenario() -> None:
        made = responder()
        await made.open()
        await made.set({VIP: "eth0"}, ())
        ip(ROUTER, "address", "replace", f"{ASKER}/64", "dev", "eth0", "nodad")
        with (
            namespace.inside(ROUTER),
            socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sending,
        ):
            sending.sendto(b"", (VIP, 9))
        await until(lambda: f"lladdr {MAC.hex(':')}" in ip(ROUTER, "neigh", "show", VIP))
        ip(ROUTER, "address", "add", f"{VIP}/64", "dev", "eth0")
        await until(lambda: "dadfailed" in ip(ROUTER, "address", "show", "to", VIP))
        ip(ROUTER, "address", "delete", f"{VIP}/64", "dev", "eth0")
        await made.close()

    run(scenario)


def test_stations_that_use_an_owned_address_are_named(run: Any, router: Router) -> None:
    async def scenario() -> None:
        made = responder()
        await made.open()
        await made.set({VIP: "eth0"}, {OTHERS})
        router.ask(
            ndp.announcement(MAC, VIP),
            ndp.announcement(FOREIGN_MAC, OTHERS),
            ndp.probe(FOREIGN_MAC, VIP),
            ndp.solicitation(FOREIGN_MAC, ASKER, VIP),
            # An answer to all nodes cannot have been solicited.
            ndp.advertisement(FOREIGN_MAC, VIP, ndp.multicast_mac(ndp.ALL_NODES), ndp.ALL_NODES),
        )
        assert made.claims() == []
        for number, frame in enumerate(
            (
                ndp.announcement(FOREIGN_MAC, VIP),
                ndp.advertisement(FOREIGN_MAC[:5] + b"\1", VIP, MAC, HOST),
                ndp.solicitation(FOREIGN_MAC[:5] + b"\2", VIP, HOST),
            )
        ):
            router.ask(frame)
            (claim,) = made.claims()
            last = (0x99, 1, 2)[number]
            assert (claim.address, claim.mac) == (VIP, f"02:00:00:00:00:{last:02x}")
        await made.set({}, {VIP})
        assert made.claims() == []
        await made.close()

    run(scenario)


def members() -> list[str]:
    """Return the multicast groups of the host's interface, among other words."""
    return ip(NAME, "maddress", "show", "dev", "eth0").split()


def test_the_host_is_a_member_of_the_groups_of_owned_addresses(run: Any, router: Router) -> None:
    """Network cards, and switches that snoop on MLD, discard the requests otherwise."""

    async def scenario() -> None:
        made = responder()
        await made.open()
        await made.set({VIP: "eth0"}, {OTHER_VIP})
        assert GROUP in members()
        assert ndp.solicited_node(OTHER_VIP) not in members()
        await made.close()
        assert GROUP in members(), "a restart changes nothing"
        successor = responder()
        await successor.open()
        following = asyncio.create_task(successor.run())
        ip(NAME, "address", "delete", f"{GROUP}/128", "dev", "eth0")
        await until(lambda: GROUP in members())
        await successor.set({OTHER_VIP: "eth0", SAME_GROUP: "eth0"}, {VIP})
        assert GROUP not in members()
        await successor.set({OTHER_VIP: "eth0"}, {VIP})
        assert ndp.solicited_node(OTHER_VIP) in members(), "both addresses have this group"
        following.cancel()
        await successor.close()
        removed = await remove_responder(PINS)
        assert [each.partition(" at interface ")[0] for each in removed[:-1]] == [
            "program that answers for addresses",
            "memberships in multicast groups",
        ]
        assert ndp.solicited_node(OTHER_VIP) not in members()

    run(scenario)


def test_the_kernel_of_a_router_learns_an_announced_address(run: Any, router: Router) -> None:
    async def scenario() -> None:
        old = "02:00:00:00:00:77"
        ip(ROUTER, "neigh", "replace", VIP, "lladdr", old, "dev", "eth0", "nud", "stale")
        made = Gratuitous()
        sending = asyncio.create_task(made.run())
        made.announce(VIP, "eth0")
        await until(lambda: MAC.hex(":") in ip(ROUTER, "neigh", "show", VIP))
        found: list[ndp.Message] = []
        while len(found) < 3:
            found += router.received()
            await asyncio.sleep(0.01)
        assert found == [to_all(VIP)] * len(found)
        made.withdraw(VIP)
        sending.cancel()
        made.close()

    run(scenario)


@pytest.fixture(name="maps", scope="module")
def made_maps() -> Iterator[Maps]:
    """The maps with owned addresses on the loopback interface, on which test frames arrive."""
    pins = PINS.with_name(f"{NAME}-frames6")
    made = Maps.open(directory_of(pins))
    made.set_interfaces({LOOPBACK: MAC})
    far = announce_maps.now_ns() + 10**12
    owned, others = announce_maps.Entry(far, LOOPBACK), announce_maps.Entry(far, 0)
    made.set_entries({VIP: owned, OTHERS: others, IPV4: owned})
    yield made
    made.close()
    bpffs.remove(pins)


SLLA = ICMPv6NDOptSrcLLAddr(lladdr=ROUTER_MAC.hex(":"))


def packet(
    *layers: Packet, source: str = ASKER, to: str = GROUP, hops: int = 255, version: int = 6
) -> bytes:
    """Return a frame with these layers behind the IPv6 header; by default, they are sent to the
    group of VIP."""
    made: Packet = Ether(src=ROUTER_MAC.hex(":"), dst="ff:ff:ff:ff:ff:ff")
    made = made / IPv6(src=source, dst=to, hlim=hops, version=version)
    for each in layers:
        made = made / each
    return bytes(made)


def asking(address: str = VIP, **changed: Any) -> Packet:
    return ICMPv6ND_NS(tgt=address, **changed)


def option(kind: int, units: int, size: int | None = None) -> Packet:
    """Return an option whose length says `units`, and which has that size unless another is
    given."""
    size = units if size is None else size
    return ICMPv6NDOptUnknown(type=kind, len=units, data=bytes(8 * size - 2))


def tagged(vlan: int) -> bytes:
    frame = Ether(packet(asking(), SLLA))
    return bytes(Ether(src=frame.src, dst=frame.dst) / Dot1Q(vlan=vlan) / frame[IPv6])


VALID = {
    "request": packet(asking(), SLLA),
    "without options": packet(asking()),
    "unicast": packet(asking(), SLLA, to=VIP),
    "other options": packet(asking(), option(14, 1), SLLA, option(253, 3)),
    "all units": packet(asking(), option(253, 7), SLLA),
    "another option of the same type": packet(asking(), option(1, 2)),
}
PROBES = {
    "probe": packet(asking(), source="::"),
    "probe with a nonce": packet(asking(), option(14, 1), source="::"),
}
INVALID = {
    "hop limit": packet(asking(), SLLA, hops=254),
    "checksum": packet(asking(cksum=1), SLLA),
    "code": packet(asking(code=1), SLLA),
    "version": packet(asking(), SLLA, version=5),
    "option without a length": packet(asking(), option(1, 0, 1)),
    "option that is too short": packet(asking(), option(253, 2, 1)),
    "option behind the end": packet(asking(), SLLA, option(253, 3, 2)),
    "part of an option": packet(asking(), SLLA, Raw(b"\xfd\1\0\0")) + bytes(4),
    "too many options": packet(asking(), SLLA, option(253, 8)),
    "sender is a group": packet(asking(), ICMPv6NDOptSrcLLAddr(lladdr="03:00:00:00:00:01")),
    "sender has no MAC address": packet(asking(), ICMPv6NDOptSrcLLAddr(lladdr="00:" * 5 + "00")),
    "probe with a MAC address": packet(asking(), SLLA, source="::"),
    "unicast probe": packet(asking(), source="::", to=VIP),
    "probe to all nodes": packet(asking(), source="::", to="ff02::1"),
    "cut off": packet(asking(), SLLA)[:-1],
    "headers cut off": packet(asking())[:70],
}
OTHER = {
    "unknown": packet(asking(UNKNOWN), SLLA),
    "IPv4-mapped": packet(asking(MAPPED), SLLA),
    "advertisement": packet(ICMPv6ND_NA(tgt=VIP), to="ff02::1"),
    "echo request": packet(ICMPv6EchoRequest(data=b"16 bytes of data"), to=VIP),
    "extension header": packet(IPv6ExtHdrDestOpt(), asking(), SLLA),
    "VLAN": tagged(7),
    "priority tag": tagged(0),
}


def run_on(maps: Maps, frame: bytes, station: bytes = b"") -> tuple[int, bytes]:
    """Return the verdict, and the frame afterwards. The host receives the frame if no other station
    is given. The checksum of a network card stays consistent."""
    frame = (station or bytes(6)) + frame[6:]
    with maps.program() as program:
        result = program.test_run(frame, flags=TEST_CHECKSUM_COMPLETE)
    return result.verdict, result.packet


@pytest.mark.parametrize("frame", VALID.values(), ids=VALID)
def test_a_valid_solicitation_is_answered(maps: Maps, frame: bytes) -> None:
    expected = ndp.advertisement(MAC, VIP, ROUTER_MAC, ASKER)
    assert run_on(maps, frame) == (REDIRECTED, expected)


@pytest.mark.parametrize("frame", PROBES.values(), ids=PROBES)
def test_a_probe_is_answered_to_all_nodes(maps: Maps, frame: bytes) -> None:
    assert run_on(maps, frame) == (REDIRECTED, ndp.announcement(MAC, VIP))


def test_the_answer_goes_to_the_mac_address_in_the_options(maps: Maps) -> None:
    """Routers that share a MAC address send with that one, and ask for answers to their own."""
    named = ICMPv6NDOptSrcLLAddr(lladdr=FOREIGN_MAC.hex(":"))
    expected = ndp.advertisement(MAC, VIP, FOREIGN_MAC, ASKER)
    assert run_on(maps, packet(asking(), named)) == (REDIRECTED, expected)


def test_a_solicitation_of_an_address_of_another_gateway_is_dropped(maps: Maps) -> None:
    for frame in (packet(asking(OTHERS), SLLA), packet(asking(OTHERS), source="::")):
        assert run_on(maps, frame)[0] == DROPPED


@pytest.mark.parametrize("frame", (INVALID | OTHER).values(), ids=INVALID | OTHER)
def test_every_other_frame_is_left_alone(maps: Maps, frame: bytes) -> None:
    assert run_on(maps, frame) == (LEFT_ALONE, bytes(6) + frame[6:])


def test_a_frame_for_another_station_is_left_alone(maps: Maps) -> None:
    assert run_on(maps, VALID["request"], station=MAC)[0] == LEFT_ALONE


def test_an_answer_whose_checksum_is_0_is_valid(maps: Maps) -> None:
    def answer_to(asker: str) -> bytes:
        return ndp.advertisement(MAC, VIP, ROUTER_MAC, asker)

    # A word of the asker's address that was 0 and becomes the checksum makes the checksum 0.
    asker = f"2001:db8:1::{answer_to(ASKER)[56:58].hex()}:1"
    assert answer_to(asker)[56:58] == bytes(2)
    frame = ndp.solicitation(ROUTER_MAC, asker, VIP)
    assert run_on(maps, frame) == (REDIRECTED, answer_to(asker))


def test_a_sender_with_an_ipv4_mapped_address_uses_no_address(maps: Maps) -> None:
    run_on(maps, packet(asking(UNKNOWN), SLLA, source=MAPPED))
    assert IPV4 not in [each.address for each in maps.claims()]
