"""One connection to a server of OVSDB: requests, notifications, echo (RFC 7047, section 4).

In: an open stream. Out: the result of each request, and notifications in order. Run `run` in one
task; it never returns, and raises when the connection ends. Invariants: when the connection ends,
every request that waits for an answer raises ConnectionLost; a server that sends nothing for
`echo_after_s` gets an echo request, and if it sends nothing for another `echo_timeout_s`, the
connection ends. An answer to an unknown request is ignored, because the caller of a request may
have stopped waiting."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.net.ovsdb.framing import Framer
from fairlead.net.ovsdb.remotes import CHUNK_BYTES, Stream

LIMIT_BYTES = 1 << 28
"""The size of the largest message that is accepted. 10,000 load balancers of OVN with three
backends need 4 MB, and 15 MB if each repeats its backends up to 64 times."""
ECHO_AFTER_S = 5.0
ECHO_TIMEOUT_S = 10.0
_ECHO_ID = "echo"

Raw = msgspec.Raw


class ConnectionLost(Unavailable):
    """The connection ended before the answer to a request. The server may have executed it."""


class Message(msgspec.Struct):
    """A JSON-RPC 1.0 message. A request or notification has a method."""

    id: Any = None
    method: str | None = None
    params: Raw = Raw(b"[]")
    result: Raw = Raw(b"null")
    error: Any = None


class Session:
    """A connection. `name` is the address of the server, for messages."""

    def __init__(
        self,
        name: str,
        stream: Stream,
        on_notification: Callable[[str, Raw], None],
        *,
        limit_bytes: int = LIMIT_BYTES,
        echo_after_s: float = ECHO_AFTER_S,
        echo_timeout_s: float = ECHO_TIMEOUT_S,
    ) -> None:
        """`on_notification` is called with the method and the parameters. If it raises a
        FairleadError, the connection ends with it."""
        self.name = name
        self._reader, self._writer = stream
        self._on_notification = on_notification
        self._framer = Framer(limit_bytes)
        self._echo_after_s = echo_after_s
        self._echo_timeout_s = echo_timeout_s
        self._decoder = msgspec.json.Decoder(Message)
        self._encoder = msgspec.json.Encoder()
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._last_id = 0
        self._ended: FairleadError | None = None

    @property
    def ended(self) -> bool:
        """Whether the connection has ended."""
        return self._ended is not None

    async def run(self) -> NoReturn:
        """Receive until the connection ends. Raise the reason."""
        try:
            await self._receive()
        except FairleadError as error:
            self._end(error)
            raise
        finally:
            self._end(Unavailable(f"{self.name}: the connection was closed by this client"))

    async def request(self, method: str, params: Sequence[Any]) -> Raw:
        """Return the result of a request. Raise ConnectionLost if the connection ends first, and
        Refused or Unavailable with the error of the server."""
        if self._ended is not None:
            raise self._lost(method)
        self._last_id += 1
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[request_id := self._last_id] = answer
        try:
            self._send({"method": method, "params": params, "id": request_id})
            message = await answer
        finally:
            self._pending.pop(request_id, None)
        if message.error is not None:
            raise _error(self.name, method, message.error)
        return message.result

    async def _receive(self) -> NoReturn:
        while True:
            chunk = await self._read()
            if not chunk:
                raise Unavailable(f"{self.name}: the server closed the connection")
            try:
                for each in self._framer.feed(chunk):
                    self._process(self._decoder.decode(each))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise Unavailable(f"{self.name} sent a malformed message: {error}") from error
            except Refused as error:
                raise Refused(f"{self.name}: {error.message}", fix=error.fix) from error
            except Unavailable as error:
                raise Unavailable(f"{self.name}: {error.message}") from error

    async def _read(self) -> bytes:
        """Return the next bytes; none at the end. Raise Unavailable if the server is silent, also
        after an echo request, or if it does not read what it requested itself."""
        try:
            with suppress(TimeoutError):
                return await self._read_within(self._echo_after_s)
            self._send({"method": "echo", "params": [], "id": _ECHO_ID})
            return await self._read_within(self._echo_timeout_s)
        except TimeoutError:
            silent_s = self._echo_after_s + self._echo_timeout_s
            raise Unavailable(
                f"{self.name}: the server sent nothing for {silent_s:g} s, not even an answer to "
                f"an echo request"
            ) from None
        except OSError as error:
            raise Unavailable(f"{self.name}: {error.strerror or error}") from error

    async def _read_within(self, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            # Answers to echo requests wait here for a server that does not read.
            await self._writer.drain()
            return await self._reader.read(CHUNK_BYTES)

    def _process(self, message: Message) -> None:
        if message.method == "echo":
            self._send({"id": message.id, "result": message.params, "error": None})
        elif message.method is not None:
            self._on_notification(message.method, message.params)
        elif isinstance(message.id, int):
            answer = self._pending.get(message.id)
            if answer is not None and not answer.done():
                answer.set_result(message)

    def _send(self, message: Any) -> None:
        self._writer.write(self._encoder.encode(message))

    def _end(self, reason: FairleadError) -> None:
        if self._ended is not None:
            return
        self._ended = reason
        # `abort` does not wait for a server that does not read.
        self._writer.transport.abort()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._lost("a request"))

    def _lost(self, what: str) -> ConnectionLost:
        assert self._ended is not None
        return ConnectionLost(f"{what} was not answered: {self._ended.message}")


def _error(name: str, method: str, error: Any) -> FairleadError:
    """Return the error of a request that the server did not execute."""
    match error:
        case str(text):
            pass
        case {"error": str(tag), "details": str(details)}:
            text = f"{tag}: {details}"
        case _:
            text = str(error)
    message = f"{name}: {method} was answered by '{text[:500]}'"
    if text.startswith("unknown method"):
        return Refused(message, fix="use Open vSwitch 2.13 or later")
    return Unavailable(message)
