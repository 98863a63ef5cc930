"""The benchmark of a live gateway runs, on a cluster small enough for a test, and leaves nothing
behind. The measured times prove nothing here."""

import os
from pathlib import Path

import pytest
from bench.fixture import Size
from bench.live import (
    PACES_PER_S,
    START_HEADINGS,
    Bench,
    delay_rows,
    mismatched,
    plots,
    start_rows,
)

from fairlead.lab import namespace
from fairlead.net import bpffs

pytestmark = pytest.mark.soak

SIZE = Size(services=40, endpoints=3, nodes=10)


def test_an_event_that_the_plan_does_not_show_counts_as_lost() -> None:
    def planned(**states: str) -> dict[str, object]:
        members = [
            {"node": node, "weight": int(state != "draining"), "state": state}
            for node, state in states.items()
        ]
        return {"services": {"default/web": {"plan": {"listeners": [{"members": members}]}}}}

    expected = {"default/web": {"a", "b"}}
    assert mismatched(planned(a="active", b="active", c="draining"), expected) == []
    assert (
        mismatched(planned(a="active", b="down", c="draining"), expected) == []
        # Node b is only missing in the tables.
    )
    assert mismatched(planned(a="active", b="draining"), expected) == ["default/web"]
    assert mismatched(planned(a="active", b="active", c="active"), expected) == ["default/web"]
    assert mismatched({"services": {}}, expected) == ["default/web"]


@pytest.mark.root
async def test_every_event_shows_in_the_kernel(real_programs: None, tmp_path: Path) -> None:
    report = await Bench(tmp_path, SIZE, rounds=1, lasts_s=0.5, progress=lambda _: None).run()
    (only,) = report.rounds
    assert [each.events + each.hidden for each in only.delays] == [
        max(1, round(pace / 2)) for pace in PACES_PER_S
    ]
    for delays in only.delays:
        assert 0 < delays.median_ms <= delays.p99_ms <= delays.max_ms
    for started in (only.cold, only.again):
        assert 0 < started.listeners_s <= started.ready_s
        assert started.peak_mib >= started.resident_mib > 10
        assert started.kernel_mib > 1
    assert [len(row) for row in start_rows(report)] == [len(START_HEADINGS)] * 2
    assert len(delay_rows(report)) == 1 + len(PACES_PER_S)
    assert "live" in plots(report)
    assert namespace.names(f"flt-bench-{os.getpid()}") == ()
    assert not list(bpffs.ROOT.glob(f"flt-bench-{os.getpid()}*"))
