"""Security groups at a real Neutron: the nodes have one group of the cluster, with rules for each
Service. Objects of other users do not change."""

import os
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.conftest import StoringRecorder
from tests.drivers.octavia.site import listener, service
from tests.openstack.cloud import NODES
from tests.openstack.fault_proxy import Disconnect, ErrorResponse, Fault

from fairlead.drivers.octavia.network import RANGES
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.model import HealthMonitor, LoadBalancer, Member, OctaviaSettings, ServiceKey
from fairlead.plan.service import PROXY_HEALTH_PORT

OTHER = ServiceKey("default", "other")
FAULTS: tuple[Fault, ...] = (Disconnect(after=False), Disconnect(after=True), ErrorResponse(503))
ROTATIONS = 3 if os.environ.get("FAIRLEAD_HISTORIES") else 1
"""How often the faults are tried, each time at other writes: with three, each at every write."""


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


def nodes_with_group(site: CloudSite) -> set[str]:
    """Return the nodes that have the cluster's group in addition to their other groups."""
    ours = {group.id for group in site.client.network.security_groups(description=site.owner.tag)}
    ports = {name: site.client.network.get_port(id_) for name, id_ in site.openstack.nodes.items()}
    assert all(set(port.security_group_ids) - ours for port in ports.values())
    return {name for name, port in ports.items() if ours & set(port.security_group_ids)}


async def test_the_rules_admit_the_source_ranges_and_the_health_monitor(
    cloud_site: CloudSite,
) -> None:
    site = cloud_site
    ranges = ("192.0.2.0/24", "198.51.100.7/32")
    wanted = balancer(site, "node1", source_ranges=ranges)
    assert await site.reconcile(wanted) == []
    (monitor_port,) = site.client.network.ports(name=f"ovn-lb-hm-{site.openstack.subnet}")
    from_monitor = ("tcp", 30080, f"{monitor_port.fixed_ips[0]['ip_address']}/32")
    assert rules(site) == sorted([from_monitor, *(("tcp", 30080, each) for each in ranges)])
    assert nodes_with_group(site) == {"node1"}
    assert site.neutron_writes == [
        "POST security-groups",
        "POST security-group-rules",
        "PUT ports/_",
    ]
    site.restart()
    site.clear_calls()
    assert await site.audit(wanted) == []
    # A node becomes a member: its port gets the group, once.
    more = balancer(site, "node1", "node2", source_ranges=ranges)
    await site.reconcile(more)
    await site.reconcile(wanted)
    await site.reconcile(more)
    assert site.neutron_writes == ["PUT ports/_"]
    assert nodes_with_group(site) == {"node1", "node2"}
    # Another Service admits every source. Each Service has its own rules.
    other = balancer(site, "node1", port=81, uid="uid-other", service=OTHER)
    await site.reconcile(other, key=OTHER)
    unrestricted = balancer(site, "node1", "node2")
    for cut in (Disconnect(after=True), Disconnect(after=False)):
        site.neutron.inject_at(1, cut)
        assert await site.reconcile(unrestricted)
        site.neutron.forward_all()
        assert rules(site) == [("tcp", 30080, "0.0.0.0/0"), ("tcp", 30081, "0.0.0.0/0")]
        await site.reconcile(more)
    await site.reconcile(key=OTHER)
    assert len(rules(site)) == 3
    site.neutron.inject_at(2, Disconnect(after=True))
    await site.reconcile()
    assert (rules(site), nodes_with_group(site)) == ([], set())


async def test_a_node_that_is_no_longer_a_member_loses_the_group_after_two_reads_of_everything(
    cloud_site: CloudSite,
) -> None:
    """A node that becomes a member again in the meantime keeps the group. Later it gets the group
    again."""
    site = cloud_site
    both, one = balancer(site, "node1", "node2"), balancer(site, "node1")
    await site.reconcile(both)
    await site.driver.read(None)
    await site.reconcile(one)
    site.clear_calls()
    for wanted in (one, both, one, one):
        await site.driver.read(None)
        await site.reconcile(wanted)
        assert nodes_with_group(site) == {"node1", "node2"}
    await site.driver.read(None)
    await site.reconcile(one)
    assert nodes_with_group(site) == {"node1"}
    assert site.neutron_writes == ["PUT ports/_"]
    await site.driver.read(None)
    await site.reconcile(both)
    assert (nodes_with_group(site), site.neutron_writes) == (
        {"node1", "node2"},
        ["PUT ports/_"] * 2,
    )
    await site.reconcile()


async def test_the_rules_admit_an_amphora_from_the_subnet_of_its_load_balancer(
    cloud_site: CloudSite,
) -> None:
    site = cloud_site
    await site.reconcile(
        balancer(site, "node3", provider="amphora", source_ranges=("192.0.2.0/24",))
    )
    assert rules(site) == [("tcp", 30080, "10.1.0.0/24"), ("tcp", 32000, "10.1.0.0/24")]
    assert nodes_with_group(site) == {"node3"}
    await site.reconcile()
    assert (rules(site), nodes_with_group(site)) == ([], set())


