"""A server that was restored from a backup shows an old Lease, or none. A process that is named
there must not lead while another process leads."""

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
"""The leader renews so seldom that an overlap of two leaders would show."""


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


async def for_ever() -> None:
    await asyncio.Event().wait()


async def until_leading(elector: Elector) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not elector.leading:
            await asyncio.sleep(0.002)


def elector_of(client: Client, name: str, retry_s: float) -> Elector:
    return Elector(client, KEY, name, lease_s=1.0, renew_deadline_s=0.8, retry_s=retry_s)


@pytest.mark.parametrize("backup", ["names the one who stands by", "is from before the Lease"])
async def test_there_are_never_two_leaders(server: ApiServer, backup: str) -> None:
    async with Client(Access(server.url)) as client, asyncio.TaskGroup() as group:
        first, second = elector_of(client, "first", 0.05), elector_of(client, "second", SLOW_S)
        leading = group.create_task(first.lead(for_ever))
        await until_leading(first)
        saved = server.registry.get(LEASES, *KEY).object
        leading.cancel()  # the candidate releases the Lease
        await asyncio.wait([leading])
        tasks = [group.create_task(second.lead(for_ever))]
        await until_leading(second)
        tasks.append(group.create_task(first.lead(for_ever)))
        # By now the first candidate waits, and has seen that the Lease is held.
        await asyncio.sleep(0.2)
        if backup == "names the one who stands by":
            server.store.put(LEASES, saved)
        else:
            server.registry.delete(LEASES, *KEY, Deletion())
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 3.0
        while loop.time() < end_s:
            assert not (first.leading and second.leading), "two lead"
            await asyncio.sleep(0.001)
        assert first.leading or second.leading
        for task in tasks:
            task.cancel()
