"""The benchmark of a gateway with many Services of class proxy runs, each event has its effect, and
nothing is left behind. The measured values prove nothing here. test_lab.py tests the benchmark of
the lab."""

import os

import msgspec
import pytest
from bench.fixture import Size
from bench.lab import Figure
from bench.paths import THROUGH_HAPROXY
from bench.proxy import (
    EFFECTS,
    Report,
    effect_rows,
    effects_ms,
    figure_rows,
    headings,
    memory,
    plots,
    ratio_rows,
)

from bench import lab, many
from fairlead.lab import namespace
from fairlead.net import bpffs

pytestmark = [pytest.mark.root, pytest.mark.soak]


async def test_each_event_has_its_effect() -> None:
    found = await many.measure(Size(services=8, endpoints=2, nodes=4), 1)
    assert found.gateway_mib > found.haproxy_mib > found.haproxy_alone_mib / 2 > 0
    report = Report(lab_report(), 8, 4, (found,))
    assert all(
        len(effects_ms(report, name)) == 1 and min(effects_ms(report, name)) > 0 for name in EFFECTS
    )
    assert len(effect_rows(report)) == len(EFFECTS)
    assert memory(report).startswith("a start from nothing ")
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert namespace.names(f"flt-bench-{os.getpid()}") == ()
    assert not list(bpffs.ROOT.glob(f"flt-bench-{os.getpid()}*"))


def lab_report() -> lab.Report:
    """Return a report in which class proxy has half the throughput of all other paths, and takes
    twice the CPU time."""
    others, ours = Figure(1000.0, 10.0, 1.0, 3.0), Figure(500.0, 20.0, 2.0, 6.0)
    one = {
        path: dict.fromkeys(("requests", "upload"), ours if path == "proxy" else others)
        for path in THROUGH_HAPROXY
    }
    return lab.Report("198.51.100.10", {}, (one, one))


def test_tables_show_ratios() -> None:
    report = Report(lab_report(), 0, 0, ())
    rows = ratio_rows(report)
    assert rows[:4] == [
        (
            "class proxy over HAProxy by hand on the gateway, a second",
            "0.50 (0.50-0.50)",
            "0.50 (0.50-0.50)",
        ),
        ("class proxy over HAProxy by hand on the gateway, p50", "2.00 (2.00-2.00)", "-"),
        ("class proxy over HAProxy by hand on the gateway, p99", "2.00 (2.00-2.00)", "-"),
        (
            "class proxy over HAProxy by hand on the gateway, CPU",
            "2.00 (2.00-2.00)",
            "2.00 (2.00-2.00)",
        ),
    ]
    assert figure_rows(report)[1] == ("class proxy", "0.5 k/s, 2.0 / 6.0 ms", "0.0 Gbit/s")
    assert {len(row) for row in (*rows, *figure_rows(report))} == {len(headings(report, "PATH"))}
    assert plots(report)["proxy"].count("<rect") == 1 + 6
