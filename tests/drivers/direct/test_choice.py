"""The node that a packet is sent to: shares, connections that stay after a change, ICMP errors,
session affinity, and the limit of new entries."""

import random
import struct
from array import array
from collections import Counter

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6PacketTooBig, ICMPv6TimeExceeded, IPv6
from scapy.packet import Packet
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
    segment,
    tcp,
    to_us,
)

from fairlead.drivers.direct.maps.records import DROPS, LINK, NextHop
from fairlead.drivers.direct.spec import ListenerProtocol

pytestmark = pytest.mark.root

TRACK_REFUSED = len(DROPS)
PORTS = range(20000, 20300)
_SOURCE, _PORT = 14 + 12, 14 + 20


def owners(
    forwarder: Forwarder, flags: str, ports: range = PORTS, *, seq: int = 0
) -> dict[int, str]:
    """Return, for each client port, the node that gets a segment with these flags and this sequence
    number."""
    return {port: forwarder.run(segment(flags, port, seq=seq)).node for port in ports}


def test_shares_follow_the_weights(forwarder: Forwarder) -> None:
    weights = {"node1": 3, "node2": 1, "node3": 6}
    slots = array("H", forwarder.serve(weights).current)
    shares = Counter(slots)
    assert [shares[i] for i in range(3)] == pytest.approx(
        [len(slots) * w / 10 for w in weights.values()], abs=1
    )
    packet, source, seen = bytearray(bytes(tcp("A"))), random.Random(1), Counter[str]()
    total = 100_000
    for _ in range(total):
        struct.pack_into("!I", packet, _SOURCE, source.getrandbits(32))
        struct.pack_into("!H", packet, _PORT, source.getrandbits(16))
        seen[forwarder.run(bytes(packet)).node] += 1
    for node, weight in weights.items():
        share = weight / 10
        # The share is exact to one slot. Five standard deviations allow for the random draw, which
        # is the same in every run.
        assert (
            abs(seen[node] - total * share)
            < total / len(slots) + 5 * (total * share * (1 - share)) ** 0.5
        )


def test_packets_of_one_flow_go_to_one_node(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1, "node2": 1, "node3": 1})
    first = owners(forwarder, "S")
    assert len(set(first.values())) == 3
    assert owners(forwarder, "A") == owners(forwarder, "S") == first


def test_open_connections_stay_and_new_ones_follow_the_new_weights(forwarder: Forwarder) -> None:
    old, new = range(20000, 20200), range(30000, 30200)
    forwarder.serve({"node1": 1, "node2": 1})
    before = owners(forwarder, "S", old)
    forwarder.serve({"node1": 1, "node2": 1, "node3": 2})
    assert owners(forwarder, "A", old) == before
    opened = owners(forwarder, "S", new)
    assert "node3" in opened.values()
    assert owners(forwarder, "A", new) == opened
    forwarder.serve({"node2": 5, "node3": 1}, {"node1", "node2", "node3"})
    assert owners(forwarder, "A", old) == before
    assert owners(forwarder, "A", new) == opened


def test_growing_from_2_to_500_pods_moves_no_connection(forwarder: Forwarder) -> None:
    opened: dict[int, str] = {}
    sizes = set()
    for i, pods in enumerate([1, 3, 8, 21, 55, 144, 250]):
        sizes.add(len(forwarder.serve({"node1": pods, "node2": pods}).current) // 2)
        assert {port: forwarder.run(segment("A", port)).node for port in opened} == opened
        opened |= owners(forwarder, "S", range(20000 + 100 * i, 20100 + 100 * i))
    assert len(opened) == 700
    assert len(sizes) == 6


def test_connections_of_a_departed_node_go_to_the_current_node(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1, "node2": 1})
    owners(forwarder, "S")
    forwarder.serve({"node2": 1, "node3": 1})
    assert "node1" not in owners(forwarder, "A").values()


