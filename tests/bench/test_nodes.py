"""The benchmark of service proxies runs, on a cluster small enough for a test, and leaves nothing
behind. The measured times prove nothing here."""

import os
from pathlib import Path

import pytest
from bench.fixture import Size
from bench.nodes import OURS, ROWS, THEIRS, Bench, rows

from fairlead.lab import namespace

pytestmark = pytest.mark.soak

SIZE = Size(services=40, endpoints=3, nodes=10)


@pytest.mark.root
async def test_both_service_proxies_follow_every_event(
    real_programs: None, kube_proxy: Path, tmp_path: Path
) -> None:
    report = await Bench(
        tmp_path, SIZE, rounds=1, events=2, changes=30, turns=1, progress=lambda _: None
    ).run()
    (only,) = report.rounds
    assert only.keys() == {OURS, THEIRS}
    for figures in only.values():
        for delays, events in ((figures.packets, 2), (figures.rules, 30), (figures.loaded, 30)):
            assert 0 < delays.median_ms <= delays.p99_ms <= delays.max_ms
            assert delays.events == events
        assert figures.started.answered_s > 0
        assert figures.started.resident_mib > 10
        assert min(min(each.per_s, each.first_us) for each in figures.calls.values()) > 0
    assert [len(row) for row in rows(report)] == [4] * (len(ROWS) + 2 * 4)
    assert not namespace.names(f"flt-bench-{os.getpid()}")
