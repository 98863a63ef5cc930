"""The Kubernetes objects that Fairlead reads, with only the fields that it reads.

In: JSON from the API server or manifests. Out: frozen Structs. Unknown fields are skipped while
decoding and never created, which saves most of the cost of a large cluster (managedFields alone are
half of an object). Field meanings and defaults follow the API reference of core/v1 and
discovery.k8s.io/v1. A field that the API server defaults has the same default here, so that a
manifest that was never sent to a server has the same values."""

from collections.abc import Mapping
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from fairlead.model import Family, ServiceKey
from fairlead.model import Protocol as TransportProtocol

CLEANUP_FINALIZER = "service.kubernetes.io/load-balancer-cleanup"
SERVICE_NAME_LABEL = "kubernetes.io/service-name"
SERVICE_PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"
"""Label of an EndpointSlice that is only for DNS. On a Service it has no effect."""
SERVED_SLICES = f"!{HEADLESS_LABEL}"
"""Selects the EndpointSlices that a service proxy watches, as kube-proxy's selector does."""
ANNOUNCE_LABEL = "fairlead.io/announce"
"""On a Node. With the value `leave`, the gateway on the Node gives its addresses away."""
EXCLUDE_LABEL = "node.kubernetes.io/exclude-from-external-load-balancers"
ZONE_LABEL = "topology.kubernetes.io/zone"
AUTOSCALER_TAINT = "ToBeDeletedByClusterAutoscaler"
SOURCE_RANGES_ANNOTATION = "service.beta.kubernetes.io/load-balancer-source-ranges"


class ObjectKey(NamedTuple):
    """Identity of an object within its kind; `namespace` is empty for kinds that have none."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Fields(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """Base class: camelCase names in JSON, unknown fields are skipped."""


class ObjectMeta(Fields, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
    deletion_timestamp: str | None = None
    creation_timestamp: str | None = None

    @property
    def version(self) -> int:
        """The resourceVersion as a number that increases (KEP-5504); 0 if it is not a number."""
        return version_number(self.resource_version)


class FieldsManager(Fields, frozen=True):
    """A field manager of an object (KEP-555). The fields that it owns are not read."""

    manager: str = ""


class ServiceMeta(ObjectMeta, frozen=True):
    managed_fields: tuple[FieldsManager, ...] = ()


def version_number(text: str) -> int:
    """Return a resourceVersion as a number; 0 if it is not a number. It has at most 128 bits, which
    are 39 digits."""
    return int(text) if len(text) <= 39 and text.isascii() and text.isdecimal() else 0


class ServicePort(Fields, frozen=True):
    port: int
    name: str = ""
    protocol: TransportProtocol = "TCP"
    target_port: int | str | None = None
    node_port: int = 0
    app_protocol: str = ""


class ClientIPConfig(Fields, frozen=True):
    timeout_seconds: int = 10800


class SessionAffinityConfig(Fields, frozen=True):
    client_ip: ClientIPConfig = msgspec.field(default_factory=ClientIPConfig, name="clientIP")


class ServiceSpec(Fields, frozen=True):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"] = "ClusterIP"
    ports: tuple[ServicePort, ...] = ()
    selector: Mapping[str, str] | None = None
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    cluster_ips: tuple[str, ...] = msgspec.field(default=(), name="clusterIPs")
    external_ips: tuple[str, ...] = msgspec.field(default=(), name="externalIPs")
    ip_families: tuple[Family, ...] = ()
    ip_family_policy: str | None = None
    load_balancer_class: str | None = None
    load_balancer_ip: str = msgspec.field(default="", name="loadBalancerIP")
    load_balancer_source_ranges: tuple[str, ...] | None = None
    external_traffic_policy: Literal["Cluster", "Local", ""] = "Cluster"
    internal_traffic_policy: Literal["Cluster", "Local"] | None = "Cluster"
    health_check_node_port: int = 0
    session_affinity: Literal["None", "ClientIP"] = "None"
    session_affinity_config: SessionAffinityConfig | None = None
    publish_not_ready_addresses: bool = False
    allocate_load_balancer_node_ports: bool | None = None


class PortStatus(Fields, frozen=True):
    """The status of one port.

    The API server validates none of these fields, so any text is accepted: a value that another
    controller writes on its Services must not make them undecodable."""

    port: int = 0
    protocol: str = "TCP"
    error: str | None = None


class LoadBalancerIngress(Fields, frozen=True):
    ip: str = ""
    hostname: str = ""
    ip_mode: Literal["VIP", "Proxy"] | None = None
    ports: tuple[PortStatus, ...] = ()


class LoadBalancerStatus(Fields, frozen=True):
    ingress: tuple[LoadBalancerIngress, ...] = ()


class Condition(Fields, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    observed_generation: int = 0


class ServiceStatus(Fields, frozen=True):
    load_balancer: LoadBalancerStatus = msgspec.field(default_factory=LoadBalancerStatus)
    conditions: tuple[Condition, ...] = ()


class Service(Fields, frozen=True):
    metadata: ServiceMeta
    spec: ServiceSpec = msgspec.field(default_factory=ServiceSpec)
    status: ServiceStatus = msgspec.field(default_factory=ServiceStatus)

    @property
    def key(self) -> ServiceKey:
        return ServiceKey(self.metadata.namespace, self.metadata.name)


class EndpointConditions(Fields, frozen=True):
    """The conditions of an endpoint, tri-state in JSON. Read them through `Endpoint.ready`,
    `.serving` and `.terminating`.

    Missing values stand for true, true and false (EndpointSlice API reference)."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Hint(Fields, frozen=True):
    """The name of a zone or a node."""

    name: str


