"""The program that decapsulates IPIP packets, packet in, packet out (BPF_PROG_TEST_RUN): which
packets it decapsulates, and which it leaves alone."""

from collections.abc import Iterator

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from fairlead.drivers.tunnel.decapsulator import OUTCOMES, Decapsulator

LEFT_ALONE, DECAPSULATED, DROPPED = 0xFFFFFFFF, 0, 2
GATEWAY = {4: "192.0.2.11", 6: "2001:db8:1::b"}
NODE = {4: "198.18.0.22", 6: "2001:db8:3::16"}
VIP = {4: "203.0.113.10", 6: "2001:db8:f::10"}
CLIENT = {4: "198.51.100.7", 6: "2001:db8:2::7"}
PAIRS = [(4, 4), (4, 6), (6, 4), (6, 6)]
"""The pairs of outer and inner IP version."""


@pytest.fixture
def decapsulator() -> Iterator[Decapsulator]:
    made = Decapsulator.load(["192.0.2.0/28", "2001:db8:1::/64"])
    made.set_own(list(NODE.values()))
    made.set_published(list(VIP.values()))
    yield made
    made.close()


def frame(*layers: Packet) -> Packet:
    """Return a frame that the loopback device accepts as addressed to itself."""
    whole = Ether(dst="00:00:00:00:00:00", src="02:00:00:00:00:01")
    for layer in layers:
        whole = whole / layer
    return whole


def outer(version: int, *, source: str = "", to: str = "", ecn: int = 0) -> Packet:
    source, to = source or GATEWAY[version], to or NODE[version]
    return (
        IPv6(src=source, dst=to, tc=ecn)
        if version == 6
        else IP(src=source, dst=to, tos=ecn, flags="DF", id=7)
    )


def inner(version: int, *, to: str = "", ecn: int = 0, fragment: bool = False) -> Packet:
    to = to or VIP[version]
    segment = TCP(sport=40000, dport=80, flags="PA") / Raw(b"x" * 33)
    if version == 6:
        head = IPv6(src=CLIENT[6], dst=to, tc=ecn, hlim=61)
        return (
            head / IPv6ExtHdrFragment(offset=185, id=9, nh=6) / Raw(b"y" * 40)
            if fragment
            else head / segment
        )
    head = IP(src=CLIENT[4], dst=to, tos=ecn, ttl=61)
    if fragment:
        head.frag, head.proto = 185, 6
        return head / Raw(b"y" * 40)
    return head / segment


def decapsulated(decapsulator: Decapsulator, packet: Packet | bytes) -> tuple[int, bytes]:
    trial = decapsulator.program.test_run(bytes(packet))
    return trial.verdict, trial.packet


def counted(decapsulator: Decapsulator) -> dict[str, int]:
    return {name: count for name, count in decapsulator.counters().items() if count}


@pytest.mark.parametrize(("version", "inside"), PAIRS)
@pytest.mark.parametrize("fragment", [False, True])
def test_a_packet_of_a_gateway_is_decapsulated_unchanged(
    decapsulator: Decapsulator, version: int, inside: int, fragment: bool
) -> None:
    content = inner(inside, fragment=fragment)
    assert decapsulated(decapsulator, frame(outer(version), content)) == (
        DECAPSULATED,
        bytes(frame(content)),
    )
    assert counted(decapsulator) == {"decapsulated": 1}


@pytest.mark.parametrize("version", [4, 6])
def test_icmp_errors_for_an_address_are_decapsulated(
    decapsulator: Decapsulator, version: int
) -> None:
    content = (
        IP(src="198.51.100.1", dst=VIP[4])
        / ICMP(type=3, code=4)
        / IP(src=VIP[4], dst=CLIENT[4])
        / TCP()
    )
    assert decapsulated(decapsulator, frame(outer(version), content)) == (
        DECAPSULATED,
        bytes(frame(content)),
    )


@pytest.mark.parametrize(("version", "inside"), PAIRS)
@pytest.mark.parametrize(
    ("was", "met", "is_now"),
    # RFC 6040, figure 4: 0 not ECN-capable, 1 and 2 ECN-capable, 3 congestion experienced.
    [
        (0, 0, 0),
        (0, 1, 0),
        (0, 2, 0),
        (1, 0, 1),
        (1, 2, 1),
        (2, 0, 2),
        (2, 1, 1),
        (2, 2, 2),
        (1, 3, 3),
        (2, 3, 3),
        (3, 0, 3),
    ],
)
def test_a_congestion_mark_of_the_outer_header_is_copied_to_the_inner_one(
    decapsulator: Decapsulator, version: int, inside: int, was: int, met: int, is_now: int
) -> None:
    dscp = 0xB8
    verdict, packet = decapsulated(
        decapsulator, frame(outer(version, ecn=met), inner(inside, ecn=dscp | was))
    )
    assert (verdict, packet) == (DECAPSULATED, bytes(frame(inner(inside, ecn=dscp | is_now))))


@pytest.mark.parametrize(("version", "inside"), PAIRS)
def test_a_congestion_mark_for_a_packet_without_ecn_drops_the_packet(
    decapsulator: Decapsulator, version: int, inside: int
) -> None:
    assert (
        decapsulated(decapsulator, frame(outer(version, ecn=3), inner(inside, ecn=0)))[0] == DROPPED
    )
    assert counted(decapsulator) == {"congested": 1}


