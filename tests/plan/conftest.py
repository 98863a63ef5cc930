"""Makers of small clusters."""

from collections.abc import Callable, Sequence

import pytest

from fairlead.kube.objects import (
    Endpoint,
    EndpointConditions,
    EndpointPort,
    EndpointSlice,
    Node,
    NodeAddress,
    NodeStatus,
    ObjectMeta,
    Service,
    ServicePort,
    ServiceSpec,
)

EndpointRow = tuple[str, str, str]
"""(address, node, state) with state one of ready, unready, draining (serving, terminating), dying (terminating only)."""

CONDITIONS = {
    "ready": EndpointConditions(ready=True, serving=True, terminating=False),
    "unready": EndpointConditions(ready=False, serving=False, terminating=False),
    "draining": EndpointConditions(ready=False, serving=True, terminating=True),
    "dying": EndpointConditions(ready=False, serving=False, terminating=True),
    "unknown": EndpointConditions(),
}


@pytest.fixture
def make_service() -> Callable[..., Service]:
    def make(name: str = "web", *, annotations: dict[str, str] | None = None, **spec: object) -> Service:
        fields: dict[str, object] = {
            "type": "LoadBalancer",
            "external_traffic_policy": "Local",
            "health_check_node_port": 32000,
            "cluster_ips": ("10.96.0.10",),
            "ports": (ServicePort(80, node_port=30080),),
        } | spec
        meta = ObjectMeta(name=name, namespace="default", uid=f"uid-{name}", annotations=annotations or {})
        return Service(meta, ServiceSpec(**fields))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_slice() -> Callable[..., EndpointSlice]:
    def make(
        rows: Sequence[EndpointRow],
        *,
        name: str = "web-1",
        ports: Sequence[tuple[str, int]] = (("", 8080),),
        family: str = "IPv4",
    ) -> EndpointSlice:
        endpoints = tuple(Endpoint((address,), CONDITIONS[state], node or None) for address, node, state in rows)
        meta = ObjectMeta(name=name, namespace="default", labels={"kubernetes.io/service-name": "web"})
        return EndpointSlice(meta, family, endpoints, tuple(EndpointPort(n, p) for n, p in ports))

    return make


@pytest.fixture
def nodes() -> dict[str, Node]:
    return {
        name: Node(
            ObjectMeta(name=name),
            status=NodeStatus((NodeAddress("InternalIP", f"192.0.2.{20 + i}"), NodeAddress("InternalIP", f"2001:db8:1::{i}"))),
        )
        for i, name in enumerate(("node1", "node2", "node3", "node4"), start=1)
    }
