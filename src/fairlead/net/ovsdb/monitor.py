"""Monitor tables of a database over one connection, and resume that over the next one.

In: a session, the tables to monitor. Out: a `Replica` that stays up to date, and its changes.
Follows ovsdb-server(7), sections 4.1.12 to 4.1.15. Invariant: notifications are applied after the
answer that they continue, in their order."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fairlead.errors import FairleadError, Unavailable
from fairlead.net.ovsdb.operations import encode_conditions
from fairlead.net.ovsdb.replica import Changes, Replica, Row, RowUpdate, Table
from fairlead.net.ovsdb.schema import Schema
from fairlead.net.ovsdb.session import Raw, Session

NO_TRANSACTION = "00000000-0000-0000-0000-000000000000"
METHOD = "update3"
_Updates = dict[str, dict[str, RowUpdate]]
_ANSWER = msgspec.json.Decoder(tuple[bool, str, _Updates])
"""Whether the server knows the transaction to continue from, the id of the last transaction, and
the rows: all of them, or the differences."""
_NOTIFICATION = msgspec.json.Decoder(tuple[str, str, _Updates])
"""The name of the monitor, the id of the last transaction, and the differences."""


class Monitor:
    """The monitored tables of one database. `on_change` is called with the changes of rows, also if
    there are none."""

    def __init__(
        self,
        database: str,
        tables: Mapping[str, Table],
        on_change: Callable[[Changes], None],
    ) -> None:
        self._database = database
        self._tables = tables
        self._on_change = on_change
        self._schema: Schema | None = None
        self._replica: Replica | None = None
        self._last_id = NO_TRANSACTION
        self._early: list[tuple[str, _Updates]] | None = []
        """Notifications that came before the answer was processed; None after that."""

    def rows(self, table: str) -> dict[str, Row]:
        """Return the rows of a table; none before the first answer."""
        return self._replica.tables[table] if self._replica is not None else {}

    async def start(self, session: Session, schema: Schema) -> None:
        """Read the rows, or what has changed since the last connection. Raise Refused if the schema
        lacks a table or column."""
        requests = {name: [_request(schema, name, table)] for name, table in self._tables.items()}
        if schema != self._schema or self._replica is None:
            previous = self._replica
            self._replica = Replica(schema, self._tables)
            if previous is not None:
                self._replica.tables = previous.tables
            self._schema, self._last_id = schema, NO_TRANSACTION
        self._early = []
        params = [self._database, self._database, requests, self._last_id]
        answer = await session.request("monitor_cond_since", params)
        self._started(self._replica, answer)

    def receive(self, params: Raw) -> bool:
        """Apply a notification if it belongs to this monitor, and return whether it does. Raise
        Unavailable if it is malformed; the next connection then reads all rows again."""
        name, last_id, updates = _decode(_NOTIFICATION, params)
        if name != self._database:
            return False
        if self._early is not None:
            self._early.append((last_id, updates))
        else:
            self._apply(last_id, updates)
        return True

    def _started(self, replica: Replica, answer: Raw) -> None:
        found, last_id, updates = _decode(_ANSWER, answer)
        try:
            changes = replica.update(updates) if found else replica.replace(updates)
        except FairleadError:
            self._last_id = NO_TRANSACTION
            raise
        self._last_id = last_id
        early, self._early = self._early or [], None
        self._on_change(changes)
        for each in early:
            self._apply(*each)

    def _apply(self, last_id: str, updates: _Updates) -> None:
        assert self._replica is not None
        try:
            changes = self._replica.update(updates)
        except FairleadError:
            self._last_id = NO_TRANSACTION
            raise
        self._last_id = last_id
        self._on_change(changes)


def _request(schema: Schema, name: str, table: Table) -> dict[str, Any]:
    schema.require(name, table.columns)
    where = encode_conditions(schema, name, table.where)
    return {"columns": list(table.columns), **({"where": where} if where else {})}


def _decode(decoder: "msgspec.json.Decoder[Any]", data: Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unavailable(f"malformed rows: {error}") from error
