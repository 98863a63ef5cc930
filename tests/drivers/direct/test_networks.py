"""The next hop to a node: computed, as a table, and from the kernel's routes and events."""

import asyncio
import json
import socket
import subprocess
from contextlib import closing, suppress
from typing import Literal

import pytest
from tests.drivers.direct.conftest import (
    NAME,
    PINS,
    Run,
    add_cable,
    driver,
    ip,
    load_balancer,
    reconcile,
)

from fairlead.drivers.direct.host_network.host_network import RETRY_S, HostNetwork
from fairlead.drivers.direct.host_network.networks import is_node_of_cluster
from fairlead.drivers.direct.host_network.next_hops import Rules, next_hop_to
from fairlead.drivers.direct.maps.records import (
    INDEX,
    IPIP,
    LINK,
    LOCAL,
    VXLAN,
    NextHop,
    unpack_next_hop,
)
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.model import Member
from fairlead.net import sysctl
from fairlead.net.bpf import Map
from fairlead.net.routes import Interface, Route

OWN = b"\2\0\0\0\0\1"
CARD = Interface(2, "eth0", OWN, 1500)
VLAN = Interface(3, "eth0.7", OWN, 1400, "vlan", 2, 7)
ON_LINK = Route(False, 2, "", "192.0.2.10", 0)
ROUTED = Route(False, 2, "192.0.2.254", "192.0.2.10", 0)
ROUTED6 = Route(False, 2, "2001:db8::254", "2001:db8::10", 0)
ROUTER, FAR, FAR6 = "192.0.2.254", "198.51.100.21", "2001:db8:1::21"


@pytest.mark.parametrize(
    ("address", "route", "rules", "next_hop"),
    [
        ("192.0.2.21", ON_LINK, Rules(), NextHop(LINK, 2, "192.0.2.21", own_mac=OWN, mtu=1500)),
        (
            "192.0.2.21",
            ON_LINK._replace(mtu=1300),
            Rules(),
            NextHop(LINK, 2, "192.0.2.21", own_mac=OWN, mtu=1300),
        ),
        (
            "192.0.2.10",
            Route(True, 1, "", "192.0.2.10", 0),
            Rules(forwarding="ipip"),
            NextHop(LOCAL, 1, "192.0.2.10"),
        ),
        (
            FAR,
            ROUTED,
            Rules(tunnel="ipip"),
            NextHop(IPIP, 2, ROUTER, "192.0.2.10", FAR, own_mac=OWN, mtu=1480),
        ),
        (
            FAR,
            ROUTED,
            Rules(tunnel="vxlan"),
            NextHop(VXLAN, 2, ROUTER, "192.0.2.10", FAR, own_mac=OWN, mtu=1450, vni=7471),
        ),
        (
            FAR6,
            ROUTED6,
            Rules(tunnel="ipip"),
            NextHop(IPIP, 2, "2001:db8::254", "2001:db8::10", FAR6, own_mac=OWN, mtu=1460),
        ),
        (
            FAR6,
            ROUTED6,
            Rules(tunnel="vxlan", vni=5),
            NextHop(VXLAN, 2, "2001:db8::254", "2001:db8::10", FAR6, own_mac=OWN, mtu=1430, vni=5),
        ),
        (
            "192.0.2.21",
            ON_LINK,
            Rules(forwarding="ipip"),
            NextHop(IPIP, 2, "192.0.2.21", "192.0.2.10", "192.0.2.21", own_mac=OWN, mtu=1480),
        ),
        (
            FAR,
            ROUTED,
            Rules(tunnel="ipip", gateways=("192.0.2.0/24",)),
            NextHop(IPIP, 2, ROUTER, "192.0.2.10", FAR, own_mac=OWN, mtu=1480),
        ),
    ],
)
def test_the_next_hop_follows_from_address_route_and_rules(
    address: str, route: Route, rules: Rules, next_hop: NextHop
) -> None:
    assert next_hop_to("node", address, route, CARD, rules) == next_hop


def test_a_vlan_is_named_for_xdp() -> None:
    next_hop = next_hop_to("node", "192.0.2.21", ON_LINK._replace(interface=3), VLAN, Rules())
    assert next_hop == NextHop(LINK, 3, "192.0.2.21", own_mac=OWN, mtu=1400, tag=7, lower=2)


