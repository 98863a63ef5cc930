"""Steady callers of one Service, as a process in a lab: `python bench/caller.py ADDRESS`.

In: an address; each line of standard input ends a period. Out: a `Called` as a line of JSON for
each period. The load is an open loop: a call without an answer delays no other call. There are two
types of callers:

* *flows*: flows of datagrams, one datagram each `INTERVAL_S`. The gap of a flow is the time between
  two of its answers, so it shows how long one caller had no answer, also where only some of the
  flows lead to the host that failed;
* *calls*: new connections at a fixed rate, with one request each. A call that is not answered
  within `PATIENCE_S`, which is when TCP repeats a lost first packet, has failed.
"""

import argparse
import heapq
import os
import select
import socket
import time

import msgspec

from fairlead.net.address import socket_family
from fairlead.probe.burst import LINGER_NONE
from fairlead.probe.exchange import REQUEST_ONCE, Malformed, parse

INTERVAL_S = 0.01
PATIENCE_S = 0.95
DISTURBED_S = 0.05
"""A flow with a longer gap counts as disturbed. Gaps that the client's own process causes are
shorter on an idle machine, and `stalled_ms` shows them."""
POLL_S = 0.002
CALL_PORT, DATAGRAM_PORT = 80, 53


class Called(msgspec.Struct):
    """The results of a period. A gap that is still open at the end counts up to the end."""

    longest_gap_ms: float = 0.0
    """The longest gap of any flow."""
    disturbed: int = 0
    """The number of flows with a gap of more than `DISTURBED_S`."""
    datagrams: int = 0
    unanswered: int = 0
    calls: int = 0
    failed: int = 0
    window_ms: float = 0.0
    """From the start of the first failed call to the start of the last one."""
    slowest_ms: float = 0.0
    """The longest time to the answer of a call that did not fail."""
    stalled_ms: float = 0.0
    """The longest time for which this process did not run."""


class _DatagramFlow:
    def __init__(self, address: str, now_s: float) -> None:
        self.socket = socket.socket(
            socket_family(address), socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        )
        self.socket.connect((address, DATAGRAM_PORT))
        self.answered_s = now_s
        self.longest_gap_s = 0.0

    def gap_until(self, now_s: float) -> None:
        self.longest_gap_s = max(self.longest_gap_s, now_s - self.answered_s)


class _Call:
    __slots__ = ("begun_s", "received", "socket")

    def __init__(self, sock: socket.socket, begun_s: float) -> None:
        self.socket = sock
        self.begun_s = begun_s
        self.received = b""


