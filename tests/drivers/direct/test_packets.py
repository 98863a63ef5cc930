"""Packet in, verdict and packet out: which packets the programs handle, and how they change them.
The kernel itself runs the programs."""

import errno
import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    IPv6ExtHdrSegmentRouting,
    PadN,
)
from scapy.layers.ipsec import AH
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.layers.sctp import SCTP, SCTPChunkData, SCTPChunkInit
from scapy.packet import Packet, Raw
from tests.drivers.direct.conftest import (
    CLIENT4,
    CLIENT6,
    DROP,
    NOT_OURS,
    OWN_MAC,
    REDIRECT,
    VIP4,
    VIP6,
    Forwarder,
    datagram,
    mac_of,
    segment,
    tcp,
    to_us,
    udp,
)

from fairlead.drivers.direct.maps.records import DROPS, HOPS_LEFT, INDEX, NODE_TRAFFIC, TRAFFIC
from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol
from fairlead.errors import FairleadError
from fairlead.net.program import TEST_CHECKSUM_COMPLETE

pytestmark = pytest.mark.root

NO_MEMBER, NO_NEXT_HOP, HOP_LIMIT = range(3)
RETURNED, STRAY = DROPS.index("returned"), DROPS.index("stray")
PROTOCOLS: tuple[ListenerProtocol, ...] = ("TCP", "UDP", "SCTP")


@pytest.fixture
def serving(forwarder: Forwarder) -> Forwarder:
    """A forwarder with listeners for all protocols on port 80 of both addresses, served by
    node1."""
    for address in (VIP4, VIP6):
        for protocol in PROTOCOLS:
            forwarder.serve({"node1": 1}, address=address, protocol=protocol)
    return forwarder


def over6(*headers: Packet) -> Packet:
    """Return a TCP segment over IPv6 with these extension headers."""
    packet = to_us() / IPv6(src=CLIENT6, dst=VIP6)
    for header in headers:
        packet /= header
    return packet / TCP(sport=40000, dport=80, flags="A") / Raw(b"x" * 20)


SEGMENTS = IPv6ExtHdrSegmentRouting(addresses=["2001:db8::5", "2001:db8::6"], segleft=0)
SIGNED = AH(nh=6, spi=1, seq=1, icv=b"\0" * 12, payloadlen=4)
OURS: dict[str, Packet] = {
    "syn": tcp("S"),
    "ack": tcp("A"),
    "rst": tcp("R"),
    "udp": udp(),
    "udp without payload": to_us() / IP(src=CLIENT4, dst=VIP4) / UDP(dport=80),
    "sctp init": to_us() / IP(src=CLIENT4, dst=VIP4) / SCTP(dport=80, tag=0) / SCTPChunkInit(),
    "sctp data": to_us()
    / IP(src=CLIENT4, dst=VIP4)
    / SCTP(dport=80, tag=7)
    / SCTPChunkData(data=b"x"),
    "sctp over ipv6": to_us()
    / IPv6(src=CLIENT6, dst=VIP6)
    / SCTP(dport=80, tag=7)
    / SCTPChunkData(data=b"x"),
    "syn over ipv6": tcp("S", ipv6=True),
    "udp over ipv6": udp(ipv6=True),
    "one ip option": to_us()
    / IP(src=CLIENT4, dst=VIP4, options=[b"\x94\x04\0\0"])
    / TCP(sport=9, dport=80),
    "all ip options": to_us()
    / IP(src=CLIENT4, dst=VIP4, options=[b"\x07\x27\x04" + bytes(37)])
    / TCP(sport=9, dport=80),
    "padded to the least frame": to_us()
    / IP(src=CLIENT4, dst=VIP4, len=28)
    / UDP(dport=80, len=8)
    / Raw(b"\0" * 18),
    "hop-by-hop": over6(IPv6ExtHdrHopByHop(options=[PadN(optdata=b"\0" * 4)])),
    "long hop-by-hop": over6(IPv6ExtHdrHopByHop(options=[PadN(optdata=b"\0" * 252)])),
    "routing": over6(IPv6ExtHdrRouting(addresses=["2001:db8::5"], segleft=0)),
    "segment routing": over6(SEGMENTS),
    "destination options": over6(IPv6ExtHdrDestOpt(options=[PadN(optdata=b"\0" * 12)])),
    "authentication": to_us()
    / IPv6(src=CLIENT6, dst=VIP6, nh=51)
    / SIGNED
    / TCP(sport=40000, dport=80, flags="A"),
    "all that RFC 8200 names": over6(
        IPv6ExtHdrHopByHop(options=[PadN(optdata=b"\0" * 4)]),
        IPv6ExtHdrDestOpt(options=[PadN(optdata=b"\0" * 4)]),
        SEGMENTS,
        IPv6ExtHdrDestOpt(options=[PadN(optdata=b"\0" * 4)], nh=51),
        SIGNED,
    ),
}


