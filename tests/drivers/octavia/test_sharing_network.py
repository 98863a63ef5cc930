"""Several Services on one load balancer of a real Octavia, with their security group rules and
floating IPs at a real Neutron. The owner of the load balancer and its guests are created and
deleted concurrently."""

import asyncio
import threading
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import listener, service, summary
from tests.drivers.octavia.test_security import nodes_with_group, rules
from tests.openstack.cloud import NODES
from tests.openstack.fault_proxy import Call, Delay, Fault, FaultProxy

from fairlead.model import LoadBalancer, Member, OctaviaSettings, ServiceKey, SharedOrAdopted

MAIL = ServiceKey("default", "mail")
UNBLOCKED_WITHIN_S = 5.0
"""An operation that is not blocked is done within this time."""


def mail(octavia: OctaviaSettings, on: str = "", **fields: Any) -> LoadBalancer:
    """Return the guest Service. `on`: the load balancer that it shares."""
    if on:
        octavia = msgspec.structs.replace(octavia, shared_or_adopted=SharedOrAdopted(on))
    made = service(
        listener(25, Member("node1", NODES["node1"], 1, "active")),
        octavia=octavia,
        uid="uid-mail",
        **fields,
    )
    return msgspec.structs.replace(made, service=MAIL)


def expected_rules(site: CloudSite, provider: str, *ranges: str) -> list[tuple[str, int, str]]:
    """Return the rules that a Service with these source ranges needs."""
    if provider == "amphora":
        return [("tcp", 30025, "10.1.0.0/24"), ("tcp", 32000, "10.1.0.0/24")]
    asking = site.client.network.ports(name=f"ovn-lb-hm-{site.openstack.subnet}")
    monitors = [f"{port.fixed_ips[0]['ip_address']}/32" for port in asking] if ranges else []
    return sorted(("tcp", 30025, source) for source in (*monitors, *(ranges or ("0.0.0.0/0",))))


def ports(site: CloudSite) -> list[int]:
    """Return the ports of all listeners."""
    return sorted(
        each.protocol_port
        for each in site.client.load_balancer.listeners(project_id=site.proxy.project)
    )


@pytest.mark.soak
@pytest.mark.parametrize("provider", ["ovn", "amphora"])
async def test_security_group_rules_admit_the_sources_of_a_guest(
    cloud_site: CloudSite, provider: str
) -> None:
    site = cloud_site
    await site.reconcile(service(listener(80), octavia=site.settings(provider)))
    host = (await site.tree()).id
    secured = site.settings(provider, secured=True)
    wide, narrow = mail(secured, on=host), mail(secured, on=host, source_ranges=("192.0.2.0/24",))
    # The Service first owns a load balancer, then is a guest with and without ranges.
    await site.reconcile(mail(secured), key=MAIL)
    assert rules(site) == expected_rules(site, provider)
    for wanted, ranges in ((narrow, ["192.0.2.0/24"]), (wide, []), (narrow, ["192.0.2.0/24"])):
        await site.reconcile(wanted, key=MAIL)
        assert (rules(site), nodes_with_group(site)) == (
            expected_rules(site, provider, *ranges),
            {"node1"},
        )
    site.restart()
    await site.driver.read(None)
    site.clear_calls()
    await site.reconcile(narrow, key=MAIL)
    assert site.neutron_writes == []
    # The rules precede the member also if the Service is a guest from the start.
    await site.reconcile(key=MAIL)
    assert (rules(site), nodes_with_group(site)) == ([], set())
    await site.reconcile(narrow, key=MAIL)
    assert (rules(site), nodes_with_group(site)) == (
        expected_rules(site, provider, "192.0.2.0/24"),
        {"node1"},
    )
    await site.reconcile(key=MAIL)
    assert ports(site) == [80]


@pytest.mark.soak
async def test_a_service_that_becomes_a_guest_releases_its_floating_ip_unless_it_is_kept(
    cloud_site: CloudSite,
) -> None:
    site = cloud_site
    await site.reconcile(service(listener(80), octavia=site.settings()))
    host = (await site.tree()).id
    given, kept = site.with_floating_ip(), site.with_floating_ip(keep=True)
    for settings, left in ((given, 0), (kept, 1)):
        await site.reconcile(mail(settings), key=MAIL)
        assert len(site.floating) == 1
        await site.reconcile(mail(settings, on=host), key=MAIL)
        assert [each.port_id for each in site.floating] == [None] * left
    assert ports(site) == [25, 80]
    await site.reconcile(mail(given, on=host), key=MAIL)
    assert [each.port_id for each in site.floating] == [
        None
        # Only an explicit command deletes a kept floating IP.
    ]


@pytest.mark.soak
async def test_a_service_keeps_its_load_balancer_until_it_can_share_the_other_one(
    cloud_site: CloudSite,
) -> None:
    """The port of the Service is in use on the other load balancer."""
    site = cloud_site
    await site.reconcile(service(listener(25), octavia=site.settings()))
    host = (await site.tree()).id
    await site.reconcile(mail(site.with_floating_ip()), key=MAIL)
    assert "is in use by Service default/web" in await site.try_pass(
        mail(site.with_floating_ip(), on=host)
    )
    assert (ports(site), len(site.balancer_ids()), len(site.floating)) == ([25, 25], 2, 1)


@pytest.mark.soak
async def test_a_guest_is_not_added_while_the_owner_is_deleted(cloud_site: CloudSite) -> None:
    """The driver is deleting the owner's floating IP. A guest that is added at this moment would
    lose its listener together with the load balancer."""
    site = cloud_site
    await site.reconcile(service(listener(80), octavia=site.with_floating_ip()))
    host = (await site.tree()).id
    release = delay(site.neutron, "DELETE floatingips/_")
    deletion = asyncio.create_task(site.reconcile())
    await received(site.neutron, "DELETE floatingips/_")
    addition = asyncio.create_task(site.try_pass(mail(site.settings(), on=host)))
    await asyncio.wait([addition], timeout=UNBLOCKED_WITHIN_S)
    release.set()
    await deletion
    assert "does not exist" in await addition
    assert (site.balancer_ids(), site.floating) == ([], [])


@pytest.mark.soak
async def test_a_load_balancer_stays_if_its_owner_is_deleted_while_a_guest_is_added(
    cloud_site: CloudSite,
) -> None:
    site = cloud_site
    await site.reconcile(service(listener(80), octavia=site.with_floating_ip()))
    host = (await site.tree()).id
    release = delay(site.proxy, "POST listeners")
    addition = asyncio.create_task(site.try_pass(mail(site.settings(), on=host)))
    await received(site.proxy, "POST listeners")
    deletion = asyncio.create_task(site.reconcile())
    await asyncio.wait([deletion], timeout=UNBLOCKED_WITHIN_S)
    release.set()
    assert await addition == ""
    await deletion
    assert (ports(site), site.balancer_ids()) == ([25], [host])
    # With the last Service everything is deleted, after the next read of everything.
    await site.reconcile(key=MAIL)
    await site.driver.read(None)
    await site.reconcile()
    assert (site.balancer_ids(), site.floating) == ([], [])


def delay(proxy: FaultProxy, what: str) -> threading.Event:
    """Delay these calls until the event is set."""
    release = threading.Event()

    def fault(call: Call) -> Fault:
        return Delay(partial(release.wait, 60)) if summary(call) == what else None

    proxy.fault = fault
    return release


async def received(proxy: FaultProxy, what: str) -> None:
    async with asyncio.timeout(60):
        while what not in map(summary, proxy.writes):
            await asyncio.sleep(0.05)
