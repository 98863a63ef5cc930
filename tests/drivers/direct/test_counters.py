"""The counters of Services, nodes and reasons. The kernel keeps them, so they survive the
process."""

import pytest
from tests.drivers.direct.conftest import SERVICE, VIP4, VIP6, Forwarder, tcp

from fairlead.drivers.direct.counters import Counters
from fairlead.drivers.direct.maps.arena import GRACE_S
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.pins import OBJECT
from fairlead.net.elf import read_object
from fairlead.role_state import ListenerTraffic, NodeTraffic, ServiceTraffic

pytestmark = pytest.mark.root

EVENTS = read_object(OBJECT).types.enumerators("event")


def counters(forwarder: Forwarder) -> Counters:
    return Counters(forwarder.tables, forwarder.maps, EVENTS)


def test_packets_are_counted_by_service_node_and_reason(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    forwarder.serve({"node2": 1}, address=VIP6)
    sizes = [
        len(forwarder.run(packet).packet) for packet in (tcp("S"), tcp("A"), tcp("S", ipv6=True))
    ]
    forwarder.run(tcp("A", hops=1))
    counted = counters(forwarder)
    assert counted.services() == {SERVICE: ServiceTraffic(3, sum(sizes), 2, {"hop_limit": 1})}
    assert counted.listeners() == {
        f"{VIP4}:80/TCP": ListenerTraffic(2, sum(sizes[:2]), 1),
        f"[{VIP6}]:80/TCP": ListenerTraffic(1, sizes[2], 1),
    }
    nodes = counted.nodes()
    assert nodes["node1"] == NodeTraffic(
        ("l2",), ("192.0.2.1", "2001:db8::1"), 2, sum(sizes[:2]), 1
    )
    assert (nodes["node2"].packets, nodes["node3"].packets) == (1, 0)
    assert {reason: count for reason, count in counted.drops().items() if count} == {"hop_limit": 1}
    forwarder.tables.close()
    forwarder.tables = ListenerMaps(forwarder.maps)
    forwarder.tables.adopt(forwarder.tables.survey(forwarder.tables.baseline()))
    assert counters(forwarder).services() == counted.services(), "another process continues"
    assert counters(forwarder).nodes() == nodes


def test_counters_of_a_reused_number_start_at_zero(forwarder: Forwarder) -> None:
    now_s = 0.0
    forwarder.tables.close()
    forwarder.tables = ListenerMaps(forwarder.maps, clock=lambda: now_s)
    forwarder.tables.adopt(forwarder.tables.survey(forwarder.tables.baseline()))
    forwarder.serve({"node3": 1})
    forwarder.run(tcp("S"))
    number = forwarder.tables.nodes.numbers["node3"]
    forwarder.serve({"node1": 1}, {"node1"})
    for _ in range(2):
        now_s += GRACE_S
        forwarder.tables.forget_unused_nodes()
    assert "node3" not in counters(forwarder).nodes()
    limit = forwarder.maps["node_names"].spec.max_entries
    forwarder.tables.nodes._next = number  # as after all other numbers were used
    assert forwarder.tables.nodes.number("new") == number < limit
    assert counters(forwarder).nodes()["new"] == NodeTraffic((), (), 0, 0, 0)
