"""Fixtures: both API servers in turn; a scripted HTTP server, whose responses a test determines,
byte by byte if necessary; and a follower of a reflector."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from tests.lab.apiserver.api import Api

from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.objects import ObjectKey
from fairlead.kube.reflector import Reflector
from fairlead.lab.apiserver import ApiServer

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]
DEADLINE_S = 60.0


class ScriptedServer:
    """A server that sends the given replies in order, and the last one repeatedly. `requests`
    contains the received requests, each with its time."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[tuple[float, str, str, dict[str, str], bytes, dict[str, str]]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        now_s = asyncio.get_running_loop().time()
        self.requests.append(
            (now_s, request.method, request.path, dict(request.query), body, dict(request.headers))
        )
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return await reply(request)

    @property
    def queries(self) -> list[dict[str, str]]:
        return [request[3] for request in self.requests]

    @asynccontextmanager
    async def listen(self) -> AsyncIterator["ScriptedServer"]:
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


class Replies:
    """Replies that a Kubernetes API server sends, and replies that it should not send."""

    @staticmethod
    def json(body: object, status: int = 200, **headers: str) -> Reply:
        async def reply(request: web.Request) -> web.StreamResponse:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return web.json_response(body, status=status, headers=named)

        return reply

    @classmethod
    def failure(cls, code: int, message: str = "", **headers: str) -> Reply:
        return cls.json({"kind": "Status", "code": code, "message": message}, code, **headers)

    @classmethod
    def page(cls, *items: object, version: int, continues: str = "") -> Reply:
        return cls.json(
            {"metadata": {"resourceVersion": str(version), "continue": continues}, "items": items}
        )

    @staticmethod
    def silence() -> Reply:
        """Send no response until every deadline has passed."""

        async def reply(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(DEADLINE_S)
            return web.Response(status=500)

        return reply

    @staticmethod
    def watch(*pieces: object, then: str = "stay") -> Reply:
        """Return a watch that sends `pieces`: events, raw bytes, or numbers, which are pauses in
        seconds. `then`: the watch stays open (`stay`), ends (`end`), or its connection breaks
        (`break`)."""

        async def reply(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for piece in pieces:
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                    continue
                await response.write(
                    piece if isinstance(piece, bytes) else json.dumps(piece).encode() + b"\n"
                )
            if then == "stay":
                await asyncio.sleep(DEADLINE_S)
            elif then == "break":
                assert request.transport is not None
                await asyncio.sleep(0.05)  # the data must be sent before the connection breaks
                request.transport.abort()
            return response

        return reply


class Follower:
    """Runs a reflector and records its change sets. `view` is the sum of the change sets."""

    def __init__(self, reflector: Reflector[Any]) -> None:
        self.reflector = reflector
        self.sets: list[dict[ObjectKey, Any]] = []
        self.view: dict[ObjectKey, Any] = {}
        self.changed = asyncio.Event()
        self.task: asyncio.Future[None] | None = None

    async def run(self) -> None:
        async for changed in self.reflector.changes():
            assert self.reflector.synced
            self.sets.append(dict(changed))
            for key, value in changed.items():
                if value is None:
                    del self.view[key]
                else:
                    self.view[key] = value
            self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                try:
                    async with asyncio.timeout(0.05):
                        await self.changed.wait()
                except TimeoutError:
                    if self.task is not None and self.task.done():
                        self.task.result()


SERVERS = {"embedded": "", "real": "real_apiserver", "older-etcd": "older_real_apiserver"}
"""The fixture of each kind of API server; `place` starts the embedded one itself."""


@pytest.fixture(params=["embedded", "real"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the entry of SERVERS with which the test runs."""
    return str(request.param)


@pytest.fixture
def real_access(request: pytest.FixtureRequest, kind: str) -> Access | None:
    """Return the Access of a real server; None for the embedded one. It is not part of `place`,
    because the real server starts within an event loop of its own."""
    if fixture := SERVERS[kind]:
        access: Access = request.getfixturevalue(fixture).access
        return access
    return None


@pytest.fixture
async def place(real_access: Access | None) -> AsyncIterator[Api]:
    """Yield each server in turn, with its Access (`access`) and a namespace for the test
    (`namespace`)."""
    if real_access is not None:
        async with Api(real_access, "real") as place:
            yield place
        return
    async with (
        ApiServer(bookmark_interval_s=0.2) as server,
        Api(Access(server.url), "embedded") as place,
    ):
        yield place


@pytest.fixture
async def client(place: Api) -> AsyncIterator[Client]:
    async with Client(place.access) as client:
        yield client


@pytest.fixture
def replies() -> type[Replies]:
    return Replies


@pytest.fixture
def scripted() -> Callable[..., AbstractAsyncContextManager[tuple[ScriptedServer, Client]]]:
    """Return a context manager: `async with scripted(*replies) as (server, client)`."""

    @asynccontextmanager
    async def start(
        *given: Reply, timeout_s: float = 5.0
    ) -> AsyncIterator[tuple[ScriptedServer, Client]]:
        async with (
            ScriptedServer(*given).listen() as server,
            Client(Access(server.url), timeout_s=timeout_s) as client,
        ):
            yield server, client

    return start


@pytest.fixture
def follow() -> Callable[[Reflector[Any]], AbstractAsyncContextManager[Follower]]:
    """Return a context manager: `async with follow(reflector) as follower`."""

    @asynccontextmanager
    async def start(reflector: Reflector[Any]) -> AsyncIterator[Follower]:
        follower = Follower(reflector)
        task = follower.task = asyncio.ensure_future(follower.run())
        try:
            yield follower
            assert not task.done() or task.exception() is None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return start
