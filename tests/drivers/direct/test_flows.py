"""Entries of flows: noted with the first packet, kept with the second, safe from floods; source ranges; other gateways."""

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
    tcp,
    to_us,
    udp,
)

from fairlead.drivers.direct.layout import FLOW, HOPS_LEFT, INDEX, LISTENER, ListenerRecord, pack_address, pack_listener_key
from fairlead.drivers.direct.listeners import Listeners
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.net.ringbuf import RingBuffer

pytestmark = pytest.mark.root

FORBIDDEN, UPGRADING = 4, 9
AMONG_NODES, TELL = 1, 2
NONE = 0xFFFF
RANGES = 4
QUIC_PORT = 443
BOTH = {"node1", "node2"}
SPOOFED = 10 * FLOWS


def in_transition(forwarder: Forwarder, protocol: str = "TCP", port: int = 80) -> None:
    """From node1 to node2: what is open stays with node1, what opens goes to node2."""
    for weights, keepers in (({"node1": 1}, {"node1"}), ({"node2": 1}, BOTH)):
        forwarder.serve(weights, keepers, protocol=protocol, port=port)  # type: ignore[arg-type]  # one of three words


def spoofed(template: Packet, count: int) -> list[bytes]:
    """The packet from as many addresses."""
    data = bytearray(bytes(template))
    packets = []
    for number in range(count):
        struct.pack_into("!I", data, 14 + 12, 0x0A000000 + number)
        packets.append(bytes(data))
    return packets


def held(forwarder: Forwarder, table: str) -> int:
    return len(list(forwarder.maps[table].items()))


def test_a_connection_is_noted_by_its_first_packet_and_kept_by_its_second(forwarder: Forwarder) -> None:
    in_transition(forwarder)
    assert forwarder.run(tcp("S")).node == "node2"
    assert (held(forwarder, "new_connections"), held(forwarder, "connections")) == (1, 0)
    assert forwarder.run(tcp("A")).node == "node2"
    assert (held(forwarder, "new_connections"), held(forwarder, "connections")) == (0, 1)
    assert forwarder.run(tcp("A")).node == "node2"
    assert forwarder.run(tcp("S")).node == "node2"
    assert (held(forwarder, "new_connections"), held(forwarder, "connections")) == (1, 1)


FAR = 1 << 31


def test_a_forged_syn_moves_no_open_connection(forwarder: Forwarder) -> None:
    """Neither one that has an entry nor one from before the change; and whoever really opens it anew is heard."""
    forwarder.serve({"node1": 1})
    forwarder.serve({"node2": 1}, BOTH)
    opened = [forwarder.run(tcp(flags, 2000)).node for flags in "SA"]
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    assert opened == ["node2", "node2"]
    assert [forwarder.run(tcp("S", port, seq=FAR)).node for port in (1000, 2000)] == ["node3", "node3"]
    for seq in (1, 1 << 16, FAR - 1, FAR + (1 << 17)):
        assert [forwarder.run(tcp("A", port, seq=seq)).node for port in (1000, 2000)] == ["node1", "node2"]
    assert [forwarder.run(tcp("A", port, seq=FAR + 1)).node for port in (1000, 2000)] == ["node3", "node3"]
    # The older connection's packets are nobody's now, as on a host that has its ports in use anew.
    assert [forwarder.run(tcp("A", port, seq=1)).node for port in (1000, 2000)] == ["node3", "node3"]


