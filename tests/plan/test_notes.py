"""The findings that the owner of a Service gets: their codes, the conditions that they block, and
their texts. Each finding has a remedy."""

import ipaddress
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.makers import make_service, plan_at_gateway

from fairlead.kube.objects import (
    EndpointSlice,
    Node,
    NodeSpec,
    ObjectMeta,
    Service,
    ServicePort,
    Taint,
)
from fairlead.model import Finding
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import DIRECT

MakeService = Callable[..., Service]
MakeSlice = Callable[..., EndpointSlice]
ADDRESSES = ["203.0.113.10"]
BOTH = ["203.0.113.10", "2001:db8:f::10"]
LOCAL: dict[str, object] = {}
CLUSTER: dict[str, object] = {"external_traffic_policy": "Cluster", "health_check_node_port": 0}


def findings(
    service: Service,
    slices: list[EndpointSlice],
    nodes: dict[str, Node],
    addresses: list[str] = ADDRESSES,
) -> list[Finding]:
    return list(plan_load_balancer(service, slices, nodes, addresses, DIRECT).notes)


def codes_and_blocks(notes: list[Finding]) -> list[tuple[str, str]]:
    assert all(note.remedy for note in notes)
    return [(note.code, note.blocks) for note in notes]


NO_ENDPOINTS, NO_NODES, NO_NODE_NAME = (
    "NoReadyEndpoints",
    "UnAvailableLoadBalancer",
    "EndpointsWithoutNode",
)
ENDPOINTS: dict[
    str, tuple[dict[str, object], list[tuple[str, str, str]], list[tuple[str, str]]]
] = {
    "a ready endpoint: no finding": (LOCAL, [("10.0.1.1", "node1", "ready")], []),
    "only terminating endpoints that serve: no finding": (
        LOCAL,
        [("10.0.1.1", "node1", "draining")],
        [],
    ),
    "no endpoint": (LOCAL, [], [(NO_ENDPOINTS, "Ready")]),
    "no ready endpoint": (CLUSTER, [("10.0.1.1", "node1", "unready")], [(NO_ENDPOINTS, "Ready")]),
    "Local: the only endpoint is on a node that does not exist": (
        LOCAL,
        [("10.0.9.1", "gone", "ready")],
        [(NO_NODES, "Ready")],
    ),
    "Cluster: the only endpoint is on a node that does not exist": (
        CLUSTER,
        [("10.0.9.1", "gone", "ready")],
        [],
    ),
    "Local: one of two nodes does not exist": (
        LOCAL,
        [("10.0.1.1", "node1", "ready"), ("10.0.9.1", "gone", "ready")],
        [],
    ),
    "Local: no endpoint names a node": (
        LOCAL,
        [("10.0.9.1", "", "ready")],
        [(NO_NODE_NAME, "Ready")],
    ),
    "Local: one of two endpoints names no node": (
        LOCAL,
        [("10.0.9.1", "", "ready"), ("10.0.1.1", "node1", "ready")],
        [(NO_NODE_NAME, "")],
    ),
    "Cluster: no endpoint names a node": (CLUSTER, [("10.0.9.1", "", "ready")], []),
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_findings_about_endpoints(
    make_service: MakeService, make_slice: MakeSlice, nodes: dict[str, Node], name: str
) -> None:
    fields, rows, expected = ENDPOINTS[name]
    notes = findings(make_service(**fields), [make_slice(rows)], nodes)
    assert codes_and_blocks(notes) == expected
    members = (
        plan_load_balancer(make_service(**fields), [make_slice(rows)], nodes, ADDRESSES, DIRECT)
        .listeners[0]
        .members
    )
    served = any(member.weight and member.state == "active" for member in members)
    assert served is not any(note.blocks == "Ready" for note in notes), (
        "a finding blocks Ready if and only if no member gets connections"
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [],
            "it has no endpoint; see `kubectl get pods -n default -l app=web`; if it shows no "
            "pod, make spec.selector",
        ),
        (
            [("10.0.1.1", "node1", "unready")],
            "it has endpoints, and none of them is ready; see `kubectl get pods",
        ),
    ],
    ids=["no pod, or only pods without an address", "only unready pods"],
)
def test_the_advice_claims_only_facts_that_endpoint_slices_show(
    make_service: MakeService,
    make_slice: MakeSlice,
    nodes: dict[str, Node],
    rows: list[tuple[str, str, str]],
    words: str,
) -> None:
    """A pod whose container is being created has no address, and so no endpoint. EndpointSlices do
    not show whether its labels match the selector."""
    for slices in ([make_slice(rows)], [make_slice(rows)] * 2):
        (note,) = findings(make_service(selector={"app": "web"}), slices, nodes)
        assert str(note).startswith(words)
        assert note.at_start


