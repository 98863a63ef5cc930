"""Ask one HTTP health port one question, on a connection of its own.

In: an address (IPv4 or IPv6, no name), a port, a path, a deadline. Out: an `Answer`.
Invariants: it takes no longer than the deadline, holds one descriptor while it lasts and none after; a failure on *our*
side (no descriptors, no local ports) is raised as Unavailable, for it says nothing about the machine asked.
Follows RFC 9110 and RFC 9112 as far as a status, a header and "is there a body" go; kube-proxy's health ports
(pkg/proxy/healthcheck) send X-Load-Balancing-Endpoint-Weight with the number of local endpoints.
"""

import asyncio
import errno
import socket
import struct
from typing import Literal

import msgspec

from fairlead.errors import Unavailable

WEIGHT_HEADER = b"x-load-balancing-endpoint-weight"
LONGEST_ANSWER_BYTES = 16384

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER of 0: close by RST. Ten probes a second to each node would otherwise leave hundreds of TIME_WAIT sockets."""

OUR_OWN = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM))


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What came back. `answered`: some HTTP, with `status` (0 if it was none). `refused`: the machine is there, nothing
    serves on the port (or hung up). `silent`: nothing came in time, or the network says that it cannot be reached."""

    kind: Literal["answered", "refused", "silent"]
    status: int = 0
    weight: int | None = None
    """X-Load-Balancing-Endpoint-Weight; None if it is not there or no number."""
    empty: bool = True
    """Whether there was no body."""


REFUSED = Answer("refused")
SILENT = Answer("silent")


async def probe(address: str, port: int, path: str, *, timeout_s: float) -> Answer:
    """GET `path` once. Raises Unavailable if we could not ask."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    host = f"[{address}]" if family == socket.AF_INET6 else address
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: fairlead\r\nConnection: close\r\n\r\n"
    try:
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            async with asyncio.timeout(timeout_s):
                return await ask(connection, (address, port), request.encode("ascii", "replace"))
    except TimeoutError:
        return SILENT
    except (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError):
        return REFUSED
    except OSError as problem:
        if problem.errno in OUR_OWN:
            raise Unavailable(f"probe of http://{host}:{port}{path} could not be sent: {problem.strerror}") from None
        return SILENT


async def ask(connection: socket.socket, destination: tuple[str, int], request: bytes) -> Answer:
    """Connect, send, and read until the answer is clear."""
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, destination)
    await loop.sock_sendall(connection, request)
    received = b""
    while len(received) < LONGEST_ANSWER_BYTES:
        chunk = await loop.sock_recv(connection, 4096)
        if not chunk:
            break
        received += chunk
        if (answer := read_answer(received, ended=False)) is not None:
            return answer
    return read_answer(received, ended=True) or REFUSED


def read_answer(received: bytes, *, ended: bool) -> Answer | None:
    """The answer in these bytes. None: there is none yet (or, if the connection has `ended`, there was none at all)."""
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        # A server that hangs up within its headers has not answered; one that sends other things is no HTTP server.
        return None if not received or b"HTTP/"[: len(received)] == received[:5] else Answer("answered")
    status_line, *fields = head.split(b"\r\n")
    parts = status_line.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/") or not parts[1].isdigit():
        return Answer("answered")
    headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(b":") for field in fields)}
    status = int(parts[1])
    if not body and not ended and status == 200 and headers.get(b"content-length") != b"0" and WEIGHT_HEADER not in headers:
        return None  # whether a body comes matters
    weight = headers.get(WEIGHT_HEADER, b"")
    empty = not body or (headers.get(b"transfer-encoding", b"").lower() == b"chunked" and body.startswith(b"0\r\n"))
    return Answer("answered", status, int(weight) if weight.isdigit() else None, empty)
