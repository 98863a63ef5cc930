"""One call of a target, and one connection that stays open.

In: a Target. Out: an Outcome; of an open connection, why it ended. Every failure of the network or
of the server is a result, never an exception. A call ends when its answer is complete: the
connection (TCP), or the head and the announced body of an answer (HTTP, RFC 9112). Certificates are
not verified, because a call finds out whether a server answers and not which one."""

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from fairlead.errors import plain
from fairlead.net.address import bracketed
from fairlead.reach.identity import identity_of
from fairlead.reach.record import Outcome
from fairlead.reach.targets import Target

MAX_ANSWER_BYTES = 1 << 14
"""The part of an answer that is read, in bytes."""
HOLD_PAUSE_S = 1.0
"""The time between two requests on an open connection."""
HOLD_SILENCE_S = 5.0
"""An open connection whose request is not answered within this time is broken."""

_HTTP = b"HTTP/1."
_CHUNK = re.compile(rb"[0-9a-fA-F]{1,8}(?=[; \t\r\n])")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"^content-length:[ \t]*(\d{1,18})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_CHUNKED = re.compile(rb"^transfer-encoding:[ \t]*chunked[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_CLOSE = re.compile(rb"^connection:[ \t]*close[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)


class _NotAnswered(Exception):
    """The server's answer, or its end, is not what a working server sends."""


class _Closed(Exception):
    """The server ended an open connection in an orderly way."""


async def call(target: Target, timeout_s: float, now: Callable[[], float]) -> Outcome:
    """Call the target once, on a new connection."""
    begun_s = now()
    writer: asyncio.StreamWriter | None = None
    own = ""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(target)
            own = writer.get_extra_info("sockname")[0]
            if target.scheme == "tcp":
                return Outcome(begun_s, now() - begun_s, own=own)
            writer.write(_request(target, "close"))
            head, body = await _receive(reader)
            latency_s = now() - begun_s
    except TimeoutError:
        step = "no answer on the connection" if writer else "no connection"
        return Outcome(begun_s, now() - begun_s, f"{step} within {timeout_s:g} s", own=own)
    except (OSError, EOFError, ValueError, _NotAnswered) as problem:
        return Outcome(begun_s, now() - begun_s, _describe(problem), own=own)
    finally:
        if writer is not None:
            writer.transport.abort()
    status = _status(head)
    if status >= 500:
        return Outcome(begun_s, latency_s, f"answered {status}", own=own)
    pod, client = identity_of(body.decode("latin-1"))
    return Outcome(begun_s, latency_s, own=own, client=client, pod=pod)


async def hold(target: Target, timeout_s: float, opened: Callable[[], None]) -> str:
    """Keep one connection open until it ends. Return why it broke; an empty text means that it was
    never open, or that the server closed it in an orderly way: announced by `Connection: close`,
    or, on a TCP connection without requests, by its end without a reset.

    An open HTTP connection carries a request each second. A TCP connection carries keep-alive
    segments, so that it is noticed if the other side has forgotten it."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(target)
            if target.scheme != "tcp":
                head = await _exchange(target, reader, writer)
    except (OSError, EOFError, ValueError, TimeoutError, _NotAnswered):
        # The calls count that; this connection only tries again.
        if writer is not None:
            writer.transport.abort()
        return ""
    opened()
    try:
        if target.scheme == "tcp":
            _keep_alive(writer.get_extra_info("socket"))
            while await reader.read(MAX_ANSWER_BYTES):
                pass
            return ""
        while not _CLOSE.search(head):
            await asyncio.sleep(HOLD_PAUSE_S)
            async with asyncio.timeout(HOLD_SILENCE_S):
                head = await _exchange(target, reader, writer)
        return ""
    except TimeoutError as problem:
        # The kernel's ETIMEDOUT is a TimeoutError, too.
        return "no answer" if problem.errno is None else _describe(problem)
    except (OSError, EOFError, ValueError, _NotAnswered) as problem:
        return _describe(problem)
    finally:
        writer.transport.abort()


async def _connect(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if target.scheme != "https":
        return await asyncio.open_connection(target.host, target.port)
    return await asyncio.open_connection(
        target.host, target.port, ssl=_context(), server_hostname=target.host
    )


async def _exchange(
    target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bytes:
    writer.write(_request(target, "keep-alive"))
    head, _ = await _receive(reader, whole=True)
    if _status(head) >= 500:
        raise _NotAnswered(f"answered {_status(head)}")
    ends_itself = _LENGTH.search(head) or _CHUNKED.search(head)
    return head if ends_itself else b"connection: close\r\n"


async def _receive(reader: asyncio.StreamReader, *, whole: bool = False) -> tuple[bytes, bytes]:
    """Return the head of an answer and the beginning of its body, which says who answered.

    A body whose length is announced is waited for, because a path that loses large packets shows
    only there; with `whole` of any length. A body of chunks is read to its end. Another body ends
    with the connection."""
    head = await _head(reader)
    if _CHUNKED.search(head):
        return head, await _chunks(reader)
    found = _LENGTH.search(head)
    if found is None:
        return head, b"" if whole else await _rest(reader)
    length = int(found[1])
    return head, await _part(reader, length if whole else min(length, MAX_ANSWER_BYTES), length)


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Return the head with its last line. A server that speaks another protocol is not waited
    for."""
    head = b""
    try:
        head = await reader.readexactly(len(_HTTP))
        if head == _HTTP:
            return head + await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _NotAnswered("answered with a head without end") from None
    except asyncio.IncompleteReadError as end:
        if not head + end.partial:
            raise EOFError("closed without an answer") from None
        if _HTTP.startswith((head + end.partial)[: len(_HTTP)]):
            raise EOFError("closed within the head of an answer") from None
    raise _NotAnswered("answered, but not with HTTP")


async def _part(reader: asyncio.StreamReader, size: int, of: int) -> bytes:
    """Read `size` of the `of` bytes of a body, and return the beginning."""
    kept, left = b"", size
    while left:
        if not (part := await reader.read(min(left, MAX_ANSWER_BYTES))):
            raise EOFError(f"closed after {size - left} of {of} bytes")
        left -= len(part)
        kept += part[: MAX_ANSWER_BYTES - len(kept)]
    return kept


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """Read a body of chunks (RFC 9112, section 7.1), and return the beginning."""
    kept = b""
    while True:
        line = await reader.readline()
        if not (found := _CHUNK.match(line)):
            raise (
                EOFError("closed within a body of chunks")
                if not line
                else _NotAnswered(
                    "answered with a body that does not consist of chunks, as its head says"
                )
            )
        if not (size := int(found[0], 16)):
            while (await reader.readline()).strip():
                pass
            return kept
        kept += (await _part(reader, size, size))[: MAX_ANSWER_BYTES - len(kept)]
        await reader.readline()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Return the body of an answer without a length, as far as it arrives soon: it may never end,
    and the answer has arrived without it."""
    body = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            while len(body) < MAX_ANSWER_BYTES and (part := await reader.read(MAX_ANSWER_BYTES)):
                body += part
    return body


def _status(head: bytes) -> int:
    found = _STATUS.match(head)
    if not found:
        raise _NotAnswered("answered, but not with HTTP")
    return int(found[1])


def _request(target: Target, connection: str) -> bytes:
    return (
        f"GET {target.path} HTTP/1.1\r\nHost: {bracketed(target.host)}\r\n"
        f"User-Agent: fairlead-probe\r\nConnection: {connection}\r\n\r\n"
    ).encode("latin-1")


@cache
def _context() -> ssl.SSLContext:
    """Return a TLS context that accepts every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


def _keep_alive(connection: socket.socket) -> None:
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 4),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _describe(problem: Exception) -> str:
    """Return what happened, in words that are the same for the same cause."""
    match problem:
        case ConnectionRefusedError():
            return "connection refused"
        case ConnectionResetError() | BrokenPipeError():
            return "reset"
        case socket.gaierror():
            return "the name does not resolve"
        case ssl.SSLError():
            return f"TLS: {(problem.reason or 'failed').lower().replace('_', ' ')}"
        case UnicodeError():
            return "not a valid DNS name"
        case OSError() if problem.strerror:
            return problem.strerror.lower()
    return plain(problem)
