"""Convert the values of columns between Python and the JSON of OVSDB (RFC 7047, section 5.1).

Pure. In: the type of a column, a value. Out: the value in the other form. The type of the column
determines the form in Python:

    exactly one atom        str, int, float or bool
    zero or one atom        the atom, or None
    any other set           frozenset of atoms
    map                     dict

A UUID is a str in Python. Invariant: `decode` and `apply_difference` return a value of the column's
type or raise Unavailable; `encode` raises Refused for a value of another type."""

import re
from collections.abc import Mapping, Set
from typing import Any

import msgspec

from fairlead.errors import Refused, Unavailable

Atom = str | int | float | bool
Value = Atom | None | frozenset[Any] | Mapping[Any, Any]
"""A value of a column. It must not be changed: rows share it."""

ATOMS: Mapping[str, type] = {
    "string": str,
    "uuid": str,
    "integer": int,
    "real": float,
    "boolean": bool,
}
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_REAL = (int, float)


class ColumnType(msgspec.Struct, frozen=True):
    """The type of a column. `value` is empty unless the column is a map. `maximum` is None if it is
    unlimited."""

    key: str
    value: str = ""
    minimum: int = 1
    maximum: int | None = 1

    @property
    def is_scalar(self) -> bool:
        """Whether the column has exactly one atom."""
        return not self.value and self.minimum == 1 and self.maximum == 1

    @property
    def is_optional(self) -> bool:
        """Whether the column has at most one atom, and may be empty."""
        return not self.value and self.minimum == 0 and self.maximum == 1

    def __str__(self) -> str:
        if self.value:
            return f"map from {self.key} to {self.value}"
        if self.is_scalar:
            return self.key
        return f"{'optional' if self.is_optional else 'set of'} {self.key}"


def decode(kind: ColumnType, data: Any) -> Value:
    """Return the Python value of a column."""
    try:
        if kind.value:
            return _decode_map(kind, data)
        if kind.is_scalar:
            atom: Atom = _decode_atom(kind.key, data)
            return atom
        atoms = _decode_set(kind.key, data)
    except (TypeError, ValueError) as error:
        raise Unavailable(f"expected a {kind}, but received '{_short(data)}'") from error
    if kind.is_optional:
        if len(atoms) > 1:
            raise Unavailable(f"expected a {kind}, but received '{_short(data)}'")
        return next(iter(atoms), None)
    return atoms


def apply_difference(kind: ColumnType, old: Value, data: Any) -> Value:
    """Return the value after a modification that the server reported by `update2` or `update3`
    (ovsdb-server(7), section 4.1.14).

    The difference of a map has the pairs that were added or changed, with their new value, and the
    pairs that were removed, with their old value. The difference of a set has the members that were
    added or removed. Columns with at most one atom have their new value."""
    if kind.is_scalar or kind.is_optional:
        return decode(kind, data)
    changed = decode(kind, data)
    if isinstance(changed, frozenset):
        return changed ^ old if isinstance(old, frozenset) else changed
    assert isinstance(old, Mapping)
    assert isinstance(changed, Mapping)
    new = dict(old)
    for key, value in changed.items():
        if key in old and old[key] == value:
            del new[key]
        else:
            new[key] = value
    return new


def encode(kind: ColumnType, value: Value) -> Any:
    """Return the JSON form of a value. Raise Refused if it is no value of this type."""
    if kind.value:
        if not isinstance(value, Mapping):
            raise _mismatch(kind, value)
        pairs = [
            [_encode_atom(kind.key, key), _encode_atom(kind.value, each)]
            for key, each in value.items()
        ]
        return ["map", pairs]
    if kind.is_scalar:
        return _encode_atom(kind.key, value)
    if value is None and kind.is_optional:
        return ["set", []]
    if isinstance(value, Set):
        if kind.is_optional and len(value) > 1:
            raise _mismatch(kind, value)
        return ["set", [_encode_atom(kind.key, each) for each in value]]
    if isinstance(value, Mapping):
        raise _mismatch(kind, value)
    return _encode_atom(kind.key, value)


def is_uuid(text: object) -> bool:
    """Return whether the value is a UUID in OVSDB's notation."""
    return isinstance(text, str) and _UUID.fullmatch(text) is not None


def _decode_map(kind: ColumnType, data: Any) -> dict[Any, Any]:
    tag, pairs = data
    if tag != "map":
        raise ValueError(tag)
    if kind.key == kind.value == "string":
        found = dict(pairs)
        # Two sets of types are cheaper than a check of each string: most columns of this type have
        # several pairs, and a first read has tens of thousands of rows.
        if {*map(type, found)} | {*map(type, found.values())} <= {str}:
            return found
        raise ValueError("not a string")
    return {_decode_atom(kind.key, key): _decode_atom(kind.value, each) for key, each in pairs}


def _decode_set(key: str, data: Any) -> frozenset[Any]:
    if isinstance(data, list) and data[:1] == ["set"]:
        _, members = data
        return frozenset([_decode_atom(key, each) for each in members])
    return frozenset((_decode_atom(key, data),))


def _decode_atom(key: str, data: Any) -> Any:
    if key == "uuid":
        tag, text = data
        if tag == "uuid" and is_uuid(text):
            return str(text)
        raise ValueError("not a UUID")
    if key == "real" and type(data) in _REAL:
        return float(data)
    if type(data) is ATOMS[key]:
        return data
    raise ValueError(f"not a {key}")


def _encode_atom(key: str, value: Any) -> Any:
    if key == "uuid":
        if not is_uuid(value):
            raise Refused(f"'{_short(value)}' is not a UUID")
        return ["uuid", value]
    if type(value) is ATOMS[key] or (key == "real" and type(value) in _REAL):
        return value
    raise Refused(f"'{_short(value)}' is not a {key}")


def _mismatch(kind: ColumnType, value: Any) -> Refused:
    return Refused(f"'{_short(value)}' is not a {kind}")


def _short(data: Any) -> str:
    return str(data)[:80]