def test_an_error_about_a_connection_goes_where_it_is_whatever_was_forged(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    forwarder.serve({"node2": 1}, BOTH)
    for flags in "SA":
        forwarder.run(tcp(flags))
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    forwarder.run(tcp("S", seq=FAR))
    quoted = IP(src=VIP4, dst=CLIENT4, proto=6) / struct.pack("!HHI", 80, 40000, FAR)
    assert forwarder.run(to_us() / IP(src="198.51.100.1", dst=VIP4) / ICMP(type=11) / quoted).node == "node2"


def test_a_connection_that_cannot_be_kept_yet_goes_on_by_its_note(forwarder: Forwarder) -> None:
    in_transition(forwarder)
    assert forwarder.run(tcp("S", seq=7)).node == "node2"
    forwarder.allow_inserts(0)
    for seq in range(8, 1 << 20, 1 << 16):
        assert forwarder.run(tcp("A", seq=seq)).node == "node2"
    assert forwarder.run(tcp("S", seq=1 << 20)).node == "node2"  # its note speaks for what looks like the same
    assert forwarder.run(tcp("S", seq=FAR)).node == "node1"  # another one, which cannot be noted
    assert forwarder.run(tcp("A", seq=FAR + 1)).node == "node1"


@pytest.mark.parametrize("protocol", ["TCP", "SCTP"])
def test_a_node_that_keeps_nothing_any_more_loses_connections_with_entries_too(forwarder: Forwarder, protocol: str) -> None:
    in_transition(forwarder, protocol)

    def send(number: int, *, opening: bool) -> str:
        return forwarder.run(tcp("S" if opening else "A", number) if protocol == "TCP" else sctp(number, opening=opening)).node

    assert [send(2000, opening=True), send(2000, opening=False)] == ["node2", "node2"]
    everybody = {"node1", "node2", "node3"}
    forwarder.serve({"node3": 1}, everybody, protocol=protocol)  # type: ignore[arg-type]  # one of three words
    assert send(2000, opening=False) == "node2"
    forwarder.serve({"node3": 1}, everybody - {"node2"}, protocol=protocol)  # type: ignore[arg-type]  # as above
    assert [send(1000, opening=False), send(2000, opening=False)] == ["node1", "node1"]


def test_icmp_errors_keep_nothing(forwarder: Forwarder) -> None:
    in_transition(forwarder)
    forwarder.run(tcp("S"))
    quoted = IP(src=VIP4, dst=CLIENT4, proto=6) / struct.pack("!HHI", 80, 40000, 0)
    assert forwarder.run(to_us() / IP(src="198.51.100.1", dst=VIP4) / ICMP(type=11) / quoted).node == "node2"
    assert (held(forwarder, "new_connections"), held(forwarder, "connections")) == (1, 0)


def run_all(forwarder: Forwarder, packets: list[bytes]) -> None:
    run = forwarder.xdp if forwarder.fast else forwarder.tc
    for packet in packets:
        run.test_run(packet, with_context=False)


def test_connections_that_come_and_go_push_out_none_that_stay(forwarder: Forwarder) -> None:
    """More than the table has room for, which pushes out what was not used for long, while those that stay say nothing."""
    in_transition(forwarder)
    ports = range(20000, 20200)
    assert {forwarder.run(tcp(flags, port)).node for port in ports for flags in "SA"} == {"node2"}
    for flags in ("S", "A", "FA"):
        run_all(forwarder, spoofed(tcp(flags), FLOWS // 2))
    assert held(forwarder, "connections") == len(ports)
    for part in range(1, 20):
        coming = [spoofed(tcp(flags, 40000 + part), FLOWS // 2) for flags in ("S", "A", "FA")]
        for packets in coming:
            run_all(forwarder, packets)
    assert held(forwarder, "connections") == len(ports)
    assert {forwarder.run(tcp("A", port)).node for port in ports} == {"node2"}


@pytest.mark.parametrize("last", ["FA", "R", "RA"])
def test_a_connection_stays_where_it_is_when_its_client_ends_it(forwarder: Forwarder, last: str) -> None:
    """Whoever has said the last that he will say may be sent much yet, and acknowledges it."""
    in_transition(forwarder)
    assert [forwarder.run(tcp(flags)).node for flags in ("S", "A", last, last, "A")] == ["node2"] * 5
    assert (held(forwarder, "connections"), held(forwarder, "closing_connections")) == (0, 1)
    quoted = IP(src=VIP4, dst=CLIENT4, proto=6) / struct.pack("!HHI", 80, 40000, 0)
    assert forwarder.run(to_us() / IP(src="198.51.100.1", dst=VIP4) / ICMP(type=11) / quoted).node == "node2"
    forwarder.serve({"node3": 1}, {"node1", "node3"})
    assert forwarder.run(tcp("A")).node == "node1"  # its node keeps nothing any more


def test_a_forged_end_ends_nothing(forwarder: Forwarder) -> None:
    in_transition(forwarder)
    assert [forwarder.run(tcp(flags)).node for flags in "SA"] == ["node2", "node2"]
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    for flags in ("F", "R", "S"):
        forwarder.run(tcp(flags, seq=FAR))
    assert [forwarder.run(tcp("A", seq=seq)).node for seq in (1, 1 << 20)] == ["node2", "node2"]
    assert (held(forwarder, "connections"), held(forwarder, "closing_connections")) == (1, 0)  # where it was before


def test_a_closing_connection_that_a_peer_has_told_of_is_not_taken_for_open_again(forwarder: Forwarder) -> None:
    """Peers send no sequence numbers, so every packet of such a connection may be one that follows its end."""
    in_transition(forwarder)
    assert [forwarder.run(tcp(flags)).node for flags in ("S", "A", "FA")] == ["node2"] * 3
    ((key, entry),) = forwarder.maps["closing_connections"].items()
    forwarder.maps["closing_connections"].update(key, without_sequence(entry))
    assert [forwarder.run(tcp("A", seq=seq)).node for seq in (1, FAR)] == ["node2", "node2"]
    assert (held(forwarder, "connections"), held(forwarder, "closing_connections")) == (0, 1)


def without_sequence(entry: bytes) -> bytes:
    """The entry of a flow that a gateway has received from a peer (struct flow of bpf/structs.h)."""
    return FLOW.pack(*FLOW.unpack(entry)).ljust(len(entry), b"\0")


def test_who_forges_an_opening_and_its_end_takes_nothing_from_an_open_connection(forwarder: Forwarder) -> None:
    in_transition(forwarder)
    assert [forwarder.run(tcp(flags)).node for flags in "SA"] == ["node2", "node2"]
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    assert [forwarder.run(tcp(flags, seq=FAR)).node for flags in "SR"] == ["node3", "node3"]
    assert forwarder.run(tcp("A", seq=1)).node == "node2"
    assert (held(forwarder, "connections"), held(forwarder, "closing_connections")) == (1, 0)


def test_openings_that_are_taken_back_push_out_nobody(forwarder: Forwarder) -> None:
    """As hosts do whose addresses somebody has forged: they answer the answer with a reset."""
    in_transition(forwarder)
    ports = range(20000, 20200)
    assert {forwarder.run(tcp(flags, port)).node for port in ports for flags in "SA"} == {"node2"}
    for part in range(4):
        for flags in "SR":
            run_all(forwarder, spoofed(tcp(flags, 40000 + part), FLOWS // 2))
    assert held(forwarder, "connections") == len(ports)
    assert {forwarder.run(tcp("A", port)).node for port in ports} == {"node2"}


def test_the_next_connection_of_the_same_ports_is_one_of_its_own(forwarder: Forwarder) -> None:
    in_transition(forwarder)
    assert [forwarder.run(tcp(flags)).node for flags in ("S", "A", "FA")] == ["node2"] * 3
    forwarder.serve({"node3": 1}, {"node1", "node2", "node3"})
    assert [forwarder.run(tcp(flags, seq=FAR)).node for flags in "SA"] == ["node3", "node3"]
    assert (held(forwarder, "connections"), held(forwarder, "closing_connections")) == (1, 0)
    forwarder.allow_inserts(0)  # it cannot be noted: what follows goes by what is known, and so does it
    assert [forwarder.run(tcp(flags, 50000)).node for flags in "SA"] == ["node1", "node1"]
    forwarder.allow_inserts(1_000_000)
    forwarder.serve({"node3": 1}, {"node3"})  # settled: no entry speaks any more
    assert forwarder.run(tcp("S", seq=FAR)).node == "node3"
    assert (held(forwarder, "connections"), held(forwarder, "closing_connections")) == (0, 0)


def test_associations_that_end_make_room(forwarder: Forwarder) -> None:
    in_transition(forwarder, "SCTP")
    last = sctp(2000, opening=False)
    last[SCTP].payload = SCTPChunkShutdown()
    packets = (sctp(2000, opening=True), sctp(2000, opening=False), last, sctp(2000, opening=False))
    assert {forwarder.run(packet).node for packet in packets} == {"node2"}
    assert (held(forwarder, "connections"), held(forwarder, "closing_connections")) == (0, 1)


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_a_flood_from_made_up_sources_pushes_out_only_its_like(forwarder: Forwarder, protocol: str) -> None:
    in_transition(forwarder, protocol)
    kept, noted = ("connections", "new_connections") if protocol == "TCP" else ("datagrams", "new_datagrams")
    ports = range(20000, 20200)

    def send(port: int, flags: str) -> str:
        return forwarder.run(tcp(flags, port) if protocol == "TCP" else udp(port)).node

    opened = {port: [send(port, "S"), send(port, "A")] for port in ports}
    assert {*map(tuple, opened.values())} == {("node2", "node2")}
    assert held(forwarder, kept) == len(ports)
    run_all(forwarder, spoofed(tcp("S") if protocol == "TCP" else udp(), SPOOFED))
    assert held(forwarder, noted) <= FLOWS
    assert held(forwarder, kept) == len(ports)
    assert {send(port, "A") for port in ports} == {"node2"}


def test_no_state_at_all_for_connections_of_slots_that_stay(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1, "node2": 1})
    for packet in spoofed(tcp("S"), 100) + spoofed(tcp("A"), 100):
        forwarder.run(packet)
    assert [held(forwarder, table) for table in ("connections", "new_connections")] == [0, 0]


def sctp(port: int, *, opening: bool, ipv6: bool = False) -> Packet:
    head: Packet = IPv6(src=CLIENT6, dst=VIP6) if ipv6 else IP(src=CLIENT4, dst=VIP4)
    chunk: Packet = SCTPChunkInit() if opening else SCTPChunkData(data=b"x" * 8)
    return to_us() / head / SCTP(sport=port, dport=80, tag=0 if opening else 7) / chunk


def test_associations_are_kept_like_connections(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1}, protocol="SCTP")
    forwarder.serve({"node2": 1}, BOTH, protocol="SCTP")
    assert [forwarder.run(sctp(1000, opening=False)).node, forwarder.run(sctp(2000, opening=True)).node] == ["node1", "node2"]
    assert [forwarder.run(sctp(1000, opening=False)).node, forwarder.run(sctp(2000, opening=False)).node] == ["node1", "node2"]
    assert held(forwarder, "connections") == 1
    odd = sctp(3000, opening=False)
    odd[SCTP].tag = 0
    assert forwarder.run(odd).node == "node1"  # no INIT: it opens nothing


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
def test_what_may_open_a_quic_connection_goes_to_the_new_node(forwarder: Forwarder, payload: bytes) -> None:
    in_transition(forwarder, "UDP", QUIC_PORT)
    assert forwarder.run(quic(40000, payload)).node == "node2"
    assert forwarder.run(quic(40000, CONTINUING["short header"])).node == "node2"


@pytest.mark.parametrize("payload", CONTINUING.values(), ids=CONTINUING.keys())
def test_quic_connections_from_before_stay_without_an_entry(forwarder: Forwarder, payload: bytes) -> None:
    """They came by another gateway until now."""
    in_transition(forwarder, "UDP", QUIC_PORT)
    assert [forwarder.run(quic(40000, payload)).node for _ in range(3)] == ["node1"] * 3
    assert forwarder.run(udp()).verdict == NOT_OURS
    forwarder.serve({"node2": 1}, {"node2"}, protocol="UDP", port=QUIC_PORT)
    assert forwarder.run(quic(40001, payload)).node == "node2"


@pytest.mark.parametrize("protocol", ["TCP", "QUIC"])
def test_a_flow_whose_entry_may_not_be_copied_yet_waits_for_its_next_packet(forwarder: Forwarder, protocol: str) -> None:
    """An upgrade copies the flow entries of an older program. A packet without an entry may belong to a flow that began at
    that program, on the new node of its slot: on the previous node it would be answered by a reset."""
    if protocol == "TCP":
        in_transition(forwarder)
        first, later = tcp("S", 1000), tcp("A", 1000)
    else:
        in_transition(forwarder, "UDP", QUIC_PORT)
        first, later = (quic(1000, next(iter(each.values()))) for each in (OPENING, CONTINUING))
    forwarder.set_settings(copying_until=tick() + 10)
    assert forwarder.run(later).verdict == DROP
    assert forwarder.event(UPGRADING) == 1
    assert [forwarder.run(each).node for each in (first, later)] == ["node2"] * 2, "a flow that begins now has its entry"
    forwarder.set_settings(copying_until=tick() - 1)
    assert forwarder.run(tcp("A", 1001) if protocol == "TCP" else quic(1001, next(iter(CONTINUING.values())))).node == "node1"
    assert forwarder.event(UPGRADING) == 1


def test_flows_of_a_slot_that_has_not_changed_pass_while_entries_are_copied(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    forwarder.set_settings(copying_until=tick() + 10)
    assert forwarder.run(tcp("A", 1000)).node == "node1"
    assert forwarder.event(UPGRADING) == 0


def test_news_of_what_is_kept_and_of_what_is_forgotten(forwarder: Forwarder) -> None:
    forwarder.set_settings(flags=TELL)
    ring = RingBuffer(forwarder.maps["news"])

    def told() -> list[tuple[int, int]]:
        return [(int.from_bytes(record[32:34], "big"), struct.unpack_from("=I", record, 40)[0]) for record in ring.read(100)]

    in_transition(forwarder)
    number = next(number for number, name in forwarder.tables.nodes.names().items() if name == "node2")
    forwarder.run(tcp("S", 1000))
    assert told() == []
    forwarder.run(tcp("A", 1000))
    forwarder.run(tcp("A", 1000))
    assert told() == [(1000, number)]
    forwarder.serve({"node2": 1}, {"node2"})  # settled: the next connection of these ports needs no entry
    forwarder.run(tcp("S", 1000))
    assert told() == [(1000, NONE)]
    forwarder.set_settings(flags=0)
    in_transition(forwarder, "UDP")
    forwarder.run(udp(1000))
    forwarder.run(udp(1000))
    assert told() == []


def test_no_news_of_datagrams_where_the_tables_say_it(forwarder: Forwarder) -> None:
    forwarder.set_settings(flags=TELL)
    ring = RingBuffer(forwarder.maps["news"])
    forwarder.serve({"node1": 1}, protocol="UDP")
    forwarder.run(udp())
    forwarder.run(udp())
    assert held(forwarder, "datagrams") == 1
    assert list(ring.read(100)) == []


def test_an_older_flow_of_the_same_ports_moves_no_datagrams_where_the_slot_has_had_one_node(forwarder: Forwarder) -> None:
    """Its entry is another gateway's, which did not see the one that lives: it has made its own way by the tables."""
    forwarder.set_settings(flags=TELL)
    ring = RingBuffer(forwarder.maps["news"])
    forwarder.serve({"node1": 1}, BOTH, protocol="UDP")
    forwarder.run(udp())
    forwarder.run(udp())
    ((flow, entry),) = forwarder.maps["datagrams"].items()
    numbers = {name: number for number, name in forwarder.tables.nodes.names().items()}
    forwarder.maps["datagrams"].update(flow, FLOW.pack(INDEX.pack(numbers["node2"])))
    assert [forwarder.run(udp()).node for _ in range(2)] == ["node1"] * 2
    assert list(forwarder.maps["datagrams"].items()) == [(flow, entry)]
    assert [record[40:44] for record in ring.read(100)] == [INDEX.pack(numbers["node1"])]  # others are told that it was wrong


def restrict(forwarder: Forwarder, address: str, set_number: int) -> None:
    """Have the listener at port 80 ask this set."""
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


def test_source_ranges(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    restrict(forwarder, VIP4, 7)
    assert forwarder.run(tcp()).verdict == DROP  # a set without entries lets nobody in
    allow(forwarder, 8, "0.0.0.0", 0)
    assert forwarder.run(tcp()).verdict == DROP  # another's set
    allow(forwarder, 7, "198.51.100.0", 29)
    inside, outside = ("198.51.100.0", "198.51.100.7"), ("198.51.99.255", "198.51.100.8", "0.0.0.0", "255.255.255.255")
    for flags in ("S", "A"):
        assert {forwarder.run(tcp(flags, client=client)).verdict for client in inside} == {REDIRECT}
        assert {forwarder.run(tcp(flags, client=client)).verdict for client in outside} == {DROP}
    allow(forwarder, 7, "0.0.0.0", 0)
    assert {forwarder.run(tcp(client=client)).verdict for client in outside} == {REDIRECT}
    assert forwarder.event(FORBIDDEN) == 10


def test_source_ranges_of_ipv6(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1}, address=VIP6)
    restrict(forwarder, VIP6, 9)
    allow(forwarder, 9, "2001:db8:c::", 125)
    allow(forwarder, 9, "2001:db8:d::1", 128)
    for client, verdict in (("2001:db8:c::7", REDIRECT), ("2001:db8:c::8", DROP), ("2001:db8:d::1", REDIRECT), ("::1", DROP)):
        assert forwarder.run(tcp(ipv6=True, client=client)).verdict == verdict


def test_thousands_of_source_ranges(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    restrict(forwarder, VIP4, 7)
    for number in range(5000):  # every other /30 of 10.0.0.0/15
        allow(forwarder, 7, f"10.{number >> 13}.{(number >> 5) & 255}.{(number & 31) << 3}", 30)
    for number in range(0, 5000, 7):
        base = f"10.{number >> 13}.{(number >> 5) & 255}."
        last = (number & 31) << 3
        assert forwarder.run(tcp(client=f"{base}{last + 3}")).verdict == REDIRECT
        assert forwarder.run(tcp(client=f"{base}{last + 4}")).verdict == DROP


def test_errors_about_a_flow_count_as_from_its_client(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    restrict(forwarder, VIP4, 7)
    allow(forwarder, 7, CLIENT4, 32)
    quoted = IP(src=VIP4, dst=CLIENT4, proto=6) / struct.pack("!HHI", 80, 40000, 0)
    assert forwarder.run(to_us() / IP(src="192.88.99.1", dst=VIP4) / ICMP(type=3, code=4) / quoted).node == "node1"


def test_errors_that_quote_a_packet_of_another_address_are_not_ours(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    quoted = IP(src="203.0.113.99", dst=CLIENT4, proto=6) / struct.pack("!HHI", 80, 40000, 0)
    assert forwarder.run(to_us() / IP(src="198.51.100.1", dst=VIP4) / ICMP(type=3, code=4) / quoted).verdict == NOT_OURS


def test_what_another_gateway_among_the_nodes_decided_stays_here(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    forwarder.set_settings(flags=AMONG_NODES)
    passed = Ether(forwarder.run(tcp("A")).packet)
    assert passed[IP].ttl == HOPS_LEFT
    frame = bytes(to_us() / passed.payload)
    assert forwarder.run(frame)[::2] == (NOT_OURS, frame)
    forwarder.serve({}, set())
    assert forwarder.run(frame)[::2] == (NOT_OURS, frame), "the other gateway knows more"
    restrict(forwarder, VIP4, 7)
    assert forwarder.run(frame).verdict == DROP, "a client may send with any hop limit"


def test_datagrams_stay_with_a_node_that_serves_however_often_their_slot_changes(forwarder: Forwarder) -> None:
    nodes = {"node1", "node2", "node3"}
    ports, later = range(20000, 20100), range(30000, 30100)
    forwarder.serve({"node1": 1}, nodes, protocol="UDP")
    assert {forwarder.run(udp(port)).node for port in ports} == {"node1"}
    forwarder.serve({"node2": 1}, nodes, protocol="UDP")
    assert {forwarder.run(udp(port)).node for port in later} == {"node2"}
    forwarder.serve({"node3": 1}, nodes, protocol="UDP")  # node2 stands in neither table now
    assert {forwarder.run(udp(port)).node for port in ports} == {"node1"}
    assert {forwarder.run(udp(port)).node for port in later} == {"node2"}
    forwarder.serve({"node3": 1}, {"node1", "node3"}, protocol="UDP")  # node2 has ceased to serve
    assert {forwarder.run(udp(port)).node for port in ports} == {"node1"}
    assert {forwarder.run(udp(port)).node for port in later} == {"node3"}


LIFETIME = 280
"""DATAGRAM_LIFETIME of bpf/choose.h."""


def tick() -> int:
    """The coarse clock of the program (`tick` of bpf/choose.h)."""
    return (time.monotonic_ns() >> 30) + 1


def silent_for(forwarder: Forwarder, ticks: int) -> None:
    """Make the entries of all open UDP flows as old as if their clients had been silent for so long."""
    for key, entry in list(forwarder.maps["datagrams"].items()):
        node, _ = struct.unpack("=II", entry)
        forwarder.maps["datagrams"].update(key, struct.pack("=II", node, tick() - ticks))


def seen(forwarder: Forwarder) -> set[int]:
    return {struct.unpack("=II", entry)[1] for _, entry in forwarder.maps["datagrams"].items()}


def test_a_flow_of_datagrams_that_was_silent_for_long_is_a_new_one(forwarder: Forwarder) -> None:
    """A client that comes back with the ports of an old flow must not be led to a node that drains."""
    forwarder.serve({"node1": 1}, BOTH, protocol="UDP")
    assert [forwarder.run(udp()).node for _ in range(2)] == ["node1"] * 2
    forwarder.serve({"node2": 1}, BOTH, protocol="UDP")
    silent_for(forwarder, LIFETIME - 5)
    assert forwarder.run(udp()).node == "node1"
    assert seen(forwarder) <= {tick(), tick() - 1}, "the packet renews the entry"
    silent_for(forwarder, LIFETIME + 5)
    assert [forwarder.run(udp()).node for _ in range(2)] == ["node2"] * 2
    assert held(forwarder, "datagrams") == 1
    assert seen(forwarder) <= {tick(), tick() - 1}


def test_a_quic_connection_that_was_silent_for_long_goes_on(forwarder: Forwarder) -> None:
    """Its datagrams show that they open nothing."""
    short = b"\x40" + b"." * 24
    forwarder.serve({"node1": 1}, BOTH, protocol="UDP", port=QUIC_PORT)
    assert [forwarder.run(quic(40000, short)).node for _ in range(2)] == ["node1"] * 2
    forwarder.serve({"node2": 1}, BOTH, protocol="UDP", port=QUIC_PORT)
    silent_for(forwarder, LIFETIME + 5)
    assert forwarder.run(quic(40000, short)).node == "node1"


def test_an_entry_that_a_peer_has_told_of_counts_until_the_client_is_seen(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1}, BOTH, protocol="UDP")
    assert [forwarder.run(udp()).node for _ in range(2)] == ["node1"] * 2
    forwarder.serve({"node2": 1}, BOTH, protocol="UDP")
    silent_for(forwarder, tick())
    assert seen(forwarder) == {0}
    assert forwarder.run(udp()).node == "node1"
    assert 0 not in seen(forwarder)
