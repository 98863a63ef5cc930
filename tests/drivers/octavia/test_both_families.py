"""Services of both address families at the real providers: one load balancer with an address of
each family, and a listener for both."""

from collections.abc import Iterator

import msgspec
import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import WEB, listener, service
from tests.openstack import clients
from tests.openstack.cloud import NODES, PROJECT

from fairlead.drivers.octavia.changes import Blocked
from fairlead.model import (
    ExistingLoadBalancer,
    FloatingIpRequest,
    Listener,
    LoadBalancer,
    Member,
    OctaviaPlace,
    Protocol,
    Provider,
)

SUBNET_V6 = "fd00:1::/64"
ADDRESS_V6_OF = {name: f"fd00:1::{name[-1]}" for name in NODES}


@pytest.fixture
def subnet_v6(cloud_site: CloudSite) -> Iterator[str]:
    """An IPv6 subnet of the nodes' network, in which the nodes have addresses too."""
    network = cloud_site.client.network
    made = network.create_subnet(
        network_id=cloud_site.openstack.network, ip_version=6, cidr=SUBNET_V6, project_id=PROJECT
    )
    ipv4 = {
        name: {"subnet_id": cloud_site.openstack.subnet, "ip_address": address}
        for name, address in NODES.items()
    }
    for name, id_ in cloud_site.openstack.nodes.items():
        network.update_port(
            id_, fixed_ips=[ipv4[name], {"subnet_id": made.id, "ip_address": ADDRESS_V6_OF[name]}]
        )
    yield made.id
    clients.delete_load_balancers(cloud_site.client, cloud_site.proxy.project)
    for name, id_ in cloud_site.openstack.nodes.items():
        network.update_port(id_, fixed_ips=[ipv4[name]])
    for port in network.ports(network_id=cloud_site.openstack.network):
        if any(each["subnet_id"] == made.id for each in port.fixed_ips):
            network.delete_port(port)
    network.delete_subnet(made)


def listeners(port: int, *names: str, protocol: Protocol = "TCP") -> tuple[Listener, Listener]:
    ipv4 = listener(
        port, *(Member(name, NODES[name], 1, "active") for name in names), protocol=protocol
    )
    ipv6 = tuple(Member(name, ADDRESS_V6_OF[name], 1, "active") for name in names)
    return ipv4, msgspec.structs.replace(ipv4, family="IPv6", members=ipv6)


@pytest.mark.parametrize("provider", ["amphora", "ovn"])
@pytest.mark.soak
async def test_one_load_balancer_has_an_address_of_each_family(
    cloud_site: CloudSite, subnet_v6: str, provider: Provider
) -> None:
    site = cloud_site

    def wanted(*names: str) -> LoadBalancer:
        both = (*listeners(80, *names), *listeners(53, *names, protocol="UDP"))
        place, request = (
            OctaviaPlace(site.openstack.subnet, subnet_id_v6=subnet_v6),
            FloatingIpRequest(site.openstack.external_network),
        )
        return service(
            *both, octavia=site.settings(provider, place=place, floating=request, secured=True)
        )

    await site.reconcile(wanted("node1"))
    assert (
        site.writes.count("POST loadbalancers"),
        site.neutron_writes.count("POST floatingips"),
    ) == (1, 1)
    tree = await site.tree()
    assert await site.remaining_steps(wanted("node1")) == []
    (ipv6,) = (address for address in tree.own if ":" in address)
    (floating_ip,) = (each.address for each in tree.floating)
    assert ipv6.startswith("fd00:1::")
    assert site.planned(wanted("node1")).addresses == (floating_ip, ipv6)
    assert site.observed[WEB] == ExistingLoadBalancer(
        "uid-web", provider, (tree.address, ipv6), (floating_ip,)
    )
    # For TCP, provider amphora opens its own connections, to nodes of one family.
    members = {
        pool.protocol: sorted(each.member.address for each in pool.members) for pool in tree.pools
    }
    assert members == {
        "TCP": ["10.1.0.11"] if provider == "amphora" else ["10.1.0.11", "fd00:1::1"],
        "UDP": ["10.1.0.11", "fd00:1::1"],
    }
    if provider == "ovn":
        expected = {
            f"{tree.address}:80": "10.1.0.11:30080",
            f"{floating_ip}:80": "10.1.0.11:30080",
            f"[{ipv6}]:80": "[fd00:1::1]:30080",
        }

        def vips() -> dict[str, str]:
            rows = [
                row
                for row in site.openstack.ovn.rows("Load_Balancer")
                if (row["name"], row["protocol"]) == (tree.id, "tcp")
            ]
            return {vip: to for row in rows for vip, to in row["vips"].items()}

        clients.wait_until(lambda: vips() == expected)
    site.clear_calls()
    await site.reconcile(wanted("node1", "node2"))
    over_tcp = (
        "POST pools/_/members" if provider == "amphora" else "PUT pools/_/members"
    )  # one member, or one member of each family
    assert sorted(site.writes) == [over_tcp, "PUT pools/_/members"]
    await site.reconcile()
    assert (site.balancer_ids(), site.floating) == ([], [])


@pytest.mark.soak
async def test_an_existing_load_balancer_keeps_its_address_families(
    cloud_site: CloudSite, subnet_v6: str
) -> None:
    """Octavia cannot add an address; the Service is planned for the existing ones."""
    site = cloud_site
    await site.reconcile(service(listener(80), octavia=site.settings()))
    place = OctaviaPlace(site.openstack.subnet, subnet_id_v6=subnet_v6)
    asked = service(*listeners(80, "node1"), octavia=site.settings(place=place))
    existing = site.observed[WEB]
    assert existing is not None
    assert (existing.provider, existing.families) == ("ovn", ("IPv4",))
    (step,) = await site.remaining_steps(asked)
    assert isinstance(step, Blocked)
    assert step.outcome.state == "waiting"
    assert "the Service is planned again" in step.outcome.message
    assert "with addresses of IPv4" in step.outcome.message
