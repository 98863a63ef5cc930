"""The operations of a transaction, and their results (RFC 7047, section 5.2).

Pure. In: operations with Python values. Out: their JSON by the schema; the results of an answer, or
the error that it means. Invariant: every `Insert` names the UUID of its row, which Open vSwitch
2.13 and later accept (ovsdb-server(7), section 5.2.1). So other operations of the transaction can
refer to the row, and a transaction whose answer was lost can be repeated: the server refuses a
second row with the same UUID."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.net.ovsdb.schema import UUID, Schema
from fairlead.net.ovsdb.values import ColumnType, Value, decode, encode

Condition = tuple[str, str, Value]
"""A column, a function of RFC 7047 (`==`, `!=`, `includes`, `excludes`, `<`, ...), a value."""
Values = Mapping[str, Value]
"""Values by the name of the column."""
_SETS_AND_MAPS = ("insert", "delete")


class OutcomeUnknown(Unavailable):
    """A transaction was sent, but it is unknown whether the server has executed or will execute it.
    Repeat it with the same UUIDs, or read the rows again."""


class Insert(msgspec.Struct, frozen=True, tag="insert"):
    """Insert a row. Columns that are not given get the default value of their type."""

    table: str
    row: Values
    uuid: str


class Update(msgspec.Struct, frozen=True, tag="update"):
    """Set columns of the selected rows."""

    table: str
    where: tuple[Condition, ...]
    row: Values


class Mutate(msgspec.Struct, frozen=True, tag="mutate"):
    """Change columns of the selected rows, relative to their value on the server. Each mutation is
    a column, a mutator (`insert`, `delete`, `+=`, ...) and a value. To delete keys of a map
    whatever their values are, give a frozenset of keys."""

    table: str
    where: tuple[Condition, ...]
    mutations: tuple[Condition, ...]


class Delete(msgspec.Struct, frozen=True, tag="delete"):
    """Delete the selected rows."""

    table: str
    where: tuple[Condition, ...]


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Require that the selected rows have exactly these values in the columns of `rows`; otherwise
    nothing of the transaction is done, and it raises Conflict. No `rows`: require that no row is
    selected."""

    table: str
    where: tuple[Condition, ...]
    rows: tuple[Values, ...]


class Select(msgspec.Struct, frozen=True, tag="select"):
    """Read columns of the selected rows."""

    table: str
    where: tuple[Condition, ...]
    columns: tuple[str, ...]


class Comment(msgspec.Struct, frozen=True, tag="comment"):
    """Write a text into the server's log of transactions."""

    comment: str


Operation = Insert | Update | Mutate | Delete | Wait | Select | Comment


class Result(msgspec.Struct, frozen=True):
    """What one operation did. `count`: the number of rows that an update, mutation or deletion
    selected. If the answer was lost, it is the count of the repetition, or None if the insertion of
    a row proves that the transaction was executed. `rows`: the rows that a Select read."""

    uuid: str = ""
    count: int | None = None
    rows: tuple[Values, ...] = ()


def new_uuid() -> str:
    """Return a random UUID for an Insert."""
    return str(uuid.uuid4())


def by_uuid(row: str) -> tuple[Condition, ...]:
    """Return the conditions that select one row by its UUID."""
    return ((UUID, "==", row),)


def encode_operation(schema: Schema, operation: Operation) -> dict[str, Any]:
    """Return the JSON of an operation. Raise Refused if a table or column does not exist, or if a
    value does not have the column's type."""
    match operation:
        case Insert(table, row, row_uuid):
            encode(ColumnType("uuid"), row_uuid)
            return _op(operation, row=_encode_row(schema, table, row), uuid=row_uuid)
        case Update(table, where, row):
            conditions = encode_conditions(schema, table, where)
            return _op(operation, where=conditions, row=_encode_row(schema, table, row))
        case Mutate(table, where, mutations):
            conditions = encode_conditions(schema, table, where)
            changes = [_encode_mutation(schema, table, each) for each in mutations]
            return _op(operation, where=conditions, mutations=changes)
        case Delete(table, where):
            return _op(operation, where=encode_conditions(schema, table, where))
        case Select(table, where, columns):
            schema.require(table, columns)
            conditions = encode_conditions(schema, table, where)
            return _op(operation, where=conditions, columns=list(columns))
        case Wait(table, where, rows):
            return _op(
                operation,
                where=encode_conditions(schema, table, where),
                columns=sorted(rows[0]) if rows else [UUID],
                rows=[_encode_row(schema, table, each) for each in rows],
                until="==",
                timeout=0,
            )
        case Comment(comment):
            return {"op": "comment", "comment": comment}


def encode_conditions(schema: Schema, table: str, where: Sequence[Condition]) -> list[Any]:
    """Return the JSON of conditions. Raise Refused if the table or a column does not exist."""
    schema.columns(table)
    return [
        [column, function, encode(schema.column(table, column), value)]
        for column, function, value in where
    ]


