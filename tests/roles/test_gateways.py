"""The conditions of Services about their gateways, and the Event when a Warning no longer holds, on
both API servers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from prometheus_client import CollectorRegistry
from tests.drivers.direct.conftest import a_forwarder
from tests.drivers.direct.test_shares import Small
from tests.roles.cluster import Cluster, until

from fairlead.drivers import Component
from fairlead.kube.answers import NotFound
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import lease_body, lease_name, presence_of
from fairlead.model import DONE, Finding, Outcome, ServiceKey
from fairlead.plan.gateways import Gateways
from fairlead.plan.proxying import PROXY
from fairlead.roles.metrics import GatewaysCollector
from fairlead.roles.presence import Announcer
from fairlead.web import View

WEB = ServiceKey("default", "web")


async def serve(cluster: Cluster) -> list[str]:
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", True))
    await cluster.apply("web")
    await cluster.has("web", Ready="True/EndpointsReady")
    return await cluster.addresses("web")


@asynccontextmanager
async def announced_gateway(cluster: Cluster, name: str) -> AsyncIterator[None]:
    """Announce one more gateway during the block. Its Lease stays."""
    view = View("gateway", name)
    view.standing_by = lambda: True
    task = asyncio.ensure_future(Announcer(cluster.client, cluster.presence, view, name).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.long
async def test_without_a_gateway_no_service_is_ready(cluster: Cluster) -> None:
    address = await serve(cluster)
    await cluster.stop_gateway()
    found = await cluster.has(
        "web", Accepted="True/Accepted", Programmed="True/Programmed", Ready="False/NoGateway"
    )
    assert "start `fairlead gateway`" in found["Ready"]["message"]
    await cluster.described(
        "web", "Warning", "NoGateway", "no gateway is alive", "fairlead status --cluster"
    )
    assert await cluster.addresses("web") == address

    # Another process finds the Lease of the dead gateway. It must watch the Lease for a while
    # before it knows that the gateway is gone.
    await cluster.stop_controller()
    await cluster.start_controller(gateway=False)
    await cluster.set_endpoints("other", ("10.244.1.2", "life-1", True))
    await cluster.apply("other")
    await cluster.has("other", Ready="False/NoGateway")
    after = await cluster.conditions("web")
    assert after["Ready"] == found["Ready"], (
        "the time of the last transition shows that it was never ready meanwhile"
    )

    await cluster.start_gateway()
    await cluster.has("web", Ready="True/EndpointsReady")
    await cluster.described("web", "Normal", "Recovered", "NoGateway no longer holds")


async def test_a_gateway_that_cannot_serve_a_service_is_named(cluster: Cluster) -> None:
    address = await serve(cluster)
    key = ServiceKey(cluster.namespace, "web")
    cluster.gateway.record(
        {}, {key: Outcome("refused", "no room in the table of slots", "TableFull")}
    )
    found = await cluster.has("web", Ready="False/GatewayNotServing")
    assert found["Ready"]["message"] == "gateway gw1 cannot serve it: no room in the table of slots"
    await cluster.described("web", "Warning", "GatewayNotServing", "gateway gw1 cannot serve it")
    assert await cluster.addresses("web") == address
    cluster.gateway.record({}, {key: DONE})
    await cluster.has("web", Ready="True/EndpointsReady")
    await cluster.described("web", "Normal", "Recovered", "GatewayNotServing no longer holds")


async def test_a_gateway_of_two_that_refuses_a_service_is_named_and_the_service_is_ready(
    cluster: Cluster,
) -> None:
    """The next leader knows of the Warning of this one, and writes its end."""
    address = await serve(cluster)
    key = ServiceKey(cluster.namespace, "web")
    cluster.gateway.record({}, {key: Outcome("refused", "port 80 is in use")})
    await cluster.has("web", Ready="False/GatewayNotServing")
    async with announced_gateway(cluster, "gw2"):
        found = await cluster.has("web", Ready="True/GatewayNotServing")
        refused = "gateway gw1 cannot serve it: port 80 is in use"
        assert found["Ready"]["message"] == f"served on {', '.join(address)}; {refused}"
        await cluster.described("web", "Warning", "GatewayNotServing", refused)
        await cluster.stop_controller()
        cluster.gateway.record({}, {key: DONE})
        await cluster.start_controller(gateway=False)
        await cluster.has("web", Ready="True/EndpointsReady")
        await cluster.described("web", "Normal", "Recovered", "GatewayNotServing no longer holds")


async def test_a_gateway_of_two_that_is_gone_is_named(cluster: Cluster) -> None:
    """The other gateway serves the Service, so it is Ready. The Event is written once."""
    address = await serve(cluster)
    leases = LEASES, ObjectKey(cluster.namespace, lease_name("gateway", "gw2"))

    async def is_announced() -> bool:
        with suppress(NotFound):
            return presence_of(await cluster.client.get(*leases)) is not None
        return False

    async with announced_gateway(cluster, "gw2"):
        await until(is_announced, "the announcement of gw2")
    found = await cluster.has("web", Accepted="True/Accepted", Ready="True/GatewayGone")
    assert (
        f"served on {', '.join(address)}; no longer alive: gateway gw2" in found["Ready"]["message"]
    )
    assert found["Accepted"]["message"] == ""
    await cluster.described("web", "Warning", "GatewayGone", "no longer alive: gateway gw2")
    await cluster.client.delete(*leases)
    await cluster.has("web", Ready="True/EndpointsReady")
    await cluster.described("web", "Normal", "Recovered", "GatewayGone no longer holds")
    (event,) = await cluster.events("web", reason="GatewayGone")
    assert event["count"] == 1


def test_a_metric_shows_which_gateways_are_alive() -> None:
    known: Gateways | None = None
    registry = CollectorRegistry()
    registry.register(GatewaysCollector(lambda: known))
    assert registry.get_sample_value("fairlead_gateway_alive", {"gateway": "gw1"}) is None
    known = Gateways(frozenset({"gw1"}), gone=frozenset({"gw2"}))
    assert [
        registry.get_sample_value("fairlead_gateway_alive", {"gateway": name})
        for name in ("gw1", "gw2")
    ] == [1.0, 0.0]


class Interfaces(Component):
    """A part of a gateway whose interface is down."""

    problem = "interface eth0 is down"

    def findings(self) -> tuple[Finding, ...]:
        return (Finding("GatewayNotForwarding", self.problem, "error", blocks="Ready"),)


async def test_a_gateway_that_does_not_forward_is_named(cluster: Cluster) -> None:
    await serve(cluster)
    with cluster.gateway.showing(Interfaces()):
        found = await cluster.has("web", Ready="False/GatewayNotServing")
        assert found["Ready"]["message"] == "gateway gw1 cannot serve it: interface eth0 is down"
        await cluster.described("web", "Warning", "GatewayNotServing", "interface eth0 is down")
        # A second gateway serves the Service. The message stays.
        async with announced_gateway(cluster, "gw2"):
            after = await cluster.has("web", Ready="True/GatewayNotServing")
            assert after["Ready"]["message"].endswith(found["Ready"]["message"])
        await cluster.has("web", Ready="False/GatewayNotServing")
    await cluster.has("web", Ready="True/GatewayGone")


class Balancer(Interfaces):
    """A part of a gateway without which it serves no Service of class proxy."""

    problem, problem_class = "HAProxy does not answer", PROXY


async def test_a_gateway_whose_haproxy_hangs_serves_class_direct(cluster: Cluster) -> None:
    """/readyz is about the whole host, a condition about one Service."""
    await serve(cluster)
    with cluster.gateway.showing(Balancer()):
        record = Announcer(cluster.client, cluster.presence, cluster.gateway, "gw1").record()
        assert (record.ready, record.problem_class) == (False, PROXY)
        await cluster.apply("shop", loadBalancerClass=PROXY)
        await cluster.set_endpoints("shop", ("10.244.1.1", "life-1", True))
        await cluster.has("shop", Ready="False/GatewayNotServing")
        await cluster.has("web", Ready="True/EndpointsReady")


async def test_only_the_text_of_a_problem_waits_for_the_next_renewal(cluster: Cluster) -> None:
    announcer = Announcer(cluster.client, cluster.presence, cluster.gateway, "gw1")
    forwards, interfaces = announcer._condition(), Interfaces()
    with cluster.gateway.showing(interfaces):
        down = announcer._condition()
        assert down != forwards
        interfaces.problem = "interface eth0 has no carrier"
        assert announcer._condition() == down
        assert announcer.record().problem == "interface eth0 has no carrier"


@pytest.mark.root
async def test_a_service_without_room_for_a_listener_is_not_ready(cluster: Cluster) -> None:
    """The outcome comes from real tables, half of which one namespace may use."""
    await serve(cluster)
    key = ServiceKey(cluster.namespace, "web")
    with a_forwarder(fast=False) as forwarder:
        small = Small(forwarder, "listeners", 16)
        cluster.gateway.record({}, {key: small.reconcile(key, range(1, 20))})
        found = await cluster.has("web", Ready="False/GatewayNotServing")
        assert "12 of 19 listeners are not served" in found["Ready"]["message"]
        cluster.gateway.record({}, {key: small.reconcile(key, range(1, 8))})
        await cluster.has("web", Ready="True/EndpointsReady")
        small.map.close()


async def test_the_next_leader_writes_recovered(cluster: Cluster) -> None:
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", False))
    await cluster.apply("web")
    await cluster.described("web", "Warning", "NoReadyEndpoints", "is ready")
    await cluster.has("web", Ready="False/NoReadyEndpoints")
    await cluster.stop_controller()
    await cluster.set_endpoints("web", ("10.244.1.1", "life-1", True))
    await cluster.start_controller()
    await cluster.has("web", Ready="True/EndpointsReady")
    await cluster.described(
        "web", "Normal", "Recovered", "NoReadyEndpoints no longer holds, after less than a minute"
    )
    (event,) = await cluster.events("web", reason="Recovered")
    assert event["count"] == 1


async def test_a_gateway_may_have_a_name_that_is_not_a_valid_object_name(cluster: Cluster) -> None:
    announcer = Announcer(cluster.client, cluster.presence, cluster.gateway, "GW_1")
    announcing = asyncio.ensure_future(announcer.run())

    async def announced() -> bool:
        leases = await cluster.client.list(LEASES, namespace=cluster.namespace)
        return any(
            (found := presence_of(each)) is not None and found.name == "GW_1" for each in leases
        )

    try:
        await until(announced, "the announcement of the gateway")
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


async def test_a_record_does_not_exceed_the_maximum_size_of_annotations(cluster: Cluster) -> None:
    """The record names more Services than it has reasons for, and each of them must be shown as not
    served."""
    name, namespace = "w" * 59, "n" * 63
    outcomes = {
        ServiceKey(namespace, f"{name}{number:04}"): Outcome("refused", "no room " * 100)
        for number in range(2000)
    }
    cluster.gateway.record({}, outcomes)
    record = Announcer(cluster.client, cluster.presence, cluster.gateway, "gw1").record()
    assert (record.not_served_count, len(record.not_served)) == (2000, 1000)
    assert [len(each.message) for each in record.not_served] == 50 * [200] + 950 * [0]
    assert len(json.dumps(lease_body(record, identity="", now="", lease_s=1.0))) < 256 * 1024


async def test_a_service_beyond_the_limit_of_a_record_is_not_ready(
    cluster: Cluster,
) -> None:
    await serve(cluster)
    others = {
        ServiceKey(cluster.namespace, f"a{number}"): Outcome("refused", "no room")
        for number in range(100)
    }
    cluster.gateway.record(
        {}, others | {ServiceKey(cluster.namespace, "web"): Outcome("refused", "no room")}
    )
    found = await cluster.has("web", Ready="False/GatewayNotServing")
    assert "SyncGatewayFailed" in found["Ready"]["message"]


async def test_a_service_with_less_exact_shares_is_served(cluster: Cluster) -> None:
    """The outcome is that of a gateway with too little table memory."""
    announcer = Announcer(cluster.client, cluster.presence, cluster.gateway, "gw1")
    coarse = Outcome(
        "unavailable", "1 of 1 listeners have tables with fewer slots", in_part=True, coarse=True
    )
    for _ in range(2):
        cluster.gateway.record({}, {WEB: coarse})
        record = announcer.record()
        assert (record.served, record.not_served) == (1, ())


async def test_a_start_lists_the_unserved_services_of_its_predecessor(cluster: Cluster) -> None:
    """No Service is shown as ready before the new process has processed all Services."""
    unserved = Outcome("unavailable", "no room")
    before = Announcer(cluster.client, cluster.presence, cluster.gateway, "gw1")
    cluster.gateway.record({}, {WEB: unserved})
    assert [before.record().not_served_count for _ in range(2)] == [0, 1]
    view, ready = View("gateway", "gw1"), False
    view.standing_by = lambda: ready
    started = Announcer(cluster.client, cluster.presence, view, "gw1")
    started.inherit(before.record())
    assert [each.key for each in started.record().not_served] == [WEB]
    view.record({}, {WEB: unserved})
    ready = True
    assert [each.key for each in started.record().not_served] == [WEB]
    view.record({}, {WEB: DONE})
    assert started.record().not_served == ()


async def test_a_short_failure_is_not_listed(cluster: Cluster) -> None:
    announcer = Announcer(cluster.client, cluster.presence, cluster.gateway, "gw1")
    unavailable = Outcome("unavailable", "tried again")
    for outcome, listed in (
        (unavailable, 0),
        (unavailable, 1),
        (DONE, 0),
        (unavailable, 0),
        (Outcome("waiting"), 0),
    ):
        cluster.gateway.record({}, {ServiceKey("default", "web"): outcome})
        assert announcer.record().not_served_count == listed
