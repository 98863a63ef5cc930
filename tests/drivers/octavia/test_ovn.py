"""What provider ovn writes into a real OVN for Fairlead's load balancers."""

from typing import Any

import msgspec
from tests.drivers.octavia import occm
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import listener, service
from tests.openstack import clients
from tests.openstack.cloud import NODES
from tests.openstack.front import Said

from fairlead.drivers.octavia.balancers import ACTIVE
from fairlead.model import LoadBalancer, Member, OctaviaChecks, SharedOrAdopted


def nodes(*names: str) -> list[Member]:
    return [Member(name, NODES[name], 1, "active") for name in names]


def checked(site: CloudSite, balancer: str) -> dict[str, tuple[str, bool]]:
    """Return, for each address to which clients connect, the members, and whether OVN checks them
    on behalf of that address."""
    asking = {row["_uuid"]: row["vip"] for row in site.at.ovn.rows("Load_Balancer_Health_Check")}
    found: dict[str, tuple[str, bool]] = {}
    for row in site.at.ovn.rows("Load_Balancer"):
        if row["name"] == balancer:
            ids: Any = row["health_check"]
            on = {asking.get(each, "") for each in (ids if isinstance(ids, list) else [ids])}
            found |= {vip: (members, vip in on) for vip, members in row["vips"].items()}
    return found


async def test_members_are_asked_for_the_floating_ip_as_well(cloud_site: CloudSite) -> None:
    """Launchpad 1956035: with a monitor that covers only one address, clients of the other address
    reach failed members. The floating IP is attached at creation or later."""
    site = cloud_site
    two, three = nodes("node1", "node2"), nodes("node1", "node2", "node3")
    for start in ([], [service(listener(80, *two), octavia=site.settings())]):
        for each in start:
            await site.bring(each)
        site.forget()
        await site.bring(service(listener(80, *two), octavia=site.outside()))
        # The floating IP is attached last, and monitors stay as they were created.
        assert (site.writes, site.neutron_writes) == (
            [] if start else ["POST loadbalancers"],
            ["POST floatingips"],
        )
        tree = await site.tree()
        members = "10.1.0.11:30080,10.1.0.12:30080"
        expected = {f"{address}:80": (members, True) for address in tree.shown}
        assert len(expected) == 2
        clients.until(lambda tree=tree, expected=expected: checked(site, tree.id) == expected)  # type: ignore[misc]
        site.forget()
        # Adding a node is one write, which covers both addresses.
        await site.bring(service(listener(80, *three), octavia=site.outside()))
        assert (site.writes, site.neutron_writes) == (["POST pools/_/members"], [])
        more = {f"{address}:80": (f"{members},10.1.0.13:30080", True) for address in tree.shown}
        clients.until(lambda tree=tree, more=more: checked(site, tree.id) == more)  # type: ignore[misc]
        await site.bring()
        assert checked(site, tree.id) == {}


def forget_floating(site: CloudSite, balancer: str, address: str) -> None:
    """Leave OVN as a provider ovn of before 2023 does: members are not checked on behalf of this
    address."""
    for row in site.at.ovn.rows("Load_Balancer_Health_Check"):
        if row["vip"].startswith(address):
            holder = next(
                each
                for each in site.at.ovn.rows("Load_Balancer")
                if row["_uuid"] in each["health_check"]
            )
            site.at.ovn.control(
                "nb", "remove", "Load_Balancer", holder["_uuid"], "health_check", row["_uuid"]
            )
    asked = {vip for vip, (_, asked) in checked(site, balancer).items() if asked}
    assert not any(vip.startswith(address) for vip in asked)
    assert asked


async def is_covered_once(site: CloudSite, wanted: LoadBalancer) -> None:
    """Check that monitors are recreated, one for each of two listeners, and only once."""
    tree = await site.tree()
    assert [write for write in site.writes if "healthmonitors" in write] == [
        "DELETE healthmonitors/_",
        "POST healthmonitors",
    ] * 2
    clients.until(
        lambda: (
            len(asked := checked(site, tree.id)) == 4 and all(each for _, each in asked.values())
        )
    )
    for _ in range(2):
        site.anew()
        site.forget()
        await site.driver.read(None)
        assert (await site.bring(wanted), site.writes, site.neutron_writes) == ([], [], [])


