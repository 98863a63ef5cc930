"""The benchmark of class ovn runs, small enough for a test. The measured times prove nothing here,
but the numbers of figures and of connections do."""

import pytest
from bench.ovn import Bench, Sizes
from bench.ovn_figures import (
    CPU_HEADINGS,
    DELAY_HEADINGS,
    FAIRLEAD,
    MEMORY_HEADINGS,
    PLAIN,
    PROGRAMS,
    SHARE_HEADINGS,
    START_HEADINGS,
    cpu_rows,
    delay_rows,
    memory_rows,
    ratios,
    share_rows,
    start_rows,
)

pytestmark = pytest.mark.root

CHANGES, CONNECTIONS = 2, 200


async def test_both_ways_of_a_change_are_measured_with_other_rows_present(
    ovn_programs: None,
) -> None:
    sizes = Sizes((5,), CHANGES, CONNECTIONS)
    report = await Bench(sizes, rounds=1, progress=lambda _: None).run()
    ((found,),) = report.rounds
    assert found.start.installed_s >= found.start.in_database_s > 0
    assert set(found.start.cpu_s) == set(found.start.resident_mib) == set(PROGRAMS)
    assert set(found.changes) == {FAIRLEAD, PLAIN}
    for way, changes in found.changes.items():
        assert len(changes.flows_ms) == len(changes.connection_ms) == len(changes.cpu_s) == CHANGES
        assert len(changes.in_database_ms) == (CHANGES if way == FAIRLEAD else 0)
        assert all(each > 0 for each in (*changes.flows_ms, *changes.connection_ms))
    assert set(found.shares) == {4, 3}
    for pods, ways in found.shares.items():
        for share in ways.values():
            assert (share.answered + share.failed, share.pods) == (CONNECTIONS, pods)
            assert len(share.by_pod) == pods
    for headings, rows in (
        (START_HEADINGS, start_rows(report)),
        (MEMORY_HEADINGS, memory_rows(report)),
        (DELAY_HEADINGS, delay_rows(report)),
        (CPU_HEADINGS, cpu_rows(report)),
        (SHARE_HEADINGS, share_rows(report)),
    ):
        assert {len(row) for row in rows} == {len(headings)}
    assert len(ratios(report)) == 1
