"""When nodes join the announcement of an address, leave it, and change their weights."""

import itertools
from collections.abc import Mapping

import pytest

from fairlead.plan.settling import COLLECT_S, OVERLAP_S, TOLERANCE, Settled, settle, unfair

Weights = Mapping[str, int]


def run(*steps: tuple[float, Weights], at_once: bool = False) -> list[tuple[float, Weights]]:
    """Return the times and the settled weights of all changes. `steps`: the nodes that serve from a
    time on. A decision is made at each step, and whenever the previous one asked for it."""
    settled: Settled | None = None
    found: list[tuple[float, Weights]] = []

    def decide(now_s: float, wanted: Weights) -> None:
        nonlocal settled
        settled = settle(settled, wanted, now_s, at_once=at_once)
        if not found or found[-1][1] != settled.weights:
            found.append((now_s, settled.weights))

    for index, (at_s, wanted) in enumerate(steps):
        until_s = steps[index + 1][0] if index + 1 < len(steps) else at_s + 100
        decide(at_s, wanted)
        while settled is not None and settled.due_s < until_s:
            decide(settled.due_s, wanted)
    return found


A, AB, ABC = {"a": 2}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}


def test_after_a_start_the_present_nodes_announce_at_once() -> None:
    assert run((0, ABC)) == [(0, ABC)]


def test_a_node_that_cannot_serve_any_more_is_withdrawn_at_once() -> None:
    assert run((0, ABC), (1, AB), (1.001, A)) == [(0, ABC), (1, AB), (1.001, A)]


def test_nodes_that_are_all_replaced_stay_until_the_others_have_joined() -> None:
    before = Settled({"a": 1, "b": 1}, joined_s=0)
    both = settle(before, {"c": 1}, 10, retiring={"a": 1, "d": 1})
    assert both == Settled({"a": 1, "c": 1}, 10, 10 + OVERLAP_S, 10 + OVERLAP_S)
    assert settle(both, {"c": 1}, 11, retiring={"a": 1}).weights == {"a": 1, "c": 1}
    assert settle(both, {"c": 1}, 11).weights == {"c": 1}, "the pods on a are gone"
    assert settle(both, {"c": 1}, 10 + OVERLAP_S, retiring={"a": 1}) == Settled({"c": 1}, 10)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_node_that_is_replaced_stays_while_the_others_may_not_join_yet(at_once: bool) -> None:
    before = Settled({"a": 1}, joined_s=8)
    waiting = settle(before, {"b": 1}, 10, retiring={"a": 1}, at_once=at_once)
    if not at_once:
        assert waiting.weights == {"a": 1}
        assert waiting.due_s == 8 + COLLECT_S
        waiting = settle(waiting, {"b": 1}, waiting.due_s, retiring={"a": 1})
    assert waiting.weights == {"a": 1, "b": 1}


def test_a_node_leaves_at_once_if_others_announce() -> None:
    before = Settled({"a": 1, "b": 1}, joined_s=0)
    assert settle(before, {"b": 1}, 10, retiring={"a": 1}).weights == {"b": 1}


def test_joins_that_follow_each_other_are_one_change() -> None:
    assert run((0, A), (10, AB), (12, ABC)) == [(0, A), (10 + COLLECT_S, ABC)]


def test_the_first_node_joins_at_once_and_later_ones_together() -> None:
    assert run((0, {}), (10, A), (11, AB), (12, ABC)) == [(0, {}), (10, A), (16, ABC)]


def test_a_withdrawal_does_not_wait_for_the_joins_that_are_collected() -> None:
    assert run((0, AB), (10, ABC), (12, {"b": 2, "c": 2})) == [
        (0, AB),
        (12, {"b": 2}),
        (15, {"b": 2, "c": 2}),
    ]


def test_a_node_that_stops_serving_before_it_joined_causes_no_change() -> None:
    assert run((0, A), (10, AB), (12, A)) == [(0, A)]


def test_two_joins_are_apart_even_if_no_node_is_left() -> None:
    """A single pod that flaps: its route comes at most once in COLLECT_S."""
    flapping = [(float(at_s), A if at_s % 2 else {}) for at_s in range(100, 112)]
    found = run((0, {}), *flapping)
    joins = [at_s for at_s, weights in found if weights]
    assert joins[0] == 101
    assert min(late - early for early, late in itertools.pairwise(joins)) >= COLLECT_S


def test_a_pod_more_or_less_changes_no_weight_while_shares_stay_nearly_fair() -> None:
    assert run((0, {"a": 10, "b": 10}), (10, {"a": 11, "b": 10})) == [(0, {"a": 10, "b": 10})]


def test_weights_change_after_a_while_if_shares_are_unfair() -> None:
    before, after = {"a": 3, "b": 1}, {"a": 2, "b": 2}
    assert run((0, before), (10, after)) == [(0, before), (10 + COLLECT_S, after)]


def test_weights_change_together_with_a_join() -> None:
    before, after = {"a": 10, "b": 10}, {"a": 11, "b": 10, "c": 1}
    assert run((0, before), (10, after)) == [(0, before), (10 + COLLECT_S, after)]


def test_a_flip_of_the_policy_is_one_change_of_all_weights() -> None:
    """A router that gets weights from some nodes only divides equally, so no node tells its weight
    before the others."""
    local, cluster = {"a": 3, "b": 1}, {"a": 0, "b": 0, "c": 0}
    assert run((0, local), (10, cluster)) == [(0, local), (15, cluster)]
    assert run((0, cluster), (10, local)) == [(0, cluster), (10, {"a": 0, "b": 0}), (15, local)]


def test_routers_that_keep_connections_get_each_change_at_once() -> None:
    steps = ((0.0, A), (1.0, AB), (1.5, {"a": 5, "b": 2}), (2.0, ABC))
    assert run(*steps, at_once=True) == list(steps)


@pytest.mark.parametrize(
    ("told", "pods", "expected"),
    [
        ({}, {}, False),
        ({"a": 1}, {"a": 7}, False),  # one node gets everything, whatever its weight
        ({"a": 1, "b": 1}, {"a": 1, "b": 1}, False),
        ({"a": 1, "b": 1}, {"a": 2, "b": 1}, True),
        ({"a": 5, "b": 5}, {"a": 6, "b": 5}, False),
        ({"a": 0, "b": 0}, {"a": 0, "b": 0}, False),
        ({"a": 0, "b": 0}, {"a": 1, "b": 1}, True),
        ({"a": 1, "b": 1}, {"a": 0, "b": 0}, True),
        ({"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 9}, False),  # c does not announce yet
    ],
)
def test_shares_are_unfair_if_one_pod_gets_too_much_or_too_little(
    told: Weights, pods: Weights, expected: bool
) -> None:
    assert unfair(told, pods) is expected


def test_the_limit_of_unfairness_is_the_share_of_a_pod() -> None:
    """100 pods on a and 100 on b; a then loses pods. Its remaining pods get 100 of 200 shares."""
    fewest = min(
        pods for pods in range(1, 101) if not unfair({"a": 100, "b": 100}, {"a": pods, "b": 100})
    )
    share_of_a_pod = (100 / 200) / fewest
    fair = 1 / (fewest + 100)
    assert share_of_a_pod / fair - 1 <= TOLERANCE
    assert (100 / 200) / (fewest - 1) * (fewest + 99) - 1 > TOLERANCE
