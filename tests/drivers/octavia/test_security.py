"""Access to nodes at a real Neutron: one group, with rules for each Service; other users' objects
stay."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.conftest import Heard
from tests.drivers.octavia.site import listener, service
from tests.openstack.cloud import NODES
from tests.openstack.front import Answer, Cut, Fate

from fairlead.drivers.octavia.network import RANGES
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.model import HealthMonitor, LoadBalancer, Member, OctaviaSettings, ServiceKey
from fairlead.plan.service import PROXY_HEALTH_PORT

OTHER = ServiceKey("default", "other")


def balancer(
    site: CloudSite, *names: str, provider: str = "ovn", port: int = 80, **fields: Any
) -> LoadBalancer:
    nodes = [Member(name, NODES[name], 1, "active") for name in names]
    return service(listener(port, *nodes), octavia=site.settings(provider, secured=True), **fields)


def rules(site: CloudSite) -> list[tuple[str, int, str]]:
    """Return the rules of the cluster's group."""
    groups = site.client.network.security_groups(description=site.owner.tag)
    found = [
        each
        for group in groups
        for each in site.client.network.security_group_rules(security_group_id=group.id)
    ]
    return sorted(
        (each.protocol, each.port_range_min, each.remote_ip_prefix)
        for each in found
        if each.direction == "ingress"
    )


def guarded(site: CloudSite) -> set[str]:
    """Return the nodes that have the cluster's group beside their other groups."""
    ours = {group.id for group in site.client.network.security_groups(description=site.owner.tag)}
    ports = {name: site.client.network.get_port(id_) for name, id_ in site.at.nodes.items()}
    assert all(set(port.security_group_ids) - ours for port in ports.values())
    return {name for name, port in ports.items() if ours & set(port.security_group_ids)}


async def test_nodes_let_in_whom_they_should(cloud_site: CloudSite) -> None:
    site = cloud_site
    ranges = ("192.0.2.0/24", "198.51.100.7/32")
    wanted = balancer(site, "node1", source_ranges=ranges)
    assert await site.bring(wanted) == []
    (asking,) = site.client.network.ports(name=f"ovn-lb-hm-{site.at.subnet}")
    asker = ("tcp", 30080, f"{asking.fixed_ips[0]['ip_address']}/32")
    assert rules(site) == sorted([asker, *(("tcp", 30080, each) for each in ranges)])
    assert guarded(site) == {"node1"}
    assert site.neutron_writes == [
        "POST security-groups",
        "POST security-group-rules",
        "PUT ports/_",
    ]
    site.anew()
    site.forget()
    assert await site.audit(wanted) == []
    # A node is added: its port gets the group, once.
    more = balancer(site, "node1", "node2", source_ranges=ranges)
    await site.bring(more)
    await site.bring(wanted)
    await site.bring(more)
    assert site.neutron_writes == ["PUT ports/_"]
    assert guarded(site) == {"node1", "node2"}
    # Another Service admits everyone; each Service has its own rules.
    other = balancer(site, "node1", port=81, uid="uid-other", service=OTHER)
    await site.bring(other, key=OTHER)
    everybody = balancer(site, "node1", "node2")
    for cut in (Cut(after=True), Cut(after=False)):
        site.neutron.at(1, cut)
        assert await site.bring(everybody)
        site.neutron.pass_on()
        assert rules(site) == [("tcp", 30080, "0.0.0.0/0"), ("tcp", 30081, "0.0.0.0/0")]
        await site.bring(more)
    await site.bring(key=OTHER)
    assert len(rules(site)) == 3
    site.neutron.at(2, Cut(after=True))
    await site.bring()
    assert (rules(site), guarded(site)) == ([], set())


async def test_a_node_that_is_nobodys_member_for_long_loses_the_group(
    cloud_site: CloudSite,
) -> None:
    """After two reads of everything. A node that becomes a member in between keeps the group, or
    gets it again."""
    site = cloud_site
    both, one = balancer(site, "node1", "node2"), balancer(site, "node1")
    await site.bring(both)
    await site.driver.read(None)
    await site.bring(one)
    site.forget()
    for wanted in (one, both, one, one):
        await site.driver.read(None)
        await site.bring(wanted)
        assert guarded(site) == {"node1", "node2"}
    await site.driver.read(None)
    await site.bring(one)
    assert guarded(site) == {"node1"}
    assert site.neutron_writes == ["PUT ports/_"]
    await site.driver.read(None)
    await site.bring(both)
    assert (guarded(site), site.neutron_writes) == ({"node1", "node2"}, ["PUT ports/_"] * 2)
    await site.bring()


async def test_an_amphora_reaches_nodes_from_its_own_networks(cloud_site: CloudSite) -> None:
    site = cloud_site
    await site.bring(balancer(site, "node3", provider="amphora", source_ranges=("192.0.2.0/24",)))
    assert rules(site) == [("tcp", 30080, "10.1.0.0/24"), ("tcp", 32000, "10.1.0.0/24")]
    assert guarded(site) == {"node3"}
    await site.bring()
    assert (rules(site), guarded(site)) == ([], set())


