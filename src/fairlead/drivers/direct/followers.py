"""Gateways that follow this one, and what each has still to be told.

In: listeners that changed, entries that came to be. Out: the same on each connection, after all that there was before.
Invariants: only those whose address is allowed are answered. What waits for a follower is bounded: of a listener that it has
changed, not how often; entries up to a number, beyond which the follower is dropped, to begin anew when it comes back.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address

import structlog

from fairlead.drivers.direct.exchange import Exchange
from fairlead.drivers.direct.peer_messages import Alive, Hello, Whole, frame
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.errors import Refused

log = structlog.get_logger()

Address = IPv4Address | IPv6Address

ALIVE_S = 1.0
STALLED_S = 5.0
MOST_FROM_ONE = 4
"""Connections from one address: it may be starting while its predecessor is still thought to be there."""
MOST_WAITING = 256
"""So many messages of entries, of some 4,000 each."""


class Follower:
    """One connection, which is dropped when it takes nothing for `stalled_s` seconds. `again`: asked for what it is to be told
    again, once it was told all that there is."""

    def __init__(
        self, exchange: Exchange, again: Callable[[], Iterable[bytes]] = tuple, *, stalled_s: float = STALLED_S
    ) -> None:
        self._exchange = exchange
        self._again = again
        self._stalled_s = stalled_s
        self._touched: dict[ListenerKey, None] = dict.fromkeys(exchange.listeners())
        self._entries = deque[bytes]()
        self._wake = asyncio.Event()
        self._over = ""

    def end(self) -> None:
        """Tell it nothing more."""
        self._over = "this gateway ends"
        self._wake.set()

    def tell(self, touched: Iterable[ListenerKey], entries: Iterable[bytes]) -> None:
        """Have it told, as soon as it takes it."""
        self._touched.update(dict.fromkeys(touched))
        self._entries.extend(entries)
        if len(self._entries) > MOST_WAITING:
            self._over = "it does not keep up"
        self._wake.set()

    async def serve(self, hello: Hello, writer: asyncio.StreamWriter) -> str:
        """Tell it everything until it goes or is to go: why it was."""
        try:
            await self._send(writer, frame(hello))
            await self._send_touched(writer)
            # What comes to be meanwhile waits its turn, so that of two words about one flow the newer comes last.
            stored = self._exchange.stored()
            while (batch := await asyncio.to_thread(next, stored, None)) is not None:
                await self._send(writer, frame(self._exchange.entries(batch)))
            await self._send(writer, frame(Whole()))
            self._entries.extend(self._again())
            while not self._over:
                self._wake.clear()  # before looking: what is told while something is being sent is news
                await self._send_touched(writer)
                while self._entries:
                    await self._send(writer, self._entries.popleft())
                await self._pause(writer)
        except TimeoutError:
            return f"it took nothing for {self._stalled_s:g} s"
        except OSError as error:
            return str(error.strerror or error)
        return self._over

    async def _send_touched(self, writer: asyncio.StreamWriter) -> None:
        while self._touched:
            key = next(iter(self._touched))
            del self._touched[key]
            if (tables := self._exchange.tables(key)) is not None:
                await self._send(writer, frame(tables))

    async def _pause(self, writer: asyncio.StreamWriter) -> None:
        """Until there is news; a sign of life each second."""
        try:
            async with asyncio.timeout(ALIVE_S):
                await self._wake.wait()
        except TimeoutError:
            await self._send(writer, frame(Alive()))

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        async with asyncio.timeout(self._stalled_s):
            await writer.drain()


def _address(writer: asyncio.StreamWriter) -> Address | None:
    """Where it comes from; None if it has gone already."""
    peer = writer.get_extra_info("peername")
    return ip_address(peer[0].partition("%")[0]) if peer else None


@asynccontextmanager
async def serving(
    listen: str,
    allowed: Collection[Address],
    make_follower: Callable[[], Follower],
    hello: Callable[[], Hello],
    followers: set[Follower],
) -> AsyncIterator[None]:
    """Answer those at `allowed` addresses while inside; `followers` are those who are there now.

    Raises Refused where nobody can listen at `listen` (`address:port`, `*:port` for all addresses, empty for nowhere).
    """
    if not listen:
        yield
        return

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = _address(writer)
        if address not in allowed or [_address(each) for each in writers].count(address) >= MOST_FROM_ONE:
            log.warning("not told anything: it is none of gateway.peers, or follows already", address=str(address))
            writer.transport.abort()
            return
        follower = writers[writer] = make_follower()
        followers.add(follower)
        log.info("a gateway follows", address=str(address))
        try:
            log.info("a gateway follows no more", address=str(address), why=await follower.serve(hello(), writer))
        finally:
            followers.discard(follower)
            writer.transport.abort()
            del writers[writer]
            gone.set()

    writers: dict[asyncio.StreamWriter, Follower] = {}
    gone = asyncio.Event()
    host, _, port = listen.rpartition(":")
    try:
        server = await asyncio.start_server(answer, None if host == "*" else host.strip("[]"), int(port))
    except OSError as error:
        raise Refused(f"cannot listen on {listen} for other gateways: {error}", fix="set gateway.peerListen") from error
    try:
        yield
    finally:
        server.close()
        for writer, follower in writers.items():
            writer.transport.abort()
            follower.end()
        while writers:  # each ends by itself now, which takes no time
            gone.clear()
            await gone.wait()
