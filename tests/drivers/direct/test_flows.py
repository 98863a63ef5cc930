"""Flow entries: created with the first packet of a flow, made permanent with the second, and safe
from floods. Also source ranges, and packets of other gateways."""

import struct
import time

import pytest
from scapy.layers.inet import ICMP, IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.layers.sctp import SCTP, SCTPChunkData, SCTPChunkInit, SCTPChunkShutdown
from scapy.packet import Packet, Raw
from tests.drivers.direct.conftest import (
    CLIENT4,
    CLIENT6,
    DROP,
    FLOWS,
    NOT_OURS,
    REDIRECT,
    VIP4,
    VIP6,
    Forwarder,
    datagram,
    segment,
    tcp,
    to_us,
    udp,
)

from fairlead.drivers.direct.maps.listeners import Listeners
from fairlead.drivers.direct.maps.records import (
    FLOW,
    HOPS_LEFT,
    INDEX,
    LISTENER,
    ListenerRecord,
    pack_listener_key,
)
from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol
from fairlead.net.address import pack_address
from fairlead.net.ringbuf import RingBuffer

pytestmark = pytest.mark.root

FORBIDDEN, UPGRADING = 4, 9
IS_NODE, REPORT_ENTRIES = 1, 2
NONE = 0xFFFF
RANGES = 4
QUIC_PORT = 443
BOTH = {"node1", "node2"}
SPOOFED = 10 * FLOWS


def in_transition(forwarder: Forwarder, protocol: ListenerProtocol = "TCP", port: int = 80) -> None:
    """Move the listener from node1 to node2: open connections stay with node1, new ones go to
    node2."""
    for weights, retained_nodes in (({"node1": 1}, {"node1"}), ({"node2": 1}, BOTH)):
        forwarder.serve(weights, retained_nodes, protocol=protocol, port=port)


def spoofed(template: Packet, count: int) -> list[bytes]:
    """Return `count` copies of the packet, each from another source address."""
    data = bytearray(bytes(template))
    packets = []
    for number in range(count):
        struct.pack_into("!I", data, 14 + 12, 0x0A000000 + number)
        packets.append(bytes(data))
    return packets


def count_entries(forwarder: Forwarder, table: str) -> int:
    return len(list(forwarder.maps[table].items()))


def test_the_second_packet_of_a_connection_makes_its_entry_permanent(
    forwarder: Forwarder,
) -> None:
    in_transition(forwarder)
    assert forwarder.run(segment("S")).node == "node2"
    assert (
        count_entries(forwarder, "new_connections"),
        count_entries(forwarder, "connections"),
    ) == (1, 0)
    assert forwarder.run(segment("A")).node == "node2"
    assert (
        count_entries(forwarder, "new_connections"),
        count_entries(forwarder, "connections"),
    ) == (0, 1)
    assert forwarder.run(segment("A")).node == "node2"
    assert forwarder.run(segment("S")).node == "node2"
    assert (
        count_entries(forwarder, "new_connections"),
        count_entries(forwarder, "connections"),
    ) == (1, 1)


def test_the_second_packet_of_a_udp_flow_makes_its_entry_permanent(
    forwarder: Forwarder,
) -> None:
    """The first entry is deleted, because its table is for flows with only one packet so far."""
    in_transition(forwarder, "UDP")
    assert forwarder.run(datagram()).node == "node2"
    assert (count_entries(forwarder, "new_datagrams"), count_entries(forwarder, "datagrams")) == (
        1,
        0,
    )
    assert forwarder.run(datagram()).node == "node2"
    assert (count_entries(forwarder, "new_datagrams"), count_entries(forwarder, "datagrams")) == (
        0,
        1,
    )


FAR = 1 << 31


