"""The connections of a web server: a bounded number, each for one request.

In: the address to listen on, a factory of protocols for connections. Out: connections that are
served. Invariants: in one step of the event loop, a bounded number of connections is accepted, and
a bounded number of bytes is read from each connection. At a limit a new connection is still
accepted, and the oldest connection of the source with the most connections is closed. So a flood
takes time of the event loop, but can neither block it nor lock other callers out."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fairlead.net.listening import EVERYWHERE, listen
from fairlead.net.sources import ConnectionsBySource

MAX_CONNECTIONS, MAX_FROM_ONE = 64, 16
ACCEPTS = 8
CHUNK_BYTES = 4096
BACKLOG = 512

MakeProtocol = Callable[[], asyncio.BaseProtocol]


class Connections:
    """The connections that are open."""

    def __init__(self, make_protocol: MakeProtocol) -> None:
        self._make_protocol = make_protocol
        self._by_source = ConnectionsBySource[asyncio.Transport]()
        self._sources: dict[asyncio.Transport, str] = {}
        self._beginning: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """The number of open connections."""
        self._forget_closed()
        return len(self._sources)

    def accept(self, listener: socket.socket) -> None:
        """Accept some of the waiting connections."""
        for _ in range(ACCEPTS):
            try:
                made, (source, *_) = listener.accept()
            # No connection is waiting, or the caller has closed it already.
            except OSError:
                return
            made.setblocking(False)
            task = asyncio.create_task(self._begin(made, source))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, made: socket.socket, source: str) -> None:
        transport: asyncio.Transport
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            self._make_protocol, made
        )
        # asyncio's transports read at most `max_size` bytes at once.
        transport.max_size = CHUNK_BYTES  # type: ignore[attr-defined]
        self._forget_closed()
        self._sources[transport] = source
        self._by_source.add(source, transport)
        if self._by_source.count(source) > MAX_FROM_ONE:
            self._by_source.oldest(source).abort()
        elif (
            len(self._sources) > MAX_CONNECTIONS
            and (crowded := self._by_source.oldest_of_largest()) is not None
        ):
            crowded.abort()

    def _forget_closed(self) -> None:
        for transport in [each for each in self._sources if each.is_closing()]:
            self._by_source.remove(self._sources.pop(transport), transport)


@asynccontextmanager
async def serving(make_protocol: MakeProtocol, host: str, port: int) -> AsyncIterator[Connections]:
    """Serve during the block. `host`: an address, a host name, or `*` for all addresses. Raise
    OSError if the port cannot be opened."""
    loop, connections = asyncio.get_running_loop(), Connections(make_protocol)
    listeners = listen(port, EVERYWHERE if host == "*" else await _addresses(host), backlog=BACKLOG)
    try:
        for each in listeners:
            loop.add_reader(each.fileno(), connections.accept, each)
        yield connections
    finally:
        for each in listeners:
            loop.remove_reader(each.fileno())
            each.close()


async def _addresses(host: str) -> tuple[str, ...]:
    """Return the addresses of a host, which may be an address or a host name."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))