class Caller:
    """All callers of one address. `step` is the body of the loop; `take` ends a period."""

    def __init__(self, address: str, *, flows: int, calls_per_s: float) -> None:
        now_s = time.monotonic()
        self._address = address
        self._between_calls_s = 1 / calls_per_s
        self._poll = select.epoll()
        self._flows: dict[int, _DatagramFlow] = {}
        self._due: list[tuple[float, int]] = []
        """A heap: when each flow sends its next datagram."""
        for number in range(flows):
            flow = _DatagramFlow(address, now_s)
            descriptor = flow.socket.fileno()
            self._flows[descriptor] = flow
            self._poll.register(descriptor, select.EPOLLIN)
            heapq.heappush(self._due, (now_s + INTERVAL_S * number / flows, descriptor))
        self._calls: dict[int, _Call] = {}
        """In the order in which they began."""
        self._next_call_s = now_s
        self._stepped_s = now_s
        self._failed_s: list[float] = []
        self._called = Called()

    def take(self) -> Called:
        """End the period and return its results."""
        now_s = time.monotonic()
        taken, self._called = self._called, Called()
        for flow in self._flows.values():
            flow.gap_until(now_s)
            taken.longest_gap_ms = max(taken.longest_gap_ms, flow.longest_gap_s * 1000)
            taken.disturbed += flow.longest_gap_s > DISTURBED_S
            flow.longest_gap_s = 0.0
        taken.unanswered = max(0, taken.datagrams - taken.unanswered)
        if self._failed_s:
            taken.window_ms = (max(self._failed_s) - min(self._failed_s)) * 1000
            self._failed_s.clear()
        return taken

    def watch(self, command: int) -> None:
        """Have `step` report when this file descriptor is readable."""
        self._poll.register(command, select.EPOLLIN)

    def step(self, command: int = -1) -> bool:
        """Do what is due and wait for at most two milliseconds. Return whether the file descriptor
        `command` is readable."""
        commanded = False
        for descriptor, events in self._poll.poll(POLL_S, 256):
            if descriptor == command:
                commanded = True
            elif (flow := self._flows.get(descriptor)) is not None:
                self._on_datagram(flow)
            elif (call := self._calls.get(descriptor)) is not None:
                self._on_call(call, events)
        now_s = time.monotonic()
        stalled_ms = (now_s - self._stepped_s) * 1000
        self._called.stalled_ms = max(self._called.stalled_ms, stalled_ms)
        self._stepped_s = now_s
        self._send(now_s)
        while self._next_call_s <= now_s:
            self._next_call_s += self._between_calls_s
            self._begin_call(now_s)
        for call in list(self._calls.values()):
            if now_s - call.begun_s < PATIENCE_S:
                break
            self._fail(call)
        return commanded

    def _send(self, now_s: float) -> None:
        while self._due[0][0] <= now_s:
            due_s, descriptor = self._due[0]
            heapq.heapreplace(self._due, (due_s + INTERVAL_S, descriptor))
            self._called.datagrams += 1
            try:
                self._flows[descriptor].socket.send(b"?")
            except OSError:  # an ICMP error about an earlier datagram, or a full queue
                continue

    def _on_datagram(self, flow: _DatagramFlow) -> None:
        try:
            flow.socket.recv(4096)
        except OSError:
            return
        now_s = time.monotonic()
        flow.gap_until(now_s)
        flow.answered_s = now_s
        # Until `take` subtracts it from the datagrams, this is the number of answers.
        self._called.unanswered += 1

    def _begin_call(self, now_s: float) -> None:
        sock = socket.socket(
            socket_family(self._address), socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        )
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
        sock.connect_ex((self._address, CALL_PORT))
        self._called.calls += 1
        self._calls[sock.fileno()] = _Call(sock, now_s)
        self._poll.register(sock, select.EPOLLOUT)

    def _on_call(self, call: _Call, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                if code := call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                call.socket.send(REQUEST_ONCE)
                self._poll.modify(call.socket, select.EPOLLIN)
                return
            data = call.socket.recv(4096)
            if not data:
                raise Malformed("closed before the answer was complete")
            call.received += data
            if parse(call.received) is None:
                return
        except BlockingIOError:
            return
        except (OSError, Malformed):
            self._fail(call)
            return
        took_ms = (time.monotonic() - call.begun_s) * 1000
        self._called.slowest_ms = max(self._called.slowest_ms, took_ms)
        self._end(call)

    def _fail(self, call: _Call) -> None:
        self._called.failed += 1
        self._failed_s.append(call.begun_s)
        self._end(call)

    def _end(self, call: _Call) -> None:
        del self._calls[call.socket.fileno()]
        call.socket.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--flows", type=int, default=16)
    parser.add_argument("--calls", type=float, default=100, metavar="PER_SECOND")
    arguments = parser.parse_args()
    caller = Caller(arguments.address, flows=arguments.flows, calls_per_s=arguments.calls)
    caller.watch(0)
    while True:
        if caller.step(0):
            lines = os.read(0, 4096)
            if not lines:
                return
            for _ in range(lines.count(b"\n")):
                os.write(1, msgspec.json.encode(caller.take()) + b"\n")


if __name__ == "__main__":
    main()
