"""Fragments: all fragments of a packet reach the same node, whatever arrives between them."""

import random
import struct
from collections.abc import Iterator

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment, IPv6ExtHdrHopByHop, PadN
from scapy.packet import Packet, Raw
from tests.drivers.direct.conftest import (
    CLIENT4,
    CLIENT6,
    DROP,
    NOT_OURS,
    REDIRECT,
    VIP4,
    VIP6,
    Forwarder,
    to_us,
    udp,
)

from fairlead.drivers.direct.maps.records import DROPS, HOPS_LEFT, LOCAL, NextHop
from fairlead.net.address import pack_address

pytestmark = pytest.mark.root

HOP_LIMIT, FRAGMENT = 2, 3
PART = 48


@pytest.fixture
def serving(forwarder: Forwarder) -> Forwarder:
    """A forwarder with UDP and TCP listeners on both addresses, served by two nodes."""
    for address in (VIP4, VIP6):
        forwarder.maps["addresses"].update(pack_address(address), (1).to_bytes(4, "little"))
        forwarder.serve({"node1": 1, "node2": 1}, address=address, protocol="UDP")
        forwarder.serve({"node1": 1, "node2": 1}, address=address)
    return forwarder


def fragments(port: int, number: int, *, ipv6: bool = False, hops: int = 64) -> list[Packet]:
    """Return the four fragments of a datagram. `number`: the identification of the packet."""
    whole = bytes(UDP(sport=port, dport=80) / Raw(b"x" * (4 * PART - 8)))
    parts = [(at, whole[at : at + PART]) for at in range(0, len(whole), PART)]
    if ipv6:
        return [
            to_us()
            / IPv6(src=CLIENT6, dst=VIP6, nh=44, hlim=hops)
            / IPv6ExtHdrFragment(nh=17, offset=at // 8, m=at + PART < len(whole), id=number)
            / Raw(part)
            for at, part in parts
        ]
    return [
        to_us()
        / IP(
            src=CLIENT4,
            dst=VIP4,
            proto=17,
            id=number,
            ttl=hops,
            frag=at // 8,
            flags="MF" if at + PART < len(whole) else "",
        )
        / Raw(part)
        for at, part in parts
    ]


@pytest.mark.parametrize("ipv6", [False, True])
def test_all_fragments_reach_the_node_of_the_first(serving: Forwarder, ipv6: bool) -> None:
    nodes = set()
    for port in range(20000, 20050):
        owner = serving.run(udp(port, ipv6=ipv6)).node
        sent = fragments(port, port, ipv6=ipv6)
        answers = [serving.run(part) for part in sent]
        assert {answer.node for answer in answers} == {owner}
        for part, answer in zip(sent, answers, strict=True):
            spent = part.copy()
            if ipv6:
                spent[IPv6].hlim = HOPS_LEFT
            else:
                spent[IP].ttl = HOPS_LEFT
                del spent[IP].chksum
            assert answer.packet == bytes(spent)
        nodes.add(owner)
    assert nodes == {"node1", "node2"}
    assert serving.event(FRAGMENT) == 0


@pytest.mark.parametrize("ipv6", [False, True])
def test_fragments_of_many_packets_in_any_order_after_the_first_fragments(
    serving: Forwarder, ipv6: bool
) -> None:
    packets = {port: fragments(port, port, ipv6=ipv6) for port in range(20000, 20100)}
    owners = {port: serving.run(parts[0]).node for port, parts in packets.items()}
    rest = [(port, part) for port, parts in packets.items() for part in parts[1:]]
    random.Random(4).shuffle(rest)
    assert {(port, serving.run(part).node) for port, part in rest} == set(owners.items())


@pytest.mark.parametrize("ipv6", [False, True])
def test_a_later_fragment_without_a_first_is_dropped_and_counted(
    serving: Forwarder, ipv6: bool
) -> None:
    first, second, third, _ = fragments(20000, 5, ipv6=ipv6)
    assert serving.run(second).verdict == DROP
    assert serving.event(FRAGMENT) == 1
    assert serving.run(first).verdict == REDIRECT
    assert serving.run(third).verdict == REDIRECT
    assert serving.run(fragments(20000, 6, ipv6=ipv6)[1]).verdict == DROP
    assert serving.event(FRAGMENT) == 2


def test_the_node_of_a_first_fragment_is_forgotten_after_30_s(serving: Forwarder) -> None:
    first, second, *_ = fragments(20000, 5)
    serving.run(first)
    table = serving.maps["fragments"]
    ((key, value),) = table.items()
    since_ns, rest = struct.unpack("=Q8s", value)
    table.update(key, struct.pack("=Q8s", since_ns - 29_000_000_000, rest))
    assert serving.run(second).verdict == REDIRECT
    table.update(key, struct.pack("=Q8s", since_ns - 31_000_000_000, rest))
    assert serving.run(second).verdict == DROP


def test_fragments_of_another_sender_protocol_or_packet_are_distinguished(
    serving: Forwarder,
) -> None:
    serving.run(fragments(20000, 5)[0])
    second = fragments(20000, 5)[1]
    for field, value in (("src", "198.51.100.8"), ("proto", 6), ("id", 6)):
        other = second.copy()
        setattr(other[IP], field, value)
        assert serving.run(other).verdict == DROP


@pytest.mark.parametrize("ipv6", [False, True])
def test_fragments_with_a_used_up_hop_limit_are_dropped(serving: Forwarder, ipv6: bool) -> None:
    serving.run(fragments(20000, 5, ipv6=ipv6)[0])
    assert [serving.run(part).verdict for part in fragments(20000, 5, ipv6=ipv6, hops=1)] == [
        DROP
    ] * 4
    assert serving.event(HOP_LIMIT) == 4


@pytest.mark.parametrize("ipv6", [False, True])
def test_fragments_pass_only_one_gateway(serving: Forwarder, ipv6: bool) -> None:
    serving.run(fragments(20000, 5, ipv6=ipv6)[0])
    assert [
        serving.run(part).verdict for part in fragments(20000, 5, ipv6=ipv6, hops=HOPS_LEFT)
    ] == [DROP] * 4
    # Only the first fragment begins a connection.
    assert serving.event(DROPS.index("returned")) == 1
    assert serving.event(DROPS.index("stray")) == 3


def test_fragments_for_a_node_that_is_this_host_go_to_the_kernel(serving: Forwarder) -> None:
    for number in (1, 2):
        serving.tables.nodes.set_next_hop(
            f"node{number}", NextHop(LOCAL, 1, f"192.0.2.{number}"), ipv6=False
        )
    for part in fragments(20000, 5):
        assert serving.run(part)[::2] == (NOT_OURS, bytes(part))


def one_piece() -> Iterator[Packet]:
    """Yield atomic fragments (RFC 6946: complete packets with a fragment header), without and with
    another extension header."""
    atomic = IPv6ExtHdrFragment(nh=6, offset=0, m=0, id=7)
    segment = TCP(sport=20000, dport=80, flags="A")
    yield to_us() / IPv6(src=CLIENT6, dst=VIP6, nh=44) / atomic / segment
    yield (
        to_us()
        / IPv6(src=CLIENT6, dst=VIP6)
        / IPv6ExtHdrHopByHop(nh=44, options=[PadN(optdata=b"\0" * 4)])
        / atomic
        / segment
    )


def test_an_atomic_fragment_is_handled_like_any_packet(serving: Forwarder) -> None:
    for packet in one_piece():
        assert serving.run(packet).verdict == REDIRECT
    assert not list(serving.maps["fragments"].items())
    assert serving.passed_on == 0


def test_a_first_fragment_too_short_for_tcp_flags_goes_to_the_node_of_the_connection(
    serving: Forwarder,
) -> None:
    owner = serving.run(
        to_us() / IP(src=CLIENT4, dst=VIP4) / TCP(sport=20000, dport=80, flags="A")
    ).node
    whole = bytes(TCP(sport=20000, dport=80, flags="A"))
    tiny = to_us() / IP(src=CLIENT4, dst=VIP4, proto=6, id=5, flags="MF") / Raw(whole[:8])
    rest = to_us() / IP(src=CLIENT4, dst=VIP4, proto=6, id=5, frag=1) / Raw(whole[8:])
    assert [serving.run(tiny).node, serving.run(rest).node] == [owner, owner]
