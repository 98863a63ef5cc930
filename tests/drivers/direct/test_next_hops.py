"""Next hops to a node, packet in and packet out: tunnels of every pair of address families, VLANs,
neighbours, and packets that do not fit."""

import struct

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q
from scapy.layers.vxlan import VXLAN as VxlanHeader
from scapy.packet import Packet, Raw
from tests.drivers.direct.conftest import (
    CLIENT4,
    DROP,
    NOT_OURS,
    OWN_MAC,
    REDIRECT,
    VIP4,
    VIP6,
    VXLAN_PORT,
    XDP_PASS,
    XDP_REDIRECT,
    XDP_TX,
    Forwarder,
    mac_of,
    tcp,
    to_us,
    udp,
)

from fairlead.drivers.direct.maps.records import HOPS_LEFT, IPIP, LINK, UNREACHABLE, VXLAN, NextHop

pytestmark = pytest.mark.root

OUTER = {
    False: ("192.0.2.100", "192.0.2.1"),
    # Four octets of this address are as in an IPv4-mapped address, which it is not.
    True: ("2001:db8:1::100", "2001:db8:1::ffff:0:1"),
}
NODE_MAC = mac_of("node1")
VNI = 7471
TOO_BIG = 5


def next_hop(kind: int, *, outer6: bool = False) -> NextHop:
    """Return a next hop of node1. `outer6`: the family of the outer addresses of a tunnel."""
    outer = OUTER[outer6] if kind in (IPIP, VXLAN) else ("", "")
    next_hop = "2001:db8::fe" if outer6 else "192.0.2.254"
    return NextHop(
        kind, 1, next_hop, *outer, mac=NODE_MAC, own_mac=OWN_MAC, vni=VNI if kind == VXLAN else 0
    )


def serve_by(forwarder: Forwarder, of_node1: NextHop) -> None:
    """Have node1 serve all listeners, with this next hop."""
    for ipv6 in (False, True):
        forwarder.tables.nodes.set_next_hop("node1", of_node1, ipv6=ipv6)
    for address in (VIP4, VIP6):
        forwarder.serve({"node1": 1}, address=address)
        forwarder.serve({"node1": 1}, address=address, protocol="UDP")


def forwarded(packet: Packet) -> bytes:
    """Return the IP packet of the frame as the gateway forwards it: with another hop limit."""
    inner = packet[IP].copy() if IP in packet else packet[IPv6].copy()
    if inner.version == 4:
        inner.ttl = HOPS_LEFT
        del inner.chksum
    else:
        inner.hlim = HOPS_LEFT
    return bytes(inner)


def with_class(packet: Packet, octet: int) -> Packet:
    """Set the traffic class of the packet, and return it."""
    if IP in packet:
        packet[IP].tos = octet
    else:
        packet[IPv6].tc = octet
    return packet


PACKETS = {
    "tcp": tcp("A"),
    "udp": udp(),
    "tcp over ipv6": tcp("A", ipv6=True),
    "udp over ipv6": udp(ipv6=True),
    "marked for congestion": with_class(tcp("A"), 0b10111011),
    "marked for congestion over ipv6": with_class(tcp("A", ipv6=True), 0b10111011),
    "with options": to_us() / IP(src=CLIENT4, dst=VIP4, options=[b"\x94\x04\0\0"]) / TCP(dport=80),
}


@pytest.mark.parametrize("packet", PACKETS.values(), ids=PACKETS.keys())
@pytest.mark.parametrize("outer6", [False, True], ids=["outer ipv4", "outer ipv6"])
def test_packets_are_encapsulated_in_ipip(
    forwarder: Forwarder, packet: Packet, outer6: bool
) -> None:
    serve_by(forwarder, next_hop(IPIP, outer6=outer6))
    answer = forwarder.run(packet)
    assert (answer.verdict, answer.node, forwarder.passed_on) == (REDIRECT, "node1", 0)
    inner = forwarded(packet)
    protocol, octet = (4, packet[IP].tos) if IP in packet else (41, packet[IPv6].tc)
    check_outer(answer.packet, outer6=outer6, protocol=protocol, octet=octet, inside=len(inner))
    assert answer.packet[14 + (40 if outer6 else 20) :] == inner
    check_link(forwarder, answer.packet, outer6=outer6)


