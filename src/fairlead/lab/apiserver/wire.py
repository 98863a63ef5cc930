"""Check the fields of an incoming object: their types, and whether its kind has them. Pure, except
`check_types`, which modifies the object in place.

In: a decoded object. Out: ApiFailure 400 with the message of the API server's decoder if a field
has the wrong type, and the list of unknown fields, which `fieldValidation=Strict` rejects. The
contents of a field declared as `AnyObject` are not checked.
"""

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Final, get_args, get_origin

import msgspec

from fairlead.errors import plain
from fairlead.kube.rules import types
from fairlead.kube.rules.causes import Object
from fairlead.kube.rules.endpoints_fields import Endpoints
from fairlead.kube.rules.fields import (
    ConfigMap,
    CustomResourceDefinition,
    EndpointSlice,
    Event,
    Fields,
    KindFields,
    Lease,
    Namespace,
    Node,
    Service,
)
from fairlead.kube.rules.types import struct_in, structs_in
from fairlead.lab.apiserver import structural
from fairlead.lab.apiserver.failure import bad_request
from fairlead.lab.apiserver.kinds import (
    CONFIG_MAPS,
    CUSTOM_RESOURCE_DEFINITIONS,
    ENDPOINT_SLICES,
    ENDPOINTS,
    EVENTS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    Kind,
)
from fairlead.lab.apiserver.pod_fields import Pod

FIELDS_OF: Final[Mapping[Kind, type[KindFields]]] = {
    SERVICES: Service,
    ENDPOINTS: Endpoints,
    ENDPOINT_SLICES: EndpointSlice,
    NODES: Node,
    NAMESPACES: Namespace,
    PODS: Pod,
    EVENTS: Event,
    CONFIG_MAPS: ConfigMap,
    LEASES: Lease,
    CUSTOM_RESOURCE_DEFINITIONS: CustomResourceDefinition,
}
"""The fields of each built-in kind."""


def check_types(kind: Kind, obj: Object) -> None:
    """Remove the fields that the kind does not have from `obj`, as decoding does. Raise ApiFailure
    400 if a field has the wrong type."""
    fields = FIELDS_OF.get(kind, KindFields)
    try:
        msgspec.convert(obj, fields)
    except msgspec.ValidationError as error:
        mistake = next(_mistakes(fields, obj, ()), plain(error))
        what = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}'
        raise bad_request(f"{what}: json: cannot unmarshal {mistake}") from error
    if kind.custom is None:
        _prune(fields, obj)


def _prune(of: type[Fields], value: Any) -> None:
    if not isinstance(value, dict):
        return
    known = structs_in(of)
    for name in [name for name in value if name not in known]:
        del value[name]
    for name, below in value.items():
        struct, is_list = known[name]
        if struct is not None:
            for item in below or () if is_list else (below,):
                _prune(struct, item)


def _mistakes(of: type[Fields], value: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the wrong types in the format of Go's decoder: `string into Go struct field
    ServicePort.spec.ports.port of type int32`."""
    for field in msgspec.structs.fields(of):
        here, given = (*path, field.encode_name), value.get(field.encode_name)
        option = next(option for option in get_args(field.type) if option is not NoneType)
        struct, is_list = struct_in(field.type)
        if given is None:
            continue
        where = f"into Go struct field {of.__name__}.{'.'.join(here)} of type"
        try:
            msgspec.convert(given, field.type)
        except msgspec.ValidationError:
            items = given if is_list else [given]
            if (
                struct is not None
                and isinstance(items, list)
                and all(isinstance(item, dict) for item in items)
            ):
                for item in items:
                    yield from _mistakes(struct, item, here)
            elif get_origin(option) is dict and isinstance(given, dict):
                wrong = next(item for item in given.values() if not isinstance(item, str))
                yield f"{_json_type(wrong)} {where} string"
            else:
                yield f"{_json_type(given)} {where} {_go_type(option)}"


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    return {str: "string", int: "number", float: "number", list: "array"}.get(type(value), "object")


def _go_type(declared: Any) -> str:
    if get_origin(declared) is list:
        return f"[]{_go_type(get_args(declared)[0])}"
    if get_origin(declared) is dict:
        return "map[string]string"
    if isinstance(declared, type) and issubclass(declared, Fields):
        return f"v1.{declared.__name__}"
    return {int: "int32"}.get(declared, getattr(declared, "__name__", "")).replace(
        "str", "string", 1
    )


def unknown_fields(kind: Kind, obj: Object) -> list[str]:
    """Return the paths of the fields that the kind does not have, as the API server prints them:
    `spec.foo`."""
    if kind.custom is not None:
        return list(structural.unknown(kind.custom.schema, obj))
    return [
        f"{path}.{name}" if path else name
        for path, name, _ in types.unknown_fields(FIELDS_OF[kind], obj)
    ]
