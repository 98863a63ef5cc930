"""Class announce over BGP under a steady load of new connections, while a cluster lives: rollouts,
drains and reboots of nodes, stops of the role, edits of pools and Services.

FRR is the router. kube-proxy serves on node1 (mode nftables) and node2 (mode iptables), and
`fairlead node` on node3 and node4. The routes of FRR are plain ECMP routes, so each change of nodes
also moves connections to other nodes, which reset them. So after such a change the tests check that
every first packet was answered (`check_served`), and otherwise that nothing failed and no open
connection broke (`check_unharmed`)."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.e2e import operators
from tests.e2e.announced import unchanged_routes, withdrawing
from tests.e2e.operators import check_unharmed, without
from tests.e2e.test_announcing_nodes import NodesShop, check_served

from fairlead.lab.routers import Routing
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PLACEMENT = ("node1", "node1", "node3")
ALL = ("node1", "node2", "node3", "node4")
USED, UNUSED = "203.0.113.251-203.0.113.254", "203.0.113.1-203.0.113.4"


class LifeShop(NodesShop):
    """A Shop on a cluster whose nodes come and go."""

    placement = PLACEMENT

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        # Open connections that moved to other nodes are not closed at the pod, which waits for
        # them. The others send a request several times a second.
        self.pod_fields = {"terminationGracePeriodSeconds": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(kube_proxy: object) -> AsyncIterator[LifeShop]:
    async with Site.create(
        f"life{os.getpid()}",
        nodes=4,
        gateways=0,
        clients=1,
        node_proxy="kube-proxy",
        announce="bgp",
        default_class="announce",
        routing=Routing(daemon="frr"),
    ) as site:
        async with asyncio.TaskGroup() as group:
            group.create_task(operators.serve_by_iptables(site, "node2"))
            group.create_task(operators.serve_by_fairlead(site, "node3"))
            group.create_task(operators.serve_by_fairlead(site, "node4"))
        shop = LifeShop(site)
        await shop.start(PLACEMENT)
        await shop.create()
        await shop.await_weights(PLACEMENT)
        yield shop


@pytest_asyncio.fixture(loop_scope="module")
async def shop(lab: LifeShop) -> LifeShop:
    """Return the Service in a known state, whatever state the previous test left."""
    await operators.kubectl(lab.site)("uncordon", *ALL)
    await operators.set_policy(lab.site, "Local")
    await lab.place(lab.placement)
    return lab


async def test_a_rollout_on_the_same_nodes_fails_no_new_connection(shop: LifeShop) -> None:
    """Each pod is replaced by one on its node, so no node leaves, but weights may change."""

    async def roll_out() -> None:
        await operators.roll_out(shop)
        await shop.place(PLACEMENT)

    async with operators.load(shop) as load:
        period = await load.counts_during(roll_out())
    check_served(period)
    assert period.nodes.keys() == set(PLACEMENT), period


@pytest.mark.parametrize(("node", "other"), [("node1", "node2"), ("node3", "node4")])
async def test_a_drained_node_is_withdrawn_before_its_last_pod_stops_serving(
    shop: LifeShop, node: str, other: str
) -> None:
    """A cordon alone changes no route, because the pods of the node still serve."""
    site, left = shop.site, without(PLACEMENT, node)
    async with operators.load(shop) as load:
        async with unchanged_routes(site):
            await operators.kubectl(site)("cordon", node)
            check_unharmed(await load.counts_during(asyncio.sleep(0)))
        others = [other] * PLACEMENT.count(node)
        period = await load.counts_during(operators.drain_to(shop, node, *others))
        assert node in period.nodes, period
        check_served(period)
        await shop.await_nodes(other, *left)
        check_served(await load.take())
    assert set((await shop.pods()).values()) == {other, *left}


async def test_with_policy_cluster_a_drained_node_is_rebooted_without_a_loss(
    shop: LifeShop,
) -> None:
    """The node has no pods, and announces because of the policy alone. A cordon withdraws its
    routes, and the node is then switched off at any moment."""
    site, node = shop.site, "node2"
    await operators.set_policy(site, "Cluster")
    await shop.await_nodes(*ALL)
    async with operators.load(shop) as load:
        await load.take()
        await operators.drain(site, node)
        await shop.await_nodes(*without(ALL, node))
        check_served(await load.counts_during(asyncio.sleep(0)))
        check_unharmed(await load.counts_during(site.kill_node(node)))
        await site.revive_node(node)
        await operators.kubectl(site)("uncordon", node)
        await shop.await_nodes(*ALL)
        check_served(await load.counts_during(asyncio.sleep(0)))


async def test_a_node_that_shuts_down_is_withdrawn_and_returns_with_its_pods(
    shop: LifeShop,
) -> None:
    """The kubelet reports a graceful shutdown of the node and ends its pods. Then the node is
    switched off, boots, and gets new pods."""
    site, node = shop.site, "node1"
    async with operators.load(shop) as load:
        await load.take()
        await operators.report(site, node, operators.SHUTTING_DOWN)
        await shop.await_nodes(*without(PLACEMENT, node))
        check_served(await load.counts_during(operators.end_pods(shop, node)))
        check_unharmed(await load.counts_during(site.kill_node(node)))
        await operators.report(site, node)
        await site.revive_node(node)
        await shop.start([node] * PLACEMENT.count(node))
        await shop.await_weights(PLACEMENT)
        period = await load.counts_during(asyncio.sleep(0))
    check_served(period)
    assert node in period.nodes, period


async def test_a_role_that_withdraws_at_its_stop_hands_over_first(shop: LifeShop) -> None:
    """SIGTERM: routers prefer other nodes for a second, and only then lose the route. When the
    role starts again, it announces what its node serves."""
    node = "node1"
    async with operators.load(shop) as load:
        await load.take()
        async with withdrawing(shop.site, node, "node"):
            pass
        await shop.await_nodes(*without(PLACEMENT, node))
        check_served(await load.counts_during(asyncio.sleep(0)))
        await shop.site.start_role(node)
        await shop.await_weights(PLACEMENT)
        check_served(await load.counts_during(asyncio.sleep(0)))


async def test_pools_are_edited_and_other_services_come_and_go_without_a_change_of_routes(
    shop: LifeShop,
) -> None:
    """The pool of the Service loses the address of the Service and is deleted."""
    site = shop.site
    await operators.edit_pool(site, USED)
    name, [address] = await operators.add_service(site, **{"address-pool": operators.POOL.name})
    await announced(site, address)

    async def change() -> None:
        await operators.edit_pool(site, USED, UNUSED)
        await operators.edit_pool(site, UNUSED)
        await operators.delete_pool(site)
        for _ in range(2):
            other, [at] = await operators.add_service(site)
            await announced(site, at)
            await operators.delete_services(site, other)

    async with (
        operators.load(shop, address=address) as load,
        unchanged_routes(site, (*shop.addresses, address)),
    ):
        check_unharmed(await load.counts_during(change()))
    await operators.delete_services(site, name)


async def announced(site: Site, address: str) -> None:
    """Wait until the nodes with pods announce the address."""
    served = LifeShop(site)
    served.addresses = (address,)
    await served.await_weights(PLACEMENT)
