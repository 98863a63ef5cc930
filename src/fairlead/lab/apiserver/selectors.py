"""Label and field selectors: the objects that a list, a watch or a deletecollection applies to.

In: the `labelSelector` and `fieldSelector` query parameters. Out: a Selection, which matches an
object or not. Grammar and messages follow k8s.io/apimachinery (labels.Parse, fields.ParseSelector);
the table of kinds lists the selectable fields.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fairlead.lab.apiserver.failure import ApiFailure, bad_request
from fairlead.lab.apiserver.kinds import FieldPath, Kind

Labels = Mapping[str, str]
Test = Callable[[Labels], bool]

_SET = re.compile(r"^(?P<key>[^\s!=,()]+)\s+(?P<operator>in|notin)\s+\((?P<values>[^()]*)\)$")
_EQUALITY = re.compile(r"^(?P<key>[^\s!=,()]+)\s*(?P<operator>==|=|!=)\s*(?P<value>[^\s!=,()]*)$")
_EXISTS = re.compile(r"^(?P<absent>!?)\s*(?P<key>[^\s!=,()]+)$")
_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^(]*\))")


class FieldTest(msgspec.Struct, frozen=True):
    """A requirement of a field selector: the field at `path` equals `value`, or (negated)
    does not."""

    path: FieldPath
    value: str
    negated: bool

    def matches(self, obj: Mapping[str, Any]) -> bool:
        value: Any = obj
        for part in self.path:
            value = value.get(part) if isinstance(value, dict) else None
        return (_text(value) == self.value) is not self.negated


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


class Selection(msgspec.Struct, frozen=True, eq=False):
    """The selectors of a request. An empty Selection matches everything."""

    label_tests: tuple[Test, ...] = ()
    field_tests: tuple[FieldTest, ...] = ()

    @property
    def everything(self) -> bool:
        return not self.label_tests and not self.field_tests

    def matches(self, obj: Mapping[str, Any]) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(test(labels) for test in self.label_tests) and all(
            test.matches(obj) for test in self.field_tests
        )


def parse_selection(kind: Kind, label_selector: str, field_selector: str) -> Selection:
    """Parse both selectors. Raise ApiFailure 400 for a malformed selector or a field that is not
    selectable."""
    return Selection(
        parse_labels(label_selector), _parse_fields(kind, label_selector, field_selector)
    )


def parse_labels(text: str) -> tuple[Test, ...]:
    """Parse a label selector: `a=b,c!=d,e in (f, g),h notin (i),j,!k`."""
    parts = [part.strip() for part in _COMMA_OUTSIDE_BRACKETS.split(text)] if text.strip() else []
    return tuple(_label_test(part) for part in parts)


def _label_test(part: str) -> Test:
    if match := _SET.match(part):
        key, values = match["key"], {value.strip() for value in match["values"].split(",")}
        if match["operator"] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if match := _EQUALITY.match(part):
        key, value = match["key"], match["value"]
        if match["operator"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if match := _EXISTS.match(part):
        key = match["key"]
        return (
            (lambda labels: key not in labels)
            if match["absent"]
            else (lambda labels: key in labels)
        )
    raise bad_request(
        f"unable to parse requirement: found '{part}', expected: a key, '!', or an operator with "
        "values"
    )


def _parse_fields(kind: Kind, label_selector: str, field_selector: str) -> tuple[FieldTest, ...]:
    tests = []
    for part in filter(None, (part.strip() for part in field_selector.split(","))):
        match = re.match(r"^([^=!]+?)\s*(==|=|!=)\s*(.*)$", part)
        if match is None:
            raise bad_request(f"invalid selector: '{field_selector}'; can't understand '{part}'")
        path = _field_path(kind, match[1])
        if path is None:
            raise _unknown_field(kind, label_selector, field_selector, match[1])
        tests.append(FieldTest(path, match[3], match[2] == "!="))
    return tuple(tests)


def _field_path(kind: Kind, name: str) -> FieldPath | None:
    if name == "metadata.name" or (name == "metadata.namespace" and kind.namespaced):
        return tuple(name.split("."))
    return kind.fields.get(name)


def _unknown_field(kind: Kind, label_selector: str, field_selector: str, name: str) -> ApiFailure:
    resource = f"{kind.group}/{kind.version}, Resource={kind.plural}"
    return bad_request(
        f'Unable to find "{resource}" that match label selector "{label_selector}", '
        f'field selector "{field_selector}": field label not supported: {name}'
    )
