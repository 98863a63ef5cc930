"""The driver on a real interface: attaching, adopting, restoring, replacing and removing."""

import os
import socket
from pathlib import Path

import msgspec
import pytest
from tests.drivers.direct.conftest import (
    NODE1,
    PINS,
    WEB,
    Run,
    add_cable,
    driver,
    ip,
    load_balancer,
    reconcile,
)

from fairlead.drivers.direct import remove_pins
from fairlead.drivers.direct.maps.arena import GRACE_S
from fairlead.drivers.direct.maps.records import (
    INDEX,
    IS_NODE,
    LISTENER,
    REFUSES,
    SETTINGS,
    ListenerRecord,
    NextHop,
    unpack_next_hop,
)
from fairlead.errors import Refused, Unavailable
from fairlead.model import Listener, LoadBalancer, Member, ServiceKey
from fairlead.net import bpffs, tc
from fairlead.net.bpf import Map
from fairlead.net.elf import MapSpec

pytestmark = pytest.mark.root

SET_NODE1 = [
    "set node node1 address 192.0.2.21",
    "set listener 203.0.113.10:80/TCP default/web weights node1=1 slots 1021",
]


def next_hop_of_node1() -> NextHop:
    """Return the IPv4 next hop of the first node, from the pinned map."""
    (layout,) = PINS.glob("layout-*")
    with Map.open(layout / "next_hops") as next_hops:
        return unpack_next_hop(next_hops.lookup(INDEX.pack(0)) or b"")


def leaves_packets_of_gateways_to_the_kernel() -> bool:
    """Return whether packets that have passed another gateway are passed to the kernel, from the
    pinned map."""
    (layout,) = PINS.glob("layout-*")
    with Map.open(layout / "settings") as settings:
        (_, _, _, flags, *_) = SETTINGS.unpack(settings.lookup(INDEX.pack(0)) or b"")
    return bool(flags & IS_NODE)


def refuses() -> bool:
    """Return whether the only listener in the pinned maps refuses packets for which it has no
    node."""
    (layout,) = PINS.glob("layout-*")
    with Map.open(layout / "listeners") as listeners:
        ((_, record),) = listeners.items()
    return bool(ListenerRecord(*LISTENER.unpack(record)).flags & REFUSES)


def there(path: Path) -> bool:
    return os.path.lexists(path)


def test_two_instances_share_an_interface(run: Run) -> None:
    async def scenario() -> None:
        one, two = driver(), driver(Path(f"{PINS}-2"), priority=200)
        await one.open()
        await two.open()
        await reconcile(one, load_balancer(NODE1))
        await reconcile(two, load_balancer(NODE1, address="203.0.113.11"))
        await one.close(remove=True)
        assert await tc.filters(f"fairlead:{PINS}") == ()
        assert [each.priority for each in await tc.filters(f"fairlead:{PINS}-2")] == [200]
        assert WEB in await two.read(None)
        await two.close(remove=True)

    run(scenario)


def test_a_listener_refuses_as_long_as_its_service_has_no_endpoints(run: Run) -> None:
    async def scenario() -> None:
        (with_endpoints,) = load_balancer(NODE1).values()
        (listener,) = load_balancer(msgspec.structs.replace(NODE1, weight=0, state="draining"))[
            WEB
        ].listeners
        listeners = (msgspec.structs.replace(listener, has_endpoints=False),)
        without = {WEB: msgspec.structs.replace(with_endpoints, listeners=listeners)}
        made = driver()
        await made.open()
        for intents, expected in ((load_balancer(NODE1), False), (without, True)):
            await reconcile(made, intents)
            assert refuses() == expected
        await made.close()
        successor = driver()
        await successor.open()
        assert refuses()
        for intents, expected in ((without, True), (load_balancer(NODE1), False)):
            await reconcile(successor, intents)
            assert refuses() == expected
        await successor.close(remove=True)

    run(scenario)


