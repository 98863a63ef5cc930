"""A TCP port that answers small HTTP requests at once, on all addresses of both families or on some.

In: a function from a request to an answer, called in the event loop. Out: a listening port.
Invariant: the answer is computed when the request is complete, never earlier, so it is never stale; requests are answered in
order; a connection that says nothing is closed. HTTP/1.1 after RFC 9112, as much as health checks need: any method,
keep-alive, pipelining, bodies with a length. A transport protocol and no task per connection: probes come by the hundred.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Collection
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple, Self

IDLE_S = 60.0
"""A connection is closed after so long without a complete request."""

EVERYWHERE = ("0.0.0.0", "::")
"""Every address of this host. A family that it has not is passed over."""

BACKLOG = 512
_LONGEST_HEAD = 16_384


class Request(NamedTuple):
    """The part of a request that an answer may depend on."""

    method: str
    path: str


class Answer(NamedTuple):
    """A JSON answer."""

    status: HTTPStatus
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


Answering = Callable[[Request], Answer]


class Port:
    """An open port."""

    def __init__(self, servers: list[asyncio.Server], connections: set["_Connection"]) -> None:
        self._servers = servers
        self._connections = connections

    @classmethod
    async def open(cls, number: int, answering: Answering, addresses: Collection[str] = EVERYWHERE) -> Self:
        """Listen at these addresses, or at every one of this host. Raises OSError: EADDRINUSE if the port is taken at one of
        them, EADDRNOTAVAIL if one of them is not this host's."""
        loop = asyncio.get_running_loop()
        connections: set[_Connection] = set()
        sockets = _listening(number, addresses)
        servers = [
            await loop.create_server(lambda: _Connection(answering, connections), sock=each, backlog=BACKLOG)
            for each in sockets
        ]
        return cls(servers, connections)

    async def close(self) -> None:
        """Stop listening and close the connections, after the answers that were written."""
        for server in self._servers:
            server.close()
        for connection in tuple(self._connections):
            connection.close()


class _Connection(asyncio.Protocol):
    def __init__(self, answering: Answering, connections: set["_Connection"]) -> None:
        self._answering = answering
        self._connections = connections
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        if self._deadline:
            self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while self._transport and not self._transport.is_closing():
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                if len(self._received) > _LONGEST_HEAD:
                    self._answer(Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"{}"), head_only=False, keep=False)
                return
            head = _head(bytes(self._received[:end]))
            if head is None:
                self._answer(Answer(HTTPStatus.BAD_REQUEST, b"{}"), head_only=False, keep=False)
                return
            request, length, keep = head
            if len(self._received) < end + 4 + length:
                return
            del self._received[: end + 4 + length]
            self._answer(self._answering(request), head_only=request.method == "HEAD", keep=keep)
            self._wait()

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    def _wait(self) -> None:
        if self._deadline:
            self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(IDLE_S, self.close)

    def _answer(self, answer: Answer, *, head_only: bool, keep: bool) -> None:
        assert self._transport is not None
        headers = (
            ("Content-Type", "application/json"),
            ("X-Content-Type-Options", "nosniff"),
            *answer.headers,
            ("Date", formatdate(usegmt=True)),
            ("Content-Length", str(len(answer.body))),
            ("Connection", "keep-alive" if keep else "close"),
        )
        head = f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers)
        self._transport.write(head.encode() + b"\r\n" + (b"" if head_only else answer.body))
        if not keep:
            self._transport.close()


def _head(text: bytes) -> tuple[Request, int, bool] | None:
    """The request, the length of its body, whether the connection stays; None if it is no HTTP/1.x request. Pure.

    A body without a length (chunked) is not read: the connection ends with the answer.
    """
    first, *rest = text.decode("latin-1").split("\r\n")
    match first.split(" "):
        case [method, target, ("HTTP/1.1" | "HTTP/1.0") as version]:
            request = Request(method, target.partition("?")[0])
        case _:
            return None
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
    length = fields.get("content-length", "0")
    if not length.isdecimal():
        return None
    asked = fields.get("connection", "").lower()
    keep = asked == "keep-alive" if version == "HTTP/1.0" else asked != "close"
    if "transfer-encoding" in fields:
        return request, 0, False
    return (request, int(length), keep) if int(length) <= _LONGEST_HEAD else (request, 0, False)


def _listening(number: int, addresses: Collection[str]) -> list[socket.socket]:
    """One socket for each of the addresses, or one for all that there are: a node may have ten thousand ports."""
    if tuple(addresses) == EVERYWHERE:
        with contextlib.suppress(_NoFamily):
            return [_bound("::", number, both=True)]
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as on_failure:
        for address in addresses:
            with contextlib.suppress(_NoFamily):
                sockets.append(_bound(address, number))
                on_failure.callback(sockets[-1].close)
        on_failure.pop_all()
    return sockets


class _NoFamily(Exception):
    """This host has no addresses of the family."""


def _bound(address: str, number: int, *, both: bool = False) -> socket.socket:
    """`both`: IPv4, too. Raises OSError, or _NoFamily."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            raise _NoFamily from error
        raise
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        listener.bind((address, number))
    except OSError as error:
        listener.close()
        if address == "::" and error.errno == errno.EADDRNOTAVAIL:  # IPv6 is switched off
            raise _NoFamily from error
        raise
    return listener
