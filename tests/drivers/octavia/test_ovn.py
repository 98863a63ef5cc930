"""What provider ovn writes into a real OVN for Fairlead's load balancers."""

from typing import Any

import msgspec
import pytest
from tests.drivers.octavia import occm
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import listener, service
from tests.openstack import clients
from tests.openstack.cloud import NODES
from tests.openstack.fault_proxy import Response

from fairlead.drivers.octavia.balancers import ACTIVE
from fairlead.model import LoadBalancer, Member, OctaviaChecks, SharedOrAdopted


def nodes(*names: str) -> list[Member]:
    return [Member(name, NODES[name], 1, "active") for name in names]


def members_by_vip(site: CloudSite, balancer: str) -> dict[str, tuple[str, bool]]:
    """Return, for each address and port to which clients connect, the members, and whether OVN
    probes them on behalf of that address."""
    probed_vips = {
        row["_uuid"]: row["vip"] for row in site.openstack.ovn.rows("Load_Balancer_Health_Check")
    }
    found: dict[str, tuple[str, bool]] = {}
    for row in site.openstack.ovn.rows("Load_Balancer"):
        if row["name"] == balancer:
            ids: Any = row["health_check"]
            on = {probed_vips.get(each, "") for each in (ids if isinstance(ids, list) else [ids])}
            found |= {vip: (members, vip in on) for vip, members in row["vips"].items()}
    return found


@pytest.mark.soak
async def test_the_health_monitor_also_covers_the_floating_ip(cloud_site: CloudSite) -> None:
    """Launchpad 1956035: with a monitor that covers only one address, clients of the other address
    reach failed members. The floating IP is attached at creation or later."""
    site = cloud_site
    two, three = nodes("node1", "node2"), nodes("node1", "node2", "node3")
    for start in ([], [service(listener(80, *two), octavia=site.settings())]):
        for each in start:
            await site.reconcile(each)
        site.clear_calls()
        await site.reconcile(service(listener(80, *two), octavia=site.with_floating_ip()))
        # The floating IP is attached last, and monitors stay as they were created.
        assert (site.writes, site.neutron_writes) == (
            [] if start else ["POST loadbalancers"],
            ["POST floatingips"],
        )
        tree = await site.tree()
        members = "10.1.0.11:30080,10.1.0.12:30080"
        expected = {f"{address}:80": (members, True) for address in tree.shown}
        assert len(expected) == 2
        clients.wait_until(
            lambda tree=tree, expected=expected: members_by_vip(site, tree.id) == expected  # type: ignore[misc]
        )
        site.clear_calls()
        # Adding a node is one write, which covers both addresses.
        await site.reconcile(service(listener(80, *three), octavia=site.with_floating_ip()))
        assert (site.writes, site.neutron_writes) == (["POST pools/_/members"], [])
        more = {f"{address}:80": (f"{members},10.1.0.13:30080", True) for address in tree.shown}
        clients.wait_until(lambda tree=tree, more=more: members_by_vip(site, tree.id) == more)  # type: ignore[misc]
        await site.reconcile()
        assert members_by_vip(site, tree.id) == {}


def remove_floating_ip_from_monitor(site: CloudSite, balancer: str, address: str) -> None:
    """Leave OVN in the state in which a provider ovn older than 2023 leaves it: members are not
    probed on behalf of this address."""
    for row in site.openstack.ovn.rows("Load_Balancer_Health_Check"):
        if row["vip"].startswith(address):
            holder = next(
                each
                for each in site.openstack.ovn.rows("Load_Balancer")
                if row["_uuid"] in each["health_check"]
            )
            site.openstack.ovn.control(
                "nb", "remove", "Load_Balancer", holder["_uuid"], "health_check", row["_uuid"]
            )
    probed = {vip for vip, (_, probed) in members_by_vip(site, balancer).items() if probed}
    assert not any(vip.startswith(address) for vip in probed)
    assert probed


async def check_monitors_are_recreated_once(site: CloudSite, wanted: LoadBalancer) -> None:
    """Check that the health monitors of two listeners have been recreated, once each."""
    tree = await site.tree()
    assert [write for write in site.writes if "healthmonitors" in write] == [
        "DELETE healthmonitors/_",
        "POST healthmonitors",
    ] * 2
    clients.wait_until(
        lambda: (
            len(probed := members_by_vip(site, tree.id)) == 4
            and all(each for _, each in probed.values())
        )
    )
    for _ in range(2):
        site.restart()
        site.clear_calls()
        await site.driver.read(None)
        assert (await site.reconcile(wanted), site.writes, site.neutron_writes) == ([], [], [])


