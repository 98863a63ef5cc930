"""Equal clusters give equal plans in every role, whatever the order in which objects arrive."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.makers import plan_gateway

from fairlead.config import Config, PoolConfig
from fairlead.kube.objects import EndpointSlice, Node, ObjectKey, Service
from fairlead.model import LoadBalancer, NodeService, ServiceKey
from fairlead.plan.cluster import plan_controller, plan_node
from fairlead.plan.ledger import Ledger
from fairlead.plan.projection import CONTROLLER, GATEWAY, NODE, Projection
from fairlead.state import State

CONFIG = Config(
    default_class="fairlead.io/direct", pools=(PoolConfig("main", ("203.0.113.0/28",)),)
)
NODES = ("node1", "node2", "node3")
WEB = ServiceKey("default", "web")
TRUTHS = st.sampled_from([None, True, False])
HINTS = st.sampled_from([None, {"forZones": [{"name": "a"}]}, {"forNodes": [{"name": "node1"}]}])
ENTRIES = st.fixed_dictionaries(
    {
        # Few addresses, so that most are in several slices.
        "addresses": st.sampled_from(["10.244.0.1", "10.244.0.2"]).map(lambda text: [text]),
        "conditions": st.fixed_dictionaries(
            {"ready": TRUTHS, "serving": TRUTHS, "terminating": TRUTHS}
        ),
        "nodeName": st.sampled_from([*NODES, "", None]),
        "hints": HINTS,
    }
)
SLICES = st.lists(st.lists(ENTRIES, max_size=3), min_size=1, max_size=4)


def service(policy: str) -> Service:
    body = {
        "metadata": {
            "name": "web",
            "namespace": "default",
            "uid": "uid-web",
            "annotations": {"fairlead.io/class": "fairlead.io/direct"},
            "managedFields": [{"manager": "fairlead-claim"}],
        },
        "spec": {
            "type": "LoadBalancer",
            "clusterIPs": ["10.96.0.1"],
            "ports": [{"port": 80, "nodePort": 30080}],
            "externalTrafficPolicy": policy,
            "healthCheckNodePort": 32000 if policy == "Local" else 0,
        },
        "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1", "ipMode": "VIP"}]}},
    }
    return msgspec.convert(body, Service)


def slice_of(number: int, entries: list[Any]) -> EndpointSlice:
    metadata = {
        "name": f"web-{number}",
        "namespace": "default",
        "labels": {"kubernetes.io/service-name": "web"},
    }
    ports = [{"name": "", "port": 8080}]
    return msgspec.convert(
        {"metadata": metadata, "endpoints": entries, "ports": ports}, EndpointSlice
    )


def make_node(number: int, name: str) -> Node:
    addresses = [{"type": "InternalIP", "address": f"192.0.2.{number}"}]
    body = {"metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": "a"}}}
    return msgspec.convert({**body, "status": {"addresses": addresses}}, Node)


def state_of(
    projection: Projection,
    served: Service,
    slices: list[EndpointSlice],
    nodes: list[Node],
) -> State:
    """Return the state of a role that received the objects one after the other."""
    state = State(())
    for each in slices:
        assert projection.slice is not None
        key = ObjectKey(each.metadata.namespace, each.metadata.name)
        state.update_slices({key: projection.slice(each)})
    for node in nodes:
        state.update_nodes({ObjectKey("", node.metadata.name): projection.node(node)})
    state.update_services({ObjectKey(*served.key): projection.service(served)})
    return state


def plans(
    served: Service, slices: list[EndpointSlice], nodes: list[Node]
) -> tuple[LoadBalancer, LoadBalancer, dict[str, NodeService]]:
    """Return the plans of the controller, of a gateway, and of each node."""
    balancer = plan_controller(
        state_of(CONTROLLER, served, slices, nodes), CONFIG, Ledger(), {WEB}
    )[WEB]
    at_gateway = plan_gateway(state_of(GATEWAY, served, slices, nodes), CONFIG, {WEB})[WEB]
    of_node = state_of(NODE, served, slices, nodes)
    on_nodes = {name: plan_node(of_node, name, {WEB})[WEB] for name in NODES}
    assert isinstance(balancer, LoadBalancer)
    assert isinstance(at_gateway, LoadBalancer)
    return balancer, at_gateway, {k: v for k, v in on_nodes.items() if isinstance(v, NodeService)}


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
@given(drawn=SLICES, data=st.data())
def test_the_plans_of_all_roles_do_not_depend_on_the_order_of_arrival(
    policy: str, drawn: list[Any], data: st.DataObject
) -> None:
    served = service(policy)
    slices = [slice_of(number, entries) for number, entries in enumerate(drawn)]
    nodes = [make_node(number, name) for number, name in enumerate(NODES, 1)]
    other = plans(served, data.draw(st.permutations(slices)), data.draw(st.permutations(nodes)))
    assert plans(served, slices, nodes) == other


@given(drawn=SLICES)
def test_a_gateway_chooses_the_nodes_on_which_the_service_proxy_finds_a_pod(
    drawn: list[Any],
) -> None:
    slices = [slice_of(number, entries) for number, entries in enumerate(drawn)]
    nodes = [make_node(number, name) for number, name in enumerate(NODES, 1)]
    balancer, at_gateway, on_nodes = plans(service("Local"), slices, nodes)
    (listener,) = balancer.listeners
    weights = {each.node: each.weight for each in listener.members if each.weight}
    assert at_gateway.listeners[0].has_endpoints == listener.has_endpoints
    local = {name: len(each.ports[0].local_backends) for name, each in on_nodes.items()}
    ready = {
        name: each.health_check.local_endpoints
        for name, each in on_nodes.items()
        if each.health_check is not None
    }
    # Terminating pods get connections only if no node has a ready one.
    chosen = ready if any(ready.values()) else local
    assert weights == {name: count for name, count in chosen.items() if count}


def test_an_entry_that_names_its_node_takes_precedence_over_one_that_does_not() -> None:
    mirrored = slice_of(1, [{"addresses": ["10.244.1.7"], "conditions": {"ready": True}}])
    for state in (True, False):
        own = slice_of(
            2,
            [
                {
                    "addresses": ["10.244.1.7"],
                    "nodeName": "node1",
                    "conditions": {"ready": state, "serving": True, "terminating": not state},
                }
            ],
        )
        for slices in ([mirrored, own], [own, mirrored]):
            balancer, _, on_nodes = plans(service("Local"), slices, [make_node(1, "node1")])
            (member,) = balancer.listeners[0].members
            assert (member.node, member.weight) == ("node1", 1)
            assert len(on_nodes["node1"].ports[0].local_backends) == 1
