"""Which fields of objects a role stores: the plans do not depend on the other fields, and a change
of another field causes no new plan."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.makers import plan_gateway

from fairlead.config import Config, PoolConfig
from fairlead.kube.object_cache import ObjectCache
from fairlead.kube.objects import EndpointSlice, Node, ObjectKey, Service
from fairlead.kube.watch_events import Item
from fairlead.plan.cluster import plan_controller, plan_node
from fairlead.plan.ledger import Ledger
from fairlead.plan.projection import CONTROLLER, GATEWAY, NODE, Projection, of_node
from fairlead.state import State

CONFIG = Config(
    default_class="fairlead.io/direct", pools=(PoolConfig("main", ("203.0.113.0/28",)),)
)
NODES = ["node1", "node2", "node3"]
LABELS = {
    "service.kubernetes.io/headless": st.just(""),
    "service.kubernetes.io/service-proxy-name": st.just("other"),
    "app": st.sampled_from("ab"),
}
ANNOTATIONS = {
    "service.beta.kubernetes.io/load-balancer-source-ranges": st.just(
        "192.0.2.0/24, 198.51.100.0/24"
    ),
    "kubectl.kubernetes.io/last-applied-configuration": st.just("{}"),
    "fairlead.io/class": st.just("fairlead.io/direct"),
    "fairlead.io/addresses": st.sampled_from(["203.0.113.1", "203.0.113.99"]),
    "loadbalancer.openstack.org/proxy-protocol": st.just("true"),
    "note": st.text("ab ", max_size=3),
}
TIMES = st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"])
TRUTHS = st.sampled_from([None, True, False])
ENDPOINTS = st.fixed_dictionaries(
    {
        "addresses": st.lists(
            st.integers(1, 6).map(lambda n: f"10.244.0.{n}"), min_size=1, max_size=2
        ),
        "conditions": st.fixed_dictionaries(
            {"ready": TRUTHS, "serving": TRUTHS, "terminating": TRUTHS}
        ),
        "nodeName": st.sampled_from([*NODES, None]),
    }
)


@st.composite
def services(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["LoadBalancer"] * 4 + ["ClusterIP", "NodePort", "ExternalName"]))
    held = draw(
        st.sampled_from(
            [
                [],
                [{"ip": "203.0.113.1", "ipMode": "VIP"}],
                [{"ip": "203.0.113.2", "ipMode": "Proxy"}],
            ]
        )
    )
    return {
        "labels": draw(st.fixed_dictionaries({}, optional=LABELS)),
        "annotations": draw(st.fixed_dictionaries({}, optional=ANNOTATIONS)),
        "deletionTimestamp": draw(st.sampled_from([None, None, "2026-01-01T00:00:00Z"])),
        "creationTimestamp": draw(TIMES),
        "managedFields": draw(
            st.lists(
                st.sampled_from(["fairlead-claim", "kubectl"]).map(lambda name: {"manager": name})
            )
        ),
        "spec": {
            "type": kind,
            "selector": draw(st.sampled_from([None, {"app": "web"}])),
            "clusterIP": "10.96.0.1",
            "clusterIPs": draw(st.sampled_from([[], ["10.96.0.1"]])),
            "ports": [{"port": 80, "nodePort": 30080}],
            "externalTrafficPolicy": draw(st.sampled_from(["Local", "Cluster"])),
            "healthCheckNodePort": draw(st.sampled_from([0, 32000])),
            "sessionAffinity": draw(st.sampled_from(["None", "ClientIP"])),
            "externalIPs": draw(st.sampled_from([[], ["192.0.2.1", "203.0.113.2"]])),
            "internalTrafficPolicy": draw(st.sampled_from(["Local", "Cluster"])),
            "loadBalancerSourceRanges": draw(st.sampled_from([[], ["192.0.2.0/24"]])),
            "allocateLoadBalancerNodePorts": draw(st.booleans()),
        },
        "status": {
            "loadBalancer": {"ingress": held},
            "conditions": [{"type": "Other", "status": "True"}],
        },
        "slices": draw(st.lists(st.lists(ENDPOINTS, max_size=3), max_size=2)),
    }


NODE_BODIES = st.fixed_dictionaries(
    {
        "labels": st.fixed_dictionaries(
            {},
            optional={
                "node.kubernetes.io/exclude-from-external-load-balancers": st.just(""),
                "zone": st.just("a"),
            },
        ),
        "taints": st.lists(st.sampled_from(["ToBeDeletedByClusterAutoscaler", "busy"]), max_size=2),
        "leaving": st.booleans(),
        "created": TIMES,
        "claimed": st.sampled_from([[], ["203.0.113.1"]]),
    }
)
"""`claimed`: addresses that a kubelet has written before the Node's own."""