class EndpointHints(Fields, frozen=True):
    """The zones or nodes whose clients should use an endpoint, provided that every client can be
    served in this way (KEP-2433, KEP-3015)."""

    for_zones: tuple[Hint, ...] | None = None
    for_nodes: tuple[Hint, ...] | None = None


class Endpoint(Fields, frozen=True):
    addresses: tuple[str, ...]
    conditions: EndpointConditions = msgspec.field(default_factory=EndpointConditions)
    node_name: str | None = None
    hints: EndpointHints | None = None

    @property
    def ready(self) -> bool:
        return self.conditions.ready is not False

    @property
    def serving(self) -> bool:
        return self.conditions.serving is not False

    @property
    def terminating(self) -> bool:
        return bool(self.conditions.terminating)

    @property
    def state(self) -> tuple[bool, bool, bool]:
        """Whether it is ready, serving, terminating. One property, because it is read for every
        endpoint of the cluster."""
        conditions = self.conditions
        return (
            conditions.ready is not False,
            conditions.serving is not False,
            bool(conditions.terminating),
        )


class EndpointPort(Fields, frozen=True):
    name: str | None = ""
    port: int | None = None
    protocol: TransportProtocol = "TCP"


class EndpointSlice(Fields, frozen=True):
    metadata: ObjectMeta
    address_type: str = "IPv4"
    endpoints: tuple[Endpoint, ...] | None = ()
    ports: tuple[EndpointPort, ...] | None = ()

    @property
    def service(self) -> ServiceKey | None:
        """The Service that the endpoints of this slice belong to, by the label.

        None for a slice that names no Service, and for a slice with the label of headless Services:
        service proxies do not watch it, so no node would answer."""
        labels = self.metadata.labels
        name = labels.get(SERVICE_NAME_LABEL) if HEADLESS_LABEL not in labels else None
        return ServiceKey(self.metadata.namespace, name) if name else None


class Endpoints(Fields, frozen=True):
    """The addresses of a Service as they were before EndpointSlices, which control planes make of
    them. Only the control plane and `kube.mirrored` read the rest."""

    metadata: ObjectMeta


class Taint(Fields, frozen=True):
    key: str
    effect: str = ""
    value: str = ""


class NodeSpec(Fields, frozen=True):
    pod_cidr: str = msgspec.field(default="", name="podCIDR")
    pod_cidrs: tuple[str, ...] = msgspec.field(default=(), name="podCIDRs")
    taints: tuple[Taint, ...] = ()


class NodeAddress(Fields, frozen=True):
    type: str
    address: str


class NodeStatus(Fields, frozen=True):
    addresses: tuple[NodeAddress, ...] = ()


class Node(Fields, frozen=True):
    """A node. Heartbeats change only its conditions, which are not read: the value stays equal."""

    metadata: ObjectMeta
    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)


class ContainerPort(Fields, frozen=True):
    container_port: int
    name: str = ""
    protocol: TransportProtocol = "TCP"


class Container(Fields, frozen=True):
    name: str
    image: str = ""
    ports: tuple[ContainerPort, ...] = ()


class PodSpec(Fields, frozen=True):
    containers: tuple[Container, ...] = ()
    node_name: str = ""
    host_network: bool = False
    termination_grace_period_seconds: int | None = None


class PodIP(Fields, frozen=True):
    ip: str


class PodStatus(Fields, frozen=True):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    pod_ips: tuple[PodIP, ...] = msgspec.field(default=(), name="podIPs")
    conditions: tuple[Condition, ...] = ()


class Pod(Fields, frozen=True):
    metadata: ObjectMeta
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class Namespace(Fields, frozen=True):
    metadata: ObjectMeta


class ConfigMap(Fields, frozen=True):
    metadata: ObjectMeta
    data: Mapping[str, str] = msgspec.field(default_factory=dict)


class Object(Protocol):
    """The attribute that all objects have."""

    @property
    def metadata(self) -> ObjectMeta: ...


ObjectT = TypeVar("ObjectT", bound=Object)


class Resource(NamedTuple, Generic[ObjectT]):
    """A kind in the API: its path, and the type into which its objects are decoded."""

    group_version: str
    kind: str
    plural: str
    namespaced: bool
    type: type[ObjectT]

    def path(self, namespace: str = "", name: str = "") -> str:
        """Return the URL path of the collection (of one namespace or all) or of one object."""
        prefix = (
            f"/api/{self.group_version}"
            if "/" not in self.group_version
            else f"/apis/{self.group_version}"
        )
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{prefix}{scope}/{self.plural}" + (f"/{name}" if name else "")


SERVICES = Resource("v1", "Service", "services", True, Service)
ENDPOINT_SLICES = Resource(
    "discovery.k8s.io/v1", "EndpointSlice", "endpointslices", True, EndpointSlice
)
ENDPOINTS = Resource("v1", "Endpoints", "endpoints", True, Endpoints)
NODES = Resource("v1", "Node", "nodes", False, Node)
PODS = Resource("v1", "Pod", "pods", True, Pod)
NAMESPACES = Resource("v1", "Namespace", "namespaces", False, Namespace)
CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps", True, ConfigMap)
CONFIGURATION = ObjectKey("fairlead-system", "fairlead")
CONFIGURATION_FILE = "fairlead.yaml"
"""The key of the ConfigMap that holds the configuration of all roles, in the Helm chart and the
manifests."""