def test_a_second_process_is_refused(run: Run) -> None:
    async def scenario() -> None:
        first = driver()
        await first.open()
        with pytest.raises(Refused, match="another process uses the pins"):
            await driver().open()
        with pytest.raises(Refused, match="another process uses the pins"):
            await remove_pins(PINS)
        await first.close()

    run(scenario)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pins gone"])
def test_cleanup_needs_only_the_pin_path(run: Run, pinned: bool) -> None:
    async def scenario() -> None:
        first = driver()
        await first.open()
        await reconcile(first, load_balancer(NODE1))
        await first.close()
        (filter_,) = await tc.filters(f"fairlead:{PINS}")
        here = [
            f"program at interface {filter_.interface}",
            "rule for interface eth0",
            "blackhole routes (1)",
        ]
        if not pinned:
            bpffs.remove(PINS)
        assert sorted(await remove_pins(PINS)) == sorted(
            [*here, *([f"pins in {PINS}"] if pinned else [])]
        )
        assert await remove_pins(PINS) == []
        assert await tc.filters(f"fairlead:{PINS}") == ()
        assert not there(PINS)

    run(scenario)


def test_a_recreated_interface_gets_its_filter_back(run: Run) -> None:
    async def scenario() -> None:
        made = driver()
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        ip("link", "delete", "eth0")
        with pytest.raises(Unavailable, match="there is no interface eth0"):
            await made.read(None)
        add_cable("eth0", "192.0.2.10/24")
        assert await reconcile(made, load_balancer(NODE1)) == []
        assert next_hop_of_node1().interface == socket.if_nametoindex("eth0")
        assert len(await tc.filters(f"fairlead:{PINS}")) == 1
        assert await reconcile(made, load_balancer(NODE1)) == []
        await made.close(remove=True)

    run(scenario)


def test_a_node_that_moves_to_another_link_is_followed(run: Run) -> None:
    async def scenario() -> None:
        add_cable("eth1", "198.51.100.10/24")
        made = driver()
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        ip("route", "add", "192.0.2.21", "dev", "eth1")
        assert await reconcile(made, load_balancer(NODE1)) == []
        assert next_hop_of_node1().interface == socket.if_nametoindex("eth1")
        await made.close(remove=True)

    run(scenario)


def leave_older_layout() -> Path:
    """Create pins with the layout of another version."""
    older = PINS / "layout-0"
    bpffs.prepare(older)
    with Map.create(MapSpec("settings", 2, 4, 8, 1)) as settings:
        settings.pin(older / "settings")
    return older


def test_maps_of_another_layout_stay_until_the_new_ones_are_filled(run: Run) -> None:
    async def scenario() -> None:
        older = leave_older_layout()
        made = driver()
        await made.open()
        assert await tc.filters(f"fairlead:{PINS}") == ()
        assert there(older)
        await reconcile(made, load_balancer(NODE1))
        assert len(await tc.filters(f"fairlead:{PINS}")) == 1
        assert not there(older)
        await made.close(remove=True)

    run(scenario)


def test_another_layout_is_removed_when_there_is_nothing_to_apply(run: Run) -> None:
    async def scenario() -> None:
        older = leave_older_layout()
        made = driver()
        await made.open()
        assert await made.read(None) == {}
        assert there(older)
        assert await made.read(None) == {}
        assert not there(older)
        assert len(await tc.filters(f"fairlead:{PINS}")) == 1
        await made.close(remove=True)

    run(scenario)


def test_incomplete_pins_are_recreated(run: Run) -> None:
    async def scenario() -> None:
        first = driver()
        await first.open()
        await reconcile(first, load_balancer(NODE1))
        await first.close()
        (layout,) = [path for path in os.listdir(PINS) if path.startswith("layout-")]
        os.unlink(PINS / layout / "settings")
        second = driver()
        await second.open()
        assert await second.read(None) == {}
        assert await reconcile(second, load_balancer(NODE1)) == SET_NODE1
        await second.close(remove=True)

    run(scenario)


