"""The benchmark of the lab runs, every path leads to the server, and nothing is left behind. Its
results on this machine prove nothing."""

import os

import pytest
from bench.lab import DIRECT, Report, cpu_rows, headings, measure, plots, rate_rows, summary

from fairlead.lab import namespace

pytestmark = [pytest.mark.root, pytest.mark.soak]


async def test_every_path_is_measured_and_keeps_the_client_address_or_not() -> None:
    report = await measure(
        1,
        1,
        ("direct", "routed", "tc", "cluster", "haproxy", "proxy", "by hand"),
        {"light": "-t1 -c4"},
    )
    assert {report.seen[path] for path in (DIRECT, "routed", "tc", "haproxy")} == {report.client}
    assert (
        len({report.seen[path] for path in ("cluster", "proxy", "by hand")} - {report.client}) == 3
    )
    (figures,) = report.rounds
    assert all(
        figure.per_s > 0 and figure.cpu_us > 0
        for path in figures.values()
        for figure in path.values()
    )
    assert {len(row) for row in (*rate_rows(report), *cpu_rows(report))} == {len(headings(report))}
    assert [line.partition(":")[0] for line in summary(report).splitlines()] == [
        f"tc over {base}, {what}" for base in ("haproxy", "routed") for what in ("a second", "CPU")
    ]
    assert set(plots(report)) == {"rates", "cpu"}
    assert all(
        0 < each.p50_ms <= each.p99_ms
        for path in figures.values()
        for kind, each in path.items()
        if "load" not in kind
    )
    assert report.ratios(DIRECT, "upload") == [1.0]
    assert isinstance(report, Report)
    assert namespace.names(f"fl-bench{os.getpid()}-") == ()
