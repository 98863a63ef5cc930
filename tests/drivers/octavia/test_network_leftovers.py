"""`fairlead octavia gc` at a real Neutron: floating IPs and security group rules of deleted
Services and clusters are deleted. Kept floating IPs and objects of other users do not change."""

import uuid
from pathlib import Path

import msgspec
import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import listener, service
from tests.drivers.octavia.test_leftovers import Place, placed
from tests.openstack import clients
from tests.openstack.cloud import NODES
from tests.openstack.fault_proxy import Delay

from fairlead.drivers.octavia.marks import Owner, cluster_marked
from fairlead.drivers.octavia.network_leftovers import (
    delete,
    find_network_leftovers,
    read_marked_at_neutron,
)
from fairlead.model import Member, ServiceKey

pytestmark = pytest.mark.soak


async def make(
    site: CloudSite, cluster: str, name: str, uid: str, port: int, *, keep: bool = False
) -> ServiceKey:
    """Create the load balancer, floating IP and rule of a Service. `port` must be unique, because
    two Services cannot share a node port."""
    site.owner = Owner(cluster, "test")
    site.restart()
    key = ServiceKey("default", name)
    octavia = msgspec.structs.replace(site.with_floating_ip(keep=keep), secured=True)
    member = Member("node1", NODES["node1"], 1, "active")
    wanted = service(listener(port, member), uid=uid, octavia=octavia)
    await site.reconcile(msgspec.structs.replace(wanted, service=key), key=key)
    return key


def delete_balancer(site: CloudSite, key: ServiceKey) -> None:
    """Delete the load balancer by hand."""
    lb = site.client.load_balancer
    for each in lb.load_balancers(
        project_id=site.proxy.project, tags=[f"fairlead-service={key}", site.owner.tag]
    ):
        lb.delete_load_balancer(each.id, cascade=True)
        clients.wait_settled(site.client, each.id)


def at_neutron(site: CloudSite, cluster: str) -> tuple[int, int, int]:
    """Count the cluster's objects: floating IPs without kept ones, security groups, and their
    rules."""
    network = site.client.network
    groups = list(network.security_groups(description=Owner(cluster, "").tag))
    rules = [
        each
        for group in groups
        for each in network.security_group_rules(security_group_id=group.id)
    ]
    floating = [each for each in site.floating if cluster_marked(each.description) == cluster]
    return len(floating), len(groups), len([each for each in rules if each.direction == "ingress"])


async def leftovers(place: Place, *options: str) -> list[tuple[str, str]]:
    return [
        (each["service"], each["resource"]) for each in (await place.listed(*options))["leftovers"]
    ]


async def test_floating_ips_and_rules_of_deleted_services_and_clusters_are_deleted(
    cloud_site: CloudSite, tmp_path: Path
) -> None:
    site, other_cluster = cloud_site, str(uuid.uuid4())
    async with placed(site, tmp_path) as place:
        foreign = site.create_floating_ip(description="mine")
        await make(site, other_cluster, "web", "uid-web", 80)
        delete_balancer(site, ServiceKey("default", "web"))
        await make(site, place.uid, "gone", "uid-gone", 81)
        kept = await make(site, place.uid, "kept", "uid-kept", 82, keep=True)
        await site.reconcile(key=kept)
        await make(site, place.uid, "exists", await place.create_service("exists"), 83)
        assert (at_neutron(site, place.uid), at_neutron(site, other_cluster)) == (
            (2, 1, 2),
            (1, 1, 1),
        )

        found = await place.listed()
        parts = [
            ("default/gone", each)
            for each in ("load balancer", "floating IP", "1 security-group rules")
        ]
        assert [(each["service"], each["resource"]) for each in found["leftovers"]] == parts
        assert {"cluster": other_cluster, "load_balancers": 0, "names": [], "network": 2} in found[
            "other_clusters"
        ]
        found = await place.listed("--delete")
        assert [each["deleted"] for each in found["leftovers"]] == [True] * 3
        assert await leftovers(place) == []
        assert (at_neutron(site, place.uid), at_neutron(site, other_cluster)) == (
            (1, 1, 1),
            (1, 1, 1),
        )

        # A group without rules is a leftover, also of an existing cluster.
        key = ServiceKey("default", "exists")
        await site.restart().read(None)
        await site.reconcile(key=key)
        site.client.network.create_security_group(description=Owner(place.uid, "").tag)
        assert [
            (each["resource"], each["reason"])
            for each in (await place.listed("--delete"))["leftovers"]
        ] == [("security group", "no Service has a rule in it")]
        assert at_neutron(site, place.uid) == (0, 0, 0)
        await make(site, place.uid, "exists", "uid-exists", 83)

        of_other_cluster = [
            ("default/web", "floating IP"),
            ("default/web", "1 security-group rules"),
        ]
        assert await leftovers(place, "--cluster", other_cluster, "--delete") == of_other_cluster
        assert at_neutron(site, other_cluster) == (0, 0, 0)
        # Of a deleted cluster everything is deleted, except kept floating IPs and other users'
        # objects.
        everything = [("default/exists", goes) for _, goes in parts]
        assert await leftovers(place, "--cluster", place.uid, "--delete") == everything
        assert at_neutron(site, place.uid) == (0, 0, 0)
        left = {each.id: each.description for each in site.floating}
        assert left.pop(foreign.id) == "mine"
        assert [each.endswith(" fairlead-keep") for each in left.values()] == [True]
        # With --kept, kept floating IPs are deleted too.
        assert await leftovers(place, "--kept", "--delete") == [
            ("default/kept", "floating IP, kept")
        ]
        assert [each.id for each in site.floating] == [foreign.id]


async def test_a_floating_ip_that_is_attached_to_a_machine_at_this_moment_is_not_deleted(
    cloud_site: CloudSite,
) -> None:
    site, network, machine = (
        cloud_site,
        cloud_site.client.network,
        cloud_site.openstack.nodes["node1"],
    )
    one = site.create_floating_ip(
        description=site.owner.network_mark(ServiceKey("default", "gone"))
    )
    (leftover,) = find_network_leftovers(
        await read_marked_at_neutron(site.cloud, site.owner), site.owner, (), ()
    )
    site.neutron.inject_at(1, Delay(lambda: network.update_ip(one, port_id=machine)))
    assert "412" in await delete(site.cloud, leftover)
    assert [(each.id, each.port_id) for each in site.floating] == [(one.id, machine)]
