"""The results: medians over the rounds, and ratios to Fairlead's own figures. Pure.

In: the figures of each subject in each round. Out: a `Report`, and the tables that show it.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec
from bench.figures import Usage

COMPARATOR = "official client"


class First(msgspec.Struct, frozen=True):
    """From the start of the process to its first full plan. Sizes in MiB; `over_start` sizes
    exclude what the interpreter and its modules take before anything is read."""

    synced_s: float
    planned_s: float
    cpu_s: float
    """After the import of the modules."""
    resident_mib: float
    peak_mib: float
    resident_over_start_mib: float


class Paced(msgspec.Struct, frozen=True):
    """The delays from events, sent at a fixed pace, to the driver calls that they cause."""

    pace_per_s: float
    median_ms: float
    p99_ms: float
    max_ms: float
    cpu_share: float
    """Share of one core."""


class Burst(msgspec.Struct, frozen=True):
    """Events sent as fast as they are accepted, until the last driver call."""

    events_per_s: float
    cpu_ms_an_event: float


class Figures(msgspec.Struct, frozen=True):
    """The medians of one subject over the rounds."""

    first: First
    paced: Paced
    burst: Burst


class Report(msgspec.Struct, frozen=True):
    """The figures of all subjects, by name."""

    services: int
    endpoints: int
    nodes: int
    rounds: int
    subjects: Mapping[str, Figures]


def first_of(stages: Mapping[str, Usage], begun_s: float) -> First:
    started, synced, planned = stages["started"], stages["synced"], stages["planned"]
    return First(
        synced.at_s - begun_s,
        planned.at_s - begun_s,
        planned.cpu_s - started.cpu_s,
        planned.resident_kib / 1024,
        planned.peak_kib / 1024,
        (planned.resident_kib - started.resident_kib) / 1024,
    )


def paced_of(pace_per_s: float, delays: Sequence[float], cpu_s: float, lasted_s: float) -> Paced:
    """Return the figures of a pace. `delays` are in ms, sorted."""
    return Paced(
        pace_per_s, delays[len(delays) // 2], quantile(delays, 0.99), delays[-1], cpu_s / lasted_s
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values; `share` is between 0 and 1."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def spread(values: Sequence[float], form: str = ".0f") -> str:
    """Return the median over the rounds, with the lowest and the highest value in parentheses."""
    low, middle, high = (format(each, form) for each in (min(values), median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"


def medians(figures: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""

    def of(rows: Iterable[msgspec.Struct], kind: type[msgspec.Struct]) -> msgspec.Struct:
        columns = zip(*(msgspec.structs.astuple(row) for row in rows), strict=True)
        return kind(*(median(column) for column in columns))

    return Figures(
        of((each.first for each in figures), First),  # type: ignore[arg-type]
        of((each.paced for each in figures), Paced),  # type: ignore[arg-type]
        of((each.burst for each in figures), Burst),  # type: ignore[arg-type]
    )


HEADINGS = (
    "SUBJECT",
    "ALL READ",
    "PLANNED",
    "CPU",
    "RSS (OVER START)",
    "PEAK",
    "DELAY MEDIAN / P99",
    "CPU AT PACE",
    "EVENTS/S",
    "CPU PER EVENT",
)


def rows(report: Report) -> list[tuple[str, ...]]:
    """Return a row for each subject."""
    return [
        (
            name,
            f"{of.first.synced_s:.1f} s",
            f"{of.first.planned_s:.1f} s",
            f"{of.first.cpu_s:.2f} s",
            f"{of.first.resident_mib:.0f} ({of.first.resident_over_start_mib:.0f}) MiB",
            f"{of.first.peak_mib:.0f} MiB",
            f"{of.paced.median_ms:.0f} / {of.paced.p99_ms:.0f} ms",
            f"{of.paced.cpu_share:.0%}",
            f"{of.burst.events_per_s:.0f}",
            f"{of.burst.cpu_ms_an_event:.2f} ms",
        )
        for name, of in report.subjects.items()
    ]


def ratios(report: Report) -> list[str]:
    """Return the comparator's figures over those of each other subject, as lines of text."""
    base = report.subjects[COMPARATOR]
    return [
        f"{COMPARATOR} over {name}: CPU to the first plan "
        f"{base.first.cpu_s / of.first.cpu_s:.1f} x, RSS "
        f"{base.first.resident_mib / of.first.resident_mib:.1f} x ({_over_start(base, of)} over "
        "the start), "
        f"CPU per event {base.burst.cpu_ms_an_event / of.burst.cpu_ms_an_event:.1f} x, "
        f"events/s {of.burst.events_per_s / base.burst.events_per_s:.1f} x"
        for name, of in report.subjects.items()
        if name != COMPARATOR
    ]


def _over_start(base: Figures, of: Figures) -> str:
    """Return the ratio of memory over the start, or `-` where the subject's is 0, as with a tiny
    cluster."""
    held = of.first.resident_over_start_mib
    return f"{base.first.resident_over_start_mib / held:.1f} x" if held > 0 else "-"
