"""Packets that the gateway itself creates, byte by byte: echo replies, and errors about packets
that are too big."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6EchoReply,
    ICMPv6EchoRequest,
    ICMPv6PacketTooBig,
    ICMPv6TimeExceeded,
    IPv6,
)
from scapy.layers.l2 import Ether
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
from tests.drivers.direct.test_next_hops import next_hop, segments, serve_by

from fairlead.drivers.direct.maps.records import DROPS, IPIP, LINK
from fairlead.net.address import pack_address

pytestmark = pytest.mark.root

TOO_BIG, NO_ENDPOINTS = DROPS.index("too_big"), DROPS.index("no_endpoints")
ECHO_ANSWERED, SIZE_MESSAGES_SENT, REFUSALS_SENT = (len(DROPS) + number for number in (1, 2, 3))
MTU = 1400


@pytest.fixture
def serving(forwarder: Forwarder) -> Forwarder:
    serve_by(forwarder, next_hop(LINK)._replace(mtu=MTU))
    for address in (VIP4, VIP6):
        forwarder.maps["addresses"].update(pack_address(address), (1).to_bytes(4, "little"))
    return forwarder


def ones_sum(data: bytes) -> int:
    """Return the ones' complement sum (RFC 1071): 0xffff if the data contains a correct
    checksum."""
    total = sum(
        int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big") for at in range(0, len(data), 2)
    )
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def valid(packet: bytes) -> Packet:
    """Check the checksums of the IP and ICMP headers, and return the packet."""
    frame = Ether(packet)
    if IP in frame:
        assert ones_sum(packet[14:34]) == 0xFFFF
        assert ones_sum(packet[34:]) == 0xFFFF
    else:
        length = len(packet) - 54
        assert (
            ones_sum(
                packet[22:54] + length.to_bytes(4, "big") + (58).to_bytes(4, "big") + packet[54:]
            )
            == 0xFFFF
        )
    return frame


@pytest.mark.parametrize("payload", [0, 1, 56, 1000, 1372])
def test_echo_requests_are_answered(serving: Forwarder, payload: int) -> None:
    data = bytes(i & 0xFF for i in range(payload))
    asked = to_us() / IP(src=CLIENT4, dst=VIP4, ttl=9, id=77) / ICMP(id=5, seq=6) / Raw(data)
    answer = serving.run(asked)
    assert answer.verdict == REDIRECT
    reply = valid(answer.packet)
    assert (reply.dst, reply.src) == (asked.src, asked.dst)
    assert (reply[IP].src, reply[IP].dst, reply[IP].ttl) == (VIP4, CLIENT4, 64)
    assert (reply[ICMP].type, reply[ICMP].code, reply[ICMP].id, reply[ICMP].seq) == (0, 0, 5, 6)
    assert bytes(reply[ICMP].payload) == data


@pytest.mark.parametrize("payload", [0, 1, 56, 1000, 1352])
def test_echo_requests_over_ipv6_are_answered(serving: Forwarder, payload: int) -> None:
    data = bytes(i & 0xFF for i in range(payload))
    asked = (
        to_us() / IPv6(src=CLIENT6, dst=VIP6, hlim=9) / ICMPv6EchoRequest(id=5, seq=6, data=data)
    )
    answer = serving.run(asked)
    assert answer.verdict == REDIRECT
    reply = valid(answer.packet)
    assert (reply.dst, reply.src) == (asked.src, asked.dst)
    assert (reply[IPv6].src, reply[IPv6].dst, reply[IPv6].hlim) == (VIP6, CLIENT6, 64)
    assert (reply[ICMPv6EchoReply].id, reply[ICMPv6EchoReply].seq, reply[ICMPv6EchoReply].data) == (
        5,
        6,
        data,
    )


@pytest.mark.parametrize("checksum", [0x0000, 0x0001, 0xF7FE, 0xF7FF, 0xF800, 0xFFFE, 0xFFFF])
def test_checksums_of_replies_are_right_with_every_carry(serving: Forwarder, checksum: int) -> None:
    """The two bytes of data give the request this checksum."""
    rest = (0xF7FF - checksum) % 0xFFFF
    request = ICMP(id=0, seq=0) / Raw(rest.to_bytes(2, "big"))
    assert int.from_bytes(bytes(request)[2:4], "big") % 0xFFFF == checksum % 0xFFFF
    assert valid(serving.run(to_us() / IP(src=CLIENT4, dst=VIP4) / request).packet)[ICMP].type == 0


NOT_ANSWERED: dict[str, Packet] = {
    "to another address": to_us() / IP(src=CLIENT4, dst="203.0.113.11") / ICMP(),
    "a fragment of one": to_us() / IP(src=CLIENT4, dst=VIP4, flags="MF") / ICMP() / Raw(b"x" * 64),
    "with options": to_us() / IP(src=CLIENT4, dst=VIP4, options=[b"\x94\x04\0\0"]) / ICMP(),
}
FORGED: dict[str, Packet] = {
    "from a group": to_us() / IP(src="224.0.0.1", dst=VIP4) / ICMP(),
    "from all hosts": to_us() / IP(src="255.255.255.255", dst=VIP4) / ICMP(),
    "from no address": to_us() / IP(src="0.0.0.0", dst=VIP4) / ICMP(),
    "from the loopback": to_us() / IP(src="127.0.0.1", dst=VIP4) / ICMP(),
    "from a group over ipv6": to_us() / IPv6(src="ff02::1", dst=VIP6) / ICMPv6EchoRequest(),
    "from no address over ipv6": to_us() / IPv6(src="::", dst=VIP6) / ICMPv6EchoRequest(),
}


@pytest.mark.parametrize("packet", NOT_ANSWERED.values(), ids=NOT_ANSWERED.keys())
def test_other_echo_requests_are_passed_to_the_kernel(serving: Forwarder, packet: Packet) -> None:
    assert serving.run(packet)[::2] == (NOT_OURS, bytes(packet))


@pytest.mark.parametrize("packet", FORGED.values(), ids=FORGED.keys())
def test_echo_requests_of_sources_that_are_not_a_single_host_are_dropped(
    serving: Forwarder, packet: Packet
) -> None:
    assert serving.run(packet).verdict == DROP
    assert serving.event(ECHO_ANSWERED) == 0


def test_each_kind_of_message_has_its_own_limit(serving: Forwarder) -> None:
    serving.set_settings(messages_per_s=3)
    serving.serve({}, address=VIP6, refuses=True)
    kinds = (
        (to_us() / IP(src=CLIENT4, dst=VIP4) / ICMP(), ECHO_ANSWERED),
        (segments(2000), SIZE_MESSAGES_SENT),
        (tcp(ipv6=True), REFUSALS_SENT),
    )
    sent = 40
    with on_one_cpu():  # each CPU has its own limit
        for packet, event in kinds:
            # The other kinds have not used up the limit of this kind. If a second passes meanwhile,
            # more than three are answered.
            answered = [serving.run(packet).verdict for _ in range(sent)].count(REDIRECT)
            assert 3 <= answered < sent
            assert serving.event(event) == answered
    assert (serving.event(TOO_BIG), serving.event(NO_ENDPOINTS)) == (sent, sent)


@contextmanager
def on_one_cpu() -> Iterator[None]:
    """Run the thread, and so the programs that it has the kernel run, on one CPU."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("kind", [LINK, IPIP])
