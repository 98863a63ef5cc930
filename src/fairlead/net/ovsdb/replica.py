"""A copy of the monitored rows of a database.

Pure. In: the initial answer and the notifications of monitor_cond_since, as `TableUpdates`. Out:
the rows, and what has changed. Follows ovsdb-server(7), sections 4.1.14 and 4.1.15. Invariants: a
`Row` never changes, a changed row is a new `Row`; an update that does not fit the rows raises
Unavailable, and the copy must then be read again from the beginning."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from fairlead.errors import Unavailable
from fairlead.net.ovsdb.operations import Condition
from fairlead.net.ovsdb.schema import Schema
from fairlead.net.ovsdb.values import ColumnType, Value, apply_difference, decode, is_uuid


class Table(msgspec.Struct, frozen=True):
    """What to monitor of a table: columns, of the rows that satisfy at least one of the conditions;
    without conditions, of all rows. (In an operation, a row must satisfy all of them.)"""

    columns: tuple[str, ...]
    where: tuple[Condition, ...] = ()


class Row(msgspec.Struct, frozen=True):
    """A row as of one moment. `columns` has the monitored columns."""

    uuid: str
    columns: Mapping[str, Value]

    def __getitem__(self, column: str) -> Value:
        return self.columns[column]

    def string(self, column: str) -> str:
        """Return the string or UUID of a column; empty if the column is optional and empty."""
        value = self.columns[column]
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        raise TypeError(f"column {column} is no string")

    def integer(self, column: str) -> int:
        """Return the integer of a column; 0 if the column is optional and empty."""
        value = self.columns[column]
        if value is None:
            return 0
        if isinstance(value, int):
            return value
        raise TypeError(f"column {column} is no integer")

    def boolean(self, column: str) -> bool:
        """Return whether the column is true; false if the column is optional and empty."""
        return self.integer(column) == 1

    def strings(self, column: str) -> frozenset[str]:
        """Return the strings or UUIDs of a set."""
        value = self.columns[column]
        if isinstance(value, frozenset):
            return value
        raise TypeError(f"column {column} is no set")

    def map(self, column: str) -> Mapping[str, str]:
        """Return the map of a column."""
        value = self.columns[column]
        if isinstance(value, Mapping):
            return value
        raise TypeError(f"column {column} is no map")


Rows = Mapping[str, Row]
"""Rows by their UUID."""
Changes = Mapping[str, Mapping[str, Row | None]]
"""By table and UUID: the present row; None if the row was deleted, or no longer satisfies the
conditions."""


class RowUpdate(msgspec.Struct):
    """One row of a notification. `initial`, `insert` and `modify` have columns; `delete` is empty,
    and null on the wire."""

    initial: dict[str, Any] | None = None
    insert: dict[str, Any] | None = None
    modify: dict[str, Any] | None = None
    delete: Any = msgspec.UNSET


TableUpdates = Mapping[str, Mapping[str, RowUpdate]]


class Replica:
    """The rows of the monitored tables."""

    def __init__(self, schema: Schema, tables: Mapping[str, Table]) -> None:
        """Raise Refused if the schema lacks a table or column."""
        self._types: dict[str, dict[str, ColumnType]] = {
            name: {column: schema.column(name, column) for column in table.columns}
            for name, table in tables.items()
        }
        self.tables: dict[str, dict[str, Row]] = {name: {} for name in tables}

    def replace(self, updates: TableUpdates) -> Changes:
        """Replace all rows by those of a complete answer, and return the differences."""
        found = self._read(updates, {})
        changes = {}
        for name, before in self.tables.items():
            now = {uuid: row for uuid, row in found.get(name, {}).items() if row is not None}
            if changed := dict(_difference(before, now)):
                changes[name] = changed
            self.tables[name] = now
        return changes

    def update(self, updates: TableUpdates) -> Changes:
        """Apply a notification, and return what it has changed."""
        changes = self._read(updates, self.tables)
        for name, changed in changes.items():
            table = self.tables[name]
            for uuid, row in changed.items():
                if row is None:
                    table.pop(uuid, None)
                else:
                    table[uuid] = row
        return changes

    def _read(
        self, updates: TableUpdates, tables: Mapping[str, Rows]
    ) -> dict[str, dict[str, Row | None]]:
        """Return the rows of a notification, which is about these rows. Nothing is changed, so a
        malformed notification leaves all rows as they were."""
        found: dict[str, dict[str, Row | None]] = {}
        for name, rows in updates.items():
            if (types := self._types.get(name)) is None:
                raise Unavailable(f"the server sent rows of table {name}, which is not monitored")
            known = tables.get(name, {})
            if changed := {
                uuid: _updated(name, types, uuid, known.get(uuid), each)
                for uuid, each in rows.items()
            }:
                found[name] = changed
        return found


def _difference(before: Rows, now: Rows) -> Iterator[tuple[str, Row | None]]:
    for uuid in before.keys() - now.keys():
        yield uuid, None
    for uuid, row in now.items():
        if before.get(uuid) != row:
            yield uuid, row


def _updated(
    table: str, types: Mapping[str, ColumnType], uuid: str, old: Row | None, update: RowUpdate
) -> Row | None:
    try:
        new = update.initial if update.initial is not None else update.insert
        if new is not None:
            if not is_uuid(uuid):
                raise Unavailable("its name is not a UUID")
            return Row(uuid, _complete(types, new))
        if update.modify is not None:
            if old is None:
                raise Unavailable("it was modified, but it is unknown")
            return Row(uuid, _modified(types, old.columns, update.modify))
        if update.delete is msgspec.UNSET:
            raise Unavailable("the update is empty")
    except Unavailable as error:
        raise Unavailable(f"row {uuid} of table {table}: {error.message}") from error
    return None


def _complete(types: Mapping[str, ColumnType], data: dict[str, Any]) -> dict[str, Value]:
    """Return the columns of a new row. The server leaves out columns that have the default value of
    their type."""
    return {
        column: decode(kind, data[column]) if column in data else default(kind)
        for column, kind in types.items()
    }


def _modified(
    types: Mapping[str, ColumnType], old: Mapping[str, Value], data: dict[str, Any]
) -> dict[str, Value]:
    changed = {
        column: apply_difference(types[column], old[column], value)
        for column, value in data.items()
        if column in types
    }
    return {**old, **changed}


def default(kind: ColumnType) -> Value:
    """Return the value of a column of a new row that was given none (RFC 7047, section 5.2.1)."""
    if kind.value:
        return {}
    if kind.is_optional:
        return None
    if not kind.is_scalar:
        return frozenset()
    return _DEFAULTS[kind.key]


_DEFAULTS: Mapping[str, Value] = {
    "string": "",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "integer": 0,
    "real": 0.0,
    "boolean": False,
}
