"""What is still to be sent to one gateway that follows this one.

In: listeners that changed, new entries. Out: the same on a connection, after the state at its
start. Invariant: what waits for a follower is bounded. A listener is recorded as changed, not how
often it changed. At a limit of waiting entries the follower is dropped, and begins again when it
reconnects."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from fairlead.drivers.direct.peers.exchange import Exchange
from fairlead.drivers.direct.peers.messages import (
    AliveMessage,
    CompleteMessage,
    HelloMessage,
    frame,
)
from fairlead.drivers.direct.spec import ListenerKey

ALIVE_S = 1.0
STALLED_S = 5.0
MOST_WAITING = 256
"""So many messages of entries, of some 4,000 each."""


class Follower:
    """One connection, which is dropped when it takes nothing for `stalled_s` seconds. `again`:
    asked for what it is to be told again, once it was told all that there is."""

    def __init__(
        self,
        exchange: Exchange,
        again: Callable[[], Iterable[bytes]] = tuple,
        *,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._exchange = exchange
        self._again = again
        self._stalled_s = stalled_s
        self._touched: dict[ListenerKey, None] = dict.fromkeys(exchange.listeners())
        self._entries = deque[bytes]()
        self._wake = asyncio.Event()
        self._over = ""

    def end(self, why: str) -> None:
        """Tell it nothing more."""
        self._over = self._over or why
        self._wake.set()

    def tell(self, touched: Iterable[ListenerKey], entries: Iterable[bytes]) -> None:
        """Have it told, as soon as it takes it."""
        self._touched.update(dict.fromkeys(touched))
        self._entries.extend(entries)
        if len(self._entries) > MOST_WAITING:
            self._over = "it does not keep up"
        self._wake.set()

    async def serve(self, hello: HelloMessage, writer: asyncio.StreamWriter) -> str:
        """Tell it everything until it goes or is to go: why it was."""
        try:
            await self._send(writer, frame(hello))
            await self._send_touched(writer)
            # What comes to be meanwhile waits its turn, so that of two words about one flow the
            # newer comes last.
            stored = self._exchange.stored()
            while (batch := await asyncio.to_thread(next, stored, None)) is not None:
                await self._send(writer, frame(self._exchange.entries(batch)))
            await self._send(writer, frame(CompleteMessage()))
            self._entries.extend(self._again())
            while not self._over:
                # before looking: what is told while something is being sent is news
                self._wake.clear()
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
            await self._send(writer, frame(AliveMessage()))

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        async with asyncio.timeout(self._stalled_s):
            await writer.drain()