@pytest.mark.parametrize(
    ("route", "rules", "error", "message"),
    [
        (None, Rules(), Unavailable, "there is no route to node node at 198.51.100.21"),
        (
            ROUTED,
            Rules(),
            Refused,
            "through 192.0.2.254; put the gateway on the nodes' network, or set tunnel.kind",
        ),
        (
            ROUTED,
            Rules(forwarding="l2", tunnel="ipip"),
            Refused,
            "set gateway.forwarding to auto and tunnel.kind to ipip or vxlan",
        ),
        (
            ROUTED._replace(source=""),
            Rules(forwarding="ipip"),
            Unavailable,
            "this gateway has no source address",
        ),
        (
            ROUTED,
            Rules(forwarding="ipip", gateways=("203.0.113.0/24",)),
            Refused,
            "add 192.0.2.10 to tunnel.gateways",
        ),
    ],
)
def test_the_error_names_why_there_is_no_next_hop(
    route: Route | None, rules: Rules, error: type[FairleadError], message: str
) -> None:
    with pytest.raises(error, match=message):
        next_hop_to("node", FAR, route, CARD, rules)


@pytest.mark.root
@pytest.mark.parametrize(("tunnel", "kind", "mtu"), [("ipip", IPIP, 1280), ("vxlan", VXLAN, 1250)])
def test_next_hops_follow_the_routes_of_the_kernel(
    run: Run, tunnel: Literal["ipip", "vxlan"], kind: int, mtu: int
) -> None:
    async def scenario() -> None:
        ip("route", "add", "198.51.100.0/24", "via", "192.0.2.254", "mtu", "1300")
        index = socket.if_nametoindex("eth0")
        around = HostNetwork(Rules(tunnel=tunnel))
        nodes = [
            ("near", "192.0.2.21"),
            ("self", "192.0.2.10"),
            ("far", FAR),
            ("lost", "203.0.113.1"),
        ]
        near, here, far, lost = around.find_next_hops(nodes).values()
        assert isinstance(near, NextHop)
        assert isinstance(here, NextHop)
        assert isinstance(far, NextHop)
        assert isinstance(lost, Unavailable)
        assert (near.kind, near.interface, near.mtu) == (LINK, index, 1500)
        assert here.kind == LOCAL
        assert (far.kind, far.next_hop, far.outer_source, far.outer_destination, far.mtu) == (
            kind,
            ROUTER,
            "192.0.2.10",
            FAR,
            mtu,
        )
        around.close()

    run(scenario)


@pytest.mark.root
def test_mac_addresses_are_set_only_where_xdp_may_send(run: Run) -> None:
    async def scenario() -> None:
        ip("neighbour", "add", "192.0.2.21", "lladdr", "02:00:00:00:00:21", "dev", "eth0")
        around = HostNetwork(Rules())
        (next_hop,) = around.find_next_hops([("near", "192.0.2.21")]).values()
        assert isinstance(next_hop, NextHop)
        assert next_hop.mac == bytes(6)
        around.xdp_interfaces = frozenset({next_hop.interface})
        assert around.with_mac(next_hop).mac == b"\2\0\0\0\0\x21"
        ip("neighbour", "replace", "192.0.2.21", "lladdr", "02:00:00:00:00:22", "dev", "eth0")
        changes = await around.next_changes()
        while not changes.neighbours:
            changes = await around.next_changes()
        assert changes.neighbours == {(next_hop.interface, "192.0.2.21")}
        assert around.with_mac(next_hop).mac == b"\2\0\0\0\0\x22"
        around.close()

    run(scenario)


@pytest.mark.root
def test_a_neighbour_that_does_not_answer_is_not_resolved_again_at_once(run: Run) -> None:
    async def scenario() -> None:
        sysctl.write("net/ipv4/neigh/eth0/mcast_solicit", "1")
        sysctl.write("net/ipv4/neigh/eth0/retrans_time_ms", "10")
        now_s = 1000.0
        with (
            closing(HostNetwork(Rules(), clock=lambda: now_s)) as around,
            arp_socket("eth0-end") as asked,
        ):
            (next_hop,) = (
                each
                for each in around.find_next_hops([("dead", "192.0.2.21")]).values()
                if isinstance(each, NextHop)
            )
            around.xdp_interfaces = frozenset({next_hop.interface})
            following = asyncio.create_task(follow(around))
            for _ in range(2):
                for _ in range(10):  # as for ten changes of the networks
                    around.with_mac(next_hop)
                    while state_of(next_hop.next_hop) != ["FAILED"]:
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.01)
                assert requests(asked, next_hop.next_hop) == 1
                now_s += RETRY_S
            following.cancel()

    run(scenario)


