"""One gateway's side of what gateways tell each other: what to say of its maps, and what to do
about what others say.

In: the tables, the maps, the news of the program in the kernel; messages of other gateways. Out:
messages; changed maps. Where no slot is in transition there is nothing to say: every gateway has
made the same tables from the same objects. For slots in transition these hold, whatever each
gateway has gone through:
  entries  each gateway has those of all, so a connection may pass from one to another. The newest counts: one that another
           connection of the same ports has replaced is replaced, or taken out, everywhere; when
           gateways meet that could not tell each other for a while, each says for how long what it
           has met meanwhile has been so
  tracked  a slot that is tracked at one is tracked at all, or entries of it would not be asked for; no connection moves by that
  tables   a listener that this gateway has no tables of begins with those of a peer. One that has been away, because it was
           not running or could reach nobody, takes what a peer says of connections without entries:
           they passed to others meanwhile. Otherwise its own word counts, as only it knows what
           went through it.
Invariant: nothing here decides who gets new connections; that is the plan's alone, on each gateway.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice

import msgspec
import structlog

from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.mirror import InstalledListener
from fairlead.drivers.direct.maps.records import CLOSING, FLOW, INDEX
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
_GONE = INDEX.pack(NONE)
_TABLE_OF = {6: "connections", 132: "connections", 17: "datagrams"}
_ENDING = "closing_connections"
_TABLES = ("connections", "datagrams", _ENDING)


class Exchange:
    """To be made once the tables hold what is in the maps. Not to be used after the driver was
    closed."""

    def __init__(self, tables: ListenerMaps, maps: dict[str, Map]) -> None:
        self._tables, self._maps = tables, maps
        self._ring = RingBuffer(maps["news"])
        self.descriptor = self._ring.descriptor
        """Readable while there is news."""
        self.received = 0
        """Entries that were taken over."""

    def close(self) -> None:
        """Let go of the ring."""
        self._ring.close()

    def new_entries(self) -> Iterator[FlowsMessage]:
        """The entries that have come to be since it was asked last."""
        while records := self._ring.read(MAX_ENTRIES):
            yield self.entries(records)

    def drain_unread(self) -> Set[bytes]:
        """The flows that there is news of, which counts as node_field then. If no process was there to
        tell it, others know only what was before."""
        flows = set[bytes]()
        while records := self._ring.read(MAX_ENTRIES):
            flows.update(record[: -INDEX.size] for record in records)
        return flows

    def current_entries(self, recent: RecentFlows, now_s: float) -> Iterator[FlowsMessage]:
        """The entries of these flows as they are now, and of which there is none; since when."""
        for records in _batched(flow + self._current_node(flow) for flow in tuple(recent.flows)):
            ages_s = tuple(now_s - recent.changed_s(record[: -INDEX.size]) for record in records)
            yield msgspec.structs.replace(self.entries(records), ages_s=ages_s)

    def take_changed_listeners(self) -> set[ListenerKey]:
        """The listeners whose tables have changed since it was asked last."""
        changed, self._tables.changed_listeners = self._tables.changed_listeners, set()
        return changed

    def listeners(self) -> set[ListenerKey]:
        """All that there are."""
        return self._tables.keys()

    def tables(self, key: ListenerKey) -> TablesMessage | None:
        """Those of a listener, if it is there."""
        found = self._tables.installed(key)
        if found is None or not all(
            found.slots.nodes
        ):  # a slot that names nobody is of no use to others
            return None
        whose = (found.service.namespace, found.service.name), found.uid
        nodes_with_connections = tuple(filter(None, found.nodes_with_connections))
        return TablesMessage(
            *(key.address, key.port, key.protocol, *whose, *found.slots, nodes_with_connections),
            restricted=found.record.range_sets is not None,
            used=self._tables.is_used(found),
            converging=found.record.converging,
        )

    def all_entries(self) -> Iterator[list[bytes]]:
        """Every entry there is, as records. It reads the kernel's maps: to be gone through in a
        thread.

        Those of which one packet was seen (new_connections) are left out: a flood of such would
        push out what matters."""
        for name in _TABLES:
            yield from _batched(
                key + _encode_node(name, value) for key, value in self._maps[name].items()
            )

    def _current_node(self, flow: bytes) -> bytes:
        """Where a flow is now, as it is node_field."""
        for name in (_TABLE_OF[flow[_PROTOCOL_AT]], _ENDING):
            if value := self._maps[name].lookup(flow):
                return _encode_node(name, value)
        return _GONE

    def entries(self, records: list[bytes]) -> FlowsMessage:
        """The records, with the names of their nodes."""
        names = self._tables.nodes.names()
        numbers = {_node(record[-INDEX.size :]) for record in records}
        return FlowsMessage(
            {number: names[number] for number in numbers & names.keys()}, b"".join(records)
        )

    def merge_flows(self, message: FlowsMessage, *, ignored: Sequence[Set[bytes]] = ()) -> None:
        """Have these entries too, but for flows in one of the sets `known`. One whose node is not
        named says nothing."""
        numbers = self._numbers(message.names)
        sets: dict[str, dict[bytes, bytes]] = {name: {} for name in _TABLES}
        deletes: dict[str, list[bytes]] = {name: [] for name in _TABLES}
        for key, node_field in split(message.records):
            table = _TABLE_OF.get(key[_PROTOCOL_AT])
            if table is None or any(key in each for each in ignored):
                continue
            ending, node = _is_ending(node_field), _node(node_field)
            if node_field != _GONE and node not in numbers:
                continue
            if (
                ending
                and (present := sets[table].get(key) or self._maps[table].lookup(key))
                and (present[: INDEX.size] != numbers[node])
            ):
                continue  # a connection that came after the one that ends, with the same ports
            # Of two about one flow the later one counts.
            if node_field == _GONE or ending:
                sets[table].pop(key, None)
                deletes[table].append(key)
            if node_field == _GONE or not ending:
                sets[_ENDING].pop(key, None)
                deletes[_ENDING].append(key)
            if node_field != _GONE:
                sets[_ENDING if ending else table][key] = FLOW.pack(numbers[node])
        for table, elements in sets.items():
            self._maps[table].delete_all(deletes[table])
            self._maps[table].update_all(elements)
            self.received += len(elements)

    def _numbers(self, names: Mapping[int, str]) -> dict[int, bytes]:
        """Of the peer's numbers our own. A node that our plan does not know yet gets one: it will,
        in a moment."""
        found = {}
        for number, name in names.items():
            try:
                found[number] = INDEX.pack(self._tables.nodes.number(name))
            except Refused as error:
                log.warning("entries of a peer not taken over", node=name, problem=str(error))
        return found

    def present_flows(self) -> Set[bytes]:
        """The flows that have an entry here. It reads the kernel's maps: to be asked for in a
        thread."""
        return {key for name in _TABLES for key, _ in self._maps[name].items()}

    def end_convergence(self) -> None:
        """See `TablesMessage.end_convergence`."""
        self._tables.end_convergence()

    def inherit_tables(self, message: TablesMessage) -> None:
        """Before anything is planned: have this listener as the peer has it."""
        own = self._tables.installed(message.key)
        self._set_peer_slots(
            message, tracked_as(message.slots, own.slots) if own else message.slots
        )

    def merge_peer_tables(self, message: TablesMessage, *, behind: bool) -> None:
        """Track what the peer tracks. `behind`: this gateway has been away, so the peer's word
        counts for what has no entry; as it does for a listener of which no packet has come here. Of
        one that is not here nothing is kept: the plan will tell of it, or has taken it away."""
        if (own := self._tables.installed(message.key)) is None or own.slots == message.slots:
            return
        if behind or not self._tables.is_used(own):
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
                "tables of a peer not taken over", listener=str(message.key), problem=str(error)
            )


def _slots_after_outage(own: InstalledListener, message: TablesMessage) -> Slots:
    """What the peer has, and from there to what serves new connections here."""
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
    """Key and node of each."""
    size, key_size = ENTRY.size, ENTRY.size - INDEX.size
    return (
        (records[at : at + key_size], records[at + key_size : at + size])
        for at in range(0, len(records), size)
    )


def parts_of(message: FlowsMessage, most: int) -> Iterator[FlowsMessage]:
    """Yield the entries of the message, in their order, as messages of at most `most` entries each.
    The ages of the entries are left out."""
    size = most * ENTRY.size
    for at in range(0, len(message.records), size):
        yield FlowsMessage(message.names, message.records[at : at + size])


def _encode_node(table: str, value: bytes) -> bytes:
    """The node of an entry of this table, as it is node_field."""
    return (
        INDEX.pack(_node(value[: INDEX.size]) | CLOSING)
        if table == _ENDING
        else value[: INDEX.size]
    )


def _node(node_field: bytes) -> int:
    number: int = INDEX.unpack(node_field)[0]
    return number & ~CLOSING


def _is_ending(node_field: bytes) -> bool:
    return bool(INDEX.unpack(node_field)[0] & CLOSING)


def _batched(records: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(records, MAX_ENTRIES)):
        yield batch
