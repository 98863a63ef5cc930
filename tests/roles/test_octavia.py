"""Class octavia from the view of a user: kubectl, the embedded API server, a controller in this
process, and a real Octavia."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.drivers.octavia.site import SUBNET, clouds_file
from tests.openstack import clients
from tests.openstack.fault_proxy import ErrorResponse, FaultProxy
from tests.roles.cluster import Cluster, until

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.sections import OctaviaConfig

OCTAVIA = "fairlead.io/octavia"


@pytest.fixture
async def cluster(octavia_proxy: FaultProxy, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with two nodes, and a controller that serves class octavia and the classes of
    gateways."""
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await crds.install(client)
        made = Cluster(Access(server.url), client, tmp_path)
        file = str(clouds_file(tmp_path, octavia_proxy.url))
        made.octavia = OctaviaConfig(
            cloud="test", clouds_file=file, subnet_id=SUBNET, provider="amphora", calls_per_s=1000.0
        )
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": made.namespace}}
        )
        await made.add_node("life-1", 1)
        await made.add_node("life-2", 2)
        await made.start_controller()
        yield made
        octavia_proxy.forward_all()
        await made.stop()


async def members(proxy: FaultProxy) -> list[tuple[str, int]]:
    """Return address and weight of all members in the project."""
    lb = clients.without_auth(octavia=proxy.url).load_balancer
    pools = lb.pools(project_id=proxy.project)
    return sorted(
        (member.address, member.weight) for pool in pools for member in lb.members(pool.id)
    )


async def test_a_service_of_class_octavia_is_created_edited_and_deleted(
    cluster: Cluster, octavia_proxy: FaultProxy
) -> None:
    await cluster.set_endpoints(
        "web", ("10.244.1.1", "life-1", True), ("10.244.1.2", "life-1", True)
    )
    await cluster.apply("web", loadBalancerClass=OCTAVIA)
    (address,) = await cluster.addresses("web")
    shown = await cluster.kubectl.service("web")
    assert shown["status"]["loadBalancer"]["ingress"][0]["ipMode"] == "VIP"
    await cluster.described(
        "web",
        "CreatedLoadBalancer",
        "of provider amphora",
        "EnsuredLoadBalancer",
        "ClientAddressHidden",
    )
    await cluster.has("web", Programmed="True/Programmed", Ready="True/EndpointsReady")
    assert await members(octavia_proxy) == [("192.0.2.1", 2)]

    await cluster.set_endpoints(
        "web", ("10.244.1.1", "life-1", True), ("10.244.2.1", "life-2", True)
    )

    async def moved() -> bool:
        return await members(octavia_proxy) == [("192.0.2.1", 1), ("192.0.2.2", 1)]

    await until(moved, "the member on the second node")
    await cluster.kubectl(
        "annotate", "service", "web", "loadbalancer.openstack.org/proxy-protocol=true"
    )

    async def by_header() -> bool:
        status = (await cluster.kubectl.service("web"))["status"]["loadBalancer"]["ingress"]
        return [(each["ip"], each["ipMode"]) for each in status] == [(address, "Proxy")]

    await until(by_header, "ipMode Proxy")
    # Another Service has another class. Each loop processes only the Services of its class.
    await cluster.apply("plain", loadBalancerClass="fairlead.io/direct")
    assert (await cluster.addresses("plain")) != [address]
    await cluster.has("plain", Programmed="True/Programmed")
    await cluster.kubectl("delete", "service", "web", "plain", "--timeout=120s")
    lb = clients.without_auth(octavia=octavia_proxy.url).load_balancer
    assert list(lb.load_balancers(project_id=octavia_proxy.project)) == []
    assert [
        str(call) for call in octavia_proxy.writes if "POST /v2/lbaas/loadbalancers" in str(call)
    ] == ["POST /v2/lbaas/loadbalancers"]


async def test_a_restarted_controller_changes_nothing_in_the_cloud(
    cluster: Cluster, octavia_proxy: FaultProxy
) -> None:
    await cluster.apply("web", loadBalancerClass=OCTAVIA)
    await cluster.addresses("web")
    await cluster.stop_controller()
    writes = len(octavia_proxy.writes)
    await cluster.start_controller()
    await cluster.apply("later", loadBalancerClass="fairlead.io/direct")
    await cluster.addresses("later")
    await cluster.has("web", Programmed="True/Programmed")
    assert len(octavia_proxy.writes) == writes


