"""What the API server says about itself: groups, versions, kinds, and enough of an OpenAPI document for kubectl.

In: a path. Out: the document that is served there, or None. Pure, and made from the table of kinds alone.
Follows the discovery documents of the Kubernetes API (APIVersions, APIGroupList, APIResourceList) and OpenAPI 3.0.
kubectl asks OpenAPI one thing: whether PATCH takes `fieldValidation`, so that it may leave checking to the server.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

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


def _openapi_index() -> Object:
    paths = dict.fromkeys(kind.path.removeprefix("/") for kind in KINDS)
    return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"} for path in paths}}


def _openapi(path: str) -> Object:
    items: Object = {}
    for kind in (kind for kind in KINDS if kind.path == path):
        scope = "/namespaces/{namespace}" if kind.namespaced else ""
        items[f"{kind.path}{scope}/{kind.plural}/{{name}}"] = {"patch": _patch_operation(kind)}
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": _VERSION["gitVersion"]},
        "paths": items,
        "components": {"schemas": {}},
    }


def _patch_operation(kind: Kind) -> Object:
    parameters = ("dryRun", "fieldManager", "fieldValidation", "force")
    # No body is described, above all no strategic merge patch: kubectl then makes its patches by its own knowledge of
    # the kinds, rather than by schemas from here.
    return {
        "operationId": f"patch{kind.kind}",
        "parameters": [{"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}} for name in parameters],
        "requestBody": {"content": {"application/apply-patch+yaml": {"schema": {"type": "object"}}}},
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": {"group": kind.group, "version": kind.version, "kind": kind.kind},
    }


def _named_group(group: str, version: str) -> Object:
    return {"kind": "APIGroup", "apiVersion": "v1"} | _group(group, version)


_DOCUMENTS: Final[dict[str, Callable[[], Object]]] = {
    "/api": _versions,
    "/apis": _groups,
    "/version": lambda: dict(_VERSION),
    "/openapi/v3": _openapi_index,
    **{f"/apis/{kind.group}": partial(_named_group, kind.group, kind.version) for kind in KINDS if kind.group},
    **{kind.path: partial(_resources, kind.group_version) for kind in KINDS},
    **{f"/openapi/v3{kind.path}": partial(_openapi, kind.path) for kind in KINDS},
}
