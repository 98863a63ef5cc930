"""The Findings about a Service of class direct, for tests of them."""

from collections.abc import Callable

from fairlead.kube.objects import EndpointSlice, Node, Service
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