@pytest.mark.parametrize("packet", PACKETS.values(), ids=PACKETS.keys())
@pytest.mark.parametrize("outer6", [False, True], ids=["outer ipv4", "outer ipv6"])
def test_packets_are_encapsulated_in_vxlan(
    forwarder: Forwarder, packet: Packet, outer6: bool
) -> None:
    serve_by(forwarder, next_hop(VXLAN, outer6=outer6))
    answer = forwarder.run(packet)
    assert (answer.verdict, answer.node, forwarder.passed_on) == (REDIRECT, "node1", 0)
    inner = forwarded(packet)
    octet = packet[IP].tos if IP in packet else packet[IPv6].tc
    check_outer(answer.packet, outer6=outer6, protocol=17, octet=octet, inside=30 + len(inner))
    datagram = UDP(answer.packet[14 + (40 if outer6 else 20) :])
    assert (datagram.dport, datagram.len, datagram.chksum) == (VXLAN_PORT, 30 + len(inner), 0)
    assert datagram.sport >= 0x8000
    header = VxlanHeader(bytes(datagram.payload))
    assert (int(header.flags), header.vni) == (8, VNI)
    frame = bytes(header.payload)
    type_of_inner = b"\x08\0" if IP in packet else b"\x86\xdd"
    assert frame == bytes.fromhex("02666c000001 02666c000002") + type_of_inner + inner
    check_link(forwarder, answer.packet, outer6=outer6)


def check_outer(packet: bytes, *, outer6: bool, protocol: int, octet: int, inside: int) -> None:
    """Check the fields of the outer header, and its checksum."""
    if outer6:
        outer = IPv6(packet[14:])
        fields = (outer.src, outer.dst, outer.nh, outer.tc, outer.plen, outer.hlim)
        assert fields == (*OUTER[True], protocol, octet, inside, 64)
        return
    outer = IP(packet[14:])
    assert (outer.src, outer.dst, outer.proto, outer.tos, outer.len, outer.ttl) == (
        *OUTER[False],
        protocol,
        octet,
        20 + inside,
        64,
    )
    assert (outer.ihl, int(outer.flags), outer.frag) == (5, 2, 0)
    right = outer.chksum
    del outer.chksum
    assert IP(bytes(outer)).chksum == right


def check_link(forwarder: Forwarder, packet: bytes, *, outer6: bool) -> None:
    """Check the Ethernet header that XDP writes. At tc the kernel writes it later."""
    if forwarder.fast:
        assert packet[:14] == NODE_MAC + OWN_MAC + (b"\x86\xdd" if outer6 else b"\x08\0")


def test_flows_differ_in_the_outer_port(forwarder: Forwarder) -> None:
    serve_by(forwarder, next_hop(VXLAN))
    packets = [forwarder.run(udp(port)).packet for port in range(20000, 20100)]
    again = [forwarder.run(udp(port)).packet for port in range(20000, 20100)]
    ports = [struct.unpack_from("!H", packet, 34)[0] for packet in packets]
    assert len(set(ports)) > 90
    assert [struct.unpack_from("!H", packet, 34)[0] for packet in again] == ports


def test_xdp_redirects_a_packet_that_leaves_by_another_interface(forwarder: Forwarder) -> None:
    serve_by(forwarder, next_hop(LINK)._replace(interface=9))
    trial = forwarder.xdp.test_run(bytes(tcp()), with_context=False)
    assert trial.verdict == XDP_REDIRECT
    serve_by(forwarder, next_hop(LINK))
    assert forwarder.xdp.test_run(bytes(tcp()), with_context=False).verdict == XDP_TX


@pytest.mark.parametrize("kind", [LINK, IPIP, VXLAN])
def test_xdp_passes_packets_for_an_unknown_neighbour_to_tc(forwarder: Forwarder, kind: int) -> None:
    serve_by(forwarder, next_hop(kind)._replace(mac=bytes(6)))
    assert forwarder.run(tcp("A")).verdict == REDIRECT
    assert forwarder.passed_on == forwarder.fast


def test_packets_without_a_next_hop_are_dropped(forwarder: Forwarder) -> None:
    serve_by(forwarder, next_hop(LINK))
    serve_by(forwarder, next_hop(UNREACHABLE))
    assert forwarder.run(tcp("A")).verdict == DROP


TAGGED = (
    to_us() / Dot1Q(vlan=7) / IP(src=CLIENT4, dst=VIP4) / TCP(dport=80, flags="A") / Raw(b"x" * 20)
)


