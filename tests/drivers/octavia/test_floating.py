"""Floating IPs at a real Neutron, for load balancers of a real Octavia: allocated, attached, kept
and deleted; calls are counted."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import WEB, listener, service
from tests.openstack import clients
from tests.openstack.cloud import PROJECT
from tests.openstack.front import Cut

from fairlead.drivers.octavia.attach import subnet_matches
from fairlead.drivers.octavia.balancers import ERROR
from fairlead.drivers.octavia.neutron import Subnet
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.model import FloatingIpRequest, LoadBalancer


def outside(site: CloudSite, **request: Any) -> LoadBalancer:
    return service(listener(80), octavia=site.outside(**request))


async def shown(site: CloudSite, wanted: LoadBalancer) -> tuple[str, ...]:
    """Return the published addresses; check that everything is as desired."""
    assert await site.left(wanted) == []
    return site.planned(wanted).addresses


async def test_the_life_of_a_floating_ip(cloud_site: CloudSite) -> None:
    site = cloud_site
    wanted = outside(site)
    assert await site.bring(wanted) == []
    assert (site.writes, site.neutron_writes) == (["POST loadbalancers"], ["POST floatingips"])
    (one,) = site.floating
    assert await shown(site, wanted) == (one.floating_ip_address,)
    site.anew()
    site.forget()
    assert await site.audit(wanted) == []
    assert (site.writes, site.neutron_writes) == ([], [])
    # The Service becomes internal and external again: the load balancer stays.
    tree = await site.tree()
    inside = service(listener(80), octavia=site.settings())
    await site.bring(inside)
    assert await shown(site, inside) == (tree.address,)
    assert site.floating == []
    await site.bring(wanted)
    assert (await site.tree()).id == tree.id
    assert (site.writes, site.neutron_writes) == ([], ["DELETE floatingips/_", "POST floatingips"])
    await site.bring()
    assert (await site.found()).balancers == ()
    assert site.floating == []


async def test_one_that_is_kept_is_found_again_and_one_of_somebody_is_never_given_back(
    cloud_site: CloudSite,
) -> None:
    site = cloud_site
    await site.bring(outside(site))
    theirs = site.make_floating(description="mine")
    site.forget()
    # Fairlead's floating IP is deleted when the user's is attached.
    named = outside(site, address=theirs.floating_ip_address)
    await site.bring(named)
    assert site.neutron_writes == ["PUT floatingips/_", "PUT floatingips/_", "DELETE floatingips/_"]
    assert await shown(site, named) == (theirs.floating_ip_address,)
    await site.bring(service(listener(80), octavia=site.settings()))
    assert [(each.id, each.port_id, each.description) for each in site.floating] == [
        (theirs.id, None, "mine")
    ]
    # A floating IP that OCCM created for the Service belongs to the Service.
    occms = site.make_floating(
        port_id=(await site.tree()).port_id,
        description=f"Floating IP for Kubernetes external service {WEB} from cluster kubernetes",
    )
    site.anew()
    kept = outside(site, keep=True)
    await site.bring(kept)
    assert await shown(site, kept) == (occms.floating_ip_address,)
    await site.bring()
    assert {each.id: each.port_id for each in site.floating} == {theirs.id: None, occms.id: None}
    # After a restart it causes no wait, and is found again.
    await site.anew().read(None)
    assert not site.driver.has_objects(WEB)
    site.forget()
    await site.bring(outside(site))
    assert site.neutron_writes == ["PUT floatingips/_"]
    assert await shown(site, outside(site)) == (occms.floating_ip_address,)
    await site.bring()
    assert [each.id for each in site.floating] == [theirs.id]


async def test_what_cannot_be_had_is_told_and_costs_nothing(cloud_site: CloudSite) -> None:
    """The attached floating IP stays until its replacement exists."""
    site = cloud_site
    await site.bring(outside(site))
    (mine,) = site.floating
    elsewhere = site.make_floating(port_id=site.at.nodes["node1"])
    for address, told in (
        (elsewhere.floating_ip_address, r"attached to 10\.1\.0\.11 \(port .*detach it there"),
        ("192.0.2.7", "no floating IP 192.0.2.7 in this project and region R, and it cannot"),
    ):
        with pytest.raises((Refused, Unavailable), match=told):
            await site.once(outside(site, address=address))
        assert site.client.network.get_ip(mine.id).port_id == (await site.tree()).port_id
    assert site.client.network.get_ip(elsewhere.id).port_id == site.at.nodes["node1"]


async def test_a_pool_that_is_used_up_is_told_and_the_next_one_tried(cloud_site: CloudSite) -> None:
    """Two subnets with one address each, selected by a pattern or by tags."""
    site, network = cloud_site, cloud_site.client.network
    await site.bring(service(listener(80), octavia=site.settings()))
    subnets = []
    for number in (1, 2):
        made = network.create_subnet(
            name=f"pool-{number}",
            network_id=site.at.external_network,
            ip_version=4,
            cidr=f"198.18.{number}.0/29",
            allocation_pools=[{"start": f"198.18.{number}.3", "end": f"198.18.{number}.3"}],
            is_dhcp_enabled=False,
            project_id=PROJECT,
        )
        network.set_tags(made, [f"pool-{number}", "small"])
        subnets.append(made)
    try:
        with pytest.raises(
            Refused,
            match="no subnet with name 'nosuch'; it has external, pool-1, pool-2; name a subnet",
        ):
            await site.once(outside(site, subnet="nosuch"))
        held = site.make_floating(subnet_id=subnets[0].id)
        with pytest.raises(
            Unavailable, match=r"No more IP addresses available.*choose another subnet"
        ):
            await site.once(outside(site, subnet="~l-1$"))
        await site.bring(outside(site, subnet_tags="small"))
        assert await shown(site, outside(site)) == ("198.18.2.3",)
        await site.bring(service(listener(80), octavia=site.settings()))
        network.update_quota(site.front.project, floating_ips=1)
        with pytest.raises(Unavailable, match=r"Quota exceeded.*raise the project's quota"):
            await site.once(outside(site))
        await site.bring()
        network.delete_ip(held)
    finally:
        for each in network.ips(project_id=site.front.project):
            network.delete_ip(each)
        for subnet in subnets:
            network.delete_subnet(subnet)


async def test_it_outlives_load_balancers_in_error(cloud_site: CloudSite) -> None:
    """The load balancer is failed over and recreated without success, and finally works, with the
    floating IP that already exists."""
    site = cloud_site
    wanted = service(listener(80), octavia=site.outside("amphora"))
    await site.bring(wanted)
    before, (one,) = await site.tree(), site.floating
    served = msgspec.structs.replace(wanted, addresses=(one.floating_ip_address,))
    with site.at.octavia.failing("boot"):
        site.client.load_balancer.failover_load_balancer(before.id)
        assert clients.settled(site.client, before.id) == ERROR
        site.anew()
        site.forget()
        while "POST loadbalancers" not in site.writes:
            with suppress(FairleadError):
                await site.once(served)
        (broken,) = site.everything()
        assert clients.settled(site.client, broken) == ERROR
        assert site.writes == [
            "PUT loadbalancers/_/failover",
            "DELETE loadbalancers/_",
            "POST loadbalancers",
        ]
    await site.bring(served)
    assert (await site.tree()).id != before.id
    assert await shown(site, served) == (one.floating_ip_address,)
    assert ([each.id for each in site.floating], site.neutron_writes) == (
        [one.id],
        ["PUT floatingips/_"],
    )
    await site.bring()


async def test_every_write_may_be_lost_before_or_after(cloud_site: CloudSite) -> None:
    """Each write is lost in turn: allocation, replacement, internal, allocation again, keep,
    deletion. Nothing is left over, and other users' floating IPs are unchanged."""
    site = cloud_site
    theirs = site.make_floating(description="mine")
    inside = service(listener(80), octavia=site.settings())
    ours, named, kept = (
        outside(site),
        outside(site, address=theirs.floating_ip_address),
        outside(site, keep=True),
    )
    life = [
        (ours, 1),
        (named, 1),
        (inside, 1),
        (ours, 0),
        (named, 2),
        (inside, 0),
        (ours, 0),
        (named, 3),
        (inside, 0),
    ]
    life += [(kept, 1), (ours, 1)]
    for cut in [Cut(after=after) for after in (True, False)]:
        for wanted, number in life:
            if number:
                site.neutron.at(number, cut)
            told = await site.bring(wanted)
            assert bool(told) == bool(number), (cut, number, wanted)
            site.neutron.pass_on()
            assert await shown(site, wanted)
            assert len(site.floating) == (2 if wanted in (ours, kept) else 1)
        site.neutron.at(1, cut)
        await site.bring()
        assert [(each.id, each.port_id, each.description) for each in site.floating] == [
            (theirs.id, None, "mine")
        ]


