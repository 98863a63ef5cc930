"""When a station that is asked for its addresses counts as silent."""

from fairlead.drivers.neighbors.questions import AGAIN, MISSES, SLOW, UNHEARD, Questions

ADDRESSES = ("192.0.2.224", "192.0.2.225")


def interval(
    made: Questions, *, answers: bool = False, sent: bool = True, received: int = 0
) -> str:
    """Let an interval pass. Return what happened in it: `missed`, `returned`, `asked ADDRESS`."""
    happened = ["missed"] if made.judge() else []
    if (address := made.due()) is not None and sent:
        made.asked(received)
        happened.append(f"asked {address}")
        if answers and made.answered():
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
    assert Questions(ADDRESSES, known=True).is_quick


def test_other_addresses_of_a_station_have_to_be_answered_first() -> None:
    made = known()
    made.replace(ADDRESSES[1:])
    assert made.known
    made.replace(("192.0.2.226",))
    assert not made.known


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
