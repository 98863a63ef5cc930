"""The fields of each kind, as types: Services, EndpointSlices, Nodes, Namespaces, Events, Leases.

Values only. Each Struct is one definition of the API reference and has its name: `PACKAGE` and the
name of the Struct make `io.k8s.api.core.v1.ServiceSpec`. Every field is optional; `validation`
checks required fields. The contents of a field declared as `AnyObject` are not checked. Pods have
their own module, `pod_fields`. Follows the API reference of Kubernetes 1.36.
"""

from typing import Any, ClassVar, Final

import msgspec

Strings = dict[str, str]
Quantities = dict[str, str | int | float]
AnyObject = dict[str, Any]
"""An object whose fields are not described. Never use plain Any: where a schema does not even
declare an object, kubectl (1.20 and 1.32) panics when it computes a patch of a field two levels
below."""

_INITIALISMS: Final = {
    "cidr": "CIDR",
    "cidrs": "CIDRs",
    "fqdn": "FQDN",
    "id": "ID",
    "ip": "IP",
    "ipc": "IPC",
    "ips": "IPs",
    "pid": "PID",
}


def json_name(name: str) -> str:
    """Return the name of a field in JSON: `cluster_ips` is `clusterIPs`."""
    first, *rest = name.split("_")
    return first + "".join(_INITIALISMS.get(word, word.capitalize()) for word in rest)


class Fields(msgspec.Struct, rename=json_name):
    """Base of all definitions."""

    PACKAGE: ClassVar[str] = "io.k8s.api.core.v1"


class Meta(Fields):
    """Base of the definitions that all groups share."""

    PACKAGE: ClassVar[str] = "io.k8s.apimachinery.pkg.apis.meta.v1"


class Discovery(Fields):
    """Base of the definitions of discovery.k8s.io."""

    PACKAGE: ClassVar[str] = "io.k8s.api.discovery.v1"


class OwnerReference(Meta):
    uid: str | None = None
    name: str | None = None
    kind: str | None = None
    api_version: str | None = None
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class ManagedFieldsEntry(Meta):
    manager: str | None = None
    operation: str | None = None
    api_version: str | None = None
    time: str | None = None
    fields_type: str | None = None
    fields_v1: AnyObject | None = None
    subresource: str | None = None


class ObjectMeta(Meta):
    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    generation: int | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    labels: Strings | None = None
    annotations: Strings | None = None
    finalizers: list[str] | None = None
    owner_references: list[OwnerReference] | None = None
    managed_fields: list[ManagedFieldsEntry] | None = None
    self_link: str | None = None


class Condition(Meta):
    type: str | None = None
    status: str | None = None
    reason: str | None = None
    message: str | None = None
    last_transition_time: str | None = None
    observed_generation: int | None = None


class KindFields(Fields):
    """Base of the kinds, with the fields that every object has."""

    api_version: str | None = None
    kind: str | None = None
    metadata: ObjectMeta | None = None


class ServicePort(Fields):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None
    target_port: int | str | None = None
    node_port: int | None = None
    app_protocol: str | None = None


class ClientIPConfig(Fields):
    timeout_seconds: int | None = None


class SessionAffinityConfig(Fields):
    client_ip: ClientIPConfig | None = None


class ServiceSpec(Fields):
    type: str | None = None
    ports: list[ServicePort] | None = None
    selector: Strings | None = None
    cluster_ip: str | None = None
    cluster_ips: list[str] | None = None
    external_ips: list[str] | None = None
    ip_families: list[str] | None = None
    ip_family_policy: str | None = None
    load_balancer_class: str | None = None
    load_balancer_ip: str | None = None
    load_balancer_source_ranges: list[str] | None = None
    external_name: str | None = None
    external_traffic_policy: str | None = None
    internal_traffic_policy: str | None = None
    traffic_distribution: str | None = None
    health_check_node_port: int | None = None
    session_affinity: str | None = None
    session_affinity_config: SessionAffinityConfig | None = None
    publish_not_ready_addresses: bool | None = None
    allocate_load_balancer_node_ports: bool | None = None


class PortStatus(Fields):
    port: int | None = None
    protocol: str | None = None
    error: str | None = None


