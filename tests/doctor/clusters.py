"""Small clusters as facts, for tests of the doctor's rules."""

from collections.abc import Mapping
from typing import Any

import msgspec

from fairlead.config import Config, PoolConfig
from fairlead.doctor.facts import Facts, Process
from fairlead.doctor.objects import (
    Event,
    FieldsOwner,
    NetworkPolicy,
    OwnedMeta,
    OwnedService,
    PodTemplate,
    Reference,
    TemplateMeta,
    Workload,
    WorkloadSpec,
)
from fairlead.doctor.rules.control import SUCCESSES
from fairlead.kube.objects import (
    SERVICE_NAME_LABEL,
    Condition,
    Container,
    ContainerPort,
    Endpoint,
    EndpointConditions,
    EndpointPort,
    EndpointSlice,
    LoadBalancerIngress,
    LoadBalancerStatus,
    Node,
    NodeAddress,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    Pod,
    PodIP,
    PodSpec,
    PodStatus,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
)
from fairlead.kube.presence import Presence
from fairlead.plan.service import CLAIM_MANAGER, CLASS_ANNOTATION

NOW_S = 1_800_000_000.0
NOW = "2027-01-15T08:00:00Z"
OLD = "2027-01-15T07:00:00Z"
"""An hour before NOW."""
DIRECT = "fairlead.io/direct"
CONFIG = Config(default_class=DIRECT, pools=(PoolConfig("public", ("203.0.113.0/30",)),))


def make_service(
    name: str = "web",
    *,
    addresses: tuple[str, ...] = ("203.0.113.1",),
    ip_mode: Any = "VIP",
    class_: str = DIRECT,
    conditions: tuple[Condition, ...] = (),
    ingress: tuple[LoadBalancerIngress, ...] | None = None,
    meta: Mapping[str, Any] = {},
    **spec: Any,
) -> OwnedService:
    """Return a Service with policy Local. `class_`: the class of Fairlead that has claimed it;
    empty: none."""
    fields: dict[str, Any] = {
        "type": "LoadBalancer",
        "external_traffic_policy": "Local",
        "health_check_node_port": 32000,
        "selector": {"app": "web"},
        "ip_families": ("IPv4",),
        "ports": (ServicePort(80, target_port=8080, node_port=30080),),
    } | spec
    claim = (FieldsOwner(CLAIM_MANAGER),) if class_ else ()
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "default",
        "creation_timestamp": OLD,
        "managed_fields": claim,
        "annotations": {CLASS_ANNOTATION: class_} if class_ else {},
    }
    given = dict(meta)
    metadata["annotations"] |= given.pop("annotations", {})
    shown = tuple(LoadBalancerIngress(each, ip_mode=ip_mode) for each in addresses)
    return OwnedService(
        OwnedMeta(**(metadata | given)),
        ServiceSpec(**fields),
        ServiceStatus(LoadBalancerStatus(shown if ingress is None else ingress), conditions),
    )


def make_pod(
    name: str = "w1",
    node: str = "node1",
    *,
    ready: bool = True,
    since: str = OLD,
    labels: Mapping[str, str] = {"app": "web"},
    ports: tuple[ContainerPort, ...] = (ContainerPort(8080, "http"),),
    deleted: str | None = None,
    created: str = OLD,
    address: str = "10.244.1.2",
) -> Pod:
    condition = Condition("Ready", str(ready), last_transition_time=since)
    meta = ObjectMeta(
        name=name,
        namespace="default",
        labels=labels,
        deletion_timestamp=deleted,
        creation_timestamp=created,
    )
    return Pod(
        meta,
        PodSpec((Container("web", ports=ports),), node),
        PodStatus("Running", address, (PodIP(address),), (condition,)),
    )


def make_slice(*pods: Pod, service: str = "web", port: str = "") -> EndpointSlice:
    endpoints = tuple(
        Endpoint(
            (pod.status.pod_ip,),
            EndpointConditions(
                ready=_is_ready(pod) and not pod.metadata.deletion_timestamp,
                serving=_is_ready(pod),
                terminating=bool(pod.metadata.deletion_timestamp),
            ),
            pod.spec.node_name or None,
        )
        for pod in pods
    )
    meta = ObjectMeta(
        name=f"{service}-1", namespace="default", labels={SERVICE_NAME_LABEL: service}
    )
    return EndpointSlice(meta, "IPv4", endpoints, (EndpointPort(port, 8080),))


def make_node(name: str, number: int, labels: Mapping[str, str] = {}) -> Node:
    return Node(
        ObjectMeta(name=name, labels=labels),
        NodeSpec(f"10.244.{number}.0/24", (f"10.244.{number}.0/24",)),
        NodeStatus((NodeAddress("InternalIP", f"192.0.2.{number}"),)),
    )


def make_event(
    kind: str, name: str, reason: str, message: str, *, uid: str = "", time: str = OLD
) -> Event:
    """Return a Warning, or an Event of type Normal if a controller reports a success by it."""
    return Event(
        ObjectMeta(name=f"{name}.1", namespace="default", creation_timestamp=OLD),
        Reference(kind, "default", name, uid),
        "Normal" if reason in SUCCESSES else "Warning",
        reason,
        message,
        time,
    )


def make_process(role: str, name: str, *, alive: bool = True, **fields: Any) -> Process:
    values = {"ready": True} | fields
    return Process(Presence(role, name, "0.1.0", OLD, **values), alive, OLD)


def make_workload(labels: Mapping[str, str], replicas: int, created: str = NOW) -> Workload:
    spec = WorkloadSpec(replicas, PodTemplate(TemplateMeta(labels)))
    meta = ObjectMeta(name="web", namespace="default", creation_timestamp=created)
    return Workload(meta, spec)


def policy(**spec: Any) -> NetworkPolicy:
    """Return a NetworkPolicy from the fields of its spec, as in JSON."""
    fields = {"metadata": {"name": "inside", "namespace": "default"}, "spec": spec}
    return msgspec.convert(fields, NetworkPolicy)


def healthy(*services: OwnedService, pods: tuple[Pod, ...] | None = None, **facts: Any) -> Facts:
    """Return a cluster of three nodes without a fault, or with the given parts."""
    pods = (make_pod(), make_pod("w2", "node2", address="10.244.2.2")) if pods is None else pods
    services = services or (make_service(),)
    fields: dict[str, Any] = {
        "now_s": NOW_S,
        "services": services,
        "pods": pods,
        "slices": tuple(make_slice(*pods, service=each.metadata.name) for each in services),
        "nodes": tuple(make_node(f"node{number}", number) for number in (1, 2, 3)),
        "config": CONFIG,
        "processes": (
            make_process("controller", "c1"),
            make_process("gateway", "gw1"),
            make_process("gateway", "gw2"),
        ),
    }
    return Facts(**(fields | facts))


def _is_ready(pod: Pod) -> bool:
    return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions)