async def test_monitors_are_made_anew_where_the_provider_forgets_the_floating_ip(
    cloud_site: CloudSite,
) -> None:
    """According to its API version the release is of before 2023. Monitors that are created after
    the address cover it."""
    site = cloud_site
    links = [{"rel": "self", "href": f"{site.front.url}/v2"}]
    versions = [{"id": id_, "status": "CURRENT", "links": links} for id_ in ("v2.0", "v2.26")]
    site.front.fate = lambda call: Said({"versions": versions}) if call.path == "/" else None
    ports = [listener(port, *nodes("node1")) for port in (80, 443)]
    await site.bring(service(*ports, octavia=site.settings()))
    tree = await site.tree()
    outside = site.make_floating(port_id=tree.port_id).floating_ip_address
    forget_floating(site, tree.id, outside)
    wanted = service(*ports, octavia=site.outside())
    site.anew()
    site.forget()
    await site.driver.read(None)
    await site.bring(wanted)
    assert len(site.writes) == 4
    await is_covered_once(site, wanted)
    await site.bring(service(*ports, listener(8080, *nodes("node1")), octavia=site.outside()))
    assert site.writes == [
        "POST pools",
        "PUT pools/_/members",
        "POST healthmonitors",
        "POST listeners",
    ]
    # After an upgrade to a newer release, the address is covered as before.
    await site.bring(wanted)
    site.front.pass_on()
    site.anew()
    site.forget()
    await site.driver.read(None)
    assert (await site.bring(wanted), site.writes) == ([], [])
    await site.bring()


async def test_monitors_that_are_taken_over_are_made_anew_once_for_the_floating_ip(
    cloud_site: CloudSite,
) -> None:
    """It is unknown which release of provider ovn created the monitors, whatever the cloud runs
    now."""
    site = cloud_site
    id_ = occm.make(
        clients.without_auth(octavia=site.front.url),
        nodes=[NODES["node1"]],
        provider="ovn",
        subnet=site.at.subnet,
        address="10.1.0.77",
    )
    port = site.client.load_balancer.get_load_balancer(id_).vip_port_id
    outside = site.make_floating(
        port_id=port, description=occm.FLOATING_DESCRIPTION
    ).floating_ip_address
    forget_floating(site, id_, outside)
    take = SharedOrAdopted(names=(occm.NAME,))
    wanted = service(
        *(listener(port, *nodes("node1")) for port in (80, 443)),
        octavia=msgspec.structs.replace(site.outside(), shared_or_adopted=take),
    )
    site.forget()
    await site.bring(wanted)
    tree = await site.tree()
    assert (tree.id, set(tree.shown)) == (id_, {"10.1.0.77", outside})
    await is_covered_once(site, wanted)
    await site.bring()
    assert (site.everything(), site.floating) == ([], [])


async def test_nothing_stays_pending_when_a_monitor_changes(cloud_site: CloudSite) -> None:
    """It would stay pending if an existing monitor were updated."""
    site = cloud_site
    await site.bring(service(listener(80, *nodes("node1")), octavia=site.settings()))
    site.forget()
    assert (
        await site.bring(
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
        row["options"]["interval"] for row in site.at.ovn.rows("Load_Balancer_Health_Check")
    ] == ["9"]
    await site.bring()


async def test_affinity_reaches_ovn(cloud_site: CloudSite) -> None:
    """UDP has a time-out, TCP uses the algorithm; on a load balancer that is created with affinity
    and on an existing one."""
    site, members = cloud_site, nodes("node1", "node2")
    listeners = [listener(80, *members), listener(53, *members, protocol="UDP")]

    def wanted(affinity_s: int) -> LoadBalancer:
        return service(*listeners, octavia=site.settings(), affinity_timeout_s=affinity_s)

    def chosen(balancer: str) -> dict[str, tuple[set[str], str | None]]:
        rows = [row for row in site.at.ovn.rows("Load_Balancer") if row["name"] == balancer]
        return {
            row["protocol"]: (set(row["selection_fields"]), row["options"].get("affinity_timeout"))
            for row in rows
        }

    addresses, whole = {"ip_src", "ip_dst"}, {"ip_src", "ip_dst", "tp_src", "tp_dst"}
    free = {"tcp": (whole, None), "udp": (whole, None)}
    for affinity_s, told in ((86400, "65535"), (0, None), (600, "600"), (900, "900")):
        await site.bring(wanted(affinity_s))
        tree = await site.tree()
        expected = {"tcp": (addresses, None), "udp": (whole, told)} if affinity_s else free
        clients.until(lambda tree=tree, expected=expected: chosen(tree.id) == expected)  # type: ignore[misc]
        assert await site.left(wanted(affinity_s)) == []
    await site.bring()