async def test_the_rules_admit_the_health_port_only_if_a_health_monitor_probes_it(
    cloud_site: CloudSite,
) -> None:
    """With policy Cluster, the health monitor probes the node port. Without a health monitor,
    nothing is probed."""
    site = cloud_site
    over_http = balancer(site, "node1", provider="amphora")
    assert isinstance(over_http.settings, OctaviaSettings)
    over_tcp = msgspec.structs.replace(
        over_http,
        health_monitor=HealthMonitor(PROXY_HEALTH_PORT, "/healthz"),
        settings=msgspec.structs.replace(over_http.settings, monitor_types=(("TCP", "TCP"),)),
    )
    unmonitored = msgspec.structs.replace(
        over_http,
        settings=msgspec.structs.replace(over_http.settings, checks=None, monitor_types=()),
    )
    health, node_port = (("tcp", each, "10.1.0.0/24") for each in (32000, 30080))
    for wanted, expected in (
        (over_tcp, [node_port]),
        (over_http, [node_port, health]),
        (unmonitored, [node_port]),
    ):
        await site.reconcile(wanted)
        assert rules(site) == expected
    await site.reconcile()
    assert (rules(site), nodes_with_group(site)) == ([], set())


async def test_conflicting_rules_of_the_cluster_are_deleted_and_those_of_others_are_reported(
    cloud_site: CloudSite,
) -> None:
    """Neutron rejects a rule that already exists in the group."""
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
            # The pass creates the load balancer, and finds the conflicting rules.
            await site.run_pass(web)
    with pytest.raises(
        Unavailable,
        match=rf"another client has created rules in security group .*: {made.id}; delete them",
    ):
        await site.run_pass(web)
    network.delete_security_group_rule(made.id)
    await site.reconcile(web)
    assert rules(site) == [("tcp", 30080, "10.1.0.0/24"), ("tcp", 32000, "10.1.0.0/24")]
    await site.reconcile()
    assert (rules(site), nodes_with_group(site)) == ([], set())


async def test_a_security_group_that_makes_source_ranges_ineffective_is_reported(
    cloud_site: CloudSite, recorder: StoringRecorder
) -> None:
    """Another security group of the nodes admits every source."""
    site, network = cloud_site, cloud_site.client.network
    group = network.create_security_group(name="unrestricted")
    rule = network.create_security_group_rule(
        security_group_id=group.id,
        direction="ingress",
        protocol="tcp",
        port_range_min=30000,
        port_range_max=32767,
    )
    port = site.openstack.nodes["node1"]
    before = list(network.get_port(port).security_group_ids)
    network.update_port(port, security_groups=[*before, group.id])
    try:
        await site.reconcile(balancer(site, "node1"))
        assert [reason for reason, _ in recorder.events if reason == RANGES] == []
        await site.reconcile(balancer(site, "node1", source_ranges=("192.0.2.0/24",)))
        (message,) = [message for reason, message in recorder.events if reason == RANGES]
        assert (
            f"rule {rule.id} of security group {group.id}, which nodes have as well, "
            "admits every source"
        ) in message
        await site.reconcile()
    finally:
        network.update_port(port, security_groups=before)
        network.delete_security_group(group)


@pytest.mark.parametrize("rotation", range(ROTATIONS))
async def test_the_deletion_of_the_last_service_leaves_nothing_whichever_write_fails(
    cloud_site: CloudSite, rotation: int
) -> None:
    """The process ends at the write to the port of a node, to the port of another node, or to the
    group. The next process has no memory."""
    site = cloud_site
    wanted = balancer(site, "node1", "node2")
    faults = (*FAULTS[rotation:], *FAULTS[:rotation])
    for number, fault in enumerate(faults, start=1):
        await site.reconcile(wanted)
        await fail_deletion(site, number, fault)
        await site.restart().read(None)
        await site.reconcile()
        assert list(site.client.network.security_groups(description=site.owner.tag)) == []
    # The same driver creates a Service again before it has read everything: every node gets the
    # group.
    await site.reconcile(wanted)
    await fail_deletion(site, 2, faults[1])
    await site.reconcile(balancer(site, "node1", "node2", uid="uid-again"))
    assert nodes_with_group(site) == {"node1", "node2"}
    await site.reconcile()
    assert nodes_with_group(site) == set()


async def fail_deletion(site: CloudSite, number: int, fault: Fault) -> None:
    """Delete the Service, with a fault at this write to Neutron."""
    site.neutron.inject_at(number, fault)
    with pytest.raises(FairleadError):
        await site.run_pass()
    site.neutron.forward_all()
