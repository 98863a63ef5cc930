"""The Kubernetes objects that only the doctor reads: owners of fields, Events, NetworkPolicies, the
templates of workloads, and reviews of access.

In: JSON from the API server. Out: frozen Structs, as in `kube.objects`. Pure. A role keeps all
objects of a cluster in memory and decodes few fields; the doctor reads each object once. Field
meanings follow the API reference of core/v1, apps/v1, networking.k8s.io/v1 and
authorization.k8s.io/v1."""

from collections.abc import Mapping
from typing import Any

import msgspec

from fairlead.config import LabelSelector
from fairlead.kube.objects import (
    Fields,
    FieldsManager,
    ObjectMeta,
    Resource,
    Service,
    ServiceMeta,
)


class FieldsOwner(FieldsManager, frozen=True):
    """A field manager with the fields that it owns (FieldsV1)."""

    time: str = ""
    subresource: str = ""
    fields_v1: Mapping[str, Any] = msgspec.field(default_factory=dict, name="fieldsV1")


class OwnedMeta(ServiceMeta, frozen=True):
    managed_fields: tuple[FieldsOwner, ...] = ()


class OwnedService(Service, frozen=True):
    """A Service with the owners of its fields."""

    metadata: OwnedMeta

    @property
    def publishers(self) -> tuple[FieldsOwner, ...]:
        """The managers that own addresses in `status.loadBalancer`."""
        return tuple(
            each
            for each in self.metadata.managed_fields
            if "f:ingress" in each.fields_v1.get("f:status", {}).get("f:loadBalancer", {})
        )


class Reference(Fields, frozen=True):
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""


class Event(Fields, frozen=True):
    metadata: ObjectMeta
    involved_object: Reference = msgspec.field(default_factory=Reference)
    type: str = ""
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None

    @property
    def time(self) -> str:
        return self.last_timestamp or self.event_time or self.metadata.creation_timestamp or ""


class TemplateMeta(Fields, frozen=True):
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)


class PodTemplate(Fields, frozen=True):
    metadata: TemplateMeta = msgspec.field(default_factory=TemplateMeta)


class WorkloadSpec(Fields, frozen=True):
    replicas: int | None = None
    template: PodTemplate = msgspec.field(default_factory=PodTemplate)


class Workload(Fields, frozen=True):
    """A Deployment, StatefulSet or DaemonSet. A DaemonSet has no replicas."""

    metadata: ObjectMeta
    spec: WorkloadSpec = msgspec.field(default_factory=WorkloadSpec)


class IPBlock(Fields, frozen=True):
    cidr: str
    except_: tuple[str, ...] | None = msgspec.field(default=None, name="except")


class PolicyPeer(Fields, frozen=True):
    """A source. Without an `ip_block` it selects pods, by selectors that are not read."""

    ip_block: IPBlock | None = None


class PolicyPort(Fields, frozen=True):
    """A port of a rule. `port`: a number, or the name of a container port; None: all ports."""

    protocol: str = "TCP"
    port: int | str | None = None
    end_port: int | None = None


class IngressRule(Fields, frozen=True):
    from_: tuple[PolicyPeer, ...] | None = msgspec.field(default=None, name="from")
    ports: tuple[PolicyPort, ...] | None = None


class PolicySpec(Fields, frozen=True):
    pod_selector: LabelSelector = msgspec.field(default_factory=LabelSelector)
    policy_types: tuple[str, ...] | None = None
    ingress: tuple[IngressRule, ...] | None = None


class NetworkPolicy(Fields, frozen=True):
    metadata: ObjectMeta
    spec: PolicySpec = msgspec.field(default_factory=PolicySpec)


class ServiceAccount(Fields, frozen=True):
    metadata: ObjectMeta


class ReviewStatus(Fields, frozen=True):
    allowed: bool = False


class AccessReview(Fields, frozen=True):
    """A SubjectAccessReview: whether the API server allows a request of a user. It is not
    stored."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    status: ReviewStatus = msgspec.field(default_factory=ReviewStatus)


OWNED_SERVICES = Resource("v1", "Service", "services", True, OwnedService)
EVENTS = Resource("v1", "Event", "events", True, Event)
WORKLOADS = tuple(
    Resource("apps/v1", kind, f"{kind.lower()}s", True, Workload)
    for kind in ("Deployment", "StatefulSet", "DaemonSet")
)
NETWORK_POLICIES = Resource(
    "networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", True, NetworkPolicy
)
SERVICE_ACCOUNTS = Resource("v1", "ServiceAccount", "serviceaccounts", True, ServiceAccount)
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews", False, AccessReview
)