def objects(
    drawn: list[Any], nodes: list[Any]
) -> tuple[list[Service], list[EndpointSlice], list[Node]]:
    """Return the objects as they are decoded from responses of the API server."""
    decoded: tuple[list[Service], list[EndpointSlice], list[Node]] = ([], [], [])
    for number, body in enumerate(drawn):
        meta = {
            "name": f"web{number}",
            "namespace": "default",
            "uid": f"uid-{number}",
            "resourceVersion": str(number),
        }
        meta |= {
            key: body[key]
            for key in (
                *("labels", "annotations", "managedFields"),
                *("deletionTimestamp", "creationTimestamp"),
            )
        }
        decoded[0].append(
            msgspec.convert(
                {"metadata": meta, "spec": body["spec"], "status": body["status"]}, Service
            )
        )
        for at, endpoints in enumerate(body["slices"]):
            label = {"kubernetes.io/service-name": f"web{number}", "app": "web"}
            metadata = {
                "name": f"web{number}-{at}",
                "namespace": "default",
                "labels": label,
                "uid": "u",
            }
            body_ = {
                "metadata": metadata,
                "endpoints": endpoints,
                "ports": [{"name": "", "port": 8080}],
            }
            decoded[1].append(msgspec.convert(body_, EndpointSlice))
    for number, body in enumerate(nodes):
        gone = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if body["leaving"] else {}
        addresses = [
            {"type": "Hostname", "address": NODES[number]},
            *({"type": "InternalIP", "address": each} for each in body["claimed"]),
            {"type": "InternalIP", "address": f"192.0.2.{number}"},
        ]
        node = {
            "metadata": {
                "name": NODES[number],
                "labels": body["labels"],
                "creationTimestamp": body["created"],
                **gone,
            },
            "spec": {
                "podCIDRs": [f"10.244.{number}.0/24"],
                "taints": [{"key": key} for key in body["taints"]],
            },
            "status": {"addresses": addresses},
        }
        decoded[2].append(msgspec.convert(node, Node))
    return decoded


def state_of(
    decoded: tuple[list[Service], list[EndpointSlice], list[Node]], keep: Projection | None
) -> State:
    def through(projection: Callable[[Any], Any] | None, each: Any) -> dict[ObjectKey, Any]:
        kept = ((one, projection(one) if projection else one) for one in each)
        return {
            ObjectKey(one.metadata.namespace, one.metadata.name): left
            for one, left in kept
            if left is not None
        }

    state = State(())
    state.update_services(through(keep.service if keep else None, decoded[0]))
    state.update_slices(through(keep.slice if keep else None, decoded[1]))
    state.update_nodes(through(keep.node if keep else None, decoded[2]))
    return state


def plans(role: Projection, state: State, names: Any) -> dict[Any, Any]:
    """Return the plan of the role for these Services, with the text of each refusal."""
    if role is CONTROLLER:
        planned: Any = plan_controller(state, CONFIG, Ledger(), names)
    elif role is GATEWAY:
        planned = plan_gateway(state, CONFIG, names)
    else:
        planned = plan_node(state, NODES[0], names)
    return {
        key: str(each) if isinstance(each, Exception) else each for key, each in planned.items()
    }


