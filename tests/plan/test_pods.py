"""The pods of a listener, for a load balancer that sends to pods."""

from collections.abc import Sequence

import msgspec
from tests.makers import make_slice

from fairlead.kube.objects import EXCLUDE_LABEL, Node, ObjectMeta, ServicePort
from fairlead.model import PodMember
from fairlead.plan.pods import pods_of

NODES = {
    "node1": Node(ObjectMeta(name="node1")),
    "excluded": Node(ObjectMeta(name="excluded", labels={EXCLUDE_LABEL: ""})),
}
TCP, UDP = ServicePort(80), ServicePort(80, protocol="UDP")
A, B, C, D, E = (f"10.244.1.{number}" for number in range(10, 15))


def members(port: ServicePort, *rows: tuple[str, str, str]) -> Sequence[PodMember]:
    """Return the pods of a slice with these rows."""
    slice_ = make_slice(rows)
    ports = tuple(
        msgspec.structs.replace(each, protocol=port.protocol) for each in slice_.ports or ()
    )
    slices = [msgspec.structs.replace(slice_, ports=ports)]
    return pods_of(port, "IPv4", slices, NODES)


def states(port: ServicePort, *rows: tuple[str, str, str]) -> dict[str, str]:
    """Return the state of each pod by its address."""
    return {each.address: each.state for each in members(port, *rows)}


def test_ready_pods_are_active_and_all_others_drain() -> None:
    found = states(TCP, (A, "node1", "ready"), (B, "node1", "draining"), (C, "node1", "unready"))
    assert found == {A: "active", B: "draining", C: "draining"}


def test_without_ready_pods_terminating_pods_that_serve_are_active() -> None:
    found = states(TCP, (A, "node1", "draining"), (B, "node1", "dying"))
    assert found == {A: "active", B: "draining"}


def test_pods_of_excluded_nodes_drain_unless_there_are_no_others() -> None:
    found = states(TCP, (A, "node1", "ready"), (B, "excluded", "ready"))
    assert found == {A: "active", B: "draining"}
    assert states(TCP, (B, "excluded", "ready")) == {B: "active"}


def test_pods_that_drain_still_serve_if_they_would_answer() -> None:
    found = members(
        TCP,
        (A, "node1", "ready"),
        (B, "node1", "draining"),
        (C, "node1", "unready"),
        (D, "node1", "dying"),
        (E, "excluded", "ready"),
    )
    assert [each.address for each in found if each.still_serves] == [B, E]
    assert [each.address for each in found if each.state == "active"] == [A]


def test_a_pod_without_a_node_is_active() -> None:
    assert states(TCP, (A, "", "ready")) == {A: "active"}


def test_udp_flows_do_not_stay_at_pods_that_do_not_serve() -> None:
    rows = ((A, "node1", "ready"), (B, "node1", "draining"), (C, "node1", "unready"))
    assert states(UDP, *rows) == {A: "active", B: "draining"}
