"""When a station that is asked for its addresses counts as silent."""

from collections import Counter
from collections.abc import Collection

from fairlead.drivers.neighbors.questions import AGAIN, MISSES, SLOW, UNHEARD, Questions
from fairlead.net.address import family_of

ADDRESSES = ("192.0.2.224", "192.0.2.225")
IPV6 = tuple(f"2001:db8:1::e{number}" for number in range(4))
MIXED = (ADDRESSES[0], *IPV6[:3])


def interval(
    made: Questions,
    *,
    answers: bool | Collection[str] = False,
    sent: bool = True,
    received: int = 0,
) -> str:
    """Let an interval pass. `answers`: whether the station answers, or the families of which it
    does. Return what happened in it: `missed`, `returned`, `asked ADDRESS`."""
    happened = ["missed"] if made.judge() else []
    for address in made.due() if sent else ():
        made.asked(address, received)
        happened.append(f"asked {address}")
        answered = answers if isinstance(answers, bool) else family_of(address) in answers
        if answered and made.answered(address):
            happened.append("returned")
    return ", ".join(happened)


def known() -> Questions:
    made = Questions(ADDRESSES)
    while not made.known:
        interval(made, answers=True)
    return made


def test_a_station_that_answers_is_asked_for_each_address_in_turn() -> None:
    made = known()
    found = [interval(made, answers=True) for _ in range(4)]
    assert sorted(found) == sorted([f"asked {each}" for each in ADDRESSES] * 2)


def test_four_misses_in_a_row_are_a_loss() -> None:
    made = known()
    interval(made)
    for _ in range(MISSES - 1):
        assert interval(made).startswith("missed, asked")
        assert not made.silent
    assert interval(made) == "missed", "it is asked more slowly"
    assert made.silent
    made = known()
    for _ in range(3):
        for answers in (False,) * (MISSES - 1) + (True,):
            interval(made, answers=answers)
    assert not made.silent, "an answer begins the count again"


def test_a_question_that_was_not_sent_is_no_miss() -> None:
    made = known()
    for _ in range(3 * MISSES):
        assert interval(made, sent=False) == ""
    assert not made.silent


def test_a_station_that_never_answered_is_asked_slowly_and_cannot_be_lost() -> None:
    made = Questions(ADDRESSES)
    found = [interval(made) for _ in range(4 * SLOW)]
    assert sum(bool(each) for each in found) == 4
    assert not any("missed" in each for each in found)
    assert not made.silent
    made.replace(ADDRESSES[:1])
    assert Questions(ADDRESSES, known=["IPv4"]).is_quick


def test_other_addresses_of_a_station_have_to_be_answered_first() -> None:
    made = known()
    made.replace(ADDRESSES[1:])
    assert made.known
    made.replace(("192.0.2.226",))
    assert not made.known


def test_questions_of_a_family_that_the_network_drops_do_not_count() -> None:
    """Switches can inspect neighbor discovery, and pass ARP."""
    made = Questions(MIXED)
    while not made.known:
        interval(made, answers=["IPv4"])
    for misses in range(MISSES):
        for answers in ((),) * misses + (["IPv4"],) * len(MIXED) * SLOW:
            assert MIXED[0] in interval(made, answers=answers), "it is asked at each interval"
        assert not made.silent
    assert made.known == {"IPv4"}
    asked = Counter(interval(made, answers=["IPv4"]) for _ in range(len(IPV6) * SLOW))
    assert sum(number for each, number in asked.items() if IPV6[0][:-1] in each) == len(IPV6)
    made.replace(IPV6)
    for _ in range(SLOW * MISSES * 2):
        assert "missed" not in interval(made), "no such question was ever answered"
    assert not made.silent
    interval(made, answers=True)
    made.replace(MIXED)
    while made.known != {"IPv4", "IPv6"}:
        interval(made, answers=True)
    while not made.silent:
        assert interval(made)


def test_a_family_that_the_network_begins_to_drop_stops_counting() -> None:
    made = Questions(MIXED)
    while made.known != {"IPv4", "IPv6"}:
        interval(made, answers=True)
    for _ in range(2 * len(MIXED)):
        interval(made, answers=["IPv4"])
    assert made.known == {"IPv4"}
    assert not made.silent


def lost() -> Questions:
    made = known()
    while not made.silent:
        interval(made)
    return made


def test_a_return_is_reported_at_once_and_each_second_while_it_counts_as_lost() -> None:
    made = lost()
    found = [interval(made, answers=True) for _ in range(2 * AGAIN + SLOW)]
    assert sum("returned" in each for each in found) == 3
    made.trust()
    assert made.is_quick
    assert "returned" not in interval(made, answers=True)


def test_whether_anything_arrived_while_a_station_was_silent() -> None:
    for received, unheard in (
        ([7], False),
        ([7] * UNHEARD, False),
        ([7] * (UNHEARD + 1), True),
        ([7] * UNHEARD + [8], True),
        ([7, 8, 8], False),
        ([7, 7, 8, 9], False),
        ([7, 8, 8, 8, 8], False),
    ):
        made = lost()
        for number in received:
            while not interval(made, received=number):
                pass
        assert made.unheard == unheard, received
