"""A forwarder between a process and its API server, which can end the process at a chosen call.

In: the server's URL, what ends the process. Out: every call and its answer passed on, watches as
they come; `calls`, those that write, in order. Armed, it ends the process at the nth call from then
on, either before that call is forwarded (the server never hears of it) or after (the server has
done it, and the process never learns). Renewals of Leases by which processes announce themselves do
not count: they happen all the time, independent of other calls. Invariant: when the process ends at
a call, no later call of its reaches the server; `pass_on` lets its successor through."""

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
    """One call that writes."""

    method: str
    path: str
    manager: str
    """The field manager of a patch; empty if it names none."""

    @property
    def about_the_lease(self) -> bool:
        return "/leases" in self.path

    def __str__(self) -> str:
        # Events are named at random.
        path = re.sub(r"(/events/[^/]+\.)[0-9a-f]{16}$", r"\1*", self.path)
        return f"{self.method} {path}" + (f" ({self.manager})" if self.manager else "")


class Fate(NamedTuple):
    """At which call of those that `counts` says the process is to end, and when."""

    number: int
    moment: Moment
    counts: Callable[[Call], bool]


class Forwarder:
    """Use by `async with forwarder.listen()`."""

    def __init__(self, server: str, end: Callable[[], None]) -> None:
        self.url = ""
        self.calls: list[Call] = []
        self.asked: list[str] = []
        """Every call that came, reading ones too, and those that the server was not there for."""
        self.struck: Call | None = None
        """The call at which the process was ended, since it was armed last."""
        self.cut_short = False
        """Whether answers to calls that write arrive as their first half, with nothing to show it
        but that it is no JSON."""
        self._server = server
        self._end = end
        self._fate: Fate | None = None
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def listen(self) -> AsyncIterator["Forwarder"]:
        # A call that was forwarded is answered to nobody if the process ended, but it is not taken
        # back.
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
        """End the process at its `number`th call (from 1) of those that count, counted from now."""
        self.struck = None
        self._fate = Fate(number, moment, counts)

    def pass_on(self) -> None:
        """Pass calls on (again)."""
        self._fate = self.struck = None

    def _meets(self, call: Call) -> Moment | None:
        if self._fate is None or not self._fate.counts(call):
            return None
        self._fate = self._fate._replace(number=self._fate.number - 1)
        if self._fate.number:
            return None
        moment, self._fate, self.struck = self._fate.moment, None, call
        return moment

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        body = await http.read()
        self.asked.append(f"{http.method} {http.rel_url}")
        try:
            return await self._forward(http, body)
        except aiohttp.ClientError:
            # The line to the server broke, or there was none: so does the line to whoever asked. A
            # 500 would be an answer.
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
            moment = self._meets(call)
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
            if self.cut_short and http.method != "GET":
                whole = await answer.read()
                return web.Response(
                    body=whole[: len(whole) // 2],
                    content_type="application/json",
                    status=answer.status,
                )
            kept = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            with suppress(ConnectionResetError):  # whoever asked may have ended in the middle
                await response.prepare(http)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            return response


async def _nothing() -> web.StreamResponse:
    """No answer: until whoever asked is gone, which cancels this."""
    await asyncio.Event().wait()
    raise AssertionError
