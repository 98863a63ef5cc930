"""The types of an object's fields, and the fields that its kind has. Pure; no argument is modified.

In: an object as a client wrote it. Out: the object without nulls, the paths of unknown fields, and
messages about values of the wrong type."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec

from fairlead.errors import plain
from fairlead.kube.rules.fields import Fields

_STRINGS: Final = ("labels", "annotations", "selector", "matchLabels", "data")
"""Fields that hold a mapping of strings. In Go, null as the value of a string is the empty one."""
_WORDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "object": "a mapping",
    "array": "a list",
    "null": "null",
}
_WRONG_TYPE: Final = re.compile(r"Expected `(.+?)`, got `(.+?)`(?: - at `\$\.?(.*)`)?")
_MISSING: Final = re.compile(r"Object missing required field `(.+?)`(?: - at `\$\.?(.*)`)?")
_OUTSIDE: Final = re.compile(r"Expected `(.+?)` ([^`,]+?) - at `\$\.?(.*)`")
_NO_CHOICE: Final = re.compile(r"Invalid enum value (.+?) - at `\$\.?(.*)`")


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
    """Return the message about a value of an object that is not of the type `of`, with its path."""
    text = plain(problem)
    if found := _MISSING.fullmatch(text):
        return f"{found[2]}.{found[1]} is missing" if found[2] else f"{found[1]} is missing"
    if found := _NO_CHOICE.fullmatch(text):
        choices = [each for each in _choices(of, found[2]) if each]
        return f"{found[2]} must be {' or '.join(choices)}, and is {found[1]}"
    if found := _OUTSIDE.fullmatch(text):
        return f"{found[3]} must be {_WORDS.get(found[1], found[1])} {found[2]}"
    if not (found := _WRONG_TYPE.fullmatch(text)):
        return text
    wanted = " or ".join(_WORDS.get(each, each) for each in found[1].split(" | ") if each != "null")
    path = found[3] or "the document"
    got = "a number that is no integer" if found[2] == "float" else _WORDS.get(found[2], found[2])
    if not path.endswith("[...]"):
        return f"{path} must be {wanted}, and is {got}"
    path = path.removesuffix("[...]")
    keys = [key for key, value in _mapping_at(object_, path).items() if not isinstance(value, str)]
    quotes = (
        ": put it in quotes"
        if got in ("an integer", "a number", "true or false")
        else f", and is {got}"
    )
    return f"{path}: the value of {', '.join(keys[:1])} must be {wanted}{quotes}"


def _choices(of: Any, path: str) -> Sequence[str]:
    """Return the values that a field may have, by its path: `spec.ports[0].protocol`."""
    for name in re.findall(r"[^.\[\]]+", path):
        options = list(_options(of))
        if name.isdecimal():
            of = next(get_args(each)[0] for each in options if get_args(each))
        else:
            structs = [each for each in options if hasattr(each, "__struct_fields__")]
            declared = msgspec.structs.fields(structs[0])
            of = next(each.type for each in declared if each.encode_name == name)
    return [
        str(value)
        for each in _options(of)
        if get_origin(each) is Literal
        for value in get_args(each)
    ]


def _options(declared: Any) -> Iterator[Any]:
    """Yield the types of a union; a type that is no union itself."""
    if get_origin(declared) in (Union, UnionType):
        yield from get_args(declared)
    else:
        yield declared


def _mapping_at(object_: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the mapping at a path like `spec.ports[0]`; an empty one if there is none."""
    value: Any = object_
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError):
            return {}
    return value if isinstance(value, Mapping) else {}
