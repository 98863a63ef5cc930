"""The listening socket for other gateways, and which connections it accepts.

In: the address to listen on, the present addresses of the other gateways, optional certificates.
Out: a Follower for each accepted connection. Invariants: a connection from an address that is not a
peer's is closed before anything is read, sent or stored; each address has at most MAX_FROM_ONE
connections, including those in a TLS handshake; refused connections write a bounded number of lines
to the log.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address

import structlog

from fairlead.drivers.direct.peers.followers import Follower
from fairlead.drivers.direct.peers.messages import HelloMessage
from fairlead.drivers.direct.peers.refusals import Refusals
from fairlead.drivers.direct.peers.tls import ALL_OR_NONE, PeerTLS, describe, identity_problem
from fairlead.errors import Refused, plain
from fairlead.net.address import split_host_port
from fairlead.net.listening import EVERYWHERE, listen
from fairlead.net.own_link import only_own_link

log = structlog.get_logger()

Address = IPv4Address | IPv6Address

MAX_FROM_ONE = 4
"""Connections from one address. A gateway may restart while the connection of its previous process
still seems to be open."""
HANDSHAKE_S = 2.0
ACCEPTS = 16
"""Connections that are accepted in one step of the event loop."""
BACKLOG = 64


class PeerServer:
    """Serves the gateways that connect. `allowed`: the addresses of the other gateways; if the
    caller changes this collection, it calls `end_unknown`. `followers` is the set of present
    followers. `unknown`: why a connection from any other address is refused."""

    def __init__(
        self,
        allowed: Collection[Address],
        make_follower: Callable[[], Follower],
        hello: Callable[[], HelloMessage],
        followers: set[Follower],
        refusals: Refusals,
        tls: PeerTLS | None,
        *,
        unknown: str,
    ) -> None:
        self._unknown = unknown
        self._allowed = allowed
        self._make_follower = make_follower
        self._hello = hello
        self._followers = followers
        self._refusals = refusals
        self._tls = tls
        self._count = Counter[Address]()
        self._address_of: dict[Follower, Address] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, listener: socket.socket) -> None:
        """Accept some of the waiting connections."""
        for _ in range(ACCEPTS):
            try:
                connection, (text, *_) = listener.accept()
            except OSError:  # no connection waits, or the caller has closed it already
                return
            address = _address(text)
            if address not in self._allowed:
                connection.close()
                self._refusals.add("", text, self._unknown)
            elif self._count[address] >= MAX_FROM_ONE:
                connection.close()
                self._refusals.add(
                    f"{address} full", text, f"it has {MAX_FROM_ONE} connections already"
                )
            else:
                self._count[address] += 1
                task = asyncio.create_task(self._serve(connection, address))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def end_unknown(self) -> None:
        """End the connections of followers whose address is not allowed any more."""
        for follower, address in self._address_of.items():
            if address not in self._allowed:
                follower.end("its address is not that of a gateway any more")

    async def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._refusals.close()

    async def _serve(self, connection: socket.socket, address: Address) -> None:
        try:
            async with self._secured(connection) as (reader, writer):
                tls_object = writer.get_extra_info("ssl_object")
                if tls_object is not None and (why := identity_problem(tls_object)):
                    self._refusals.add(str(address), str(address), why)
                else:
                    await self._serve_follower(reader, writer, address)
        except OSError as error:
            self._refusals.add(str(address), str(address), describe(error))
        finally:
            self._count[address] -= 1

    @asynccontextmanager
    async def _secured(
        self, connection: socket.socket
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open the connection, with a TLS handshake if TLS is configured. Raise OSError, of which
        ssl.SSLError is a subclass."""
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._tls.server if self._tls is not None else None,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls is not None else None,
            )
        except ConnectionAbortedError as error:  # asyncio raises this at the timeout
            connection.close()
            raise OSError(
                f"it did not begin TLS within {HANDSHAKE_S:g} s: {ALL_OR_NONE}"
            ) from error
        except OSError:
            connection.close()
            raise
        try:
            yield reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        finally:
            transport.abort()

    async def _serve_follower(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Address
    ) -> None:
        follower = self._make_follower()
        self._followers.add(follower)
        self._address_of[follower] = address
        log.info("a gateway follows", address=str(address))
        watch = asyncio.create_task(_end_reason(reader))
        watch.add_done_callback(
            lambda task: follower.end(task.result()) if not task.cancelled() else None
        )
        try:
            why = await follower.serve(self._hello(), writer)
            log.info("a gateway no longer follows", address=str(address), why=why)
        finally:
            watch.cancel()
            self._followers.discard(follower)
            del self._address_of[follower]


async def _end_reason(reader: asyncio.StreamReader) -> str:
    """Wait until the follower closes the connection or sends data, which no gateway does. Return a
    description of the event."""
    try:
        first = await reader.read(1)
    except OSError as error:
        return describe(error)
    if not first:
        return "it closed the connection"
    if first == b"\x16":  # a TLS handshake, RFC 8446, 5.1
        return f"it speaks TLS: {ALL_OR_NONE}"
    return "it is not a gateway: it sent data"


def _address(text: str) -> Address:
    """Return the address of the caller. A socket for both families reports IPv4 addresses in
    IPv4-mapped form."""
    address = ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


@asynccontextmanager
async def serving(
    server: PeerServer, address: str, *, own_link: bool = False
) -> AsyncIterator[None]:
    """Accept connections at `address` inside the context. Raise Refused if listening fails.

    `address`: `address:port`, `*:port` for all addresses, empty for none. `own_link`: only hosts on
    a link with this one can connect.
    """
    if not address:
        yield
        return
    host, port = split_host_port(address)
    try:
        listeners = listen(
            port,
            EVERYWHERE if host == "*" else (host,),
            backlog=BACKLOG,
            prepare=only_own_link if own_link else lambda _: None,
        )
    except OSError as error:
        raise Refused(
            f"listening on {address} for other gateways failed: {plain(error)}",
            fix="set gateway.peerListen",
        ) from error
    loop = asyncio.get_running_loop()
    try:
        for each in listeners:
            loop.add_reader(each.fileno(), server.accept, each)
        yield
    finally:
        for each in listeners:
            loop.remove_reader(each.fileno())
            each.close()
        await server.close()