@pytest.mark.parametrize("fields", [LOCAL, CLUSTER], ids=["Local", "Cluster"])
def test_a_service_without_any_eligible_node_is_reported(
    make_service: MakeService,
    make_slice: MakeSlice,
    nodes: dict[str, Node],
    fields: dict[str, object],
) -> None:
    slice_ = make_slice([("10.0.1.1", "node1", "ready")])
    taint = NodeSpec(taints=(Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule"),))
    leaving = {name: msgspec.structs.replace(node, spec=taint) for name, node in nodes.items()}
    assert codes_and_blocks(findings(make_service(**fields), [slice_], leaving)) == [
        (NO_NODES, "Ready")
    ]
    assert codes_and_blocks(findings(make_service(**fields), [slice_], {})) == [(NO_NODES, "Ready")]


def test_a_missing_endpoint_is_reported_with_its_port_and_family(
    make_service: MakeService, make_slice: MakeSlice, nodes: dict[str, Node]
) -> None:
    service = make_service(ports=(ServicePort(80, name="a"), ServicePort(81, name="b")))
    slices = [
        make_slice([("10.0.1.1", "node1", "ready")], ports=[("a", 8080), ("b", 8081)]),
        make_slice(
            [("2001:db8:244::1", "node2", "ready")], name="six", family="IPv6", ports=[("a", 8080)]
        ),
    ]
    (note,) = findings(service, slices, nodes, BOTH)
    assert (note.code, note.blocks) == (NO_ENDPOINTS, "Ready")
    assert str(note).startswith("81/TCP (IPv6): no endpoint has this port")


RANGES: dict[str, tuple[tuple[str, ...], list[str], list[str]]] = {
    "no ranges": ((), BOTH, []),
    "the ranges contain pods and clients": (("198.51.100.0/24", "10.0.0.0/8"), ADDRESSES, []),
    "the range contains every address": (("0.0.0.0/0",), ADDRESSES, []),
    "the range does not contain the pods": (("198.51.100.0/24",), ADDRESSES, ["10.0.1.0/24"]),
    "the ranges contain only some of the pods": (
        ("10.0.1.0/25", "198.51.100.0/24"),
        ADDRESSES,
        ["10.0.1.0/24"],
    ),
    "there are only ranges of the other family": (
        ("2001:db8::/32",),
        ADDRESSES,
        ["no client outside the cluster may connect over IPv4"],
    ),
    "there are ranges for only one of two families": (
        ("10.0.0.0/8",),
        BOTH,
        ["no client outside the cluster may connect over IPv6"],
    ),
}


@pytest.mark.parametrize("name", RANGES)
def test_findings_about_source_ranges(
    make_service: MakeService, make_slice: MakeSlice, nodes: dict[str, Node], name: str
) -> None:
    ranges, addresses, expected = RANGES[name]
    nodes["node1"] = msgspec.structs.replace(
        nodes["node1"], spec=NodeSpec(pod_cidrs=("10.0.1.0/24", "2001:db8:244::/64"))
    )
    service = make_service(load_balancer_source_ranges=ranges)
    slices = [make_slice([("10.0.1.1", "node1", "ready")])]
    notes = [
        note
        for note in findings(service, slices, nodes, addresses)
        if note.code == "LoadBalancerSourceRanges"
    ]
    assert [
        part for part, note in zip(expected, notes, strict=True) if part in str(note)
    ] == expected


def test_a_missing_health_check_node_port_and_another_service_proxy_are_reported(
    make_service: MakeService, make_slice: MakeSlice, nodes: dict[str, Node]
) -> None:
    slices = [make_slice([("10.0.1.1", "node1", "ready")])]
    assert codes_and_blocks(findings(make_service(health_check_node_port=0), slices, nodes)) == [
        ("HealthCheckNodePortMissing", "")
    ]
    labels = {"service.kubernetes.io/service-proxy-name": "other"}
    service = make_service()
    meta = ObjectMeta(name="web", namespace="default", labels=labels)
    assert codes_and_blocks(
        findings(msgspec.structs.replace(service, metadata=meta), slices, nodes)
    ) == [("OtherServiceProxy", "")]


def test_a_finding_does_not_change_with_the_number_of_endpoints(
    make_service: MakeService, make_slice: MakeSlice, nodes: dict[str, Node]
) -> None:
    few = findings(make_service(), [make_slice([("10.0.1.1", "node1", "unready")])], nodes)
    many = findings(
        make_service(),
        [make_slice([(f"10.0.1.{i}", f"node{1 + i % 4}", "unready") for i in range(1, 9)])],
        nodes,
    )
    assert few == many


def test_a_gateway_does_not_repeat_the_findings_of_the_controller(
    make_service: MakeService, nodes: dict[str, Node]
) -> None:
    assert (
        plan_at_gateway(make_service(), [], nodes, ADDRESSES, DIRECT, lambda *_: "up").notes == ()
    )


NETWORKS = st.builds(
    lambda number, length: ipaddress.ip_network((number << 24, length), strict=False),
    st.integers(0, 15),
    st.integers(4, 10),
)


@given(st.lists(NETWORKS, min_size=1, max_size=6), NETWORKS)
def test_pods_outside_of_all_source_ranges_are_reported(
    ranges: list[ipaddress.IPv4Network], pods: ipaddress.IPv4Network
) -> None:
    service = make_service(load_balancer_source_ranges=tuple(map(str, ranges)))
    node = Node(ObjectMeta("node1"), NodeSpec(pod_cidrs=(str(pods),)))
    admitted = set[int]().union(*(range(int(e[0]) >> 22, (int(e[-1]) >> 22) + 1) for e in ranges))
    outside = not admitted.issuperset(range(int(pods[0]) >> 22, (int(pods[-1]) >> 22) + 1))
    notes = findings(service, [], {"node1": node})
    assert any("are in no source range" in each.message for each in notes) == outside
