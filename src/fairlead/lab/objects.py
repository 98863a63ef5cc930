"""The Kubernetes objects as the lab reads and writes them: the fields that a kubelet, a scheduler
and an endpoint controller need.

Fairlead's own objects (`kube.objects`) contain only the fields that Fairlead reads, so that large
clusters stay cheap. A control plane reads more of a Pod and writes whole EndpointSlices. Field
meanings follow the API reference of core/v1 and discovery.k8s.io/v1.
"""

from collections.abc import Mapping

import msgspec

from fairlead.kube.objects import (
    Condition,
    Container,
    EndpointConditions,
    EndpointPort,
    Fields,
    ObjectMeta,
    PodIP,
    Resource,
)

READY_ANNOTATION = "lab.fairlead.io/ready"
"""On a Pod: the value "false" makes its readiness probe fail."""


class OwnerReference(Fields, frozen=True):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False
    block_owner_deletion: bool = False


class Meta(ObjectMeta, frozen=True):
    owner_references: tuple[OwnerReference, ...] = ()
    deletion_grace_period_seconds: int | None = None


class PodSpec(Fields, frozen=True):
    containers: tuple[Container, ...] = ()
    node_name: str = ""
    node_selector: Mapping[str, str] = msgspec.field(default_factory=dict)
    host_network: bool = False
    termination_grace_period_seconds: int | None = None


class PodStatus(Fields, frozen=True):
    phase: str = ""
    pod_ips: tuple[PodIP, ...] = msgspec.field(default=(), name="podIPs")
    conditions: tuple[Condition, ...] = ()


class Pod(Fields, frozen=True):
    metadata: Meta
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def ready(self) -> bool:
        """Whether its kubelet reports it as ready."""
        return any(
            condition.type == "Ready" and condition.status == "True"
            for condition in self.status.conditions
        )

    @property
    def finished(self) -> bool:
        """Whether it has ended and will not run again."""
        return self.status.phase in ("Succeeded", "Failed")


class NodeSpec(Fields, frozen=True):
    unschedulable: bool = False


class Node(Fields, frozen=True):
    metadata: Meta
    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)


class TargetReference(Fields, frozen=True):
    kind: str
    namespace: str
    name: str
    uid: str


class SliceEndpoint(Fields, frozen=True):
    addresses: tuple[str, ...]
    conditions: EndpointConditions
    node_name: str | None = None
    target_ref: TargetReference | None = None


class Slice(Fields, frozen=True):
    metadata: Meta
    address_type: str
    endpoints: tuple[SliceEndpoint, ...] | None = ()
    ports: tuple[EndpointPort, ...] | None = ()


class EndpointAddress(Fields, frozen=True):
    ip: str
    node_name: str | None = None
    target_ref: TargetReference | None = None


class EndpointSubset(Fields, frozen=True):
    """Addresses that have the same ports."""

    addresses: tuple[EndpointAddress, ...] = ()
    not_ready_addresses: tuple[EndpointAddress, ...] = ()
    ports: tuple[EndpointPort, ...] = ()


class Endpoints(Fields, frozen=True):
    """The predecessor of EndpointSlices; `kubectl describe service` before 1.31 reads it."""

    metadata: Meta
    subsets: tuple[EndpointSubset, ...] | None = ()


PODS = Resource("v1", "Pod", "pods", True, Pod)
NODES = Resource("v1", "Node", "nodes", False, Node)
ENDPOINTS = Resource("v1", "Endpoints", "endpoints", True, Endpoints)
SLICES = Resource("discovery.k8s.io/v1", "EndpointSlice", "endpointslices", True, Slice)
