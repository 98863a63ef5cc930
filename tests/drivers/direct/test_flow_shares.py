"""Namespaces have shares in the tables of flow entries: however many flows clients open or forge to
Services of one namespace, the entries of another one stay."""

import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from scapy.layers.inet import IP
from tests.drivers.direct.conftest import (
    FLOWS,
    NODE1,
    PINS,
    VIP4,
    Forwarder,
    Run,
    a_forwarder,
    datagram,
    driver,
    load_balancer,
    reconcile,
    segment,
    tcp,
    udp,
)

from fairlead.drivers.direct.maps import flow_shares
from fairlead.drivers.direct.maps.flow_shares import usable
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.records import CLOSING as CLOSING_FLAG
from fairlead.drivers.direct.maps.records import (
    DATAGRAM_LIFETIME,
    FRACTION,
    INDEX,
    LISTENER,
    SETTINGS,
    ListenerRecord,
    pack_listener_key,
)
from fairlead.drivers.direct.peers.exchange import Exchange
from fairlead.drivers.direct.peers.messages import FlowsMessage
from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol
from fairlead.model import ServiceKey
from fairlead.net.bpf import Map

pytestmark = pytest.mark.root

CALM, GREEDY = ServiceKey("calm", "web"), ServiceKey("greedy", "hog")
ATTACKED = "203.0.113.99"
BOTH = {"node1", "node2"}
SILENT = range(20000, 20060)
LIMIT = usable(FLOWS)
"""How many entries of a table all namespaces may have. One namespace may have half of what the
others leave."""
FLOOD = 2 * FLOWS
CLOSING = 32768
"""The size of the table of closing connections of a gateway."""
TCP_FLAGS_AT, FIN = 14 + 20 + 13, 1
"""The offset of the flags in a frame with an IPv4 header without options."""


@dataclass(frozen=True)
class Kind:
    """Flows of one protocol: the packets of a silent flow, and those that the flood forges."""

    protocol: ListenerProtocol
    table: str

    def opening(self, port: int) -> list[bytes]:
        if self.protocol == "UDP":
            return [datagram(port), datagram(port)]
        return [segment("S", port), segment("A", port)]

    def next(self, port: int) -> bytes:
        return datagram(port) if self.protocol == "UDP" else segment("A", port)

    def forged(self) -> list[bytes]:
        made = [udp(), udp()] if self.protocol == "UDP" else [tcp("S"), tcp("A")]
        for packet in made:
            packet[IP].dst = ATTACKED
        return [bytes(packet) for packet in made]


KINDS = [Kind("TCP", "connections"), Kind("UDP", "datagrams")]


@pytest.fixture(params=[False, True], ids=["tc", "xdp"])
def shared(request: pytest.FixtureRequest) -> Iterator[Forwarder]:
    """A forwarder on which each namespace may have half of what the others leave."""
    with a_forwarder(fast=request.param, share=0.5) as made:
        made.set_settings(usable=(LIMIT, LIMIT, LIMIT), share=0.5)
        yield made


@pytest.mark.parametrize(
    ("cpus", "limit"), [(1, 57344), (63, 57344), (128, 65536 - 129 * 128), (1024, 32768)]
)
def test_so_many_entries_stay_free_that_the_kernel_evicts_none(
    cpus: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_shares, "possible_cpus", lambda: cpus)
    assert usable(65536) == limit


def in_transition(forwarder: Forwarder, protocol: ListenerProtocol, service: ServiceKey) -> None:
    address = VIP4 if service == CALM else ATTACKED
    for weights, retained in (({"node1": 1}, {"node1"}), ({"node2": 1}, BOTH)):
        forwarder.serve(weights, retained, address=address, protocol=protocol, service=service)


