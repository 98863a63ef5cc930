"""Class ovn in a whole lab with a gateway router of OVN for each node, and the roles as on a real
site.

The lab's router has a route for each address, to the gateway routers of the nodes with ready pods,
weighted by their number. A gateway router sends to the pods of its node, and replies return through
it."""

import errno
import os
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.announced import traces
from tests.e2e.load import PATIENCE_S, Load, until
from tests.e2e.ovn_web import OvnWeb, check_shares

from fairlead.lab.overview import overview
from fairlead.lab.ovn import edge
from fairlead.lab.ovn.routers import router_name
from fairlead.lab.routing import view as router_view
from fairlead.lab.rundir import Ovn
from fairlead.lab.site import Site
from fairlead.lab.topology import gateway_router_addresses

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PLACES = ("node1", "node1", "node1", "node2")
FIRST_PORT = 20_000


class GatewaysWeb(OvnWeb):
    """The Service in a lab with gateway routers. A change counts as done when the routes of the
    lab's router have followed. The load balancer of a node may still have pods that terminate."""

    pod_fields: Mapping[str, Any] = {"terminationGracePeriodSeconds": 5}
    """Terminating pods wait for this time for the end of connections that a change of the routes
    has broken."""

    async def await_weights(self, nodes: Collection[str]) -> None:
        wanted = {address: self.hops(address, nodes) for address in self.addresses}

        async def as_wanted() -> bool:
            if not await self.pod_addresses() <= await self.backends():
                return False
            return await self.routes() == {each: hops for each, hops in wanted.items() if hops}

        await until(as_wanted, "the routes of the lab's router")
        await edge.central(self.site.topology).synchronize()

    def hops(self, address: str, nodes: Collection[str]) -> set[str]:
        """Return the next hops for pods on these nodes, as `fairlead lab status` shows them."""
        topology = self.site.topology
        return {
            gateway_router_addresses(topology.host(node))[":" in address]
            + (f" weight {count}" if count > 1 else "")
            for node, count in Counter(nodes).items()
        }

    async def routes(self) -> dict[str, set[str]]:
        """Return the next hops of the routes of the lab's router to addresses of Services."""
        reach = (await router_view(self.site)).reach
        return {each.destination: set(each.via) for each in reach}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(ovn_programs: None) -> AsyncIterator[GatewaysWeb]:
    name = f"ovg{os.getpid()}"
    ovn = Ovn(topology="gateways")
    async with Site.create(name, nodes=3, gateways=0, default_class="ovn", ovn=ovn) as site:
        web = GatewaysWeb(site)
        await web.start(PLACES)
        await web.create(ipFamilyPolicy="RequireDualStack", ipFamilies=["IPv4", "IPv6"])
        yield web
    assert traces(name) == []


@pytest_asyncio.fixture(loop_scope="module")
async def web(lab: GatewaysWeb) -> GatewaysWeb:
    """Return the Service with its pods in a known state, whatever the previous test left."""
    await lab.place(PLACES)
    return lab


async def test_pods_see_the_client_and_have_equal_shares_on_any_node(web: GatewaysWeb) -> None:
    for address in web.addresses:
        check_shares(await web.calls(address), await web.pods())
    seen = await overview(web.site)
    assert seen.ovn is not None
    assert {each.router for each in seen.ovn.chassis} == {"GR_node1", "GR_node2", "GR_node3"}
    serving = Counter(row.routers for row in seen.ovn.balancers if row.state == "serving")
    assert serving == {(router_name(node),): 2 for node in ("node1", "node2")}


async def test_no_connection_is_refused_or_lost_while_pods_leave_a_node(web: GatewaysWeb) -> None:
    """Until the node is no next hop any more, its gateway router sends to pods that terminate. A
    change of the next hops moves connections, and a gateway router resets those of another one."""
    load = Load(web.site, web.address, timeout_s=PATIENCE_S, first_port=FIRST_PORT)
    async with load:
        period = await load.counts_during(web.place(("node2", "node3", "node3", "node3")))
    assert period.requests > 0
    assert period.failures.keys() <= {"ConnectionResetError"}, period
    assert set(period.nodes) == {"node1", "node2", "node3"}, period
    assert set(period.clients) == {web.own(web.address)}
    check_shares(await web.calls(web.address), await web.pods())


async def test_without_pods_an_address_has_no_route_and_with_pods_it_has_one_again(
    web: GatewaysWeb,
) -> None:
    await web.place(())
    assert await web.routes() == {}
    with pytest.raises(OSError, match=f"Errno {errno.ENETUNREACH}"):
        await web.call(web.address)
    await web.place(("node3",))
    for address in web.addresses:
        assert (await web.call(address)).peer == web.own(address)