def is_repeatable(operations: Sequence[Operation]) -> bool:
    """Return whether a second execution leaves the database as the first one did, or is refused.

    An Insert makes the whole transaction so, because the server refuses a second row with its
    UUID. Arithmetic is so if the transaction waits for the value that it changes."""
    if any(isinstance(each, Insert) for each in operations):
        return True
    awaited = {
        (each.table, column)
        for each in operations
        if isinstance(each, Wait)
        for row in each.rows
        for column in row
    }
    return all(
        mutator in _SETS_AND_MAPS or (each.table, column) in awaited
        for each in operations
        if isinstance(each, Mutate)
        for column, mutator, _ in each.mutations
    )


def inserted(operations: Sequence[Operation]) -> tuple[Insert, ...]:
    """Return the insertions of a transaction."""
    return tuple(each for each in operations if isinstance(each, Insert))


def read_results(
    schema: Schema, operations: Sequence[Operation], answer: Any
) -> tuple[Result, ...]:
    """Return the results of the operations. Raise the error that the answer reports, and
    OutcomeUnknown if the answer is malformed."""
    if not isinstance(answer, list):
        raise OutcomeUnknown(f"the answer to transact is no list: '{str(answer)[:80]}'")
    for number, each in enumerate(answer):
        if isinstance(each, dict) and each.get("error"):
            # An error of the commit follows the results of all operations.
            failed = operations[number] if number < len(operations) else None
            raise error_of(each, failed)
    if len(answer) < len(operations):
        raise OutcomeUnknown(
            f"the answer to {len(operations)} operations has only {len(answer)} results"
        )
    return tuple(
        _read_result(schema, operation, each)
        for operation, each in zip(operations, answer, strict=False)
    )


def error_of(answer: Mapping[str, Any], operation: Operation | None) -> FairleadError:
    """Return the error that the server reported for an operation, or for the commit."""
    name = str(answer["error"])
    details = str(answer.get("details") or "")
    what = describe(operation) if operation is not None else "the commit"
    text = f"{what}: the server answered '{name}'" + (f": {details}" if details else "")
    if name in _CONFLICTS:
        return Conflict(text, fix="read the rows again")
    if name in _PASSING:
        return Unavailable(text)
    return Refused(text)


_CONFLICTS = ("timed out", "duplicate uuid", "referential integrity violation")
"""Another client has changed, inserted or deleted a row that the transaction is about."""
_PASSING = (
    "not leader",
    "cluster error",
    "inconsistent data",
    "ovsdb error",
    "I/O error",
    "resources exhausted",
    "aborted",
    "not allowed",
    "unknown database",
)
"""Errors of the server or its cluster, which say nothing about the transaction. A member that has
not joined its cluster yet does not know the database."""


def describe(operation: Operation) -> str:
    """Return a text for messages, such as `update of Load_Balancer where name == "web"`."""
    name = type(operation).__name__.lower()
    if isinstance(operation, Comment):
        return name
    if isinstance(operation, Insert):
        return f"{name} of {operation.table} {operation.uuid}"
    where = " and ".join(
        f"{column} {how} {_shown(value)}" for column, how, value in operation.where
    )
    return f"{name} of {operation.table}" + (f" where {where}" if where else "")


def _shown(value: Any) -> str:
    return str(value)[:80]


def _op(
    operation: Insert | Update | Mutate | Delete | Wait | Select, **members: Any
) -> dict[str, Any]:
    return {"op": type(operation).__name__.lower(), "table": operation.table, **members}


def _encode_row(schema: Schema, table: str, row: Values) -> dict[str, Any]:
    return {column: encode(schema.column(table, column), value) for column, value in row.items()}


def _encode_mutation(schema: Schema, table: str, mutation: Condition) -> list[Any]:
    column, mutator, value = mutation
    kind = schema.column(table, column)
    if mutator in _SETS_AND_MAPS and not kind.value:
        kind = ColumnType(kind.key, minimum=0, maximum=None)
    if mutator == "delete" and kind.value and isinstance(value, frozenset):
        kind = ColumnType(kind.key, minimum=0, maximum=None)
    return [column, mutator, encode(kind, value)]


def _read_result(schema: Schema, operation: Operation, answer: Any) -> Result:
    match operation, answer:
        case Insert(), {"uuid": ["uuid", str(row)]}:
            return Result(uuid=row)
        case ((Update() | Mutate() | Delete()), {"count": int(count)}):
            return Result(count=count)
        case Select(table), {"rows": list(rows)}:
            return Result(rows=tuple(_decode_row(schema, table, each) for each in rows))
        case ((Wait() | Comment()), {}):
            return Result()
    raise OutcomeUnknown(f"{describe(operation)}: malformed result '{str(answer)[:80]}'")


def _decode_row(schema: Schema, table: str, row: Any) -> Values:
    if not isinstance(row, dict):
        raise Unavailable(f"a row of {table} is malformed: '{str(row)[:80]}'")
    columns = schema.columns(table)
    return {
        column: decode(columns[column], value) for column, value in row.items() if column in columns
    }
