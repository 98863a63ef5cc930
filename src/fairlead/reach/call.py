"""One call of a target, and one connection that stays open.

In: a Target. Out: an Outcome; of an open connection, why it ended. Every failure of the network or
of the server is a result, never an exception. A call ends when its answer is complete: the
connection (TCP), or the head and the announced body of an answer (HTTP, RFC 9112). Certificates are
not verified, because a call finds out whether a server answers and not which one."""

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from fairlead.errors import plain
from fairlead.net.address import bracketed, join_host_port
from fairlead.reach.identity import identity_of
from fairlead.reach.record import Outcome
from fairlead.reach.targets import DEFAULT_PORTS, Target

MAX_ANSWER_BYTES = 1 << 14
"""The part of an answer that is read, in bytes."""
HOLD_PAUSE_S = 1.0
"""The time between two requests on an open connection."""
HOLD_SILENCE_S = 5.0
"""An open connection whose request is not answered within this time is broken."""

_OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of a call that tell nothing about the target: this host has no resources left."""
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
    own, head = "", b""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(target)
            own = writer.get_extra_info("sockname")[0]
            if target.scheme == "tcp":
                return Outcome(begun_s, now() - begun_s, own=own)
            writer.write(_request(target, "close"))
            head = await _head(reader)
            body = await _body(reader, head, MAX_ANSWER_BYTES) if _ends_itself(head) else None
            latency_s = now() - begun_s
        if body is None:
            body = await _rest(reader)
    except TimeoutError:
        step = "no answer on the connection" if writer else "no connection"
        step = "no end of the answer" if head else step
        return Outcome(begun_s, now() - begun_s, f"{step} within {timeout_s:g} s", own=own)
    except (OSError, EOFError, ValueError, _NotAnswered) as problem:
        own_fault = isinstance(problem, OSError) and problem.errno in _OWN_FAULTS
        return Outcome(begun_s, now() - begun_s, _describe(problem), unknown=own_fault, own=own)
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
    head = await _head(reader)
    if _status(head) >= 500:
        raise _NotAnswered(f"answered {_status(head)}")
    if not _ends_itself(head):
        return b"connection: close\r\n"
    await _body(reader, head)
    return head


def _ends_itself(head: bytes) -> bool:
    """Return whether the body of an answer ends otherwise than with the connection."""
    return bool(_has_no_body(head) or _LENGTH.search(head) or _CHUNKED.search(head))


def _has_no_body(head: bytes) -> bool:
    return _status(head) in (204, 304)


async def _body(reader: asyncio.StreamReader, head: bytes, limit: int | None = None) -> bytes:
    """Return the beginning of a body that ends itself, which says who answered.

    It is waited for, because a path that loses large packets shows only there; of a long one
    `limit` bytes."""
    if _has_no_body(head):
        return b""
    if _CHUNKED.search(head):
        return await _chunks(reader, limit)
    found = _LENGTH.search(head)
    assert found
    length = int(found[1])
    return await _part(reader, length if limit is None else min(length, limit), length)


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Return the head of the final answer: informational ones (1xx) may precede it."""
    while _status(head := await _any_head(reader)) < 200:
        pass
    return head


async def _any_head(reader: asyncio.StreamReader) -> bytes:
    """Return a head with its last line. A server that speaks another protocol is not waited
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


async def _chunks(reader: asyncio.StreamReader, limit: int | None) -> bytes:
    """Read a body of chunks (RFC 9112, section 7.1) to its end or until more than `limit` bytes
    have arrived, and return the beginning."""
    kept, arrived = b"", 0
    while limit is None or arrived <= limit:
        line = await _line(reader)
        if not (found := _CHUNK.match(line)):
            raise (
                EOFError("closed within a body of chunks")
                if not line
                else _NotAnswered(
                    "answered with a body that does not consist of chunks, as its head says"
                )
            )
        if not (size := int(found[0], 16)):
            while (await _line(reader)).strip():
                pass
            break
        part = size if limit is None else min(size, limit + 1 - arrived)
        kept += (await _part(reader, part, size))[: MAX_ANSWER_BYTES - len(kept)]
        arrived += part
        if part == size:
            await _line(reader)
    return kept


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError:
        raise _NotAnswered("answered with a body whose chunks have a line without end") from None


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
    host = bracketed(target.host)
    if target.port != DEFAULT_PORTS[target.scheme]:
        host = join_host_port(target.host, target.port)
    return (
        f"GET {target.path} HTTP/1.1\r\nHost: {host}\r\n"
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
