"""The findings that the owner of a Service gets: their codes, the conditions that they block, and
their texts. Each finding has a remedy."""

import ipaddress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.makers import make_service, plan_at_gateway
from tests.plan.findings import (
    ADDRESSES,
    BOTH,
    MakeService,
    MakeSlice,
    codes_and_blocks,
    findings,
)

from fairlead.config import ClusterConfig, Config
from fairlead.kube.objects import (
    Node,
    NodeSpec,
    ObjectMeta,
)
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import DIRECT

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


CONFIGURED: dict[str, tuple[tuple[str, ...], tuple[str, ...], bool]] = {
    "no Node has a podCIDR": ((), ("198.51.100.0/24",), True),
    "no Node has a podCIDR, and the ranges contain the pods": ((), ("10.0.0.0/8",), False),
    "only one of the other family": (("2001:db8:244::/64",), ("198.51.100.0/24",), True),
    "the ranges contain those of the Nodes": (("10.0.1.0/24",), ("10.0.1.0/24",), False),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_the_configured_networks_of_pods_count_if_nodes_have_none(
    make_service: MakeService, make_slice: MakeSlice, nodes: dict[str, Node], name: str
) -> None:
    of_node, ranges, outside = CONFIGURED[name]
    nodes["node1"] = msgspec.structs.replace(nodes["node1"], spec=NodeSpec(pod_cidrs=of_node))
    service = make_service(load_balancer_source_ranges=ranges)
    slices = [make_slice([("10.0.1.1", "node1", "ready")])]
    config = Config(cluster=ClusterConfig(pod_cidrs=("10.0.0.0/16",)))
    made = plan_load_balancer(service, slices, nodes, ADDRESSES, DIRECT, config=config)
    notes = [str(note) for note in made.notes if note.code == "LoadBalancerSourceRanges"]
    assert ["for example in 10.0.0.0/16" in note for note in notes] == [True] * outside


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
