"""Outcomes become numbers and gaps."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fairlead.reach.record import KEPT_GAPS, KEPT_NAMES, OTHERS, Latencies, Outcome, Record
from fairlead.reach.report import HEADER, report, row, timestamp
from fairlead.reach.targets import parse

TARGET = parse("192.0.2.1:80")


def recorded(letters: str, interval_s: float = 0.1) -> Record:
    """Return a record of calls: `.` was answered, `x` failed, `?` is unknown."""
    record = Record()
    for number, letter in enumerate(letters):
        begun_s = number * interval_s
        match letter:
            case ".":
                record.add(Outcome(begun_s, 0.001))
            case "x":
                record.add(Outcome(begun_s, 1.0, "no connection within 1 s"))
            case "?":
                record.add(Outcome(begun_s, 1.0, "no connection within 1 s", unknown=True))
    return record


def test_a_gap_lasts_from_the_first_failed_call_to_the_next_answered_one() -> None:
    record = recorded("...xxx..")
    (gap,) = record.gaps
    assert (round(gap.begun_s, 3), round(gap.length_s, 3), gap.calls) == (0.3, 0.3, 3)
    assert gap.over
    assert round(record.gap_total_s, 3) == round(record.longest_gap_s, 3) == 0.3
    assert (record.answered, record.failed, record.calls) == (5, 3, 8)


def test_an_unknown_call_neither_begins_nor_ends_a_gap() -> None:
    assert recorded("..??..").gap_count == 0
    record = recorded("..x??x.")
    assert (record.gap_count, record.gaps[0].calls, record.unknown) == (1, 2, 2)
    assert round(record.gaps[0].length_s, 3) == 0.4


def test_a_gap_that_is_not_over_reaches_to_the_present() -> None:
    record = recorded(".xx")
    record.stretch(5.0)
    assert record.gap is not None
    assert round(record.gap.length_s, 3) == round(record.longest_gap_s, 3) == 4.9
    assert report(TARGET, record, lambda at_s: at_s).gaps[0].over is False
    assert "silent now" in row(TARGET, record)[1]


def test_a_gap_ends_when_its_target_is_not_called_any_more() -> None:
    record = recorded(".xx")
    record.leave(1.0)
    assert record.gap is None
    assert round(record.gap_total_s, 3) == round(record.longest_gap_s, 3) == 0.9
    assert record.add(Outcome(50.0, 0.001)) is None, "the time without calls is no gap"
    assert round(record.longest_gap_s, 3) == 0.9


def test_events_tell_the_beginning_and_the_end_of_a_gap_once() -> None:
    record = Record()
    told = []
    for number, problem in enumerate(["", "refused", "refused", "", ""]):
        event = record.add(Outcome(number, 0.1, problem))
        told.append(event and (event.kind, event.at_s, event.length_s, event.calls))
    assert told == [None, ("gap-begun", 1, 0.0, 1), None, ("gap-ended", 3, 2, 2), None]


@given(st.text("..x?", max_size=300))
def test_sums_and_gaps_agree(letters: str) -> None:
    record = recorded(letters, 1.0)
    known = letters.replace("?", "")
    assert record.answered == letters.count(".")
    assert record.failed == letters.count("x") == sum(gap.calls for gap in record.gaps)
    assert record.gap_count == len([each for each in known.split(".") if each])
    assert (record.gap is not None) == known.endswith("x")
    over = [gap.length_s for gap in record.gaps if gap.over]
    assert math.isclose(record.gap_total_s, sum(over))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_at_most_five_percent_above_the_true_one(
    latencies: list[float], fraction: float
) -> None:
    histogram = Latencies()
    for each in latencies:
        histogram.add(each)
    true = sorted(latencies)[math.ceil(fraction * len(latencies)) - 1]
    found = histogram.quantile(fraction)
    assert true <= found * (1 + 1e-9) or math.isclose(true, found)
    assert found <= max(true * 1.051, 51e-6)
    assert histogram.quantile(1.0) == max(latencies)


def test_what_is_kept_is_bounded() -> None:
    record = recorded("x." * (2 * KEPT_GAPS))
    assert (len(record.gaps), record.gap_count) == (KEPT_GAPS, 2 * KEPT_GAPS)
    for number in range(KEPT_NAMES + 50):
        record.add(Outcome(number, 0.1, own="a", client=f"c{number}", pod=f"p{number}"))
    assert len(record.pods) == len(record.clients) == KEPT_NAMES + 1
    assert record.pods[OTHERS] == 50


def test_the_row_says_whether_the_client_address_is_kept() -> None:
    record = Record()
    assert dict(zip(HEADER, row(TARGET, record), strict=True))["CLIENT"] == "not shown"
    record.add(Outcome(0, 0.1, own="198.51.100.1", client="198.51.100.1", pod="a"))
    assert dict(zip(HEADER, row(TARGET, record), strict=True))["CLIENT"] == "kept"
    for number in range(3):
        record.add(Outcome(number, 0.1, own="198.51.100.1", client="10.0.0.1", pod="b"))
    cells = dict(zip(HEADER, row(TARGET, record), strict=True))
    assert cells["CLIENT"] == "75 % seen as 10.0.0.1"
    assert cells["PODS"] == "b 75 %, a 25 %"


def test_a_client_may_be_seen_under_another_address_of_the_host() -> None:
    record = Record()
    for own, client in (("198.51.100.1", "198.51.100.2"), ("198.51.100.2", "198.51.100.2")):
        record.add(Outcome(0, 0.1, own=own, client=client))
    cells = dict(zip(HEADER, row(TARGET, record), strict=True))
    assert cells["CLIENT"] == "50 % seen as 198.51.100.2"


def test_a_gap_ends_when_the_call_that_was_answered_began() -> None:
    record = Record()
    record.add(Outcome(1.0, 0.1, "reset"))
    record.stretch(2.9)
    assert record.longest_gap_s == 1.9
    record.add(Outcome(2.0, 0.95))
    assert record.longest_gap_s == record.gap_total_s == 1.0


def test_one_lost_call_of_many_is_not_rounded_away() -> None:
    record = recorded("." * 9999 + "x")
    assert row(TARGET, record)[1] == "99.99 % of 10000, silent now"


def test_a_time_is_written_in_utc() -> None:
    assert timestamp(0.25) == "1970-01-01T00:00:00.250Z"
