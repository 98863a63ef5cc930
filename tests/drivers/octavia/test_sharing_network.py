"""Services on one load balancer of a real Octavia, with their objects at a real Neutron: security
group rules and floating IPs. Owners and guests are created and deleted concurrently."""

import asyncio
import threading
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import listener, service, told
from tests.drivers.octavia.test_security import guarded, rules
from tests.openstack.cloud import NODES
from tests.openstack.front import Call, Fate, Front, Held

from fairlead.model import LoadBalancer, Member, OctaviaSettings, ServiceKey, SharedOrAdopted

MAIL = ServiceKey("default", "mail")
A_WHILE_S = 5.0
"""The operation would be done within this time if it did not have to wait."""


def mail(octavia: OctaviaSettings, on: str = "", **fields: Any) -> LoadBalancer:
    """Return the guest Service. `on`: the load balancer that it is to share."""
    if on:
        octavia = msgspec.structs.replace(octavia, shared_or_adopted=SharedOrAdopted(on))
    made = service(
        listener(25, Member("node1", NODES["node1"], 1, "active")),
        octavia=octavia,
        uid="uid-mail",
        **fields,
    )
    return msgspec.structs.replace(made, service=MAIL)


def wished(site: CloudSite, provider: str, *ranges: str) -> list[tuple[str, int, str]]:
    """Return the rules that a Service with these source ranges needs."""
    if provider == "amphora":
        return [("tcp", 30025, "10.1.0.0/24"), ("tcp", 32000, "10.1.0.0/24")]
    asking = site.client.network.ports(name=f"ovn-lb-hm-{site.at.subnet}")
    monitors = [f"{port.fixed_ips[0]['ip_address']}/32" for port in asking] if ranges else []
    return sorted(("tcp", 30025, source) for source in (*monitors, *(ranges or ("0.0.0.0/0",))))


def ports(site: CloudSite) -> list[int]:
    """Return the ports of all listeners."""
    return sorted(
        each.protocol_port
        for each in site.client.load_balancer.listeners(project_id=site.front.project)
    )


@pytest.mark.parametrize("provider", ["ovn", "amphora"])
async def test_nodes_let_in_whom_a_guest_wants(cloud_site: CloudSite, provider: str) -> None:
    site = cloud_site
    await site.bring(service(listener(80), octavia=site.settings(provider)))
    host = (await site.tree()).id
    secured = site.settings(provider, secured=True)
    wide, narrow = mail(secured, on=host), mail(secured, on=host, source_ranges=("192.0.2.0/24",))
    # The owner of the load balancer, a guest, and a guest with ranges are created and deleted.
    await site.bring(mail(secured), key=MAIL)
    assert rules(site) == wished(site, provider)
    for wanted, ranges in ((narrow, ["192.0.2.0/24"]), (wide, []), (narrow, ["192.0.2.0/24"])):
        await site.bring(wanted, key=MAIL)
        assert (rules(site), guarded(site)) == (wished(site, provider, *ranges), {"node1"})
    site.anew()
    await site.driver.read(None)
    site.forget()
    await site.bring(narrow, key=MAIL)
    assert site.neutron_writes == []
    # The rules exist before a member also if the Service was never elsewhere.
    await site.bring(key=MAIL)
    assert (rules(site), guarded(site)) == ([], set())
    await site.bring(narrow, key=MAIL)
    assert (rules(site), guarded(site)) == (wished(site, provider, "192.0.2.0/24"), {"node1"})
    await site.bring(key=MAIL)
    assert ports(site) == [80]


async def test_a_guest_gives_its_own_floating_ip_back_unless_it_is_kept(
    cloud_site: CloudSite,
) -> None:
    site = cloud_site
    await site.bring(service(listener(80), octavia=site.settings()))
    host = (await site.tree()).id
    given, kept = site.outside(), site.outside(keep=True)
    for settings, left in ((given, 0), (kept, 1)):
        await site.bring(mail(settings), key=MAIL)
        assert len(site.floating) == 1
        await site.bring(mail(settings, on=host), key=MAIL)
        assert [each.port_id for each in site.floating] == [None] * left
    assert ports(site) == [25, 80]
    await site.bring(mail(given, on=host), key=MAIL)
    assert [each.port_id for each in site.floating] == [
        None
        # a kept floating IP is deleted only by an explicit command
    ]


async def test_what_a_guest_has_elsewhere_stays_until_there_is_room(cloud_site: CloudSite) -> None:
    """Its port is in use on the shared load balancer."""
    site = cloud_site
    await site.bring(service(listener(25), octavia=site.settings()))
    host = (await site.tree()).id
    await site.bring(mail(site.outside()), key=MAIL)
    assert "is in use by Service default/web" in await site.tried(mail(site.outside(), on=host))
    assert (ports(site), len(site.everything()), len(site.floating)) == ([25, 25], 2, 1)


async def test_no_guest_comes_while_the_owner_goes(cloud_site: CloudSite) -> None:
    """The owner's floating IP is being detached. A guest that were served at that moment would lose
    its listener with the load balancer."""
    site = cloud_site
    await site.bring(service(listener(80), octavia=site.outside()))
    host = (await site.tree()).id
    go_on = hold(site.neutron, "DELETE floatingips/_")
    going = asyncio.create_task(site.bring())
    await reached(site.neutron, "DELETE floatingips/_")
    coming = asyncio.create_task(site.tried(mail(site.settings(), on=host)))
    await asyncio.wait([coming], timeout=A_WHILE_S)
    go_on.set()
    await going
    assert "does not exist" in await coming
    assert (site.everything(), site.floating) == ([], [])


async def test_an_owner_that_goes_while_a_guest_comes_leaves_it_the_load_balancer(
    cloud_site: CloudSite,
) -> None:
    site = cloud_site
    await site.bring(service(listener(80), octavia=site.outside()))
    host = (await site.tree()).id
    go_on = hold(site.front, "POST listeners")
    coming = asyncio.create_task(site.tried(mail(site.settings(), on=host)))
    await reached(site.front, "POST listeners")
    going = asyncio.create_task(site.bring())
    await asyncio.wait([going], timeout=A_WHILE_S)
    go_on.set()
    assert await coming == ""
    await going
    assert (ports(site), site.everything()) == ([25], [host])
    # With the last Service everything is deleted, at the next read of everything.
    await site.bring(key=MAIL)
    await site.driver.read(None)
    await site.bring()
    assert (site.everything(), site.floating) == ([], [])


def hold(front: Front, what: str) -> threading.Event:
    """Hold such calls until the event is set."""
    go_on = threading.Event()

    def fate(call: Call) -> Fate:
        return Held(partial(go_on.wait, 60)) if told(call) == what else None

    front.fate = fate
    return go_on


async def reached(front: Front, what: str) -> None:
    async with asyncio.timeout(60):
        while what not in map(told, front.writes):
            await asyncio.sleep(0.05)
