"""When Octavia is asked whether it is done. Pure."""

from fairlead.drivers.octavia.apply import EARLY, SEEN, Looks, Pace

PACE = Pace(first_s=0.5, last_s=5.0, growth=1.5)


def test_looks_become_rarer_and_first_come_when_it_may_be_done() -> None:
    looks = Looks(PACE)
    assert looks.first_s("PUT") == PACE.first_s
    assert [looks.next_s(elapsed_s) for elapsed_s in (0.1, 2.0, 60.0)] == [
        PACE.first_s,
        1.0,
        PACE.last_s,
    ]
    looks.learn("PUT", 4.0)
    looks.learn("PUT", 3.0)
    assert looks.first_s("PUT") == EARLY * 3.0
    assert looks.first_s("POST") == PACE.first_s, "another kind of write"


def test_one_that_took_long_makes_nobody_wait_for_long() -> None:
    looks = Looks(PACE)
    for took_s in (60.0, 90.0):
        looks.learn("POST", took_s)
    assert looks.first_s("POST") == PACE.last_s
    looks.learn("POST", 0.1)
    assert looks.first_s("POST") == PACE.first_s
    for _ in range(SEEN):
        looks.learn("POST", 2.0)
    assert looks.first_s("POST") == EARLY * 2.0, "what was long ago counts no more"
