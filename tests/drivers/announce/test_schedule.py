"""When addresses are announced."""

import pytest

from fairlead.drivers.announce.schedule import PER_S, Schedule

VIP = "192.0.2.224"


def times(schedule: Schedule, until_s: float) -> list[tuple[float, str]]:
    """Return what is announced until then, and when."""
    found = []
    while (next_s := schedule.next_s()) is not None and next_s <= until_s:
        found += [(round(next_s, 6), each) for each in schedule.due(next_s)]
    return found


def test_an_address_is_announced_several_times_and_then_each_minute() -> None:
    schedule = Schedule()
    assert schedule.next_s() is None
    schedule.start(VIP, 100.0)
    assert [at for at, _ in times(schedule, 230.0)] == pytest.approx(
        [100, 100.05, 100.2, 101.1, 102.2, 105, 165, 225]
    )


def test_an_address_that_is_announced_again_begins_from_the_start() -> None:
    schedule = Schedule()
    schedule.start(VIP, 0.0)
    times(schedule, 30.0)
    schedule.start(VIP, 30.0)
    assert [at for at, _ in times(schedule, 31.0)] == pytest.approx([30, 30.05, 30.2])


def test_a_withdrawn_address_is_not_announced_any_more() -> None:
    schedule = Schedule()
    schedule.start(VIP, 0.0)
    schedule.start("192.0.2.225", 0.0)
    schedule.stop(VIP)
    assert {each for _, each in times(schedule, 200.0)} == {"192.0.2.225"}
    schedule.stop("192.0.2.225")
    assert schedule.next_s() is None


def test_the_first_announcements_are_not_delayed_and_repetitions_are_paced() -> None:
    schedule = Schedule()
    addresses = [f"192.0.{each >> 8}.{each & 255}" for each in range(2 * PER_S)]
    for each in addresses:
        schedule.start(each, 0.0)
    assert list(schedule.due(0.0)) == addresses
    assert len(times(schedule, 0.05)) <= 2
    repeated = times(schedule, 0.55)
    assert 0.45 * PER_S < len(repeated) < 0.55 * PER_S


def test_repetitions_can_be_left_out() -> None:
    schedule = Schedule()
    schedule.start(VIP, 0.0)
    sent = []
    while (next_s := schedule.next_s()) is not None and next_s < 200.0:
        sent += [round(next_s) for _ in schedule.due(next_s, repeat=next_s > 100.0)]
    assert sent == [0, 0, 0, 1, 2, 5, 125, 185], "the first announcements are always sent"
