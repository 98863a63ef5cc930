"""The rows of this cluster in the northbound database, and what else the driver reads there.

In: a Database (net/ovsdb). Out: rows by Service; the operations of changes. Only rows with the mark
of the cluster are monitored. Invariants: an operation on a row also requires the mark of the
cluster; of routers and switches only the column `load_balancer` is changed, by adding own rows."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from fairlead.drivers.ovn import attached
from fairlead.drivers.ovn.attached import ROUTERS, SWITCHES, Attached
from fairlead.drivers.ovn.changes import AttachRow, CreateRow, DeleteRow, UpdateRow, Write
from fairlead.drivers.ovn.foreign import COLUMNS, ForeignRow, read_foreign
from fairlead.drivers.ovn.marks import CLUSTER, NODE, VIP, own, removed_of, service_of
from fairlead.drivers.ovn.spec import UNREADABLE, Attachment, Columns, Frontend, Row, Site
from fairlead.model import Protocol, ServiceKey
from fairlead.net import ovsdb
from fairlead.net.address import split_host_port
from fairlead.net.ovsdb import Delete, Insert, Mutate, Operation, Select, Update, Wait, by_uuid

NAME = "OVN_Northbound"
TIMEOUT_S = 2.0
"""The time for one transaction, which takes milliseconds. The loop waits for it."""
BALANCERS = "Load_Balancer"
ROUTER_PORTS, HA_GROUPS = "Logical_Router_Port", "HA_Chassis_Group"
GLOBAL, GROUPS = "NB_Global", "Load_Balancer_Group"
UNNAMED = ServiceKey("", "")
"""The key of rows of this cluster from whose marks another program has removed the Service."""
_PROTOCOLS: Mapping[str, Protocol] = {"tcp": "TCP", "udp": "UDP", "sctp": "SCTP"}


def tables(site: Site) -> Mapping[str, ovsdb.Table]:
    """Return what is monitored."""
    return {
        **attached.tables(site),
        BALANCERS: ovsdb.Table(
            ("name", "protocol", "vips", "options", "external_ids"),
            (("external_ids", "includes", {CLUSTER: site.cluster}),),
        ),
        GLOBAL: ovsdb.Table(("nb_cfg", "sb_cfg", "hv_cfg", "options")),
    }


class Northbound:
    """The rows by Service, kept up to date by `follow`."""

    def __init__(self, site: Site, changed: Callable[[Collection[ServiceKey]], None]) -> None:
        """`changed` is called with the Services whose rows have changed."""
        self._site = site
        self._changed = changed
        self._rows: dict[ServiceKey, dict[str, ovsdb.Row]] = {}
        self._key_of: dict[str, ServiceKey] = {}
        self._place_of: dict[str, tuple[str, str]] = {}
        self._at: dict[tuple[str, str], set[str]] = {}
        """The rows by the address and port that they serve, and the protocol."""
        self._attached = Attached(site)
        self._new_foreign: set[str] = set()
        self.database: ovsdb.Database | None = None

    def uuids_of(self, key: ServiceKey) -> Collection[str]:
        """Return the UUIDs of the rows of a Service."""
        return self._rows.get(key, {}).keys()

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self._key_of)

    def key_of(self, row_uuid: str) -> ServiceKey | None:
        """Return the Service of a row; None if there is no such row."""
        return self._key_of.get(row_uuid)

    def number(self, column: str) -> int:
        """Return a sequence number of table NB_Global; 0 while it is unknown."""
        row = self._global()
        return row.integer(column) if row is not None else 0

    def options(self) -> Mapping[str, str]:
        """Return the options of table NB_Global."""
        row = self._global()
        return row.map("options") if row is not None else {}

    def is_gateway_router(self) -> bool:
        """Return whether the router of topology `router` is on one chassis only."""
        assert self.database is not None
        return self._site.topology == "router" and any(
            "chassis" in row.map("options") for row in self.database.rows(ROUTERS).values()
        )

    def _global(self) -> ovsdb.Row | None:
        assert self.database is not None
        return next(iter(self.database.rows(GLOBAL).values()), None)

    @property
    def services(self) -> Collection[ServiceKey]:
        """The Services that have rows."""
        return list(self._rows)

    def follow(self, changes: ovsdb.Changes) -> Collection[str]:
        """Take over changes of rows. Return the UUIDs of the rows that are new or newly attached:
        some chassis may lack them."""
        appeared: set[str] = set()
        touched: set[ServiceKey] = set()
        for row_uuid, row in changes.get(BALANCERS, {}).items():
            if (before := self._key_of.pop(row_uuid, None)) is not None:
                touched.add(before)
                self._leave(row_uuid)
                del self._rows[before][row_uuid]
                if not self._rows[before]:
                    del self._rows[before]
            if row is not None:
                key = service_of(row.map("external_ids"), self._site.cluster) or UNNAMED
                if before is None:
                    appeared.add(row_uuid)
                self._key_of[row_uuid] = key
                self._rows.setdefault(key, {})[row_uuid] = row
                place = (row.map("external_ids").get(VIP, ""), row.string("protocol") or "tcp")
                self._place_of[row_uuid] = place
                self._at.setdefault(place, set()).add(row_uuid)
                touched.add(key)
        moves = self._attached.follow(changes)
        appeared |= moves.came & self._key_of.keys()
        self._new_foreign |= moves.came - self._key_of.keys()
        touched |= {self._key_of[each] for each in moves.left if each in self._key_of}
        if moves.is_new:
            touched |= self._rows.keys()
        if touched:
            self._changed(touched)
        return appeared

    def _leave(self, row_uuid: str) -> None:
        place = self._place_of.pop(row_uuid)
        self._at[place].discard(row_uuid)
        if not self._at[place]:
            del self._at[place]

    def take_new_foreign(self) -> Collection[str]:
        """Return the UUIDs of the rows of others that were attached since the last call."""
        new_foreign, self._new_foreign = self._new_foreign, set()
        return new_foreign

    def rows_of_others(self, key: ServiceKey, frontend: Frontend) -> Mapping[str, ServiceKey]:
        """Return the rows of other Services at this frontend, with their Services: the address
        belonged to them before."""
        found = self._at.get((frontend.vip, frontend.protocol.lower()), ())
        return {each: self._key_of[each] for each in found if self._key_of[each] != key}

    def is_removed(self, row_uuid: str) -> bool:
        """Return whether the Service of the row is gone, or unknown."""
        if self._key_of[row_uuid] == UNNAMED:
            return True
        marks = self._rows[self._key_of[row_uuid]][row_uuid].map("external_ids")
        return removed_of(marks) is not None

    def rows_of(self, key: ServiceKey, installed: Callable[[str], bool]) -> tuple[Row, ...]:
        """Return the rows of a Service. `installed`: whether every chassis has the row with this
        UUID. May be called in any thread."""
        found = dict(self._rows.get(key, {}))
        return tuple(
            self._read(found[row_uuid], installed=installed(row_uuid)) for row_uuid in sorted(found)
        )

    def serving(self, other: ForeignRow) -> Iterator[tuple[ServiceKey, Row]]:
        """Yield the rows of existing Services that may serve an address and port of a row of
        others, with the Services."""
        found = [self._at.get((vip, other.protocol), ()) for vip in other.vips]
        if other.has_whole_addresses:
            found = list(self._at.values())
        for row_uuid in sorted(set[str]().union(*found)):
            if not self.is_removed(row_uuid):
                key = self._key_of[row_uuid]
                yield key, self._read(self._rows[key][row_uuid], installed=True)

    def places_of(self, row_uuid: str) -> frozenset[Attachment]:
        """Return the configured routers and switches to which a row is attached."""
        return self._attached.of(row_uuid)

    def address_of(self, row_uuid: str) -> str:
        """Return the address that a row serves; empty if its mark is not readable."""
        row = self._read(self._rows[self._key_of[row_uuid]][row_uuid], installed=True)
        return row.frontend.address

    def shows(self, write: Write) -> bool:
        """Return whether the rows are as this write has made them."""
        found = self._rows.get(write.service, {}).get(write.uuid)
        if found is None or isinstance(write, DeleteRow):
            return found is None and isinstance(write, DeleteRow)
        row = self._read(found, installed=True)
        match write:
            case CreateRow():
                return row.columns == write.columns and row.attached >= {*write.attachments}
            case UpdateRow():
                return row.columns == write.columns
            case AttachRow():
                return write.attachment in row.attached

    def attachments(self) -> frozenset[Attachment]:
        """Return the configured routers and switches that exist."""
        return self._attached.attachments

    def routers(self) -> frozenset[str]:
        """Return the names of the configured routers that exist."""
        return frozenset(each.name for each in self.attachments() if each.table == ROUTERS)

    def switches(self) -> tuple[str, ...]:
        """Return the names of the configured switches that exist, sorted."""
        return tuple(sorted(each.name for each in self.attachments() if each.table == SWITCHES))

    def operations(self, change: Write) -> Iterator[Operation]:
        """Yield the operations of a change."""
        match change:
            case CreateRow(_, _, columns, attachments, row_uuid):
                # The transaction of an earlier attempt, or of another process, may still arrive.
                named = (("name", "==", columns.name), self._mark)
                yield Wait(BALANCERS, named, ())
                yield Insert(BALANCERS, _values(columns), row_uuid)
                for attachment in attachments:
                    yield self._attach(attachment, row_uuid)
            case UpdateRow(_, row_uuid, before, columns):
                yield Wait(BALANCERS, by_uuid(row_uuid), ({"vips": before.vips},))
                values = _values(columns)
                marks = values.pop("external_ids")
                yield Update(BALANCERS, self._own(row_uuid), values)
                # One operation, because the first mutation also deletes the mark of the cluster.
                replaced: tuple[ovsdb.Condition, ...] = (
                    ("external_ids", "delete", frozenset(before.external_ids)),
                    ("external_ids", "insert", marks),
                )
                yield Mutate(BALANCERS, self._own(row_uuid), replaced)
            case AttachRow(_, row_uuid, attachment):
                yield self._attach(attachment, row_uuid)
            case DeleteRow(_, row_uuid):
                yield Delete(BALANCERS, self._own(row_uuid))

    async def foreign(self) -> Mapping[Attachment, Sequence[ForeignRow]]:
        """Return the rows at each configured router and switch that are not of this cluster."""
        holders = self._attached.holders
        groups = sorted(frozenset().union(*(each.groups for each in holders)))
        reads = [Select(GROUPS, by_uuid(each), ("_uuid", "load_balancer")) for each in groups]
        members = {
            str(values["_uuid"]): values["load_balancer"]
            for result in await self._select(reads)
            for values in result.rows
        }
        listed: dict[Attachment, set[str]] = {}
        for holder in holders:
            rows = listed.setdefault(holder.attachment, set())
            rows |= holder.rows
            for group in holder.groups:
                found = members.get(group)
                rows |= found if isinstance(found, frozenset) else set()
        others = await self.others_among(set().union(*listed.values()))
        foreign = {each.uuid: each for each in others}
        return {
            place: [foreign[each] for each in sorted(rows & foreign.keys())]
            for place, rows in listed.items()
        }

    async def others_among(self, rows: Collection[str]) -> Sequence[ForeignRow]:
        """Return those of these rows that exist and are not of this cluster. Raise Unavailable."""
        unknown = sorted(each for each in rows if each not in self._key_of)
        reads = [Select(BALANCERS, by_uuid(each), COLUMNS) for each in unknown]
        return [
            other
            for result in await self._select(reads)
            for values in result.rows
            if (other := read_foreign(values)).external_ids.get(CLUSTER) != self._site.cluster
        ]

    async def gateways(self) -> int:
        """Return the number of chassis that may have the gateway port of the router."""
        assert self.database is not None
        ports = [row.strings("ports") for row in self.database.rows(ROUTERS).values()]
        reads = [
            Select(ROUTER_PORTS, by_uuid(each), ("gateway_chassis", "ha_chassis_group"))
            for each in sorted(frozenset().union(*ports))
        ]
        found = [values for each in await self._select(reads) for values in each.rows]
        groups = {values["ha_chassis_group"] for values in found} - {None}
        reads = [Select(HA_GROUPS, by_uuid(str(each)), ("ha_chassis",)) for each in groups]
        members = [values["gateway_chassis"] for values in found]
        members += [
            values["ha_chassis"] for each in await self._select(reads) for values in each.rows
        ]
        return max((len(each) for each in members if isinstance(each, frozenset)), default=0)

    async def _select(self, reads: Sequence[Operation]) -> Sequence[ovsdb.Result]:
        assert self.database is not None
        return await self.database.transact(reads, timeout_s=TIMEOUT_S) if reads else ()

    def _own(self, row_uuid: str) -> tuple[ovsdb.Condition, ...]:
        return (*by_uuid(row_uuid), self._mark)

    @property
    def _mark(self) -> ovsdb.Condition:
        return ("external_ids", "includes", {CLUSTER: self._site.cluster})

    def _attach(self, attachment: Attachment, row_uuid: str) -> Operation:
        where = (("name", "==", attachment.name),)
        return Mutate(
            attachment.table, where, (("load_balancer", "insert", frozenset({row_uuid})),)
        )

    def _read(self, row: ovsdb.Row, *, installed: bool) -> Row:
        marks = row.map("external_ids")
        protocol = _PROTOCOLS.get(row.string("protocol") or "tcp", "TCP")
        address, port = UNREADABLE
        if service_of(marks, self._site.cluster) is not None:
            with suppress(ValueError):
                address, port = split_host_port(marks.get(VIP, ""))
        frontend = Frontend(address, port, protocol, marks.get(NODE, ""))
        columns = Columns(
            row.string("name"),
            protocol.lower(),
            dict(row.map("vips")),
            dict(row.map("options")),
            own(marks),
        )
        return Row(row.uuid, frontend, columns, self._attached.of(row.uuid), installed)


def _values(columns: Columns) -> dict[str, ovsdb.Value]:
    return {
        "name": columns.name,
        "protocol": columns.protocol,
        "vips": dict(columns.vips),
        "options": dict(columns.options),
        "external_ids": dict(columns.external_ids),
    }