@pytest.mark.parametrize(("version", "inside"), PAIRS)
def test_tunnels_of_other_owners_are_not_decapsulated(
    decapsulator: Decapsulator, version: int, inside: int
) -> None:
    stranger = {4: "192.0.2.16", 6: "2001:db8:2::b"}
    elsewhere = {4: "198.18.0.23", 6: "2001:db8:3::17"}
    pod = {4: "10.244.2.2", 6: "2001:db8:244:2::2"}
    for packet in (
        frame(outer(version, source=stranger[version]), inner(inside)),
        frame(outer(version, to=elsewhere[version]), inner(inside)),
        frame(outer(version), inner(inside, to=pod[inside])),
    ):
        assert decapsulated(decapsulator, packet) == (LEFT_ALONE, bytes(packet))
    assert counted(decapsulator) == {"unknown_sender": 1, "not_published": 1}


def probe(
    version: int, *, source: str = "", to: str = "", port: int = 10256, udp: bool = False
) -> Packet:
    """A gateway's probe of this node."""
    segment = UDP(sport=40000, dport=port) if udp else TCP(sport=40000, dport=port, flags="S")
    source, to = source or GATEWAY[version], to or NODE[version]
    return (IPv6(src=source, dst=to) if version == 6 else IP(src=source, dst=to)) / segment


@pytest.mark.parametrize("version", [4, 6])
def test_only_probes_of_health_ports_are_decapsulated_for_an_address_of_the_node(
    decapsulator: Decapsulator, version: int
) -> None:
    decapsulator.set_published([*VIP.values(), 10256, 20000])
    for port in (10256, 20000, 30000, 32767):
        content = probe(version, port=port)
        assert decapsulated(decapsulator, frame(outer(version), content)) == (
            DECAPSULATED,
            bytes(frame(content)),
        )
    another = {4: "192.0.2.12", 6: "2001:db8:1::c"}[
        version
        # This is also a gateway, but not the source of the outer header.
    ]
    elsewhere = {4: "198.18.0.23", 6: "2001:db8:3::17"}[version]
    for content in (
        probe(version, port=22),
        probe(version, port=29999),
        probe(version, port=32768),
        probe(version, source=another),
        probe(version, source=CLIENT[version]),
        probe(version, to=elsewhere),
        probe(version, udp=True),
        probe(10 - version),
    ):
        assert decapsulated(decapsulator, frame(outer(version), content))[0] == LEFT_ALONE
    decapsulator.publish([], [20000])
    assert (
        decapsulated(decapsulator, frame(outer(version), probe(version, port=20000)))[0]
        == LEFT_ALONE
    )
    assert counted(decapsulator) == {"decapsulated": 4, "not_published": 9}


def test_packets_without_a_valid_outer_header_are_unchanged(decapsulator: Decapsulator) -> None:
    with_options = IP(src=GATEWAY[4], dst=NODE[4], options=[IPOption(b"\x94\x04\x00\x00")])
    fragment = IP(src=GATEWAY[4], dst=NODE[4], flags="MF", id=7)
    for packet in (
        frame(inner(4)),
        frame(inner(6)),
        frame(outer(4) / UDP(dport=4789) / Raw(b"x" * 80)),
        frame(with_options, inner(4)),
        frame(fragment, inner(4)),
        frame(Dot1Q(vlan=7), outer(4), inner(4)),
        frame(IP(src=GATEWAY[4], dst=NODE[4], proto=4), inner(6)),
        Ether(dst="02:00:00:00:00:02", src="02:00:00:00:00:01") / outer(4) / inner(4),
    ):
        assert decapsulated(decapsulator, packet) == (LEFT_ALONE, bytes(packet))
    assert counted(decapsulator) == {}


@pytest.mark.parametrize(("version", "inside"), PAIRS)
def test_a_packet_cut_at_any_length_is_dropped_or_unchanged(
    decapsulator: Decapsulator, version: int, inside: int
) -> None:
    whole = bytes(frame(outer(version), inner(inside)))
    opened = bytes(frame(inner(inside)))
    removed = len(whole) - len(opened)
    for length in range(14 + 40, len(whole)):  # BPF_PROG_TEST_RUN accepts no shorter packet
        verdict, packet = decapsulated(decapsulator, whole[:length])
        if verdict == DECAPSULATED:
            assert packet == opened[: length - removed]
        else:
            assert (verdict, packet) in ((LEFT_ALONE, whole[:length]), (DROPPED, whole[:length]))


def test_published_addresses_are_added_and_removed(decapsulator: Decapsulator) -> None:
    packet = frame(outer(4), inner(4))
    decapsulator.publish(["203.0.113.99"], [VIP[4]])
    assert decapsulated(decapsulator, packet)[0] == LEFT_ALONE
    assert (
        decapsulated(decapsulator, frame(outer(4), inner(4, to="203.0.113.99")))[0] == DECAPSULATED
    )
    decapsulator.set_published([VIP[4]])
    assert decapsulated(decapsulator, packet)[0] == DECAPSULATED
    assert decapsulated(decapsulator, frame(outer(4), inner(4, to="203.0.113.99")))[0] == LEFT_ALONE
    decapsulator.set_own([NODE[6]])
    assert decapsulated(decapsulator, packet)[0] == LEFT_ALONE


def test_every_result_has_its_counter(decapsulator: Decapsulator) -> None:
    assert tuple(decapsulator.counters()) == OUTCOMES