@pytest.mark.parametrize("role", [CONTROLLER, GATEWAY, NODE], ids=["controller", "gateway", "node"])
@given(drawn=st.lists(services(), max_size=3), nodes=st.lists(NODE_BODIES, max_size=3))
def test_a_plan_of_the_stored_fields_equals_a_plan_of_all_fields(
    role: Projection, drawn: list[Any], nodes: list[Any]
) -> None:
    decoded = objects(drawn, nodes)
    names = [service.key for service in decoded[0]]
    assert plans(role, state_of(decoded, role), names) == plans(
        role, state_of(decoded, None), names
    )


def test_a_change_of_a_field_that_is_not_stored_is_not_reported() -> None:
    cache: ObjectCache[Node] = ObjectCache(of_node)
    for version, labels in enumerate(
        [
            {"zone": "a"},
            {"zone": "b"},
            {"node.kubernetes.io/exclude-from-external-load-balancers": ""},
        ]
    ):
        node = msgspec.convert(
            {"metadata": {"name": "node1", "labels": labels, "resourceVersion": str(version)}}, Node
        )
        cache.process(Item(ObjectKey("", "node1"), str(version), node))
        assert len(cache.take()) == (0 if version == 1 else 1)


def test_only_valid_addresses_of_a_node_are_stored() -> None:
    """The API server accepts any text as an address in the status of a Node."""
    written = [
        ("InternalIP", "node1.example"),
        ("InternalIP", "2001:DB8::1"),
        ("ExternalIP", "198.51.100.7"),
        ("Hostname", "198.51.100.8"),
        ("InternalIP", ""),
    ]
    addresses = [{"type": kind, "address": address} for kind, address in written]
    node = msgspec.convert(
        {"metadata": {"name": "node1"}, "status": {"addresses": addresses}}, Node
    )
    assert [each.address for each in of_node(node).status.addresses] == [
        "2001:db8::1",
        "198.51.100.7",
    ]


@pytest.mark.parametrize("role", [CONTROLLER, GATEWAY, NODE], ids=["controller", "gateway", "node"])
@pytest.mark.parametrize("projected", [True, False], ids=["stored fields", "all fields"])
def test_endpoints_of_slices_with_the_headless_label_get_no_traffic(
    role: Projection, projected: bool
) -> None:
    """Slices with the label are ignored, because nodes do not serve them. On a Service with a
    ClusterIP the label has no effect."""
    spec = {
        "type": "LoadBalancer",
        "clusterIPs": ["10.96.0.1"],
        "ports": [{"port": 80, "nodePort": 30080}],
    }
    meta = {"name": "web", "namespace": "default", "labels": {"service.kubernetes.io/headless": ""}}
    status = {"loadBalancer": {"ingress": [{"ip": "203.0.113.1", "ipMode": "VIP"}]}}
    service = msgspec.convert({"metadata": meta, "spec": spec, "status": status}, Service)
    node = {
        "metadata": {"name": NODES[0]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
    }

    def planned(headless: dict[str, str]) -> Any:
        labels = {"kubernetes.io/service-name": "web", **headless}
        body = {
            "metadata": {"name": "web-1", "namespace": "default", "labels": labels},
            "endpoints": [{"addresses": ["10.244.0.1"], "nodeName": NODES[0]}],
            "ports": [{"name": "", "port": 8080}],
        }
        decoded = ([service], [msgspec.convert(body, EndpointSlice)], [msgspec.convert(node, Node)])
        return plans(role, state_of(decoded, role if projected else None), [service.key])[
            service.key
        ]

    def receives(each: Any) -> bool:
        if role is NODE:
            return any(port.cluster_backends for port in each.ports)
        return any(member.weight for listener in each.listeners for member in listener.members)

    assert receives(planned({}))
    assert not receives(planned({"service.kubernetes.io/headless": ""}))
