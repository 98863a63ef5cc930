"""The slot memory: regions in use never overlap, and a released region is reused only after its
grace period."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.drivers.direct.maps.arena import GRACE_S, Arena
from fairlead.errors import Unavailable


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("reserve"), st.integers(1, 20)),
            st.tuples(st.just("free"), st.integers(0, 99)),
        )
    )
)
def test_regions_neither_overlap_nor_are_reused_early(steps: list[tuple[str, int]]) -> None:
    arena, used, in_grace, now = (
        Arena(100),
        list[tuple[int, int]](),
        list[tuple[float, int, int]](),
        0.0,
    )
    for what, number in steps:
        now += 0.3
        if what == "free" and used:
            offset, length = used.pop(number % len(used))
            arena.release(offset, length, now)
            in_grace.append((now, offset, length))
        elif what == "reserve":
            in_grace = [each for each in in_grace if now - each[0] < GRACE_S]
            busy = {chunk for offset, length in used for chunk in range(offset, offset + length)}
            busy |= {
                chunk for _, offset, length in in_grace for chunk in range(offset, offset + length)
            }
            try:
                offset = arena.reserve(number, now)
            except Unavailable:
                assert not any(
                    busy.isdisjoint(range(at, at + number)) for at in range(101 - number)
                )
                continue
            assert offset + number <= 100
            assert busy.isdisjoint(range(offset, offset + number))
            used.append((offset, number))


def test_regions_in_use_at_the_start_are_not_allocated() -> None:
    arena = Arena(10, [(6, 2), (0, 3)])
    assert [arena.reserve(3, 0.0), arena.reserve(2, 0.0)] == [3, 8]
    with pytest.raises(Unavailable, match="table memory is used up"):
        arena.reserve(1, 0.0)


def test_grace_periods_survive_a_new_survey_of_free_regions() -> None:
    arena = Arena(10, [(0, 2), (2, 3), (5, 1), (6, 4)])
    arena.release(2, 3, 5.0)
    arena.release(5, 1, 5.5)
    # Another process has put a table into the first of the two in_grace regions.
    surveyed = Arena(10, [(0, 2), (6, 4), (4, 1)], arena.in_grace)
    assert surveyed.in_grace == ((5.5, 5, 1),)
    assert surveyed.reserve(2, 5.5) == 2
    with pytest.raises(Unavailable):
        surveyed.reserve(1, 5.6)
    assert surveyed.reserve(1, 6.5) == 5
