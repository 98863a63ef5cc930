"""Thousands of flows that stay open, and a steady rate of new ones, each of which records which pod
answers it.

In: targets; another process makes the change under test. Out: for each period and target, a
`Count`. Terms:

* *failed*: a new flow that was refused, reset, or not answered within `patience_s`; with a long
  `patience_s`, flows whose packets were lost count as late instead;
* *late*: a new flow that was answered, but had to retransmit: a packet was lost. Datagrams are
  repeated by this program;
* *broken*: an open flow that ended without the server's announcement, was silent for `silence_s`,
  or was answered by another pod;
* *lost*: a request on an open UDP flow that had no answer within `silence_s`. A flow sends no other
  request while it waits.

Every tenth new flow replaces the oldest flow, so that at any time the flows have different ages.
There is one epoll loop and no asyncio: ten thousand connections must leave a small machine room for
the system under test."""

import errno
import heapq
import itertools
import os
import random
import resource
import select
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import msgspec

from fairlead.probe.exchange import Answer, Malformed
from fairlead.probe.flow import Flow, Target

MAX_OPENING = 128
"""The maximum number of flows that are being opened at a time when many are missing."""
RETRANSMIT_S = 1.0
"""A new UDP flow without an answer repeats its request once after this time, as TCP would."""
PAUSE_S = 0.1
"""The delay after a failure before missing flows are opened again. The steady new flows do not
wait."""
SILENCE_S = 10.0
"""Longer than the stalls of a machine that is too small for the test."""
REPLACED = 10
SOURCE_PORTS = range(10_000, 60_000)
"""New UDP flows use these ports in turn. A node tracks a flow for up to two minutes after its
socket was closed, so a new socket that happened to get the same port would continue that flow,
perhaps to a pod that has just ended."""
MOVED = "answered by another pod of the node"
MOVED_AWAY = "answered on another node"
MAX_RECORDED = 1000
_FAILURES = (OSError, Malformed, EOFError)


class Break(msgspec.Struct, frozen=True):
    """One open flow that broke: its client's address and port, when it began and when it broke
    (monotonic clock), the number of its requests, the pod that answered it with the node of that
    pod, why it broke, and the pod that answered instead, if one did."""

    client: str
    client_port: int
    begun_s: float
    broken_s: float
    requests: int
    pod: str
    node: str
    why: str
    answered_by: str = ""


class Count(msgspec.Struct):
    """The results of one target's flows in a period. Keys of `broken` and `lost` are pods; `by_pod`
    counts new flows."""

    open: int = 0
    new: int = 0
    answered: int = 0
    by_pod: dict[str, int] = msgspec.field(default_factory=dict)
    failed: dict[str, int] = msgspec.field(default_factory=dict)
    late: int = 0
    problems: list[tuple[float, str]] = msgspec.field(default_factory=list)
    """The first thousand flows that failed or were late: when they began (monotonic clock), and the
    error, or the pod that answered late."""
    broken: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    breaks: list[Break] = msgspec.field(default_factory=list)
    """The first thousand flows that `broken` counts."""
    lost: dict[str, int] = msgspec.field(default_factory=dict)
    ended: int = 0
    longest_wait_ms: int = 0


