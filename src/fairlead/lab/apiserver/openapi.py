"""The OpenAPI documents, by which clients learn the fields of the kinds, how their lists merge, and
what PATCH takes.

In: the kinds that are served, the tables of this package: their fields (`fields`, `pod_fields`),
how they merge (`schema`). Out: the document of OpenAPI 2.0 (all kinds) and those of 3.0 (one for
each group). Pure. Follows Swagger 2.0, OpenAPI 3.0 and the extensions of Kubernetes
(`x-kubernetes-group-version-kind`, `-list-type`, `-patch-strategy` ...). kubectl before 1.25 checks
manifests by 2.0 and makes the patches of `apply` by it."""

from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin

import msgspec

from fairlead.lab.apiserver.failure import Object
from fairlead.lab.apiserver.fields import Fields, Free
from fairlead.lab.apiserver.kinds import KINDS, Kind
from fairlead.lab.apiserver.schema import Shape, shape_of
from fairlead.lab.apiserver.wire import FIELDS_OF, struct_in

# Strategic merge is taken too, but not told: a newer kubectl, which looks here first, then makes
# such patches by its own knowledge of the kinds. By these documents it would warn of a change far
# below a field that they do not describe.
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
    """The document of OpenAPI 2.0. `version` is the server's. All callers share it: read, do not
    change."""
    return {
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": version},
        "paths": {_path_of(kind): _operations(kind, _V2) for kind in KINDS},
        "definitions": _definitions(KINDS, _V2),
    }


def index(served: Sequence[Kind]) -> Object:
    """Where the documents of OpenAPI 3.0 are."""
    paths = dict.fromkeys(kind.path.removeprefix("/") for kind in served)
    return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"} for path in paths}}


def openapi(path: str, version: str, served: Sequence[Kind]) -> Object | None:
    """The document of OpenAPI 3.0 for the kinds of one group and version, which are served below
    `path`."""
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
    """Its name in the documents, which is that of the API reference:
    `io.k8s.api.core.v1.ServiceSpec`."""
    return f"{of.PACKAGE}.{of.__name__}"


def _definition_of(kind: Kind) -> str:
    """The name of a kind's own definition. Custom kinds have the domain of their group in reverse
    before it."""
    if kind.custom is not None:
        return ".".join((*reversed(kind.group.split(".")), kind.version, kind.kind))
    return definition_name(FIELDS_OF[kind])


def _path_of(kind: Kind) -> str:
    scope = "/namespaces/{namespace}" if kind.namespaced else ""
    return f"{kind.path}{scope}/{kind.plural}/{{name}}"


def _operations(kind: Kind, prefix: str) -> Object:
    """GET and PATCH of an object: what a client looks up is which kind a path is of, and what PATCH
    takes."""
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
    """Add the definition of a Struct, and of all below it. A Struct merges alike wherever it
    stands, so the first counts."""
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
    """The schema of a field."""
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
    if option == Free:
        return {"type": "object"}
    if get_origin(option) is dict:
        return {"type": "object", "additionalProperties": _schema(get_args(option)[1], prefix)}
    if issubclass(option, Fields):
        return {"$ref": prefix + definition_name(option)}
    return {"type": _PRIMITIVES[option]}


def _is_union(declared: Any) -> bool:
    return get_origin(declared) is UnionType


def _merging(declared: Any, shape: Shape) -> Object:
    """The extensions that tell how a list or map merges."""
    sort = next((get_origin(option) for option in get_args(declared) if get_origin(option)), None)
    if sort is dict:
        return {"x-kubernetes-map-type": "atomic"} if shape.form == "value" else {}
    if sort is not list:
        return {}
    if shape.form not in _LIST_TYPES:
        return {"x-kubernetes-list-type": "atomic"}
    told: Object = {"x-kubernetes-list-type": _LIST_TYPES[shape.form]}
    if shape.keys:
        told["x-kubernetes-list-map-keys"] = list(shape.keys)
        told["x-kubernetes-patch-merge-key"] = shape.patch_key
    return told | {"x-kubernetes-patch-strategy": shape.patch_strategy}
