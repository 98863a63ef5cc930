"""Many short connections as fast as the machine can open them: which pods answered, and which
connections failed.

In: a target, the number of connections, how many at once. Out: a `Tally`. One epoll loop, no
asyncio: the client must cost less than what it measures. Every connection sends one request; it
ends with the answer, an error, or the time-out."""

import errno
import selectors
import socket
import struct
import time
from collections import deque

import msgspec

from fairlead.net.address import socket_family
from fairlead.probe.exchange import REQUEST_ONCE, Answer, Malformed, parse

# Close with a reset after the answer: otherwise 20,000 connections would leave 20,000 ports in
# TIME_WAIT.
LINGER_NONE = struct.pack("ii", 1, 0)


class Tally(msgspec.Struct):
    """The result of a burst.

    `address_kept`: the number of answers in which the server saw the client's own address."""

    requests: int = 0
    answered: int = 0
    address_kept: int = 0
    by_pod: dict[str, int] = msgspec.field(default_factory=dict)
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    took_s: float = 0.0

    @property
    def failed(self) -> int:
        return self.requests - self.answered


class _Connection:
    __slots__ = ("deadline", "own", "received", "socket")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.socket = sock
        self.deadline = deadline
        self.received = b""
        self.own = ""


def burst(
    address: str, port: int, *, connections: int, concurrency: int, timeout_s: float = 1.0
) -> Tally:
    """Open `connections` connections, `concurrency` at a time. Each fails after `timeout_s` without
    an answer."""
    run = _Burst((address, port), timeout_s)
    started = time.monotonic()
    while run.tally.requests < connections or run.open:
        while run.tally.requests < connections and len(run.open) < concurrency:
            run.start()
        run.step()
    run.tally.took_s = round(time.monotonic() - started, 3)
    return run.tally


class _Burst:
    def __init__(self, target: tuple[str, int], timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self.family = socket_family(target[0])
        self.selector = selectors.DefaultSelector()
        self.open: set[_Connection] = set()
        self.by_deadline: deque[_Connection] = deque()
        self.tally = Tally()

    def start(self) -> None:
        self.tally.requests += 1
        sock = socket.socket(self.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
        connection = _Connection(sock, time.monotonic() + self.timeout_s)
        code = sock.connect_ex(self.target)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._count_failure(errno.errorcode.get(code, str(code)))
            return
        self.open.add(connection)
        self.by_deadline.append(connection)
        self.selector.register(sock, selectors.EVENT_WRITE, connection)

    def step(self) -> None:
        for key, _ in self.selector.select(0.02):
            connection: _Connection = key.data
            try:
                if key.events & selectors.EVENT_WRITE:
                    self._send(connection)
                else:
                    self._receive(connection)
            except (OSError, Malformed) as error:
                code = (
                    errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else ""
                )
                self._end(connection, code or type(error).__name__)
        now = time.monotonic()
        while self.by_deadline and (
            self.by_deadline[0].deadline <= now or self.by_deadline[0] not in self.open
        ):
            connection = self.by_deadline.popleft()
            if connection in self.open:
                self._end(connection, "timeout")

    def _send(self, connection: _Connection) -> None:
        error = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "connect")
        connection.own = connection.socket.getsockname()[0]
        connection.socket.send(REQUEST_ONCE)
        self.selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.socket.recv(4096)
        if not data:
            raise Malformed("closed before the answer was complete")
        connection.received += data
        answer = parse(connection.received)
        if answer is not None:
            self._end(connection, "", answer)

    def _end(self, connection: _Connection, failure: str, answer: Answer | None = None) -> None:
        self.selector.unregister(connection.socket)
        connection.socket.close()
        self.open.discard(connection)
        if answer is None:
            self._count_failure(failure)
            return
        self.tally.answered += 1
        self.tally.address_kept += answer.peer == connection.own
        self.tally.by_pod[answer.pod] = self.tally.by_pod.get(answer.pod, 0) + 1

    def _count_failure(self, name: str) -> None:
        self.tally.failures[name] = self.tally.failures.get(name, 0) + 1
