"""Execute one transaction over a connection, and find out whether a previous attempt was executed.

In: a session, the schema, operations. Out: the results. Each Insert names the UUID of its row, so
a row that exists with the given values proves that the transaction was executed, because a
transaction is executed as a whole."""

from collections.abc import Sequence
from typing import Any

import msgspec

from fairlead.errors import Conflict, Refused
from fairlead.net.ovsdb.operations import (
    Comment,
    Insert,
    Operation,
    OutcomeUnknown,
    Result,
    Select,
    by_uuid,
    encode_operation,
    inserted,
    read_results,
)
from fairlead.net.ovsdb.schema import Schema
from fairlead.net.ovsdb.session import Session


async def execute(
    session: Session,
    schema: Schema,
    operations: Sequence[Operation],
    *,
    comment: str = "",
    repeated: bool = False,
) -> tuple[Result, ...]:
    """Return the results of the operations. `repeated`: whether the answer to an earlier attempt
    was lost; if that was executed, its insertions are the results.

    An error of a first attempt is never taken for a success, although the server of a cluster
    repeats a transaction itself when the leader changes, and then reports a conflict of the
    transaction with itself: the row may also be one that another client has inserted."""
    try:
        return await _transact(session, schema, operations, comment)
    except (Conflict, Refused):
        inserts = inserted(operations)
        if repeated and inserts and await _exist(session, schema, inserts):
            return _results_of_earlier_attempt(operations)
        raise


async def _transact(
    session: Session, schema: Schema, operations: Sequence[Operation], comment: str
) -> tuple[Result, ...]:
    noted = (*operations, Comment(comment)) if comment else tuple(operations)
    params = [schema.name, *(encode_operation(schema, each) for each in noted)]
    answer = _decoded(await session.request("transact", params))
    return read_results(schema, noted, answer)[: len(operations)]


async def _exist(session: Session, schema: Schema, inserts: Sequence[Insert]) -> bool:
    """Return whether all rows exist, with the values that they were inserted with."""
    selects = [Select(each.table, by_uuid(each.uuid), tuple(sorted(each.row))) for each in inserts]
    found = await _transact(session, schema, selects, "")
    return all(result.rows == ({**each.row},) for each, result in zip(inserts, found, strict=True))


def _results_of_earlier_attempt(operations: Sequence[Operation]) -> tuple[Result, ...]:
    return tuple(
        Result(uuid=each.uuid) if isinstance(each, Insert) else Result(count=None)
        for each in operations
    )


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OutcomeUnknown(f"the answer to transact is malformed: {error}") from error
