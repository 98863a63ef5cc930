"""The gateway's side of the process that watches other gateways.

In: what to watch. Out: `observed` is called with each report of the process. Invariant: if the
process ends by itself, the gateway ends too and is restarted, so that there is only one way to
start; the kernel goes on meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from fairlead.drivers.child import child
from fairlead.drivers.neighbors.protocol import WatchReport, WatchRequest
from fairlead.errors import Unavailable
from fairlead.net.frames import read, write

log = structlog.get_logger()


class NeighborWatch:
    """The watch over other gateways. `command` starts the process, see `roles/neighbor_process`."""

    def __init__(
        self, command: Sequence[str], observed: Callable[[WatchReport], Awaitable[None]]
    ) -> None:
        self._command = command
        self._observed = observed
        self._request = WatchRequest((), (), ())
        self._stream: asyncio.StreamWriter | None = None
        self.misses = 0
        """The questions without an answer since the start."""

    def set(self, request: WatchRequest) -> None:
        """Watch what the request says. It is sent only if it says something new."""
        before, self._request = self._request, msgspec.structs.replace(request, trusted=())
        if self._stream is not None and (before != self._request or request.trusted):
            write(self._stream, request)

    async def run(self) -> None:
        """Run the process until cancelled. Raise Unavailable if it ends by itself."""
        decoder = msgspec.msgpack.Decoder(WatchReport)
        async with child(self._command) as running:
            self._stream = running.writer
            try:
                write(running.writer, self._request)
                while (report := await read(running.reader, decoder)) is not None:
                    self.misses = report.misses
                    if report.problem:
                        log.warning("other gateways are not watched", problem=report.problem)
                    await self._observed(report)
            finally:
                self._stream = None
        raise Unavailable(
            f"the process that watches other gateways ended by itself{running.status}"
        )
