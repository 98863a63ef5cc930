"""The OpenAPI 2.0 document in protobuf, the form that kubectl requests. Pure.

In: the document as for JSON. Out: the bytes of an `openapi.v2.Document`. Invariant: nothing of the
document is lost; a member that is missing in the tables below is a KeyError. Follows
OpenAPIv2.proto of gnostic (field numbers), and protobuf's encoding (varints, length-delimited
fields).

Where JSON has a choice or a map, gnostic has messages around the value. `within` lists the fields
that wrap it; `entries` is the field of the map's message that holds its pairs of name (1) and value
(2).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from fairlead.kube.rules.causes import Object

MEDIA_TYPE: Final = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
ACCEPTED: Final = (MEDIA_TYPE, "application/com.github.proto-openapi.spec.v2@v1.0+protobuf")
"""The media type's names. Older clients, and kubectl to this day, send the second, which is not a
valid media type."""


class Field(NamedTuple):
    """A member of a JSON object as a field of a message. `extensions` stands for all members whose
    names begin with `x-`."""

    number: int
    sort: "Literal['text', 'flag', 'extensions'] | Mapping[str, Field]" = "text"
    within: tuple[int, ...] = ()
    entries: int = 0


Message = Mapping[str, Field]

_EXTENSIONS: Final = "x-"
_SCHEMA: Final[dict[str, Field]] = {}
# The table is recursive: a schema contains schemas.
_SCHEMA.update(
    {
        "$ref": Field(1),
        "format": Field(2),
        "description": Field(4),
        "additionalProperties": Field(21, _SCHEMA, within=(1,)),
        "type": Field(22, within=(1,)),
        "items": Field(23, _SCHEMA, within=(1,)),
        "properties": Field(25, _SCHEMA, entries=1),
        _EXTENSIONS: Field(31, "extensions"),
    }
)
_QUERY_PARAMETER: Final[Message] = {
    "in": Field(2),
    "name": Field(4),
    "type": Field(6),
    "uniqueItems": Field(20, "flag"),
}
_RESPONSE: Final[Message] = {"description": Field(1), "schema": Field(2, _SCHEMA, within=(1,))}
_OPERATION: Final[Message] = {
    "operationId": Field(5),
    "consumes": Field(7),
    "parameters": Field(8, _QUERY_PARAMETER, within=(1, 2, 3)),
    "responses": Field(9, _RESPONSE, entries=1, within=(1,)),
    _EXTENSIONS: Field(13, "extensions"),
}
_PATH: Final[Message] = {"get": Field(2, _OPERATION), "patch": Field(8, _OPERATION)}
_DOCUMENT: Final[Message] = {
    "swagger": Field(1),
    "info": Field(2, {"title": Field(1), "version": Field(2)}),
    "paths": Field(8, _PATH, entries=2),
    "definitions": Field(9, _SCHEMA, entries=1),
}


def encode(document: Object) -> bytes:
    """Return the document in protobuf."""
    return _message(document, _DOCUMENT)


def _message(members: Mapping[str, Any], message: Message) -> bytes:
    return b"".join(
        part for name, value in members.items() for part in _member(name, value, message)
    )


def _member(name: str, value: Any, message: Message) -> Iterator[bytes]:
    if name.startswith(_EXTENSIONS):
        # The value of an extension is sent as YAML, and JSON is valid YAML.
        encoded = _delimited(2, _delimited(2, msgspec.json.encode(value)))
        yield _delimited(message[_EXTENSIONS].number, _named(name, encoded))
        return
    field = message[name]
    if field.entries:
        pairs = (_named(key, _delimited(2, _wrapped(field, below))) for key, below in value.items())
        yield _delimited(field.number, b"".join(_delimited(field.entries, pair) for pair in pairs))
    elif field.sort == "flag":
        yield _varint(field.number << 3) + _varint(int(value))
    else:
        for item in value if isinstance(value, list) else [value]:
            yield _delimited(field.number, _wrapped(field, item))


def _named(name: str, value_field: bytes) -> bytes:
    return _delimited(1, name.encode()) + value_field


def _wrapped(field: Field, value: Any) -> bytes:
    data = _message(value, field.sort) if isinstance(field.sort, Mapping) else str(value).encode()
    for number in reversed(field.within):
        data = _delimited(number, data)
    return data


def _delimited(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
