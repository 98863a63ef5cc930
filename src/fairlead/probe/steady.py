"""Steady load during a change: clients that open new connections, and connections that stay open.

In: a target; another process makes the change. Out: for each period, the results of the clients and
of the open connections. Terms:

* *failed*: a new connection that was not answered within `timeout_s` and had to retransmit a
  packet, or that was not answered within `patience_s`. The answer of a server that is slow, or on a
  machine that stands still for a moment, is late without a retransmission;
* *broken*: an open connection that ended without the server's announcement (`Connection: close`):
  reset, cut, or no answer within `silence_s`;
* *unconnected*: the failed connections that were never established, because packets were lost; the
  others were established and got no answer from a pod;
* *longest gap*: the longest time without an answer for one client, which retries at once after a
  failure;
* *stalled*: the longest time for which this process itself did not run: failures during that time
  say little about the load balancer.

With `first_port`, each connection has a source port of its own, from this one on. Otherwise the
kernel chooses a port that is free at the client, but may be in the tables of a node to which an
earlier connection with this port led before routes changed."""

import asyncio
import errno
import itertools
import time
from collections.abc import Callable

import msgspec

from fairlead.probe.exchange import REQUEST_KEEP, REQUEST_ONCE, Answer, Malformed, parse
from fairlead.probe.flow import retransmissions


class Broken(msgspec.Struct, frozen=True):
    """An open connection that broke, with the pod and node at its other end."""

    pod: str
    node: str
    why: str


class Period(msgspec.Struct):
    """The results since the end of the previous period."""

    requests: int = 0
    failed: int = 0
    longest_gap_ms: int = 0
    open_connections: int = 0
    clients: dict[str, int] = msgspec.field(default_factory=dict)
    """The client addresses of new connections, as the server saw them, with the number of
    answers."""
    nodes: dict[str, int] = msgspec.field(default_factory=dict)
    """The nodes that answered new connections, with the number of answers."""
    open_clients: dict[str, int] = msgspec.field(default_factory=dict)
    """Like `clients`, for connections that stay open."""
    broken: list[Broken] = msgspec.field(default_factory=list)
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    unconnected: int = 0
    stalled_ms: int = 0


STALL_CHECK_S = 0.05
"""The interval at which the process checks that it runs."""


