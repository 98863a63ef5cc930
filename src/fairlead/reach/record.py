"""What the calls of one target have shown.

In: the outcomes of its calls, in the order in which the calls began. Out: numbers, gaps, and an
Event whenever something begins or ends. Pure.

A *gap* is the time from the beginning of the first call that failed to the beginning of the first
later call that was answered; it is exact to the interval between two calls. A call failed if it was
not answered in time. It is *unknown* if this process itself did not run for too long meanwhile:
such a call neither begins nor ends a gap."""

import math
from collections import Counter
from typing import Literal

import msgspec

KEPT_GAPS = 100
"""The number of latest gaps that are kept one by one. The sums count all."""
KEPT_NAMES = 1000
"""The number of different pods and client addresses that are counted one by one."""
OTHERS = "others"


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The result of one call. Times are in seconds of a monotonic clock."""

    begun_s: float
    latency_s: float
    problem: str = ""
    """Why the call failed; empty if it was answered."""
    unknown: bool = False
    own: str = ""
    """The address that called, as this host knows it."""
    client: str = ""
    """The client's address as the server saw it; empty if its answer does not say so."""
    pod: str = ""
    """Who answered; empty if the answer does not say so."""


class Gap(msgspec.Struct):
    """A time without answers."""

    begun_s: float
    length_s: float
    calls: int
    """The number of calls that failed."""
    problem: str
    """What the first of them failed with."""
    over: bool = False


class Event(msgspec.Struct, frozen=True):
    """Something that a person wants to know at once."""

    kind: Literal["gap-begun", "gap-ended", "broken"]
    at_s: float
    text: str
    length_s: float = 0.0
    calls: int = 0


class Latencies:
    """A histogram whose buckets grow by 5 %, from 50 microseconds to over 100 seconds: a quantile
    is at most 5 % above the true one."""

    _FLOOR_S = 50e-6
    _GROWTH = math.log(1.05)

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.sum_s = 0.0
        self.worst_s = 0.0

    def add(self, latency_s: float) -> None:
        above_floor = max(1.0, latency_s / self._FLOOR_S)
        self._buckets[math.ceil(math.log(above_floor) / self._GROWTH)] += 1
        self.count += 1
        self.sum_s += latency_s
        self.worst_s = max(self.worst_s, latency_s)

    def quantile(self, fraction: float) -> float:
        """Return the latency in seconds that this fraction of the calls did not exceed; 0 if there
        were no calls."""
        wanted = math.ceil(fraction * self.count)
        for bucket in sorted(self._buckets):
            wanted -= self._buckets[bucket]
            if wanted <= 0:
                return min(self.worst_s, self._FLOOR_S * math.exp(bucket * self._GROWTH))
        return 0.0


class Record:
    """All that is known of one target."""

    def __init__(self) -> None:
        self.answered = 0
        self.failed = 0
        self.unknown = 0
        self.lacks: Counter[str] = Counter()
        """Unknown calls for which this host had no resources, by what it lacked."""
        self.latencies = Latencies()
        self.gaps: list[Gap] = []
        """The latest gaps, oldest first."""
        self.gap_count = 0
        self.gap_total_s = 0.0
        """The length of all gaps that are over."""
        self._longest_over_s = 0.0
        self.problems: Counter[str] = Counter()
        self.pods: Counter[str] = Counter()
        self.clients: Counter[str] = Counter()
        self.own: Counter[str] = Counter()
        self.client_kept = 0
        """Answers whose server saw the address that called."""
        self.client_hidden = 0
        """Answers whose server saw another address."""
        self.held = 0
        """Connections that are open now."""
        self.held_in_all = 0
        self.broken: Counter[str] = Counter()
        """Held connections that broke, by reason."""
        self.closed = 0
        """Held connections that the server closed in an orderly way."""
        self.last_latency_s: float | None = None

    @property
    def gap(self) -> Gap | None:
        """The gap that is not over, if any."""
        return self.gaps[-1] if self.gaps and not self.gaps[-1].over else None

    @property
    def longest_gap_s(self) -> float:
        """The length of the longest gap. That of a gap that is not over does not count once it has
        ended: the next call that is answered may have begun before the latest `stretch`."""
        return max(self._longest_over_s, self.gap.length_s if self.gap else 0.0)

    @property
    def calls(self) -> int:
        return self.answered + self.failed + self.unknown

    @property
    def broken_count(self) -> int:
        return self.broken.total()

    def add(self, outcome: Outcome) -> Event | None:
        """Count the outcome of a call that began after those of all earlier outcomes."""
        if outcome.unknown:
            self.unknown += 1
            if outcome.problem:
                _count(self.lacks, outcome.problem)
            return None
        if outcome.problem:
            return self._add_failure(outcome)
        self.answered += 1
        self.latencies.add(outcome.latency_s)
        self.last_latency_s = outcome.latency_s
        if outcome.pod:
            _count(self.pods, outcome.pod)
        if outcome.own:
            _count(self.own, outcome.own)
        if outcome.client:
            _count(self.clients, outcome.client)
            if outcome.client == outcome.own:
                self.client_kept += 1
            else:
                self.client_hidden += 1
        return self._end_gap(outcome.begun_s)

    def add_broken(self, at_s: float, why: str) -> Event:
        """Count a held connection that broke."""
        _count(self.broken, why)
        return Event("broken", at_s, f"an open connection broke: {why}")

    def stretch(self, now_s: float) -> None:
        """Let a gap that is not over reach to the present."""
        if gap := self.gap:
            gap.length_s = max(0.0, now_s - gap.begun_s)

    def leave(self, now_s: float) -> None:
        """End a gap that is not over, because nobody calls the target any more."""
        if gap := self.gap:
            self._finish(gap, now_s)

    def _finish(self, gap: Gap, now_s: float) -> None:
        self.stretch(now_s)
        gap.over = True
        self.gap_total_s += gap.length_s
        self._longest_over_s = max(self._longest_over_s, gap.length_s)

    def _add_failure(self, outcome: Outcome) -> Event | None:
        self.failed += 1
        _count(self.problems, outcome.problem)
        if gap := self.gap:
            gap.calls += 1
            return None
        self.gaps = [
            *self.gaps[-(KEPT_GAPS - 1) :],
            Gap(outcome.begun_s, 0.0, 1, outcome.problem),
        ]
        self.gap_count += 1
        return Event("gap-begun", outcome.begun_s, f"no answer: {outcome.problem}", calls=1)

    def _end_gap(self, now_s: float) -> Event | None:
        gap = self.gap
        if gap is None:
            return None
        self._finish(gap, now_s)
        failed = f"{gap.calls} calls" if gap.calls > 1 else "1 call"
        text = f"answers again after {gap.length_s:.2f} s ({failed} failed: {gap.problem})"
        return Event("gap-ended", now_s, text, gap.length_s, gap.calls)


def _count(numbers: Counter[str], name: str) -> None:
    numbers[name if name in numbers or len(numbers) < KEPT_NAMES else OTHERS] += 1
