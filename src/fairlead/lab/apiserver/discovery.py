"""What the API server says about itself: groups, versions, kinds, its own version, and the OpenAPI documents.

In: a path. Out: the document that is served there, or None. Pure, and made from the table of kinds alone.
Follows the discovery documents of the Kubernetes API (APIVersions, APIGroupList, APIResourceList).
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from fairlead.lab.apiserver import openapi
from fairlead.lab.apiserver.failure import Object
from fairlead.lab.apiserver.kinds import KINDS, Kind

_VERBS: Final = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_VERSION: Final = {
    "major": "1",
    "minor": "32",
    "gitVersion": "v1.32.0+fairlead-lab",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2025-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "linux/amd64",
}


def document(path: str) -> Object | None:
    """The discovery document at `path`, if there is one."""
    make = _DOCUMENTS.get(path.rstrip("/"))
    return make() if make else None


def _versions() -> Object:
    return {"kind": "APIVersions", "apiVersion": "v1", "versions": ["v1"], "serverAddressByClientCIDRs": []}


def _groups() -> Object:
    groups = dict.fromkeys((kind.group, kind.version) for kind in KINDS if kind.group)
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*group) for group in groups]}


def _group(group: str, version: str) -> Object:
    served = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [served], "preferredVersion": served}


def _resources(group_version: str) -> Object:
    resources: list[Object] = []
    for kind in (kind for kind in KINDS if kind.group_version == group_version):
        resources.append(_resource(kind))
        if kind.has_status:
            status = {"name": f"{kind.plural}/status", "singularName": "", "namespaced": kind.namespaced, "kind": kind.kind}
            resources.append(status | {"verbs": ["get", "patch", "update"]})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}


def _resource(kind: Kind) -> Object:
    resource: Object = {
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": _VERBS,
    }
    if kind.short_names:
        resource["shortNames"] = list(kind.short_names)
    if kind.categories:
        resource["categories"] = list(kind.categories)
    return resource


def _named_group(group: str, version: str) -> Object:
    return {"kind": "APIGroup", "apiVersion": "v1"} | _group(group, version)


def _no_custom_resources() -> Object:
    """An empty list. kubectl looks here before it says of a kind that there is none; without, it stops at the 404."""
    head = {"kind": "CustomResourceDefinitionList", "apiVersion": "apiextensions.k8s.io/v1"}
    return head | {"metadata": {"resourceVersion": "1"}, "items": []}


_DOCUMENTS: Final[dict[str, Callable[[], Object]]] = {
    "/api": _versions,
    "/apis": _groups,
    "/version": lambda: dict(_VERSION),
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions": _no_custom_resources,
    "/openapi/v2": lambda: openapi.swagger(_VERSION["gitVersion"]),
    "/openapi/v3": openapi.index,
    **{f"/apis/{kind.group}": partial(_named_group, kind.group, kind.version) for kind in KINDS if kind.group},
    **{kind.path: partial(_resources, kind.group_version) for kind in KINDS},
    **{f"/openapi/v3{kind.path}": partial(openapi.openapi, kind.path, _VERSION["gitVersion"]) for kind in KINDS},
}
