"""Topology `gateways` from the view of a user: kubectl, the embedded API server, a controller in
this process, and a real OVN with packets."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.drivers.ovn.cluster import OVN, first_answer, serving
from tests.drivers.ovn.traffic import connect
from tests.roles.cluster import Cluster, until

from fairlead.lab.ovn.site import CLIENT_ADDRESS, OvnSite
from fairlead.sections import OvnConfig


@pytest.fixture
async def cluster(gateway_site: OvnSite, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster whose nodes are the chassis of the site, and a node without a router."""
    section = OvnConfig(
        northbound=("unix:replaced",),
        cluster_id="replaced",
        topology="gateways",
        routers="GR_{node}",
        drain_timeout_s=10.0,
    )
    names = (*(each.name for each in gateway_site.chassis), "other")
    async with serving(gateway_site, tmp_path, section, *names) as made:
        yield made


async def test_a_service_is_published_served_moved_and_deleted(
    cluster: Cluster, gateway_site: OvnSite
) -> None:
    client = gateway_site.namespace("client")
    first, *_, last = gateway_site.pods
    await cluster.set_endpoints("web", (first.address, first.chassis, True))
    await cluster.apply("web", loadBalancerClass=OVN)
    (address,) = await cluster.addresses("web")
    await gateway_site.route(f"{address}/32", {first.chassis: 1})
    answer = await first_answer(client, address)
    assert (answer.pod, answer.peer) == (first.name, CLIENT_ADDRESS)
    await cluster.has("web", Programmed="True/Programmed", Ready="True/EndpointsReady")

    await cluster.set_endpoints("web", (last.address, last.chassis, True))

    async def refused() -> bool:
        try:
            (await connect(client, address)).close()
        except ConnectionRefusedError:
            return True
        return False

    await until(refused, "refusal at the node without pods")
    await gateway_site.route(f"{address}/32", {last.chassis: 1})
    assert (await first_answer(client, address)).pod == last.name

    async def gone(count: int) -> bool:
        return len(await gateway_site.central.rows("Load_Balancer")) == count

    await until(lambda: gone(1), "deletion of the row of the first node")
    await cluster.kubectl("delete", "service", "web")
    await until(lambda: gone(0), "deletion of the row of the last node")


async def test_pods_on_a_node_without_a_router_are_reported_on_the_service(
    cluster: Cluster, gateway_site: OvnSite
) -> None:
    first, *_, last = gateway_site.pods
    await cluster.set_endpoints(
        "web", (first.address, first.chassis, True), (last.address, "other", True)
    )
    await cluster.apply("web", loadBalancerClass=OVN)
    (address,) = await cluster.addresses("web")
    await gateway_site.route(f"{address}/32", {first.chassis: 1})
    assert (await first_answer(gateway_site.namespace("client"), address)).pod == first.name
    await cluster.has("web", Accepted="False/OvnRouterMissing")