@pytest.mark.root
def test_a_neighbour_that_is_no_next_hop_any_more_is_not_watched(run: Run) -> None:
    async def scenario() -> None:
        with closing(HostNetwork(Rules())) as around:
            nodes = [("needed", "192.0.2.21"), ("gone", "192.0.2.22")]
            for _, address in nodes:
                ip(
                    "neighbour",
                    "add",
                    address,
                    "lladdr",
                    "02:00:00:00:00:21",
                    "dev",
                    "eth0",
                    "nud",
                    "reachable",
                )
            around.refresh()
            around.xdp_interfaces = frozenset({socket.if_nametoindex("eth0")})
            needed, _ = (
                each for each in around.find_next_hops(nodes).values() if isinstance(each, NextHop)
            )
            around.watch_only([needed])
            following = asyncio.create_task(follow(around))
            for _, address in reversed(nodes):
                ip(
                    "neighbour",
                    "replace",
                    address,
                    "lladdr",
                    "02:00:00:00:00:22",
                    "dev",
                    "eth0",
                    "nud",
                    "stale",
                )
            while state_of(needed.next_hop) == ["STALE"]:
                await asyncio.sleep(0.01)
            assert state_of("192.0.2.22") == ["STALE"]
            following.cancel()

    run(scenario)


async def follow(around: HostNetwork) -> None:
    """Wait for changes in a loop, as the driver does."""
    while True:
        await around.next_changes()


def state_of(address: str) -> list[str]:
    """Return the states of a neighbour in the kernel."""
    words = ["ip", "-n", NAME, "-j", "neighbour", "show", address]
    (found,) = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=10).stdout)
    return list(found["state"])


def arp_socket(device: str) -> socket.socket:
    """Return a socket that receives all ARP packets at this device."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0806))
    made.bind((device, 0x0806))
    made.setblocking(False)
    return made


def requests(asked: socket.socket, address: str) -> int:
    """Return the number of ARP requests for the address since the last call."""
    count = 0
    with suppress(BlockingIOError):
        while True:
            data, (_, _, kind, *_) = asked.recvfrom(100)
            count += kind != socket.PACKET_OUTGOING and data[24:28] == socket.inet_aton(address)
    return count


@pytest.mark.root
def test_a_node_that_moves_is_followed_by_event(run: Run) -> None:
    """Without an audit, the driver follows another route, another MTU, the loss of the route and a
    new route."""

    def next_hop() -> NextHop:
        (layout,) = PINS.glob("layout-*")
        with Map.open(layout / "next_hops") as next_hops:
            return unpack_next_hop(next_hops.lookup(INDEX.pack(0)) or b"")

    async def until(wanted: NextHop) -> None:
        while next_hop()._replace(own_mac=bytes(6), mac=bytes(6)) != wanted:
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        add_cable("eth1", "198.51.100.10/24")
        touched: list[str] = []
        made = driver(touched=lambda keys: touched.extend(map(str, keys)))
        await made.open()
        await reconcile(made, load_balancer(Member("node1", "192.0.2.21", 1)))
        following = asyncio.create_task(made.run())
        ip("route", "add", "192.0.2.21", "dev", "eth1")
        await until(NextHop(LINK, socket.if_nametoindex("eth1"), "192.0.2.21", mtu=1500))
        ip("link", "set", "eth1", "mtu", "1400")
        await until(NextHop(LINK, socket.if_nametoindex("eth1"), "192.0.2.21", mtu=1400))
        assert touched == []
        ip("route", "replace", "unreachable", "192.0.2.21")
        while "default/web" not in touched:
            await asyncio.sleep(0.01)
        ip("route", "delete", "unreachable", "192.0.2.21")
        await until(NextHop(LINK, socket.if_nametoindex("eth0"), "192.0.2.21", mtu=1500))
        following.cancel()
        await made.close(remove=True)

    run(scenario)


@pytest.mark.root
def test_a_host_is_a_node_if_it_has_the_address_of_a_node(run: Run) -> None:
    async def scenario() -> None:
        around = HostNetwork(Rules(tunnel="ipip"))
        others = [("near", "192.0.2.21"), ("far", FAR), ("silent", "192.0.2.99")]
        assert is_node_of_cluster(around.find_next_hops([("self", "192.0.2.10"), *others]).values())
        assert not is_node_of_cluster(around.find_next_hops(others).values())
        around.close()

    run(scenario)
