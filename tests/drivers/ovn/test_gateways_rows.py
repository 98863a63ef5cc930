"""Rows at the gateway routers of nodes in a real northbound database, where routers come and go."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from tests.drivers.ovn.rows import API, DRAIN_S, VIP, WEB, intent
from tests.drivers.ovn.traffic import DEADLINE_S, run_pass, running, settle

from fairlead.drivers.ovn.checks import NO_ROUTER
from fairlead.drivers.ovn.spec import Site
from fairlead.lab.ovn.central import Central
from fairlead.model import LoadBalancer, ServiceKey

GATEWAYS = Site("c1", "GR_{node}", topology="gateways")
NODES = {"10.244.1.10": "n1", "10.244.1.11": "n1", "10.244.2.10": "n2", "10.244.3.10": "n3"}
A, B, C, D = NODES


@pytest.fixture
async def gateways(central: Central) -> Central:
    """The central part of OVN, with the gateway routers of two nodes and a router of others."""
    for name in ("GR_n1", "GR_n2", "neutron-1"):
        await central.control("nb", "lr-add", name)
    return central


def on_nodes(*active: str, key: ServiceKey = WEB) -> LoadBalancer:
    return intent(active, nodes=NODES, key=key)


async def rows_at(central: Central) -> Mapping[str, set[str]]:
    """Return by router the names of its rows."""
    names = {row["_uuid"]: row["name"] for row in await central.rows("Load_Balancer")}
    found = {}
    for router in await central.rows("Logical_Router"):
        attached = router["load_balancer"]
        uuids = {attached} if isinstance(attached, str) else set(attached)
        found[router["name"]] = {names[each] for each in uuids}
    return found


def row_of(node: str) -> str:
    return f"fairlead:c1:default/web:{VIP}:80:tcp:{node}"


async def until(touched: set[ServiceKey], key: ServiceKey) -> None:
    """Wait until the driver has the Service compared again."""
    async with asyncio.timeout(DEADLINE_S):
        while key not in touched:
            await asyncio.sleep(0.02)


async def test_a_row_is_at_the_router_of_its_node_alone(gateways: Central) -> None:
    async with running(gateways, GATEWAYS) as driver:
        await settle(driver, on_nodes(A, B, C))
        assert await rows_at(gateways) == {
            "GR_n1": {row_of("n1")},
            "GR_n2": {row_of("n2")},
            "neutron-1": set(),
            "dr": set(),
        }


async def test_a_node_without_a_router_is_named_and_served_when_it_has_one(
    gateways: Central,
) -> None:
    touched: set[ServiceKey] = set()
    async with running(gateways, GATEWAYS, requeue=touched.update) as driver:
        wanted = on_nodes(A, D)
        async with asyncio.timeout(DEADLINE_S):
            while not (outcome := (await run_pass(driver, wanted))[WEB]).in_part:
                await asyncio.sleep(0.02)
        assert (outcome.state, outcome.reason) == ("refused", NO_ROUTER)
        assert "no router GR_n3 of node n3" in outcome.message
        assert (await rows_at(gateways))["GR_n1"] == {row_of("n1")}
        touched.clear()
        await gateways.control("nb", "lr-add", "GR_n3")
        await until(touched, WEB)
        await settle(driver, wanted)
        assert (await rows_at(gateways))["GR_n3"] == {row_of("n3")}


async def test_a_service_that_no_router_serves_is_compared_again_when_one_appears(
    gateways: Central,
) -> None:
    touched: set[ServiceKey] = set()
    async with running(gateways, GATEWAYS, requeue=touched.update) as driver:
        outcome = (await run_pass(driver, on_nodes(D)))[WEB]
        assert (outcome.state, outcome.in_part) == ("refused", False)
        assert not await gateways.rows("Load_Balancer")
        await gateways.control("nb", "lr-add", "GR_n3")
        await until(touched, WEB)
        await settle(driver, on_nodes(D))
        assert (await rows_at(gateways))["GR_n3"] == {row_of("n3")}


async def test_a_router_that_is_created_again_gets_its_row_again(gateways: Central) -> None:
    touched: set[ServiceKey] = set()
    async with running(gateways, GATEWAYS, requeue=touched.update) as driver:
        await settle(driver, on_nodes(A, C))
        touched.clear()
        await gateways.control("nb", "lr-del", "GR_n2")
        await until(touched, WEB)
        assert (await run_pass(driver, on_nodes(A, C)))[WEB].reason == NO_ROUTER
        touched.clear()
        await gateways.control("nb", "lr-add", "GR_n2")
        await until(touched, WEB)
        await settle(driver, on_nodes(A, C))
        assert (await rows_at(gateways))["GR_n2"] == {row_of("n2")}


async def test_a_router_of_ovn_kubernetes_is_refused(gateways: Central) -> None:
    control = gateways.control
    await control("nb", "lb-add", "kube", "203.0.113.9:80", "10.244.9.9:80")
    kind = "external_ids:k8s.ovn.org/kind=Service"
    await control("nb", "set", "load_balancer", "kube", kind)
    await control("nb", "lr-lb-add", "GR_n2", "kube")
    async with running(gateways, GATEWAYS) as driver:
        outcome = (await run_pass(driver, on_nodes(A, C)))[WEB]
        assert outcome.state == "refused"
        assert "router GR_n2 belongs to OVN-Kubernetes" in outcome.message
        assert [row["name"] for row in await gateways.rows("Load_Balancer")] == ["kube"]


async def test_an_address_of_a_foreign_row_is_refused_where_that_row_is(
    gateways: Central,
) -> None:
    await gateways.control("nb", "lb-add", "theirs", f"{VIP}:80", "10.244.9.9:80")
    await gateways.control("nb", "lr-lb-add", "GR_n2", "theirs")
    async with running(gateways, GATEWAYS) as driver:
        outcome = (await run_pass(driver, on_nodes(A, C)))[WEB]
        assert outcome.state == "refused"
        assert f"router GR_n2 has another load balancer for {VIP}:80/TCP" in outcome.message
        await settle(driver, on_nodes(A))
        assert (await rows_at(gateways))["GR_n1"] == {row_of("n1")}


async def test_the_state_shows_the_node_of_each_row(gateways: Central) -> None:
    async with running(gateways, GATEWAYS) as driver:
        await settle(driver, on_nodes(A, C))
        state = driver.status()
        assert state.router == "GR_{node}"
        found = {each.node: (each.attached, each.removed) for each in state.load_balancers}
        assert found == {"n1": (("GR_n1",), False), "n2": (("GR_n2",), False)}


async def test_rows_of_the_other_topology_are_emptied_and_deleted_later(
    gateways: Central,
) -> None:
    async with running(gateways, Site("c1", "dr")) as driver:
        await settle(driver, on_nodes(A, C))
    now_s = 1e9
    async with running(gateways, GATEWAYS, clock=lambda: now_s) as driver:
        await settle(driver, on_nodes(A, C))
        old = f"fairlead:c1:default/web:{VIP}:80:tcp"
        assert await rows_at(gateways) == {
            "dr": {old},
            "GR_n1": {row_of("n1")},
            "GR_n2": {row_of("n2")},
            "neutron-1": set(),
        }
        rows: Mapping[str, Any] = {row["name"]: row for row in await gateways.rows("Load_Balancer")}
        assert not rows[old]["vips"][f"{VIP}:80"]
        now_s += DRAIN_S + 1
        await settle(driver, on_nodes(A, C))
        assert (await rows_at(gateways))["dr"] == set()


async def test_services_with_the_same_nodes_have_rows_of_their_own(gateways: Central) -> None:
    async with running(gateways, GATEWAYS) as driver:
        both = on_nodes(A), intent((B,), nodes=NODES, key=API, addresses=("203.0.113.41",))
        await settle(driver, *both, keys=(WEB, API))
        assert len((await rows_at(gateways))["GR_n1"]) == 2
