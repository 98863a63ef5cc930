"""Class ovn with packets through other routers, backends and protocols than in `test_packets`: a
gateway router, real node ports, one hundred pods, the flows of SCTP."""

from collections import Counter
from collections.abc import AsyncIterator

import pytest
from tests.drivers.ovn.backends import NODE_PORT, many_pods, node_port
from tests.drivers.ovn.rows import VIP, intent, intent_by_node_ports
from tests.drivers.ovn.traffic import (
    applied,
    ask,
    call,
    calls,
    connect,
    removed,
    running,
    served,
    shared,
    until_answered,
)

from fairlead.drivers.ovn.spec import Site
from fairlead.lab import namespace
from fairlead.lab.ovn.layout import OUTSIDE, POD_NETWORKS, ROUTER, UPSTREAM
from fairlead.lab.ovn.site import CLIENT_ADDRESS, OvnSite
from fairlead.net.link import Nexthop, Rtnetlink

GATEWAY, GATEWAY_ADDRESS = "gr", "192.0.2.130"
TRANSIT, TRANSIT_GATEWAY, TRANSIT_ROUTER = "transit", "10.251.0.1", "10.251.0.2"
BEHIND_GATEWAY, GATEWAY_VIP = "203.0.113.128/25", "203.0.113.140"
CONNECTIONS = 400
MANY, EACH = 100, 25
MANY_CONNECTIONS = 1200


@pytest.fixture
async def gateway_router(site: OvnSite) -> AsyncIterator[Site]:
    """A gateway router on the first hypervisor, in front of the router of the site, which replaces
    the source of load-balanced connections by its own address. Addresses of the upper half of the
    VIPs are routed to it."""
    ports = (
        (GATEWAY, OUTSIDE, "02:00:0a:f4:fe:01", f"{GATEWAY_ADDRESS}/25"),
        (GATEWAY, TRANSIT, "02:00:0a:fb:00:01", f"{TRANSIT_GATEWAY}/24"),
        (ROUTER, TRANSIT, "02:00:0a:fb:00:02", f"{TRANSIT_ROUTER}/24"),
    )
    commands = [
        ("ls-add", TRANSIT),
        ("lr-add", GATEWAY),
        ("set", "logical_router", GATEWAY, f"options:chassis={site.chassis[0].name}"),
        ("set", "logical_router", GATEWAY, "options:lb_force_snat_ip=router_ip"),
    ]
    for router, switch, mac, address in ports:
        port, end = f"{router}-{switch}", f"{switch}-{router}"
        commands += [
            ("lrp-add", router, port, mac, address),
            ("lsp-add", switch, end),
            ("lsp-set-type", end, "router"),
            ("lsp-set-addresses", end, "router"),
            ("lsp-set-options", end, f"router-port={port}"),
        ]
    commands += [
        ("lr-route-add", GATEWAY, POD_NETWORKS[0], TRANSIT_ROUTER),
        ("lr-route-add", GATEWAY, "0.0.0.0/0", UPSTREAM),
        ("lr-route-add", ROUTER, f"{CLIENT_ADDRESS}/32", TRANSIT_GATEWAY),
    ]
    undo = (
        ("lr-route-del", ROUTER, f"{CLIENT_ADDRESS}/32"),
        ("lsp-del", f"{OUTSIDE}-{GATEWAY}"),
        ("lrp-del", f"{ROUTER}-{TRANSIT}"),
        ("lr-del", GATEWAY),
        ("ls-del", TRANSIT),
    )
    with namespace.inside(site.namespace("router")):
        links = Rtnetlink()
    try:
        await site.central.control("nb", *joined(commands))
        async with links:
            await links.set_route(BEHIND_GATEWAY, Nexthop(GATEWAY_ADDRESS))
        await site.central.synchronize()
        yield Site("c1", GATEWAY)
    finally:
        await site.central.control("nb", *joined(undo))
        await site.central.synchronize()


def joined(commands: list[tuple[str, ...]] | tuple[tuple[str, ...], ...]) -> list[str]:
    """Return the words of one ovn-nbctl command with these commands."""
    return [word for each in commands for word in ("--", *each)]


async def test_a_gateway_router_keeps_the_client_address_and_refuses_from_the_service_address(
    site: OvnSite, gateway_router: Site
) -> None:
    await removed(site)
    client, vips = site.namespace("client"), (GATEWAY_VIP,)
    async with running(site, gateway_router) as driver:
        await applied(site, driver, served(site, addresses=vips))
        await until_answered(client, GATEWAY_VIP)
        pods, peers = await calls(client, GATEWAY_VIP, 40)
        assert peers == {CLIENT_ADDRESS}
        assert pods.keys() == {pod.name for pod in site.pods}
        held = [await connect(client, GATEWAY_VIP) for _ in range(20)]
        before = [await ask(each) for each in held]
        await applied(site, driver, served(site, "n2p1", addresses=vips))
        await applied(site, driver, intent((), addresses=vips))
        # The client would ignore a reset that comes from the address of the router.
        for _ in range(5):
            with pytest.raises(ConnectionRefusedError):
                await call(client, GATEWAY_VIP)
        assert [await ask(each) for each in held] == before
        for each in held:
            each.close()


async def test_node_ports_get_connections_in_proportion_to_their_ready_pods(site: OvnSite) -> None:
    await removed(site)
    first, second = site.pods[0], site.pods[-1]
    pods = {first: ["10.246.1.1", "10.246.1.2", "10.246.1.3"], second: ["10.246.2.1"]}
    async with (
        node_port(site, first, pods[first]),
        node_port(site, second, pods[second]),
        running(site) as driver,
    ):
        weights = {node.address: len(own) for node, own in pods.items()}
        await applied(site, driver, intent_by_node_ports(weights, NODE_PORT))
        answers = [await call(site.namespace("client"), VIP) for _ in range(CONNECTIONS)]
        assert {each.peer for each in answers} == {CLIENT_ADDRESS}
        behind = [address for own in pods.values() for address in own]
        shared(Counter(each.local for each in answers), dict.fromkeys(behind, 1))


async def test_one_hundred_pods_get_shares_within_the_documented_error(site: OvnSite) -> None:
    await removed(site)
    async with many_pods(site, EACH) as addresses, running(site) as driver:
        assert len(addresses) == MANY
        await applied(site, driver, intent(addresses))
        (row,) = await site.central.rows("Load_Balancer")
        positions = Counter(
            backend.removesuffix(":8080") for backend in row["vips"][f"{VIP}:80"].split(",")
        )
        assert positions.keys() == set(addresses)
        assert max(positions.values()) * MANY / positions.total() - 1 <= 0.328
        answers = [await call(site.namespace("client"), VIP) for _ in range(MANY_CONNECTIONS)]
        assert {each.peer for each in answers} == {CLIENT_ADDRESS}
        shared(Counter(each.local for each in answers), positions, deviations=5)


async def test_the_flows_of_an_sctp_port_send_to_its_pods(site: OvnSite) -> None:
    """Only the flows are checked: packets of SCTP were not answered through this datapath."""
    await removed(site)
    async with running(site) as driver:
        await applied(site, driver, served(site, protocol="SCTP"))
        (row,) = await site.central.rows("Load_Balancer")
        assert row["protocol"] == "sctp"
        found = [
            flow["actions"]
            for flow in await site.central.rows("Logical_Flow", "sb")
            if "backends=" in flow["actions"] and VIP in flow["match"] and "sctp" in flow["match"]
        ]
        assert found
        for pod in site.pods:
            assert all(f"{pod.address}:8080" in each for each in found)
