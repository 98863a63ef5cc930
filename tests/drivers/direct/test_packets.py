"""Packet in, verdict and packet out: which packets are ours, and what leaves of them. The kernel itself runs the program."""

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6EchoRequest, IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import ARP, Dot1Q, Ether
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
    tcp,
    to_us,
    udp,
)

from fairlead.drivers.direct.layout import INDEX, TRAFFIC
from fairlead.drivers.direct.spec import ListenerKey

pytestmark = pytest.mark.root

NO_MEMBER, NO_NEXT_HOP, HOP_LIMIT, FRAGMENT = range(4)


@pytest.fixture
def serving(forwarder: Forwarder) -> Forwarder:
    """TCP and UDP on port 80 of both addresses, by node1 alone."""
    for address in (VIP4, VIP6):
        forwarder.serve({"node1": 1}, address=address)
        forwarder.serve({"node1": 1}, address=address, protocol="UDP")
    return forwarder


@pytest.mark.parametrize(
    "packet",
    [
        tcp("S"),
        tcp("A"),
        tcp("R"),
        udp(),
        tcp("S", ipv6=True),
        udp(ipv6=True),
        to_us() / IP(src=CLIENT4, dst=VIP4, options=[b"\x07\x07\x04\x00\x00\x00\x00\x00"]) / TCP(sport=9, dport=80),
    ],
    ids=["syn", "ack", "rst", "udp", "syn over ipv6", "udp over ipv6", "with ip options"],
)
def test_forwards_unmodified_but_for_the_hop_limit(serving: Forwarder, packet: Packet) -> None:
    answer = serving.run(packet)
    assert (answer.verdict, answer.node) == (REDIRECT, "node1")
    expected = packet.copy()
    if IP in expected:
        expected[IP].ttl -= 1
        del expected[IP].chksum  # scapy computes the right one
    else:
        expected[IPv6].hlim -= 1
    assert answer.packet == bytes(expected)


@pytest.mark.parametrize("ttl", range(2, 256))
def test_header_checksum_stays_right_for_every_ttl(serving: Forwarder, ttl: int) -> None:
    packet = tcp(hops=ttl)
    packet[IP].id = ttl * 257
    answer = Ether(serving.run(packet).packet)
    right = answer[IP].chksum
    del answer[IP].chksum
    assert Ether(bytes(answer))[IP].chksum == right


# Frames cut within the IP header are missing: BPF_PROG_TEST_RUN itself refuses them.
FOREIGN: dict[str, Packet | bytes] = {
    "other port": to_us() / IP(src=CLIENT4, dst=VIP4) / TCP(dport=81),
    "other address": to_us() / IP(src=CLIENT4, dst="203.0.113.11") / TCP(dport=80),
    "other address over ipv6": to_us() / IPv6(src=CLIENT6, dst="2001:db8:f00::11") / TCP(dport=80),
    "echo request": to_us() / IP(src=CLIENT4, dst=VIP4) / ICMP(),
    "echo request over ipv6": to_us() / IPv6(src=CLIENT6, dst=VIP6) / ICMPv6EchoRequest(),
    "ip-in-ip": to_us() / IP(src=CLIENT4, dst=VIP4) / IP() / TCP(dport=80),
    "later fragment": to_us() / IP(src=CLIENT4, dst=VIP4, frag=100, proto=17) / Raw(b"\0\x50" * 20),
    "fragment over ipv6": to_us() / IPv6(src=CLIENT6, dst=VIP6) / IPv6ExtHdrFragment(m=1) / UDP(dport=80),
    "arp": to_us() / ARP(pdst=VIP4),
    "for another host": Ether(dst="02:00:00:00:00:99") / IP(src=CLIENT4, dst=VIP4) / TCP(dport=80),
    "with a vlan tag": to_us() / Dot1Q(vlan=7) / IP(src=CLIENT4, dst=VIP4) / TCP(dport=80),
    "cut in the tcp header": bytes(tcp())[: 14 + 20 + 19],
    "cut in the ports": bytes(udp())[: 14 + 20 + 3],
    "ihl of 4": bytes(tcp())[:14] + b"\x44" + bytes(tcp())[15:],
    "ihl beyond the end": bytes(tcp())[:14] + b"\x4f" + bytes(tcp())[15:54],
    "version 6 in ipv4": bytes(tcp())[:14] + b"\x65" + bytes(tcp())[15:],
    "sctp": to_us() / IP(src=CLIENT4, dst=VIP4, proto=132) / Raw(b"\0\x50\0\x50" * 10),
}


@pytest.mark.parametrize("packet", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_not_ours_goes_on_untouched(serving: Forwarder, packet: Packet | bytes) -> None:
    answer = serving.run(packet)
    assert answer.verdict == NOT_OURS
    assert answer.packet == bytes(packet)


def test_hop_limit_used_up_is_dropped_and_counted(serving: Forwarder) -> None:
    assert [serving.run(tcp(hops=1)).verdict, serving.run(tcp(hops=1, ipv6=True)).verdict] == [DROP, DROP]
    assert serving.event(HOP_LIMIT) == 2


def test_first_fragment_is_dropped_and_counted(serving: Forwarder) -> None:
    packet = to_us() / IP(src=CLIENT4, dst=VIP4, flags="MF") / UDP(dport=80) / Raw(b"x" * 40)
    assert serving.run(packet).verdict == DROP
    assert serving.event(FRAGMENT) == 1


def test_listener_without_members_drops_and_counts(forwarder: Forwarder) -> None:
    forwarder.serve({})
    assert forwarder.run(tcp()).verdict == DROP
    assert forwarder.event(NO_MEMBER) == 1


def test_node_without_an_address_of_the_family_drops_and_counts(forwarder: Forwarder) -> None:
    forwarder.add_node("old", "192.0.2.9")
    forwarder.serve({"old": 1}, address=VIP6)
    assert forwarder.run(tcp(ipv6=True)).verdict == DROP
    assert forwarder.event(NO_NEXT_HOP) == 1


def test_a_node_that_is_this_host_gets_the_packet_as_it_is(forwarder: Forwarder) -> None:
    forwarder.add_node("here", "192.0.2.9", here=True)
    forwarder.serve({"here": 1})
    packet = tcp(hops=1)
    assert forwarder.run(packet)[::2] == (NOT_OURS, bytes(packet))


def test_counts_packets_bytes_and_connections_of_a_listener(serving: Forwarder) -> None:
    sent = [tcp("S"), tcp("A"), tcp("A"), tcp("SA"), tcp("S", 40001)]
    for packet in sent:
        serving.run(packet)
    installed = serving.tables.installed(ListenerKey(VIP4, 80, "TCP"))
    assert installed
    index = installed.record.statistics
    rows = [TRAFFIC.unpack(row) for row in serving.maps["statistics"].per_cpu(INDEX.pack(index))]
    assert [sum(column) for column in zip(*rows, strict=True)] == [5, sum(len(packet) for packet in sent), 2]
