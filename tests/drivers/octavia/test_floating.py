"""Floating IPs at a real Neutron are allocated for load balancers of a real Octavia, attached, kept
and deleted, with as few calls as possible."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from tests.drivers.octavia.cloud_site import CloudSite
from tests.drivers.octavia.site import WEB, listener, service
from tests.openstack import clients
from tests.openstack.cloud import PROJECT
from tests.openstack.fault_proxy import Disconnect

from fairlead.drivers.octavia.attach import matching_subnets
from fairlead.drivers.octavia.balancers import ERROR
from fairlead.drivers.octavia.neutron import Subnet
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.model import FloatingIpRequest, LoadBalancer


def external(site: CloudSite, **request: Any) -> LoadBalancer:
    return service(listener(80), octavia=site.with_floating_ip(**request))


async def published(site: CloudSite, wanted: LoadBalancer) -> tuple[str, ...]:
    """Return the published addresses; check that everything is as desired."""
    assert await site.remaining_steps(wanted) == []
    return site.planned(wanted).addresses


async def test_a_floating_ip_is_allocated_and_deleted_with_its_load_balancer(
    cloud_site: CloudSite,
) -> None:
    site = cloud_site
    wanted = external(site)
    assert await site.reconcile(wanted) == []
    assert (site.writes, site.neutron_writes) == (["POST loadbalancers"], ["POST floatingips"])
    (one,) = site.floating
    assert await published(site, wanted) == (one.floating_ip_address,)
    site.restart()
    site.clear_calls()
    assert await site.audit(wanted) == []
    assert (site.writes, site.neutron_writes) == ([], [])
    # The Service becomes internal and external again: the load balancer stays.
    tree = await site.tree()
    internal = service(listener(80), octavia=site.settings())
    await site.reconcile(internal)
    assert await published(site, internal) == (tree.address,)
    assert site.floating == []
    await site.reconcile(wanted)
    assert (await site.tree()).id == tree.id
    assert (site.writes, site.neutron_writes) == ([], ["DELETE floatingips/_", "POST floatingips"])
    await site.reconcile()
    assert (await site.found()).balancers == ()
    assert site.floating == []


@pytest.mark.soak
async def test_a_kept_floating_ip_is_reused_and_a_users_floating_ip_is_never_deleted(
    cloud_site: CloudSite,
) -> None:
    site = cloud_site
    await site.reconcile(external(site))
    foreign = site.create_floating_ip(description="mine")
    site.clear_calls()
    # Fairlead's floating IP is deleted when the user's is attached.
    requested = external(site, address=foreign.floating_ip_address)
    await site.reconcile(requested)
    assert site.neutron_writes == ["PUT floatingips/_", "PUT floatingips/_", "DELETE floatingips/_"]
    assert await published(site, requested) == (foreign.floating_ip_address,)
    await site.reconcile(service(listener(80), octavia=site.settings()))
    assert [(each.id, each.port_id, each.description) for each in site.floating] == [
        (foreign.id, None, "mine")
    ]
    # A floating IP that OCCM created for the Service belongs to the Service.
    of_occm = site.create_floating_ip(
        port_id=(await site.tree()).port_id,
        description=f"Floating IP for Kubernetes external service {WEB} from cluster kubernetes",
    )
    site.restart()
    kept = external(site, keep=True)
    await site.reconcile(kept)
    assert await published(site, kept) == (of_occm.floating_ip_address,)
    await site.reconcile()
    assert {each.id: each.port_id for each in site.floating} == {foreign.id: None, of_occm.id: None}
    # After a restart, the kept floating IP causes no wait, and is reused.
    await site.restart().read(None)
    assert not site.driver.has_objects(WEB)
    site.clear_calls()
    await site.reconcile(external(site))
    assert site.neutron_writes == ["PUT floatingips/_"]
    assert await published(site, external(site)) == (of_occm.floating_ip_address,)
    await site.reconcile()
    assert [each.id for each in site.floating] == [foreign.id]


@pytest.mark.soak
async def test_an_unavailable_floating_ip_is_reported_and_the_attached_one_stays(
    cloud_site: CloudSite,
) -> None:
    """The attached floating IP is deleted only when its replacement exists."""
    site = cloud_site
    await site.reconcile(external(site))
    (mine,) = site.floating
    elsewhere = site.create_floating_ip(port_id=site.openstack.nodes["node1"])
    for address, message in (
        (elsewhere.floating_ip_address, r"attached to 10\.1\.0\.11 \(port .*detach it there"),
        ("192.0.2.7", "no floating IP 192.0.2.7 in this project and region R, and it cannot"),
    ):
        with pytest.raises((Refused, Unavailable), match=message):
            await site.run_pass(external(site, address=address))
        assert site.client.network.get_ip(mine.id).port_id == (await site.tree()).port_id
    assert site.client.network.get_ip(elsewhere.id).port_id == site.openstack.nodes["node1"]


@pytest.mark.soak
async def test_an_exhausted_subnet_is_reported_and_another_matching_subnet_is_used(
    cloud_site: CloudSite,
) -> None:
    """Two subnets with one address each are selected by a pattern or by tags."""
    site, network = cloud_site, cloud_site.client.network
    await site.reconcile(service(listener(80), octavia=site.settings()))
    subnets = []
    for number in (1, 2):
        made = network.create_subnet(
            name=f"pool-{number}",
            network_id=site.openstack.external_network,
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
            await site.run_pass(external(site, subnet="nosuch"))
        held = site.create_floating_ip(subnet_id=subnets[0].id)
        with pytest.raises(
            Unavailable, match=r"No more IP addresses available.*choose another subnet"
        ):
            await site.run_pass(external(site, subnet="~l-1$"))
        await site.reconcile(external(site, subnet_tags="small"))
        assert await published(site, external(site)) == ("198.18.2.3",)
        await site.reconcile(service(listener(80), octavia=site.settings()))
        network.update_quota(site.proxy.project, floating_ips=1)
        with pytest.raises(Unavailable, match=r"Quota exceeded.*raise the project's quota"):
            await site.run_pass(external(site))
        await site.reconcile()
        network.delete_ip(held)
    finally:
        for each in network.ips(project_id=site.proxy.project):
            network.delete_ip(each)
        for subnet in subnets:
            network.delete_subnet(subnet)


@pytest.mark.soak
async def test_a_floating_ip_stays_while_its_load_balancer_is_recreated(
    cloud_site: CloudSite,
) -> None:
    """The load balancer is failed over and recreated without success. When it finally works, it has
    the same floating IP."""
    site = cloud_site
    wanted = service(listener(80), octavia=site.with_floating_ip("amphora"))
    await site.reconcile(wanted)
    before, (one,) = await site.tree(), site.floating
    served = msgspec.structs.replace(wanted, addresses=(one.floating_ip_address,))
    with site.openstack.octavia.failing("boot"):
        site.client.load_balancer.failover_load_balancer(before.id)
        assert clients.wait_settled(site.client, before.id) == ERROR
        site.restart()
        site.clear_calls()
        while "POST loadbalancers" not in site.writes:
            with suppress(FairleadError):
                await site.run_pass(served)
        (broken,) = site.balancer_ids()
        assert clients.wait_settled(site.client, broken) == ERROR
        assert site.writes == [
            "PUT loadbalancers/_/failover",
            "DELETE loadbalancers/_",
            "POST loadbalancers",
        ]
    await site.reconcile(served)
    assert (await site.tree()).id != before.id
    assert await published(site, served) == (one.floating_ip_address,)
    assert ([each.id for each in site.floating], site.neutron_writes) == (
        [one.id],
        ["PUT floatingips/_"],
    )
    await site.reconcile()


@pytest.mark.soak
async def test_a_disconnect_at_any_write_leaves_no_floating_ip_behind(
    cloud_site: CloudSite,
) -> None:
    """The connection breaks at each write in turn, before or after the write: allocation,
    replacement, change to an internal load balancer, allocation again, keep, deletion. Floating IPs
    of other users do not change."""
    site = cloud_site
    foreign = site.create_floating_ip(description="mine")
    internal = service(listener(80), octavia=site.settings())
    ours, requested, kept = (
        external(site),
        external(site, address=foreign.floating_ip_address),
        external(site, keep=True),
    )
    history = [
        (ours, 1),
        (requested, 1),
        (internal, 1),
        (ours, 0),
        (requested, 2),
        (internal, 0),
        (ours, 0),
        (requested, 3),
        (internal, 0),
    ]
    history += [(kept, 1), (ours, 1)]
    for cut in [Disconnect(after=after) for after in (True, False)]:
        for wanted, number in history:
            if number:
                site.neutron.inject_at(number, cut)
            message = await site.reconcile(wanted)
            assert bool(message) == bool(number), (cut, number, wanted)
            site.neutron.forward_all()
            assert await published(site, wanted)
            assert len(site.floating) == (2 if wanted in (ours, kept) else 1)
        site.neutron.inject_at(1, cut)
        await site.reconcile()
        assert [(each.id, each.port_id, each.description) for each in site.floating] == [
            (foreign.id, None, "mine")
        ]


@pytest.mark.parametrize(
    "requested", [True, False], ids=["of another user", "allocated by Fairlead"]
)
@pytest.mark.soak
async def test_a_floating_ip_that_was_moved_to_another_machine_stays_there(
    cloud_site: CloudSite, requested: bool
) -> None:
    """The floating IP is moved after the driver has read it. Neutron rejects a write with an old
    revision, also a deletion."""
    site, network = cloud_site, cloud_site.client.network
    wanted = (
        external(site, address=site.create_floating_ip().floating_ip_address)
        if requested
        else external(site)
    )
    await site.reconcile(wanted)
    (one,) = site.floating
    machine = site.openstack.nodes["node1"]
    network.update_ip(one, port_id=machine)
    assert any("412" in message for message in await site.reconcile())
    assert [(each.id, each.port_id) for each in site.floating] == [(one.id, machine)]
    assert (await site.found()).balancers == ()


@pytest.mark.soak
async def test_a_floating_ip_of_a_user_stays_when_the_load_balancer_is_recreated(
    cloud_site: CloudSite,
) -> None:
    """A user has attached the floating IP. The driver recognizes it by the address in the status of
    the Service, unless it is attached elsewhere."""
    site, network = cloud_site, cloud_site.client.network
    await site.reconcile(service(listener(80), octavia=site.settings()))
    one = site.create_floating_ip(port_id=(await site.tree()).port_id, description="mine")
    site.restart()
    served = msgspec.structs.replace(external(site), addresses=(one.floating_ip_address,))
    await site.reconcile(served)
    assert await published(site, served) == (one.floating_ip_address,)
    await delete_balancer(site)
    await site.reconcile(served)
    assert await published(site, served) == (one.floating_ip_address,)
    assert [(each.id, each.description) for each in site.floating] == [(one.id, "mine")]
    await delete_balancer(site)
    network.update_ip(one, port_id=site.openstack.nodes["node1"])
    await site.reconcile(served)
    (other,) = {each.floating_ip_address for each in site.floating} - {one.floating_ip_address}
    assert await published(site, served) == (other,)
    assert network.get_ip(one.id).port_id == site.openstack.nodes["node1"]


async def delete_balancer(site: CloudSite) -> None:
    """Delete the load balancer by hand, and let the driver read that."""
    tree = await site.tree()
    site.client.load_balancer.delete_load_balancer(tree.id, cascade=True)
    clients.wait_settled(site.client, tree.id)
    await site.driver.read(None)


@pytest.mark.soak
async def test_a_kept_floating_ip_stays_after_the_service_requests_another_one(
    cloud_site: CloudSite,
) -> None:
    """The kept floating IP stays whatever the Service requests later, because another Service may
    have the same name."""
    site = cloud_site
    await site.reconcile(external(site, keep=True))
    (kept,) = site.floating
    foreign = site.create_floating_ip(description="mine")
    requested = external(site, address=foreign.floating_ip_address, keep=True)
    unkept = external(site, address=foreign.floating_ip_address)
    for wanted in (requested, service(listener(80), octavia=site.settings()), unkept):
        await site.reconcile(wanted)
        assert {each.id for each in site.floating} == {kept.id, foreign.id}


@pytest.mark.parametrize(
    ("name", "tags", "wanted", "matches"),
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
async def test_subnet_patterns_and_tags_match_as_in_occm(
    name: str, tags: list[str], wanted: dict[str, Any], matches: bool
) -> None:
    subnet = Subnet("id", name, tuple(tags))
    found = await matching_subnets([subnet], FloatingIpRequest("net", **wanted))
    assert found == ([subnet] if matches else [])


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a+)+$", "takes too long"),
        ("(" * 20_000, "takes too long or too much memory"),
        ("(a", "is not a valid regular expression"),
    ],
    ids=["exponential", "nested too deep", "invalid"],
)
@pytest.mark.soak
async def test_a_regular_expression_of_a_service_is_refused_with_its_reason(
    pattern: str, why: str
) -> None:
    request = FloatingIpRequest("net", subnet="~" + pattern)
    with pytest.raises(Refused, match=why):
        await matching_subnets([Subnet("id", "a" * 60 + "!", ())], request)
