"""Decode an OpenAPI document in protobuf as kubectl does: by the messages of OpenAPIv2.proto,
identified by name.

This module shares no code with the encoder. It knows the messages that occur in such documents; an
unknown field is a KeyError.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Object = dict[str, Any]


class Member(NamedTuple):
    """A field of a message: its name in JSON, the message in it (None: a string), whether it may be
    repeated."""

    name: str
    message: str = ""
    many: bool = False


EXTENSIONS = Member("x-", "NamedAny", many=True)
MESSAGES: Mapping[str, Mapping[int, Member]] = {
    "Document": {
        1: Member("swagger"),
        2: Member("info", "Info"),
        8: Member("paths", "Paths"),
        9: Member("definitions", "Schemas"),
    },
    "Info": {1: Member("title"), 2: Member("version")},
    "Paths": {2: Member("pairs", "NamedPathItem", many=True)},
    "NamedPathItem": {1: Member("name"), 2: Member("value", "PathItem")},
    "PathItem": {2: Member("get", "Operation"), 8: Member("patch", "Operation")},
    "Operation": {
        5: Member("operationId"),
        7: Member("consumes", many=True),
        8: Member("parameters", "ParametersItem", many=True),
        9: Member("responses", "Responses"),
        13: EXTENSIONS,
    },
    "ParametersItem": {1: Member("only", "Parameter")},
    "Parameter": {2: Member("only", "NonBodyParameter")},
    "NonBodyParameter": {3: Member("only", "QueryParameterSubSchema")},
    "QueryParameterSubSchema": {
        2: Member("in"),
        4: Member("name"),
        6: Member("type"),
        20: Member("uniqueItems"),
    },
    "Responses": {1: Member("pairs", "NamedResponseValue", many=True)},
    "NamedResponseValue": {1: Member("name"), 2: Member("value", "ResponseValue")},
    "ResponseValue": {1: Member("only", "Response")},
    "Response": {1: Member("description"), 2: Member("schema", "SchemaItem")},
    "SchemaItem": {1: Member("only", "Schema")},
    "Schemas": {1: Member("pairs", "NamedSchema", many=True)},
    "NamedSchema": {1: Member("name"), 2: Member("value", "Schema")},
    "Schema": {
        1: Member("$ref"),
        2: Member("format"),
        4: Member("description"),
        21: Member("additionalProperties", "SchemaItem"),
        22: Member("type", "TypeItem"),
        23: Member("items", "SchemaItem"),
        25: Member("properties", "Schemas"),
        31: EXTENSIONS,
    },
    "TypeItem": {1: Member("only")},
    "NamedAny": {1: Member("name"), 2: Member("value", "Any")},
    "Any": {2: Member("yaml")},
}


def decode(data: bytes, message: str = "Document") -> Any:
    """Return the JSON value of a message, without the wrappers around choices, maps and
    extensions."""
    found: Object = {}
    for number, raw in fields(data):
        member = MESSAGES[message][number]
        value: Any = (
            bool(raw)
            if isinstance(raw, int)
            else decode(raw, member.message)
            if member.message
            else raw.decode()
        )
        if member is EXTENSIONS:
            found[value["name"]] = json.loads(value["value"]["yaml"])
        elif member.many:
            found.setdefault(member.name, []).append(value)
        else:
            assert member.name not in found
            found[member.name] = value
    if "pairs" in found:
        return {pair["name"]: pair["value"] for pair in found["pairs"]}
    return found.get("only", found)


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    place = 0
    while place < len(data):
        tag, place = varint(data, place)
        value, place = varint(data, place)
        if tag & 7 == 2:
            assert place + value <= len(data)
            yield tag >> 3, data[place : place + value]
            place += value
        else:
            assert tag & 7 == 0
            yield tag >> 3, value


def varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while data[place] & 0x80:
        value |= (data[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | data[place] << shift, place + 1