@pytest.mark.parametrize("named", [True, False], ids=["theirs", "with our mark"])
async def test_one_that_was_moved_to_another_machine_stays_there(
    cloud_site: CloudSite, named: bool
) -> None:
    """The floating IP is moved after the driver has read it. Neutron rejects writes at an old
    revision, deletions included."""
    site, network = cloud_site, cloud_site.client.network
    wanted = (
        outside(site, address=site.make_floating().floating_ip_address) if named else outside(site)
    )
    await site.bring(wanted)
    (one,) = site.floating
    machine = site.at.nodes["node1"]
    network.update_ip(one, port_id=machine)
    assert any("412" in told for told in await site.bring())
    assert [(each.id, each.port_id) for each in site.floating] == [(one.id, machine)]
    assert (await site.found()).balancers == ()


async def test_one_without_our_mark_outlives_the_load_balancer(cloud_site: CloudSite) -> None:
    """A user has attached it. It is recognized by the address that the Service shows, unless
    another Service has it."""
    site, network = cloud_site, cloud_site.client.network
    await site.bring(service(listener(80), octavia=site.settings()))
    one = site.make_floating(port_id=(await site.tree()).port_id, description="mine")
    site.anew()
    served = msgspec.structs.replace(outside(site), addresses=(one.floating_ip_address,))
    await site.bring(served)
    assert await shown(site, served) == (one.floating_ip_address,)
    await lose(site)
    await site.bring(served)
    assert await shown(site, served) == (one.floating_ip_address,)
    assert [(each.id, each.description) for each in site.floating] == [(one.id, "mine")]
    await lose(site)
    network.update_ip(one, port_id=site.at.nodes["node1"])
    await site.bring(served)
    (other,) = {each.floating_ip_address for each in site.floating} - {one.floating_ip_address}
    assert await shown(site, served) == (other,)
    assert network.get_ip(one.id).port_id == site.at.nodes["node1"]


