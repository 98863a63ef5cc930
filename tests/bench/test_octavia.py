"""The benchmark of class octavia runs, small enough for a test. The measured times prove nothing
here, but the number of calls does."""

from pathlib import Path

import pytest
from bench.cost import Size
from bench.octavia import FAIRLEAD, HEADINGS, Bench, rows

pytestmark = pytest.mark.soak

SIZE = Size(services=2, ports=2, nodes=3)


async def test_the_number_of_calls_equals_the_number_of_changes(
    openstack_programs: None, tmp_path: Path
) -> None:
    report = await Bench(tmp_path, SIZE, rounds=1, slow_s=0.1).run()
    only = report.rounds[0][FAIRLEAD]
    assert only.created.writes == SIZE.services
    # The result has one write for each pool.
    assert only.node_removed_slowly is not None
    assert only.node_added.writes == only.node_removed_slowly.writes == SIZE.services * SIZE.ports
    assert (only.restarted.writes, only.restarted.reads > 0) == (0, True)
    assert {len(row) for row in rows(report)} == {len(HEADINGS)}
