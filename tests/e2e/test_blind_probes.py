"""The gateway's own probes are dropped, so that all nodes seem dead. The Service is served
according to the API, and an Event is written."""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.e2e.load import GATEWAY, NAME, Load, Web, fetch, output, until

from fairlead.kube.events import EVENTS
from fairlead.lab.site import Site
from fairlead.plan.members import HEALTH_CHECKS_FAILING

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

BLIND = """add table inet blind; add chain inet blind out { type filter hook output priority 0; };
add rule inet blind out ip daddr 192.0.2.0/24 tcp dport { 10256, 30000-32767 } drop"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with Site.create(f"blind{os.getpid()}", nodes=2, gateways=1, clients=1) as site:
        yield site


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
async def test_a_service_goes_on_while_every_probe_fails(site: Site, policy: str) -> None:
    web = Web(site)
    await web.create(externalTrafficPolicy=policy)
    await web.place(["node1", "node2"])

    async def told() -> bool:
        async with site.client() as client:
            said = [
                each.message
                for each in await client.list(EVENTS)
                if each.reason == HEALTH_CHECKS_FAILING
            ]
        return any(("port 10256" in message) == (policy == "Cluster") for message in said)

    async def failing() -> bool:
        return "health port" in str(
            (await fetch(site, GATEWAY, "/state"))["services"][f"default/{NAME}"]["plan"]["notes"]
        )

    async def proved() -> bool:
        return not await failing()

    async def blind() -> None:
        await output(site, GATEWAY, "nft", BLIND.replace("\n", ""))
        await until(failing, "a note about it")
        await until(told, "an Event about it")

    async with Load(site, web.address) as load:
        period = await load.through(blind())
        assert period.requests > 50
        assert (period.failed, period.broken) == (0, [])
        assert {state for _, state in (await web.members()).values()} == {"active"}
        period = await load.through(output(site, GATEWAY, "nft", "delete table inet blind"))
        assert (period.failed, period.broken) == (0, [])
        await until(proved, "the nodes answer again")
        assert {state for _, state in (await web.members()).values()} == {"active"}
