"""Send a watch to the client, and apply faults to it.

In: the lines of a watch. Out: a chunked HTTP response that carries each line without delay. Faults
may stall the watch, end it, cut it in the middle of a line, or insert an ERROR event.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import cast

from aiohttp import web

from fairlead.lab.apiserver.failure import expired
from fairlead.lab.apiserver.faults import Fault, Faults, Request
from fairlead.lab.apiserver.watching import Line, error_line


class Stream:
    """The response of one watch. `stall(seconds)` waits for this time, or until the server
    stops."""

    def __init__(
        self,
        http: web.BaseRequest,
        request: Request,
        faults: Faults,
        stall: Callable[[float | None], Awaitable[None]],
    ) -> None:
        self._http = http
        self._request = request
        self._faults = faults
        self._stall = stall
        self._sent = 0

    async def send(self, lines: AsyncIterator[Line]) -> web.StreamResponse:
        """Send the lines until they end, a fault ends them, or the client disconnects."""
        response = web.StreamResponse(
            headers={"Content-Type": "application/json", "Cache-Control": "no-cache, private"}
        )
        response.enable_chunked_encoding()
        await response.prepare(self._http)
        # An async generator that is not exhausted must be closed, or its watcher stays in the
        # store.
        async with aclosing(cast(AsyncGenerator[Line, None], lines)) as open_lines:
            async for line in open_lines:
                fault = self._faults.in_watch(self._request, self._sent)
                if fault is not None and await self._fail(response, fault, line):
                    return response
                if line.sort == "BOOKMARK" and not self._faults.bookmarks(self._request):
                    continue
                if line.data:
                    await response.write(line.data)
                    self._sent += line.sort != "BOOKMARK"
        await response.write_eof()
        return response

    async def _fail(self, response: web.StreamResponse, fault: Fault, line: Line) -> bool:
        """Execute a fault. Return True if it ends the watch."""
        match fault.action:
            case "stall":
                await self._stall(fault.stall_s)
                return False
            case "expire":
                await response.write(
                    error_line(
                        expired("The resourceVersion for the provided watch is too old.")
                    ).data
                )
            case "cut":
                data = line.data or b'{"type":"MODIFIED","object":{"kind":"Service"}}\n'
                await response.write(data[: len(data) // 2])
                # The last chunk is missing, so the client sees a broken connection, not an end.
                if self._http.transport is not None:
                    self._http.transport.close()
                return True
            case "reset":
                if self._http.transport is not None:
                    self._http.transport.abort()
                return True
            case _:
                pass
        await response.write_eof()
        return True