async def test_a_health_port_is_open_only_if_somebody_asks_there(cloud_site: CloudSite) -> None:
    """With policy Cluster, members are checked at the node port; without a monitor, they are not
    checked."""
    site = cloud_site
    asked = balancer(site, "node1", provider="amphora")
    assert isinstance(asked.settings, OctaviaSettings)
    over_tcp = msgspec.structs.replace(
        asked,
        health_monitor=HealthMonitor(PROXY_HEALTH_PORT, "/healthz"),
        settings=msgspec.structs.replace(asked.settings, monitor_types=(("TCP", "TCP"),)),
    )
    nobody = msgspec.structs.replace(
        asked, settings=msgspec.structs.replace(asked.settings, checks=None, monitor_types=())
    )
    health, node_port = (("tcp", each, "10.1.0.0/24") for each in (32000, 30080))
    for wanted, expected in (
        (over_tcp, [node_port]),
        (asked, [node_port, health]),
        (nobody, [node_port]),
    ):
        await site.bring(wanted)
        assert rules(site) == expected
    await site.bring()
    assert (rules(site), guarded(site)) == ([], set())


async def test_rules_that_are_in_the_way(cloud_site: CloudSite) -> None:
    """Neutron accepts each rule once. Leftover rules of the cluster are deleted; other users' rules
    are reported."""
    site, network = cloud_site, cloud_site.client.network
    web = balancer(site, "node1", provider="amphora")
    group = network.create_security_group(description=site.owner.tag)
    fields = {
        "direction": "ingress",
        "protocol": "tcp",
        "remote_ip_prefix": "10.1.0.0/24",
        "security_group_id": group.id,
    }
    for port, description in ((32000, site.owner.network_mark(OTHER)), (30080, "mine")):
        made = network.create_security_group_rule(
            port_range_min=port, port_range_max=port, description=description, **fields
        )
    for _ in range(2):
        with suppress(Conflict, Unavailable):
            # it creates the load balancer, and finds the conflicting rules
            await site.once(web)
    with pytest.raises(
        Unavailable,
        match=rf"another client has created rules in security group .*: {made.id}; delete them",
    ):
        await site.once(web)
    network.delete_security_group_rule(made.id)
    await site.bring(web)
    assert rules(site) == [("tcp", 30080, "10.1.0.0/24"), ("tcp", 32000, "10.1.0.0/24")]
    await site.bring()
    assert (rules(site), guarded(site)) == ([], set())


async def test_it_is_told_where_source_ranges_hold_nobody_off(
    cloud_site: CloudSite, heard: Heard
) -> None:
    """Another group of the nodes admits every source."""
    site, network = cloud_site, cloud_site.client.network
    group = network.create_security_group(name="everybody")
    rule = network.create_security_group_rule(
        security_group_id=group.id,
        direction="ingress",
        protocol="tcp",
        port_range_min=30000,
        port_range_max=32767,
    )
    port = site.at.nodes["node1"]
    before = list(network.get_port(port).security_group_ids)
    network.update_port(port, security_groups=[*before, group.id])
    try:
        await site.bring(balancer(site, "node1"))
        assert [reason for reason, _ in heard.events if reason == RANGES] == []
        await site.bring(balancer(site, "node1", source_ranges=("192.0.2.0/24",)))
        (said,) = [message for reason, message in heard.events if reason == RANGES]
        assert (
            f"rule {rule.id} of security group {group.id}, which nodes have as well, "
            "admits every source"
        ) in said
        await site.bring()
    finally:
        network.update_port(port, security_groups=before)
        network.delete_security_group(group)


@pytest.mark.parametrize(
    "fate", [Cut(after=False), Cut(after=True), Answer(503)], ids=["unheard", "unanswered", "503"]
)
async def test_the_last_one_leaves_nothing_whichever_write_fails(
    cloud_site: CloudSite, fate: Fate
) -> None:
    """The process dies at the write to a node's port, to another node's port and to the group; its
    successor has no memory."""
    site = cloud_site
    wanted = balancer(site, "node1", "node2")
    for number in (1, 2, 3):
        await site.bring(wanted)
        await lose(site, number, fate)
        await site.anew().read(None)
        await site.bring()
        assert list(site.client.network.security_groups(description=site.owner.tag)) == []
    # With the same driver, a Service whose pass comes before the read of everything: every node has
    # the group.
    await site.bring(wanted)
    await lose(site, 2, fate)
    await site.bring(balancer(site, "node1", "node2", uid="uid-again"))
    assert guarded(site) == {"node1", "node2"}
    await site.bring()
    assert guarded(site) == set()


async def lose(site: CloudSite, number: int, fate: Fate) -> None:
    """Delete the Service; this write to Neutron fails."""
    site.neutron.at(number, fate)
    with pytest.raises(FairleadError):
        await site.once()
    site.neutron.pass_on()
