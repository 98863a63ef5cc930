"""The decisions and reports of the lab's scheduler and kubelets."""

import msgspec
import pytest

from fairlead.kube.objects import Condition, Container
from fairlead.lab import status
from fairlead.lab.objects import Meta, Node, NodeSpec, Pod, PodSpec, PodStatus
from fairlead.lab.topology import plan_topology

ALIVE = frozenset({"node1", "node2", "node10"})


def make_node(name: str, *, cordoned: bool = False) -> Node:
    return Node(Meta(name, labels={"kubernetes.io/hostname": name}), NodeSpec(cordoned))


NODES = [make_node("node10"), make_node("node2"), make_node("node1")]


def make_pod(**metadata: object) -> Pod:
    meta = Meta("web", "default", "uid", **metadata)  # type: ignore[arg-type]
    return Pod(meta, PodSpec((Container("web", "echo"),)))


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ([], "node1"),
        (["node1"], "node2"),
        (["node1", "node2"], "node10"),
        (["node1", "node2", "node10", "node10"], "node1"),
        (["gone", "gone"], "node1"),
    ],
)
def test_a_pod_is_scheduled_to_the_node_with_the_fewest_pods(
    load: list[str], expected: str
) -> None:
    assert status.choose_node(make_pod(), NODES, load, ALIVE) == expected


def test_dead_cordoned_and_unselected_nodes_get_no_pods() -> None:
    assert status.choose_node(make_pod(), NODES, [], frozenset({"node2"})) == "node2"
    assert status.choose_node(make_pod(), [make_node("node1", cordoned=True)], [], ALIVE) is None
    picky = Pod(Meta("web"), PodSpec(node_selector={"kubernetes.io/hostname": "node10"}))
    assert status.choose_node(picky, NODES, ["node10"] * 9, ALIVE) == "node10"
    assert status.choose_node(picky, NODES[1:], [], ALIVE) is None


@pytest.mark.parametrize(
    ("requested", "spec", "expected"),
    [(None, None, 30), (None, 5, 5), (0, 5, 0), (2, None, 2), (None, 0, 0)],
)
def test_the_grace_period_of_a_pod_comes_from_its_deletion_or_spec(
    requested: int | None, spec: int | None, expected: int
) -> None:
    pod = Pod(
        Meta("web", deletion_grace_period_seconds=requested),
        PodSpec(termination_grace_period_seconds=spec),
    )
    assert status.grace_s(pod) == expected


@pytest.mark.parametrize(
    ("annotations", "expected"), [({}, True), ({"lab.fairlead.io/ready": "false"}, False)]
)
def test_an_annotation_sets_the_readiness(annotations: dict[str, str], expected: bool) -> None:
    assert status.probe_succeeds(make_pod(annotations=annotations)) is expected


def test_a_running_pods_status_reads_back_as_ready() -> None:
    host = plan_topology("x", 1, 0, 0).host("node1")
    body = status.running_status(
        make_pod(),
        host,
        ("10.244.1.2", "2001:db8:244:1::2"),
        ready=True,
        restarts=1,
        now="now",
        started="then",
    )
    read = msgspec.convert(body, PodStatus)
    assert Pod(Meta("web"), status=read).ready
    assert [address.ip for address in read.pod_ips] == ["10.244.1.2", "2001:db8:244:1::2"]
    assert body["hostIP"] == "192.0.2.21"


def test_a_condition_keeps_the_time_of_its_last_change() -> None:
    before = PodStatus(
        "Running", conditions=(Condition("Ready", "True", last_transition_time="long ago"),)
    )
    pod = Pod(Meta("web"), status=before)
    host = plan_topology("x", 1, 0, 0).host("node1")

    def since(ready: bool) -> str | None:
        body = status.running_status(
            pod, host, ("a", "b"), ready=ready, restarts=0, now="now", started="then"
        )
        conditions = msgspec.convert(body, PodStatus).conditions
        return next(
            condition.last_transition_time for condition in conditions if condition.type == "Ready"
        )

    assert since(True) == "long ago"
    assert since(False) == "now"
