"""Custom resources by their schema: pruning, defaults, validation, unknown fields and merge rules.
Pure; `prune_and_default` modifies the object in place.

In: an object and the `openAPIV3Schema` of its CRD. Out: the object with defaults and without
unknown fields; errors with the messages of the API server. Of CEL only the rules in RULES are
supported (`definitions` rejects others), of formats only `date-time`. Follows
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
(structural schemas).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from typing import Any, Final

from fairlead.kube.rules.causes import Cause, Object, invalid, required, shown, unsupported
from fairlead.lab.apiserver.schema import METADATA, SET, VALUE, Shape, keyed

Schema = Mapping[str, Any]

RULES: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "self == oldSelf": lambda new, old: old is None or new == old,
    "self.metadata.name == self.spec.address || self.spec.address.contains(':')": lambda new, _: (
        new["metadata"]["name"] == new["spec"]["address"] or ":" in new["spec"]["address"]
    ),
}
"""The supported CEL rules, each with a function of the new and the old value (None: no old value)
that returns whether the rule holds."""
_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
_HEAD: Final = ("apiVersion", "kind", "metadata")


def prune_and_default(schema: Schema, obj: Object) -> None:
    """Remove fields that the schema does not have, and set defaults."""
    for name in _HEAD:
        schema = {**schema, "properties": {**schema.get("properties", {}), name: _ANYTHING}}
    _prune_and_default(schema, obj)


_ANYTHING: Final = {"x-kubernetes-preserve-unknown-fields": True}


def _prune_and_default(schema: Schema, value: Any) -> None:
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name in [
            name for name in value if name not in properties and not _keeps_unknown(schema)
        ]:
            del value[name]
        for name, below in properties.items():
            if name not in value and "default" in below:
                value[name] = deepcopy(below["default"])
        for name, item in value.items():
            _prune_and_default(
                properties.get(name) or schema.get("additionalProperties") or _ANYTHING, item
            )
    elif isinstance(value, list):
        for item in value:
            _prune_and_default(schema.get("items") or _ANYTHING, item)


def _keeps_unknown(schema: Schema) -> bool:
    return bool(
        schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    )


def unknown(schema: Schema, value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields that the schema does not have."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name, item in value.items():
            here = f"{path}.{name}" if path else name
            if not path and name in _HEAD:
                continue
            if name in properties:
                yield from unknown(properties[name], item, here)
            elif not _keeps_unknown(schema):
                yield here
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown(schema.get("items") or _ANYTHING, item, f"{path}[{index}]")


def check(schema: Schema, obj: Object, old: Object | None) -> Iterator[Cause]:
    """Yield the errors of an object; `old` is the object that it replaces."""
    body = {name: value for name, value in obj.items() if name not in _HEAD}
    wrong = list(_check(schema, body, "", None if old is None else old))
    # Rules are evaluated only for objects with valid types. Rules at the root also see apiVersion,
    # kind and metadata.
    yield from wrong or _break_rules(schema, obj, "<nil>", old)


def _break_rules(schema: Schema, value: Any, path: str, old: Any) -> Iterator[Cause]:
    for rule in schema.get("x-kubernetes-validations", ()):
        if not RULES[rule["rule"]](value, old):
            yield invalid(path, value, rule.get("message") or f"failed rule: {rule['rule']}")


def _check(schema: Schema, value: Any, path: str, old: Any) -> Iterator[Cause]:
    type_ = schema.get("type", "")
    if type_ in _TYPES and (
        not isinstance(value, _TYPES[type_]) or (isinstance(value, bool) and type_ != "boolean")
    ):
        given = next((name for name, of in _TYPES.items() if isinstance(value, of)), "null")
        yield Cause(
            "FieldValueTypeInvalid",
            path,
            f'Invalid value: "{given}": {path} in body must be of type {type_}: "{given}"',
        )
        return
    if path:
        yield from _break_rules(schema, value, path, old)
    if isinstance(value, dict):
        yield from _check_object(schema, value, path, old if isinstance(old, dict) else None)
    elif isinstance(value, list):
        yield from _check_list(schema, value, path)
    else:
        yield from _check_plain(schema, value, path)


def _check_object(schema: Schema, value: Object, path: str, old: Object | None) -> Iterator[Cause]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value and name not in _HEAD:
            yield required(f"{path}.{name}" if path else name)
    for name, item in value.items():
        below = properties.get(name) or schema.get("additionalProperties")
        if isinstance(below, Mapping):
            yield from _check(
                below, item, f"{path}.{name}" if path else name, (old or {}).get(name)
            )


def _check_list(schema: Schema, value: list[Any], path: str) -> Iterator[Cause]:
    if len(value) < schema.get("minItems", 0):
        yield invalid(
            path, len(value), f"{path} in body should have at least {schema['minItems']} items"
        )
    if len(value) > schema.get("maxItems", len(value)):
        yield Cause(
            "FieldValueTooMany",
            path,
            f"Too many: {len(value)}: must have at most {schema['maxItems']} items",
        )
    seen: list[Any] = []
    keys: Sequence[str] = schema.get("x-kubernetes-list-map-keys", ())
    for index, item in enumerate(value):
        here = f"{path}[{index}]"
        yield from _check(schema.get("items") or _ANYTHING, item, here, None)
        if schema.get("x-kubernetes-list-type") in ("map", "set"):
            identity = (
                {key: item.get(key) for key in keys} if keys and isinstance(item, dict) else item
            )
            if identity in seen:
                yield Cause("FieldValueDuplicate", here, f"Duplicate value: {shown(identity)}")
            seen.append(identity)


def _check_plain(schema: Schema, value: Any, path: str) -> Iterator[Cause]:
    if "enum" in schema and value not in schema["enum"]:
        yield unsupported(path, value, schema["enum"])
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield invalid(
                path, value, f"{path} in body should be at least {schema['minLength']} chars long"
            )
        if len(value) > schema.get("maxLength", len(value)):
            yield Cause(
                "FieldValueTooLong",
                path,
                f"Too long: may not be more than {schema['maxLength']} bytes",
            )
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield invalid(path, value, f"{path} in body should match '{schema['pattern']}'")
        if schema.get("format") == "date-time" and not _is_time(value):
            yield invalid(path, value, f"{path} in body must be of type date-time: {shown(value)}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            yield invalid(
                path,
                value,
                f"{path} in body should be greater than or equal to {schema['minimum']}",
            )
        if value > schema.get("maximum", value):
            yield invalid(
                path, value, f"{path} in body should be less than or equal to {schema['maximum']}"
            )


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).tzinfo is not None
    except ValueError:
        return False


def shape(schema: Schema) -> Shape:
    """Return how the fields of an object merge."""
    return Shape(fields={"metadata": METADATA} | _fields(schema))


def _fields(schema: Schema) -> dict[str, Shape]:
    return {
        name: _shape(below)
        for name, below in schema.get("properties", {}).items()
        if name not in _HEAD
    }


def _shape(schema: Schema) -> Shape:
    if schema.get("type") == "array":
        match schema.get("x-kubernetes-list-type"):
            case "map":
                return keyed(
                    *schema["x-kubernetes-list-map-keys"], fields=_fields(schema.get("items", {}))
                )
            case "set":
                return SET
            case _:
                return VALUE
    if schema.get("x-kubernetes-map-type") == "atomic":
        return VALUE
    return Shape(fields=_fields(schema))