@pytest.mark.parametrize("flags", ["DF", ""])
@pytest.mark.parametrize("length", [MTU + 1, 1500, 3000])
def test_the_sender_of_a_packet_that_is_too_big_gets_the_size_that_fits(
    serving: Forwarder, kind: int, flags: str, length: int
) -> None:
    serve_by(serving, next_hop(kind)._replace(mtu=MTU))
    sent = segments(length - 40)
    sent[IP].flags = flags
    answer = serving.run(sent)
    assert answer.verdict == REDIRECT
    error = valid(answer.packet)
    assert (error.dst, error.src) == (sent.src, sent.dst)
    assert (error[IP].src, error[IP].dst, error[IP].len, error[IP].ttl) == (VIP4, CLIENT4, 576, 64)
    assert (error[ICMP].type, error[ICMP].code, error[ICMP].nexthopmtu) == (3, 4, MTU)
    assert bytes(error)[14 + 28 :] == bytes(sent[IP])[:548]
    assert (serving.event(TOO_BIG), serving.event(SIZE_MESSAGES_SENT)) == (1, 1)
    # The packet does not count as forwarded, neither for the Service nor for the node.
    for name in ("statistics", "node_statistics"):
        counters = [
            int.from_bytes(value[at : at + 8], "little")
            for _, value in serving.maps[name].items()
            for at in (0, 8, 16)
        ]
        assert not any(counters)


@pytest.mark.parametrize("transport", [TCP, UDP])
def test_the_sender_gets_the_size_that_fits_over_ipv6(
    serving: Forwarder, transport: type[Packet]
) -> None:
    sent = (
        to_us()
        / IPv6(src=CLIENT6, dst=VIP6)
        / transport(sport=40000, dport=80)
        / Raw(bytes(i % 251 for i in range(1440)))
    )
    answer = serving.run(sent)
    assert answer.verdict == REDIRECT
    error = valid(answer.packet)
    assert (error[IPv6].src, error[IPv6].dst, error[IPv6].plen, error[IPv6].hlim) == (
        VIP6,
        CLIENT6,
        1240,
        64,
    )
    assert error[ICMPv6PacketTooBig].mtu == MTU
    assert bytes(error)[14 + 48 :] == bytes(sent[IPv6])[:1232]


def test_no_errors_about_errors_nor_about_later_fragments(serving: Forwarder) -> None:
    quoted = IP(src=VIP4, dst=CLIENT4) / TCP(sport=80, dport=40000) / Raw(b"x" * 1450)
    quoted6 = IPv6(src=VIP6, dst=CLIENT6) / TCP(sport=80, dport=40000) / Raw(b"x" * 1450)
    for packet in (
        to_us() / IP(src="198.51.100.1", dst=VIP4) / ICMP(type=11) / quoted,
        to_us() / IPv6(src="2001:db8:aaaa::1", dst=VIP6) / ICMPv6TimeExceeded() / quoted6,
    ):
        assert serving.run(packet).verdict == DROP
    first = to_us() / IP(src=CLIENT4, dst=VIP4, id=9, flags="MF", proto=17) / bytes(udp()[UDP])
    assert serving.run(first).verdict == REDIRECT
    later = to_us() / IP(src=CLIENT4, dst=VIP4, id=9, frag=6, proto=17) / Raw(b"x" * 1450)
    assert serving.run(later).verdict == DROP
    assert (serving.event(TOO_BIG), serving.event(SIZE_MESSAGES_SENT)) == (3, 0)


def test_a_packet_that_is_too_big_leaves_no_state(serving: Forwarder) -> None:
    serving.run(segments(2000))
    assert serving.run(tcp("A")).node == "node1"
