"""Words for values that do not fit the type that they are read as.

In: the error of msgspec, the type, and the value as it was written. Out: what is wrong and where,
in the terms of YAML and JSON, and what to write instead. Pure."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from fairlead.errors import plain

_PARTS = re.compile(r"(?P<said>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_QUOTED = re.compile(r"`([^`]*)`")
_WORDS = {
    "object": "a mapping of names to values",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing (null)",
}
_LIMITS = {">=": "at least", "<=": "at most", ">": "greater than", "<": "less than"}
_LIMIT = re.compile(r"Expected `(\w+)[^`]*`( of length)? (>=|<=|>|<) (\S+)")
_SHOWN_LENGTH = 60
QUOTE = "write it in quotes"


class Mistake(NamedTuple):
    """`message`: what is wrong, and the path of the value. `fix`: what to write; may be empty."""

    message: str
    fix: str


def mistake(problem: msgspec.ValidationError, expected: Any, given: object = None) -> Mistake:
    """Return the mistake that msgspec found when it read `given` as the type `expected`."""
    parts = _PARTS.fullmatch(str(problem))
    said, path = (parts["said"], parts["path"] or "") if parts else (str(problem), "")
    steps = [name or index for name, index in _STEP.findall(path)]
    found, value = _type_at(inspect.type_info(expected), steps), _value_at(given, steps)
    if parts and parts["key"]:
        message, fix = "a name is not a text", QUOTE
    else:
        message, fix = _worded(said, found, value)
    return Mistake(f"{message} - at ${path}" if path else message, fix)


def explain(problem: msgspec.DecodeError, expected: Any) -> str:
    """Return why JSON cannot be read as the type `expected`."""
    if isinstance(problem, msgspec.ValidationError):
        message, fix = mistake(problem, expected)
        return f"{message}; {fix}" if fix else message
    return plain(problem)


def suggestion(name: str, known: Iterable[str], what: str) -> str:
    """Return a question that names what resembles `name`; if nothing does, a list of what is known,
    after the word `what`."""
    by_case = {each.lower(): each for each in known}
    if near := difflib.get_close_matches(name.lower(), by_case, 2, 0.6):
        return f"did you mean {' or '.join(by_case[each] for each in near)}?"
    return f"{what}: {', '.join(sorted(by_case.values()))}" if by_case else ""


def _worded(said: str, found: inspect.Type, value: object) -> tuple[str, str]:
    """Return (message, fix) for what msgspec said about `value` of the type `found`."""
    names = _QUOTED.findall(said)
    if "unknown field" in said:
        known = [each.encode_name for each in _fields(found)]
        return f"there is no field {names[0]}", suggestion(names[0], known, "fields there")
    if "missing required field" in said:
        return f"the field {names[0]} is missing", f"add {names[0]}, which is required"
    if said.startswith("Invalid enum value"):
        choices = ", ".join(str(each) or '""' for each in _choices(found))
        return f"{said[19:]} is not a valid value", f"write one of: {choices}"
    if "matching regex" in said:
        form = _description(found)
        return f"{_shown(value)} does not have the required form", f"write {form}" if form else ""
    if limit := _LIMIT.match(said):
        return _limited(limit, value)
    if names and said.startswith("Expected"):
        wanted = " or ".join(_WORDS.get(each, each) for each in names[0].split(" | "))
        if names[1:] == ["null"]:
            return "the value is missing", f"write {wanted}, or remove the field"
        scalar = names[0].startswith("str") and names[1:] not in (["object"], ["array"])
        fix = QUOTE if scalar else f"write {wanted}"
        if isinstance(value, str | int | float):
            return f"{_shown(value)} is not {wanted}", fix
        got = _WORDS.get(names[1], names[1]) if names[1:] else "something else"
        return f"this is {got}, not {wanted}", fix
    return said, ""


def _limited(limit: re.Match[str], value: object) -> tuple[str, str]:
    kind, length, comparison, bound = limit.groups()
    if not length:
        fix = f"write a number that is {_LIMITS[comparison]} {bound.removesuffix('.0')}"
        return f"{_shown(value)} is out of range", fix
    one, many = ("character", "characters") if kind == "str" else ("entry", "entries")
    if (comparison, bound) == (">=", "1"):
        return f"{_WORDS[kind]} without {many} is not valid", f"write at least one {one}"
    return "the length is not valid", f"write {_LIMITS[comparison]} {bound} {many}"


def _shown(value: object) -> str:
    """Return a value as it was written."""
    text = str(value)
    short = text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."
    if isinstance(value, bool):
        return text.lower()
    return f"'{short}'" if isinstance(value, str) else short


def _type_at(root: inspect.Type, steps: Sequence[str]) -> inspect.Type:
    """Return the type at a path, as far as the path can be followed."""
    found = root
    for step in steps:
        for option in _options(found):
            match option:
                case inspect.StructType(fields=fields):
                    of_name = {each.encode_name: each.type for each in fields}
                    if step in of_name:
                        found = of_name[step]
                case inspect.DictType(value_type=found) | inspect.VarTupleType(item_type=found):
                    pass
                case inspect.ListType(item_type=found):
                    pass
    return found


def _options(found: inspect.Type) -> Sequence[inspect.Type]:
    """Return the types of a union; the type itself if it is not one."""
    bare = found.type if isinstance(found, inspect.Metadata) else found
    return bare.types if isinstance(bare, inspect.UnionType) else (bare,)


def _fields(found: inspect.Type) -> Sequence[inspect.Field]:
    return [
        field
        for option in _options(found)
        if isinstance(option, inspect.StructType)
        for field in option.fields
    ]


def _description(found: inspect.Type) -> str:
    """Return the description of a type in its `msgspec.Meta`; empty if it has none."""
    schema = found.extra_json_schema if isinstance(found, inspect.Metadata) else None
    return str((schema or {}).get("description", ""))


def _choices(found: inspect.Type) -> Sequence[object]:
    return [
        value
        for option in _options(found)
        if isinstance(option, inspect.LiteralType)
        for value in option.values
    ]


def _value_at(given: object, steps: Sequence[str]) -> object:
    """Return the value at a path; None if the path has a part that msgspec does not name."""
    found = given
    for step in steps:
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal():
            found = found[int(step)] if int(step) < len(found) else None
        else:
            return None
    return found
