"""The types of the fields that the server works with, and the names of those that a kind has.

In: an object as decoded. Out: ApiFailure 400 if a field has the wrong type, in the words of the API server's decoder, and
the list of fields that the kind does not know, which `fieldValidation=Strict` refuses. Field names are those of the API
reference; what lies below a field declared as Any is neither checked nor judged.
"""

from collections.abc import Iterator
from typing import Any, Final, get_args, get_origin

import msgspec

from fairlead.lab.apiserver.failure import Object, bad_request
from fairlead.lab.apiserver.kinds import ENDPOINT_SLICES, LEASES, NODES, PODS, SERVICES, Kind

Strings = dict[str, str]


class Wire(msgspec.Struct, rename="camel"):
    """Base: field names in camel case, everything optional."""


class OwnerReference(Wire):
    uid: str | None = None
    name: str | None = None
    kind: str | None = None
    api_version: str | None = None
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class Metadata(Wire):
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
    managed_fields: Any = None
    self_link: str | None = None


class Plain(Wire):
    api_version: str | None = None
    kind: str | None = None
    metadata: Metadata | None = None


class ServicePort(Wire):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None
    target_port: int | str | None = None
    node_port: int | None = None
    app_protocol: str | None = None


class ClientIP(Wire):
    timeout_seconds: int | None = None


class AffinityConfig(Wire):
    client_ip: ClientIP | None = msgspec.field(default=None, name="clientIP")


class ServiceSpec(Wire):
    type: str | None = None
    ports: list[ServicePort] | None = None
    selector: Strings | None = None
    cluster_ip: str | None = msgspec.field(default=None, name="clusterIP")
    cluster_ips: list[str] | None = msgspec.field(default=None, name="clusterIPs")
    external_ips: list[str] | None = msgspec.field(default=None, name="externalIPs")
    ip_families: list[str] | None = None
    ip_family_policy: str | None = None
    load_balancer_class: str | None = None
    load_balancer_ip: str | None = msgspec.field(default=None, name="loadBalancerIP")
    load_balancer_source_ranges: list[str] | None = None
    external_name: str | None = None
    external_traffic_policy: str | None = None
    internal_traffic_policy: str | None = None
    traffic_distribution: str | None = None
    health_check_node_port: int | None = None
    session_affinity: str | None = None
    session_affinity_config: AffinityConfig | None = None
    publish_not_ready_addresses: bool | None = None
    allocate_load_balancer_node_ports: bool | None = None


class PortStatus(Wire):
    port: int | None = None
    protocol: str | None = None
    error: str | None = None


class Ingress(Wire):
    ip: str | None = None
    hostname: str | None = None
    ip_mode: str | None = None
    ports: list[PortStatus] | None = None


class LoadBalancerStatus(Wire):
    ingress: list[Ingress] | None = None


class Condition(Wire):
    type: str | None = None
    status: str | None = None
    reason: str | None = None
    message: str | None = None
    last_transition_time: str | None = None
    last_heartbeat_time: str | None = None
    last_probe_time: str | None = None
    observed_generation: int | None = None


class ServiceStatus(Wire):
    load_balancer: LoadBalancerStatus | None = None
    conditions: list[Condition] | None = None


class Service(Plain):
    spec: ServiceSpec | None = None
    status: ServiceStatus | None = None


class EndpointConditions(Wire):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(Wire):
    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    hostname: str | None = None
    target_ref: Any = None
    deprecated_topology: Strings | None = None
    node_name: str | None = None
    zone: str | None = None
    hints: Any = None


class EndpointPort(Wire):
    name: str | None = None
    protocol: str | None = None
    port: int | None = None
    app_protocol: str | None = None


class EndpointSlice(Plain):
    address_type: str | None = None
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


class Taint(Wire):
    key: str | None = None
    value: str | None = None
    effect: str | None = None
    time_added: str | None = None


class NodeSpec(Wire):
    pod_cidr: str | None = msgspec.field(default=None, name="podCIDR")
    pod_cidrs: list[str] | None = msgspec.field(default=None, name="podCIDRs")
    provider_id: str | None = msgspec.field(default=None, name="providerID")
    unschedulable: bool | None = None
    taints: list[Taint] | None = None
    config_source: Any = None
    external_id: str | None = msgspec.field(default=None, name="externalID")


class Node(Plain):
    spec: NodeSpec | None = None
    status: dict[str, Any] | None = None


class ContainerPort(Wire):
    name: str | None = None
    container_port: int | None = None
    protocol: str | None = None
    host_port: int | None = None
    host_ip: str | None = msgspec.field(default=None, name="hostIP")


class Container(msgspec.Struct):
    """Only what is worked with; a container has many more fields, and they are not judged."""

    name: str | None = None
    image: str | None = None
    ports: list[ContainerPort] | None = None


class PodSpec(Container):
    """As with containers: the pod's many other fields are kept and not judged."""

    nodeName: str | None = None
    containers: list[Container] | None = None
    initContainers: list[Container] | None = None
    terminationGracePeriodSeconds: int | None = None


class Pod(Plain):
    spec: PodSpec | None = None
    status: dict[str, Any] | None = None


class LeaseSpec(Wire):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None
    strategy: str | None = None
    preferred_holder: str | None = None


class Lease(Plain):
    spec: LeaseSpec | None = None


_TYPES: Final[dict[Kind, type[Plain]]] = {
    SERVICES: Service,
    ENDPOINT_SLICES: EndpointSlice,
    NODES: Node,
    PODS: Pod,
    LEASES: Lease,
}
_OPEN: Final = (Container, PodSpec)
"""Types that list only some of their fields, so nothing unknown can be told about them."""


def check_types(kind: Kind, obj: Object) -> None:
    """Raises ApiFailure 400 if a field that the server works with has the wrong type."""
    try:
        msgspec.convert(obj, _TYPES.get(kind, Plain))
    except msgspec.ValidationError as error:
        told = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: json: cannot unmarshal: {error}'
        raise bad_request(told) from error


def unknown_fields(kind: Kind, obj: Object) -> list[str]:
    """The paths of the fields that the kind does not have, as the API server tells them: `spec.foo`."""
    return list(_unknown(_TYPES[kind], obj, "")) if kind in _TYPES else []


def _unknown(of: type[msgspec.Struct], value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    known = {field.encode_name: field.type for field in msgspec.structs.fields(of)}
    for name, below in value.items():
        here = f"{path}.{name}" if path else name
        if name not in known:
            if of not in _OPEN:
                yield here
            continue
        struct, is_list = _struct_in(known[name])
        if struct is None:
            continue
        for place, item in enumerate(below if is_list and isinstance(below, list) else [below]):
            yield from _unknown(struct, item, f"{here}[{place}]" if is_list else here)


def _struct_in(declared: Any) -> tuple[type[msgspec.Struct] | None, bool]:
    """The Struct that a field holds, and whether it holds a list of them."""
    for option in get_args(declared) or (declared,):
        if get_origin(option) is list:
            inner = get_args(option)[0]
            return (inner, True) if isinstance(inner, type) and issubclass(inner, msgspec.Struct) else (None, True)
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return option, False
    return None, False
