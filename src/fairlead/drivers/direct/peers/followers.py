"""What is still to be sent to one gateway that follows this one.

In: listeners that changed, new entries. Out: the same on a connection, after the state at its
start. Invariant: what waits for a follower is bounded. A listener is recorded as changed, not how
often it changed. At a limit of waiting entries the follower is dropped, and begins recent_entries when it
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
MAX_WAITING = 256
"""So many messages of entries, of some 4,000 each."""


class Follower:
    """One connection, which is dropped when it takes nothing for `stalled_s` seconds. `recent_entries`:
    asked for what it is to be told recent_entries, once it was told all that there is."""

    def __init__(
        self,
        exchange: Exchange,
        recent_entries: Callable[[], Iterable[bytes]] = tuple,
        *,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._exchange = exchange
        self._recent_entries = recent_entries
        self._stalled_s = stalled_s
        self._changed: dict[ListenerKey, None] = dict.fromkeys(exchange.listeners())
        self._entries = deque[bytes]()
        self._wake = asyncio.Event()
        self._end_reason = ""

    def end(self, why: str) -> None:
        """Tell it nothing more."""
        self._end_reason = self._end_reason or why
        self._wake.set()

    def enqueue(self, changed: Iterable[ListenerKey], entries: Iterable[bytes]) -> None:
        """Have it told, as soon as it takes it."""
        self._changed.update(dict.fromkeys(changed))
        self._entries.extend(entries)
        if len(self._entries) > MAX_WAITING:
            self._end_reason = "it does not keep up"
        self._wake.set()

    async def serve(self, hello: HelloMessage, writer: asyncio.StreamWriter) -> str:
        """Tell it everything until it goes or is to go: why it was."""
        try:
            await self._send(writer, frame(hello))
            await self._send_changed(writer)
            # What comes to be meanwhile waits its turn, so that of two words about one flow the
            # newer comes last.
            stored = self._exchange.all_entries()
            while (batch := await asyncio.to_thread(next, stored, None)) is not None:
                await self._send(writer, frame(self._exchange.entries(batch)))
            await self._send(writer, frame(CompleteMessage()))
            self._entries.extend(self._recent_entries())
            while not self._end_reason:
                # before looking: what is told while something is being sent is news
                self._wake.clear()
                await self._send_changed(writer)
                while self._entries:
                    await self._send(writer, self._entries.popleft())
                await self._pause(writer)
        except TimeoutError:
            return f"it took nothing for {self._stalled_s:g} s"
        except OSError as error:
            return str(error.strerror or error)
        return self._end_reason

    async def _send_changed(self, writer: asyncio.StreamWriter) -> None:
        while self._changed:
            key = next(iter(self._changed))
            del self._changed[key]
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