def test_connections_with_entries_outlive_the_node_that_had_the_slot_before(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1})
    forwarder.serve({"node2": 1}, {"node1", "node2"})
    opened = owners(forwarder, "S")
    assert set(opened.values()) == {"node2"}
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    forwarder.serve({"node3": 1}, {"node2", "node3"})
    assert owners(forwarder, "A") == opened
    assert set(owners(forwarder, "S", range(30000, 30100)).values()) == {"node3"}


def test_the_entry_of_an_older_connection_with_the_same_ports_is_ignored(
    forwarder: Forwarder,
) -> None:
    """Clients reuse ports, so an entry must not affect a later connection with the same ports."""
    forwarder.serve({"node1": 1})
    forwarder.serve({"node2": 1}, {"node1", "node2"})
    assert set(owners(forwarder, "S").values()) == {"node2"}
    # Only node1 may keep connections, so no slot is in transition, and new flows get no entries.
    forwarder.serve({"node1": 1})
    assert set(owners(forwarder, "S").values()) == {"node1"}
    forwarder.serve({"node1": 1, "node2": 1})
    assert set(owners(forwarder, "A").values()) == {"node1"}


def test_an_older_entry_is_ignored_also_when_no_new_entry_can_be_made(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    forwarder.serve({"node2": 1}, {"node1", "node2"})
    assert set(owners(forwarder, "S").values()) == {"node2"}
    forwarder.allow_inserts(0)
    opened = owners(forwarder, "S", seq=1 << 31)
    assert set(opened.values()) == {"node1"}
    assert owners(forwarder, "A", seq=1 << 31) == opened


def test_a_draining_last_node_keeps_its_connections_and_gets_no_new_ones(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1})
    forwarder.serve({}, {"node1"})
    assert set(owners(forwarder, "A").values()) == {"node1"}
    assert forwarder.run(segment("S")).verdict == DROP


def test_toggling_affinity_moves_no_open_connection(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1, "node2": 1})
    before = owners(forwarder, "S")
    forwarder.serve({"node1": 1, "node2": 1}, by_source=True)
    assert owners(forwarder, "A") == before
    during = owners(forwarder, "S", range(30000, 30100))
    assert len(set(during.values())) == 1
    forwarder.serve({"node1": 1, "node2": 2})
    assert owners(forwarder, "A") == before
    assert owners(forwarder, "A", range(30000, 30100)) == during


def test_affinity_sends_a_client_to_one_node_from_any_port(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1, "node2": 1, "node3": 1}, by_source=True)
    by_client = {
        f"198.51.100.{i}": {
            forwarder.run(segment("S", port, client=f"198.51.100.{i}")).node for port in (1, 2, 3)
        }
        for i in range(99)
    }
    assert all(len(nodes) == 1 for nodes in by_client.values())
    assert len({*map(tuple, by_client.values())}) == 3


def test_datagrams_stay_with_their_node_while_the_slot_knows_it(forwarder: Forwarder) -> None:
    def nodes() -> dict[int, str]:
        return {port: forwarder.run(datagram(port)).node for port in PORTS}

    forwarder.serve({"node1": 1, "node2": 1}, protocol="UDP")
    before = nodes()
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"}, protocol="UDP")
    assert nodes() == before
    assert {forwarder.run(datagram(port)).node for port in range(30000, 30050)} == {"node3"}
    forwarder.serve({"node3": 1}, {"node1", "node3"}, protocol="UDP")
    assert nodes() == {
        port: "node1" if node == "node1" else "node3" for port, node in before.items()
    }


def errors_about(quoted: Packet, *, ipv6: bool) -> list[Packet]:
    """Return ICMP errors that a router sends about a packet from the listener to its client."""
    if ipv6:
        head = to_us() / IPv6(src="2001:db8:aaaa::1", dst=VIP6)
        return [head / ICMPv6PacketTooBig(mtu=1280) / quoted, head / ICMPv6TimeExceeded() / quoted]
    head = to_us() / IP(src="198.51.100.1", dst=VIP4)
    return [head / ICMP(type=3, code=4, nexthopmtu=1400) / quoted, head / ICMP(type=11) / quoted]


