"""A process takes over the record of an earlier process of the same instance, also if the API
server was unreachable at first."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from fairlead.config import PresenceConfig
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EVENTS, EventRecorder
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import Warned, lease_name, presence_of
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.model import Finding
from fairlead.roles.presence import Announcer
from fairlead.web import View

SECTION = PresenceConfig(lease_duration_s=1.0)
LEFT = Warned("default/web", "HealthChecksFailing", "2026-01-02T03:04:05Z", "uid")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": SECTION.namespace}}
        )
        yield server


def renewals(server: ApiServer) -> int:
    return sum(each.method == "PATCH" for each in server.requests)


async def test_an_unreachable_server_at_the_start_loses_no_warning(server: ApiServer) -> None:
    async with Client(Access(server.url)) as client:
        first = asyncio.ensure_future(
            Announcer(client, SECTION, View("node", "n1"), "n1", warned=lambda: [LEFT]).run()
        )
        await until(lambda: renewals(server) > 0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

        warned: list[Warned] = []
        server.faults.add(Fault("status", "GET", "/leases/", count=2, code=503))
        announcer = Announcer(client, SECTION, View("node", "n1"), "n1", warned=lambda: warned)
        second = asyncio.ensure_future(announcer.run(resume=warned.extend))
        await until(lambda: bool(warned))
        renewed = renewals(server)
        await until(lambda: renewals(server) > renewed)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        record = presence_of(
            await client.get(LEASES, ObjectKey(SECTION.namespace, lease_name("node", "n1")))
        )
    assert warned == [LEFT]
    assert record is not None
    assert record.warned == (LEFT,)


async def test_without_permission_to_read_its_lease_a_process_announces_itself(
    server: ApiServer,
) -> None:
    server.faults.add(Fault("status", "GET", "/leases/", count=0, code=403))
    async with Client(Access(server.url)) as client:
        resumed: list[Warned] = []
        task = asyncio.ensure_future(
            Announcer(client, SECTION, View("node", "n1"), "n1").run(resume=resumed.extend)
        )
        await until(lambda: renewals(server) > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_finding_that_lasts_is_an_event_on_the_lease_and_its_end_too(
    server: ApiServer,
) -> None:
    async with Client(Access(server.url)) as client:
        recorder = EventRecorder(client, "fairlead-gateway")
        found = [Finding("PeersNotListening", "listening failed", remedy="stop that process")]
        announcer = Announcer(
            client,
            SECTION,
            View("gateway", "gw1"),
            "gw1",
            recorder=recorder,
            findings=lambda: found,
        )
        runs = [asyncio.ensure_future(each) for each in (announcer.run(), recorder.run())]
        try:
            async with asyncio.timeout(30):
                while not (events := await client.list(EVENTS, namespace=SECTION.namespace)):
                    await asyncio.sleep(0.05)
                (event,) = events
                assert (event.type, event.reason) == ("Warning", "PeersNotListening")
                assert event.message == "listening failed; stop that process"
                assert event.metadata.name.startswith(lease_name("gateway", "gw1"))
                found.clear()
                while len(events) < 2:
                    events = await client.list(EVENTS, namespace=SECTION.namespace)
                    await asyncio.sleep(0.05)
        finally:
            for each in runs:
                each.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
        assert sorted((each.reason, each.message) for each in events) == [
            ("PeersNotListening", "listening failed; stop that process"),
            ("Recovered", "PeersNotListening no longer holds"),
        ]
