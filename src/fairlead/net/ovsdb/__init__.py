"""A client of OVSDB, the database of Open vSwitch and OVN (RFC 7047, ovsdb-server(7)).

`database`: a copy of tables that stays up to date, and transactions. Its parts, from the wire up:
`framing` (bytes to JSON objects), `remotes` (connections), `session` (requests, echo), `schema` and
`values` (types), `operations` (a transaction as values), `replica` (rows), `monitor` (the replica
over several connections), `membership` (which server of a cluster), `transaction`."""

from fairlead.net.ovsdb.database import Database
from fairlead.net.ovsdb.operations import (
    Condition,
    Delete,
    Insert,
    Mutate,
    Operation,
    OutcomeUnknown,
    Result,
    Select,
    Update,
    Wait,
    by_uuid,
    new_uuid,
)
from fairlead.net.ovsdb.remotes import Tls
from fairlead.net.ovsdb.replica import Changes, Row, Rows, Table
from fairlead.net.ovsdb.schema import Schema
from fairlead.net.ovsdb.values import Value

__all__ = [
    "Changes",
    "Condition",
    "Database",
    "Delete",
    "Insert",
    "Mutate",
    "Operation",
    "OutcomeUnknown",
    "Result",
    "Row",
    "Rows",
    "Schema",
    "Select",
    "Table",
    "Tls",
    "Update",
    "Value",
    "Wait",
    "by_uuid",
    "new_uuid",
]
