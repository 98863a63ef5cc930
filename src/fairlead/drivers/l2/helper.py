"""The role's side of the announcing process: start it, send requests, receive reports.

In: requests. Out: reports, through callbacks. Invariant: a request is sent only after the process
has started, and `exchange` returns only after the process has carried the request out. If the
process ends by itself, `run` raises an error, so that the role ends too and is restarted: there is
only one way to start. The kernel continues to answer meanwhile."""

import asyncio
import socket
from collections.abc import Callable, Sequence

import msgspec

from fairlead.drivers.l2.messages import Configure, Report, Settings
from fairlead.errors import Unavailable
from fairlead.net.frames import read, write

END_WITHIN_S = 2.0
"""A process that does not end by itself within this time is killed."""
CARRIED_OUT_WITHIN_S = 10.0


class Helper:
    """The process. `command` starts it, see `roles/l2_process`. `reported` is called with each
    report."""

    def __init__(self, command: Sequence[str], reported: Callable[[Report], None]) -> None:
        self._command = command
        self._reported = reported
        self._stream: asyncio.StreamWriter | None = None
        self._up = asyncio.Event()
        self._sequence = 0
        self._carried_out = asyncio.Condition()
        self._done = -1

    async def exchange(self, request: Configure) -> None:
        """Send a request and wait until the process has carried it out. Raise Unavailable if the
        process has ended, or does not answer."""
        await self._up.wait()
        if self._stream is None:
            raise Unavailable("the announcing process has ended")
        self._sequence += 1
        number = self._sequence
        write(self._stream, msgspec.structs.replace(request, sequence=number))
        try:
            async with asyncio.timeout(CARRIED_OUT_WITHIN_S), self._carried_out:
                await self._carried_out.wait_for(lambda: self._done >= number or not self._stream)
        except TimeoutError as error:
            raise Unavailable(
                f"the announcing process did not answer within {CARRIED_OUT_WITHIN_S:g} s"
            ) from error
        if self._stream is None:
            raise Unavailable("the announcing process has ended")

    async def run(self, settings: Settings) -> None:
        """Run the process until cancelled. Raise Unavailable if it ends by itself."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(*self._command, stdin=theirs.fileno())
        reader, self._stream = await asyncio.open_connection(sock=ours)
        write(self._stream, settings)
        decoder = msgspec.msgpack.Decoder(Report)
        try:
            while (report := await read(reader, decoder)) is not None:
                self._up.set()
                self._done = report.sequence
                self._reported(report)
                async with self._carried_out:
                    self._carried_out.notify_all()
        finally:
            self._stream.close()  # the process ends when its input ends
            self._stream = None
            self._up.set()
            await _ended(process)
            async with self._carried_out:
                self._carried_out.notify_all()
        status = "" if process.returncode is None else f", with status {process.returncode}"
        raise Unavailable(f"the announcing process ended by itself{status}")


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(END_WITHIN_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
