"""An Event is written once: not at every retry, and not again by the next process or the next
leader."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.roles.cluster import GRACE_PERIOD_S, Cluster, until

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault


async def events_of(cluster: Cluster, *names: str) -> Counter[tuple[str, str]]:
    """Return how often each reason was written for each Service."""
    return Counter(
        {
            (name, each["reason"]): each["count"]
            for name in names
            for each in await cluster.events(name)
        }
    )


@pytest.fixture
async def embedded(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, Cluster]]:
    """The embedded API server, because tests can make it fail."""
    async with ApiServer() as server, Client(access := Access(server.url)) as client:
        await crds.install(client)
        made = Cluster(access, client, tmp_path)
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": made.namespace}}
        )
        await made.start_controller()
        yield server, made
        await made.stop()


async def test_a_restart_and_another_leader_repeat_no_event(
    embedded: tuple[ApiServer, Cluster],
) -> None:
    """Runs on one API server only: an Event is found again by its name, which does not depend on
    the server."""
    _, cluster = embedded
    names = ("served", "empty", "refused")
    await cluster.add_node("life-1", 1)
    await cluster.set_endpoints("served", ("10.244.1.1", "life-1", True))
    await cluster.apply("served")
    await cluster.apply("empty")
    await cluster.apply("refused", annotations={"fairlead.io/addresses": "192.0.2.200"})
    await cluster.described("empty", "NoReadyEndpoints")
    await cluster.described("refused", "SyncLoadBalancerFailed")
    await cluster.described("served", "EnsuringLoadBalancer", "EnsuredLoadBalancer")
    before = await events_of(cluster, *names)
    assert set(before.values()) == {1}
    # A write that belongs to the first Events may still be in progress.
    await asyncio.sleep(GRACE_PERIOD_S)
    versions = {
        name: (await cluster.kubectl.service(name))["metadata"]["resourceVersion"] for name in names
    }
    for _ in range(2):
        await cluster.stop_controller()
        await cluster.start_controller()
        await cluster.apply("sign")
        await cluster.addresses("sign")
        await asyncio.sleep(GRACE_PERIOD_S + 0.5)
        await cluster.kubectl("delete", "service", "sign")
    assert await events_of(cluster, *names) == before
    after = {
        name: (await cluster.kubectl.service(name))["metadata"]["resourceVersion"] for name in names
    }
    assert after == versions, "nothing was written on a Service that did not change"


async def test_retries_write_no_further_events(embedded: tuple[ApiServer, Cluster]) -> None:
    server, cluster = embedded
    await cluster.set_endpoints("web", ("10.244.1.1", "", True))
    fault = Fault("status", "PATCH", path="/services/web/status", code=503, count=0)
    server.faults.add(fault)
    await cluster.apply("web", externalTrafficPolicy="Cluster")

    def tries() -> int:
        return sum(
            each.method == "PATCH" and each.path.endswith("/services/web/status")
            for each in server.requests
        )

    async def often() -> bool:
        return tries() >= 5 and bool(await cluster.events("web", reason="SyncLoadBalancerFailed"))

    await until(often, "several retries")
    server.faults.clear()
    await cluster.addresses("web")
    await cluster.described("web", "EnsuredLoadBalancer", "SyncLoadBalancerFailed no longer holds")
    # The node is missing all the time; the first plan already had a note about this.
    assert await events_of(cluster, "web") == {
        ("web", "EnsuringLoadBalancer"): 1,
        ("web", "SyncLoadBalancerFailed"): 1,
        ("web", "EnsuredLoadBalancer"): 1,
        ("web", "Recovered"): 1,
        ("web", "UnAvailableLoadBalancer"): 1,
    }
