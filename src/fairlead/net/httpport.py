"""TCP ports that answer small HTTP requests, and continue to serve all clients while some of them
flood the ports.

In: ports to listen on, a function from a port and a request to an answer. Out: answers.
`Ports.turn` does a bounded amount of work: at most ACCEPTS new connections and STEPS steps. One
step reads at most CHUNK_BYTES and answers at most one request. Sources (addresses of clients) are
served in turn, and so are the connections of each source. So the number of connections or requests
of one source does not delay another source. Invariants: an answer is computed when it is sent, so
it is never stale; requests of a connection are answered in order; at the limit of connections a new
connection is still accepted, and the longest idle connection of the source with the most
connections is closed; a connection that is idle, incomplete or not read for too long is closed.
This module uses edge-triggered epoll(7) and no task per connection, so that tests can count the
work of one turn."""

import errno
import resource
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import NamedTuple

from fairlead.net.httprequest import Answer, Received, Request, read_request, written
from fairlead.net.listening import EVERYWHERE, listen
from fairlead.net.sources import ConnectionsBySource

IDLE_S = 60.0
"""A connection is closed this time after an answer if no further request begins."""
REQUEST_S = 5.0
"""Time limit for a request to be complete, from the start of its connection or from its first byte;
and for the client to receive the answer."""
SWEEP_S = 1.0
"""Period at which the time limits of connections are checked."""
LINGER_S = 1.0
"""After the last answer, data from the client is discarded for this time: closing at once would
reset the connection, and the client might lose the answer."""

ACCEPTS, STEPS, EVENTS = 64, 64, 256
"""Limits of one turn: new connections, steps, events of the kernel. A turn takes some
milliseconds."""
CHUNK_BYTES = 2048
BACKLOG = 128
"""Length of the accept queue, which is served in order: in a long queue each new connection would
wait for all others."""

OTHER_DESCRIPTORS = 64

READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
FULL = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

Handler = Callable[[int, Request], Answer]


class Limits(NamedTuple):
    """Limits of connections from one source and in total. Each open port raises them, because a
    gateway may keep one connection to each port."""

    per_source: int = 1024
    per_source_per_port: int = 2
    total: int = 8192
    total_per_port: int = 4


class Turn(NamedTuple):
    """The work that one turn has done."""

    accepted: int
    steps: int
    answered: int


class _Listener:
    def __init__(self, number: int, made: socket.socket) -> None:
        self.number = number
        self.socket = made


class Connection:
    """One client's connection to a port."""

    __slots__ = (
        "ended",
        "ending",
        "number",
        "queued",
        "received",
        "socket",
        "source",
        "unsent",
        "until_s",
        "waiting",
    )

    def __init__(self, made: socket.socket, number: int, source: str, until_s: float) -> None:
        self.socket = made
        self.number = number
        self.source = source
        self.until_s = until_s
        self.received = bytearray()
        self.unsent = b""
        self.ended = False
        """The client has closed its direction; data that arrived before must still be read."""
        self.ending = False
        """The last answer was sent."""
        self.queued = False
        self.waiting = False
        """The answer is not sent completely; the kernel reports when it accepts more of it."""