class Steady:
    """Clients and open connections to one target, from the start of `run` until it is cancelled."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        callers: int = 5,
        pause_s: float = 0.05,
        timeout_s: float = 0.4,
        patience_s: float | None = None,
        open_connections: int = 20,
        open_pause_s: float = 0.2,
        silence_s: float = 3.0,
        first_port: int = 0,
    ) -> None:
        """Create the load. `patience_s`: `timeout_s` by default."""
        self._target = (address, port)
        self._callers = callers
        self._pause_s = pause_s
        self._timeout_s = timeout_s
        self._patience_s = timeout_s if patience_s is None else patience_s
        self._open_connections = open_connections
        self._open_pause_s = open_pause_s
        self._silence_s = silence_s
        self._ports = itertools.count(first_port) if first_port else None
        self._period = Period()
        self._last_answer: dict[int, float] = {}
        self._begun: dict[int, float] = {}
        """When each present call began."""
        self._now: Callable[[], float] = time.monotonic
        self._opened = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._measure_stalls())
            for caller in range(self._callers):
                group.create_task(self._call(caller))
            for number in range(self._open_connections):
                group.create_task(self._keep_open(number))

    async def settle(self) -> None:
        """Wait for the results of the calls that are late now."""
        latest = self._now() - self._timeout_s
        while any(begun < latest for begun in self._begun.values()):
            await asyncio.sleep(self._pause_s)

    def take(self) -> Period:
        """End the period and return it. A gap that is still open counts up to now, and continues in
        the next period."""
        now = self._now()
        for last in self._last_answer.values():
            self._record_gap(now - last)
        period, self._period = self._period, Period()
        period.open_connections = self._opened
        return period

    async def _measure_stalls(self) -> None:
        while True:
            before = self._now()
            await asyncio.sleep(STALL_CHECK_S)
            late_ms = round((self._now() - before - STALL_CHECK_S) * 1000)
            self._period.stalled_ms = max(self._period.stalled_ms, late_ms)

    def _record_gap(self, gap_s: float) -> None:
        self._period.longest_gap_ms = max(self._period.longest_gap_ms, round(gap_s * 1000))

    async def _call(self, caller: int) -> None:
        await asyncio.sleep(self._pause_s * caller / self._callers)
        self._last_answer[caller] = self._now()
        while True:
            self._period.requests += 1
            self._begun[caller] = self._now()
            try:
                async with asyncio.timeout(self._patience_s):
                    answer = await self._once(self._begun[caller])
            except (OSError, TimeoutError, Malformed, EOFError) as error:
                self._fail(error)
                continue
            finally:
                del self._begun[caller]
            _count(self._period.clients, answer.client)
            _count(self._period.nodes, answer.node)
            now = self._now()
            self._record_gap(now - self._last_answer[caller])
            self._last_answer[caller] = now
            await asyncio.sleep(self._pause_s)

    def _fail(self, error: Exception) -> None:
        self._period.failed += 1
        _count(self._period.failures, _name(error))

    async def _once(self, begun: float) -> Answer:
        """Make one call. Raise TimeoutError if it is late because a packet was lost."""
        try:
            reader, writer = await self._connect()
        except (OSError, asyncio.CancelledError):
            self._period.unconnected += 1
            raise
        try:
            if self._lost_packets(begun, writer):
                self._period.unconnected += 1
                raise TimeoutError
            answer = await _exchange(reader, writer, REQUEST_ONCE)
            if self._lost_packets(begun, writer):
                raise TimeoutError
            return answer
        finally:
            writer.transport.abort()

    def _lost_packets(self, begun: float, writer: asyncio.StreamWriter) -> bool:
        """Return whether the call is late, and had to retransmit a packet."""
        late = self._now() - begun > self._timeout_s
        return late and retransmissions(writer.get_extra_info("socket")) > 0

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._ports is None:
            return await asyncio.open_connection(*self._target)
        anywhere = "::" if ":" in self._target[0] else "0.0.0.0"
        return await asyncio.open_connection(
            *self._target, local_addr=(anywhere, next(self._ports))
        )

    async def _keep_open(self, number: int) -> None:
        await asyncio.sleep(self._open_pause_s * number / self._open_connections)
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    reader, writer = await self._connect()
                    answer = await _exchange(reader, writer, REQUEST_KEEP)
            except (OSError, TimeoutError, Malformed, EOFError):
                # Failures to connect are counted by the clients; this connection only retries.
                await asyncio.sleep(self._pause_s)
                continue
            self._opened += 1
            try:
                await self._use(reader, writer, answer)
            finally:
                self._opened -= 1
                writer.transport.abort()

    async def _use(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer
    ) -> None:
        """Use an open connection until it ends; record the end if it is not an orderly one."""
        while not answer.closing:
            await asyncio.sleep(self._open_pause_s)
            try:
                async with asyncio.timeout(self._silence_s):
                    answer = await _exchange(reader, writer, REQUEST_KEEP)
            except (OSError, TimeoutError, Malformed, EOFError) as error:
                self._period.broken.append(Broken(answer.pod, answer.node, type(error).__name__))
                return
            _count(self._period.open_clients, answer.client)


def _name(error: Exception) -> str:
    """Return the name of the error, with the code of an OSError that has no type of its own."""
    name = type(error).__name__
    code = errno.errorcode.get(error.errno or 0) if type(error) is OSError else None
    return f"{name} {code}" if code else name


def _count(numbers: dict[str, int], name: str) -> None:
    numbers[name] = numbers.get(name, 0) + 1


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer:
    writer.write(request)
    received = b""
    while (answer := parse(received)) is None:
        data = await reader.read(4096)
        if not data:
            raise EOFError
        received += data
    return answer
