"""Closed connections are reported by an Event on the Service: with a real HAProxy and the embedded
API server."""

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.drivers.proxy.site import (
    WEB,
    ClientConnection,
    balancer,
    nodes,
    opened,
    reconcile,
    until,
)

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EVENTS, EventRecorder
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta, ServiceSpec
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.kinds import EVENTS as KIND
from fairlead.model import LoadBalancer, ProxySettings, ServiceKey
from fairlead.roles.gateway import SYNC_FAILED
from fairlead.roles.report import Reporter
from fairlead.state import State
from fairlead.web import View

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]

OTHER = ServiceKey("default", "other")


async def test_each_service_gets_an_event_with_the_number_of_its_closed_connections(
    folder: Path,
) -> None:
    with capture_logs() as logs:
        await check_events(folder)
    assert [
        entry["connections"] for entry in logs if "stopped HAProxy workers" in entry["event"]
    ] == [3, 3]


async def check_events(folder: Path) -> None:
    """Start one old worker too many, twice. Each time the oldest worker has two connections of one
    Service and one connection of another."""
    marked: set[ServiceKey] = set()
    async with (
        nodes("node1"),
        opened(folder, old_workers=1, requeue=marked.update) as driver,
        ApiServer() as server,
        Client(Access(server.url)) as client,
    ):
        recorder = EventRecorder(client, "fairlead-gateway", interval_s=0.05)
        state = State(())
        for key in (WEB, OTHER):
            meta = ServiceMeta(name=key.name, namespace=key.namespace, uid=f"uid-{key.name}")
            state.update_services({ObjectKey(*key): Service(meta, ServiceSpec())})
        report = Reporter[LoadBalancer](View("gateway", "gw"), state, recorder, reason=SYNC_FAILED)
        served: list[LoadBalancer] = []
        recording = asyncio.ensure_future(recorder.run())

        async def change(limit: int) -> None:
            """Change both Services, which starts a new worker, and open three connections to it."""
            served[:] = [
                balancer(
                    {"node1": 1}, key=key, port=port, settings=ProxySettings(connection_limit=limit)
                )
                for key, port in ((WEB, 80), (OTHER, 81))
            ]
            await reconcile(driver, *served)
            talks.append([await ClientConnection.start(port=port) for port in (80, 80, 81)])
            for talk in talks[-1]:
                assert await talk.request() == ["node1", "-", "x"]

        async def has_events(count: int) -> bool:
            found = await client.list(EVENTS)
            return len(found) == 2 and all(each.count == count for each in found)

        talks: list[list[ClientConnection]] = []
        for limit in (10, 11):
            await change(limit)
        await driver.poll()
        assert [await talk.request() for talk in talks[0]] == [["node1", "-", "x"]] * 3
        for at, limit in enumerate((12, 13)):
            await change(limit)
            await driver.poll()
            # The next pass of the loop includes the Services that the driver marked.
            assert marked == {WEB, OTHER}
            marked.clear()
            report({each.service: each for each in served}, await reconcile(driver, *served))
            await until(partial(has_events, at + 1))
            for talk in talks[at]:
                with suppress(ConnectionError):
                    assert await talk.request() == []
            assert [await talk.request() for talk in talks[at + 1]] == [["node1", "-", "x"]] * 3
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
        shown = {
            stored.object["involvedObject"]["name"]: stored.object
            for stored in server.store.all_of(KIND)
        }
        for key, cut in ((WEB, "2 connections were"), (OTHER, "1 connection was")):
            said = shown[key.name]
            assert (said["type"], said["reason"]) == ("Warning", "OldConnectionsEnded")
            assert said["message"].startswith(f"{cut} ended, with a worker from before a reload: ")
            assert (
                "at most 1 of its old workers after reloads (gateway.proxyOldWorkers)"
                in said["message"]
            )
            assert said["involvedObject"]["uid"] == f"uid-{key.name}"
        for talk in talks[-1]:
            talk.end()
