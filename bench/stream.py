"""A stream of events at any pace: recorded from the real API server, replayed by a small one.

In: a size of a cluster, which is filled if need be. Out: `Recording`: its objects as they are
listed, and what a watch told while one endpoint of every slice turned unready, and then ready
again. `Replay` serves a recording: lists, whole and in pages, and watches that tell its events when
they are told to. So a pace can be set that the real server, on the same machine, could not keep up.
Invariant: what is served is what the real server sent, byte by byte; only resourceVersions of lists
are those of the recording."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from bench.cluster import Tell, cluster
from bench.fixture import Size

from bench import fixture
from fairlead.kube.access import Access
from fairlead.kube.client import JSON_PATCH, Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.objects import ENDPOINT_SLICES, NAMESPACES, NODES, SERVICES, ObjectKey, Resource
from fairlead.lab import namespace

RESOURCES: tuple[Resource[Any], ...] = (
    SERVICES,
    ENDPOINT_SLICES,
    NODES,
    NAMESPACES,
    ADDRESS_POOLS,
    ADDRESS_GRANTS,
)
TICK_S = 0.005
WRITERS = 16
VERSION = "1"


class Recording(msgspec.Struct, frozen=True):
    """`listed`: by path, objects as JSON. `turns`: of each turn, the lines of a watch of
    EndpointSlices, one for each Service, in order of writing."""

    listed: dict[str, list[msgspec.Raw]]
    turns: list[list[str]]


async def recording(folder: Path, size: Size, tell: Tell) -> Recording:
    """The recording in `folder`, made of a real API server's cluster if it is not there."""
    place = folder / f"recording-{size}.json"
    if not place.exists():
        async with (
            cluster(folder, size, tell) as server,
            Client(server.access, timeout_s=120.0) as client,
        ):
            tell("recording what the API server tells")
            listed = {resource.path(): await _listed(client, resource) for resource in RESOURCES}
            turns = [
                [line.decode() for line in await _turn(client, size, ready)]
                for ready in (False, True)
            ]
        place.write_bytes(msgspec.json.encode(Recording(listed, turns)))
    return msgspec.json.decode(place.read_bytes(), type=Recording)


async def _listed(client: Client, resource: Resource[Any]) -> list[msgspec.Raw]:
    return [msgspec.Raw(bytes(item)) for item in (await client.page(resource, limit=0)).items or ()]


async def _turn(client: Client, size: Size, ready: bool) -> list[bytes]:
    """Write every slice once; what a watch told of it."""
    answer = await client.page(ENDPOINT_SLICES, limit=1)
    lines: list[bytes] = []
    async with asyncio.timeout(600), asyncio.TaskGroup() as group:
        group.create_task(_write(client, size, ready))
        stream = client.stream(
            ENDPOINT_SLICES, parameters={"resourceVersion": answer.metadata.resource_version}
        )
        async with aclosing(stream) as batches:
            async for batch in batches:
                lines += batch
                if len(lines) >= size.services:
                    break
    return lines


async def _write(client: Client, size: Size, ready: bool) -> None:
    numbers = iter(range(size.services))

    async def work() -> None:
        for number in numbers:
            namespace, name = fixture.place_of(number)
            key = ObjectKey(namespace, fixture.slice_name(name))
            patch: list[object] = [
                {"op": "replace", "path": "/endpoints/0/conditions/ready", "value": ready}
            ]
            await client.patch(
                ENDPOINT_SLICES,
                key,
                patch,
                content_type=JSON_PATCH,
                field_manager="kube-controller-manager",
            )

    async with asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(work())


class Watched(msgspec.Struct):
    """The object of an event, as far as it is looked at here."""

    class Object(msgspec.Struct):
        class Metadata(msgspec.Struct):
            labels: dict[str, str]

        metadata: Metadata

    object: Object


class Replay:
    """Serves one recording on loopback. One process at a time is to watch."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._watches: dict[str, web.StreamResponse] = {}
        self._over = asyncio.Event()
        self._services = [[service_of(line) for line in turn] for turn in recording.turns]
        self.access = Access("")

    @asynccontextmanager
    async def listen(self, inside: str = "") -> AsyncIterator["Replay"]:
        """Serve while inside: on loopback, of the network namespace of this name if one is
        given."""
        with namespace.inside(inside) if inside else nullcontext():
            listening = socket.create_server(("127.0.0.1", 0))
        application = web.Application()
        self.routes(application)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            self.access = Access(f"http://127.0.0.1:{runner.addresses[0][1]}")
            yield self
        finally:
            self._over.set()
            await runner.cleanup()

    def routes(self, application: web.Application) -> None:
        """What is served."""
        for path in self._recording.listed:
            application.router.add_get(path, self._answer)

    def listed(self, resource: Resource[Any]) -> list[bytes]:
        """The objects of a kind."""
        return [bytes(each) for each in self._recording.listed[resource.path()]]

    async def send(self, turn: int, pace_per_s: float) -> dict[str, float]:
        """Tell all events of a turn, so many a second (0: as fast as they are taken). Answers when
        each was written: by Service, in seconds of CLOCK_MONOTONIC."""
        lines, services = self._recording.turns[turn], self._services[turn]
        batch = max(1, round(pace_per_s * TICK_S)) if pace_per_s else 100
        sent: dict[str, float] = {}
        begun_s = time.monotonic()
        for first in range(0, len(lines), batch):
            if pace_per_s and (early_s := begun_s + first / pace_per_s - time.monotonic()) > 0:
                await asyncio.sleep(early_s)
            now_s = time.monotonic()
            sent |= dict.fromkeys(services[first : first + batch], now_s)
            await self.tell("\n".join(lines[first : first + batch]))
        return sent

    async def tell(self, lines: str, resource: Resource[Any] = ENDPOINT_SLICES) -> None:
        """Tell whoever watches these objects these events."""
        await self._watches[resource.path()].write(f"{lines}\n".encode())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        items = self._recording.listed[request.path]
        first, limit = (
            int(request.query.get("continue", 0)),
            int(request.query.get("limit", 0)) or len(items),
        )
        more = str(first + limit) if first + limit < len(items) else ""
        kind = next(resource.kind for resource in RESOURCES if resource.path() == request.path)
        body = {"kind": f"{kind}List", "metadata": {"resourceVersion": VERSION, "continue": more}}
        return web.Response(
            body=msgspec.json.encode({**body, "items": items[first : first + limit]}),
            content_type="application/json",
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if "sendInitialEvents" in request.query:
            # As the recorded server did: Debian's etcd is too old for streamed lists.
            return web.json_response(
                {"kind": "Status", "code": 500, "message": "no streamed lists"}, status=500
            )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._watches[request.path] = response
        await self._over.wait()
        return response


def service_of(line: str) -> str:
    """The Service that an event of an EndpointSlice is about."""
    labels: dict[str, str] = msgspec.json.decode(line, type=Watched).object.metadata.labels
    return labels["kubernetes.io/service-name"]


def delays_ms(sent: dict[str, float], applied: dict[str, float]) -> Sequence[float]:
    """From each event to the driver call for its Service, sorted."""
    return sorted((applied[service] - at_s) * 1000 for service, at_s in sent.items())