async def lose(site: CloudSite) -> None:
    """Delete the load balancer by hand, and let the driver read that."""
    tree = await site.tree()
    site.client.load_balancer.delete_load_balancer(tree.id, cascade=True)
    clients.settled(site.client, tree.id)
    await site.driver.read(None)


async def test_one_that_is_kept_stays_when_another_has_taken_its_place(
    cloud_site: CloudSite,
) -> None:
    """It stays whatever the Service requests later, which may be another Service with the same
    name."""
    site = cloud_site
    await site.bring(outside(site, keep=True))
    (kept,) = site.floating
    theirs = site.make_floating(description="mine")
    named = outside(site, address=theirs.floating_ip_address, keep=True)
    unkept = outside(site, address=theirs.floating_ip_address)
    for wanted in (named, service(listener(80), octavia=site.settings()), unkept):
        await site.bring(wanted)
        assert {each.id for each in site.floating} == {kept.id, theirs.id}


@pytest.mark.parametrize(
    ("name", "tags", "requested", "described"),
    [
        ("pool-1", [], {"subnet": "pool-*"}, True),
        ("pool-1", [], {"subnet": "!pool-*"}, False),
        ("pool-1", [], {"subnet": "~^p.*1$"}, True),
        ("pool-1", [], {"subnet": "!~1$"}, False),
        ("pool-1", ["a"], {"subnet_tags": "a,b"}, True),
        ("pool-1", ["a"], {"subnet_tags": "&a,b"}, False),
        ("pool-1", ["a", "b"], {"subnet_tags": "a&b"}, True),
        ("pool-1", ["a"], {"subnet_tags": "!b"}, True),
        ("pool-1", ["a"], {"subnet": "pool-*", "subnet_tags": "!a"}, False),
    ],
)
def test_subnets_are_described_as_to_occm(
    name: str, tags: list[str], requested: dict[str, Any], described: bool
) -> None:
    assert (
        subnet_matches(Subnet("id", name, tuple(tags)), FloatingIpRequest("net", **requested))
        == described
    )
