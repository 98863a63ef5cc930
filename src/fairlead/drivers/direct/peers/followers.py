"""The stream of messages to one gateway that follows this one.

In: listeners that changed, new entries. Out: the same on a connection, after the present state.
Invariant: the queue of a follower is bounded. A listener is recorded as changed, regardless of how
often it changed. At a limit of queued entries the follower is dropped, and begins again when it
reconnects.
"""

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
from fairlead.errors import plain

ALIVE_S = 1.0
"""Period of AliveMessages while there is nothing else to send."""
STALLED_S = 5.0
"""A follower that receives nothing for this time is dropped."""
MAX_WAITING = 256
"""Queued messages with entries, of up to 4,096 entries each."""


class Follower:
    """One connection, which is dropped when the follower receives nothing for `stalled_s` seconds.

    `recent_entries`: called when the whole state has been sent; returns messages that must be sent
    after it.
    """

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
        """End the stream, with a description of the reason."""
        self._end_reason = self._end_reason or why
        self._wake.set()

    def enqueue(self, changed: Iterable[ListenerKey], entries: Iterable[bytes]) -> None:
        """Queue changed listeners and messages with entries."""
        self._changed.update(dict.fromkeys(changed))
        self._entries.extend(entries)
        if len(self._entries) > MAX_WAITING:
            self._end_reason = "it does not receive fast enough"
        self._wake.set()

    async def serve(self, hello: HelloMessage, writer: asyncio.StreamWriter) -> str:
        """Send everything until the connection ends or `end` is called. Return the reason."""
        try:
            await self._send(writer, frame(hello))
            await self._send_changed(writer)
            # Entries that are reported meanwhile wait in the queue, so that of two records of one
            # flow the newer is sent last.
            stored = self._exchange.all_entries()
            while (batch := await asyncio.to_thread(next, stored, None)) is not None:
                await self._send(writer, frame(self._exchange.entries(batch)))
            await self._send(writer, frame(CompleteMessage()))
            self._entries.extend(self._recent_entries())
            while not self._end_reason:
                # Cleared before the queue is read, so that whatever is queued while something is
                # being sent wakes this task again.
                self._wake.clear()
                await self._send_changed(writer)
                while self._entries:
                    await self._send(writer, self._entries.popleft())
                await self._pause(writer)
        except TimeoutError:
            return f"it received nothing for {self._stalled_s:g} s"
        except OSError as error:
            return plain(error)
        return self._end_reason

    async def _send_changed(self, writer: asyncio.StreamWriter) -> None:
        while self._changed:
            key = next(iter(self._changed))
            del self._changed[key]
            if (tables := self._exchange.tables(key)) is not None:
                await self._send(writer, frame(tables))

    async def _pause(self, writer: asyncio.StreamWriter) -> None:
        """Wait until something is queued. Send an AliveMessage if nothing is queued for a
        second."""
        try:
            async with asyncio.timeout(ALIVE_S):
                await self._wake.wait()
        except TimeoutError:
            await self._send(writer, frame(AliveMessage()))

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        async with asyncio.timeout(self._stalled_s):
            await writer.drain()
