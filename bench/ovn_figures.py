"""The values of `bench.ovn`, and the tables that show them. Pure.

In: the figures of each round. Out: a `Report`, and rows of text. Delays of all rounds are taken
together; CPU times and memory are medians over the rounds."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec
from bench.announced import Share
from bench.result import quantile, spread

FAIRLEAD, PLAIN = "fairlead", "ovn-nbctl"
WRITER = "writer"
"""What makes the change: the controller, or the process of ovn-nbctl."""
PROGRAMS = ("ovn-northd", "ovn-controller", "ovs-vswitchd", "ovsdb-server", WRITER)
Usage = Mapping[str, float]
"""A figure of each of PROGRAMS, the sum over its processes."""


class Start(msgspec.Struct, frozen=True):
    """A start of the controller with an empty northbound database, until the load balancers of all
    Services are in it, and until every chassis has installed them. `cpu_s`: until then, of the
    controller with the import of its modules. `resident_mib`: at this moment."""

    in_database_s: float
    installed_s: float
    cpu_s: Usage
    resident_mib: Usage


class Changes(msgspec.Struct, frozen=True):
    """The delay of each change until every chassis has it and until the first connection reaches
    the new pod, and the CPU time that each further change took. `in_database_ms`: until the
    northbound database has it; empty for ovn-nbctl."""

    in_database_ms: list[float]
    flows_ms: list[float]
    connection_ms: list[float]
    cpu_s: list[Usage]


class Measured(msgspec.Struct, frozen=True):
    """One round with one number of load balancers. `load`: of the machine, averaged over the last
    minute. `shares`: by the number of pods and the way."""

    rows: int
    load: float
    start: Start
    changes: Mapping[str, Changes]
    shares: Mapping[int, Mapping[str, Share]]


class Report(msgspec.Struct, frozen=True):
    """All figures. `version`: that of OVN."""

    version: str
    rounds: tuple[tuple[Measured, ...], ...]

    @property
    def sizes(self) -> Sequence[Sequence[Measured]]:
        """The rounds of each number of load balancers."""
        return list(zip(*self.rounds, strict=True))


START_HEADINGS = ("ROWS", "IN DATABASE", "INSTALLED", *(f"CPU {each}" for each in PROGRAMS))
MEMORY_HEADINGS = ("ROWS", *(f"RSS {each}" for each in PROGRAMS))
DELAY_HEADINGS = ("ROWS", "CHANGED BY", "IN DATABASE", "ON EVERY CHASSIS", "FIRST CONNECTION")
CPU_HEADINGS = ("ROWS", "CHANGED BY", *(f"CPU {each}" for each in PROGRAMS))
SHARE_HEADINGS = ("ROWS", "PODS", "CHANGED BY", "ANSWERED", "FAILED", "BUSIEST", "IDLEST")


def start_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            str(found[0].rows),
            f"{spread([each.start.in_database_s for each in found], '.1f')} s",
            f"{spread([each.start.installed_s for each in found], '.1f')} s",
            *(f"{median(each.start.cpu_s[name] for each in found):.1f} s" for name in PROGRAMS),
        )
        for found in report.sizes
    ]


def memory_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            str(found[0].rows),
            *(
                f"{median(each.start.resident_mib[name] for each in found):.0f} MiB"
                for name in PROGRAMS
            ),
        )
        for found in report.sizes
    ]


def delay_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            str(found[0].rows),
            way,
            *(
                _delay(value for each in found for value in getattr(each.changes[way], name))
                for name in ("in_database_ms", "flows_ms", "connection_ms")
            ),
        )
        for found in report.sizes
        for way in found[0].changes
    ]


def cpu_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            str(found[0].rows),
            way,
            *(
                f"{1000 * median(_usual(each.changes[way].cpu_s, name) for each in found):.1f} ms"
                for name in PROGRAMS
            ),
        )
        for found in report.sizes
        for way in found[0].changes
    ]


def share_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            str(each.rows),
            str(pods),
            way,
            str(share.answered),
            str(share.failed),
            f"{share.busiest_over_fair:.3f}",
            f"{share.idlest_over_fair:.3f}",
        )
        for found in report.sizes
        for each in found
        for pods, ways in each.shares.items()
        for way, share in ways.items()
    ]


def ratios(report: Report) -> list[str]:
    """Return the figures of ovn-nbctl over the ones of Fairlead, as lines of text."""
    lines = []
    for found in report.sizes:
        ours, theirs = ([each.changes[way] for each in found] for way in (FAIRLEAD, PLAIN))
        delays = (
            f"{what} {_median_of(theirs, name) / _median_of(ours, name):.2f} x"
            for what, name in (
                ("on every chassis", "flows_ms"),
                ("first connection", "connection_ms"),
            )
        )
        cpu = _total(theirs) / _total(ours)
        lines.append(
            f"{found[0].rows} rows, {PLAIN} over {FAIRLEAD}: {', '.join(delays)}, "
            f"CPU of all processes {cpu:.2f} x"
        )
    return lines


def _delay(values: Iterable[float]) -> str:
    """Format the median, the 99th percentile and the maximum."""
    ordered = sorted(values)
    if not ordered:
        return "-"
    return f"{median(ordered):.0f} / {quantile(ordered, 0.99):.0f} / {ordered[-1]:.0f} ms"


def _usual(used: Sequence[Usage], name: str) -> float:
    """Return the median over the changes: an audit, which reads all rows, may fall into one."""
    return median(each[name] for each in used)


def _median_of(changes: Sequence[Changes], name: str) -> float:
    values: list[float] = [value for each in changes for value in getattr(each, name)]
    return median(values)


def _total(changes: Sequence[Changes]) -> float:
    return sum(_usual(each.cpu_s, name) for each in changes for name in PROGRAMS)
