"""After any fault of a real Octavia, or of the connection to it, exactly one load balancer exists,
in the desired state."""

import pytest
from tests.drivers.octavia.conftest import StoringRecorder
from tests.drivers.octavia.site import WEB, Site, listener, member, service, settings
from tests.openstack import clients
from tests.openstack.fault_proxy import Disconnect, ErrorResponse
from tests.openstack.octavia import Octavia

from fairlead.drivers.octavia.balancers import ACTIVE, ERROR
from fairlead.drivers.octavia.blocked import GIVEN_UP_RETRY_S
from fairlead.drivers.octavia.diff import MAX_ATTEMPTS
from fairlead.errors import Conflict, Refused, Unavailable


async def test_a_lost_response_causes_no_second_load_balancer(site: Site) -> None:
    wanted = service()
    site.proxy.inject_at(1, Disconnect(after=True))
    messages = await site.reconcile(wanted)
    assert messages
    assert "POST loadbalancers" in site.writes
    assert site.writes.count("POST loadbalancers") == 1
    assert await site.is_complete(wanted)


@pytest.mark.soak
async def test_a_load_balancer_on_which_octavia_is_working_is_changed_afterwards(
    site: Site, octavia: Octavia
) -> None:
    await site.reconcile(service())
    tree = await site.tree()
    wanted = service(listener(80, member(7)))
    with octavia.holding("configure"):
        site.client.load_balancer.update_listener(tree.listeners[0].id, connection_limit=9)
        with pytest.raises(Conflict, match="immutable"):
            await site.run_pass(wanted)
    await site.reconcile(wanted)
    assert await site.is_complete(wanted)


@pytest.mark.soak
async def test_a_part_in_error_is_written_again(site: Site, octavia: Octavia) -> None:
    await site.reconcile(service())
    wanted = service(octavia=settings(connection_limit=7))
    with octavia.failing("configure"):
        outcomes = await site.run_pass(wanted)
    assert outcomes[WEB].state == "unavailable"
    assert (await site.tree()).listeners[0].status == ERROR
    await site.reconcile(wanted)
    assert await site.is_complete(wanted)


@pytest.mark.soak
async def test_a_load_balancer_in_error_that_has_served_is_failed_over(
    site: Site, octavia: Octavia
) -> None:
    """The machine of the load balancer is lost, and the failover by another user has failed."""
    await site.reconcile(service())
    tree = await site.tree()
    with octavia.failing("boot"):
        site.client.load_balancer.failover_load_balancer(tree.id)
        assert clients.wait_settled(site.client, tree.id) == ERROR
    site.clear_calls()
    site.restart()
    await site.driver.read(None)
    await site.reconcile(service(addresses=(tree.address,)))
    assert site.writes == ["PUT loadbalancers/_/failover"]
    after = await site.tree()
    assert (after.id, after.address, after.status) == (tree.id, tree.address, ACTIVE)


@pytest.mark.soak
async def test_after_several_failed_attempts_no_further_load_balancer_is_created(
    site: Site, octavia: Octavia, recorder: StoringRecorder
) -> None:
    """While the cloud cannot create machines, there is never more than one load balancer, and
    finally Fairlead waits for GIVEN_UP_RETRY_S."""
    wanted = service()
    with octavia.failing("boot"):
        for _ in range(MAX_ATTEMPTS):
            with pytest.raises(Unavailable, match="went to ERROR"):
                await site.run_pass(wanted)
            assert len(site.balancer_ids()) == 1
        for _ in range(3):
            outcome = (await site.run_pass(wanted))[WEB]
            assert (outcome.state, outcome.again_s) == ("unavailable", GIVEN_UP_RETRY_S / 10)
            assert f"is in ERROR, {MAX_ATTEMPTS} attempts to repair it failed" in outcome.message
    assert site.writes == ["POST loadbalancers"] + [
        "DELETE loadbalancers/_",
        "POST loadbalancers",
    ] * (MAX_ATTEMPTS - 1)
    assert recorder.events == []
    site.clock_offset_s = GIVEN_UP_RETRY_S
    await site.reconcile(wanted)
    assert await site.is_complete(wanted)
    assert [reason for reason, _ in recorder.events] == ["CreatedLoadBalancer"]


async def test_a_creation_that_fails_with_status_500_is_not_repeated_without_limit(
    site: Site,
) -> None:
    """Each failed call may have left an object behind. For a Service that is deleted and created
    recreated, attempts are counted from zero."""
    site.proxy.fault = lambda call: (
        ErrorResponse(500, "Provider 'ovn' reports error") if call.writes else None
    )
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(Unavailable, match="reports error"):
            await site.run_pass(service())
    for _ in range(3):
        assert (
            "has failed 5 times to create a load balancer"
            in (await site.run_pass(service()))[WEB].message
        )
    assert site.writes == ["POST loadbalancers"] * MAX_ATTEMPTS
    site.proxy.forward_all()
    await site.reconcile()
    assert await site.reconcile(service()) == []
    assert await site.is_complete(service())


async def test_a_rejected_write_is_not_repeated_until_the_service_changes_or_time_has_passed(
    site: Site,
) -> None:
    site.proxy.fault = lambda call: (
        ErrorResponse(501, "Provider 'ovn' does not support a requested option")
        if call.writes
        else None
    )
    for _ in range(4):
        with pytest.raises(Refused, match="does not support"):
            await site.run_pass(service())
    assert site.writes == ["POST loadbalancers"]
    with pytest.raises(Refused, match="does not support"):
        await site.run_pass(service(listener(443)))
    site.clock_offset_s = GIVEN_UP_RETRY_S
    with pytest.raises(Refused, match="does not support"):
        await site.run_pass(service(listener(443)))
    assert site.writes == ["POST loadbalancers"] * 3


@pytest.mark.soak
async def test_the_retry_after_of_a_response_is_respected(site: Site) -> None:
    for status in (503, 429):
        site.proxy.inject_at(1, ErrorResponse(status, "in maintenance", {"Retry-After": "7"}))
        with pytest.raises(Unavailable, match=f"{status}: in maintenance") as error:
            await site.run_pass(service())
        assert error.value.retry_after_s == 7.0


async def test_of_two_load_balancers_the_older_stays_and_foreign_ones_do_not_change(
    site: Site,
) -> None:
    wanted = service()
    await site.reconcile(wanted)
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
        clients.wait_settled(site.client, each.id)
    site.restart()
    await site.driver.read(None)
    await site.reconcile(wanted)
    assert (await site.tree()).id == first.id
    await site.reconcile()
    assert site.balancer_ids() == [foreign.id]


@pytest.mark.soak
async def test_a_recreated_service_gets_a_new_load_balancer_after_the_old_one_is_deleted(
    site: Site,
) -> None:
    await site.reconcile(service())
    first = await site.tree()
    recreated = service(uid="uid-recreated")
    await site.reconcile(recreated)
    assert (await site.tree()).id != first.id
    assert site.writes == ["POST loadbalancers", "DELETE loadbalancers/_", "POST loadbalancers"]
    assert (await site.tree()).status == ACTIVE
    assert await site.is_complete(recreated)


@pytest.mark.soak
async def test_the_message_of_a_rejection_by_octavia_is_reported(site: Site) -> None:
    site.proxy.inject_at(1, ErrorResponse(403, "Quota has been met for resources: Load Balancer"))
    (message,) = await site.reconcile(service())
    assert "Quota has been met" in message
    assert "raise the project's quota" in message
