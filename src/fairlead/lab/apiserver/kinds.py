"""The kinds that the API server serves: where each lives in the API, and by which fields it can be selected.

A table and look-ups in it; no object is touched here. Group, version, short names and selectable fields are those of
the Kubernetes API reference.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

FieldPath = tuple[str, ...]


class Kind(msgspec.Struct, frozen=True, eq=False):
    """One kind of object. `fields` are those that a fieldSelector may name, besides the object's name and namespace."""

    group: str
    version: str
    kind: str
    plural: str
    singular: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    has_status: bool = False
    categories: tuple[str, ...] = ()
    fields: Mapping[str, FieldPath] = {}

    @property
    def group_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """Its name in messages: `services`, `leases.coordination.k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def path(self) -> str:
        """The URL path of its group and version."""
        return f"/apis/{self.group_version}" if self.group else f"/api/{self.version}"


def _fields(*names: str) -> dict[str, FieldPath]:
    return {name: tuple(name.split(".")) for name in names}


SERVICES: Final = Kind(
    "",
    "v1",
    "Service",
    "services",
    "service",
    short_names=("svc",),
    has_status=True,
    categories=("all",),
    fields=_fields("spec.clusterIP", "spec.type"),
)
PODS: Final = Kind(
    "",
    "v1",
    "Pod",
    "pods",
    "pod",
    short_names=("po",),
    has_status=True,
    categories=("all",),
    fields=_fields(
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    ),
)
NODES: Final = Kind(
    "",
    "v1",
    "Node",
    "nodes",
    "node",
    namespaced=False,
    short_names=("no",),
    has_status=True,
    fields=_fields("spec.unschedulable"),
)
NAMESPACES: Final = Kind(
    "",
    "v1",
    "Namespace",
    "namespaces",
    "namespace",
    namespaced=False,
    short_names=("ns",),
    has_status=True,
    fields=_fields("status.phase"),
)
EVENTS: Final = Kind(
    "",
    "v1",
    "Event",
    "events",
    "event",
    short_names=("ev",),
    fields=_fields(
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "type",
    )
    | {"source": ("source", "component")},
)
ENDPOINTS: Final = Kind("", "v1", "Endpoints", "endpoints", "endpoints", short_names=("ep",))
ENDPOINT_SLICES: Final = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", "endpointslice")
LEASES: Final = Kind("coordination.k8s.io", "v1", "Lease", "leases", "lease")

KINDS: Final = (NAMESPACES, NODES, PODS, SERVICES, ENDPOINTS, EVENTS, ENDPOINT_SLICES, LEASES)

_BY_PLURAL: Final = {(kind.group_version, kind.plural): kind for kind in KINDS}


def find_kind(group_version: str, plural: str) -> Kind | None:
    """The kind that is served under these URL parts, if there is one."""
    return _BY_PLURAL.get((group_version, plural))
