"""Each outage of a gateway shows at once in the benchmark's rows."""

import pytest
from bench.outages import CASES, measure

pytestmark = [pytest.mark.root, pytest.mark.soak]


async def test_an_outage_shows_in_the_status_readyz_and_metrics() -> None:
    report = await measure(quick=True)
    removed, down, killed, failed = report.outages
    assert [each.name for each in report.outages] == [each.name for each in CASES]
    assert any("another process removed" in row.shown[0] for row in removed.during)
    assert "503 interface eth0 is down" in [row.shown[1] for row in down.during]
    for each in (killed, failed):
        assert "no answer" in [row.shown[1] for row in each.during]
    assert all("200 ok" in [row.shown[1] for row in each.after] for each in report.outages[1:])
