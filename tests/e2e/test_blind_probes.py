"""All probes of the gateway are dropped, so that all nodes seem to be down. The Service is served
according to the API, and an Event is written."""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.e2e.load import GATEWAY, NAME, Load, Web, fetch, output, until

from fairlead.kube.events import EVENTS
from fairlead.lab.site import Site
from fairlead.plan.members import HEALTH_CHECKS_FAILING

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

DROP_PROBES = """add table inet blind;
add chain inet blind out { type filter hook output priority 0; };
add rule inet blind out ip daddr 192.0.2.0/24 tcp dport { 10256, 30000-32767 } drop"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with Site.create(f"blind{os.getpid()}", nodes=2, gateways=1, clients=1) as site:
        yield site


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
async def test_a_service_is_served_while_every_probe_fails(site: Site, policy: str) -> None:
    web = Web(site)
    await web.create(externalTrafficPolicy=policy)
    await web.place(["node1", "node2"])

    async def has_event() -> bool:
        async with site.client() as client:
            messages = [
                each.message
                for each in await client.list(EVENTS)
                if each.reason == HEALTH_CHECKS_FAILING
            ]
        return any(("port 10256" in message) == (policy == "Cluster") for message in messages)

    async def has_note() -> bool:
        return "health port" in str(
            (await fetch(site, GATEWAY, "/state"))["services"][f"default/{NAME}"]["plan"]["notes"]
        )

    async def has_no_note() -> bool:
        return not await has_note()

    async def drop_probes() -> None:
        await output(site, GATEWAY, "nft", DROP_PROBES.replace("\n", ""))
        await until(has_note, "a note about the failing probes")
        await until(has_event, "an Event about the failing probes")

    async with Load(site, web.address) as load:
        period = await load.counts_during(drop_probes())
        assert period.requests > 50
        assert (period.failed, period.broken) == (0, [])
        assert {state for _, state in (await web.members()).values()} == {"active"}
        period = await load.counts_during(output(site, GATEWAY, "nft", "delete table inet blind"))
        assert (period.failed, period.broken) == (0, [])
        await until(has_no_note, "answers of the nodes to probes")
        assert {state for _, state in (await web.members()).values()} == {"active"}