@pytest.mark.parametrize(
    ("came", "tag"),
    [(TAGGED, 0), (TAGGED, 7), (TAGGED, 8), (tcp("A"), 8)],
    ids=["off", "same", "other", "on"],
)
@pytest.mark.parametrize("kind", [LINK, IPIP, VXLAN])
def test_xdp_sets_and_removes_vlan_tags(
    forwarder: Forwarder, came: Packet, tag: int, kind: int
) -> None:
    serve_by(forwarder, next_hop(kind)._replace(tag=tag, interface=9, lower=1))
    forwarder.maps["tags"].update(struct.pack("=II", 1, 7), bytes(8))
    trial = forwarder.xdp.test_run(bytes(came), with_context=False)
    assert trial.verdict == XDP_TX
    expected = NODE_MAC + OWN_MAC + (struct.pack("!HH", 0x8100, tag) if tag else b"") + b"\x08\0"
    assert trial.packet[: len(expected)] == expected
    assert trial.packet.endswith(forwarded(came))
    overhead = {LINK: 0, IPIP: 20, VXLAN: 50}[kind]
    assert len(trial.packet) == len(expected) + overhead + len(came[IP])


def test_frames_with_foreign_tags_are_not_touched(forwarder: Forwarder) -> None:
    serve_by(forwarder, next_hop(LINK))
    assert forwarder.run(TAGGED)[::2] == (NOT_OURS, bytes(TAGGED))
    # The tag is ours, but for another MAC address.
    forwarder.maps["tags"].update(struct.pack("=II", 1, 7), b"\x02" + bytes(7))
    assert forwarder.run(TAGGED).verdict == NOT_OURS


def segments(length: int, *, ipv6: bool = False) -> Packet:
    """Return a packet as GRO merges it from segments: many times their size."""
    whole = tcp("A", ipv6=ipv6)
    whole[TCP].payload = Raw(b"x" * length)
    return whole


# Only without a tunnel: to encapsulate a merged packet the kernel needs its GSO type, and packets
# of BPF_PROG_TEST_RUN have none.
@pytest.mark.parametrize("ipv6", [False, True])
def test_merged_packets_are_forwarded_whole_if_their_segments_fit(
    forwarder: Forwarder, ipv6: bool
) -> None:
    forwarder.fast = False  # GRO runs after XDP
    serve_by(forwarder, next_hop(LINK)._replace(mtu=1400))
    headers = 60 if ipv6 else 40
    packet = segments(3000, ipv6=ipv6)
    assert forwarder.run(packet, gso_size=1400 - headers).verdict == REDIRECT
    assert forwarder.run(packet, gso_size=1400 - headers + 1).packet[14:] != bytes(packet)[14:]
    assert forwarder.event(TOO_BIG) == 1


@pytest.mark.parametrize("kind", [LINK, IPIP, VXLAN])
@pytest.mark.parametrize("ipv6", [False, True])
def test_the_longest_packet_that_fits_is_forwarded(
    forwarder: Forwarder, kind: int, ipv6: bool
) -> None:
    serve_by(forwarder, next_hop(kind)._replace(mtu=1400))
    headers = 60 if ipv6 else 40
    assert forwarder.run(segments(1400 - headers, ipv6=ipv6)).node == "node1"
    assert (forwarder.event(TOO_BIG), forwarder.passed_on) == (0, 0)
    forwarder.run(segments(1400 - headers + 1, ipv6=ipv6))
    assert (forwarder.event(TOO_BIG), forwarder.passed_on) == (1, forwarder.fast)


def test_frames_for_other_hosts_are_neither_sent_nor_dropped(forwarder: Forwarder) -> None:
    """An interface in promiscuous mode, for example for tcpdump, receives frames of other hosts."""
    foreign = tcp("A")
    foreign.dst = "02:00:00:00:00:99"
    serve_by(forwarder, next_hop(LINK))
    assert forwarder.run(foreign)[::2] == (NOT_OURS, bytes(foreign))
    forwarder.serve({}, set())
    assert forwarder.run(foreign)[::2] == (NOT_OURS, bytes(foreign))
    assert forwarder.run(tcp("A")).verdict == DROP


def test_a_frame_that_leaves_by_its_own_interface_needs_no_look_up_of_tags(
    forwarder: Forwarder,
) -> None:
    forwarder.maps["tags"].delete(struct.pack("=II", 1, 0))
    serve_by(forwarder, next_hop(LINK))
    assert forwarder.xdp.test_run(bytes(tcp("A")), with_context=False).verdict == XDP_PASS
    serve_by(forwarder, next_hop(LINK)._replace(own_mac=bytes(6)))
    assert forwarder.xdp.test_run(bytes(tcp("A")), with_context=False).verdict == XDP_TX