class Crowd:
    """All flows of one process. `step` is the body of the loop; `take` ends a period; `counts`
    holds the present period."""

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        new_per_s: float,
        interval_s: float,
        patience_s: float,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._targets = targets
        self._new_per_s = new_per_s
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._silence_s = silence_s
        self._poll = select.epoll()
        self._flows: dict[int, Flow] = {}
        self._new: deque[Flow] = deque()
        """New flows in the order in which they began. Ended flows are removed later."""
        self._sent_once: deque[Flow] = deque()
        """The UDP flows among them that have sent one request, in the same order."""
        self._due: list[tuple[float, int, Flow]] = []
        """A heap: when each open flow is to send its next request."""
        self._number = itertools.count()
        self._source_ports = itertools.cycle(SOURCE_PORTS)
        self._oldest: dict[Target, deque[Flow]] = {target: deque() for target in targets}
        self._open: Counter[Target] = Counter()
        self._opening: Counter[Target] = Counter()
        self._started = 0
        self._filled = False
        self._next_new_s = 0.0
        self._next_fill_s = 0.0
        self.counts: defaultdict[Target, Count] = defaultdict(Count)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))

    @property
    def complete(self) -> bool:
        return all(self._open[target] >= target.open for target in self._targets)

    def take(self) -> dict[str, Count]:
        """End the period and return it, by target."""
        for target in self._targets:
            self.counts[target].open = self._open[target]
        counts, self.counts = self.counts, defaultdict(Count)
        return {str(target): count for target, count in counts.items()}

    def step(self, command: int = -1) -> bool:
        """Do what is due and wait for at most a few milliseconds. Return whether the file
        descriptor `command` is readable."""
        commanded = False
        # All pending answers are read before any flow counts as silent.
        for descriptor, events in self._poll.poll(0.005, len(self._flows) + 1):
            flow = self._flows.get(descriptor)
            if flow is not None:
                self._on_event(flow, events)
            elif descriptor == command:
                commanded = True
        now_s = time.monotonic()
        self._begin(now_s)
        self._send_due_requests(now_s)
        self._repeat_first_requests(now_s)
        self._expire_new_flows(now_s)
        return commanded

    def watch(self, command: int) -> None:
        """Have `step` report when this file descriptor is readable."""
        self._poll.register(command, select.EPOLLIN)

    def _begin(self, now_s: float) -> None:
        """Open the steady new flows, once all flows have been open; and the flows that are
        missing."""
        if not self._filled:
            self._filled = self.complete
            self._next_new_s = now_s
        while self._filled and self._next_new_s <= now_s:
            self._next_new_s += 1 / self._new_per_s
            self._start(self._targets[self._started % len(self._targets)], now_s)
        for target in self._targets if now_s >= self._next_fill_s else ():
            while (
                self._open[target] + self._opening[target] < target.open
                and self._opening.total() < MAX_OPENING
            ):
                self._start(target, now_s)

    def _start(self, target: Target, now_s: float) -> None:
        self._started += 1
        self.counts[target].new += 1
        try:
            flow = self._new_flow(target, now_s)
        except OSError as error:
            self._fail(target, now_s, error)
            return
        self._opening[target] += 1
        self._flows[flow.socket.fileno()] = flow
        self._poll.register(
            flow.socket, select.EPOLLOUT if target.kind == "tcp" else select.EPOLLIN
        )
        self._new.append(flow)
        if target.kind != "tcp":
            self._sent_once.append(flow)

    def _new_flow(self, target: Target, now_s: float) -> Flow:
        """Open a new flow. A UDP flow uses the next port that no open flow has."""
        if target.kind == "tcp":
            return Flow(target, now_s)
        while True:
            try:
                return Flow(target, now_s, next(self._source_ports))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise

    def _on_event(self, flow: Flow, events: int) -> None:
        now_s = time.monotonic()
        try:
            if events & select.EPOLLOUT:
                flow.connected(now_s)
                self._poll.modify(flow.socket, select.EPOLLIN)
                return
            known = flow.first_answer
            started_s = flow.begun_s if known is None else flow.waiting_s
            if (answer := flow.receive()) is None:
                return
        except BlockingIOError:
            return
        except _FAILURES as error:
            self._on_failure(flow, error, now_s)
            return
        count = self.counts[flow.target]
        if started_s:  # otherwise the request was already counted as lost
            count.longest_wait_ms = max(count.longest_wait_ms, round((now_s - started_s) * 1000))
        if known is None:
            self._on_first_answer(flow, answer, now_s)
        elif answer.pod != known.pod:
            self._record_broken(
                flow, MOVED if answer.node == known.node else MOVED_AWAY, answer.pod
            )
            flow.first_answer = answer
        if answer.closing and flow.kept_open:
            count.ended += 1
            self._close(flow)

    def _on_first_answer(self, flow: Flow, answer: Answer, now_s: float) -> None:
        """Record the first answer of a new flow. The flow stays open, or is closed if it was a
        steady one."""
        target, count = flow.target, self.counts[flow.target]
        self._opening[target] -= 1
        count.answered += 1
        count.by_pod[answer.pod] = count.by_pod.get(answer.pod, 0) + 1
        if flow.was_retransmitted():
            count.late += 1
            self._record_trouble(target, flow.begun_s, answer.pod)
        missing = self._open[target] < target.open
        if not (missing or count.answered % REPLACED == 0):
            self._close(flow)
            return
        flow.kept_open = True
        self._open[target] += 1
        # Spread the requests over the interval: flows that began together must not send together
        # for ever.
        self._schedule(flow, now_s + self._interval_s * random.uniform(0.2, 1.0))
        line = self._oldest[target]
        line.append(flow)
        while self._open[target] > target.open or line[0].socket.fileno() < 0:
            if (oldest := line.popleft()).socket.fileno() >= 0:
                self._close(oldest)

    def _send_due_requests(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            due_s, _, flow = heapq.heappop(self._due)
            if flow.socket.fileno() < 0:
                continue
            if not flow.waiting_s:
                self._send_request(flow, now_s)
            elif now_s - flow.waiting_s >= self._silence_s and flow.target.kind == "tcp":
                self._on_failure(flow, TimeoutError(), now_s)
            elif now_s - flow.waiting_s >= self._silence_s:
                lost = self.counts[flow.target].lost
                pod = flow.first_answer.pod if flow.first_answer else ""
                lost[pod] = lost.get(pod, 0) + 1
                self._send_request(flow, now_s)
            self._schedule(flow, due_s + self._interval_s)

    def _send_request(self, flow: Flow, now_s: float) -> None:
        try:
            flow.send_request(now_s)
        except OSError as error:
            self._on_failure(flow, error, now_s)

    def _schedule(self, flow: Flow, due_s: float) -> None:
        heapq.heappush(self._due, (due_s, next(self._number), flow))

    def _repeat_first_requests(self, now_s: float) -> None:
        while self._sent_once and now_s - self._sent_once[0].begun_s >= RETRANSMIT_S:
            flow = self._sent_once.popleft()
            if flow.socket.fileno() >= 0 and flow.first_answer is None:
                self._send_request(flow, now_s)

    def _expire_new_flows(self, now_s: float) -> None:
        while self._new:
            flow = self._new[0]
            if flow.socket.fileno() >= 0 and flow.first_answer is None:
                if now_s - flow.begun_s < self._patience_s:
                    return
                self._on_failure(flow, TimeoutError(), now_s)
            self._new.popleft()

    def _on_failure(self, flow: Flow, error: Exception, now_s: float) -> None:
        if flow.first_answer is None:
            self._opening[flow.target] -= 1
            self._fail(flow.target, flow.begun_s, error)
            self._close(flow)
            return
        self._record_broken(flow, type(error).__name__)
        if flow.target.kind == "tcp":
            self._close(flow)
        else:  # a UDP flow has no connection to lose; its next request may be answered
            flow.waiting_s = 0.0

    def _fail(self, target: Target, begun_s: float, error: Exception) -> None:
        failed = self.counts[target].failed
        name = type(error).__name__
        failed[name] = failed.get(name, 0) + 1
        self._record_trouble(target, begun_s, name)
        self._next_fill_s = time.monotonic() + PAUSE_S

    def _record_trouble(self, target: Target, begun_s: float, what: str) -> None:
        if len(noted := self.counts[target].problems) < MAX_RECORDED:
            noted.append((begun_s, what))

    def _record_broken(self, flow: Flow, why: str, answered_by: str = "") -> None:
        count, known = self.counts[flow.target], flow.first_answer
        pod, node = (known.pod, known.node) if known else ("", "")
        by_cause = count.broken.setdefault(pod, {})
        by_cause[why] = by_cause.get(why, 0) + 1
        if len(count.breaks) < MAX_RECORDED:
            client, port, *_ = flow.socket.getsockname()
            times = flow.begun_s, time.monotonic(), flow.requests
            count.breaks.append(Break(client, port, *times, pod, node, why, answered_by))

    def _close(self, flow: Flow) -> None:
        self._open[flow.target] -= flow.kept_open
        del self._flows[flow.socket.fileno()]
        flow.socket.close()


def run(crowd: Crowd, command: int = 0, answer: int = 1) -> None:
    """Run until `command` ends. Each line read from it ends a period, which is written to `answer`
    as a line of JSON."""
    crowd.watch(command)
    while True:
        if crowd.step(command):
            lines = os.read(command, 4096)
            if not lines:
                return
            for _ in range(lines.count(b"\n")):
                os.write(answer, msgspec.json.encode(crowd.take()) + b"\n")