def test_a_forged_syn_moves_no_open_connection(forwarder: Forwarder) -> None:
    """Neither a connection with an entry nor a connection from before the change moves. A client
    that really opens a new connection from the same port gets the new node."""
    forwarder.serve({"node1": 1})
    forwarder.serve({"node2": 1}, BOTH)
    opened = [forwarder.run(segment(flags, 2000)).node for flags in "SA"]
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    assert opened == ["node2", "node2"]
    assert [forwarder.run(segment("S", port, seq=FAR)).node for port in (1000, 2000)] == [
        "node3",
        "node3",
    ]
    for seq in (1, 1 << 16, FAR - 1, FAR + (1 << 17)):
        assert [forwarder.run(segment("A", port, seq=seq)).node for port in (1000, 2000)] == [
            "node1",
            "node2",
        ]
    assert [forwarder.run(segment("A", port, seq=FAR + 1)).node for port in (1000, 2000)] == [
        "node3",
        "node3",
    ]
    # The client has reused the ports, so the older connection is gone: its packets go to the node
    # of the newer one.
    assert [forwarder.run(segment("A", port, seq=1)).node for port in (1000, 2000)] == [
        "node3",
        "node3",
    ]


def test_an_icmp_error_reaches_the_node_of_the_connection_despite_forged_packets(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1})
    forwarder.serve({"node2": 1}, BOTH)
    for flags in "SA":
        forwarder.run(segment(flags))
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    forwarder.run(segment("S", seq=FAR))
    quoted = IP(src=VIP4, dst=CLIENT4, proto=6) / struct.pack("!HHI", 80, 40000, FAR)
    assert (
        forwarder.run(to_us() / IP(src="198.51.100.1", dst=VIP4) / ICMP(type=11) / quoted).node
        == "node2"
    )


def test_a_connection_over_the_insert_limit_continues_by_its_first_entry(
    forwarder: Forwarder,
) -> None:
    in_transition(forwarder)
    assert forwarder.run(segment("S", seq=7)).node == "node2"
    forwarder.allow_inserts(0)
    for seq in range(8, 1 << 20, 1 << 16):
        assert forwarder.run(segment("A", seq=seq)).node == "node2"
    # The sequence number is near the entry's, so this may be a packet of the same connection.
    assert forwarder.run(segment("S", seq=1 << 20)).node == "node2"
    # Another connection, which cannot get an entry.
    assert forwarder.run(segment("S", seq=FAR)).node == "node1"
    assert forwarder.run(segment("A", seq=FAR + 1)).node == "node1"


def test_a_connection_without_an_entry_follows_the_entry_of_an_older_one_with_its_ports(
    forwarder: Forwarder,
) -> None:
    """No entry can be created, so the first packet has to go where the next ones will go."""
    forwarder.serve({"node1": 1})
    forwarder.serve({"node2": 1}, BOTH)
    for flags in "SA":
        assert forwarder.run(segment(flags, 2000)).node == "node2"
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    forwarder.allow_inserts(0)
    for flags, seq in (("S", FAR), ("A", FAR + 1)):
        assert forwarder.run(segment(flags, 2000, seq=seq)).node == "node2"
    forwarder.serve({"node3": 1}, {"node1", "node3"})
    for flags, seq in (("S", FAR), ("A", FAR + 1)):
        assert forwarder.run(segment(flags, 2000, seq=seq)).node == "node1"


@pytest.mark.parametrize("protocol", ["TCP", "SCTP"])
def test_a_node_that_is_no_longer_retained_loses_connections_with_entries_too(
    forwarder: Forwarder, protocol: ListenerProtocol
) -> None:
    in_transition(forwarder, protocol)

    def send(number: int, *, opening: bool) -> str:
        return forwarder.run(
            segment("S" if opening else "A", number)
            if protocol == "TCP"
            else sctp(number, opening=opening)
        ).node

    assert [send(2000, opening=True), send(2000, opening=False)] == ["node2", "node2"]
    nodes = {"node1", "node2", "node3"}
    forwarder.serve({"node3": 1}, nodes, protocol=protocol)
    assert send(2000, opening=False) == "node2"
    forwarder.serve({"node3": 1}, nodes - {"node2"}, protocol=protocol)
    assert [send(1000, opening=False), send(2000, opening=False)] == ["node1", "node1"]


def test_icmp_errors_make_no_entry_permanent(forwarder: Forwarder) -> None:
    in_transition(forwarder)
    forwarder.run(segment("S"))
    quoted = IP(src=VIP4, dst=CLIENT4, proto=6) / struct.pack("!HHI", 80, 40000, 0)
    assert (
        forwarder.run(to_us() / IP(src="198.51.100.1", dst=VIP4) / ICMP(type=11) / quoted).node
        == "node2"
    )
    assert (
        count_entries(forwarder, "new_connections"),
        count_entries(forwarder, "connections"),
    ) == (1, 0)


