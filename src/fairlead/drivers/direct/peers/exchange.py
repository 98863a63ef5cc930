"""One gateway's side of the exchange between gateways: what it sends of its maps, and how it merges
what peers send.

In: the tables, the maps, the flow entries that the eBPF program reports; messages of other
gateways. Out: messages; changed maps. For a slot that is not in transition nothing is sent, because
every gateway computes the same tables from the same objects. For slots in transition, these rules
hold regardless of the history of each gateway:

- Flow entries: each gateway has the entries of all gateways, so a connection may move from one
  gateway to another. The newest entry applies: an entry that another connection with the same ports
  has replaced is replaced or removed on every gateway. After gateways could not reach each other
  for a while, each sends the age of every entry that changed meanwhile.
- Tracked slots: a slot that is tracked on one gateway is tracked on all gateways, because otherwise
  its entries would not be looked up. Tracking moves no connection.
- Tables: a listener that does not exist here begins with the tables of a peer. A gateway that was
  offline (not running, or without contact to any peer) adopts a peer's tables for connections
  without entries, because these connections passed through other gateways meanwhile. Otherwise its
  own tables apply, because only this gateway knows which connections it has forwarded.

Invariant: nothing here decides which node gets new connections. Only the plan of each gateway does.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice

import msgspec
import structlog

from fairlead.drivers.direct.maps import flow_shares
from fairlead.drivers.direct.maps.flow_shares import CLOSING_TABLE, EXCESS_TABLE
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.mirror import InstalledListener
from fairlead.drivers.direct.maps.records import CHALLENGED, CLOSING, FLOW, INDEX, listener_of
from fairlead.drivers.direct.peers.messages import ENTRY, MAX_ENTRIES, FlowsMessage, TablesMessage
from fairlead.drivers.direct.peers.recent import RecentFlows
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.errors import FairleadError, Refused
from fairlead.model import ServiceKey
from fairlead.net.bpf import Map
from fairlead.net.maglev import Table
from fairlead.net.ringbuf import RingBuffer
from fairlead.net.transition import NONE, Slots, by_rule, tracked_as

log = structlog.get_logger()

_PROTOCOL_AT = ENTRY.size - INDEX.size - 4
_NO_ENTRY = INDEX.pack(NONE)
_TABLE_OF = {6: "connections", 132: "connections", 17: "datagrams"}
_TABLES = ("connections", "datagrams", EXCESS_TABLE, CLOSING_TABLE)


class Exchange:
    """The state that this gateway exchanges with its peers.

    Create it when the tables match the content of the maps. Do not use it after the driver is
    closed.
    """

    def __init__(self, tables: ListenerMaps, maps: dict[str, Map]) -> None:
        self._tables, self._maps = tables, maps
        self._ring = RingBuffer(maps["flow_reports"])
        self.descriptor = self._ring.descriptor
        """Readable while the program has reported new entries."""
        self.received = 0
        """The number of entries that were received and stored."""

    def close(self) -> None:
        """Close the ring buffer."""
        self._ring.close()

    def new_entries(self) -> Iterator[FlowsMessage]:
        """Yield the entries that the program has reported since the last call."""
        while records := self._ring.read(MAX_ENTRIES):
            yield self.entries(records)

    def drain_unread(self) -> Set[bytes]:
        """Read the entries that the program has reported, and return their flows. They count as
        sent. If no process was there to send them, peers know only the earlier entries."""
        flows = set[bytes]()
        while records := self._ring.read(MAX_ENTRIES):
            flows.update(record[: -INDEX.size] for record in records)
        return flows

    def current_entries(self, recent: RecentFlows, now_s: float) -> Iterator[FlowsMessage]:
        """Yield the present entries of recently changed flows, with their ages, including flows
        that have no entry any more."""
        for records in _batched(flow + self._current_node(flow) for flow in tuple(recent.flows)):
            ages_s = tuple(now_s - recent.changed_s(record[: -INDEX.size]) for record in records)
            yield msgspec.structs.replace(self.entries(records), ages_s=ages_s)

    def take_changed_listeners(self) -> set[ListenerKey]:
        """Return the listeners whose tables have changed since the last call."""
        changed, self._tables.changed_listeners = self._tables.changed_listeners, set()
        return changed

    def listeners(self) -> set[ListenerKey]:
        """Return the keys of all listeners."""
        return self._tables.keys()

    def tables(self, key: ListenerKey) -> TablesMessage | None:
        """Return the tables of a listener; None if it does not exist or a slot names an unknown
        node."""
        found = self._tables.installed(key)
        # Slots that name an unknown node are of no use to peers.
        if found is None or not all(found.slots.nodes):
            return None
        owner = (found.service.namespace, found.service.name), found.uid
        nodes_with_connections = tuple(filter(None, found.nodes_with_connections))
        return TablesMessage(
            *(key.address, key.port, key.protocol, *owner, *found.slots, nodes_with_connections),
            restricted=found.record.range_sets is not None,
            used=self._tables.is_used(found),
            converging=found.record.converging,
        )

    def all_entries(self) -> Iterator[list[bytes]]:
        """Yield all entries as records, in batches. This reads the kernel's maps: run it in a
        thread.

        Entries of flows with only one packet so far (`new_connections`, `new_datagrams`) are left
        out, because a flood of them would displace entries that matter.
        """
        for name in _TABLES:
            yield from _batched(
                key + _encode_node(name, value) for key, value in self._maps[name].items()
            )

    def _current_node(self, flow: bytes) -> bytes:
        """Return the present node of a flow in the form in which it is sent."""
        for name in (_TABLE_OF[flow[_PROTOCOL_AT]], EXCESS_TABLE, CLOSING_TABLE):
            if value := self._maps[name].lookup(flow):
                return _encode_node(name, value)
        return _NO_ENTRY

    def entries(self, records: list[bytes]) -> FlowsMessage:
        """Return a message with these records and the names of their nodes."""
        names = self._tables.nodes.names()
        numbers = {_node(record[-INDEX.size :]) for record in records}
        return FlowsMessage(
            {number: names[number] for number in numbers & names.keys()}, b"".join(records)
        )

    def merge_flows(self, message: FlowsMessage, *, ignored: Sequence[Set[bytes]] = ()) -> None:
        """Store these entries, except for flows in one of the sets `ignored`. Entries whose node
        has no name in the message are skipped."""
        numbers = self._numbers(message.names)
        sets: dict[str, dict[bytes, bytes]] = {name: {} for name in _TABLES}
        deletes: dict[str, list[bytes]] = {name: [] for name in _TABLES}
        for key, node_field in split(message.records):
            table = _TABLE_OF.get(key[_PROTOCOL_AT])
            if table is None or any(key in each for each in ignored):
                continue
            closing, node = _is_closing(node_field), _node(node_field)
            if node_field != _NO_ENTRY and node not in numbers:
                continue
            if (
                closing
                and (present := sets[table].get(key) or self._established(table, key))
                and (present[: INDEX.size] != numbers[node])
            ):
                # A newer connection with the same ports has an entry.
                continue
            # Of two records of one flow, the later one applies.
            if node_field == _NO_ENTRY or closing:
                sets[table].pop(key, None)
                deletes[table].append(key)
            if node_field == _NO_ENTRY or not closing:
                sets[CLOSING_TABLE].pop(key, None)
                deletes[CLOSING_TABLE].append(key)
            if node_field != _NO_ENTRY:
                sets[CLOSING_TABLE if closing else table][key] = FLOW.pack(numbers[node])
        self.received += sum(map(len, sets.values()))
        sets["connections"] = dict(self._to_store(sets["connections"]))
        for table in flow_shares.TABLES:
            self._remove(table, deletes[table])
            self._store(table, sets[table])

    def _established(self, table: str, flow: bytes) -> bytes | None:
        return self._maps[table].lookup(flow) or self._maps[EXCESS_TABLE].lookup(flow)

    def _remove(self, table: str, flows: Iterable[bytes]) -> None:
        """Remove the entries of these flows from a table with shares, or those of established flows
        from that of entries beyond shares."""
        shares = self._tables.flow_shares
        removed: Counter[bytes] = Counter()
        for flow in flows:
            if self._maps[table].delete(flow):
                removed[listener_of(flow)] += 1
            elif table != CLOSING_TABLE:
                self._maps[EXCESS_TABLE].delete(flow)
        for listener, count in removed.items():
            number = self._tables.share_of_flow(listener)
            shares.add(number, table, -count)

    def _store(self, table: str, entries: Mapping[bytes, bytes]) -> None:
        """Store entries of established or closing flows: as the program does, within the shares of
        their namespaces."""
        shares = self._tables.flow_shares
        numbers: dict[bytes, int] = {}
        added: Counter[int] = Counter()
        within, excess = dict[bytes, bytes](), dict[bytes, bytes]()
        for flow, entry in entries.items():
            if self._maps[table].lookup(flow) is not None:
                within[flow] = entry
                continue
            listener = listener_of(flow)
            if listener not in numbers:
                numbers[listener] = self._tables.share_of_flow(listener)
            number = numbers[listener]
            if added[number] < shares.room(number, table):
                added[number] += 1
                within[flow] = entry
            else:
                excess[flow] = entry
        self._maps[table].update_all(within)
        if excess:
            shares.add_excess(len(excess))
            self._maps[EXCESS_TABLE].update_all(excess)
        self._maps[EXCESS_TABLE].delete_all(list(within))
        for number, count in added.items():
            shares.add(number, table, count)

    def _to_store(self, entries: Mapping[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries of connections that differ from the entries here.

        A SYN with the same ports may have arrived here. Then its tentative entry must decide where
        the next packets go, as if the other entry had been here before the SYN. So an entry on the
        same node stays as it is, and an entry of a flow that has a tentative entry is stored as
        challenged.
        """
        for key, entry in entries.items():
            present = self._established("connections", key)
            if present and present[: INDEX.size] == entry[: INDEX.size]:
                continue
            if self._maps["new_connections"].lookup(key) is not None:
                entry = entry[: -len(CHALLENGED)] + CHALLENGED
            yield key, entry

    def _numbers(self, names: Mapping[int, str]) -> dict[int, bytes]:
        """Return our number of each node, as a packed value, by the peer's number. A node that our
        plan does not contain yet gets a number, because the plan will contain it in a moment."""
        found = {}
        for number, name in names.items():
            try:
                found[number] = INDEX.pack(self._tables.nodes.number(name))
            except Refused as error:
                log.warning("entries of a peer are not stored", node=name, problem=str(error))
        return found

    def present_flows(self) -> Set[bytes]:
        """Return the flows that have an entry here. This reads the kernel's maps: run it in a
        thread."""
        return {key for name in _TABLES for key, _ in self._maps[name].items()}

    def end_convergence(self) -> None:
        """See `ListenerMaps.end_convergence`."""
        self._tables.end_convergence()

    def inherit_tables(self, message: TablesMessage) -> None:
        """Give the listener the peer's tables, before anything is planned."""
        own = self._tables.installed(message.key)
        self._set_peer_slots(
            message, tracked_as(message.slots, own.slots) if own else message.slots
        )

    def merge_peer_tables(self, message: TablesMessage, *, behind: bool) -> None:
        """Track the slots that the peer tracks.

        `behind`: this gateway was offline, so the peer's tables apply to connections without
        entries. They also apply to a listener that has forwarded no packet here. A listener that
        does not exist here is ignored: the plan will contain it, or has removed it.
        """
        if (own := self._tables.installed(message.key)) is None or own.slots == message.slots:
            return
        used = self._tables.is_used(own)
        if not used and not message.used and own.record.converging and message.converging:
            # Neither gateway has forwarded a packet of the listener, and both create an entry for
            # each new connection: no earlier table shows where a connection is. The tables differ
            # for a moment, because each gateway finds for itself which nodes answer.
            return
        if behind or not used:
            self._set_peer_slots(message, tracked_as(_slots_after_outage(own, message), own.slots))
        else:
            self._set_peer_slots(message, tracked_as(own.slots, message.slots))

    def _set_peer_slots(self, message: TablesMessage, slots: Slots) -> None:
        try:
            self._tables.set_peer_slots(
                *(
                    message.key,
                    ServiceKey(*message.service),
                    message.uid,
                    slots,
                    message.nodes_with_connections,
                ),
                restricted=message.restricted,
                used=message.used,
                converging=message.converging,
            )
        except FairleadError as error:
            log.warning(
                "tables of a peer are not stored", listener=str(message.key), problem=str(error)
            )


