"""The reflector with random writes and random faults: in the end it has the objects of the server,
and it never reports an object that did not exist."""

import asyncio
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES, ObjectKey, Service
from fairlead.kube.reflector import Reflector
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Action, Fault
from fairlead.lab.apiserver.kinds import SERVICES as KIND

pytestmark = pytest.mark.soak

KEYS = [ObjectKey("default", name) for name in "abcd"]
STREAMED = "sendInitialEvents"

WRITES = st.tuples(
    st.just("write"), st.sampled_from(KEYS), st.sampled_from(["set", "set", "delete"])
)
FAILURES = st.tuples(
    st.just("status"),
    st.sampled_from(["", "watch", STREAMED, "limit"]),
    st.sampled_from([410, 429, 500, 503, 504]),
)
WATCH_FAULTS = st.tuples(
    st.sampled_from(["cut", "end", "expire", "no-bookmarks", "reset"]),
    st.sampled_from(["", "watch"]),
    st.integers(0, 3),
)
OTHERS = st.tuples(st.sampled_from(["compact", "refuse", "pause"]), st.just(""), st.just(0))
STEPS = st.lists(st.one_of(WRITES, WRITES, FAILURES, WATCH_FAULTS, OTHERS), max_size=25)


class Trial:
    """One server, one reflector, and a record of every object that ever existed."""

    def __init__(self, server: ApiServer, client: Client) -> None:
        self.server = server
        self.client = client
        self.written: dict[tuple[ObjectKey, str], Service] = {}
        self.count = 0

    async def step(self, what: str, where: Any, how: Any) -> None:
        match what:
            case "write":
                await self.write(where, how)
            case "compact":
                self.server.store.compact()
            case "refuse":
                await self.server.refuse()
                await asyncio.sleep(0.02)
                await self.server.accept()
            case "pause":
                await asyncio.sleep(0.03)
            case "status":
                self.server.faults.add(Fault("status", "GET", where, code=how))
            case _:
                action: Action = what  # type: ignore[assignment] # WATCH_FAULTS contains only these
                self.server.faults.add(Fault(action, "GET", where, after_events=how))

    async def write(self, key: ObjectKey, how: str) -> None:
        self.count += 1
        exists = self.server.store.get(KIND, *key) is not None
        if how == "delete":
            if exists:
                await self.client.delete(SERVICES, key)
            return
        body: dict[str, Any] = {
            "metadata": {
                "name": key.name,
                "namespace": key.namespace,
                "labels": {"n": str(self.count)},
            }
        }
        if exists:
            written = await self.client.patch(SERVICES, key, body)
        else:
            written = await self.client.create(SERVICES, body | {"spec": {"ports": [{"port": 80}]}})
        self.written[key, written.metadata.resource_version] = written


def free_port() -> int:
    """Return a port for a server that stops listening for a while. The server would lose a port
    that the kernel has chosen for it (tcp_disconnect)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def run(steps: list[tuple[str, Any, Any]], streamed: bool) -> None:
    async with (
        ApiServer(listen=[f"127.0.0.1:{free_port()}"], bookmark_interval_s=0.02) as server,
        Client(Access(server.url)) as client,
    ):
        if not streamed:
            server.faults.add(Fault("status", "GET", STREAMED, code=422, count=0))
        trial = Trial(server, client)
        # `no-bookmarks` can drop the bookmark that completes a streamed list; the reflector then
        # times out, and lists in pages.
        reflector: Reflector[Service] = Reflector(
            client, SERVICES, floor_s=0.002, ceiling_s=0.02, streamed_list_s=0.2
        )
        view: dict[ObjectKey, Service] = {}

        async def follow() -> None:
            async for changed in reflector.changes():
                for key, value in changed.items():
                    if value is None:
                        del view[key]
                    else:
                        assert value == trial.written[key, value.metadata.resource_version]
                        view[key] = value

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(follow())
            for step in steps:
                await trial.step(*step)
                await asyncio.sleep(0)
            server.faults.clear()
            expected = {ObjectKey(*service.key): service for service in await client.list(SERVICES)}
            async with asyncio.timeout(20):
                while not (reflector.synced and view == expected):
                    await asyncio.sleep(0.005)
            assert dict(reflector.objects) == expected
            watching.cancel()


@pytest.mark.parametrize("streamed", [True, False])
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
def test_the_view_finally_equals_the_objects_of_the_server(
    streamed: bool, steps: list[tuple[str, Any, Any]]
) -> None:
    with capture_logs():
        asyncio.run(run(steps, streamed))
