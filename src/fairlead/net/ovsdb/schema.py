"""The schema of a database: its tables, and the types of their columns (RFC 7047, section 3.2).

Pure. In: the answer to `get_schema`. Out: a `Schema`, or the error that names what it lacks.
Servers of older releases have fewer columns, so a client checks the columns that it uses before it
uses them."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from fairlead.errors import Refused, Unavailable
from fairlead.net.ovsdb.values import ATOMS, ColumnType

UUID = "_uuid"
_IMPLICIT = {UUID: ColumnType("uuid"), "_version": ColumnType("uuid")}
"""Columns that every table has, although no schema lists them."""


class Schema(msgspec.Struct, frozen=True):
    """A database's name, version and tables."""

    name: str
    version: str
    tables: Mapping[str, Mapping[str, ColumnType]]

    def column(self, table: str, column: str) -> ColumnType:
        """Return the type of a column. Raise Refused if the schema does not have it."""
        columns = self.columns(table)
        if (found := columns.get(column)) is None:
            raise self._lacks(f"the column {column} of table {table}")
        return found

    def columns(self, table: str) -> Mapping[str, ColumnType]:
        """Return the types of all columns. Raise Refused if the schema does not have the table."""
        if (found := self.tables.get(table)) is None:
            raise self._lacks(f"the table {table}")
        return found

    def has(self, table: str, column: str) -> bool:
        """Return whether the schema has the column."""
        return column in self.tables.get(table, ())

    def require(self, table: str, columns: Iterable[str]) -> None:
        """Raise Refused with the names of all columns that the schema does not have."""
        missing = [each for each in columns if each not in self.columns(table)]
        if missing:
            plural = "s" if len(missing) > 1 else ""
            raise self._lacks(f"the column{plural} {', '.join(missing)} of table {table}")

    def _lacks(self, what: str) -> Refused:
        return Refused(
            f"the schema of database {self.name}, version {self.version}, does not have {what}",
            fix="use a server whose release has it",
        )


def read_schema(data: bytes) -> Schema:
    """Return the schema of an answer to `get_schema`. Raise Unavailable if it is malformed."""
    try:
        answer = msgspec.json.decode(data, type=_Schema)
        tables = {
            name: _IMPLICIT
            | {column: _type_of(each.type) for column, each in table.columns.items()}
            for name, table in answer.tables.items()
        }
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unavailable(f"the answer to get_schema is malformed: {error}") from error
    return Schema(answer.name, answer.version, tables)


class _Column(msgspec.Struct):
    type: Any


class _Table(msgspec.Struct):
    columns: dict[str, _Column]


class _Schema(msgspec.Struct):
    name: str
    tables: dict[str, _Table]
    version: str = "unknown"


class _Base(msgspec.Struct):
    type: str


class _Type(msgspec.Struct):
    key: str | _Base
    value: str | _Base = ""
    min: int = 1
    max: int | str = 1


def _type_of(data: Any) -> ColumnType:
    if isinstance(data, str):
        return ColumnType(_atom_of(data))
    kind = msgspec.convert(data, _Type)
    return ColumnType(
        _atom_of(kind.key),
        _atom_of(kind.value) if kind.value else "",
        kind.min,
        kind.max if isinstance(kind.max, int) else None,
    )


def _atom_of(base: str | _Base) -> str:
    name = base if isinstance(base, str) else base.type
    if name not in ATOMS:
        raise ValueError(f"unknown type {name}")
    return name
