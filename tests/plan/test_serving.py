"""Which nodes get the new connections of a listener. The result depends on the states of its
members and on the nodes that serve now."""

import pytest

from fairlead.model import (
    DirectSettings,
    Listener,
    Member,
    MemberState,
    Protocol,
    ProxySettings,
)
from fairlead.plan.serving import (
    Shares,
    active_weights,
    drain_limit_s,
    is_drained,
    shares_of,
    stays_as_it_is,
)

Row = tuple[str, int, MemberState]


def listener(*rows: Row, policy: str = "Local", protocol: Protocol = "TCP") -> Listener:
    members = tuple(Member(node, "192.0.2.1", weight, state) for node, weight, state in rows)
    return Listener("IPv4", 80, protocol, policy, 30080, members)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "weights", "undecided"),
    [
        ([("b", 2, "active"), ("a", 1, "active")], (("a", 1), ("b", 2)), ()),
        ([("a", 1, "active"), ("b", 1, "pending")], (("a", 1),), ()),
        ([("a", 1, "pending"), ("b", 1, "down")], (), ("a",)),
        ([("a", 1, "pending"), ("b", 1, "draining")], (("b", 1),), ("a",)),
        ([("a", 1, "pending"), ("b", 0, "draining")], (), ("a",)),
        ([("a", 1, "draining"), ("b", 1, "down")], (), ()),
        ([("a", 0, "active"), ("b", 1, "pending")], (), ("b",)),
    ],
    ids=[
        "all nodes are active: they have weights",
        "an active node has a weight, a pending node has none",
        "a pending node and no other candidate: undecided",
        "a pending and a draining node with weight: the draining one has a weight",
        "a draining node without weight has none",
        "no node is pending: draining nodes have no weights",
        "an active node without weight does not count",
    ],
)
def test_only_while_no_node_is_confirmed_do_draining_nodes_have_weights(
    rows: list[Row], weights: tuple[tuple[str, int], ...], undecided: tuple[str, ...]
) -> None:
    shares = shares_of(listener(*rows))
    assert (shares.weights, shares.undecided) == (weights, undecided)
    assert active_weights(listener(*rows)) == (() if undecided else weights)


@pytest.mark.parametrize(
    ("weights", "undecided", "serving", "stays"),
    [
        ((), ("a",), {"a"}, True),
        ((("b", 1),), ("a",), {"a"}, True),
        ((("b", 1),), ("a",), {"a", "gone"}, True),
        ((("b", 1),), ("a",), {"b"}, False),
        ((("b", 1),), ("a",), {"gone"}, False),
        ((), ("a",), {"gone"}, True),
        ((), ("a",), set(), False),
        ((("b", 1),), (), {"a"}, False),
        ((), (), {"a"}, False),
    ],
    ids=[
        "the pending node serves",
        "the pending node serves, a draining one may",
        "the pending node serves, and so does a departed one",
        "the draining node serves",
        "only a departed node serves, a draining one may",
        "only a departed node serves, no other may",
        "no node serves",
        "no node is pending, another one may serve",
        "no node is pending, and none may serve",
    ],
)
def test_a_listener_does_not_change_while_a_pending_node_serves_or_no_other_node_may(
    weights: tuple[tuple[str, int], ...],
    undecided: tuple[str, ...],
    serving: set[str],
    stays: bool,
) -> None:
    assert stays_as_it_is(weights, undecided, serving) == stays


def test_which_nodes_keep_connections_depends_on_protocol_and_policy() -> None:
    rows: list[Row] = [("a", 1, "active"), ("b", 1, "down"), ("c", 0, "draining")]
    assert shares_of(listener(*rows)) == Shares(
        (("a", 1),), (), ("a", "b", "c"), retain_departed=False
    )
    assert shares_of(listener(*rows, policy="Cluster")).retain_departed
    datagrams = shares_of(listener(*rows, policy="Cluster", protocol="UDP"))
    assert datagrams.retained_nodes == ("a", "c")
    assert not datagrams.retain_departed


def test_a_service_limits_the_drain_itself_or_has_the_limit_of_the_gateway() -> None:
    for of_class in (DirectSettings, ProxySettings):
        assert drain_limit_s(of_class(), 30.0) == 30.0
        assert drain_limit_s(of_class(drain_timeout_s=0), 30.0) == 0
    assert is_drained(30.0, 30.0)
    assert not is_drained(29.9, 30.0)
    assert not is_drained(1e9, 0.0)