def test_the_entry_of_a_new_flow_stays_until_its_second_packet_can_arrive(run: Run) -> None:
    """Up to four CPUs together fill at most half of each table of new flows in a second, so an
    entry stays for at least a second even if two bursts follow each other."""

    async def scenario() -> None:
        made = driver()
        await made.open()
        (layout,) = PINS.glob("layout-*")
        with Map.open(layout / "settings") as settings:
            record = settings.lookup(INDEX.pack(0))
        assert record
        tentative_per_s = SETTINGS.unpack(record)[1]
        for name in ("new_connections", "new_datagrams"):
            with Map.open(layout / name) as tentative:
                assert (
                    0
                    < 2 * tentative_per_s * min(os.cpu_count() or 1, 4)
                    <= tentative.spec.max_entries
                )
        await made.close(remove=True)

    run(scenario)


def test_a_removed_service_leaves_no_state_and_no_counters(run: Run) -> None:
    async def scenario() -> None:
        made = driver()
        await made.open()
        for _ in range(3):
            await reconcile(made, load_balancer(NODE1))
            assert await reconcile(made, {}) == ["remove listener 203.0.113.10:80/TCP default/web"]
            assert await made.read(None) == {}
            assert made.counters.services() == {}
        await made.close(remove=True)

    run(scenario)


def numbered() -> set[str]:
    """Return the nodes that have a number, from the pinned map: flow entries may name them."""
    (layout,) = PINS.glob("layout-*")
    names = Map.open(layout / "node_names")
    try:
        return {text for _, value in names.items() if (text := value.rstrip(b"\0").decode())}
    finally:
        names.close()


def test_packets_of_other_gateways_reach_the_pods_of_a_host_that_starts(run: Run) -> None:
    """Its program may have tables of its peers before it knows the nodes of the cluster."""

    async def scenario() -> None:
        first = driver()
        await first.open()
        assert leaves_packets_of_gateways_to_the_kernel()
        await first.set_cluster_nodes({("node2", "192.0.2.22")})
        assert not leaves_packets_of_gateways_to_the_kernel()
        await first.close()
        successor = driver()
        await successor.open()
        assert not leaves_packets_of_gateways_to_the_kernel()
        await successor.set_cluster_nodes({("node1", "192.0.2.10")})
        assert leaves_packets_of_gateways_to_the_kernel()
        await successor.close(remove=True)

    run(scenario)


@pytest.mark.parametrize("restart", [False, True])
def test_a_node_that_only_connection_entries_name_is_not_forgotten(run: Run, restart: bool) -> None:
    """At first all slots belong to node1. When node2 drains, no slot names it any more, and its
    connections exist only as flow entries."""
    node2 = Member("node2", "192.0.2.22", 1)
    draining = Member("node2", "192.0.2.22", 0, "draining")
    now_s = 0.0

    async def scenario() -> None:
        nonlocal now_s
        made = driver(clock=lambda: now_s)
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        await reconcile(made, load_balancer(NODE1, node2))
        await reconcile(made, load_balancer(NODE1, draining))
        if restart:
            await made.close()
            made = driver(clock=lambda: now_s)
            await made.open()
            await reconcile(made, load_balancer(NODE1, draining))
        other = ServiceKey("default", "other")
        listeners = (Listener("IPv4", 80, "TCP", "Local", 30081, (NODE1,)),)
        another = {
            other: LoadBalancer(
                other, "uid-other", "fairlead.io/direct", ("203.0.113.11",), listeners
            )
        }
        await reconcile(made, load_balancer(NODE1, draining) | another)
        now_s += GRACE_S
        await reconcile(made, load_balancer(NODE1, draining))
        assert numbered() == {"node1", "node2"}
        await reconcile(made, load_balancer(NODE1))
        # The first pass finds that node2 is unused, the second one releases its number.
        for intents in (load_balancer(NODE1) | another, load_balancer(NODE1)):
            now_s += GRACE_S
            await reconcile(made, intents)
        assert numbered() == {"node1"}
        await made.close(remove=True)

    run(scenario)