@given(st.integers(0, 65535), st.booleans(), st.sampled_from(["S", "A", "FA"]), st.integers(1, 255))
def test_packets_built_without_scapy_are_equal_to_its_own(
    port: int, ipv6: bool, flags: str, hops: int
) -> None:
    made = segment(flags, port, ipv6=ipv6, hops=hops)
    assert made == bytes(tcp(flags, port, ipv6=ipv6, hops=hops))
    assert datagram(port, ipv6=ipv6, hops=hops) == bytes(udp(port, ipv6=ipv6, hops=hops))


@pytest.mark.parametrize("packet", OURS.values(), ids=OURS.keys())
def test_only_the_hop_limit_of_a_forwarded_packet_changes(
    serving: Forwarder, packet: Packet
) -> None:
    answer = serving.run(packet)
    assert (answer.verdict, answer.node) == (REDIRECT, "node1")
    expected = packet.copy()
    if IP in expected:
        expected[IP].ttl = HOPS_LEFT
        del expected[IP].chksum  # scapy computes it
    else:
        expected[IPv6].hlim = HOPS_LEFT
    assert answer.packet[14:] == bytes(expected)[14:]
    assert serving.passed_on == 0
    if serving.fast:
        assert answer.packet[:14] == mac_of("node1") + OWN_MAC + bytes(packet)[12:14]


def test_the_packet_sum_of_the_device_stays_right(serving: Forwarder) -> None:
    """Some devices sum whole packets on receipt (CHECKSUM_COMPLETE), and the kernel verifies
    transport checksums with this sum."""
    for name, packet in OURS.items():
        try:
            trial = serving.tc.test_run(bytes(packet), flags=TEST_CHECKSUM_COMPLETE)
        except FairleadError as error:
            too_old = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EINVAL
            if not too_old or os.environ.get("CI"):
                raise
            pytest.skip(
                "sums of whole packets were not checked: this Linux refuses "
                "BPF_F_TEST_SKB_CHECKSUM_COMPLETE"
            )
        assert (name, trial.verdict) == (name, REDIRECT)


@pytest.mark.parametrize("ttl", range(HOPS_LEFT + 1, 256))
def test_header_checksum_stays_right_for_every_ttl(serving: Forwarder, ttl: int) -> None:
    packet = tcp(hops=ttl)
    packet[IP].id = ttl * 257
    answer = Ether(serving.run(packet).packet)
    right = answer[IP].chksum
    del answer[IP].chksum
    assert Ether(bytes(answer))[IP].chksum == right


@pytest.mark.parametrize(
    "checksum", [0x0000, 0x0001, 0xFE00, 0xFEFE, 0xFEFF, 0xFF00, 0xFFFE, 0xFFFF]
)
def test_header_checksum_stays_right_where_it_carries_over(
    serving: Forwarder, checksum: int
) -> None:
    packet = tcp()
    packet[IP].id = 0
    (without,) = struct.unpack_from("!H", bytes(packet), 24)
    packet[IP].id = (without - checksum) % 0xFFFF
    packet[IP].chksum = checksum  # 0 and 0xffff are equivalent; senders use either
    given = bytes(packet)
    header = serving.run(given).packet[14:34]
    assert sum(struct.unpack("!10H", header)) % 0xFFFF == 0
    assert sum(struct.unpack("!10H", given[14:34])) % 0xFFFF == 0


