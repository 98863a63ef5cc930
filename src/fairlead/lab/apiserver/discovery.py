"""The discovery documents of the API server: groups, versions, kinds, its own version, and OpenAPI.
Pure.

In: a path and the kinds that are served. Out: the document at this path, or None. Follows the
discovery documents of the Kubernetes API (APIVersions, APIGroupList, APIResourceList).
"""

from collections.abc import Sequence
from typing import Final

from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver import openapi
from fairlead.lab.apiserver.kinds import Kind

_VERBS: Final = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_VERSION: Final = {
    "major": "1",
    "minor": "36",
    "gitVersion": "v1.36.0+fairlead-lab",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2025-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "linux/amd64",
}


def document(path: str, kinds: Sequence[Kind]) -> Object | None:
    """Return the discovery document at `path` of a server with these kinds, or None."""
    match path.strip("/").split("/"):
        case ["api"]:
            return _versions()
        case ["apis"]:
            return _groups(kinds)
        case ["version"]:
            return dict(_VERSION)
        case ["openapi", "v2"]:
            return openapi.swagger(_VERSION["gitVersion"])
        case ["openapi", "v3"]:
            return openapi.index(kinds)
        case ["openapi", "v3", *rest]:
            return openapi.openapi("/" + "/".join(rest), _VERSION["gitVersion"], kinds)
        case ["api", version]:
            return _resources(version, kinds)
        case ["apis", group]:
            return next(
                (_named_group(group, kind.version) for kind in kinds if kind.group == group), None
            )
        case ["apis", group, version]:
            return _resources(f"{group}/{version}", kinds)
    return None


def _versions() -> Object:
    return {
        "kind": "APIVersions",
        "apiVersion": "v1",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [],
    }


def _groups(kinds: Sequence[Kind]) -> Object:
    groups = dict.fromkeys((kind.group, kind.version) for kind in kinds if kind.group)
    return {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group(*group) for group in groups],
    }


def _group(group: str, version: str) -> Object:
    served = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [served], "preferredVersion": served}


def _resources(group_version: str, kinds: Sequence[Kind]) -> Object | None:
    resources: list[Object] = []
    for kind in (kind for kind in kinds if kind.group_version == group_version):
        resources.append(_resource(kind))
        if kind.has_status:
            status = {
                "name": f"{kind.plural}/status",
                "singularName": "",
                "namespaced": kind.namespaced,
                "kind": kind.kind,
            }
            resources.append(status | {"verbs": ["get", "patch", "update"]})
    if not resources:
        return None
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": resources,
    }


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
