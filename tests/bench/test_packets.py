"""The benchmark of packets runs, and each of its programs handles packets as the name of its case
tells. The measured times prove nothing here."""

import pytest
from bench.packets import Report, plots, rows, run
from bench.stand import Kind

pytestmark = [pytest.mark.root, pytest.mark.soak]


@pytest.mark.parametrize("kind", ["xdp", "tc"])
def test_every_case_forwards_as_its_name_tells(kind: Kind) -> None:
    """Before it measures, `run` verifies each case by the counters of nodes, and rejects a frame
    that leaves traces."""
    measured = run(kind, 2, 2000, (50, 20), flows=1 << 14)
    by_name = {each.name: each.nanoseconds for each in measured}
    assert len(by_name) == len(measured)
    assert all(len(each.nanoseconds) == 2 and min(each.nanoseconds) > 0 for each in measured)
    assert min(by_name["changed slot, new connections"]) > min(by_name["empty program"])
    above = {each.name: each.above for each in measured}
    assert above["established, IPIP, IPv4"] == tuple(
        a - b
        for a, b in zip(
            by_name["established, IPIP, IPv4"],
            by_name["the frame, removing outer headers"],
            strict=True,
        )
    )
    assert above["the frame alone"] == ()
    assert len(rows(measured)) == len(measured)
    assert plots(Report(measured, measured))["packets"].count("<rect") == 1 + 2 * len(measured)
