"""Leader election at a server that was restored from a backup: the server has an old Lease, or
none. A candidate that the old Lease names must not lead while another one leads."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.lease import Elector
from fairlead.kube.objects import ObjectKey
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.kinds import LEASES
from fairlead.lab.apiserver.writes import Deletion

KEY = ObjectKey("kube-system", "leader")
DEADLINE_S = 60.0
SLOW_S = 0.6
"""A retry interval of the leader that is long enough to make an overlap of two leaders visible."""


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


async def forever() -> None:
    await asyncio.Event().wait()


async def until_leading(elector: Elector) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not elector.leading:
            await asyncio.sleep(0.002)


def elector_of(client: Client, name: str, retry_s: float) -> Elector:
    return Elector(client, KEY, name, lease_s=1.0, renew_deadline_s=0.8, retry_s=retry_s)


@pytest.mark.parametrize(
    "backup", ["the Lease names the waiting candidate", "the Lease does not exist"]
)
async def test_a_restored_lease_never_leads_to_two_leaders(server: ApiServer, backup: str) -> None:
    async with Client(Access(server.url)) as client, asyncio.TaskGroup() as group:
        first, second = elector_of(client, "first", 0.05), elector_of(client, "second", SLOW_S)
        leading = group.create_task(first.lead(forever))
        await until_leading(first)
        saved = server.registry.get(LEASES, *KEY).object
        leading.cancel()  # the candidate releases the Lease
        await asyncio.wait([leading])
        tasks = [group.create_task(second.lead(forever))]
        await until_leading(second)
        tasks.append(group.create_task(first.lead(forever)))
        # The first candidate must read the Lease, and wait for its end.
        await asyncio.sleep(0.2)
        if backup == "the Lease names the waiting candidate":
            server.store.put(LEASES, saved)
        else:
            server.registry.delete(LEASES, *KEY, Deletion())
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 3.0
        while loop.time() < end_s:
            assert not (first.leading and second.leading), "there are two leaders"
            await asyncio.sleep(0.001)
        assert first.leading or second.leading
        for task in tasks:
            task.cancel()
