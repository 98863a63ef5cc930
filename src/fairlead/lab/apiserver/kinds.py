"""The kinds that the API server serves: their place in the API and their selectable fields.

A table and look-ups in it; no object is processed here. Groups, versions, short names and
selectable fields are those of the Kubernetes API reference.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

FieldPath = tuple[str, ...]


class Column(msgspec.Struct, frozen=True):
    """A printer column. `path` is a JSONPath; a `priority` above 0 shows it only with `-o wide`."""

    name: str
    type: str
    path: str
    priority: int = 0


class Definition(msgspec.Struct, eq=False):
    """The schema and columns of a custom kind, from its CustomResourceDefinition."""

    schema: Mapping[str, Any]
    shape: Any
    columns: tuple[Column, ...]


class Kind(msgspec.Struct, frozen=True, eq=False):
    """One kind of object. `fields` are the fields that a fieldSelector may name, besides the
    object's name and namespace."""

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
    custom: Definition | None = None
    """Set for kinds that a CustomResourceDefinition defines."""

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
CONFIG_MAPS: Final = Kind("", "v1", "ConfigMap", "configmaps", "configmap", short_names=("cm",))
SECRETS: Final = Kind("", "v1", "Secret", "secrets", "secret", fields=_fields("type"))
ENDPOINT_SLICES: Final = Kind(
    "discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", "endpointslice"
)
LEASES: Final = Kind("coordination.k8s.io", "v1", "Lease", "leases", "lease")
CUSTOM_RESOURCE_DEFINITIONS: Final = Kind(
    "apiextensions.k8s.io",
    "v1",
    "CustomResourceDefinition",
    "customresourcedefinitions",
    "customresourcedefinition",
    namespaced=False,
    short_names=("crd", "crds"),
    has_status=True,
    categories=("api-extensions",),
)

KINDS: Final = (
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    ENDPOINTS,
    EVENTS,
    CONFIG_MAPS,
    SECRETS,
    ENDPOINT_SLICES,
    LEASES,
    CUSTOM_RESOURCE_DEFINITIONS,
)
