"""Class announce in layer 2: one node with ready pods answers for an address, and another one takes
over when its last pod leaves, when it is drained, shuts down or stops.

kube-proxy serves on node1 and node2, and `fairlead node` on node3. When the address moves, the new
owner resets the connections of the former one. So then the tests check that every first packet was
answered (`check_served`), and otherwise that nothing failed or broke (`check_unharmed`)."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Collection

import pytest
import pytest_asyncio
from tests.e2e import operators
from tests.e2e.announced import withdrawing
from tests.e2e.load import Load, Web, fetch, until
from tests.e2e.operators import check_unharmed, without
from tests.e2e.test_announcing_nodes import check_served

from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

HOST = "host1"
"""A host of the network of the nodes that is outside of the cluster."""
NODES = ("node1", "node2", "node3")
USED, UNUSED = "192.0.2.151-192.0.2.154", "192.0.2.161-192.0.2.164"


class L2Web(Web):
    """A Service whose address one node at a time answers for."""

    gateways = ()
    pod_fields = {"terminationGracePeriodSeconds": 4}

    async def owners(self, address: str = "") -> set[str]:
        """Return the nodes that answer for the address, as they show it."""
        states = await asyncio.gather(*(fetch(self.site, name, "/state") for name in NODES))
        return {
            name
            for name, state in zip(NODES, states, strict=True)
            if (address or self.address)
            in [each["address"] for each in state.get("l2", {}).get("addresses", ())]
        }

    async def owner(self, among: Collection[str] = NODES, address: str = "") -> str:
        """Wait until exactly one of these nodes owns the address, and return its name."""

        async def owned() -> bool:
            owners = await self.owners(address)
            return len(owners) == 1 and owners <= set(among)

        await until(owned, f"one owner among {among}")
        (owner,) = await self.owners(address)
        return owner


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(kube_proxy: object) -> AsyncIterator[L2Web]:
    async with Site.create(
        f"classl2{os.getpid()}",
        nodes=3,
        gateways=0,
        clients=1,
        lan_clients=1,
        node_proxy="kube-proxy",
        announce="l2",
        default_class="announce",
    ) as site:
        await operators.serve_by_fairlead(site, "node3")
        web = L2Web(site)
        await web.start(NODES)
        await web.create()
        yield web


@pytest_asyncio.fixture(loop_scope="module")
async def web(lab: L2Web) -> L2Web:
    """Return the Service in a known state, whatever state the previous test left."""
    await operators.kubectl(lab.site)("uncordon", *NODES)
    await operators.set_policy(lab.site, "Local")
    await lab.place(NODES)
    await lab.owner()
    return lab


async def check_move(web: L2Web, load: Load, event: Awaitable[object], others: list[str]) -> None:
    """Check that the address moves to one of the others during the event, and that every first
    packet is answered."""

    async def move() -> None:
        await event
        await web.owner(others)

    period = await load.counts_during(move())
    check_served(period)
    assert not period.nodes.keys().isdisjoint(others), period


async def test_the_address_follows_the_pods(web: L2Web) -> None:
    """The owner loses its pods, until one node is left. No connection is refused meanwhile."""
    async with operators.load(web, host=HOST) as load:
        left = list(NODES)
        while len(left) > 1:
            owner = await web.owner(left)
            left.remove(owner)
            await check_move(web, load, operators.end_pods(web, owner), left)


async def test_nothing_fails_in_a_rollout_or_when_pools_and_other_services_change(
    web: L2Web,
) -> None:
    """No address moves. The pool of a Service loses the address of the Service and is deleted."""
    site = web.site
    await operators.edit_pool(site, USED)
    name, [address] = await operators.add_service(site, **{"address-pool": operators.POOL.name})
    before = [await web.owner(), await web.owner(address=address)]

    async def change() -> None:
        await operators.edit_pool(site, USED, UNUSED)
        await operators.edit_pool(site, UNUSED)
        await operators.delete_pool(site)
        for _ in range(2):
            other, [at] = await operators.add_service(site)
            await web.owner(address=at)
            await operators.delete_services(site, other)
        await operators.roll_out(web)

    async with operators.load(web, address=address, host=HOST) as load:
        check_unharmed(await load.counts_during(change()))
    assert [await web.owner(), await web.owner(address=address)] == before
    await operators.delete_services(site, name)


async def test_a_drained_owner_hands_over_before_its_last_pod_stops_serving(web: L2Web) -> None:
    """A cordon alone moves nothing, because the pods of the node still serve. The next owner is
    drained as well."""
    site = web.site
    async with operators.load(web, host=HOST) as load:
        left = list(NODES)
        for _ in range(2):
            owner = await web.owner()
            await operators.kubectl(site)("cordon", owner)
            check_unharmed(await load.counts_during(asyncio.sleep(0)))
            assert await web.owners() == {owner}
            left.remove(owner)
            await check_move(web, load, operators.drain_to(web, owner, left[0]), left)


async def test_the_only_pod_serves_until_another_node_has_taken_over(web: L2Web) -> None:
    await web.place(["node1"])
    await web.owner(["node1"])
    async with operators.load(web, host=HOST) as load:
        await check_move(web, load, operators.drain_to(web, "node1", "node3"), ["node3"])


async def test_an_owner_that_shuts_down_hands_over_and_is_rebooted(web: L2Web) -> None:
    """The kubelet reports the shutdown and ends the pods of the node, which has kube-proxy."""
    site, served = web.site, NODES[:2]
    await web.place(served)
    owner = await web.owner(served)
    others = without(served, owner)
    async with operators.load(web, host=HOST) as load:
        shutdown = operators.report(site, owner, operators.SHUTTING_DOWN)
        await check_move(web, load, shutdown, others)
        check_served(await load.counts_during(operators.end_pods(web, owner)))
        check_unharmed(await load.counts_during(site.kill_node(owner)))
        await operators.report(site, owner)
        await site.revive_node(owner)
        check_unharmed(await load.counts_during(web.start([owner])))
    assert await web.owner() in others, "the address moved back needlessly"


async def test_an_owner_whose_role_withdraws_at_its_stop_hands_over_first(web: L2Web) -> None:
    site, owner = web.site, await web.owner()

    async def stop() -> None:
        async with withdrawing(site, owner, "node"):
            pass

    async with operators.load(web, host=HOST) as load:
        await check_move(web, load, stop(), without(NODES, owner))
        check_unharmed(await load.counts_during(site.start_role(owner)))


async def test_with_policy_cluster_a_drained_owner_hands_over_and_policy_local_follows(
    web: L2Web,
) -> None:
    """With policy Cluster the owner may have no pods. It does not keep the address when it is
    cordoned, or when the policy becomes Local."""
    site, owner = web.site, await web.owner()
    others = without(NODES, owner)
    await operators.set_policy(site, "Cluster")
    async with operators.load(web, host=HOST) as load:
        await web.place(others)
        check_unharmed(await load.counts_during(asyncio.sleep(0)))
        assert await web.owners() == {owner}
        await check_move(web, load, operators.drain(site, owner), others)
        await operators.set_policy(site, "Local")
        check_unharmed(await load.counts_during(asyncio.sleep(0)))
