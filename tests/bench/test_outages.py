"""Each outage of a gateway shows at once in the benchmark's rows."""

import pytest
from bench.outages import CASES, measure

pytestmark = [pytest.mark.root, pytest.mark.soak]


async def test_an_outage_shows_in_the_status_readyz_and_metrics() -> None:
    report = await measure(quick=True)
    removed, down, killed, failed, crashed, stopped, flushed = report.outages
    assert [each.name for each in report.outages] == [each.name for each in CASES]
    assert any("another process removed" in row.shown[0] for row in removed.during)
    assert "503 interface eth0 is down" in [row.shown[1] for row in down.during]
    for each in (killed, failed):
        assert "no answer" in [row.shown[1] for row in each.during]
    assert any("proxy_unexpected_exits_total 1" in row.shown[4] for row in crashed.during)
    assert any(row.shown[1].startswith("503 HAProxy's worker") for row in stopped.during)
    for each in (down, killed, failed, stopped):
        assert "200 ok" in [row.shown[1] for row in each.after]
    assert {row.shown[1] for row in flushed.during if row.shown[1]} == {"200 ok"}