@pytest.mark.soak
async def test_monitors_are_recreated_if_an_old_provider_does_not_cover_the_floating_ip(
    cloud_site: CloudSite,
) -> None:
    """According to its API version, the release is older than 2023. There, a monitor covers only
    addresses that exist when it is created."""
    site = cloud_site
    links = [{"rel": "self", "href": f"{site.proxy.url}/v2"}]
    versions = [{"id": id_, "status": "CURRENT", "links": links} for id_ in ("v2.0", "v2.26")]
    site.proxy.fault = lambda call: Response({"versions": versions}) if call.path == "/" else None
    ports = [listener(port, *nodes("node1")) for port in (80, 443)]
    await site.reconcile(service(*ports, octavia=site.settings()))
    tree = await site.tree()
    outside = site.create_floating_ip(port_id=tree.port_id).floating_ip_address
    remove_floating_ip_from_monitor(site, tree.id, outside)
    wanted = service(*ports, octavia=site.with_floating_ip())
    site.restart()
    site.clear_calls()
    await site.driver.read(None)
    await site.reconcile(wanted)
    assert len(site.writes) == 4
    await check_monitors_are_recreated_once(site, wanted)
    await site.reconcile(
        service(*ports, listener(8080, *nodes("node1")), octavia=site.with_floating_ip())
    )
    assert site.writes == [
        "POST pools",
        "PUT pools/_/members",
        "POST healthmonitors",
        "POST listeners",
    ]
    # After an upgrade to a newer release, the monitors are not recreated again.
    await site.reconcile(wanted)
    site.proxy.forward_all()
    site.restart()
    site.clear_calls()
    await site.driver.read(None)
    assert (await site.reconcile(wanted), site.writes) == ([], [])
    await site.reconcile()


@pytest.mark.soak
async def test_adopted_monitors_are_recreated_once_to_cover_the_floating_ip(
    cloud_site: CloudSite,
) -> None:
    """Whatever release the cloud runs now, an older release may have created the monitors."""
    site = cloud_site
    id_ = occm.make(
        clients.without_auth(octavia=site.proxy.url),
        nodes=[NODES["node1"]],
        provider="ovn",
        subnet=site.openstack.subnet,
        address="10.1.0.77",
    )
    port = site.client.load_balancer.get_load_balancer(id_).vip_port_id
    outside = site.create_floating_ip(
        port_id=port, description=occm.FLOATING_DESCRIPTION
    ).floating_ip_address
    remove_floating_ip_from_monitor(site, id_, outside)
    adopt = SharedOrAdopted(names=(occm.NAME,))
    wanted = service(
        *(listener(port, *nodes("node1")) for port in (80, 443)),
        octavia=msgspec.structs.replace(site.with_floating_ip(), shared_or_adopted=adopt),
    )
    site.clear_calls()
    await site.reconcile(wanted)
    tree = await site.tree()
    assert (tree.id, set(tree.shown)) == (id_, {"10.1.0.77", outside})
    await check_monitors_are_recreated_once(site, wanted)
    await site.reconcile()
    assert (site.balancer_ids(), site.floating) == ([], [])


@pytest.mark.soak
async def test_a_change_of_a_monitor_leaves_no_object_pending(cloud_site: CloudSite) -> None:
    """Provider ovn would leave the load balancer pending if an existing monitor were updated."""
    site = cloud_site
    await site.reconcile(service(listener(80, *nodes("node1")), octavia=site.settings()))
    site.clear_calls()
    assert (
        await site.reconcile(
            service(
                listener(80, *nodes("node1")),
                octavia=site.settings(checks=OctaviaChecks(delay_s=9)),
            )
        )
        == []
    )
    assert site.writes == ["DELETE healthmonitors/_", "POST healthmonitors"]
    tree = await site.tree()
    assert {
        tree.status,
        *(each.status for each in tree.listeners),
        *(each.status for each in tree.pools),
    } == {ACTIVE}
    assert [
        row["options"]["interval"] for row in site.openstack.ovn.rows("Load_Balancer_Health_Check")
    ] == ["9"]
    await site.reconcile()


@pytest.mark.soak
async def test_session_affinity_is_configured_in_ovn(cloud_site: CloudSite) -> None:
    """UDP pools have a timeout, TCP pools use another algorithm. This holds for a load balancer
    that is created with affinity, and for an existing one."""
    site, members = cloud_site, nodes("node1", "node2")
    listeners = [listener(80, *members), listener(53, *members, protocol="UDP")]

    def wanted(affinity_s: int) -> LoadBalancer:
        return service(*listeners, octavia=site.settings(), affinity_timeout_s=affinity_s)

    def selection(balancer: str) -> dict[str, tuple[set[str], str | None]]:
        rows = [row for row in site.openstack.ovn.rows("Load_Balancer") if row["name"] == balancer]
        return {
            row["protocol"]: (set(row["selection_fields"]), row["options"].get("affinity_timeout"))
            for row in rows
        }

    addresses, all_fields = {"ip_src", "ip_dst"}, {"ip_src", "ip_dst", "tp_src", "tp_dst"}
    without_affinity = {"tcp": (all_fields, None), "udp": (all_fields, None)}
    for affinity_s, timeout in ((86400, "65535"), (0, None), (600, "600"), (900, "900")):
        await site.reconcile(wanted(affinity_s))
        tree = await site.tree()
        expected = (
            {"tcp": (addresses, None), "udp": (all_fields, timeout)}
            if affinity_s
            else without_affinity
        )
        clients.wait_until(lambda tree=tree, expected=expected: selection(tree.id) == expected)  # type: ignore[misc]
        assert await site.remaining_steps(wanted(affinity_s)) == []
    await site.reconcile()
