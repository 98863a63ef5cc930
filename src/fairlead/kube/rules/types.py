"""The types of an object's fields, and the fields that its kind has. Pure; no argument is modified.

In: an object as a client wrote it. Out: the object without nulls, the paths of unknown fields, and
messages about values of the wrong type."""

import re
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, get_args, get_origin

import msgspec

from fairlead.kube.rules.fields import Fields
from fairlead.mistakes import mistake

_STRINGS: Final = ("labels", "annotations", "selector", "matchLabels", "data")
"""Fields that hold a mapping of strings. In Go, null as the value of a string is the empty one."""


_TIMES: Final = frozenset(
    (
        "creationTimestamp",
        "deletionTimestamp",
        "lastTransitionTime",
        "lastHeartbeatTime",
        "timeAdded",
        "time",
    )
)
"""Fields with a time, in every kind that is read."""
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)


def without_nulls(value: Any) -> Any:
    """Return a deep copy of the value without null fields: in the API, null means absent."""
    if isinstance(value, dict):
        return {
            name: _strings(below) if name in _STRINGS else without_nulls(below)
            for name, below in value.items()
            if below is not None
        }
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _strings(value: Any) -> Any:
    if not isinstance(value, dict):
        return without_nulls(value)
    return {name: "" if below is None else without_nulls(below) for name, below in value.items()}


def wrong_time(value: Any, path: str = "$") -> str:
    """Return what is wrong with the first time in an object that is none (RFC 3339), which the API
    server cannot decode; empty if there is none."""
    if isinstance(value, list):
        return next(filter(None, (wrong_time(v, f"{path}[{i}]") for i, v in enumerate(value))), "")
    if not isinstance(value, dict):
        return ""
    for name, below in value.items():
        if name in _TIMES and isinstance(below, str) and not _is_time(below):
            example = "write it as 2026-01-31T12:00:00Z, or remove the field"
            return f"'{below[:40]}' is not a time - at {path}.{name}; {example}"
        if name not in _STRINGS and (problem := wrong_time(below, f"{path}.{name}")):
            return problem
    return ""


def _is_time(text: str) -> bool:
    try:
        return bool(_TIME.fullmatch(text)) and bool(datetime.fromisoformat(text))
    except ValueError:  # a day that does not exist
        return False


def without_effect(of: type[Fields], kind: str, value: Any) -> Iterator[str]:
    """Yield a sentence for each field that the kind does not have."""
    article = "an" if kind[0] in "AEIOU" else "a"
    for path, name, known in unknown_fields(of, value):
        near = get_close_matches(name, known, 1)
        where = f"{path}.{name}" if path else name
        hint = f"did you mean {near[0]}?" if near else "remove it"
        yield (
            f"{where} is not a field of {article} {kind} and has no effect: kubectl refuses it; "
            f"{hint}"
        )


def unknown_fields(
    of: type[Fields], value: Any, path: str = ""
) -> Iterator[tuple[str, str, Collection[str]]]:
    """Yield the fields that a kind does not have: the path of the object that contains the field,
    its name, and the names that the object may have."""
    if not isinstance(value, dict):
        return
    known = structs_in(of)
    for name, below in value.items():
        if name not in known:
            yield path, name, known.keys()
            continue
        struct, is_list = known[name]
        if struct is None:
            continue
        here = f"{path}.{name}" if path else name
        for index, item in enumerate(below if is_list and isinstance(below, list) else [below]):
            yield from unknown_fields(struct, item, f"{here}[{index}]" if is_list else here)


@cache
def structs_in(of: type[Fields]) -> Mapping[str, tuple[type[Fields] | None, bool]]:
    """Return the result of `struct_in` for each field, by name."""
    return {field.encode_name: struct_in(field.type) for field in msgspec.structs.fields(of)}


def struct_in(declared: Any) -> tuple[type[Fields] | None, bool]:
    """Return the Struct that a field holds, or None, and whether the field is a list."""
    for option in get_args(declared) or (declared,):
        if get_origin(option) is list:
            inner = get_args(option)[0]
            return (
                (inner, True)
                if isinstance(inner, type) and issubclass(inner, Fields)
                else (None, True)
            )
        if isinstance(option, type) and issubclass(option, Fields):
            return option, False
    return None, False


def complaint(
    problem: msgspec.ValidationError, object_: Mapping[str, Any], of: type[msgspec.Struct]
) -> str:
    """Return what is wrong with an object that is not of the type `of`, and what to write."""
    message, fix = mistake(problem, of, object_)
    before, unnamed, _ = message.partition("[...]")
    if unnamed:
        # msgspec does not name the key of a value in a mapping of strings.
        entries = _mapping_at(object_, before.rpartition("$.")[2])
        key = next((key for key, value in entries.items() if not isinstance(value, str)), "...")
        message = f"{before}[{key}]"
    text = f"{message}; {fix}" if fix else message
    return text.replace(" or nothing (null)", "")


def _mapping_at(object_: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the mapping at a path like `spec.ports[0]`; an empty one if there is none."""
    value: Any = object_
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError):
            return {}
    return value if isinstance(value, Mapping) else {}
