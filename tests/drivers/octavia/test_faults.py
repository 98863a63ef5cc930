"""After any fault at a real Octavia, or on the way to it, exactly one load balancer exists, as
desired."""

import pytest
from tests.drivers.octavia.conftest import Heard
from tests.drivers.octavia.site import WEB, Site, listener, member, service, settings
from tests.openstack import clients
from tests.openstack.front import Answer, Cut
from tests.openstack.octavia import Octavia

from fairlead.drivers.octavia.balancers import ACTIVE, ERROR
from fairlead.drivers.octavia.blocked import GIVEN_UP_RETRY_S
from fairlead.drivers.octavia.diff import MAX_ATTEMPTS
from fairlead.errors import Conflict, Refused, Unavailable


async def test_an_answer_that_is_lost_makes_no_second_one(site: Site) -> None:
    wanted = service()
    site.front.at(1, Cut(after=True))
    told = await site.bring(wanted)
    assert told
    assert "POST loadbalancers" in site.writes
    assert site.writes.count("POST loadbalancers") == 1
    assert await site.is_whole(wanted)


async def test_octavia_at_work_is_waited_for(site: Site, octavia: Octavia) -> None:
    await site.bring(service())
    tree = await site.tree()
    wanted = service(listener(80, member(7)))
    with octavia.holding("configure"):
        site.client.load_balancer.update_listener(tree.listeners[0].id, connection_limit=9)
        with pytest.raises(Conflict, match="immutable"):
            await site.once(wanted)
    await site.bring(wanted)
    assert await site.is_whole(wanted)


async def test_a_part_in_error_is_written_again(site: Site, octavia: Octavia) -> None:
    await site.bring(service())
    wanted = service(octavia=settings(connection_limit=7))
    with octavia.failing("configure"):
        outcomes = await site.once(wanted)
    assert outcomes[WEB].state == "unavailable"
    assert (await site.tree()).listeners[0].status == ERROR
    await site.bring(wanted)
    assert await site.is_whole(wanted)


async def test_one_that_served_is_failed_over(site: Site, octavia: Octavia) -> None:
    """The machine of the load balancer is lost, and another user's failover failed."""
    await site.bring(service())
    tree = await site.tree()
    with octavia.failing("boot"):
        site.client.load_balancer.failover_load_balancer(tree.id)
        assert clients.settled(site.client, tree.id) == ERROR
    site.forget()
    site.anew()
    await site.driver.read(None)
    await site.bring(service(addresses=(tree.address,)))
    assert site.writes == ["PUT loadbalancers/_/failover"]
    after = await site.tree()
    assert (after.id, after.address, after.status) == (tree.id, tree.address, ACTIVE)


async def test_a_broken_cloud_is_left_alone_after_some_attempts(
    site: Site, octavia: Octavia, heard: Heard
) -> None:
    """While the cloud cannot create machines, there is one load balancer at any time, and finally
    Fairlead stops trying."""
    wanted = service()
    with octavia.failing("boot"):
        for _ in range(MAX_ATTEMPTS):
            with pytest.raises(Unavailable, match="went to ERROR"):
                await site.once(wanted)
            assert len(site.everything()) == 1
        for _ in range(3):
            outcome = (await site.once(wanted))[WEB]
            assert (outcome.state, outcome.again_s) == ("unavailable", GIVEN_UP_RETRY_S / 10)
            assert f"is in ERROR, {MAX_ATTEMPTS} attempts to repair it failed" in outcome.message
    assert site.writes == ["POST loadbalancers"] + [
        "DELETE loadbalancers/_",
        "POST loadbalancers",
    ] * (MAX_ATTEMPTS - 1)
    assert heard.events == []
    site.later_s = GIVEN_UP_RETRY_S
    await site.bring(wanted)
    assert await site.is_whole(wanted)
    assert [reason for reason, _ in heard.events] == ["CreatedLoadBalancer"]


async def test_what_octavia_cannot_make_is_not_asked_for_without_end(site: Site) -> None:
    """Each 500 may have left an object behind. A Service that is deleted and created again starts
    from zero."""
    site.front.fate = lambda call: (
        Answer(500, "Provider 'ovn' reports error") if call.writes else None
    )
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(Unavailable, match="reports error"):
            await site.once(service())
    for _ in range(3):
        assert (
            "has failed 5 times to create a load balancer"
            in (await site.once(service()))[WEB].message
        )
    assert site.writes == ["POST loadbalancers"] * MAX_ATTEMPTS
    site.front.pass_on()
    await site.bring()
    assert await site.bring(service()) == []
    assert await site.is_whole(service())


async def test_what_is_refused_is_not_asked_for_again_unless_it_changes(site: Site) -> None:
    site.front.fate = lambda call: (
        Answer(501, "Provider 'ovn' does not support a requested option") if call.writes else None
    )
    for _ in range(4):
        with pytest.raises(Refused, match="does not support"):
            await site.once(service())
    assert site.writes == ["POST loadbalancers"]
    with pytest.raises(Refused, match="does not support"):
        await site.once(service(listener(443)))
    site.later_s = GIVEN_UP_RETRY_S
    with pytest.raises(Refused, match="does not support"):
        await site.once(service(listener(443)))
    assert site.writes == ["POST loadbalancers"] * 3


async def test_an_octavia_that_names_a_time_is_not_asked_before(site: Site) -> None:
    for status in (503, 429):
        site.front.at(1, Answer(status, "in maintenance", {"Retry-After": "7"}))
        with pytest.raises(Unavailable, match=f"{status}: in maintenance") as said:
            await site.once(service())
        assert said.value.retry_after_s == 7.0


async def test_of_two_the_older_stays_and_what_is_not_ours_is_not_touched(site: Site) -> None:
    wanted = service()
    await site.bring(wanted)
    first = await site.tree()
    client = site.client.load_balancer
    tags = list(first.tags)
    second = client.create_load_balancer(
        name="twin", vip_network_id="0f1a7c1e-0000-4000-8000-000000000002", tags=tags
    )
    foreign = client.create_load_balancer(
        name=first.name, vip_network_id="0f1a7c1e-0000-4000-8000-000000000002"
    )
    for each in (second, foreign):
        clients.settled(site.client, each.id)
    site.anew()
    await site.driver.read(None)
    await site.bring(wanted)
    assert (await site.tree()).id == first.id
    await site.bring()
    assert site.everything() == [foreign.id]


async def test_a_service_made_anew_gets_another_and_never_two(site: Site) -> None:
    await site.bring(service())
    first = await site.tree()
    again = service(uid="uid-again")
    await site.bring(again)
    assert (await site.tree()).id != first.id
    assert site.writes == ["POST loadbalancers", "DELETE loadbalancers/_", "POST loadbalancers"]
    assert (await site.tree()).status == ACTIVE
    assert await site.is_whole(again)


async def test_a_cloud_that_says_no_is_quoted(site: Site) -> None:
    site.front.at(1, Answer(403, "Quota has been met for resources: Load Balancer"))
    (told,) = await site.bring(service())
    assert "Quota has been met" in told
    assert "raise the project's quota" in told
