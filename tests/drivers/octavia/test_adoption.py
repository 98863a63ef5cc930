"""Load balancers of cloud-provider-openstack are adopted at a real Octavia without other changes,
and only if the configuration requests it."""

import asyncio

import pytest
from tests.drivers.octavia import occm
from tests.drivers.octavia.conftest import Heard
from tests.drivers.octavia.site import WEB, Site, listener, member, service, settings
from tests.openstack import clients
from tests.openstack.front import Cut

from fairlead.drivers.octavia.balancers import BalancerState
from fairlead.drivers.octavia.read import read_at
from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.model import LoadBalancer, OctaviaSettings, SharedOrAdopted

NAMES = (occm.NAME, "auidweb")
TAKE = SharedOrAdopted(names=NAMES)


def like_occm(
    shared_or_adopted: SharedOrAdopted | None = TAKE, **fields: object
) -> OctaviaSettings:
    return settings(shared_or_adopted=shared_or_adopted, monitor_types=(("TCP", "TCP"),), **fields)


def wanted(*numbers: int, shared_or_adopted: SharedOrAdopted | None = TAKE) -> LoadBalancer:
    nodes = [member(number) for number in numbers or (1, 2)]
    return service(
        listener(80, *nodes), listener(443, *nodes), octavia=like_occm(shared_or_adopted)
    )


async def before(site: Site, id_: str) -> BalancerState:
    (tree,) = await read_at(site.cloud, site.owner, id_, (WEB, "uid-web"), NAMES)
    return tree


def balancers(site: Site) -> list[str]:
    client = clients.without_auth(octavia=site.front.url).load_balancer
    return [each.id for each in client.load_balancers(project_id=site.front.project)]


async def test_it_is_taken_over_as_it_is(site: Site, heard: Heard) -> None:
    id_ = occm.make(clients.without_auth(octavia=site.front.url))
    ids = occm.ids(await before(site, id_))
    site.forget()
    await site.bring(wanted())
    # Only marks change: one write for each object that can have tags.
    parts = ["PUT pools/_", "PUT healthmonitors/_", "PUT listeners/_"]
    assert site.writes == [*parts, *parts, "PUT loadbalancers/_"]
    tree = await site.tree()
    assert occm.ids(tree) == ids
    assert (tree.ownership, tree.others, tree.description) == ("own", 0, occm.DESCRIPTION)
    assert occm.NAME in tree.tags
    assert site.planned(wanted()).addresses == ("198.51.100.77",)
    assert [reason for reason, _ in heard.events] == ["AdoptingLoadBalancer"]
    # From now on Fairlead recognizes the load balancer by its marks, whatever the configuration
    # says.
    site.anew()
    await site.driver.read(None)
    site.forget()
    assert await site.bring(wanted()) == []
    assert await site.bring(wanted(1, 3, shared_or_adopted=None)) == []
    assert site.writes == ["PUT pools/_/members"] * 2
    assert balancers(site) == [id_]
    await site.bring()
    assert balancers(site) == []


async def test_what_fits_stays_and_the_rest_is_changed_in_place(site: Site) -> None:
    id_ = occm.make(clients.without_auth(octavia=site.front.url))
    ids = occm.ids(await before(site, id_))
    site.forget()
    asked = service(
        listener(80, member(1, 2)),
        listener(8080),
        octavia=settings(shared_or_adopted=TAKE, client_ms=600_000),
    )
    await site.bring(asked)
    tree = await site.tree()
    assert (tree.id, tree.address) == (id_, "198.51.100.77")
    (kept,) = [each for each in tree.listeners if each.port == 80]
    assert kept.id in ids["listeners"]
    assert kept.pool_id in ids["pools"]
    assert await site.left(asked) == []


async def test_a_load_balancer_that_is_not_wished_for_is_left_alone(site: Site) -> None:
    client = clients.without_auth(octavia=site.front.url)
    theirs = occm.make(client)
    untouched = await before(site, theirs)
    # It has the name, but was made by another user and not for this Service.
    client.load_balancer.update_load_balancer(theirs, description="ours", tags=["x"])
    clients.settled(client, theirs)
    await site.bring(wanted())
    assert (await site.tree()).id != theirs
    await site.bring()
    # It was made for the Service, but its adoption is not configured.
    client.load_balancer.update_load_balancer(
        theirs, description=occm.DESCRIPTION, tags=[occm.NAME]
    )
    clients.settled(client, theirs)
    site.anew()
    await site.bring(wanted(shared_or_adopted=None))
    assert (await site.tree()).id != theirs
    await site.bring()
    assert balancers(site) == [theirs]
    assert occm.ids(await before(site, theirs)) == occm.ids(untouched)


async def test_two_of_one_name_are_told(site: Site) -> None:
    client = clients.without_auth(octavia=site.front.url)
    first, second = occm.make(client, ()), occm.make(client, ())
    with pytest.raises(Refused, match="all have the name"):
        await site.once(wanted())
    asked = wanted(shared_or_adopted=SharedOrAdopted(second, NAMES))
    await site.bring(asked)
    assert (await site.tree()).id == second
    assert sorted(balancers(site)) == sorted([first, second])


async def test_a_take_over_that_is_cut_short_goes_on(site: Site) -> None:
    """At each write of the adoption the answer is lost and the process ends."""
    id_ = occm.make(clients.without_auth(octavia=site.front.url), (80,))
    ids = occm.ids(await before(site, id_))
    asked = service(octavia=like_occm())
    for number in (1, 2, 3, 4):
        site.front.at(1, Cut(after=number % 2 == 0))
        site.anew()
        # Octavia may still be working on the previous write
        for _ in range(50):
            try:
                outcome = (await site.once(asked))[WEB]
            except Conflict:
                continue
            except Unavailable:
                break
            assert outcome.state == "waiting"
            await asyncio.sleep(outcome.again_s)
        else:
            raise AssertionError
        site.front.pass_on()
    site.anew()
    await site.bring(asked)
    assert occm.ids(await site.tree()) == ids
    assert balancers(site) == [id_]
