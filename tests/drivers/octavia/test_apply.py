"""The times at which Octavia is polled. Pure."""

from fairlead.drivers.octavia.apply import FIRST_POLL_FRACTION, WAITS_KEPT, Pace, PollSchedule

PACE = Pace(first_s=0.5, last_s=5.0, growth=1.5)


def test_the_first_poll_depends_on_earlier_waits_and_later_polls_become_less_frequent() -> None:
    schedule = PollSchedule(PACE)
    assert schedule.first_s("PUT") == PACE.first_s
    assert [schedule.next_s(elapsed_s) for elapsed_s in (0.1, 2.0, 60.0)] == [
        PACE.first_s,
        1.0,
        PACE.last_s,
    ]
    schedule.record("PUT", 4.0)
    schedule.record("PUT", 3.0)
    assert schedule.first_s("PUT") == FIRST_POLL_FRACTION * 3.0
    assert schedule.first_s("POST") == PACE.first_s, "waits are learned for each method"


def test_one_long_wait_does_not_delay_the_first_poll_of_later_writes() -> None:
    schedule = PollSchedule(PACE)
    for took_s in (60.0, 90.0):
        schedule.record("POST", took_s)
    assert schedule.first_s("POST") == PACE.last_s
    schedule.record("POST", 0.1)
    assert schedule.first_s("POST") == PACE.first_s
    for _ in range(WAITS_KEPT):
        schedule.record("POST", 2.0)
    assert schedule.first_s("POST") == FIRST_POLL_FRACTION * 2.0, "only recent waits count"
