"""The answers to clients of a Service without endpoints, byte by byte. They are those of a host on
which no process listens."""

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6DestUnreach, ICMPv6TimeExceeded, IPv6, IPv6ExtHdrDestOpt, PadN
from scapy.layers.l2 import Ether
from scapy.layers.sctp import SCTP, SCTPChunkInit
from scapy.packet import Packet, Raw
from tests.drivers.direct.conftest import (
    CLIENT4,
    CLIENT6,
    DROP,
    REDIRECT,
    SERVICE,
    VIP4,
    VIP6,
    Forwarder,
    tcp,
    to_us,
    udp,
)
from tests.drivers.direct.test_messages import ones_sum, valid

from fairlead.drivers.direct.maps.records import DROPS
from fairlead.drivers.direct.spec import ListenerProtocol

pytestmark = pytest.mark.root

NO_MEMBER, FORBIDDEN, NO_ENDPOINTS = (
    DROPS.index(reason) for reason in ("no_member", "forbidden", "no_endpoints")
)
REFUSALS_SENT = len(DROPS) + 3
PROTOCOLS: tuple[ListenerProtocol, ...] = ("TCP", "UDP", "SCTP")


@pytest.fixture
def refusing(forwarder: Forwarder) -> Forwarder:
    """A forwarder with a Service without endpoints: all protocols on port 80 of both addresses."""
    for address in (VIP4, VIP6):
        for protocol in PROTOCOLS:
            forwarder.serve({}, address=address, protocol=protocol, refuses=True)
    return forwarder


def segment(flags: str, *, ipv6: bool, payload: int = 0, options: bool = False) -> Packet:
    if ipv6:
        head: Packet = IPv6(src=CLIENT6, dst=VIP6)
        if options:
            head /= IPv6ExtHdrDestOpt(options=[PadN(optdata=b"\0" * 12)])
    else:
        head = IP(src=CLIENT4, dst=VIP4, options=[b"\x94\x04\0\0"] if options else [])
    more = [("MSS", 1460), ("WScale", 7), ("Timestamp", (1, 2)), ("NOP", None), ("SAckOK", b"")]
    return (
        to_us()
        / head
        / TCP(sport=40000, dport=80, flags=flags, seq=0xFFFFFFF0, ack=77, options=more)
        / Raw(b"x" * payload)
    )


@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("ipv6", [False, True])
@pytest.mark.parametrize(
    ("flags", "payload", "answer"),
    [
        ("S", 0, ("RA", 0, 0xFFFFFFF1)),
        ("S", 100, ("RA", 0, 0x55)),  # TCP Fast Open; the sequence number wraps
        ("F", 0, ("RA", 0, 0xFFFFFFF1)),
        ("A", 100, ("R", 77, 0)),
        ("SA", 0, ("R", 77, 0)),
        ("FA", 3, ("R", 77, 0)),
    ],
)
def test_segments_are_answered_by_a_reset(
    refusing: Forwarder,
    flags: str,
    payload: int,
    answer: tuple[str, int, int],
    ipv6: bool,
    options: bool,
) -> None:
    sent = segment(flags, ipv6=ipv6, payload=payload, options=options)
    reply = refusing.run(sent)
    assert reply.verdict == REDIRECT
    frame = Ether(reply.packet)
    assert (frame.dst, frame.src) == (sent.src, sent.dst)
    head, length = (IPv6, 40) if ipv6 else (IP, 20)
    assert (frame[head].src, frame[head].dst) == (sent[head].dst, sent[head].src)
    reset = frame[TCP]
    assert (str(reset.flags), reset.seq, reset.ack) == answer
    assert (reset.sport, reset.dport, reset.window, reset.dataofs, bytes(reset.payload)) == (
        80,
        40000,
        0,
        5,
        b"",
    )
    assert len(reply.packet) == 14 + length + 20
    addresses = reply.packet[22:54] if ipv6 else reply.packet[26:34]
    assert (
        ones_sum(addresses + (6).to_bytes(2, "big") + (20).to_bytes(2, "big") + reply.packet[-20:])
        == 0xFFFF
    )
    if not ipv6:
        assert ones_sum(reply.packet[14:34]) == 0xFFFF
    assert (
        refusing.event(NO_ENDPOINTS),
        refusing.event(REFUSALS_SENT),
        refusing.event(NO_MEMBER),
    ) == (1, 1, 0)


