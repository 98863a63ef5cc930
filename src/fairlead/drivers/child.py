"""A process that works for one component of a role, and ends with it.

In: its command. Out: streams for messages (`net/frames`); they end when the process has ended. The
other end of the streams is a socket that is the standard input of the process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

END_WITHIN_S = 2.0
"""A process that does not end by itself within this time is killed."""


class Child(NamedTuple):
    """A running process, and the streams to and from it."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def status(self) -> str:
        """How it ended, for a message; empty while it runs."""
        code = self.process.returncode
        return "" if code is None else f", with status {code}"


@asynccontextmanager
async def child(command: Sequence[str]) -> AsyncIterator[Child]:
    """Start the process, and end it after the block."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(*command, stdin=theirs.fileno())
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        yield Child(process, reader, writer)
    finally:
        writer.close()  # the process ends when its input ends
        await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(END_WITHIN_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
