"""Nodes of OVN-Kubernetes: how they are recognized, and what is reported about them."""

import msgspec
import pytest
from tests.makers import make_service

from fairlead.announce_sections import AnnounceConfig
from fairlead.config import Config, NodeConfig, PoolConfig
from fairlead.kube.objects import Node, ObjectKey
from fairlead.model import LoadBalancer
from fairlead.plan.gateways import Gateways
from fairlead.plan.network_plugin import (
    CHASSIS_ID,
    GATEWAY_ON_OVN_KUBERNETES,
    TWO_SERVICE_PROXIES,
    is_ovn_kubernetes,
)
from fairlead.plan.projection import of_announcing_node, of_node
from fairlead.roles.controller import Planner
from fairlead.roles.node import other_service_proxies
from fairlead.state import State

OVN_KUBERNETES = {
    "k8s.ovn.org/l3-gateway-config": '{"default": {"mode": "shared"}}',
    CHASSIS_ID: "b1f96182-2bdd-42b6-88f9-9a1fc1c85ece",
}


def node_with(annotations: dict[str, str]) -> Node:
    return msgspec.convert(
        {
            "metadata": {"name": "node1", "annotations": annotations},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.21"}]},
        },
        Node,
    )


@pytest.mark.parametrize(
    ("annotations", "found"),
    [
        (OVN_KUBERNETES, True),
        ({}, False),
        ({"k8s.ovn.org/node-ingress-snat-exclude-subnets": "[]"}, False),
        ({"ovn.kubernetes.io/chassis": "b1f96182"}, False),
    ],
    ids=["ovn-kubernetes", "none", "written by a user", "kube-ovn"],
)
def test_a_node_is_recognized_by_the_chassis_that_ovn_kubernetes_gave_it(
    annotations: dict[str, str], found: bool
) -> None:
    node = node_with(annotations)
    assert is_ovn_kubernetes(node) == found
    for projected in (of_node(node), of_announcing_node(node)):
        assert is_ovn_kubernetes(projected) == found
        assert projected.metadata.annotations.keys() <= {CHASSIS_ID}


def codes(
    class_name: str, annotations: dict[str, str], *, service_proxy: bool, alive: str = ""
) -> set[str]:
    """Return the codes of the Findings about a Service of this class. `alive`: a gateway."""
    config = Config(
        pools=(PoolConfig("main", ("203.0.113.0/28",)),),
        announce=AnnounceConfig(),
        node=NodeConfig(service_proxy=service_proxy, announce=True),
    )
    state = State(())
    state.update_nodes({ObjectKey("", "node1"): node_with(annotations)})
    service = make_service(load_balancer_class=f"fairlead.io/{class_name}")
    state.update_services({ObjectKey(*service.key): service})
    if alive:
        state.update_gateways(Gateways(frozenset({alive})))
    planned = Planner(state, config)({service.key})[service.key]
    assert isinstance(planned, LoadBalancer)
    return {each.code for each in planned.notes}


def test_class_announce_needs_no_second_service_proxy_there() -> None:
    assert TWO_SERVICE_PROXIES in codes("announce", OVN_KUBERNETES, service_proxy=True)
    assert TWO_SERVICE_PROXIES not in codes("announce", OVN_KUBERNETES, service_proxy=False)
    assert TWO_SERVICE_PROXIES not in codes("announce", {}, service_proxy=True)


def test_gateways_on_such_nodes_are_reported_on_their_services() -> None:
    found = codes("direct", OVN_KUBERNETES, service_proxy=True, alive="node1")
    assert GATEWAY_ON_OVN_KUBERNETES in found
    assert TWO_SERVICE_PROXIES not in found
    elsewhere = codes("direct", OVN_KUBERNETES, service_proxy=True, alive="gateway1")
    assert GATEWAY_ON_OVN_KUBERNETES not in elsewhere
    assert GATEWAY_ON_OVN_KUBERNETES not in codes("direct", {}, service_proxy=True, alive="node1")


def test_a_service_proxy_on_such_a_node_is_reported_on_the_host() -> None:
    state = State(())
    assert other_service_proxies(state, "node1") == ()
    state.update_nodes({ObjectKey("", "node1"): node_with(OVN_KUBERNETES)})
    assert [each.code for each in other_service_proxies(state, "node1")] == [TWO_SERVICE_PROXIES]
    state.update_nodes({ObjectKey("", "node1"): node_with({})})
    assert other_service_proxies(state, "node1") == ()
