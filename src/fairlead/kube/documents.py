"""Read the documents of a manifest as kubectl does. Pure.

In: the text of a file. Out: the value of each document, or why it cannot be read. Invariants: a
document that cannot be read does not hide the others, although kubectl stops at the first; a value
is what kubectl sends to the API server. kubectl splits a file at lines that begin with `---`
(k8s.io/apimachinery util/yaml), parses each part as YAML 1.1 with the rules of go-yaml v2, which
differ from those of PyYAML (`22:30` and `=` are text, `y` is true, `1e3` is a number), and converts
the value to JSON (sigs.k8s.io/yaml). A file that begins with `{` is a stream of JSON values."""

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import yaml
from yaml.events import (
    AliasEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
)
from yaml.reader import ReaderError

from fairlead.errors import of_yaml, plain

_WORDS: Final[dict[str, Any]] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE"), True),
    **dict.fromkeys(("on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE"), False),
    **dict.fromkeys(("off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}
_INTEGER: Final = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0[oO]?([0-7]+)|([0-9]+))")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SOMETHING: Final = re.compile(r"\S")
_SEPARATOR: Final = re.compile(r"^---(.*)\n?", re.MULTILINE)
_TAG: Final = "tag:yaml.org,2002:"
_MAX_DEPTH: Final = 200
"""A manifest is not nested deeper. go-yaml allows 10,000 levels, which Python's stack does not."""


class Content(msgspec.Struct, frozen=True):
    """One document of a file, which is not empty. `number` counts the documents from 1, `line` is
    the first line of the document, or the line of the problem.

    `problem`: why the document could not be read; empty: `value` is its value. `remarks`: what
    kubectl ignores in silence."""

    number: int
    line: int
    value: Any = None
    problem: str = ""
    remarks: tuple[str, ...] = ()


class _Unreadable(Exception):
    """A document cannot be read. `line` counts from 0, within the document."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line, self.problem = line, problem


def read_contents(text: str) -> Iterator[Content]:
    """Yield the documents of a file. Documents without content are counted and not yielded."""
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        return _json_contents(text)
    return _yaml_contents(text, 1, 0)


def _json_contents(text: str) -> Iterator[Content]:
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    position, number, line = 0, 0, 1
    while found := _SOMETHING.search(text, position):
        line += text.count("\n", position, found.start())
        position = found.start()
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as problem:
            yield from _after_json(text[position:], number, line, problem)
            return
        number += 1
        yield Content(number, line, value)
        line += text.count("\n", position, end)
        position = end


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a value of JSON")


def _after_json(rest: str, number: int, line: int, problem: Exception) -> Iterator[Content]:
    """Yield the documents of the rest of a file that is not JSON, after `number` documents.

    As kubectl does, read it as YAML unless two values in JSON came before. The message for a file
    that is neither is the one about JSON."""
    if number < 2:
        for content in _yaml_contents(rest, line, number):
            if content.problem and content.number == 1:
                why = f"this is neither JSON ({plain(problem)}) nor YAML ({content.problem})"
                content = msgspec.structs.replace(content, problem=why)
            yield content
        return
    yield Content(number + 1, line, problem=f"this is not valid JSON: {plain(problem)}")
    if following := re.search(r"^---", rest, re.MULTILINE):
        start = following.start()
        yield from _yaml_contents(rest[start:], line + rest.count("\n", 0, start), number + 1)


def _yaml_contents(text: str, line: int, number: int) -> Iterator[Content]:
    """Yield the documents of a text that begins in this line, after `number` documents."""
    for first, after, part in _parts(text):
        if not part and not after:
            continue
        number += 1
        if after and not after.startswith("#"):
            why = f'"{after}" follows "---" in a line that separates documents'
            yield Content(number, line + first - 1, problem=why)
        elif part and (content := _read(part, number, line + first)) is not None:
            yield content


def _parts(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the parts between the lines that begin with `---`: the index of the first line, what
    follows `---` in the line before, and the text."""
    first, after, start = 0, "", 0
    for found in _SEPARATOR.finditer(text):
        yield first, after, text[start : found.start()]
        first += text.count("\n", start, found.end())
        after, start = found[1].strip(), found.end()
    yield first, after, text[start:]


def _read(part: str, number: int, line: int) -> Content | None:
    """Return the document of one part, which begins in this line; None if it has no content."""
    content = _parsed(part, number, line)
    if content is not None and content.problem and "{{" in part:
        hint = "it contains {{: render a template first, such as a chart with `helm template`"
        return msgspec.structs.replace(content, problem=f"{content.problem}; {hint}")
    return content


def _parsed(part: str, number: int, line: int) -> Content | None:
    parser = yaml.CSafeLoader(part.encode("utf-8", "surrogateescape"))
    reader = _Reader(parser.get_event, line)
    try:
        value = reader.document()
    except _Unreadable as problem:
        return Content(number, line + problem.line, problem=problem.problem)
    except yaml.MarkedYAMLError as problem:
        why = of_yaml(problem)
        mark = problem.problem_mark or problem.context_mark
        at = line + (mark.line if mark is not None else 0)
        return Content(number, at, problem=f"this is not valid YAML: {why}")
    except ReaderError as problem:
        why = f"this is not valid YAML: {problem.reason}; is it a text in UTF-8?"
        return Content(number, line, problem=why)
    finally:
        parser.dispose()
    if value is None:
        return None
    return Content(number, line + reader.first_line, value, remarks=tuple(reader.remarks))


class _Reader:
    """Builds the value of one document from its events, as go-yaml v2 and sigs.k8s.io/yaml do."""

    def __init__(self, next_event: Callable[[], Any], line: int) -> None:
        self._next, self._line = next_event, line
        self._anchors: dict[str, tuple[Any, int] | None] = {}
        self._count = self._aliased = 0
        self._depth = 0
        self.first_line = 0
        self.remarks: list[str] = []

    def document(self) -> Any:
        """Return the value of the first document; None if there is none."""
        self._next()  # The start of the stream.
        if not isinstance(self._next(), yaml.DocumentStartEvent):
            return None
        event = self._next()
        self.first_line = event.start_mark.line
        value = self._value(event)
        end = self._next()
        try:
            more = not isinstance(self._next(), yaml.StreamEndEvent)
        except yaml.YAMLError:
            more = True
        if more:
            line = self._line + end.start_mark.line
            self.remarks.append(f"what follows the end of the document in line {line} is ignored")
        return value

    def _value(self, event: Any) -> Any:
        if type(event) is AliasEvent:
            return self._alias(event)
        before = self._count
        self._count += 1
        anchor = event.anchor
        if anchor is not None:
            self._anchors[anchor] = None
        if type(event) is ScalarEvent:
            value = _scalar(event)
        else:
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise _Unreadable(
                    event.start_mark.line, f"it is nested deeper than {_MAX_DEPTH} levels"
                )
            value = self._mapping() if type(event) is MappingStartEvent else self._sequence()
            self._depth -= 1
        if anchor is not None:
            self._anchors[anchor] = (value, self._count - before)
        return value

    def _alias(self, event: Any) -> Any:
        line = event.start_mark.line
        if event.anchor not in self._anchors:
            raise _Unreadable(line, f"unknown anchor '{event.anchor}' referenced")
        if (known := self._anchors[event.anchor]) is None:
            raise _Unreadable(line, f"anchor '{event.anchor}' value contains itself")
        value, size = known
        self._count += size
        self._aliased += size
        many = self._aliased > 100 and self._count > 1000
        if many and self._aliased / self._count > _allowed_ratio(self._count):
            raise _Unreadable(
                line, "document contains excessive aliasing; write the values without aliases"
            )
        return value

    def _sequence(self) -> list[Any]:
        found = []
        while type(event := self._next()) is not SequenceEndEvent:
            found.append(self._value(event))
        return found

    def _mapping(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while type(event := self._next()) is not MappingEndEvent:
            line = event.start_mark.line
            if type(event) is ScalarEvent and event.value == "<<" and _merges(event):
                self._merge(found, self._value(self._next()), line)
                continue
            key = _key(self._value(event), line)
            if key in lines:
                self.remarks.append(
                    f"{key} in line {self._line + lines[key]} has no effect, because line "
                    f"{self._line + line} sets it again"
                )
            lines[key] = line
            found[key] = self._value(self._next())
        return found

    def _merge(self, found: dict[str, Any], value: Any, line: int) -> None:
        # In a list, the values of earlier mappings take precedence.
        for each in reversed(value) if isinstance(value, list) else [value]:
            if not isinstance(each, dict):
                raise _Unreadable(line, "map merge requires map or sequence of maps as the value")
            found.update(each)


def _merges(event: Any) -> bool:
    return bool(event.implicit[0]) or event.tag == f"{_TAG}merge"


def _allowed_ratio(count: int) -> float:
    """Return the share of values that may come from aliases, as in go-yaml."""
    low, high = 400_000, 4_000_000
    return 0.99 - 0.89 * (min(max(count, low), high) - low) / (high - low)


def _scalar(event: Any) -> Any:
    text, tag = event.value, event.tag
    if tag is None:
        return resolve(text, event.start_mark.line) if event.implicit[0] else text
    return _tagged(event, tag.removeprefix(_TAG) if tag.startswith(_TAG) else "")


def resolve(text: str, line: int = 0) -> Any:
    """Return the value of a plain scalar."""
    if text in _WORDS:
        value = _WORDS[text]
        return _number(value, line) if type(value) is float else value
    first = text[0]
    if first in "0123456789+-":
        plain = text.replace("_", "")
        if found := _INTEGER.fullmatch(plain):
            return _integer(found, plain)
        if _FLOAT.fullmatch(plain) and math.isfinite(value := float(plain)):
            return _number(value, line)
    elif first == "." and _FLOAT.fullmatch(text) and math.isfinite(value := float(text)):
        return _number(value, line)
    return text


def _integer(found: re.Match[str], plain: str) -> int | float | str:
    sign, hexadecimal, binary, octal, decimal = found.groups()
    digits, base = next(
        (digits, base)
        for digits, base in ((hexadecimal, 16), (binary, 2), (octal, 8), (decimal, 10))
        if digits is not None
    )
    value = int(digits, base) * (-1 if sign == "-" else 1)
    if -(1 << 63) <= value < 1 << 63:
        return value
    if 0 < value < 1 << 64 and sign != "+":
        return float(value)
    return float(plain) if _FLOAT.fullmatch(plain) else plain


def _number(value: float, line: int) -> int | float:
    """Return a number as it is after the conversion to JSON, in which 80.0 is 80."""
    if not math.isfinite(value):
        raise _Unreadable(line, f"{value} is not a number in JSON")
    return int(value) if value.is_integer() and abs(value) < 1 << 63 else value


def _tagged(event: Any, tag: str) -> Any:
    """Return the value of a scalar with an explicit tag. Tags of applications have no meaning."""
    text, line = event.value, event.start_mark.line
    if tag == "binary":
        try:
            return base64.b64decode("".join(text.splitlines()), validate=True).decode(
                "utf-8", "replace"
            )
        except binascii.Error:
            raise _Unreadable(line, "!!binary value contains invalid base64 data") from None
    if tag not in ("bool", "int", "float", "null"):
        return text
    value = resolve(text, line)
    types = {"bool": (bool,), "int": (int,), "float": (int, float), "null": (type(None),)}[tag]
    if type(value) not in types:
        raise _Unreadable(line, f"`{text}` is not a value of type {tag}")
    return value


def _key(value: Any, line: int) -> str:
    """Return the key of a mapping in JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    what = "null" if value is None else "a mapping" if isinstance(value, dict) else "a list"
    raise _Unreadable(line, f"the key of a field cannot be {what}")