def run_all(forwarder: Forwarder, packets: list[bytes]) -> None:
    run = forwarder.xdp if forwarder.fast else forwarder.tc
    for packet in packets:
        run.test_run(packet, with_context=False)


def test_short_connections_evict_no_long_ones(forwarder: Forwarder) -> None:
    """There are more short connections than the table can hold, and the table evicts the entries
    that were not used for longest; the long connections are silent meanwhile."""
    in_transition(forwarder)
    ports = range(20000, 20200)
    assert {forwarder.run(segment(flags, port)).node for port in ports for flags in "SA"} == {
        "node2"
    }
    for flags in ("S", "A", "FA"):
        run_all(forwarder, spoofed(tcp(flags), FLOWS // 2))
    assert count_entries(forwarder, "connections") == len(ports)
    for part in range(1, 20):
        coming = [spoofed(tcp(flags, 40000 + part), FLOWS // 2) for flags in ("S", "A", "FA")]
        for packets in coming:
            run_all(forwarder, packets)
    assert count_entries(forwarder, "connections") == len(ports)
    assert {forwarder.run(segment("A", port)).node for port in ports} == {"node2"}


@pytest.mark.parametrize("last", ["FA", "R", "RA"])
def test_a_connection_stays_where_it_is_when_its_client_ends_it(
    forwarder: Forwarder, last: str
) -> None:
    """A client that has closed its side may still receive data, and acknowledges it."""
    in_transition(forwarder)
    assert [forwarder.run(segment(flags)).node for flags in ("S", "A", last, last, "A")] == [
        "node2"
    ] * 5
    assert (
        count_entries(forwarder, "connections"),
        count_entries(forwarder, "closing_connections"),
    ) == (0, 1)
    quoted = IP(src=VIP4, dst=CLIENT4, proto=6) / struct.pack("!HHI", 80, 40000, 0)
    assert (
        forwarder.run(to_us() / IP(src="198.51.100.1", dst=VIP4) / ICMP(type=11) / quoted).node
        == "node2"
    )
    forwarder.serve({"node3": 1}, {"node1", "node3"})
    assert forwarder.run(segment("A")).node == "node1"  # node2 is no longer retained


def test_a_forged_fin_or_reset_moves_no_connection(forwarder: Forwarder) -> None:
    in_transition(forwarder)
    assert [forwarder.run(segment(flags)).node for flags in "SA"] == ["node2", "node2"]
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    for flags in ("F", "R", "S"):
        forwarder.run(segment(flags, seq=FAR))
    assert [forwarder.run(segment("A", seq=seq)).node for seq in (1, 1 << 20)] == ["node2", "node2"]
    # The entry is back in the table of open connections.
    assert (
        count_entries(forwarder, "connections"),
        count_entries(forwarder, "closing_connections"),
    ) == (1, 0)


def test_a_closing_connection_of_a_peer_is_not_moved_back_to_the_open_ones(
    forwarder: Forwarder,
) -> None:
    """Peers send no sequence numbers, so any packet of such a connection may be one that follows
    its FIN or RST."""
    in_transition(forwarder)
    assert [forwarder.run(segment(flags)).node for flags in ("S", "A", "FA")] == ["node2"] * 3
    ((key, entry),) = forwarder.maps["closing_connections"].items()
    forwarder.maps["closing_connections"].update(key, without_sequence(entry))
    assert [forwarder.run(segment("A", seq=seq)).node for seq in (1, FAR)] == ["node2", "node2"]
    assert (
        count_entries(forwarder, "connections"),
        count_entries(forwarder, "closing_connections"),
    ) == (0, 1)


def without_sequence(entry: bytes) -> bytes:
    """Return the flow entry as a gateway stores it that has received it from a peer (struct flow of
    bpf/structs.h)."""
    return FLOW.pack(*FLOW.unpack(entry)).ljust(len(entry), b"\0")


def test_a_forged_syn_and_reset_leave_the_entry_of_an_open_connection(
    forwarder: Forwarder,
) -> None:
    in_transition(forwarder)
    assert [forwarder.run(segment(flags)).node for flags in "SA"] == ["node2", "node2"]
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    assert [forwarder.run(segment(flags, seq=FAR)).node for flags in "SR"] == ["node3", "node3"]
    assert forwarder.run(segment("A", seq=1)).node == "node2"
    assert (
        count_entries(forwarder, "connections"),
        count_entries(forwarder, "closing_connections"),
    ) == (1, 0)


def test_a_client_resets_an_older_connection_on_the_node_that_answered_its_syn(
    forwarder: Forwarder,
) -> None:
    """A pod whose client was unreachable still has the connection. When the client uses the port
    again, the pod answers with an ACK of the old connection, the client with a RST (RFC 9293,
    3.5.1) and then with the SYN again."""
    in_transition(forwarder)
    assert [forwarder.run(segment(flags, 2000)).node for flags in "SA"] == ["node2", "node2"]
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    for port, older in ((1000, "node1"), (2000, "node2")):
        assert forwarder.run(segment("S", port, seq=FAR)).node == "node3"
        assert forwarder.run(segment("R", port, seq=7)).node == "node3"
        # Other segments of the older connection stay on its node.
        assert {forwarder.run(segment(flags, port, seq=7)).node for flags in ("A", "PA")} == {older}
        assert forwarder.run(segment("S", port, seq=FAR)).node == "node3"
        assert forwarder.run(segment("A", port, seq=FAR + 1)).node == "node3"
        assert forwarder.run(segment("A", port, seq=FAR + 9)).node == "node3"
    assert (
        count_entries(forwarder, "new_connections"),
        count_entries(forwarder, "connections"),
        count_entries(forwarder, "closing_connections"),
    ) == (0, 2, 0)


def test_connections_that_are_reset_at_once_evict_no_open_ones(forwarder: Forwarder) -> None:
    """This occurs if an attacker forges addresses of real hosts: the hosts answer the SYN-ACK with
    a reset."""
    in_transition(forwarder)
    ports = range(20000, 20200)
    assert {forwarder.run(segment(flags, port)).node for port in ports for flags in "SA"} == {
        "node2"
    }
    for part in range(4):
        for flags in "SR":
            run_all(forwarder, spoofed(tcp(flags, 40000 + part), FLOWS // 2))
    assert count_entries(forwarder, "connections") == len(ports)
    assert {forwarder.run(segment("A", port)).node for port in ports} == {"node2"}


def test_the_next_connection_with_the_same_ports_gets_its_own_entry(forwarder: Forwarder) -> None:
    in_transition(forwarder)
    assert [forwarder.run(segment(flags)).node for flags in ("S", "A", "FA")] == ["node2"] * 3
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    assert [forwarder.run(segment(flags, seq=FAR)).node for flags in "SA"] == ["node3", "node3"]
    assert (
        count_entries(forwarder, "connections"),
        count_entries(forwarder, "closing_connections"),
    ) == (1, 0)
    # Without an entry, the new connection goes where packets without an entry go.
    forwarder.allow_inserts(0)
    assert [forwarder.run(segment(flags, 50000)).node for flags in "SA"] == ["node1", "node1"]
    forwarder.allow_inserts(1_000_000)
    forwarder.serve({"node3": 1}, {"node3"})  # the transition is over, and entries are ignored
    assert forwarder.run(segment("S", seq=FAR)).node == "node3"
    assert (
        count_entries(forwarder, "connections"),
        count_entries(forwarder, "closing_connections"),
    ) == (0, 0)


def test_ended_associations_move_to_the_table_of_closing_connections(forwarder: Forwarder) -> None:
    in_transition(forwarder, "SCTP")
    last = sctp(2000, opening=False)
    last[SCTP].payload = SCTPChunkShutdown()
    packets = (sctp(2000, opening=True), sctp(2000, opening=False), last, sctp(2000, opening=False))
    assert {forwarder.run(packet).node for packet in packets} == {"node2"}
    assert (
        count_entries(forwarder, "connections"),
        count_entries(forwarder, "closing_connections"),
    ) == (0, 1)


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_a_flood_from_forged_sources_evicts_only_its_own_entries(
    forwarder: Forwarder, protocol: ListenerProtocol
) -> None:
    in_transition(forwarder, protocol)
    permanent, new = (
        ("connections", "new_connections") if protocol == "TCP" else ("datagrams", "new_datagrams")
    )
    ports = range(20000, 20200)

    def send(port: int, flags: str) -> str:
        return forwarder.run(segment(flags, port) if protocol == "TCP" else udp(port)).node

    opened = {port: [send(port, "S"), send(port, "A")] for port in ports}
    assert {*map(tuple, opened.values())} == {("node2", "node2")}
    assert count_entries(forwarder, permanent) == len(ports)
    run_all(forwarder, spoofed(tcp("S") if protocol == "TCP" else udp(), SPOOFED))
    assert count_entries(forwarder, new) <= FLOWS
    assert count_entries(forwarder, permanent) == len(ports)
    assert {send(port, "A") for port in ports} == {"node2"}


def test_connections_of_unchanged_slots_get_no_entries(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1, "node2": 1})
    for packet in spoofed(tcp("S"), 100) + spoofed(tcp("A"), 100):
        forwarder.run(packet)
    assert [count_entries(forwarder, table) for table in ("connections", "new_connections")] == [
        0,
        0,
    ]


def sctp(port: int, *, opening: bool, ipv6: bool = False) -> Packet:
    head: Packet = IPv6(src=CLIENT6, dst=VIP6) if ipv6 else IP(src=CLIENT4, dst=VIP4)
    chunk: Packet = SCTPChunkInit() if opening else SCTPChunkData(data=b"x" * 8)
    return to_us() / head / SCTP(sport=port, dport=80, tag=0 if opening else 7) / chunk


def test_associations_get_entries_like_connections(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1}, protocol="SCTP")
    forwarder.serve({"node2": 1}, BOTH, protocol="SCTP")
    assert [
        forwarder.run(sctp(1000, opening=False)).node,
        forwarder.run(sctp(2000, opening=True)).node,
    ] == ["node1", "node2"]
    assert [
        forwarder.run(sctp(1000, opening=False)).node,
        forwarder.run(sctp(2000, opening=False)).node,
    ] == ["node1", "node2"]
    assert count_entries(forwarder, "connections") == 1
    odd = sctp(3000, opening=False)
    odd[SCTP].tag = 0
    assert forwarder.run(odd).node == "node1"  # without an INIT chunk it opens no association


def quic(port: int, payload: bytes) -> Packet:
    return to_us() / IP(src=CLIENT4, dst=VIP4) / UDP(sport=port, dport=QUIC_PORT) / Raw(payload)


OPENING = {
    "initial": b"\xc3\0\0\0\1" + bytes(40),
    "0-rtt": b"\xd3\0\0\0\1" + bytes(40),
    "initial of version 2": b"\xd3\x6b\x33\x43\xcf" + bytes(40),
    "0-rtt of version 2": b"\xe3\x6b\x33\x43\xcf" + bytes(40),
    "version unknown": b"\xe3\x0a\x0a\x0a\x0a" + bytes(40),
    "something else": b"\x16\xfe\xfd" + bytes(40),
    "too short to tell": b"\x40",
    "empty": b"",
}
CONTINUING = {
    "short header": b"\x43" + bytes(40),
    "handshake": b"\xe3\0\0\0\1" + bytes(40),
    "retry": b"\xf3\0\0\0\1" + bytes(40),
    "handshake of version 2": b"\xf3\x6b\x33\x43\xcf" + bytes(40),
}


@pytest.mark.parametrize("payload", OPENING.values(), ids=OPENING.keys())
def test_a_datagram_that_may_open_a_quic_connection_goes_to_the_new_node(
    forwarder: Forwarder, payload: bytes
) -> None:
    in_transition(forwarder, "UDP", QUIC_PORT)
    assert forwarder.run(quic(40000, payload)).node == "node2"
    assert forwarder.run(quic(40000, CONTINUING["short header"])).node == "node2"


@pytest.mark.parametrize("payload", CONTINUING.values(), ids=CONTINUING.keys())
def test_quic_connections_from_before_stay_without_an_entry(
    forwarder: Forwarder, payload: bytes
) -> None:
    """Until now the packets of these connections passed another gateway."""
    in_transition(forwarder, "UDP", QUIC_PORT)
    assert [forwarder.run(quic(40000, payload)).node for _ in range(3)] == ["node1"] * 3
    assert forwarder.run(datagram()).verdict == NOT_OURS
    forwarder.serve({"node2": 1}, {"node2"}, protocol="UDP", port=QUIC_PORT)
    assert forwarder.run(quic(40001, payload)).node == "node2"


@pytest.mark.parametrize("protocol", ["TCP", "QUIC"])
def test_a_packet_whose_entry_may_not_be_copied_yet_is_dropped(
    forwarder: Forwarder, protocol: str
) -> None:
    """An upgrade copies the flow entries of an older program. A packet without an entry may belong
    to a flow that began at that program, on the new node of its slot. The previous node would
    answer it with a reset."""
    quic_start, quic_later = (next(iter(each.values())) for each in (OPENING, CONTINUING))
    if protocol == "TCP":
        in_transition(forwarder)
        first, later, other = tcp("S", 1000), tcp("A", 1000), tcp("A", 1001)
    else:
        in_transition(forwarder, "UDP", QUIC_PORT)
        first, later = quic(1000, quic_start), quic(1000, quic_later)
        other = quic(1001, quic_later)
    forwarder.set_settings(copying_until=tick() + 10)
    assert forwarder.run(later).verdict == DROP
    assert forwarder.event(UPGRADING) == 1
    nodes = [forwarder.run(each).node for each in (first, later)]
    assert nodes == ["node2"] * 2, "a flow that begins now has an entry"
    forwarder.set_settings(copying_until=tick() - 1)
    assert forwarder.run(other).node == "node1"
    assert forwarder.event(UPGRADING) == 1


def test_packets_of_an_unchanged_slot_pass_while_entries_are_copied(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    forwarder.set_settings(copying_until=tick() + 10)
    assert forwarder.run(segment("A", 1000)).node == "node1"
    assert forwarder.event(UPGRADING) == 0


def test_new_and_deleted_entries_are_reported_to_user_space(forwarder: Forwarder) -> None:
    forwarder.set_settings(flags=REPORT_ENTRIES)
    ring = RingBuffer(forwarder.maps["flow_reports"])

    def reported() -> list[tuple[int, int]]:
        return [
            (int.from_bytes(record[32:34], "big"), struct.unpack_from("=I", record, 40)[0])
            for record in ring.read(100)
        ]

    in_transition(forwarder)
    number = next(
        number for number, name in forwarder.tables.nodes.names().items() if name == "node2"
    )
    forwarder.run(segment("S", 1000))
    assert reported() == []
    forwarder.run(segment("A", 1000))
    forwarder.run(segment("A", 1000))
    assert reported() == [(1000, number)]
    # The transition is over, so the next connection with these ports needs no entry.
    forwarder.serve({"node2": 1}, {"node2"})
    forwarder.run(segment("S", 1000))
    assert reported() == [(1000, NONE)]
    forwarder.set_settings(flags=0)
    in_transition(forwarder, "UDP")
    forwarder.run(datagram(1000))
    forwarder.run(datagram(1000))
    assert reported() == []


def test_udp_entries_that_follow_from_the_tables_are_not_reported(forwarder: Forwarder) -> None:
    forwarder.set_settings(flags=REPORT_ENTRIES)
    ring = RingBuffer(forwarder.maps["flow_reports"])
    forwarder.serve({"node1": 1}, protocol="UDP")
    forwarder.run(datagram())
    forwarder.run(datagram())
    assert count_entries(forwarder, "datagrams") == 1
    assert list(ring.read(100)) == []


def test_a_stale_entry_of_a_peer_moves_no_udp_flow_of_an_unchanged_slot(
    forwarder: Forwarder,
) -> None:
    """The peer has not seen the present flow with these ports, which was sent to its node by the
    table."""
    forwarder.set_settings(flags=REPORT_ENTRIES)
    ring = RingBuffer(forwarder.maps["flow_reports"])
    forwarder.serve({"node1": 1}, BOTH, protocol="UDP")
    forwarder.run(datagram())
    forwarder.run(datagram())
    ((flow, entry),) = forwarder.maps["datagrams"].items()
    numbers = {name: number for number, name in forwarder.tables.nodes.names().items()}
    forwarder.maps["datagrams"].update(flow, FLOW.pack(INDEX.pack(numbers["node2"])))
    assert [forwarder.run(datagram()).node for _ in range(2)] == ["node1"] * 2
    assert list(forwarder.maps["datagrams"].items()) == [(flow, entry)]
    # The correction is reported, so that peers learn of it.
    assert [record[40:44] for record in ring.read(100)] == [INDEX.pack(numbers["node1"])]


def restrict(forwarder: Forwarder, address: str, set_number: int) -> None:
    """Restrict the listener on port 80 to the source ranges of this set."""
    key = pack_listener_key(ListenerKey(address, 80, "TCP"))
    value = forwarder.maps["listeners"].lookup(key)
    assert value
    record = ListenerRecord(*LISTENER.unpack(value))
    changed = record._replace(flags=record.flags | RANGES, ranges=set_number)
    Listeners(forwarder.maps).set({key: LISTENER.pack(*changed)})


def allow(forwarder: Forwarder, set_number: int, network: str, bits: int) -> None:
    length = 32 + bits + (0 if ":" in network else 96)
    key = struct.pack("=II", length, set_number) + pack_address(network)
    forwarder.maps["ranges"].update(key, INDEX.pack(1))


def test_only_clients_within_the_source_ranges_are_served(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    restrict(forwarder, VIP4, 7)
    assert forwarder.run(segment()).verdict == DROP  # an empty set permits no source
    allow(forwarder, 8, "0.0.0.0", 0)
    assert forwarder.run(segment()).verdict == DROP  # the range is in another set
    allow(forwarder, 7, "198.51.100.0", 29)
    inside, outside = (
        ("198.51.100.0", "198.51.100.7"),
        ("198.51.99.255", "198.51.100.8", "0.0.0.0", "255.255.255.255"),
    )
    for flags in ("S", "A"):
        assert {forwarder.run(segment(flags, client=client)).verdict for client in inside} == {
            REDIRECT
        }
        assert {forwarder.run(segment(flags, client=client)).verdict for client in outside} == {
            DROP
        }
    allow(forwarder, 7, "0.0.0.0", 0)
    assert {forwarder.run(segment(client=client)).verdict for client in outside} == {REDIRECT}
    assert forwarder.event(FORBIDDEN) == 10


def test_only_clients_within_the_source_ranges_are_served_over_ipv6(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1}, address=VIP6)
    restrict(forwarder, VIP6, 9)
    allow(forwarder, 9, "2001:db8:c::", 125)
    allow(forwarder, 9, "2001:db8:d::1", 128)
    for client, verdict in (
        ("2001:db8:c::7", REDIRECT),
        ("2001:db8:c::8", DROP),
        ("2001:db8:d::1", REDIRECT),
        ("::1", DROP),
    ):
        assert forwarder.run(segment(ipv6=True, client=client)).verdict == verdict


def test_thousands_of_source_ranges_admit_exactly_their_clients(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    restrict(forwarder, VIP4, 7)
    for number in range(5000):  # every other /30 of 10.0.0.0/15
        allow(forwarder, 7, f"10.{number >> 13}.{(number >> 5) & 255}.{(number & 31) << 3}", 30)
    for number in range(0, 5000, 7):
        base = f"10.{number >> 13}.{(number >> 5) & 255}."
        last = (number & 31) << 3
        assert forwarder.run(segment(client=f"{base}{last + 3}")).verdict == REDIRECT
        assert forwarder.run(segment(client=f"{base}{last + 4}")).verdict == DROP


def test_source_ranges_apply_to_the_client_of_the_flow_that_an_error_quotes(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1})
    restrict(forwarder, VIP4, 7)
    allow(forwarder, 7, CLIENT4, 32)
    quoted = IP(src=VIP4, dst=CLIENT4, proto=6) / struct.pack("!HHI", 80, 40000, 0)
    assert (
        forwarder.run(
            to_us() / IP(src="192.88.99.1", dst=VIP4) / ICMP(type=3, code=4) / quoted
        ).node
        == "node1"
    )


def test_errors_that_quote_a_packet_of_another_address_are_not_touched(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1})
    quoted = IP(src="203.0.113.99", dst=CLIENT4, proto=6) / struct.pack("!HHI", 80, 40000, 0)
    assert (
        forwarder.run(
            to_us() / IP(src="198.51.100.1", dst=VIP4) / ICMP(type=3, code=4) / quoted
        ).verdict
        == NOT_OURS
    )


def test_a_packet_of_another_gateway_stays_on_a_gateway_that_is_a_node(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1})
    forwarder.set_settings(flags=IS_NODE)
    passed = Ether(forwarder.run(segment("A")).packet)
    assert passed[IP].ttl == HOPS_LEFT
    frame = bytes(to_us() / passed.payload)
    assert forwarder.run(frame)[::2] == (NOT_OURS, frame)
    forwarder.serve({}, set())
    assert forwarder.run(frame)[::2] == (NOT_OURS, frame), "the other gateway has decided"
    restrict(forwarder, VIP4, 7)
    assert forwarder.run(frame).verdict == DROP, "a client may send with any hop limit"


def test_udp_flows_stay_with_a_serving_node_however_often_their_slot_changes(
    forwarder: Forwarder,
) -> None:
    nodes = {"node1", "node2", "node3"}
    ports, later = range(20000, 20100), range(30000, 30100)
    forwarder.serve({"node1": 1}, nodes, protocol="UDP")
    assert {forwarder.run(datagram(port)).node for port in ports} == {"node1"}
    forwarder.serve({"node2": 1}, nodes, protocol="UDP")
    assert {forwarder.run(datagram(port)).node for port in later} == {"node2"}
    forwarder.serve({"node3": 1}, nodes, protocol="UDP")  # no table names node2 now
    assert {forwarder.run(datagram(port)).node for port in ports} == {"node1"}
    assert {forwarder.run(datagram(port)).node for port in later} == {"node2"}
    forwarder.serve({"node3": 1}, {"node1", "node3"}, protocol="UDP")  # node2 no longer serves
    assert {forwarder.run(datagram(port)).node for port in ports} == {"node1"}
    assert {forwarder.run(datagram(port)).node for port in later} == {"node3"}


LIFETIME = 280
"""DATAGRAM_LIFETIME in bpf/choose.h, in ticks."""


def tick() -> int:
    """Return the time of the coarse clock of the program (`tick` in bpf/choose.h)."""
    return (time.monotonic_ns() >> 30) + 1


def silent_for(forwarder: Forwarder, ticks: int) -> None:
    """Age the entries of all UDP flows, as if their clients had been silent for this time."""
    for key, entry in list(forwarder.maps["datagrams"].items()):
        node, _ = struct.unpack("=II", entry)
        forwarder.maps["datagrams"].update(key, struct.pack("=II", node, tick() - ticks))


def seen(forwarder: Forwarder) -> set[int]:
    return {struct.unpack("=II", entry)[1] for _, entry in forwarder.maps["datagrams"].items()}


def test_a_udp_flow_after_a_long_silence_is_a_new_flow(forwarder: Forwarder) -> None:
    """A client that reuses the ports of an old flow must not be sent to a draining node."""
    forwarder.serve({"node1": 1}, BOTH, protocol="UDP")
    assert [forwarder.run(datagram()).node for _ in range(2)] == ["node1"] * 2
    forwarder.serve({"node2": 1}, BOTH, protocol="UDP")
    silent_for(forwarder, LIFETIME - 5)
    assert forwarder.run(datagram()).node == "node1"
    assert seen(forwarder) <= {tick(), tick() - 1}, "the packet renews the entry"
    silent_for(forwarder, LIFETIME + 5)
    assert [forwarder.run(datagram()).node for _ in range(2)] == ["node2"] * 2
    assert count_entries(forwarder, "datagrams") == 1
    assert seen(forwarder) <= {tick(), tick() - 1}


def test_a_quic_connection_continues_after_a_long_silence(forwarder: Forwarder) -> None:
    """The header of its datagrams shows that they do not open a connection."""
    short = b"\x40" + b"." * 24
    forwarder.serve({"node1": 1}, BOTH, protocol="UDP", port=QUIC_PORT)
    assert [forwarder.run(quic(40000, short)).node for _ in range(2)] == ["node1"] * 2
    forwarder.serve({"node2": 1}, BOTH, protocol="UDP", port=QUIC_PORT)
    silent_for(forwarder, LIFETIME + 5)
    assert forwarder.run(quic(40000, short)).node == "node1"


def test_an_entry_of_a_peer_is_valid_until_the_client_is_seen(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1}, BOTH, protocol="UDP")
    assert [forwarder.run(datagram()).node for _ in range(2)] == ["node1"] * 2
    forwarder.serve({"node2": 1}, BOTH, protocol="UDP")
    silent_for(forwarder, tick())
    assert seen(forwarder) == {0}
    assert forwarder.run(datagram()).node == "node1"
    assert 0 not in seen(forwarder)
