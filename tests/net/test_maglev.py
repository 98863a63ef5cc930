"""Maglev tables: exact shares, equal tables for all gateways with the same weights, equal results
in C and Python, and few changed slots after a change."""

from array import array
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.errors import Refused
from fairlead.net import maglev

NAMES = st.text("abc-.0129é\N{SNOWMAN}", min_size=1, max_size=20)
WEIGHTS = st.dictionaries(NAMES, st.integers(1, 400), min_size=1, max_size=30)


def shares(weights: dict[str, int]) -> Counter[str]:
    table = maglev.table(tuple(weights.items()))
    return Counter(table.nodes[i] for i in array("H", table.slots))


@given(WEIGHTS)
def test_shares_are_exact_to_within_a_slot(weights: dict[str, int]) -> None:
    got, total = shares(weights), sum(weights.values())
    size = maglev.table_size(total)
    assert got.total() == size
    for name, weight in weights.items():
        assert abs(got[name] - size * weight / total) < 1


def max_deviation(pods: int) -> float:
    """Return the maximum relative deviation of a node's share, for this number of nodes with one
    pod each."""
    size = maglev.table_size(pods)
    return max(abs(got * pods / size - 1) for got in maglev.quotas([1] * pods, size))


def test_the_maximum_deviation_of_the_share_of_a_node_with_one_pod() -> None:
    """docs/gateway.md states these numbers."""
    off = [0.0, *map(max_deviation, range(1, maglev.MAX_NODES + 1))]
    assert max(off[:654]) < 0.01
    assert max(off[:1334]) < 0.02 < off[1334]
    assert max(off[:2001]) < 0.031
    assert max(off) < 0.063


@given(WEIGHTS)
def test_c_and_python_compute_the_same_table(weights: dict[str, int]) -> None:
    permutations = maglev.permutations(sorted(weights.items()))
    assert maglev.fill_in_c(permutations) == maglev.fill_in_python(permutations)


@given(st.lists(st.dictionaries(NAMES, st.integers(1, 3), max_size=6), max_size=10))
def test_tables_that_are_filled_together_equal_the_reference(
    many: list[dict[str, int]],
) -> None:
    asked = [tuple(sorted(weights.items())) for weights in many]
    maglev.prepare(asked)
    for weights in filter(None, asked):
        names = tuple(name for name, _ in weights)
        assert maglev.table(weights) == (
            names,
            maglev.fill_in_python(maglev.permutations(weights)).tobytes(),
        )


@given(WEIGHTS, st.integers(0, 6))
def test_shares_of_a_table_of_another_size_are_exact_too(
    weights: dict[str, int], doubling: int
) -> None:
    size, total = maglev.MIN_SIZE << doubling, sum(weights.values())
    made = maglev.table_of(tuple(sorted(weights.items())), size)
    got = Counter(made.nodes[i] for i in array("H", made.slots))
    assert got.total() == size
    assert all(abs(got[name] - size * weight / total) < 1 for name, weight in weights.items())
    assert list(maglev.sizes_down_from(size)) == [size >> i for i in range(doubling + 1)]


@given(WEIGHTS, st.randoms())
def test_order_of_members_does_not_matter(weights: dict[str, int], order: Random) -> None:
    shuffled = list(weights.items())
    order.shuffle(shuffled)
    assert maglev.table(tuple(shuffled)) == maglev.table(tuple(weights.items()))


@given(st.integers(0, 100_000))
def test_sizes_divide_one_another(total: int) -> None:
    size = maglev.table_size(total)
    assert 1021 <= size <= 65_537
    assert size >= min(100 * total, 65_344)
    assert 65_344 % size == 0


@given(NAMES, st.integers(0, 6))
def test_every_walk_visits_every_slot(name: str, doubling: int) -> None:
    size = maglev.MIN_SIZE << doubling
    offset, skip = maglev.permutation(name, size)
    assert len({(offset + i * skip) % size for i in range(size)}) == size


@pytest.mark.parametrize("count", [2, 3, 5])
def test_removing_a_node_moves_few_slots_of_other_nodes(count: int) -> None:
    names = [f"node{i}" for i in range(count + 1)]
    before = maglev.table(tuple((name, 1) for name in names))
    after = maglev.table(tuple((name, 1) for name in names[:-1]))
    pairs = zip(array("H", before.slots), array("H", after.slots), strict=True)
    moved = sum(
        before.nodes[a] != after.nodes[b] and before.nodes[a] != names[-1] for a, b in pairs
    )
    assert moved < len(before.slots) // 2 * 0.2


def test_without_weights_the_table_is_empty() -> None:
    assert maglev.table(()) == maglev.table((("a", 0),)) == maglev.EMPTY


def test_a_node_with_less_than_half_a_slot_is_not_in_the_table() -> None:
    table = maglev.table((("giant", 10_000_000), ("speck", 1)))
    assert table.nodes == ("giant",)


def test_too_many_nodes_are_refused() -> None:
    most = maglev.table(tuple((f"node{i}", 1) for i in range(maglev.MAX_NODES)))
    assert len(most.nodes) == maglev.MAX_NODES == 4096
    with pytest.raises(Refused, match="4097 nodes"):
        maglev.table(tuple((f"node{i}", 1) for i in range(4097)))
