"""Functions that create the objects of small clusters for tests."""

from collections.abc import Collection, Mapping, Sequence

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import (
    Endpoint,
    EndpointConditions,
    EndpointPort,
    EndpointSlice,
    Node,
    ObjectMeta,
    Service,
    ServiceMeta,
    ServicePort,
    ServiceSpec,
)
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.announce import AnnouncePlan
from fairlead.plan.balancer import confirmed, plan_unconfirmed
from fairlead.plan.classes import ServiceClass
from fairlead.plan.cluster import plan_gateway_unconfirmed
from fairlead.plan.members import VerdictOf
from fairlead.plan.terms import ServiceContext
from fairlead.plan.view import Cluster

EndpointRow = tuple[str, str, str]
"""(address, node, state). The state is one of ready, unready, serving (neither ready nor
terminating), draining (serving and terminating), dying (only terminating), leaving (terminating,
without the condition serving), unknown (without conditions)."""

CONDITIONS = {
    "ready": EndpointConditions(ready=True, serving=True, terminating=False),
    "unready": EndpointConditions(ready=False, serving=False, terminating=False),
    "serving": EndpointConditions(ready=False, serving=True, terminating=False),
    "draining": EndpointConditions(ready=False, serving=True, terminating=True),
    "dying": EndpointConditions(ready=False, serving=False, terminating=True),
    "leaving": EndpointConditions(ready=False, terminating=True),
    "unknown": EndpointConditions(),
}


def make_service(
    name: str = "web", *, annotations: dict[str, str] | None = None, **spec: object
) -> Service:
    """Return a Service with policy Local and port 80. `spec` replaces fields of its spec."""
    fields: dict[str, object] = {
        "type": "LoadBalancer",
        "external_traffic_policy": "Local",
        "health_check_node_port": 32000,
        "cluster_ips": ("10.96.0.10",),
        "ports": (ServicePort(80, node_port=30080),),
    } | spec
    meta = ServiceMeta(
        name=name, namespace="default", uid=f"uid-{name}", annotations=annotations or {}
    )
    return Service(meta, ServiceSpec(**fields))  # type: ignore[arg-type]


def make_slice(
    rows: Sequence[EndpointRow],
    *,
    name: str = "web-1",
    ports: Sequence[tuple[str, int]] = (("", 8080),),
    family: str = "IPv4",
) -> EndpointSlice:
    """Return an EndpointSlice of Service web."""
    endpoints = tuple(
        Endpoint((address,), CONDITIONS[state], node or None) for address, node, state in rows
    )
    meta = ObjectMeta(name=name, namespace="default", labels={"kubernetes.io/service-name": "web"})
    return EndpointSlice(meta, family, endpoints, tuple(EndpointPort(n, p) for n, p in ports))


def plan_gateway(
    cluster: Cluster, config: Config, keys: Collection[ServiceKey], host: str = ""
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """Return the plan of a gateway on this host, computed from scratch, with members confirmed by
    the cluster's verdicts."""
    announcing = AnnouncePlan(config, host)
    return {
        key: each if isinstance(each, Refused) else confirmed(each, cluster.verdict_of)
        for key, each in plan_gateway_unconfirmed(cluster, config, keys, announcing).items()
    }


def plan_at_gateway(
    service: Service,
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
    addresses: Sequence[str],
    class_: ServiceClass,
    verdict_of: VerdictOf,
) -> LoadBalancer:
    """Return the plan of one Service at a gateway with these verdicts."""
    context = ServiceContext(service, Config(), nodes, addresses)
    return confirmed(plan_unconfirmed(context, slices, class_, at_gateway=True), verdict_of)
