"""Many short connections as fast as the machine can open them: which pods answered, and which
connections failed.

In: a target, the number of connections, how many at once. Out: a `Tally`. One epoll loop, no
asyncio: the client must cost less than what it measures. Every connection sends one request; it
ends with the answer, an error, or a timeout: a short one until it is established, which only the
network and the kernels determine, and a longer one for the answer, for which a server on a busy
machine has to wait its turn."""

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
    __slots__ = ("deadline", "own", "queue", "received", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.deadline = 0.0
        self.queue: deque[_Connection] | None = None
        self.received = b""
        self.own = ""


def burst(
    address: str,
    port: int,
    *,
    connections: int,
    concurrency: int,
    timeout_s: float = 1.0,
    patience_s: float = 5.0,
) -> Tally:
    """Open `connections` connections, `concurrency` at a time. Each fails if it is not established
    within `timeout_s`, or not answered within `patience_s` afterwards."""
    run = _Burst((address, port), timeout_s, patience_s)
    started = time.monotonic()
    while run.tally.requests < connections or run.open:
        while run.tally.requests < connections and len(run.open) < concurrency:
            run.start()
        run.step()
    run.tally.took_s = round(time.monotonic() - started, 3)
    return run.tally


class _Burst:
    def __init__(self, target: tuple[str, int], timeout_s: float, patience_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        self.family = socket_family(target[0])
        self.selector = selectors.DefaultSelector()
        self.open: set[_Connection] = set()
        self.connecting: deque[_Connection] = deque()
        self.established: deque[_Connection] = deque()
        """The connections of each state by deadline. They may have left the state since."""
        self.tally = Tally()

    def start(self) -> None:
        self.tally.requests += 1
        sock = socket.socket(self.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
        connection = _Connection(sock)
        code = sock.connect_ex(self.target)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._count_failure(errno.errorcode.get(code, str(code)))
            return
        self.open.add(connection)
        self._wait(connection, self.connecting, self.timeout_s)
        self.selector.register(sock, selectors.EVENT_WRITE, connection)

    def step(self) -> None:
        # What arrived before this time is among the events below, however late this process runs.
        now = time.monotonic()
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
        self._expire(self.connecting, now, "not established")
        self._expire(self.established, now, "not answered")

    def _wait(self, connection: _Connection, queue: deque[_Connection], seconds: float) -> None:
        """Give a connection, which enters another state, this time."""
        connection.queue, connection.deadline = queue, time.monotonic() + seconds
        queue.append(connection)

    def _expire(self, queue: deque[_Connection], now: float, failure: str) -> None:
        """End the connections of a queue that are too late. A connection that has ended, or has
        gone on to the other queue, only leaves this one."""
        while queue:
            waits = queue[0] in self.open and queue[0].queue is queue
            if waits and queue[0].deadline > now:
                return
            connection = queue.popleft()
            if waits:
                self._end(connection, failure)

    def _send(self, connection: _Connection) -> None:
        error = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "connect")
        connection.own = connection.socket.getsockname()[0]
        self._wait(connection, self.established, self.patience_s)
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
