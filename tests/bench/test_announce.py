"""The benchmark of failing announcers notices what callers notice. Its times prove nothing here."""

import pytest
from bench.announce import (
    COLUMNS,
    FAILS,
    METALLB,
    RESTARTED,
    SHORT,
    Busy,
    Effect,
    Kill,
    Report,
    kill_rows_of,
    measure,
    rows_of,
)
from bench.metallb import find


def effect(system: str, gap_ms: int, *, event: str = FAILS, moved: bool = True) -> Effect:
    broken = {"node1": 2, "node2": 1}
    by = "node2" if moved else "node1"
    return Effect(event, system, 0, "node1", 9.0, 1000, 5, gap_ms, broken, {}, 0, by)


def test_a_row_shows_the_median_and_the_worst_of_all_rounds() -> None:
    found = [effect("a", gap) for gap in (100, 200, 9000)]
    found += [effect("b", 50, event=RESTARTED, moved=False)]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in rows_of(found)]
    assert rows == [
        {
            "EVENT": FAILS,
            "SYSTEM": "a",
            "ROUNDS": "3",
            "FAILED": "5 (5) of 1,000",
            "LONGEST GAP MS": "200 (9,000)",
            "BROKEN ON THE HOST": "2 (2)",
            "BROKEN ELSEWHERE": "1 (1)",
            "MOVED": "3 of 3",
        },
        {
            "EVENT": RESTARTED,
            "SYSTEM": "b",
            "ROUNDS": "1",
            "FAILED": "5 of 1,000",
            "LONGEST GAP MS": "50",
            "BROKEN ON THE HOST": "2",
            "BROKEN ELSEWHERE": "1",
            "MOVED": "0 of 1",
        },
    ]


def test_a_row_shows_the_longest_gap_of_each_failure() -> None:
    kills = tuple(Kill("a", gaps, 10) for gaps in ((200,), (40, 210), (), (300,), (20,)))
    report = Report(kills=kills, busy=(Busy("a", 8, 60.0, 0),))
    assert kill_rows_of(report) == [("a", "5", "200 (300)", "10 (10)", "8 for 60 s", "0")]


@pytest.mark.root
@pytest.mark.soak
async def test_callers_of_both_systems_notice_a_machine_that_fails_and_not_a_restart() -> None:
    """`sh tools/build.sh metallb` builds the other one."""
    find()
    report = await measure(1, systems=(SHORT, METALLB))
    effects = {(each.system, each.event): each for each in report.effects}
    for system in (SHORT, METALLB):
        assert effects[system, FAILS].failed
        assert effects[system, FAILS].announced_by not in ("", effects[system, FAILS].host)
    assert effects[SHORT, RESTARTED].announced_by == effects[SHORT, RESTARTED].host