class LoadBalancerIngress(Fields):
    ip: str | None = None
    hostname: str | None = None
    ip_mode: str | None = None
    ports: list[PortStatus] | None = None


class LoadBalancerStatus(Fields):
    ingress: list[LoadBalancerIngress] | None = None


class ServiceStatus(Fields):
    load_balancer: LoadBalancerStatus | None = None
    conditions: list[Condition] | None = None


class Service(KindFields):
    spec: ServiceSpec | None = None
    status: ServiceStatus | None = None


class ObjectReference(Fields):
    kind: str | None = None
    namespace: str | None = None
    name: str | None = None
    uid: str | None = None
    api_version: str | None = None
    resource_version: str | None = None
    field_path: str | None = None


class EndpointConditions(Discovery):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(Discovery):
    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    hostname: str | None = None
    target_ref: ObjectReference | None = None
    deprecated_topology: Strings | None = None
    node_name: str | None = None
    zone: str | None = None
    hints: AnyObject | None = None


class EndpointPort(Discovery):
    name: str | None = None
    protocol: str | None = None
    port: int | None = None
    app_protocol: str | None = None


class EndpointSlice(KindFields):
    PACKAGE: ClassVar[str] = Discovery.PACKAGE

    address_type: str | None = None
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


class Taint(Fields):
    key: str | None = None
    value: str | None = None
    effect: str | None = None
    time_added: str | None = None


class NodeSpec(Fields):
    pod_cidr: str | None = None
    pod_cidrs: list[str] | None = None
    provider_id: str | None = None
    unschedulable: bool | None = None
    taints: list[Taint] | None = None
    config_source: AnyObject | None = None
    external_id: str | None = None


class NodeAddress(Fields):
    type: str | None = None
    address: str | None = None


class NodeCondition(Fields):
    type: str | None = None
    status: str | None = None
    reason: str | None = None
    message: str | None = None
    last_heartbeat_time: str | None = None
    last_transition_time: str | None = None


class NodeStatus(Fields):
    addresses: list[NodeAddress] | None = None
    conditions: list[NodeCondition] | None = None
    capacity: Quantities | None = None
    allocatable: Quantities | None = None
    phase: str | None = None
    daemon_endpoints: AnyObject | None = None
    node_info: AnyObject | None = None
    images: list[AnyObject] | None = None
    volumes_in_use: list[str] | None = None
    volumes_attached: list[AnyObject] | None = None
    config: AnyObject | None = None
    runtime_handlers: list[AnyObject] | None = None
    features: AnyObject | None = None
    declared_features: list[str] | None = None


class Node(KindFields):
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class NamespaceSpec(Fields):
    finalizers: list[str] | None = None


class NamespaceCondition(Fields):
    type: str | None = None
    status: str | None = None
    reason: str | None = None
    message: str | None = None
    last_transition_time: str | None = None


class NamespaceStatus(Fields):
    phase: str | None = None
    conditions: list[NamespaceCondition] | None = None


class Namespace(KindFields):
    spec: NamespaceSpec | None = None
    status: NamespaceStatus | None = None


class EventSource(Fields):
    component: str | None = None
    host: str | None = None


class EventSeries(Fields):
    count: int | None = None
    last_observed_time: str | None = None


class Event(KindFields):
    involved_object: ObjectReference | None = None
    reason: str | None = None
    message: str | None = None
    source: EventSource | None = None
    first_timestamp: str | None = None
    last_timestamp: str | None = None
    count: int | None = None
    type: str | None = None
    event_time: str | None = None
    series: EventSeries | None = None
    action: str | None = None
    related: ObjectReference | None = None
    reporting_component: str | None = None
    reporting_instance: str | None = None


class CustomResourceDefinition(KindFields):
    PACKAGE: ClassVar[str] = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1"

    spec: AnyObject | None = None
    status: AnyObject | None = None


class LeaseSpec(Fields):
    PACKAGE: ClassVar[str] = "io.k8s.api.coordination.v1"

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None
    strategy: str | None = None
    preferred_holder: str | None = None


class ConfigMap(KindFields):
    data: dict[str, str] | None = None
    binary_data: dict[str, str] | None = None
    immutable: bool | None = None


class Lease(KindFields):
    PACKAGE: ClassVar[str] = LeaseSpec.PACKAGE

    spec: LeaseSpec | None = None