# Frames cut within the IP header are missing, because BPF_PROG_TEST_RUN rejects them.
FOREIGN: dict[str, Packet | bytes] = {
    "other port": to_us() / IP(src=CLIENT4, dst=VIP4) / TCP(dport=81),
    "other address": to_us() / IP(src=CLIENT4, dst="203.0.113.11") / TCP(dport=80),
    "other address over ipv6": to_us() / IPv6(src=CLIENT6, dst="2001:db8:f00::11") / TCP(dport=80),
    "echo request to another address": to_us() / IP(src=CLIENT4, dst="203.0.113.11") / ICMP(),
    "echo request to another address over ipv6": to_us()
    / IPv6(src=CLIENT6, dst="2001:db8:f00::11")
    / ICMPv6EchoRequest(),
    "echo reply": to_us() / IP(src=CLIENT4, dst=VIP4) / ICMP(type=0),
    "later fragment for another address": to_us()
    / IP(src=CLIENT4, dst="203.0.113.11", frag=100, proto=17)
    / Raw(b"\0" * 40),
    "ip-in-ip": to_us() / IP(src=CLIENT4, dst=VIP4) / IP() / TCP(dport=80),
    "arp": to_us() / ARP(pdst=VIP4),
    "for another host": Ether(dst="02:00:00:00:00:99") / IP(src=CLIENT4, dst=VIP4) / TCP(dport=80),
    "for all hosts": Ether(dst="ff:ff:ff:ff:ff:ff") / IP(src=CLIENT4, dst=VIP4) / TCP(dport=80),
    "with a vlan tag": to_us() / Dot1Q(vlan=7) / IP(src=CLIENT4, dst=VIP4) / TCP(dport=80),
    "cut in the tcp header": bytes(tcp())[: 14 + 20 + 19],
    "cut in the ports": bytes(udp())[: 14 + 20 + 3],
    "shorter than its header says": bytes(tcp())[:-1],
    "ihl of 4": bytes(tcp())[:14] + b"\x44" + bytes(tcp())[15:],
    "ihl beyond the end": bytes(tcp())[:14] + b"\x4f" + bytes(tcp())[15:54],
    "version 6 in ipv4": bytes(tcp())[:14] + b"\x65" + bytes(tcp())[15:],
    "encrypted": to_us() / IPv6(src=CLIENT6, dst=VIP6, nh=50) / Raw(bytes(40)),
    "more extension headers than the programs parse": over6(
        *[IPv6ExtHdrDestOpt(options=[PadN(optdata=b"\0" * 4)])] * 8
    ),
    "no next header": to_us() / IPv6(src=CLIENT6, dst=VIP6, nh=59),
}


@pytest.mark.parametrize("packet", FOREIGN.values(), ids=FOREIGN.keys())
def test_other_packets_are_passed_to_the_kernel_untouched(
    serving: Forwarder, packet: Packet | bytes
) -> None:
    answer = serving.run(packet)
    assert answer.verdict == NOT_OURS
    assert answer.packet == bytes(packet)


def test_hop_limit_used_up_is_dropped_and_counted(serving: Forwarder) -> None:
    assert [serving.run(tcp(hops=1)).verdict, serving.run(tcp(hops=1, ipv6=True)).verdict] == [
        DROP,
        DROP,
    ]
    assert serving.event(HOP_LIMIT) == 2


def test_a_packet_passes_only_one_gateway_once(serving: Forwarder) -> None:
    """This holds for packets of every protocol, after any number of hops."""
    sent = (tcp(), tcp(ipv6=True), udp(), udp(ipv6=True), OURS["sctp data"], OURS["sctp over ipv6"])
    for packet in sent:
        once = serving.run(packet)
        assert once.verdict == REDIRECT
        frame = to_us() / Ether(once.packet).payload
        for hops in range(2, HOPS_LEFT + 1):
            if IP in frame:
                frame[IP].ttl = hops
                del frame[IP].chksum
            else:
                frame[IPv6].hlim = hops
            assert serving.run(frame).verdict == DROP
        assert serving.run(packet).verdict == REDIRECT, "a retransmission of the client"
    # Packets that continue an association belong to none that the node knows.
    assert serving.event(STRAY) == 2 * (HOPS_LEFT - 1)
    expected = (len(sent) - 2) * (HOPS_LEFT - 1)
    assert serving.event(RETURNED) == expected
    (number,) = (number for number, name in serving.tables.nodes.names().items() if name == "node1")
    rows = [
        NODE_TRAFFIC.unpack(row)
        for row in serving.maps["node_statistics"].per_cpu(INDEX.pack(number))
    ]
    assert sum(row[3] for row in rows) == expected, "counted for the node that sent them back"


