"""`fairlead octavia gc` at a real Neutron: floating IPs and rules of deleted Services and clusters
are deleted; kept floating IPs and other users' objects stay."""

import uuid
from pathlib import Path

import msgspec
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import listener, service
from tests.drivers.octavia.test_leftovers import Place, placed
from tests.openstack import clients
from tests.openstack.cloud import NODES
from tests.openstack.front import Held

from fairlead.drivers.octavia.marks import Owner, cluster_marked
from fairlead.drivers.octavia.network_leftovers import (
    delete,
    find_network_leftovers,
    read_marked_at_neutron,
)
from fairlead.model import Member, ServiceKey


async def make(
    site: CloudSite, cluster: str, name: str, uid: str, port: int, *, keep: bool = False
) -> ServiceKey:
    """Create a Service with a load balancer, a floating IP and a rule. `port`: must be unique,
    because two Services cannot share a node port."""
    site.owner = Owner(cluster, "test")
    site.anew()
    key = ServiceKey("default", name)
    octavia = msgspec.structs.replace(site.outside(keep=keep), secured=True)
    member = Member("node1", NODES["node1"], 1, "active")
    wanted = service(listener(port, member), uid=uid, octavia=octavia)
    await site.bring(msgspec.structs.replace(wanted, service=key), key=key)
    return key


def lose_balancer(site: CloudSite, key: ServiceKey) -> None:
    """Delete the load balancer by hand."""
    lb = site.client.load_balancer
    for each in lb.load_balancers(
        project_id=site.front.project, tags=[f"fairlead-service={key}", site.owner.tag]
    ):
        lb.delete_load_balancer(each.id, cascade=True)
        clients.settled(site.client, each.id)


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


async def gone_things(place: Place, *ways: str) -> list[tuple[str, str]]:
    return [
        (each["service"], each["resource"]) for each in (await place.listed(*ways))["leftovers"]
    ]


async def test_floating_ips_and_rules_of_services_and_clusters_that_are_gone(
    cloud_site: CloudSite, tmp_path: Path
) -> None:
    site, dead = cloud_site, str(uuid.uuid4())
    async with placed(site, tmp_path) as place:
        theirs = site.make_floating(description="mine")
        await make(site, dead, "web", "uid-web", 80)
        lose_balancer(site, ServiceKey("default", "web"))
        await make(site, place.uid, "gone", "uid-gone", 81)
        kept = await make(site, place.uid, "kept", "uid-kept", 82, keep=True)
        await site.bring(key=kept)
        await make(site, place.uid, "lives", await place.live("lives"), 83)
        assert (at_neutron(site, place.uid), at_neutron(site, dead)) == ((2, 1, 2), (1, 1, 1))

        found = await place.listed()
        things = [
            ("default/gone", each)
            for each in ("load balancer", "floating IP", "1 security-group rules")
        ]
        assert [(each["service"], each["resource"]) for each in found["leftovers"]] == things
        assert {"cluster": dead, "load_balancers": 0, "names": [], "network": 2} in found[
            "other_clusters"
        ]
        found = await place.listed("--delete")
        assert [each["deleted"] for each in found["leftovers"]] == [True] * 3
        assert await gone_things(place) == []
        assert (at_neutron(site, place.uid), at_neutron(site, dead)) == ((1, 1, 1), (1, 1, 1))

        # An existing cluster does not need a group without rules.
        key = ServiceKey("default", "lives")
        await site.anew().read(None)
        await site.bring(key=key)
        site.client.network.create_security_group(description=Owner(place.uid, "").tag)
        assert [
            (each["resource"], each["reason"])
            for each in (await place.listed("--delete"))["leftovers"]
        ] == [("security group", "no Service has a rule in it")]
        assert at_neutron(site, place.uid) == (0, 0, 0)
        await make(site, place.uid, "lives", "uid-lives", 83)

        of_dead = [("default/web", "floating IP"), ("default/web", "1 security-group rules")]
        assert await gone_things(place, "--cluster", dead, "--delete") == of_dead
        assert at_neutron(site, dead) == (0, 0, 0)
        # Of a deleted cluster everything is deleted, except kept floating IPs and other users'
        # objects.
        everything = [("default/lives", resource) for _, resource in things]
        assert await gone_things(place, "--cluster", place.uid, "--delete") == everything
        assert at_neutron(site, place.uid) == (0, 0, 0)
        left = {each.id: each.description for each in site.floating}
        assert left.pop(theirs.id) == "mine"
        assert [each.endswith(" fairlead-keep") for each in left.values()] == [True]
        # With --kept, kept floating IPs are deleted too.
        assert await gone_things(place, "--kept", "--delete") == [
            ("default/kept", "floating IP, kept")
        ]
        assert [each.id for each in site.floating] == [theirs.id]


async def test_one_that_is_led_elsewhere_at_the_same_moment_stays(cloud_site: CloudSite) -> None:
    site, network, machine = cloud_site, cloud_site.client.network, cloud_site.at.nodes["node1"]
    one = site.make_floating(description=site.owner.network_mark(ServiceKey("default", "gone")))
    (leftover,) = find_network_leftovers(
        await read_marked_at_neutron(site.cloud, site.owner), site.owner, (), ()
    )
    site.neutron.at(1, Held(lambda: network.update_ip(one, port_id=machine)))
    assert "412" in await delete(site.cloud, leftover)
    assert [(each.id, each.port_id) for each in site.floating] == [(one.id, machine)]
