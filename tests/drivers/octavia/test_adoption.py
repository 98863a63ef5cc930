"""Load balancers of cloud-provider-openstack (OCCM) are adopted at a real Octavia. Adoption changes
only marks, and must be configured."""

import asyncio

import pytest
from tests.drivers.octavia import occm
from tests.drivers.octavia.conftest import StoringRecorder
from tests.drivers.octavia.site import WEB, Site, listener, member, service, settings
from tests.openstack import clients
from tests.openstack.fault_proxy import Disconnect

from fairlead.drivers.octavia.balancers import BalancerState
from fairlead.drivers.octavia.read import read_at
from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.model import LoadBalancer, OctaviaSettings, SharedOrAdopted

NAMES = (occm.NAME, "auidweb")
ADOPT = SharedOrAdopted(names=NAMES)


def like_occm(
    shared_or_adopted: SharedOrAdopted | None = ADOPT, **fields: object
) -> OctaviaSettings:
    return settings(shared_or_adopted=shared_or_adopted, monitor_types=(("TCP", "TCP"),), **fields)


def wanted(*numbers: int, shared_or_adopted: SharedOrAdopted | None = ADOPT) -> LoadBalancer:
    nodes = [member(number) for number in numbers or (1, 2)]
    return service(
        listener(80, *nodes), listener(443, *nodes), octavia=like_occm(shared_or_adopted)
    )


async def before(site: Site, id_: str) -> BalancerState:
    (tree,) = await read_at(site.cloud, site.owner, id_, (WEB, "uid-web"), NAMES)
    return tree


def balancers(site: Site) -> list[str]:
    client = clients.without_auth(octavia=site.proxy.url).load_balancer
    return [each.id for each in client.load_balancers(project_id=site.proxy.project)]


async def test_adoption_changes_only_the_marks_of_a_load_balancer(
    site: Site, recorder: StoringRecorder
) -> None:
    id_ = occm.make(clients.without_auth(octavia=site.proxy.url))
    ids = occm.ids(await before(site, id_))
    site.clear_calls()
    await site.reconcile(wanted())
    # Only marks change: one write for each object that can have tags.
    parts = ["PUT pools/_", "PUT healthmonitors/_", "PUT listeners/_"]
    assert site.writes == [*parts, *parts, "PUT loadbalancers/_"]
    tree = await site.tree()
    assert occm.ids(tree) == ids
    assert (tree.ownership, tree.others, tree.description) == ("own", 0, occm.DESCRIPTION)
    assert occm.NAME in tree.tags
    assert site.planned(wanted()).addresses == ("198.51.100.77",)
    assert [reason for reason, _ in recorder.events] == ["AdoptingLoadBalancer"]
    # From now on Fairlead recognizes the load balancer by its marks, even if adoption is no longer
    # configured.
    site.restart()
    await site.driver.read(None)
    site.clear_calls()
    assert await site.reconcile(wanted()) == []
    assert await site.reconcile(wanted(1, 3, shared_or_adopted=None)) == []
    assert site.writes == ["PUT pools/_/members"] * 2
    assert balancers(site) == [id_]
    await site.reconcile()
    assert balancers(site) == []


@pytest.mark.soak
async def test_adoption_with_other_settings_changes_the_load_balancer_in_place(site: Site) -> None:
    id_ = occm.make(clients.without_auth(octavia=site.proxy.url))
    ids = occm.ids(await before(site, id_))
    site.clear_calls()
    asked = service(
        listener(80, member(1, 2)),
        listener(8080),
        octavia=settings(shared_or_adopted=ADOPT, client_ms=600_000),
    )
    await site.reconcile(asked)
    tree = await site.tree()
    assert (tree.id, tree.address) == (id_, "198.51.100.77")
    (kept,) = [each for each in tree.listeners if each.port == 80]
    assert kept.id in ids["listeners"]
    assert kept.pool_id in ids["pools"]
    assert await site.remaining_steps(asked) == []


@pytest.mark.soak
async def test_a_load_balancer_that_does_not_qualify_for_adoption_does_not_change(
    site: Site,
) -> None:
    client = clients.without_auth(octavia=site.proxy.url)
    theirs = occm.make(client)
    untouched = await before(site, theirs)
    # It has the name, but another user created it, and not for this Service.
    client.load_balancer.update_load_balancer(theirs, description="ours", tags=["x"])
    clients.wait_settled(client, theirs)
    await site.reconcile(wanted())
    assert (await site.tree()).id != theirs
    await site.reconcile()
    # OCCM created it for the Service, but adoption is not configured.
    client.load_balancer.update_load_balancer(
        theirs, description=occm.DESCRIPTION, tags=[occm.NAME]
    )
    clients.wait_settled(client, theirs)
    site.restart()
    await site.reconcile(wanted(shared_or_adopted=None))
    assert (await site.tree()).id != theirs
    await site.reconcile()
    assert balancers(site) == [theirs]
    assert occm.ids(await before(site, theirs)) == occm.ids(untouched)


@pytest.mark.soak
async def test_two_load_balancers_of_one_name_are_refused_until_the_service_names_one(
    site: Site,
) -> None:
    client = clients.without_auth(octavia=site.proxy.url)
    first, second = occm.make(client, ()), occm.make(client, ())
    with pytest.raises(Refused, match="all have the name"):
        await site.run_pass(wanted())
    asked = wanted(shared_or_adopted=SharedOrAdopted(second, NAMES))
    await site.reconcile(asked)
    assert (await site.tree()).id == second
    assert sorted(balancers(site)) == sorted([first, second])


@pytest.mark.soak
async def test_an_interrupted_adoption_is_completed(site: Site) -> None:
    """At each write of the adoption the connection breaks, and the process restarts."""
    id_ = occm.make(clients.without_auth(octavia=site.proxy.url), (80,))
    ids = occm.ids(await before(site, id_))
    asked = service(octavia=like_occm())
    for number in (1, 2, 3, 4):
        site.proxy.inject_at(1, Disconnect(after=number % 2 == 0))
        site.restart()
        # Octavia may still be working on the previous write.
        for _ in range(50):
            try:
                outcome = (await site.run_pass(asked))[WEB]
            except Conflict:
                continue
            except Unavailable:
                break
            assert outcome.state == "waiting"
            await asyncio.sleep(outcome.again_s)
        else:
            raise AssertionError
        site.proxy.forward_all()
    site.restart()
    await site.reconcile(asked)
    assert occm.ids(await site.tree()) == ids
    assert balancers(site) == [id_]
