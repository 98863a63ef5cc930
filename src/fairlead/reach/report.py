"""The results of a Monitor as values and as text.

In: records. Out: `TargetReport`s for programs, rows and sentences for people. Pure."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from fairlead.reach.record import Event, Record
from fairlead.reach.targets import Target

HEADER = (
    "TARGET",
    "ANSWERED",
    "P50",
    "P99",
    "WORST",
    "GAPS",
    "LONGEST",
    "CLIENT",
    "PODS",
    "HELD",
    "BROKEN",
)
SHOWN_PODS = 4


class GapReport(msgspec.Struct, frozen=True):
    begun: str
    length_s: float
    failed_calls: int
    problem: str
    over: bool


class TargetReport(msgspec.Struct, frozen=True):
    """What the calls of one target have shown. Times are in seconds, points in time in RFC 3339."""

    target: str
    scheme: str
    answered: int
    failed: int
    unknown: int
    """Calls that failed while the probe itself did not run."""
    latency_s: Mapping[str, float]
    gap_count: int
    gap_total_s: float
    longest_gap_s: float
    gaps: Sequence[GapReport]
    """The latest gaps, oldest first."""
    problems: Mapping[str, int]
    pods: Mapping[str, int]
    clients: Mapping[str, int]
    """The addresses of the caller, as the servers saw them."""
    own_addresses: Mapping[str, int]
    """The addresses that called, as this host knows them."""
    held: int
    held_in_all: int
    broken: Mapping[str, int]
    closed_by_server: int


class EventReport(msgspec.Struct, frozen=True):
    time: str
    target: str
    event: str
    message: str
    length_s: float
    failed_calls: int


def event_report(target: Target, event: Event, at: Callable[[float], float]) -> EventReport:
    """`at` returns the Unix time of a time of the monotonic clock."""
    return EventReport(
        timestamp(at(event.at_s)),
        target.name,
        event.kind,
        event.text,
        round(event.length_s, 3),
        event.calls,
    )


def report(target: Target, record: Record, at: Callable[[float], float]) -> TargetReport:
    latencies = record.latencies
    open_s = record.gap.length_s if record.gap else 0.0
    return TargetReport(
        target.name,
        target.scheme,
        record.answered,
        record.failed,
        record.unknown,
        {
            "p50": round(latencies.quantile(0.5), 6),
            "p90": round(latencies.quantile(0.9), 6),
            "p99": round(latencies.quantile(0.99), 6),
            "worst": round(latencies.worst_s, 6),
        },
        record.gap_count,
        round(record.gap_total_s + open_s, 3),
        round(record.longest_gap_s, 3),
        [
            GapReport(
                timestamp(at(gap.begun_s)), round(gap.length_s, 3), gap.calls, gap.problem, gap.over
            )
            for gap in record.gaps
        ],
        dict(record.problems.most_common()),
        dict(record.pods.most_common()),
        dict(record.clients.most_common()),
        dict(record.own.most_common()),
        record.held,
        record.held_in_all,
        dict(record.broken.most_common()),
        record.closed,
    )


def row(target: Target, record: Record) -> tuple[str, ...]:
    """Return the cells of one target, see HEADER."""
    counted = record.answered + record.failed
    share = f"{_percent(record.answered, counted)} of {counted}" if counted else "-"
    latencies = record.latencies
    times = (latencies.quantile(0.5), latencies.quantile(0.99), latencies.worst_s)
    gap = record.gap
    return (
        target.name,
        f"{share}, silent now" if gap else share,
        *(_milliseconds(each) if latencies.count else "-" for each in times),
        str(record.gap_count),
        f"{record.longest_gap_s:.2f} s" if record.gap_count else "-",
        _client(record),
        _pods(record),
        str(record.held_in_all),
        str(record.broken_count),
    )


def is_fault(record: Record) -> bool:
    """Return whether something failed."""
    return bool(record.failed or record.broken)


def timestamp(unix_s: float) -> str:
    return (
        datetime.fromtimestamp(unix_s, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _client(record: Record) -> str:
    if not record.clients:
        return "not shown"
    if not record.client_hidden:
        return "kept"
    seen = [each for each, _ in record.clients.most_common()]
    # A host with several addresses may be seen under another one of its own.
    other = next((each for each in seen if each not in record.own), seen[0])
    if not record.client_kept:
        return f"seen as {other}"
    return f"{_percent(record.client_hidden, record.clients.total())} seen as {other}"


def _pods(record: Record) -> str:
    """Return the share of each pod, the largest first."""
    if not record.pods:
        return "not shown"
    total = record.pods.total()
    shares = [
        f"{pod} {_percent(count, total)}" for pod, count in record.pods.most_common(SHOWN_PODS)
    ]
    if more := len(record.pods) - SHOWN_PODS:
        shares += [f"{more} more"] if more > 0 else []
    return ", ".join(shares)


def _percent(part: int, whole: int) -> str:
    """Return the share without rounding a loss away: 99.99 %, never 100 %, while one is missing."""
    share = 100 * part / whole
    if part == whole or share < 99:
        return f"{share:.0f} %"
    return f"{int(share * 100) / 100:.2f} %"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
