"""A new leader begins when its state contains everything that the previous leader wrote, and does
not wait for anything else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.kube.reflector import Reflector
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.lab.apiserver.kinds import SERVICES as KIND
from fairlead.plan.projection import CONTROLLER
from fairlead.roles.catch_up import catch_up
from fairlead.state import State

DEADLINE_S = 60.0
WEB = ObjectKey("default", "web")


class Standby:
    """A controller that is not the leader yet: its state follows the watch."""

    def __init__(self, server: ApiServer, client: Client) -> None:
        self.server = server
        self.client = client
        self.state = State(("services",))
        self.reflector = Reflector(client, SERVICES, transform=CONTROLLER.service)

    async def follow(self) -> None:
        async for changed in self.reflector.changes():
            self.state.update_services(changed)
            self.state.mark_synced("services")

    async def sees(self, key: ObjectKey, version: int) -> None:
        """Wait until the watch has delivered this version of the object."""
        async with asyncio.timeout(DEADLINE_S):
            while (
                key not in self.reflector.objects
                or self.reflector.objects[key].metadata.version < version
            ):
                await asyncio.sleep(0.01)

    async def catch_up(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await catch_up(self.client, self.state, CONTROLLER.service)

    def stored(self, **differing: Any) -> dict[str, Any]:
        """Return the Service `web` as the server stores it, with these parts replaced."""
        known = self.server.store.get(KIND, *WEB)
        assert known is not None
        return {**known.object, **differing}


@asynccontextmanager
async def following(standby: Standby) -> AsyncIterator[None]:
    task = asyncio.ensure_future(standby.follow())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def standby() -> AsyncIterator[Standby]:
    async with ApiServer() as server, Client(Access(server.url)) as client:
        body = {
            "metadata": {"name": "web"},
            "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]},
        }
        await client.create(SERVICES, body, namespace="default")
        yield Standby(server, client)


async def test_catch_up_waits_for_the_watch(standby: Standby) -> None:
    async with following(standby):
        await standby.state.has_synced.wait()
        standby.server.faults.add(Fault("stall", "GET", "watch=", 1, stall_s=0.5))
        body = {"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.7"}]}}}
        await standby.client.patch(SERVICES, WEB, body, subresource="status")
        await standby.catch_up()
    (service,) = standby.state.services.values()
    assert [entry.ip for entry in service.status.load_balancer.ingress] == ["203.0.113.7"]


async def test_catch_up_ignores_a_service_that_cannot_be_decoded(standby: Standby) -> None:
    """The watch skips the Service: the state will never contain it, or will keep an old version
    forever."""
    metadata = standby.stored()["metadata"]
    strange = standby.stored(
        metadata={**metadata, "name": "strange", "uid": "u-2"}, spec={"ports": "eighty"}
    )
    standby.server.store.put(KIND, strange)
    async with following(standby):
        await standby.state.has_synced.wait()
        await standby.catch_up()
        standby.server.store.put(KIND, standby.stored(spec={"ports": "eighty"}))
        await standby.catch_up()
    assert {str(key) for key in standby.state.services} == {"default/web"}


async def test_catch_up_ignores_changes_that_are_not_stored(standby: Standby) -> None:
    """The change is in a field of another client, or in kubectl's copy of the manifest. The state
    correctly keeps the previous version."""
    async with following(standby):
        await standby.state.has_synced.wait()
        metadata = standby.stored()["metadata"]
        annotations = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
        put = standby.server.store.put(
            KIND, standby.stored(metadata={**metadata, "annotations": annotations})
        )
        await standby.sees(WEB, put.version)
        await standby.catch_up()


async def test_catch_up_backs_off_while_the_server_is_unreachable(standby: Standby) -> None:
    async with following(standby):
        await standby.state.has_synced.wait()
        standby.server.faults.add(Fault("status", "GET", "limit=", 0, code=503))
        asked_before = len(standby.server.requests)
        waiting = asyncio.ensure_future(standby.catch_up())
        await asyncio.sleep(2.0)
        asked = [
            each
            for each in list(standby.server.requests)[asked_before:]
            if "watch" not in each.query
        ]
        assert not waiting.done()
        # The attempts are immediate, after 0.1 to 0.2 s, and then after doubled delays.
        assert 2 <= len(asked) <= 5
        standby.server.faults.clear()
        await waiting