@pytest.mark.parametrize("flags", ["A", "R", "RA", "FA", "SA", "SF", "PA", ""])
@pytest.mark.parametrize("ipv6", [False, True])
def test_a_returned_segment_that_begins_no_connection_blames_no_node(
    serving: Forwarder, flags: str, ipv6: bool
) -> None:
    """A node sends back what its conntrack calls invalid, although it serves the Service."""
    assert serving.run(tcp(flags, ipv6=ipv6, hops=HOPS_LEFT)).verdict == DROP
    assert (serving.event(STRAY), serving.event(RETURNED)) == (1, 0)
    assert serving.run(tcp("S", ipv6=ipv6, hops=HOPS_LEFT)).verdict == DROP
    assert (serving.event(STRAY), serving.event(RETURNED)) == (1, 1)


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
    rows = [
        TRAFFIC.unpack(row)[:3] for row in serving.maps["statistics"].per_cpu(INDEX.pack(index))
    ]
    expected = [5, sum(len(packet) for packet in sent), 2]
    assert [sum(column) for column in zip(*rows, strict=True)] == expected
    number = next(
        number for number, name in serving.tables.nodes.names().items() if name == "node1"
    )
    rows = [
        NODE_TRAFFIC.unpack(row)[:3]
        for row in serving.maps["node_statistics"].per_cpu(INDEX.pack(number))
    ]
    assert [sum(column) for column in zip(*rows, strict=True)] == expected


def test_drops_are_counted_with_their_listener(serving: Forwarder) -> None:
    serving.run(tcp(hops=1))
    installed = serving.tables.installed(ListenerKey(VIP4, 80, "TCP"))
    assert installed
    rows = [
        TRAFFIC.unpack(row)[3:]
        for row in serving.maps["statistics"].per_cpu(INDEX.pack(installed.record.statistics))
    ]
    assert [sum(column) for column in zip(*rows, strict=True)] == [
        int(reason == "hop_limit") for reason in DROPS
    ]


def cuts() -> Iterator[bytes]:
    """Yield the packets of OURS, cut at every length that BPF_PROG_TEST_RUN accepts: with the
    original length field, and with a length field that is right for the cut packet."""
    for packet in OURS.values():
        whole = bytes(packet)
        ipv6 = IPv6 in packet
        least = 14 + (40 if ipv6 else 20)
        for length in range(least, len(whole)):
            yield whole[:length]
            adjusted = bytearray(whole[:length])
            struct.pack_into("!H", adjusted, 18 if ipv6 else 16, length - (54 if ipv6 else 14))
            yield bytes(adjusted)


def test_packets_cut_at_any_length_do_no_harm(serving: Forwarder) -> None:
    for packet in cuts():
        answer = serving.run(packet)
        if answer.verdict == REDIRECT:
            assert (
                answer.packet[23 + 2 :] == packet[23 + 2 :]
                if packet[12:14] == b"\x08\0"
                else answer.packet[22:] == packet[22:]
            )
        else:
            assert (answer.verdict, answer.packet) == (NOT_OURS, packet)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(sorted(OURS)), st.data())
def test_with_any_content_of_the_headers_only_the_hop_limit_changes(
    serving: Forwarder, name: str, data: st.DataObject
) -> None:
    packet = bytearray(bytes(OURS[name]))
    for _ in range(data.draw(st.integers(1, 6))):
        packet[data.draw(st.integers(14, len(packet) - 1))] = data.draw(st.integers(0, 255))
    answer = serving.run(bytes(packet))
    assert answer.verdict in (REDIRECT, DROP, NOT_OURS)
    assert len(answer.packet) == len(packet)
    changed = {at for at in range(14, len(packet)) if answer.packet[at] != packet[at]}
    hop_limit = {21} if packet[12:14] == b"\x86\xdd" else {22, 24, 25}
    assert changed <= (hop_limit if answer.verdict == REDIRECT else set())
