"""Which gateways take over the addresses of one that hands them over."""

from collections.abc import Mapping

import msgspec
import pytest

from fairlead.kube.objects import (
    AUTOSCALER_TAINT,
    EXCLUDE_LABEL,
    Node,
    NodeAddress,
    NodeCondition,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    Taint,
)
from fairlead.plan.members import excluded
from fairlead.plan.yielding import takers_of, without_exclusion, yields_to_others

OTHER = "192.0.2.2"
WITHOUT_NETWORK = NodeCondition("NetworkUnavailable", "True")


def node(name: str, address: str, *, cordoned: bool = False, label: str | None = None) -> Node:
    labels = {} if label is None else {EXCLUDE_LABEL: label}
    return Node(
        ObjectMeta(name, labels=labels),
        NodeSpec(unschedulable=cordoned),
        NodeStatus((NodeAddress("InternalIP", address),)),
    )


def pair(other: Node, *, cordoned: bool = True) -> Mapping[str, Node]:
    return {"own": node("own", "192.0.2.1", cordoned=cordoned), "other": other}


def test_a_gateway_that_is_alive_takes_over() -> None:
    nodes = pair(node("other", OTHER))
    assert takers_of("own", nodes, {OTHER}) == {"other"}
    assert takers_of("own", nodes, {"192.0.2.1"}) == set()
    assert takers_of("own", nodes, ()) == set()


@pytest.mark.parametrize(
    "other", [node("other", OTHER, cordoned=True), node("other", OTHER, label="")]
)
def test_a_gateway_that_yields_itself_takes_nothing_over(other: Node) -> None:
    assert takers_of("own", pair(other), {OTHER}) == set()


def test_a_cordoned_node_and_one_without_network_yield_to_others() -> None:
    assert yields_to_others(node("own", OTHER, cordoned=True))
    assert not yields_to_others(node("own", OTHER))
    without = msgspec.structs.replace(
        node("own", OTHER), status=NodeStatus(conditions=(WITHOUT_NETWORK,))
    )
    assert yields_to_others(without)


def test_the_marks_that_exclude_a_node_can_be_left_out() -> None:
    spec = NodeSpec(taints=(Taint(AUTOSCALER_TAINT, "", "NoSchedule"), Taint("other", "", "")))
    made = Node(ObjectMeta("one", labels={EXCLUDE_LABEL: "", "kept": "yes"}), spec)
    found = without_exclusion(made)
    assert excluded(made)
    assert not excluded(found)
    assert found.metadata.labels == {"kept": "yes"}
    assert [each.key for each in found.spec.taints] == ["other"]
