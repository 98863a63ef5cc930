"""Proxies in front of a real API server: a recording one, and one like the HTTP proxy of a company.

In: the server. Out: `RecordingProxy`, which accepts plain HTTP on a socket of the test, forwards
every request, streams watches, and records each request with its token and the status of the
response; `connect_proxy`, which supports CONNECT and nothing else."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import aiohttp
from aiohttp import web
from yarl import URL

from fairlead.kube.access import Access, Credentials, tls_context

FORWARDED_HEADERS = ("Content-Type", "Retry-After")


class RecordedRequest(NamedTuple):
    """One request: its token, its method and path, and the status of its response."""

    at_s: float
    token: str
    method: str
    path: str
    code: int


class RecordingProxy:
    """A recording proxy. Use it as `async with RecordingProxy(access).listen(socket) as proxy`."""

    def __init__(self, access: Access) -> None:
        self.requests: list[RecordedRequest] = []
        self._access = access
        self._session: aiohttp.ClientSession | None = None
        self._open: set[asyncio.Transport] = set()

    def break_connections(self) -> None:
        """Break all connections on which a response is in progress."""
        for transport in self._open:
            transport.abort()

    @asynccontextmanager
    async def listen(self, listener: socket.socket) -> AsyncIterator["RecordingProxy"]:
        tls = tls_context(self._access, Credentials())
        runner = web.ServerRunner(web.Server(self._forward), shutdown_timeout=0.1)  # type: ignore[arg-type] # BaseRequest suffices
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=0)
        ) as self._session:
            await runner.setup()
            await web.SockSite(runner, listener).start()
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        headers = {
            name: value
            for name, value in request.headers.items()
            if name in ("Authorization", "Content-Type", "Accept")
        }
        async with self._session.request(
            request.method,
            URL(self._access.server + request.raw_path, encoded=True),
            data=await request.read() or None,
            headers=headers,
            server_hostname=self._access.server_name or None,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as response:
            token = request.headers.get("Authorization", "").removeprefix("Bearer ")
            now_s = asyncio.get_running_loop().time()
            self.requests.append(
                RecordedRequest(now_s, token, request.method, request.raw_path, response.status)
            )
            kept = {
                name: response.headers[name]
                for name in FORWARDED_HEADERS
                if name in response.headers
            }
            forwarded = web.StreamResponse(status=response.status, headers=kept)
            await forwarded.prepare(request)
            assert isinstance(request.transport, asyncio.Transport)
            self._open.add(request.transport)
            with suppress(aiohttp.ClientError, ConnectionError):
                async for chunk in response.content.iter_any():
                    await forwarded.write(chunk)
            self._open.discard(request.transport)
            return forwarded


@asynccontextmanager
async def connect_proxy() -> AsyncIterator[tuple[str, list[str]]]:
    """An HTTP proxy that supports CONNECT only. Yield its URL, and the list of requested hosts."""
    requested: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split(" ", 2)
        requested.append(f"{method} {target}")
        host, _, port = target.rpartition(":")
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, server_writer))
            group.create_task(_pump(server_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requested


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
