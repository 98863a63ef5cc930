"""What goes wrong at a real Octavia, or on the way to it, ends with one load balancer that is as wanted, and nothing else."""

import pytest
from tests.drivers.octavia.conftest import Heard
from tests.drivers.octavia.site import WEB, Site, listener, member, service, settings
from tests.openstack import clients
from tests.openstack.front import Answer, Cut, Front
from tests.openstack.octavia import Octavia

from fairlead.drivers.octavia.tree import ACTIVE, ERROR
from fairlead.errors import Conflict, Unavailable
from fairlead.model import LoadBalancer


def everything(front: Front) -> int:
    """How many load balancers the project has, whoever made them."""
    return len(list(clients.without_auth(octavia=front.url).load_balancer.load_balancers(project_id=front.project)))


async def is_whole(site: Site, wanted: LoadBalancer) -> bool:
    found = await site.found()
    desired = site.driver.render({WEB: wanted})
    return site.driver.diff(desired, {WEB: found}) == [] and everything(site.front) == 1


async def test_an_answer_that_is_lost_makes_no_second_one(site: Site) -> None:
    wanted = service()
    site.front.at(1, Cut(after=True))
    told = await site.bring(wanted)
    assert told
    assert "POST loadbalancers" in site.writes
    assert site.writes.count("POST loadbalancers") == 1
    assert await is_whole(site, wanted)


async def test_every_write_of_a_change_may_be_lost_before_or_after(site: Site) -> None:
    """To a PROXY header and back, as often as that takes writes; each time another write is the one that is lost."""
    without, with_header = service(), service(octavia=settings(header="v1"))
    await site.bring(without)
    for number in range(1, 6):
        wanted = with_header if number % 2 else without
        site.front.at(number, Cut(after=number in (1, 3, 4)))
        assert await site.bring(wanted), number
        site.front.pass_on()
        assert await is_whole(site, wanted), number


async def test_octavia_at_work_is_waited_for(site: Site, octavia: Octavia) -> None:
    await site.bring(service())
    client = clients.without_auth(octavia=site.front.url)
    tree = await site.tree()
    wanted = service(listener(80, member(7)))
    with octavia.holding("configure"):
        client.load_balancer.update_listener(tree.listeners[0].id, connection_limit=9)
        with pytest.raises(Conflict, match="immutable"):
            await site.once(wanted)
    await site.bring(wanted)
    assert await is_whole(site, wanted)


async def test_a_part_in_error_is_written_again(site: Site, octavia: Octavia) -> None:
    await site.bring(service())
    wanted = service(octavia=settings(connection_limit=7))
    with octavia.failing("configure"):
        outcomes = await site.once(wanted)
    assert outcomes[WEB].state == "unavailable"
    assert (await site.tree()).listeners[0].status == ERROR
    await site.bring(wanted)
    assert await is_whole(site, wanted)


async def test_one_that_never_came_to_be_is_made_anew(site: Site, octavia: Octavia, heard: Heard) -> None:
    """The cloud cannot make machines for a while: there is one load balancer at any time."""
    wanted = service()
    with octavia.failing("boot"):
        for _ in range(2):
            with pytest.raises(Unavailable, match="went to ERROR"):
                await site.once(wanted)
            assert everything(site.front) == 1
    await site.bring(wanted)
    assert await is_whole(site, wanted)
    assert [each for each in site.writes if each != "DELETE loadbalancers/_"] == ["POST loadbalancers"] * 3
    assert [reason for reason, _ in heard.events] == ["CreatedLoadBalancer"]


async def test_of_two_the_older_stays_and_what_is_not_ours_is_not_touched(site: Site) -> None:
    wanted = service()
    await site.bring(wanted)
    first = await site.tree()
    client = clients.without_auth(octavia=site.front.url).load_balancer
    tags = list(first.tags)
    second = client.create_load_balancer(name="twin", vip_network_id="0f1a7c1e-0000-4000-8000-000000000002", tags=tags)
    foreign = client.create_load_balancer(name=first.name, vip_network_id="0f1a7c1e-0000-4000-8000-000000000002")
    for each in (second, foreign):
        clients.settled(clients.without_auth(octavia=site.front.url), each.id)
    site.anew()
    await site.driver.read(None)
    await site.bring(wanted)
    assert (await site.tree()).id == first.id
    await site.bring()
    left = [each.id for each in client.load_balancers(project_id=site.front.project)]
    assert left == [foreign.id]


async def test_a_service_made_anew_gets_another_and_never_two(site: Site) -> None:
    await site.bring(service())
    first = await site.tree()
    again = service(uid="uid-again")
    await site.bring(again)
    assert (await site.tree()).id != first.id
    assert site.writes == ["POST loadbalancers", "DELETE loadbalancers/_", "POST loadbalancers"]
    assert (await site.tree()).status == ACTIVE
    assert await is_whole(site, again)


async def test_a_cloud_that_says_no_is_quoted(site: Site) -> None:
    site.front.at(1, Answer(403, "Quota has been met for resources: Load Balancer"))
    (told,) = await site.bring(service())
    assert "Quota has been met" in told
    assert "raise the project's quota" in told
