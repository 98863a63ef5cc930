"""A forwarder between a process and its API server, which can kill the process at a chosen call.

In: the server's URL, a function that kills the process. Out: every call and its answer is
forwarded, watches as a stream; `calls` lists the calls that write, in order. When armed, the
forwarder kills the process at the nth call after that, either before the call is forwarded (the
server never receives it) or after the server has executed it (the process never receives the
answer). Renewals of the Leases by which processes announce themselves do not count, because they
happen at any time. Invariant: after the process is killed at a call, none of its later calls
reaches the server; `resume` forwards the calls of the next process."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal, NamedTuple

import aiohttp
from aiohttp import web
from yarl import URL

from fairlead.config import PresenceConfig

Moment = Literal["before", "after"]
PRESENCE = PresenceConfig().namespace
PASSED_ON = ("Content-Type", "Retry-After")


class Call(NamedTuple):
    """A call that writes."""

    method: str
    path: str
    manager: str
    """The field manager of a patch; empty if it names none."""

    @property
    def writes_lease(self) -> bool:
        return "/leases" in self.path

    def __str__(self) -> str:
        # Events are named at random.
        path = re.sub(r"(/events/[^/]+\.)[0-9a-f]{16}$", r"\1*", self.path)
        return f"{self.method} {path}" + (f" ({self.manager})" if self.manager else "")


class KillPoint(NamedTuple):
    """The counted call at which the process is killed, and whether before or after it."""

    number: int
    moment: Moment
    counts: Callable[[Call], bool]


class Forwarder:
    """The forwarder. Use as `async with forwarder.listen()`."""

    def __init__(self, server: str, end: Callable[[], None]) -> None:
        self.url = ""
        self.calls: list[Call] = []
        self.requests: list[str] = []
        """Every call, including reads and calls while the server was unreachable."""
        self.struck: Call | None = None
        """The call at which the process was killed since the forwarder was last armed."""
        self.truncate_answers = False
        """If true, only the first half of the answers to writes is sent; the client can notice it
        only because the JSON is incomplete."""
        self._server = server
        self._end = end
        self._fate: KillPoint | None = None
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def listen(self) -> AsyncIterator["Forwarder"]:
        # A forwarded call is not undone if the process has ended. Its answer is dropped.
        runner = web.ServerRunner(
            web.Server(self._answer, handler_cancellation=True, access_log=None),
            shutdown_timeout=0.1,
        )
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield self
            finally:
                await runner.cleanup()

    def arm(self, number: int, moment: Moment, counts: Callable[[Call], bool]) -> None:
        """Kill the process at its `number`th counted call (from 1), beginning now."""
        self.struck = None
        self._fate = KillPoint(number, moment, counts)

    def resume(self) -> None:
        """Forward calls (again)."""
        self._fate = self.struck = None

    def _kill_moment(self, call: Call) -> Moment | None:
        if self._fate is None or not self._fate.counts(call):
            return None
        self._fate = self._fate._replace(number=self._fate.number - 1)
        if self._fate.number:
            return None
        moment, self._fate, self.struck = self._fate.moment, None, call
        return moment

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        body = await http.read()
        self.requests.append(f"{http.method} {http.rel_url}")
        try:
            return await self._forward(http, body)
        except aiohttp.ClientError:
            # The connection to the server broke or could not be opened, so the connection to the
            # client is broken too. A 500 would be an answer.
            if http.transport is not None:
                http.transport.abort()
            return await _nothing()

    async def _forward(self, http: web.BaseRequest, body: bytes) -> web.StreamResponse:
        if self.struck is not None:
            return await _nothing()
        moment: Moment | None = None
        if http.method != "GET" and f"/namespaces/{PRESENCE}/" not in http.path:
            call = Call(http.method, http.path, http.query.get("fieldManager", ""))
            self.calls.append(call)
            moment = self._kill_moment(call)
        if moment == "before":
            self._end()
            return await _nothing()
        assert self._session is not None
        headers = {
            name: http.headers[name]
            for name in ("Content-Type", "User-Agent", "Accept")
            if name in http.headers
        }
        url = URL(self._server + str(http.rel_url), encoded=True)
        async with self._session.request(
            http.method, url, data=body or None, headers=headers
        ) as answer:
            if moment == "after":
                await answer.read()
                self._end()
                return await _nothing()
            if self.truncate_answers and http.method != "GET":
                whole = await answer.read()
                return web.Response(
                    body=whole[: len(whole) // 2],
                    content_type="application/json",
                    status=answer.status,
                )
            kept = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            # The client may have been killed while it received the answer.
            with suppress(ConnectionResetError):
                await response.prepare(http)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            return response


async def _nothing() -> web.StreamResponse:
    """Send no answer. Return only by cancellation, when the client disconnects."""
    await asyncio.Event().wait()
    raise AssertionError
