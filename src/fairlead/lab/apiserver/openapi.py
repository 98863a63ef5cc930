"""The OpenAPI documents, from which clients learn the fields of the kinds, how lists merge, and
what PATCH accepts. Pure.

In: the kinds that are served, and the tables of this package: fields (`fields`, `pod_fields`) and
merge rules (`schema`). Out: the document of OpenAPI 2.0 (all kinds) and those of 3.0 (one per
group). Follows Swagger 2.0, OpenAPI 3.0 and the extensions of Kubernetes
(`x-kubernetes-group-version-kind`, `-list-type`, `-patch-strategy` ...). kubectl before 1.25
validates manifests by 2.0 and computes the patches of `apply` from it.
"""

from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin

import msgspec

from fairlead.kube.rules.causes import Object
from fairlead.kube.rules.fields import AnyObject, Fields
from fairlead.kube.rules.types import struct_in
from fairlead.lab.apiserver.kinds import KINDS, Kind
from fairlead.lab.apiserver.schema import Shape, shape_of
from fairlead.lab.apiserver.wire import FIELDS_OF

# The server accepts strategic merge patches, too, but does not advertise them. A newer kubectl
# checks this list first; without the entry it computes such patches from its built-in types. From
# these documents it would warn about a change deep inside a field that they do not describe.
_PATCHES: Final = (
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/apply-patch+yaml",
)
_REFERENCE: Final = "https://kubernetes.io/docs/reference/kubernetes-api/"
_PRIMITIVES: Final = {str: "string", int: "integer", bool: "boolean", float: "number"}
_LIST_TYPES: Final[dict[str, str]] = {"keyed": "map", "set": "set"}
_V2: Final = "#/definitions/"
_V3: Final = "#/components/schemas/"


@cache
def swagger(version: str) -> Object:
    """Return the document of OpenAPI 2.0. `version` is the server's. All callers share the result:
    do not modify it."""
    return {
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": version},
        "paths": {_path_of(kind): _operations(kind, _V2) for kind in KINDS},
        "definitions": _definitions(KINDS, _V2),
    }


def index(served: Sequence[Kind]) -> Object:
    """Return the paths of the OpenAPI 3.0 documents."""
    paths = dict.fromkeys(kind.path.removeprefix("/") for kind in served)
    return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"} for path in paths}}


def openapi(path: str, version: str, served: Sequence[Kind]) -> Object | None:
    """Return the OpenAPI 3.0 document of the group and version that is served below `path`, or
    None."""
    kinds = tuple(kind for kind in served if kind.path == path)
    if not kinds:
        return None
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": version},
        "paths": {_path_of(kind): _operations(kind, _V3) for kind in kinds},
        "components": {"schemas": _definitions(kinds, _V3)},
    }


def definition_name(of: type[Fields]) -> str:
    """Return the name of a Struct in the documents and the API reference:
    `io.k8s.api.core.v1.ServiceSpec`."""
    return f"{of.PACKAGE}.{of.__name__}"


def _definition_of(kind: Kind) -> str:
    """Return the name of a kind's definition. For custom kinds it begins with the reversed domain
    of the group."""
    if kind.custom is not None:
        return ".".join((*reversed(kind.group.split(".")), kind.version, kind.kind))
    return definition_name(FIELDS_OF[kind])


def _path_of(kind: Kind) -> str:
    scope = "/namespaces/{namespace}" if kind.namespaced else ""
    return f"{kind.path}{scope}/{kind.plural}/{{name}}"