def flood(
    forwarder: Forwarder,
    kind: Kind,
    count: int = FLOOD,
    first: int = 0,
    *,
    closing: bool = False,
) -> None:
    """Send `count` forged flows to the greedy Service, each from another address. `closing`: the
    last segment has the flag FIN."""
    run = forwarder.xdp if forwarder.fast else forwarder.tc
    templates = [bytearray(each) for each in kind.forged()]
    if closing:
        templates[-1][TCP_FLAGS_AT] |= FIN
    for number in range(first, first + count):
        for packet in templates:
            struct.pack_into("!I", packet, 14 + 12, 0x0A000000 + number)
            run.test_run(bytes(packet), with_context=False)


def counts(forwarder: Forwarder, table: str) -> tuple[int, int]:
    """Return the number of entries in the table, and in the table for those beyond a share."""
    return forwarder.maps[table].count(), forwarder.maps["excess_flows"].count()


def room(forwarder: Forwarder, service: ServiceKey, kind: Kind) -> int:
    shares = forwarder.tables.flow_shares
    return shares.room(shares.number(service.namespace), kind.table)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.protocol)
def test_a_flood_of_forged_flows_evicts_no_entry_of_another_namespace(
    shared: Forwarder, kind: Kind
) -> None:
    """The silent flows are older than all forged ones, so a common table would evict their entries
    first: their next packets would go to the node that had the slots before, or for UDP to the node
    that has them after a further change."""
    for service in (CALM, GREEDY):
        in_transition(shared, kind.protocol, service)
    for port in SILENT:
        assert [shared.run(each).node for each in kind.opening(port)] == ["node2", "node2"]
    flood(shared, kind)
    within, beyond = counts(shared, kind.table)
    assert within == len(SILENT) + (LIMIT - len(SILENT)) // 2
    assert beyond <= FLOWS
    shared.serve({"node3": 1}, {"node1", "node2", "node3"}, protocol=kind.protocol, service=CALM)
    assert {shared.run(kind.next(port)).node for port in SILENT} == {"node2"}


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """Run all packets of a test on one CPU: rates are limited for each of them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def second() -> int:
    """Return the second of the clock by which the data plane counts new entries."""
    return time.monotonic_ns() // 10**9


def wait_for_the_next_second() -> None:
    began = second()
    while second() == began:
        time.sleep(0.01)


def in_one_second(attempt: Callable[[int], None]) -> None:
    """Call this until it has run within one second. It gets the number of times it was called
    before."""
    for number in range(20):
        began = second()
        attempt(number)
        if second() == began:
            return
        wait_for_the_next_second()
    pytest.fail("no attempt took less than a second")


@pytest.mark.usefixtures("one_cpu")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.protocol)
def test_a_flood_of_new_flows_leaves_entries_to_other_namespaces(
    shared: Forwarder, kind: Kind
) -> None:
    """The number of new entries in a second is limited. Without an entry, new connections would go
    to the node that had their slots before, which may be dead."""
    per_s = 512
    shared.set_settings(per_s=per_s, usable=(LIMIT, LIMIT, LIMIT), share=0.5)
    for service in (CALM, GREEDY):
        in_transition(shared, kind.protocol, service)
    seen: list[tuple[int, int, list[str]]] = []

    def attempt(number: int) -> None:
        before, _ = counts(shared, kind.table)
        flood(shared, kind, per_s, first=number * per_s)
        flooded, _ = counts(shared, kind.table)
        ports = range(SILENT.start + 100 * number, SILENT.stop + 100 * number)
        nodes = [shared.run(each).node for port in ports for each in kind.opening(port)]
        seen.append((flooded - before, counts(shared, kind.table)[0] - flooded, nodes))

    in_one_second(attempt)
    assert seen[-1] == (per_s * 3 // 4, len(SILENT), ["node2"] * 2 * len(SILENT))


@pytest.mark.usefixtures("one_cpu")
def test_new_flows_are_limited_for_each_second(shared: Forwarder) -> None:
    per_s = 64
    shared.set_settings(per_s=per_s, usable=(LIMIT, LIMIT, LIMIT), share=0.5)
    in_transition(shared, "TCP", GREEDY)
    added: list[int] = []

    def attempt(_: int) -> None:
        before, _ = counts(shared, "connections")
        flood(shared, KINDS[0], 2 * per_s, first=2 * per_s * len(added))
        added.append(counts(shared, "connections")[0] - before)

    time.sleep((0.9 - time.monotonic()) % 1)  # soon after, the next second begins
    in_one_second(attempt)
    wait_for_the_next_second()
    in_one_second(attempt)
    assert added[-2:] == [per_s * 3 // 4] * 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.protocol)
def test_a_flow_beyond_the_share_has_an_entry_too(shared: Forwarder, kind: Kind) -> None:
    """It stays on its node, and its entry ends as every entry does."""
    shared.set_settings(usable=(1, 1, LIMIT), share=0.5)
    in_transition(shared, kind.protocol, CALM)
    assert [shared.run(each).node for each in kind.opening(40000)] == ["node2", "node2"]
    assert counts(shared, kind.table) == (0, 1)
    shared.serve({"node3": 1}, {"node1", "node2", "node3"}, protocol=kind.protocol, service=CALM)
    assert shared.run(kind.next(40000)).node == "node2"
    if kind.protocol == "TCP":
        assert shared.run(segment("FA", 40000)).node == "node2"
        assert counts(shared, "closing_connections") == (1, 0)


def test_a_flood_of_forged_ends_evicts_no_entry_of_another_namespace(shared: Forwarder) -> None:
    """Clients that have sent all they have to send still receive. The acknowledgements of such a
    connection must reach its node."""
    kind = KINDS[0]
    for service in (CALM, GREEDY):
        in_transition(shared, "TCP", service)
    for port in SILENT:
        for packet in (*kind.opening(port), segment("FA", port)):
            assert shared.run(packet).node == "node2"
    flood(shared, kind, closing=True)
    assert counts(shared, "closing_connections")[0] == len(SILENT) + (LIMIT - len(SILENT)) // 2
    assert counts(shared, "connections")[0] == 0
    shared.serve({"node3": 1}, {"node1", "node2", "node3"}, service=CALM)
    assert {shared.run(kind.next(port)).node for port in SILENT} == {"node2"}


def test_a_connection_that_closes_beyond_the_share_stays_on_its_node(shared: Forwarder) -> None:
    """Its entry leaves the table of open connections, and is replaced by a new connection as every
    other one."""
    kind = KINDS[0]
    shared.set_settings(usable=(LIMIT, LIMIT, 1), share=0.5)
    in_transition(shared, "TCP", CALM)
    for port in (40000, 40001):
        for packet in (*kind.opening(port), segment("FA", port), segment("FA", port)):
            assert shared.run(packet).node == "node2"
    assert counts(shared, "connections") == (0, 2)
    assert counts(shared, "closing_connections") == (0, 2)
    assert room(shared, CALM, kind) == LIMIT // 2
    shared.serve({"node3": 1}, {"node1", "node2", "node3"}, service=CALM)
    assert shared.run(kind.next(40000)).node == "node2"
    assert [shared.run(each).node for each in kind.opening(40001)] == ["node3", "node3"]
    assert shared.run(kind.next(40001)).node == "node3"


def test_closing_connections_that_end_return_their_part_of_the_share(shared: Forwarder) -> None:
    in_transition(shared, "TCP", CALM)
    shares = shared.tables.flow_shares
    number = shares.number(CALM.namespace)
    for port in SILENT:
        for packet in (*KINDS[0].opening(port), segment("FA", port)):
            shared.run(packet)
    assert shares.room(number, "closing_connections") == LIMIT // 2 - len(SILENT)
    # New connections with the same ports, and one that was not closed after all.
    for port in SILENT[:10]:
        for packet in KINDS[0].opening(port):
            shared.run(packet)
    assert shares.room(number, "closing_connections") == LIMIT // 2 - len(SILENT) + 10
    shared.serve({"node2": 1}, {"node2"}, service=CALM)
    shared.serve({"node1": 1}, {"node1"}, service=CALM)
    for port in SILENT:
        shared.run(segment("S", port))
    assert shares.room(number, "closing_connections") == LIMIT // 2
    assert counts(shared, "closing_connections") == (0, 0)


def test_connections_that_end_return_their_part_of_the_share(shared: Forwarder) -> None:
    kind = KINDS[0]
    in_transition(shared, "TCP", CALM)
    assert room(shared, CALM, kind) == LIMIT // 2
    for port in SILENT:
        for packet in kind.opening(port):
            shared.run(packet)
    assert room(shared, CALM, kind) == LIMIT // 2 - len(SILENT)
    for port in SILENT[:10]:
        shared.run(segment("FA", port))
    assert room(shared, CALM, kind) == LIMIT // 2 - len(SILENT) + 10
    # Where slots are not in transition, the SYN of a new connection removes an older entry.
    shared.serve({"node2": 1}, {"node2"}, service=CALM)
    shared.serve({"node1": 1}, {"node1"}, service=CALM)
    for port in SILENT[10:]:
        assert shared.run(segment("S", port)).node == "node1"
    assert room(shared, CALM, kind) == LIMIT // 2
    assert counts(shared, "connections") == (0, 0)


def recount(forwarder: Forwarder) -> None:
    assert forwarder.tables.flow_shares.needs_recount
    for _ in forwarder.tables.recount_flows():
        pass


def audit(forwarder: Forwarder) -> None:
    forwarder.tables.adopt(forwarder.tables.survey(forwarder.tables.baseline()))


def test_entries_of_a_transition_that_is_over_make_room_again(shared: Forwarder) -> None:
    kind = KINDS[0]
    for service in (CALM, GREEDY):
        in_transition(shared, "TCP", service)
    flood(shared, kind, LIMIT // 2 + 1)
    assert counts(shared, "connections") == (LIMIT // 2, 1)
    audit(shared)
    recount(shared)
    assert counts(shared, "connections") == (LIMIT // 2, 1)  # the transition lasts
    shared.serve({"node2": 1}, {"node2"}, address=ATTACKED, service=GREEDY)
    recount(shared)  # it has just ended here, and may be about to begin again
    assert counts(shared, "connections") == (LIMIT // 2, 1)
    audit(shared)
    recount(shared)
    assert counts(shared, "connections") == (LIMIT // 2, 1)
    audit(shared)
    recount(shared)
    assert counts(shared, "connections") == (0, 0)
    assert not shared.tables.flow_shares.needs_recount
    in_transition(shared, "TCP", GREEDY)
    flood(shared, kind, 10, first=1 << 16)
    assert counts(shared, "connections") == (10, 0)


def test_udp_flows_that_were_silent_for_long_make_room_again(shared: Forwarder) -> None:
    kind = KINDS[1]
    in_transition(shared, "UDP", GREEDY)
    flood(shared, kind, LIMIT // 2)
    table = shared.maps["datagrams"]
    for key, entry in list(table.items())[:100]:
        node, seen = struct.unpack("=II", entry)
        table.update(key, struct.pack("=II", node, seen - DATAGRAM_LIFETIME))
    recount(shared)
    assert counts(shared, "datagrams") == (LIMIT // 2 - 100, 0)
    assert not shared.tables.flow_shares.needs_recount


def test_udp_flows_of_other_gateways_make_room_again(shared: Forwarder) -> None:
    """This gateway does not know for how long they were silent. Their entries are of no more use
    when the transition has been over for a minute."""
    kind = KINDS[1]
    in_transition(shared, "UDP", GREEDY)
    flood(shared, kind, LIMIT // 2)
    table = shared.maps["datagrams"]
    for key, entry in list(table.items()):
        table.update(key, entry[: INDEX.size] + bytes(INDEX.size))
    recount(shared)
    assert counts(shared, "datagrams") == (LIMIT // 2, 0)  # the transition lasts
    shared.serve({"node2": 1}, {"node2"}, address=ATTACKED, protocol="UDP", service=GREEDY)
    for _ in range(2):
        audit(shared)
    recount(shared)
    assert counts(shared, "datagrams") == (0, 0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.protocol)
def test_entries_of_removed_listeners_make_room_again(shared: Forwarder, kind: Kind) -> None:
    """Otherwise Services that are created and deleted would use up the table, and no namespace
    would have a share any more. The listener of a peer's entry may be about to be created, so one
    count alone removes nothing."""
    in_transition(shared, kind.protocol, GREEDY)
    flood(shared, kind, LIMIT // 2 + 1)
    shared.tables.remove_listener(ListenerKey(ATTACKED, 80, kind.protocol), GREEDY)
    in_transition(shared, kind.protocol, CALM)
    audit(shared)
    for _ in shared.tables.recount_flows():
        pass
    assert counts(shared, kind.table) == (LIMIT // 2, 1)
    audit(shared)
    recount(shared)
    assert counts(shared, kind.table) == (0, 0)
    assert room(shared, CALM, kind) == LIMIT // 2
    assert not shared.tables.flow_shares.needs_recount


def record_of(shared: Forwarder) -> ListenerRecord:
    value = shared.maps["listeners"].lookup(pack_listener_key(ListenerKey(VIP4, 80, "TCP")))
    assert value
    return ListenerRecord(*LISTENER.unpack(value))


def test_the_next_process_continues_with_the_numbers_and_counts(shared: Forwarder) -> None:
    for service in (GREEDY, CALM):
        in_transition(shared, "TCP", service)
    flood(shared, KINDS[0], 20)
    before = record_of(shared)
    successor = ListenerMaps(shared.maps, share=0.5)
    successor.adopt(successor.survey(successor.baseline()))
    assert record_of(shared) == before
    assert [successor.flow_shares.number(each.namespace) for each in (GREEDY, CALM)] == [1, 2]
    assert [successor.flow_shares.room(number, "connections") for number in (1, 2)] == [
        LIMIT // 2 - 20,
        (LIMIT - 20) // 2,
    ]
    successor.close()


def test_listeners_and_entries_of_a_version_without_shares_get_them(shared: Forwarder) -> None:
    """Its records name no namespace, and its entries are not counted."""
    in_transition(shared, "TCP", CALM)
    for port in SILENT:
        for packet in KINDS[0].opening(port):
            shared.run(packet)
    record = record_of(shared)
    key = pack_listener_key(ListenerKey(VIP4, 80, "TCP"))
    shared.maps["listeners"].update(key, LISTENER.pack(*record._replace(share=0)))
    memory = shared.maps["shares"].memory()
    memory[:] = bytes(len(memory))
    memory.close()
    successor = ListenerMaps(shared.maps, share=0.5)
    successor.adopt(successor.survey(successor.baseline(), with_entries=True))
    for _ in successor.recount_flows():
        pass
    assert record_of(shared) == record
    assert successor.flow_shares.room(record.share, "connections") == LIMIT // 2 - len(SILENT)
    assert {shared.run(segment("A", port)).node for port in SILENT} == {"node2"}
    successor.close()


def test_a_namespace_without_listeners_frees_its_number(shared: Forwarder) -> None:
    """The number, and no entries with it, goes to the next namespace."""
    in_transition(shared, "TCP", GREEDY)
    flood(shared, KINDS[0], 20)
    shared.tables.remove_listener(ListenerKey(ATTACKED, 80, "TCP"), GREEDY)
    audit(shared)
    in_transition(shared, "TCP", CALM)
    assert record_of(shared).share == 1
    assert room(shared, CALM, KINDS[0]) == (LIMIT - 20) // 2


def test_namespaces_beyond_the_last_number_have_entries_without_a_share(shared: Forwarder) -> None:
    numbers = shared.maps["shares"].spec.max_entries - 1
    for number in range(numbers):
        shared.serve(
            {"node1": 1},
            address=f"203.0.113.{100 + number}",
            service=ServiceKey(f"n{number}", "web"),
        )
    in_transition(shared, "TCP", CALM)
    assert record_of(shared).share == 0
    for packet in KINDS[0].opening(40000):
        assert shared.run(packet).node == "node2"
    assert counts(shared, "connections") == (0, 1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.protocol)
def test_entries_of_other_gateways_are_stored_within_the_shares(
    shared: Forwarder, kind: Kind
) -> None:
    """Otherwise a flood at one gateway would evict the entries at all."""
    for service in (CALM, GREEDY):
        in_transition(shared, kind.protocol, service)
    for port in SILENT:
        for packet in kind.opening(port):
            shared.run(packet)
    silent = dict(shared.maps[kind.table].items())
    flood(shared, kind, 1)
    ((key, entry),) = [each for each in shared.maps[kind.table].items() if each[0] not in silent]
    share = (LIMIT - len(SILENT)) // 2
    flows = [number.to_bytes(4, "big").join((key[:12], key[16:])) for number in range(share + 100)]
    exchange = Exchange(shared.tables, shared.maps)
    (number,) = INDEX.unpack_from(entry)
    names = {number: "node2"}
    for _ in range(2):  # entries that are here already are counted once
        exchange.merge_flows(
            FlowsMessage(names, b"".join(flow + INDEX.pack(number) for flow in flows))
        )
        assert counts(shared, kind.table) == (len(SILENT) + share, 101)
    none = INDEX.pack(0xFFFF)
    exchange.merge_flows(FlowsMessage(names, b"".join(flow + none for flow in flows)))
    assert counts(shared, kind.table) == (len(SILENT) + 1, 0)
    assert room(shared, GREEDY, kind) == share - 1
    assert silent.keys() < dict(shared.maps[kind.table].items()).keys()
    exchange.close()


def test_closing_connections_of_other_gateways_are_stored_within_the_share(
    shared: Forwarder,
) -> None:
    in_transition(shared, "TCP", GREEDY)
    flood(shared, KINDS[0], 1)
    ((key, entry),) = shared.maps["connections"].items()
    share = LIMIT // 2
    flows = [number.to_bytes(4, "big").join((key[:12], key[16:])) for number in range(share + 5)]
    exchange = Exchange(shared.tables, shared.maps)
    (number,) = INDEX.unpack_from(entry)
    names = {number: "node2"}
    closing, none = INDEX.pack(number | CLOSING_FLAG), INDEX.pack(0xFFFF)
    for _ in range(2):  # entries that are here already are counted once
        exchange.merge_flows(FlowsMessage(names, b"".join(flow + closing for flow in flows)))
        assert counts(shared, "closing_connections") == (share, 5)
    exchange.merge_flows(FlowsMessage(names, b"".join(flow + none for flow in flows)))
    assert counts(shared, "closing_connections") == (0, 0)
    shares = shared.tables.flow_shares
    assert shares.room(shares.number(GREEDY.namespace), "closing_connections") == share
    exchange.close()


def test_a_gateway_sets_the_limits_and_counts_again_when_a_share_is_used_up(run: Run) -> None:
    async def scenario() -> None:
        made = driver(namespace_share=0.25)
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        (layout,) = PINS.glob("layout-*")
        with Map.open(layout / "settings") as settings, Map.open(layout / "shares") as shares:
            record = settings.lookup(INDEX.pack(0)) or b""
            limit = usable(1024)
            closing = usable(1024 // 4)
            assert SETTINGS.unpack(record)[-4:] == (limit, limit, closing, FRACTION // 4)
            used_up = struct.pack("=8q", limit // 4, *(0,) * 7)
            shares.update(INDEX.pack(1), used_up)
            await made.read(None)  # the first complete read returns what `open` has read
            await made.read(None)
            value = struct.unpack("=8q", shares.lookup(INDEX.pack(1)) or b"")
            assert value == (limit // 4, 0, 0, 0, -(limit // 4), 0, 0, 0)
        await made.close(remove=True)

    run(scenario)
