"""The slot table of a load balancer of OVN."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.drivers.ovn.slots import MAX_ERROR, MAX_SLOTS, assign, error_of, table_size

NAMES = [f"10.244.1.{number}:8080" for number in range(40)]
WEIGHTS = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 20), min_size=1, max_size=20)


def moved(before: Sequence[str], after: Sequence[str]) -> int:
    """Return the number of positions with another backend."""
    return sum(old != new for old, new in zip(before, after, strict=True))


def fewest_moves(before: Sequence[str], after: Sequence[str]) -> int:
    """Return the number of slots that must move, because their backends have fewer slots now."""
    old, new = Counter(before), Counter(after)
    return sum(max(0, count - new[name]) for name, count in old.items())


@given(WEIGHTS)
def test_shares_differ_from_weights_by_less_than_a_slot(weights: dict[str, int]) -> None:
    table = assign((), weights, 64)
    counts, total = Counter(table), sum(weights.values())
    assert len(table) == 64
    assert all(abs(counts[name] - 64 * weights[name] / total) < 1 for name in weights)


@given(WEIGHTS, WEIGHTS)
def test_only_slots_above_the_quota_or_of_backends_that_left_move(
    weights: dict[str, int], later: dict[str, int]
) -> None:
    before = assign((), weights, 64)
    after = assign(before, later, 64)
    assert moved(before, after) == fewest_moves(before, after)
    assert assign(after, later, 64) == after


@given(st.integers(1, 30))
def test_one_more_pod_moves_only_its_own_share(count: int) -> None:
    before = assign((), dict.fromkeys(NAMES[:count], 1), 64)
    after = assign(before, dict.fromkeys(NAMES[: count + 1], 1), 64)
    assert moved(before, after) == Counter(after)[NAMES[count]]


@pytest.mark.parametrize(("sizes", "common"), [((16, 64), 16), ((64, 256), 64), ((256, 64), 64)])
def test_a_table_of_another_length_keeps_the_backend_of_each_common_hash(
    sizes: tuple[int, int], common: int
) -> None:
    weights = dict.fromkeys(NAMES[:8], 1)
    before = assign((), weights, sizes[0])
    after = assign(before, weights, sizes[1])
    assert after[:common] == before[:common]


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ({NAMES[0]: 1}, 16),
        (dict.fromkeys(NAMES[:2], 1), 16),
        ({NAMES[0]: 3, NAMES[1]: 1}, 64),
        (dict.fromkeys(NAMES[:3], 1), 128),
        (dict.fromkeys(NAMES[:4], 1), 64),
        (dict.fromkeys(NAMES[:5], 1), 64),
        (dict.fromkeys(NAMES[:7], 1), 256),
        (dict.fromkeys(NAMES[:32], 1), 64),
        (dict.fromkeys(NAMES[:31], 1), MAX_SLOTS),
    ],
)
def test_the_length_follows_from_the_error(weights: Mapping[str, int], size: int) -> None:
    assert table_size(weights, 64) == size


@pytest.mark.parametrize("count", range(1, 11))
def test_up_to_ten_pods_get_equal_shares_within_two_percent(count: int) -> None:
    weights = dict.fromkeys(NAMES[:count], 1)
    counts = Counter(assign((), weights, table_size(weights, 64)))
    assert max(counts.values()) * count / counts.total() <= 1 + MAX_ERROR


def test_the_error_is_the_largest_excess_over_a_weight() -> None:
    assert error_of({"a": 1, "b": 1, "c": 1}, 64) == pytest.approx(22 * 3 / 64 - 1)
    assert error_of({"a": 3, "b": 1}, 64) == 0
    assert error_of({"a": 99, "b": 1}, 64) == pytest.approx(1 * 100 / 64 - 1)


def test_more_backends_than_hash_values_occur_once_each() -> None:
    many = {f"10.245.{number // 250}.{number % 250}:80": 1 for number in range(300)}
    table = assign((), many, table_size(many, 64))
    assert sorted(table) == sorted(many)


def test_a_table_that_another_program_has_shortened_is_completed() -> None:
    table = assign(("a", "b", "x"), {"a": 1, "b": 1}, 16)
    assert table[:2] == ("a", "b")
    assert Counter(table) == {"a": 8, "b": 8}


def test_without_backends_the_table_is_empty() -> None:
    assert assign(("a", "b"), {}, 64) == ()