class Ports:
    """Open ports. Not thread-safe."""

    def __init__(
        self,
        handler: Handler,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handler = handler
        self._limits = limits or Limits()
        self._clock = clock
        self._epoll = select.epoll()
        self._listeners: dict[int, _Listener] = {}
        self._numbers: dict[int, list[_Listener]] = {}
        self._accepting: dict[_Listener, None] = {}
        """Listeners with new connections, in the order in which they are served."""
        self._connections: dict[int, Connection] = {}
        self._by_source = ConnectionsBySource[Connection]()
        self._ready: dict[str, deque[Connection]] = {}
        """For each source with pending work its connections; sources and connections are in the
        order in which they are served."""
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._sweep_s = clock() + SWEEP_S
        self._date = (0, "")
        self._descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    @property
    def limit_per_source(self) -> int:
        """The limit of connections from one source."""
        return self._limits.per_source + self._limits.per_source_per_port * len(self._numbers)

    @property
    def limit(self) -> int:
        """The limit of connections in total."""
        left = self._descriptors - len(self._listeners) - OTHER_DESCRIPTORS
        return max(
            1, min(self._limits.total + self._limits.total_per_port * len(self._numbers), left)
        )

    def open(self, number: int, addresses: Collection[str] = EVERYWHERE) -> None:
        """Listen at these addresses. Raise OSError as `listening.listen` does, and EADDRINUSE if
        the port is already open."""
        if number in self._numbers:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self._numbers[number] = [
            _Listener(number, each) for each in listen(number, addresses, backlog=BACKLOG)
        ]
        for listener in self._numbers[number]:
            # The accepted connections inherit this option.
            listener.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            descriptor = listener.socket.fileno()
            self._listeners[descriptor] = listener
            self._epoll.register(descriptor, select.EPOLLIN)

    def close(self, number: int) -> None:
        """Stop listening, and close the connections to this port."""
        for listener in self._numbers.pop(number):
            self._accepting.pop(listener, None)
            del self._listeners[listener.socket.fileno()]
            listener.socket.close()
        for connection in [each for each in self._connections.values() if each.number == number]:
            self._end(connection)

    def close_all(self) -> None:
        """Close every port and its connections."""
        for number in tuple(self._numbers):
            self.close(number)
        self._epoll.close()

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call this function whenever the descriptor is readable, at the beginning of a turn."""
        self._callbacks[descriptor] = callback
        self._epoll.register(descriptor, select.EPOLLIN)

    def turn(self, wait_s: float) -> Turn:
        """Wait for work, at most for the given time; then do a bounded part of it."""
        busy = bool(self._ready or self._accepting)
        events = self._epoll.poll(0.0 if busy else min(wait_s, SWEEP_S), EVENTS)
        for descriptor, _ in events:
            if callback := self._callbacks.get(descriptor):
                callback()
        for descriptor, mask in events:
            if connection := self._connections.get(descriptor):
                connection.ended |= bool(mask & ENDED)
                self._queue(connection)
            elif listener := self._listeners.get(descriptor):
                self._accepting[listener] = None
        accepted = self._accept_some()
        steps, answered = self._step_some()
        if (now_s := self._clock()) >= self._sweep_s:
            self._sweep_s = now_s + SWEEP_S
            for connection in [
                each for each in self._connections.values() if each.until_s <= now_s
            ]:
                self._end(connection)
        return Turn(accepted, steps, answered)

    def _accept_some(self) -> int:
        """Accept new connections, one of each listener in turn."""
        accepted = 0
        while self._accepting and accepted < ACCEPTS:
            listener = next(iter(self._accepting))
            del self._accepting[listener]
            try:
                made, (source, *_) = listener.socket.accept()
            except OSError as problem:
                if (
                    problem.errno in FULL
                    and (oldest := self._by_source.oldest_of_largest()) is not None
                ):
                    self._end(oldest)  # the kernel reports the listener again
                elif problem.errno == errno.ECONNABORTED:
                    self._accepting[listener] = None
                continue
            accepted += 1
            self._accepting[listener] = None
            self._add(made, listener.number, source)
        return accepted

    def _add(self, made: socket.socket, number: int, source: str) -> None:
        """Accept a connection. A connection that its client has already closed costs little,
        because floods consist of such connections."""
        try:
            received = made.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
            if not received:
                made.close()
                return
        except BlockingIOError:
            received = b""
        except OSError:
            made.close()
            return
        connection = Connection(made, number, source, self._clock() + REQUEST_S)
        connection.received += received
        descriptor = made.fileno()
        self._epoll.register(descriptor, READABLE)
        self._connections[descriptor] = connection
        self._by_source.add(source, connection)
        if received:
            self._queue(connection)
        if self._by_source.count(source) > self.limit_per_source:
            self._end(self._by_source.oldest(source))
        elif (
            len(self._connections) > self.limit
            and (oldest := self._by_source.oldest_of_largest()) is not None
        ):
            self._end(oldest)

    def _queue(self, connection: Connection) -> None:
        if not connection.queued:
            connection.queued = True
            self._ready.setdefault(connection.source, deque()).append(connection)

    def _step_some(self) -> tuple[int, int]:
        """Do one step of one connection of each source in turn."""
        steps = answered = 0
        while self._ready and steps < STEPS:
            source = next(iter(self._ready))
            waiting = self._ready.pop(source)
            connection = waiting.popleft()
            connection.queued = False
            # A closed connection stays in the queue until it is skipped here.
            if connection.socket.fileno() >= 0:
                steps += 1
                more, has_answered = self._step(connection)
                answered += has_answered
                if more:
                    connection.queued = True
                    waiting.append(connection)
            if waiting:
                self._ready[source] = waiting
        return steps, answered

    def _step(self, connection: Connection) -> tuple[bool, bool]:
        """Send pending data, or else read and answer.

        Return whether there may be more to do now, and whether a request was answered."""
        try:
            if connection.unsent:
                self._send(connection)
                return not connection.unsent, False
            if connection.ending:
                return self._discard(connection), False
            got = read_request(connection.received) if connection.received else "incomplete"
            more = True
            if got == "incomplete":
                more = self._read(connection)
                got = read_request(connection.received) if connection.received else "incomplete"
            if connection.socket.fileno() < 0:
                return False, False
            if got != "incomplete":
                self._answer(connection, got)
                # Further requests that came with this one are handled in later steps.
                return not connection.unsent and (
                    more or bool(connection.received) or connection.ended
                ), True
        except OSError:
            self._end(connection)
            return False, False
        return more, False

    def _read(self, connection: Connection) -> bool:
        """Read some of the received data. Return whether there may be more. At the end of the
        stream close the connection."""
        try:
            chunk = connection.socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not chunk:
            self._end(connection)
            return False
        if not connection.received:
            connection.until_s = min(connection.until_s, self._clock() + REQUEST_S)
        connection.received += chunk
        # After a short read the kernel reports data that arrives later, but not an end of the
        # stream that arrived with this data.
        return len(chunk) == CHUNK_BYTES or connection.ended

    def _discard(self, connection: Connection) -> bool:
        try:
            if connection.socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT):
                return True
        except BlockingIOError:
            return False
        self._end(connection)
        return False

    def _answer(self, connection: Connection, got: Received | HTTPStatus) -> None:
        if isinstance(got, Received):
            del connection.received[: got.length]
            answer, keep_alive, head_only = (
                self._handler(connection.number, got.request),
                got.keep_alive,
                got.request.method == "HEAD",
            )
        else:
            answer, keep_alive, head_only = Answer(got, b"{}"), False, False
        connection.ending = not keep_alive
        connection.until_s = self._clock() + (
            REQUEST_S if connection.received or not keep_alive else IDLE_S
        )
        connection.unsent = written(answer, self._now(), head_only=head_only, keep_alive=keep_alive)
        self._by_source.touch(connection.source, connection)
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        """Send as much of the pending data as the kernel accepts; the kernel reports when it
        accepts more."""
        try:
            sent = connection.socket.send(connection.unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        connection.unsent = connection.unsent[sent:]
        if bool(connection.unsent) != connection.waiting:
            connection.waiting = bool(connection.unsent)
            events = READABLE | select.EPOLLOUT if connection.waiting else READABLE
            self._epoll.modify(connection.socket.fileno(), events)
        if connection.unsent:
            connection.until_s = min(connection.until_s, self._clock() + REQUEST_S)
        elif connection.ending:
            connection.socket.shutdown(socket.SHUT_WR)
            connection.received.clear()
            connection.until_s = self._clock() + LINGER_S

    def _end(self, connection: Connection) -> None:
        del self._connections[connection.socket.fileno()]
        self._by_source.remove(connection.source, connection)
        connection.socket.close()

    def _now(self) -> str:
        second = int(time.time())
        if self._date[0] != second:
            self._date = second, time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(second))
        return self._date[1]