async def test_an_unreachable_cloud_is_reported_and_delays_no_other_class(
    cluster: Cluster, octavia_proxy: FaultProxy
) -> None:
    await cluster.stop_controller()
    octavia_proxy.fault = lambda _: ErrorResponse(503, "in maintenance")
    await cluster.start_controller()
    await cluster.apply("web", loadBalancerClass=OCTAVIA)
    await cluster.apply("plain", loadBalancerClass="fairlead.io/direct")
    await cluster.addresses("plain")
    await cluster.has("plain", Programmed="True/Programmed")
    await cluster.described("web", "SyncLoadBalancerFailed", "GET /lbaas/loadbalancers")
    await cluster.has("web", Programmed="False/Unavailable")
    octavia_proxy.forward_all()
    await cluster.addresses("web")


async def test_an_impossible_request_is_refused_with_a_remedy(cluster: Cluster) -> None:
    await cluster.stop_controller()
    assert cluster.octavia is not None
    cluster.octavia = msgspec.structs.replace(cluster.octavia, provider="ovn")
    await cluster.start_controller()
    annotations = {"loadbalancer.openstack.org/proxy-protocol": "true"}
    await cluster.apply("web", loadBalancerClass=OCTAVIA, annotations=annotations)
    await cluster.has("web", Accepted="False/Refused")
    await cluster.described(
        "web", "pods see the client's own address, and get no header", "octavia-provider: amphora"
    )
    await cluster.kubectl("annotate", "service", "web", "fairlead.io/octavia-provider=amphora")
    await cluster.addresses("web")


async def test_a_plan_from_before_the_cloud_was_read_is_replaced(
    cluster: Cluster, octavia_proxy: FaultProxy
) -> None:
    """The load balancer has a provider that new load balancers do not get, and uses a feature that
    the default provider lacks. The test is repeated with a cloud that can be read only some time
    after the start."""
    await cluster.apply(
        "web",
        loadBalancerClass=OCTAVIA,
        annotations={"loadbalancer.openstack.org/proxy-protocol": "true"},
    )
    (address,) = await cluster.addresses("web")
    await cluster.stop_controller()
    assert cluster.octavia is not None
    cluster.octavia = msgspec.structs.replace(cluster.octavia, provider="ovn")
    await cluster.start_controller()
    await cluster.apply(
        "web",
        loadBalancerClass=OCTAVIA,
        annotations={"loadbalancer.openstack.org/proxy-protocol": "v2"},
    )
    await cluster.has("web", Accepted="True/Accepted", Programmed="True/Programmed")
    assert await cluster.addresses("web") == [address]
    await cluster.stop_controller()
    octavia_proxy.fault = lambda _: ErrorResponse(503, "in maintenance")
    await cluster.start_controller()
    await cluster.has("web", Accepted="False/Refused")
    octavia_proxy.forward_all()
    await cluster.has("web", Accepted="True/Accepted", Programmed="True/Programmed")
    assert await cluster.addresses("web") == [address]


async def test_without_a_cloud_services_are_refused_and_none_is_lost(
    cluster: Cluster, octavia_proxy: FaultProxy
) -> None:
    await cluster.apply("web", loadBalancerClass=OCTAVIA)
    await cluster.addresses("web")
    await cluster.stop_controller()
    cluster.octavia, there = None, cluster.octavia
    await cluster.start_controller()
    await cluster.apply("new", loadBalancerClass=OCTAVIA)
    await cluster.described("new", "class fairlead.io/octavia is not configured")
    await cluster.kubectl("delete", "service", "web", "--wait=false")
    await cluster.described(
        "web",
        "may still have a load balancer of class fairlead.io/octavia",
        "restore the section until",
    )
    await cluster.stop_controller()
    cluster.octavia = there
    await cluster.start_controller()
    await cluster.addresses("new")
    await cluster.kubectl("wait", "--for=delete", "service/web", "--timeout=120s")
    lb = clients.without_auth(octavia=octavia_proxy.url).load_balancer
    assert len(list(lb.load_balancers(project_id=octavia_proxy.project))) == 1