def _slots_after_outage(own: InstalledListener, message: TablesMessage) -> Slots:
    """Return the slots of the peer, with a transition to the present table of this gateway."""
    retained_nodes = frozenset(
        (*own.nodes_with_connections, *message.nodes_with_connections, *message.nodes)
    )
    return by_rule(
        message.slots,
        Table(own.slots.nodes, own.slots.current),
        retained_nodes,
        by_source=own.slots.by_source,
    )


def split(records: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the flow key and the node field of each record."""
    size, key_size = ENTRY.size, ENTRY.size - INDEX.size
    return (
        (records[at : at + key_size], records[at + key_size : at + size])
        for at in range(0, len(records), size)
    )


def parts_of(message: FlowsMessage, limit: int) -> Iterator[FlowsMessage]:
    """Yield the entries of the message, in their order, as messages of at most `limit` entries."""
    for at in range(0, message.count, limit):
        records = message.records[at * ENTRY.size : (at + limit) * ENTRY.size]
        ages_s = message.ages_s[at : at + limit]
        yield msgspec.structs.replace(message, records=records, ages_s=ages_s)


def _encode_node(table: str, value: bytes) -> bytes:
    """Return the node of an entry of this table in the form in which it is sent."""
    return (
        INDEX.pack(_node(value[: INDEX.size]) | CLOSING)
        if table == CLOSING_TABLE
        else value[: INDEX.size]
    )


def _node(node_field: bytes) -> int:
    number: int = INDEX.unpack(node_field)[0]
    return number & ~CLOSING


def _is_closing(node_field: bytes) -> bool:
    return bool(INDEX.unpack(node_field)[0] & CLOSING)


def _batched(records: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(records, MAX_ENTRIES)):
        yield batch
