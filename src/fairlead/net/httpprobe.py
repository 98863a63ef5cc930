"""Send HTTP requests to health ports, at low cost.

In: an address (IPv4 or IPv6, not a name), a port, a path. Out: an `Answer` to each request.
Invariants: a `ProbeConnection` holds at most one descriptor and has at most one request in flight;
a failure on this host (no descriptors, no local ports) is reported as Unavailable, because it says
nothing about the probed host. The connection stays open between requests if the server allows it
(RFC 9112, section 9.3): a request on it costs a third of a request on a new connection. A server
that closes an idle connection has not answered: the request is sent again on a new
connection. Follows RFC 9110 and RFC 9112 as far as a status, headers and the presence of a body
require; kube-proxy's health ports (pkg/proxy/healthcheck) send X-Load-Balancing-Endpoint-Weight
with the number of local endpoints."""

import asyncio
import errno
import socket
import struct
from collections.abc import Callable
from functools import lru_cache

from fairlead.errors import Unavailable
from fairlead.net.address import join_host_port, socket_family
from fairlead.net.httpanswer import REFUSED, SILENT, Answer

WEIGHT_HEADER = b"x-load-balancing-endpoint-weight"
MAX_ANSWER_BYTES = 16384
MAX_DIGITS = 9
"""The maximum length of a number in an answer. Python does not convert more than 4,300 digits."""

PROBE_MARK = 0x1071
"""SO_MARK of probes that take the path of forwarded packets.

bpf/probe.bpf.c checks its bits 0x30ff, and encapsulates the packets for a node behind a tunnel. The
mark has no bit of kube-proxy (0x4000, 0x8000), Cilium (0x0f00, 0xffff0000), Calico (0xffff0000),
the portmap plug-in (0x2000) and the AWS VPC plug-in (0x80)."""

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER of 0: close with a RST. Otherwise probes would leave hundreds of sockets in
TIME_WAIT."""

LOCAL_ERRORS = frozenset(
    (
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EADDRNOTAVAIL,
        errno.EACCES,
        errno.EPERM,
    )
)
CLOSED = (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


async def probe(address: str, port: int, path: str, *, timeout_s: float) -> Answer:
    """Send GET `path` once, on a new connection. Raise Unavailable if this host could not send the
    request."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Answer | Unavailable] = loop.create_future()
    connection = ProbeConnection(loop, address, port, answered.set_result)
    try:
        connection.send_request(path)
        async with asyncio.timeout(timeout_s):
            answer = await answered
    except TimeoutError:
        return SILENT
    finally:
        connection.close()
    if isinstance(answer, Unavailable):
        raise answer
    return answer


