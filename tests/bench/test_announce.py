"""The benchmark of failing announcers notices what callers notice. Its times prove nothing here."""

import pytest
from bench.announce import COLUMNS, FAILS, RESTARTED, Effect, measure, rows_of
from bench.announcers import DEFAULTS, METALLB, SHORT
from bench.announcers_lost import BESIDE, FLAP, LOST, Loss
from bench.metallb import find

from bench import announcers_lost


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


def loss(event: str, gap_ms: int, *, takeovers: int = 0, loops: int = 0) -> Loss:
    broken = {"node1": 300, "node2": gap_ms // 200}
    gaps_ms = {"IPv4": gap_ms} if event == LOST else {}
    return Loss(event, "a", 1, "node1", gaps_ms, broken, 1000, 9, 0, takeovers, True, loops)


def test_a_row_shows_the_gaps_of_the_owner_and_what_broke_elsewhere() -> None:
    found = [*(loss(LOST, gap) for gap in (200, 210, 400)), loss(BESIDE, 0, takeovers=1, loops=8)]
    assert announcers_lost.rows_of(found) == [
        (LOST, "a", "3", "210 (400), n = 3", "", "0 of 27", "1 (2) of 1,000", "3 of 3", ""),
        (f"{BESIDE}: 8", "a", "1", "", "", "0 of 9", "0 of 1,000", "1 of 1", "1"),
    ]


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


@pytest.mark.root
@pytest.mark.soak
async def test_the_owner_of_both_families_is_lost_and_its_link_flaps() -> None:
    report = await announcers_lost.measure(2, 0)
    for event in (LOST, FLAP):
        found = [each for each in report.losses if each.event == event]
        assert [{*each.gaps_ms} for each in found] == [{"IPv4", "IPv6"}] * 2
        assert all(each.one_owner for each in found)
    assert {each.system for each in report.losses} == {DEFAULTS}
    assert report.moves[-1].addresses == announcers_lost.ADDRESSES
