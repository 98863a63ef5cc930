"""Which rows are attached to the configured routers and switches.

In: the configuration, changes of the tables Logical_Router and Logical_Switch. Out: the routers and
switches that exist; the attachments of each row. With topology `gateways` all routers are
monitored, and routers with other names are left out here. OVSDB has no condition for a part of a
name, and a condition for each node would have to change before the router of a new node is seen.
The attachments are stored by row, because there may be a router for each of many nodes."""

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from fairlead.drivers.ovn.spec import Attachment, Site
from fairlead.net import ovsdb

ROUTERS, SWITCHES = "Logical_Router", "Logical_Switch"
_TABLES: Mapping[str, Literal["Logical_Router", "Logical_Switch"]] = {
    ROUTERS: "Logical_Router",
    SWITCHES: "Logical_Switch",
}


def tables(site: Site) -> Mapping[str, ovsdb.Table]:
    """Return what is monitored of routers and switches."""
    attached = ("name", "load_balancer", "load_balancer_group")
    name = (("name", "==", site.router),) if site.topology == "router" else ()
    found = {ROUTERS: ovsdb.Table((*attached, "ports", "options"), name)}
    if site.switches:
        names = tuple(("name", "==", name) for name in site.switches)
        found[SWITCHES] = ovsdb.Table(attached, names)
    return found


class Holder(NamedTuple):
    """A configured router or switch that exists. `rows`: the UUIDs of the rows that are attached to
    it, with rows of others. `groups`: those of its groups of rows."""

    attachment: Attachment
    rows: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()


class Moves(NamedTuple):
    """What a change has moved. `came`, `left`: the rows that were attached to a router or switch,
    and that have left one. `is_new`: a router or switch was created or renamed."""

    came: frozenset[str]
    left: frozenset[str]
    is_new: bool


class Attached:
    """The configured routers and switches with their rows, kept up to date by `follow`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._holders: dict[str, Holder] = {}
        self._places: dict[str, frozenset[Attachment]] = {}

    @property
    def holders(self) -> Collection[Holder]:
        """The routers and switches that exist."""
        return list(self._holders.values())

    @property
    def attachments(self) -> frozenset[Attachment]:
        """The routers and switches that exist, without their rows."""
        return frozenset(each.attachment for each in self.holders)

    def of(self, row: str) -> frozenset[Attachment]:
        """Return the routers and switches to which a row is attached."""
        return self._places.get(row, frozenset())

    def follow(self, changes: ovsdb.Changes) -> Moves:
        """Take over changes of routers and switches."""
        came, left = set[str](), set[str]()
        is_new = False
        for table in _TABLES:
            for uuid, row in changes.get(table, {}).items():
                now = self._read(table, row)
                before = self._holders.pop(uuid, None)
                if now is not None:
                    self._holders[uuid] = now
                    is_new |= before is None or before.attachment != now.attachment
                old = before.rows if before is not None else frozenset()
                new = now.rows if now is not None else frozenset()
                came |= new - old
                left |= old - new
                # A router may have thousands of rows, of which few move.
                kept = old & new if before and now and before.attachment == now.attachment else ()
                if before is not None:
                    self._place(old.difference(kept), before.attachment, attached=False)
                if now is not None:
                    self._place(new.difference(kept), now.attachment, attached=True)
        return Moves(frozenset(came), frozenset(left), is_new)

    def _read(self, table: str, row: ovsdb.Row | None) -> Holder | None:
        """Return a router or switch of the configuration; None for other ones."""
        if row is None or (table == ROUTERS and not self._site.has_router(row.string("name"))):
            return None
        return Holder(
            Attachment(_TABLES[table], row.string("name")),
            row.strings("load_balancer"),
            row.strings("load_balancer_group"),
        )

    def _place(self, rows: Iterable[str], attachment: Attachment, *, attached: bool) -> None:
        for row in rows:
            others = self._places.pop(row, frozenset()) - {attachment}
            if found := others | {attachment} if attached else others:
                self._places[row] = found
