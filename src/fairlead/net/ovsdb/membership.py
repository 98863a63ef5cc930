"""Decide whether a server is fit to be used, by what it says about its database.

Pure. In: the row of the database in table Database of `_Server`, which every server since Open
vSwitch 2.10 has (ovsdb-server(5)). Out: nothing, or the reason to try another server. A member of a
RAFT cluster that has lost its cluster answers from old data, and so does a member that has
not caught up: the log index must not go back. A relay that has lost its
source also answers from old data."""

from collections.abc import Mapping

from fairlead.errors import Unavailable
from fairlead.net.ovsdb.replica import Row, Table
from fairlead.net.ovsdb.schema import Schema
from fairlead.net.ovsdb.values import ColumnType

DATABASE, TABLE = "_Server", "Database"
_TYPES: Mapping[str, ColumnType] = {
    "name": ColumnType("string"),
    "model": ColumnType("string"),
    "connected": ColumnType("boolean"),
    "leader": ColumnType("boolean"),
    "cid": ColumnType("uuid", minimum=0),
    "index": ColumnType("integer", minimum=0),
}
SCHEMA = Schema(DATABASE, "unknown", {TABLE: _TYPES})


def monitored(database: str) -> Mapping[str, Table]:
    """Return what to monitor."""
    return {TABLE: Table(tuple(_TYPES), (("name", "==", database),))}


class Membership:
    """The progress of a cluster, over all connections to its members."""

    def __init__(self, *, leader_only: bool, patience: int) -> None:
        """After `patience` servers with old data in a row, their data is accepted: the cluster was
        restored from a backup."""
        self._leader_only = leader_only
        self._patience = patience
        self._cluster = ""
        self._index = 0
        self._behind = 0

    def check(self, database: str, row: Row | None) -> None:
        """Raise Unavailable if the server must not be used. `row`: None if the server does not have
        the database."""
        if row is None:
            raise Unavailable(f"the server does not have the database {database}, at least not yet")
        if row.string("model") == "relay" and not row.boolean("connected"):
            raise Unavailable(f"the server, a relay, has lost the source of database {database}")
        if row.string("model") != "clustered":
            return
        if not row.boolean("connected"):
            raise Unavailable(f"the server has lost the cluster of database {database}")
        if self._leader_only and not row.boolean("leader"):
            raise Unavailable(f"the server is not the leader of the cluster of database {database}")
        self._check_index(database, row)

    def _check_index(self, database: str, row: Row) -> None:
        index, cluster = row.integer("index"), row.string("cid")
        if cluster == self._cluster and index < self._index and self._behind < self._patience:
            self._behind += 1
            raise Unavailable(
                f"the server has older data of database {database} than another one: log index "
                f"{index} instead of {self._index}"
            )
        self._cluster, self._index, self._behind = cluster, index, 0
