"""The API server as an HTTP server: `async with ApiServer() as server:` serves at `server.url`
until the block ends.

In: HTTP/1.1 requests of the Kubernetes API, from kubectl and other clients. Out: objects, lists,
Tables, watches, Status objects. It stores its objects in memory and requires no authentication.
Besides the API it serves `/_faults` (POST a fault or a list of faults, GET, DELETE) and
`/_requests` (GET, DELETE). Follows https://kubernetes.io/docs/reference/using-api/api-concepts/.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from typing import Self

from aiohttp import web

from fairlead.errors import Refused, plain
from fairlead.kube.rules.allocation import Allocator
from fairlead.lab.apiserver.faults import Faults, RequestLog
from fairlead.lab.apiserver.registry import Registry, utc_now
from fairlead.lab.apiserver.routes import Routes
from fairlead.lab.apiserver.store import Store
from fairlead.net.address import join_host_port, socket_family

Address = tuple[str, int] | tuple[str, int, int, int]

_BACKLOG = 512
_STOP_TIMEOUT_S = 2.0


class ApiServer:
    """An API server. `listen` are `host:port` (port 0: any free port); `sockets` are bound already,
    and the server takes ownership of them.

    `now` is its clock. `registry` writes objects without HTTP, `store` reads them, `faults` makes
    requests fail, `requests` is the request log.
    """

    def __init__(
        self,
        *,
        listen: Sequence[str] = ("127.0.0.1:0",),
        sockets: Sequence[socket.socket] = (),
        service_cidrs: Sequence[str] = ("10.96.0.0/16",),
        bookmark_interval_s: float = 60.0,
        history_limit: int = 20_000,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.store = Store(history_limit=history_limit)
        self.registry = Registry(self.store, Allocator(service_cidrs), now)
        self.faults = Faults(on_change=self.store.wake_watchers)
        self.requests = RequestLog()
        self._listen = tuple(listen)
        self._sockets = list(sockets)
        self._addresses: list[Address] = []
        self._stopping = asyncio.Event()
        self._routes = Routes(
            self.registry,
            self.faults,
            self.requests,
            self._stopping,
            self._refuse_for,
            bookmark_interval_s=bookmark_interval_s,
        )
        self._runner: web.ServerRunner | None = None
        self._sites: list[web.SockSite] = []
        self._lifetime = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()

    @property
    def url(self) -> str:
        """The URL of the first listening socket."""
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        return [_url_of(sock) for sock in self._sockets]

    async def __aenter__(self) -> Self:
        self._sockets += [_bind(text) for text in self._listen]
        self._addresses = [sock.getsockname() for sock in self._sockets]
        server = web.Server(self._routes.answer, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=_STOP_TIMEOUT_S)
        self._lifetime.callback(self._close_sockets)
        self._lifetime.push_async_callback(self._runner.cleanup)
        await self._lifetime.enter_async_context(self._tasks)
        await self._runner.setup()
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        self.store.close_watchers()
        await self._lifetime.aclose()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()

    async def accept(self) -> None:
        """Accept connections, at the start or after `refuse`."""
        if self._runner is None or self._sites:
            return
        for sock, address in zip(self._sockets, self._addresses, strict=True):
            _listen(sock, address)
            # aiohttp closes the socket that it serves on. It gets a duplicate, so that this server
            # keeps the port while connections are refused.
            site = web.SockSite(self._runner, sock.dup(), backlog=_BACKLOG)
            await site.start()
            self._sites.append(site)

    async def refuse(self) -> None:
        """Refuse new connections and drop open ones, like a server that is down, until `accept`."""
        for site in self._sites:
            await site.stop()
        self._sites.clear()
        for sock in self._sockets:
            # On Linux this ends listening until the next `listen`. It also works on an inherited
            # socket, which may belong to another network namespace and could not be created again
            # here.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
        if self._runner is not None and self._runner.server is not None:
            for connection in self._runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()

    def _refuse_for(self, duration_s: float) -> None:
        self._tasks.create_task(self._refuse_then_accept(duration_s))

    async def _refuse_then_accept(self, duration_s: float) -> None:
        await self.refuse()
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                await self._stopping.wait()
        if not self._stopping.is_set():
            await self.accept()


def _bind(text: str) -> socket.socket:
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    family = socket_family(host)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        sock.bind((host, int(port)))
    except (OSError, ValueError) as error:
        sock.close()
        raise Refused(
            f"binding the API server to {text!r} failed: {plain(error)}",
            fix="specify a free HOST:PORT of this machine",
        ) from error
    return sock


def _listen(sock: socket.socket, address: Address) -> None:
    """Listen on `address`, the same port as before: a socket that was bound to port 0 loses its
    port when it stops listening."""
    try:
        sock.bind(address)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the socket is still bound
            raise
    sock.listen(_BACKLOG)


def _url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{join_host_port(host, port)}"