@pytest.mark.parametrize("payload", [0, 1, 2, 3, 20, 485, 512, 519, 520, 521, 1024, 1400])
def test_datagrams_are_answered_by_port_unreachable(refusing: Forwarder, payload: int) -> None:
    data = bytes(i % 251 for i in range(payload))
    for head, layer, most in (
        (IP(src=CLIENT4, dst=VIP4), IP, 548),
        (IPv6(src=CLIENT6, dst=VIP6), IPv6, 1232),
    ):
        sent = to_us() / head / UDP(sport=40000, dport=80) / Raw(data)
        answer = refusing.run(sent)
        assert answer.verdict == REDIRECT
        reply = valid(answer.packet)
        assert (reply.dst, reply.src) == (sent.src, sent.dst)
        assert (reply[layer].src, reply[layer].dst) == (sent[layer].dst, sent[layer].src)
        if layer is IP:
            assert (reply[ICMP].type, reply[ICMP].code) == (3, 3)
        else:
            assert (reply[ICMPv6DestUnreach].type, reply[ICMPv6DestUnreach].code) == (1, 4)
        at = 14 + (28 if layer is IP else 48)
        assert answer.packet[at:] == bytes(sent[layer])[:most]
    assert (refusing.event(NO_ENDPOINTS), refusing.event(REFUSALS_SENT)) == (2, 2)


def test_associations_are_answered_as_by_a_service_proxy(refusing: Forwarder) -> None:
    answer = refusing.run(
        to_us() / IP(src=CLIENT4, dst=VIP4) / SCTP(sport=40000, dport=80, tag=0) / SCTPChunkInit()
    )
    assert valid(answer.packet)[ICMP].code == 3


QUOTED4 = IP(src=VIP4, dst=CLIENT4) / TCP(sport=80, dport=40000)
QUOTED6 = IPv6(src=VIP6, dst=CLIENT6) / TCP(sport=80, dport=40000)
SILENT: dict[str, Packet] = {
    "a reset": segment("R", ipv6=False),
    "a reset over ipv6": segment("RA", ipv6=True),
    "an error": to_us() / IP(src="198.51.100.1", dst=VIP4) / ICMP(type=3, code=1) / QUOTED4,
    "an error over ipv6": to_us()
    / IPv6(src="2001:db8:aaaa::1", dst=VIP6)
    / ICMPv6TimeExceeded()
    / QUOTED6,
    "a first fragment": to_us()
    / IP(src=CLIENT4, dst=VIP4, id=9, flags="MF", proto=17)
    / bytes(udp()[UDP]),
    "a later fragment": to_us()
    / IP(src=CLIENT4, dst=VIP4, id=9, frag=6, proto=17)
    / Raw(b"x" * 64),
    "from a group": to_us() / IP(src="224.0.0.1", dst=VIP4) / UDP(dport=80),
    "from all hosts": to_us() / IP(src="255.255.255.255", dst=VIP4) / TCP(dport=80),
    "from the loopback": to_us() / IP(src="127.0.0.1", dst=VIP4) / TCP(dport=80),
    "from a group over ipv6": to_us() / IPv6(src="ff02::1", dst=VIP6) / UDP(dport=80),
    "from no address over ipv6": to_us() / IPv6(src="::", dst=VIP6) / TCP(dport=80),
}


@pytest.mark.parametrize("packet", SILENT.values(), ids=SILENT.keys())
def test_packets_that_no_host_would_answer_are_dropped_without_an_answer(
    refusing: Forwarder, packet: Packet
) -> None:
    assert refusing.run(packet).verdict == DROP
    assert refusing.event(REFUSALS_SENT) == 0


def test_clients_outside_the_source_ranges_get_no_answer(refusing: Forwarder) -> None:
    refusing.tables.set_ranges(SERVICE, ("198.51.100.0/25",))
    for address in (VIP4, VIP6):
        refusing.serve({}, address=address, refuses=True, restricted=True)
    assert refusing.run(tcp(client="198.51.100.7")).verdict == REDIRECT
    assert [
        refusing.run(tcp(client="198.51.100.200")).verdict,
        refusing.run(tcp(ipv6=True)).verdict,
    ] == [DROP, DROP]
    assert (refusing.event(REFUSALS_SENT), refusing.event(FORBIDDEN)) == (1, 2)


def test_open_connections_continue_while_new_ones_are_refused(forwarder: Forwarder) -> None:
    """A draining node may have connections when the Service has no endpoints any more."""
    forwarder.serve({"node1": 1})
    forwarder.serve({}, {"node1"}, refuses=True)
    assert forwarder.run(tcp("A", 40001)).node == "node1"
    refused = forwarder.run(tcp("S", 40002))
    assert (refused.verdict, str(Ether(refused.packet)[TCP].flags)) == (REDIRECT, "RA")
    forwarder.serve({"node2": 1}, {"node1", "node2"})
    assert [forwarder.run(tcp("A", 40001)).node, forwarder.run(tcp("S", 40002)).node] == [
        "node1",
        "node2",
    ]


def test_without_the_flag_packets_are_dropped_without_an_answer(forwarder: Forwarder) -> None:
    """If no node can be reached, a client that tries again may succeed."""
    for protocol in PROTOCOLS:
        forwarder.serve({}, protocol=protocol)
    assert [forwarder.run(tcp()).verdict, forwarder.run(udp()).verdict] == [DROP, DROP]
    assert (forwarder.event(NO_MEMBER), forwarder.event(REFUSALS_SENT)) == (2, 0)
