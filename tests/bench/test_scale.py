"""The benchmark of large clusters runs, on a cluster small enough for a test, and its results are
plausible. The measured times prove nothing here."""

import math
from pathlib import Path

import msgspec
import pytest
from bench.cluster import lab_of
from bench.fixture import Size
from bench.result import COMPARATOR, HEADINGS, Report, ratios, rows
from bench.scale import Bench

from fairlead.lab import process

pytestmark = pytest.mark.soak

SIZE = Size(services=40, endpoints=3, nodes=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "bench"


async def test_every_subject_plans_all_services_and_follows_every_event(
    real_programs: None, official_client: Path, folder: Path
) -> None:
    messages: list[str] = []
    report = await Bench(
        folder, official_client, SIZE, rounds=1, pace_per_s=200.0, progress=messages.append
    ).run()
    assert set(report.subjects) == {"controller", "gateway", "node", COMPARATOR}
    for figures in report.subjects.values():
        numbers = [
            each
            for part in msgspec.structs.astuple(figures)
            for each in msgspec.structs.astuple(part)
        ]
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert figures.first.peak_mib >= figures.first.resident_mib > 10
        assert figures.first.planned_s >= figures.first.synced_s > 0
        assert 0 < figures.paced.median_ms <= figures.paced.p99_ms <= figures.paced.max_ms
        assert figures.burst.events_per_s > 0
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert [len(row) for row in rows(report)] == [len(HEADINGS)] * 4
    assert len(ratios(report)) == 3
    assert process.find(lab_of(folder)) == ()
    assert sum("served 40 new Services" in what for what in messages) == 1