def _operations(kind: Kind, prefix: str) -> Object:
    """Return GET and PATCH of an object. Clients look up the kind of a path and what PATCH
    accepts."""
    patch: Object = _operation(kind, "patch", prefix)
    names = ("dryRun", "fieldManager", "fieldValidation", "force")
    if prefix == _V2:
        patch["consumes"] = list(_PATCHES)
        patch["parameters"] = [
            {"name": name, "in": "query", "type": "string", "uniqueItems": True} for name in names
        ]
    else:
        patch["requestBody"] = {
            "content": {media_type: {"schema": {"type": "object"}} for media_type in _PATCHES}
        }
        patch["parameters"] = [
            {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
            for name in names
        ]
    return {"get": _operation(kind, "get", prefix), "patch": patch}


def _operation(kind: Kind, action: str, prefix: str) -> Object:
    answer: Object = {"schema": {"$ref": prefix + _definition_of(kind)}}
    return {
        "operationId": f"{action}{kind.kind}",
        "responses": {
            "200": {"description": "OK"}
            | (answer if prefix == _V2 else {"content": {"application/json": answer}})
        },
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": _group_version_kind(kind),
    }


def _group_version_kind(kind: Kind) -> dict[str, str]:
    return {"group": kind.group, "kind": kind.kind, "version": kind.version}


def _definitions(kinds: tuple[Kind, ...], prefix: str) -> Object:
    found: Object = {}
    for kind in kinds:
        if kind.custom is not None:
            found[_definition_of(kind)] = dict(kind.custom.schema) | {
                "x-kubernetes-group-version-kind": [_group_version_kind(kind)]
            }
            continue
        _define(FIELDS_OF[kind], shape_of(kind), prefix, found)
        definition = found[definition_name(FIELDS_OF[kind])]
        definition["description"] = (
            f"{kind.kind}: the fields that this server knows. What they mean: {_REFERENCE}"
        )
        definition["x-kubernetes-group-version-kind"] = [_group_version_kind(kind)]
    return dict(sorted(found.items()))


def _define(of: type[Fields], shape: Shape, prefix: str, found: Object) -> None:
    """Add the definition of a Struct and of all Structs below it. A Struct has the same merge rules
    wherever it occurs, so it is defined only once."""
    name = definition_name(of)
    if name in found:
        return
    properties: Object = {}
    found[name] = {"type": "object", "properties": properties}
    for field in msgspec.structs.fields(of):
        below = shape.below(field.encode_name)
        properties[field.encode_name] = _schema(field.type, prefix) | _merging(field.type, below)
        struct, _ = struct_in(field.type)
        if struct is not None:
            _define(struct, below, prefix, found)


def _schema(declared: Any, prefix: str) -> Object:
    """Return the schema of a field."""
    options = (
        [option for option in get_args(declared) if option is not NoneType]
        if _is_union(declared)
        else [declared]
    )
    if len(options) > 1:
        return (
            {"type": "string", "format": "int-or-string"}
            if float not in options
            else {"type": "string"}
        )
    [option] = options
    if get_origin(option) is list:
        return {"type": "array", "items": _schema(get_args(option)[0], prefix)}
    if option == AnyObject:
        return {"type": "object"}
    if get_origin(option) is dict:
        return {"type": "object", "additionalProperties": _schema(get_args(option)[1], prefix)}
    if issubclass(option, Fields):
        return {"$ref": prefix + definition_name(option)}
    return {"type": _PRIMITIVES[option]}


def _is_union(declared: Any) -> bool:
    return get_origin(declared) is UnionType


def _merging(declared: Any, shape: Shape) -> Object:
    """Return the extensions that describe how a list or map merges."""
    sort = next((get_origin(option) for option in get_args(declared) if get_origin(option)), None)
    if sort is dict:
        return {"x-kubernetes-map-type": "atomic"} if shape.form == "value" else {}
    if sort is not list:
        return {}
    if shape.form not in _LIST_TYPES:
        return {"x-kubernetes-list-type": "atomic"}
    extensions: Object = {"x-kubernetes-list-type": _LIST_TYPES[shape.form]}
    if shape.keys:
        extensions["x-kubernetes-list-map-keys"] = list(shape.keys)
        extensions["x-kubernetes-patch-merge-key"] = shape.patch_key
    return extensions | {"x-kubernetes-patch-strategy": shape.patch_strategy}