def reply(port: int, *, ipv6: bool, transport: type[Packet]) -> Packet:
    """Return the start of a packet from the listener to the client, as an ICMP error quotes it:
    with eight bytes of the transport header."""
    head = (
        IPv6(src=VIP6, dst=CLIENT6, nh=6 if transport is TCP else 17)
        if ipv6
        else IP(src=VIP4, dst=CLIENT4, proto=6 if transport is TCP else 17)
    )
    return head / bytes(transport(sport=80, dport=port))[:8]


@pytest.mark.parametrize("ipv6", [False, True])
@pytest.mark.parametrize("transport", [TCP, UDP])
def test_icmp_errors_go_to_the_node_that_has_the_flow(
    forwarder: Forwarder, ipv6: bool, transport: type[Packet]
) -> None:
    protocol: ListenerProtocol = "TCP" if transport is TCP else "UDP"
    address = VIP6 if ipv6 else VIP4
    forwarder.serve({"node1": 1, "node2": 1}, address=address, protocol=protocol)

    def send(port: int) -> str:
        return forwarder.run(
            segment("S", port, ipv6=ipv6) if transport is TCP else datagram(port, ipv6=ipv6)
        ).node

    old = {port: send(port) for port in range(20000, 20050)}
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"}, address=address, protocol=protocol)
    new = {port: send(port) for port in range(30000, 30020)}
    assert set(new.values()) == {"node3"}
    for port, node in {**old, **new}.items():
        for error in errors_about(reply(port, ipv6=ipv6, transport=transport), ipv6=ipv6):
            answer = forwarder.run(error)
            assert (answer.verdict, answer.node) == (REDIRECT, node)


def test_icmp_errors_that_quote_other_packets_are_passed_to_the_kernel(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1})
    quoted_forward = IP(src=CLIENT4, dst=VIP4) / TCP(sport=40000, dport=80)
    to_another = (
        to_us()
        / IP(src="198.51.100.1", dst="203.0.113.99")
        / ICMP(type=3)
        / reply(40000, ipv6=False, transport=TCP)
    )
    cut = bytes(errors_about(reply(40000, ipv6=False, transport=TCP), ipv6=False)[0])[
        : 14 + 20 + 8 + 20 + 2
    ]
    for packet in (errors_about(quoted_forward, ipv6=False)[0], to_another, cut):
        assert forwarder.run(packet).verdict == NOT_OURS


def test_over_the_insert_limit_new_connections_stay_consistent_and_old_ones_are_kept(
    forwarder: Forwarder,
) -> None:
    old, flood = range(20000, 20100), range(30000, 31000)
    forwarder.serve({"node1": 1})
    before = owners(forwarder, "S", old)
    forwarder.serve({"node2": 1}, {"node1", "node2"})
    tracked = owners(forwarder, "S", range(25000, 25050))
    forwarder.allow_inserts(0)
    opened = owners(forwarder, "S", flood)
    assert forwarder.event(TRACK_REFUSED) == len(flood)
    assert owners(forwarder, "A", flood) == opened
    assert owners(forwarder, "A", old) == before
    assert owners(forwarder, "A", range(25000, 25050)) == tracked


def test_a_refused_entry_counts_once_if_xdp_cannot_send_to_the_other_node(
    forwarder: Forwarder,
) -> None:
    """The XDP program knows the MAC address of the node that new connections get, but not that of
    the node that they get without an entry. It passes the packet on, and the program at tc counts
    it."""
    forwarder.serve({"node1": 1})
    forwarder.serve({"node2": 1}, {"node1", "node2"})
    unknown = NextHop(LINK, 1, "192.0.2.1", own_mac=OWN_MAC)
    forwarder.tables.nodes.set_next_hop("node1", unknown, ipv6=False)
    forwarder.allow_inserts(0)
    assert set(owners(forwarder, "S").values()) == {"node1"}
    assert forwarder.passed_on == (len(PORTS) if forwarder.fast else 0)
    assert forwarder.event(TRACK_REFUSED) == len(PORTS)


def test_no_entry_is_made_where_nothing_changed(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1, "node2": 1})
    owners(forwarder, "S")
    assert not list(forwarder.maps["connections"].items())