class ProbeConnection:
    """A client of one health port.

    `on_answer` is called once for each request, unless the connection is closed first; the caller
    decides how long to wait. `mark` is the SO_MARK of its sockets; 0: none."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str,
        port: int,
        on_answer: Callable[[Answer | Unavailable], None],
        mark: int = 0,
    ) -> None:
        self._loop = loop
        self._on_answer = on_answer
        self._mark = mark
        self._destination = (address, port)
        self._family = socket_family(address)
        self._host = join_host_port(address, port)
        self._socket: socket.socket | None = None
        self._reused = False
        self._pending = b""
        self._received = b""

    @property
    def open(self) -> bool:
        """Whether it holds a descriptor."""
        return self._socket is not None

    def send_request(self, path: str) -> None:
        """Send GET `path`. It must not be called while a request is in flight."""
        self._pending = _request(self._host, path)
        if self._socket is None:
            self._connect()
        else:
            self._reused = True
            self._send()

    def close(self) -> None:
        """Cancel the request in flight, if there is one, and close the connection."""
        self._pending = self._received = b""
        if self._socket is not None:
            descriptor = self._socket.fileno()
            self._loop.remove_reader(descriptor)
            self._loop.remove_writer(descriptor)
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        self._reused = False
        try:
            self._socket = made = socket.socket(
                self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            )
        except OSError as problem:
            self._fail(problem)
            return
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            if self._mark:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, self._mark)
            made.connect(self._destination)
        except BlockingIOError:
            self._loop.add_writer(made.fileno(), self._connected)
        except OSError as problem:
            self._fail(problem)
        else:
            self._begin()

    def _connected(self) -> None:
        assert self._socket is not None
        self._loop.remove_writer(self._socket.fileno())
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(OSError(code, errno.errorcode.get(code, "")))
        else:
            self._begin()

    def _begin(self) -> None:
        assert self._socket is not None
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._send()

    def _send(self) -> None:
        assert self._socket is not None
        try:
            # A request is far smaller than the send buffer of an idle connection.
            self._socket.send(self._pending)
        except OSError as problem:
            self._on_close(problem)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            chunk = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError as problem:
            self._on_close(problem)
            return
        if not self._pending:
            # No request is in flight: the server closes the connection, or sends unexpected data.
            self.close()
            return
        self._received += chunk
        ended = not chunk or len(self._received) >= MAX_ANSWER_BYTES
        if ended and not self._received:
            self._on_close(
                ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
            )
            return
        answer = read_answer(self._received, ended=ended)
        if answer is None and not ended:
            return
        if not ended and is_reusable(self._received):
            self._pending = self._received = b""
        else:
            self.close()
        self._on_answer(answer or REFUSED)

    def _on_close(self, problem: OSError) -> None:
        """Handle a closed connection. A reused connection may have been closed before the request:
        send it again."""
        pending, again = self._pending, self._reused and not self._received
        if again and pending:
            self.close()
            self._pending = pending
            self._connect()
        else:
            self._fail(problem)

    def _fail(self, problem: OSError) -> None:
        requested = bool(self._pending)
        self.close()
        if not requested:
            return
        if isinstance(problem, CLOSED) or problem.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
            self._on_answer(REFUSED)
        elif problem.errno in LOCAL_ERRORS:
            self._on_answer(
                Unavailable(
                    f"a request to http://{self._host} could not be sent: {problem.strerror}"
                )
            )
        else:
            self._on_answer(SILENT)


@lru_cache(maxsize=65536)
def _request(host: str, path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: fairlead\r\n\r\n".encode(
        "ascii", "replace"
    )


@lru_cache(maxsize=4096)
def is_reusable(received: bytes) -> bool:
    """Return whether these bytes are exactly one response, after which the connection may be
    reused."""
    head, _, body = received.partition(b"\r\n\r\n")
    lower = head.lower()
    if (
        not lower.startswith(b"http/1.1 ")
        or b"\r\nconnection: close" in lower
        or b"\r\ntransfer-encoding:" in lower
    ):
        return False
    _, found, rest = lower.partition(b"\r\ncontent-length:")
    return bool(found) and rest.split(b"\r\n", 1)[0].strip() == str(len(body)).encode()


@lru_cache(maxsize=4096)
def read_answer(received: bytes, *, ended: bool) -> Answer | None:
    """Return the answer in these bytes.

    None: the response is incomplete, or, if the connection has `ended`, there was none."""
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        # A server that closes the connection within its headers has not answered; a server that
        # sends something else does not speak HTTP.
        return (
            None
            if not received or b"HTTP/"[: len(received)] == received[:5]
            else Answer("answered")
        )
    status_line, *fields = head.split(b"\r\n")
    parts = status_line.split(None, 2)
    if (
        len(parts) < 2
        or not parts[0].startswith(b"HTTP/")
        or not parts[1].isdigit()
        or len(parts[1]) > MAX_DIGITS
    ):
        return Answer("answered")
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (field.partition(b":") for field in fields)
    }
    status = int(parts[1])
    if (
        not body
        and not ended
        and status == 200
        and headers.get(b"content-length") != b"0"
        and WEIGHT_HEADER not in headers
    ):
        return None  # the answer depends on whether a body follows
    weight = headers.get(WEIGHT_HEADER, b"")
    empty = not body or (
        headers.get(b"transfer-encoding", b"").lower() == b"chunked" and body.startswith(b"0\r\n")
    )
    counted = weight.isdigit() and len(weight) <= MAX_DIGITS
    return Answer("answered", status, int(weight) if counted else None, empty)
