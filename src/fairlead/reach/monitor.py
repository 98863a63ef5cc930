"""Call many targets continuously.

In: targets, which may change at any time; an interval. Out: a Record for each target; Events to a
callback. Each target is called at a fixed cadence that does not wait for answers, so a target that
does not answer is called as often as one that does, and a gap is measured to one interval. The
first calls are spread over the interval. Calls that fail while this process itself did not run are
unknown."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from fairlead.reach.call import HOLD_PAUSE_S, HOLD_SILENCE_S, call, hold
from fairlead.reach.record import Event, Outcome, Record
from fairlead.reach.targets import Target

STALL_CHECK_S = 0.05
KEPT_LEFT = 1000
"""The number of earlier targets whose records are kept."""
SPREAD = 0.618033988749895
"""Successive multiples of this fraction, modulo 1, are spread evenly however many there are."""


class Monitor:
    """Calls of targets from the start of `run` until it is cancelled."""

    def __init__(self, *, interval_s: float, timeout_s: float, held: int) -> None:
        """`held`: the number of connections that are kept open to each target."""
        self.records: dict[Target, Record] = {}
        """The targets that are called now, with what their calls have shown."""
        self.left: dict[Target, Record] = {}
        """The targets that were called earlier."""
        self.stalled_s = 0.0
        """The longest time for which this process did not run."""
        self.tell: Callable[[Target, Event], None] = lambda _target, _event: None
        """Is called with every event of a target."""
        self.now: Callable[[], float] = time.monotonic
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._held = held
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[Target, asyncio.Task[None]] = {}
        self._last_stall_s = float("-inf")
        """When the latest stall that may cost an answer ended."""
        self._place = 0.0

    async def run(self) -> None:
        """Call the targets. Raise what a bug raises in a call."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._watch_stalls())
            for target in self.records:
                self._start(group, target)

    def replace(self, targets: Iterable[Target]) -> None:
        """Call these targets from now on, and no others. Those that stay are not disturbed."""
        wanted = set(targets)
        for target in [each for each in self.records if each not in wanted]:
            if task := self._tasks.pop(target, None):
                task.cancel()
            record = self.records.pop(target)
            record.leave(self.now())
            self.left[target] = record
            while len(self.left) > KEPT_LEFT:
                del self.left[next(iter(self.left))]
        for target in sorted(wanted - self.records.keys()):
            self.records[target] = self.left.pop(target, Record())
            if self._group is not None:
                self._start(self._group, target)

    def stretch(self) -> None:
        """Let all gaps that are not over reach to the present."""
        for record in self.records.values():
            record.stretch(self.now())

    def _start(self, group: asyncio.TaskGroup, target: Target) -> None:
        self._tasks[target] = group.create_task(self._watch(target, self.records[target]))

    async def _watch(self, target: Target, record: Record) -> None:
        self._place = (self._place + SPREAD) % 1
        await asyncio.sleep(self._interval_s * self._place)
        async with asyncio.TaskGroup() as group:
            for number in range(self._held):
                group.create_task(self._keep_open(target, record, number))
            pending: deque[asyncio.Task[Outcome]] = deque()

            def settle(_: asyncio.Task[Outcome]) -> None:
                # The outcomes are counted in the order in which the calls began.
                while pending and pending[0].done():
                    if (done := pending.popleft()).cancelled() or done.exception():
                        continue
                    if event := record.add(self._judged(done.result())):
                        self.tell(target, event)

            due_s = self.now()
            while True:
                task = group.create_task(call(target, self._timeout_s, self.now))
                pending.append(task)
                task.add_done_callback(settle)
                due_s = max(due_s + self._interval_s, self.now())
                await asyncio.sleep(due_s - self.now())

    def _judged(self, outcome: Outcome) -> Outcome:
        if outcome.problem and not outcome.unknown and self._last_stall_s >= outcome.begun_s:
            return Outcome(outcome.begun_s, outcome.latency_s, unknown=True)
        return outcome

    async def _keep_open(self, target: Target, record: Record, number: int) -> None:
        await asyncio.sleep(HOLD_PAUSE_S * number / self._held)
        while True:
            was_open = False

            def opened() -> None:
                nonlocal was_open
                was_open = True
                record.held += 1
                record.held_in_all += 1

            try:
                why = await hold(target, self._timeout_s, opened)
            finally:
                record.held -= was_open
            # A stall of this process looks like a silent server.
            if why and self._last_stall_s < self.now() - HOLD_SILENCE_S:
                self.tell(target, record.add_broken(self.now(), why))
            elif was_open:
                record.closed += 1
            await asyncio.sleep(min(HOLD_PAUSE_S, self._interval_s))

    async def _watch_stalls(self) -> None:
        while True:
            before = self.now()
            await asyncio.sleep(STALL_CHECK_S)
            late_s = self.now() - before - STALL_CHECK_S
            self.stalled_s = max(self.stalled_s, late_s)
            if late_s > self._timeout_s / 2:
                self._last_stall_s = self.now()
