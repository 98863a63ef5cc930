"""What is checked about an object as it comes in: the types of its fields, and whether its kind has them at all.

In: an object as decoded. Out: ApiFailure 400 if a field has the wrong type, in the words of the API server's decoder, and
the list of fields that the kind does not know, which `fieldValidation=Strict` refuses. Pure.
What lies below a field declared as `Free` is neither checked nor judged.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args, get_origin

import msgspec

from fairlead.lab.apiserver import structural
from fairlead.lab.apiserver.endpoints_fields import Endpoints
from fairlead.lab.apiserver.failure import Object, bad_request
from fairlead.lab.apiserver.fields import (
    CustomResourceDefinition,
    EndpointSlice,
    Event,
    Fields,
    Lease,
    Namespace,
    Node,
    Service,
    Whole,
)
from fairlead.lab.apiserver.kinds import (
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

FIELDS_OF: Final[Mapping[Kind, type[Whole]]] = {
    SERVICES: Service,
    ENDPOINTS: Endpoints,
    ENDPOINT_SLICES: EndpointSlice,
    NODES: Node,
    NAMESPACES: Namespace,
    PODS: Pod,
    EVENTS: Event,
    LEASES: Lease,
    CUSTOM_RESOURCE_DEFINITIONS: CustomResourceDefinition,
}
"""The fields of each kind that is served."""


def check_types(kind: Kind, obj: Object) -> None:
    """Raises ApiFailure 400 if a field that the server works with has the wrong type."""
    try:
        msgspec.convert(obj, FIELDS_OF.get(kind, Whole))
    except msgspec.ValidationError as error:
        told = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: json: cannot unmarshal: {error}'
        raise bad_request(told) from error


def unknown_fields(kind: Kind, obj: Object) -> list[str]:
    """The paths of the fields that the kind does not have, as the API server tells them: `spec.foo`."""
    if kind.custom is not None:
        return list(structural.unknown(kind.custom.schema, obj))
    return list(_unknown(FIELDS_OF[kind], obj, ""))


def _unknown(of: type[Fields], value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    known = {field.encode_name: field.type for field in msgspec.structs.fields(of)}
    for name, below in value.items():
        here = f"{path}.{name}" if path else name
        if name not in known:
            yield here
            continue
        struct, is_list = struct_in(known[name])
        if struct is None:
            continue
        for place, item in enumerate(below if is_list and isinstance(below, list) else [below]):
            yield from _unknown(struct, item, f"{here}[{place}]" if is_list else here)


def struct_in(declared: Any) -> tuple[type[Fields] | None, bool]:
    """The Struct that a field holds, if it holds one, and whether it holds a list of them."""
    for option in get_args(declared) or (declared,):
        if get_origin(option) is list:
            inner = get_args(option)[0]
            return (inner, True) if isinstance(inner, type) and issubclass(inner, Fields) else (None, True)
        if isinstance(option, type) and issubclass(option, Fields):
            return option, False
    return None, False
