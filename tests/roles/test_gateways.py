"""What Services show about their gateways, and the Event when a Warning no longer holds: on both API servers."""

import asyncio

from tests.roles.cluster import Cluster, until

from fairlead.kube.lease import LEASES
from fairlead.kube.presence import presence_of
from fairlead.model import DONE, Outcome, ServiceKey
from fairlead.roles.presence import Announcer


async def serve(cluster: Cluster) -> list[str]:
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", True))
    await cluster.apply("web")
    await cluster.has("web", Ready="True/EndpointsReady")
    return await cluster.addresses("web")


async def test_without_a_gateway_no_service_is_ready(cluster: Cluster) -> None:
    address = await serve(cluster)
    await cluster.stop_gateway()
    found = await cluster.has("web", Accepted="True/Accepted", Programmed="True/Programmed", Ready="False/NoGateway")
    assert "start `fairlead gateway`" in found["Ready"]["message"]
    await cluster.described("web", "Warning", "NoGateway", "no gateway is alive", "fairlead status --cluster")
    assert await cluster.addresses("web") == address

    # Another process finds the Lease of a gateway that is gone, and knows that only when it has watched for a while.
    await cluster.stop_controller()
    await cluster.start_controller(gateway=False)
    await cluster.set_endpoints("other", ("10.244.1.2", "life-1", True))
    await cluster.apply("other")
    await cluster.has("other", Ready="False/NoGateway")
    after = await cluster.conditions("web")
    assert after["Ready"] == found["Ready"], "with the time of its last transition: it was never taken for ready meanwhile"

    await cluster.start_gateway()
    await cluster.has("web", Ready="True/EndpointsReady")
    await cluster.described("web", "Normal", "Recovered", "NoGateway no longer holds")


async def test_a_gateway_that_cannot_serve_a_service_is_named(cluster: Cluster) -> None:
    address = await serve(cluster)
    key = ServiceKey(cluster.namespace, "web")
    cluster.gateway.record({}, {key: Outcome("refused", "no room in the table of slots", "TableFull")})
    found = await cluster.has("web", Ready="False/GatewayNotServing")
    assert found["Ready"]["message"] == "gateway gw1 cannot serve it: no room in the table of slots"
    await cluster.described("web", "Warning", "GatewayNotServing", "gateway gw1 cannot serve it")
    assert await cluster.addresses("web") == address
    cluster.gateway.record({}, {key: DONE})
    await cluster.has("web", Ready="True/EndpointsReady")
    await cluster.described("web", "Normal", "Recovered", "GatewayNotServing no longer holds")


async def test_the_next_leader_says_that_all_is_well_again(cluster: Cluster) -> None:
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", False))
    await cluster.apply("web")
    await cluster.described("web", "Warning", "NoReadyEndpoints", "is ready")
    await cluster.has("web", Ready="False/NoReadyEndpoints")
    await cluster.stop_controller()
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", True))
    await cluster.start_controller()
    await cluster.has("web", Ready="True/EndpointsReady")
    await cluster.described("web", "Normal", "Recovered", "NoReadyEndpoints no longer holds, after less than a minute")
    (event,) = await cluster.events("web", reason="Recovered")
    assert event["count"] == 1


async def test_a_gateway_may_have_a_name_that_no_object_can_have(cluster: Cluster) -> None:
    announcer = Announcer(cluster.client, cluster.presence, cluster.gateway, "GW_1")
    announcing = asyncio.ensure_future(announcer.run())

    async def announced() -> bool:
        leases = await cluster.client.list(LEASES, namespace=cluster.namespace)
        return any((found := presence_of(each)) is not None and found.name == "GW_1" for each in leases)

    try:
        await until(announced, "the gateway is announced")
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


async def test_a_record_lists_no_more_services_than_fit(cluster: Cluster) -> None:
    outcomes = {ServiceKey("default", f"web-{number:03}"): Outcome("refused", "no room " * 100) for number in range(500)}
    cluster.gateway.record({}, outcomes)
    record = Announcer(cluster.client, cluster.presence, cluster.gateway, "gw1").record()
    assert (record.not_served_count, len(record.not_served)) == (500, 50)
    assert all(len(each.message) == 200 for each in record.not_served)


async def test_what_passes_by_itself_is_not_listed(cluster: Cluster) -> None:
    announcer = Announcer(cluster.client, cluster.presence, cluster.gateway, "gw1")
    unavailable = Outcome("unavailable", "tried again")
    for outcome, listed in ((unavailable, 0), (unavailable, 1), (DONE, 0), (unavailable, 0), (Outcome("waiting"), 0)):
        cluster.gateway.record({}, {ServiceKey("default", "web"): outcome})
        assert announcer.record().not_served_count == listed
