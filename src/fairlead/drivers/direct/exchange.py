"""One gateway's side of what gateways tell each other: what to say of its maps, and what to do about what others say.

In: the tables, the maps, the news of the program in the kernel; messages of other gateways. Out: messages; changed maps.
Where no slot is in transition there is nothing to say: every gateway has made the same tables from the same objects. For slots
in transition these hold, whatever each gateway has gone through:
  entries  each gateway has those of all, so a connection may pass from one to another. The newest counts: one that another
           connection of the same ports has replaced is replaced, or taken out, everywhere; when gateways meet that could not
           tell each other for a while, each says for how long what it has met meanwhile has been so
  tracked  a slot that is tracked at one is tracked at all, or entries of it would not be asked for; no connection moves by that
  tables   a listener that this gateway has no tables of begins with those of a peer. One that has been away, because it was
           not running or could reach nobody, takes what a peer says of connections without entries: they passed to others
           meanwhile. Otherwise its own word counts, as only it knows what went through it.
Invariant: nothing here decides who gets new connections; that is the plan's alone, on each gateway.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice

import msgspec
import structlog

from fairlead.drivers.direct.layout import CLOSING, FLOW, INDEX
from fairlead.drivers.direct.mirror import InstalledListener
from fairlead.drivers.direct.peer_messages import ENTRY, MOST_ENTRIES, Entries, Tables
from fairlead.drivers.direct.recent import Recent
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.drivers.direct.tables import Tables as OwnTables
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
    """To be made once the tables hold what is in the maps. Not to be used after the driver was closed."""

    def __init__(self, tables: OwnTables, maps: dict[str, Map]) -> None:
        self._tables, self._maps = tables, maps
        self._ring = RingBuffer(maps["news"])
        self.descriptor = self._ring.descriptor
        """Readable while there is news."""
        self.received = 0
        """Entries that were taken over."""

    def close(self) -> None:
        """Let go of the ring."""
        self._ring.close()

    def news(self) -> Iterator[Entries]:
        """The entries that have come to be since it was asked last."""
        while records := self._ring.read(MOST_ENTRIES):
            yield self.entries(records)

    def unread(self) -> Set[bytes]:
        """The flows that there is news of, which counts as told then. If no process was there to tell it, others know only what
        was before."""
        flows = set[bytes]()
        while records := self._ring.read(MOST_ENTRIES):
            flows.update(record[: -INDEX.size] for record in records)
        return flows

    def present(self, recent: Recent, now_s: float) -> Iterator[Entries]:
        """The entries of these flows as they are now, and of which there is none; since when."""
        for records in _batched(flow + self._present(flow) for flow in tuple(recent.flows)):
            ages_s = tuple(now_s - recent.met_s(record[: -INDEX.size]) for record in records)
            yield msgspec.structs.replace(self.entries(records), ages_s=ages_s)

    def touched(self) -> set[ListenerKey]:
        """The listeners whose tables have changed since it was asked last."""
        touched, self._tables.touched = self._tables.touched, set()
        return touched

    def listeners(self) -> set[ListenerKey]:
        """All that there are."""
        return self._tables.keys()

    def tables(self, key: ListenerKey) -> Tables | None:
        """Those of a listener, if it is there."""
        found = self._tables.installed(key)
        if found is None or not all(found.slots.nodes):  # a slot that names nobody is of no use to others
            return None
        whose = (found.service.namespace, found.service.name), found.uid
        keeping = tuple(filter(None, found.keeping))
        return Tables(
            *(key.address, key.port, key.protocol, *whose, *found.slots, keeping),
            restricted=found.record.sets is not None,
            used=self._tables.is_used(found),
            young=found.record.young,
        )

    def stored(self) -> Iterator[list[bytes]]:
        """Every entry there is, as records. It reads the kernel's maps: to be gone through in a thread.

        Those of which one packet was seen (new_connections) are left out: a flood of such would push out what matters.
        """
        for name in _TABLES:
            yield from _batched(key + _told(name, value) for key, value in self._maps[name].items())

    def _present(self, flow: bytes) -> bytes:
        """Where a flow is now, as it is told."""
        for name in (_TABLE_OF[flow[_PROTOCOL_AT]], _ENDING):
            if value := self._maps[name].lookup(flow):
                return _told(name, value)
        return _GONE

    def entries(self, records: list[bytes]) -> Entries:
        """The records, with the names of their nodes."""
        names = self._tables.nodes.names()
        numbers = {_node(record[-INDEX.size :]) for record in records}
        return Entries({number: names[number] for number in numbers & names.keys()}, b"".join(records))

    def put(self, message: Entries, *, known: Sequence[Set[bytes]] = ()) -> None:
        """Have these entries too, but for flows in one of the sets `known`. One whose node is not named says nothing."""
        numbers = self._numbers(message.names)
        sets: dict[str, dict[bytes, bytes]] = {name: {} for name in _TABLES}
        deletes: dict[str, list[bytes]] = {name: [] for name in _TABLES}
        for key, told in split(message.records):
            table = _TABLE_OF.get(key[_PROTOCOL_AT])
            if table is None or any(key in each for each in known):
                continue
            ending, node = _is_ending(told), _node(told)
            if told != _GONE and node not in numbers:
                continue
            if (
                ending
                and (present := sets[table].get(key) or self._maps[table].lookup(key))
                and (present[: INDEX.size] != numbers[node])
            ):
                continue  # a connection that came after the one that ends, with the same ports
            # Of two about one flow the later one counts.
            if told == _GONE or ending:
                sets[table].pop(key, None)
                deletes[table].append(key)
            if told == _GONE or not ending:
                sets[_ENDING].pop(key, None)
                deletes[_ENDING].append(key)
            if told != _GONE:
                sets[_ENDING if ending else table][key] = FLOW.pack(numbers[node])
        for table, elements in sets.items():
            self._maps[table].delete_all(deletes[table])
            self._maps[table].update_all(elements)
            self.received += len(elements)

    def _numbers(self, names: Mapping[int, str]) -> dict[int, bytes]:
        """Of the peer's numbers our own. A node that our plan does not know yet gets one: it will, in a moment."""
        found = {}
        for number, name in names.items():
            try:
                found[number] = INDEX.pack(self._tables.nodes.number(name))
            except Refused as error:
                log.warning("entries of a peer not taken over", node=name, problem=str(error))
        return found

    def known(self) -> Set[bytes]:
        """The flows that have an entry here. It reads the kernel's maps: to be asked for in a thread."""
        return {key for name in _TABLES for key, _ in self._maps[name].items()}

    def grow_up(self) -> None:
        """See `Tables.grow_up`."""
        self._tables.grow_up()

    def begin_with(self, message: Tables) -> None:
        """Before anything is planned: have this listener as the peer has it."""
        own = self._tables.installed(message.key)
        self._carry_over(message, tracked_as(message.slots, own.slots) if own else message.slots)

    def heed(self, message: Tables, *, behind: bool) -> None:
        """Track what the peer tracks. `behind`: this gateway has been away, so the peer's word counts for what has no entry; as
        it does for a listener of which no packet has come here. Of one that is not here nothing is kept: the plan will tell of
        it, or has taken it away."""
        if (own := self._tables.installed(message.key)) is None or own.slots == message.slots:
            return
        used = self._tables.is_used(own)
        if not used and not message.used and own.record.young and message.young:
            # Neither gateway has forwarded a packet of the listener, and both track each connection from its first packet:
            # no table of the past says where a connection is. Their tables differ for a moment, because each gateway
            # finds for itself which nodes answer.
            return
        if behind or not used:
            self._carry_over(message, tracked_as(_caught_up(own, message), own.slots))
        else:
            self._carry_over(message, tracked_as(own.slots, message.slots))

    def _carry_over(self, message: Tables, slots: Slots) -> None:
        try:
            self._tables.carry_over(
                *(message.key, ServiceKey(*message.service), message.uid, slots, message.keeping),
                restricted=message.restricted,
                used=message.used,
                young=message.young,
            )
        except FairleadError as error:
            log.warning("tables of a peer not taken over", listener=str(message.key), problem=str(error))


def _caught_up(own: InstalledListener, message: Tables) -> Slots:
    """What the peer has, and from there to what serves new connections here."""
    keepers = frozenset((*own.keeping, *message.keeping, *message.nodes))
    return by_rule(message.slots, Table(own.slots.nodes, own.slots.current), keepers, by_source=own.slots.by_source)


def split(records: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Key and node of each."""
    size, key_size = ENTRY.size, ENTRY.size - INDEX.size
    return ((records[at : at + key_size], records[at + key_size : at + size]) for at in range(0, len(records), size))


def parts_of(message: Entries, most: int) -> Iterator[Entries]:
    """The message as messages of at most `most` entries each, in the same order."""
    count = len(message.records) // ENTRY.size
    for at in range(0, count, most):
        records = message.records[at * ENTRY.size : (at + most) * ENTRY.size]
        yield msgspec.structs.replace(message, records=records, ages_s=message.ages_s[at : at + most])


def _told(table: str, value: bytes) -> bytes:
    """The node of an entry of this table, as it is told."""
    return INDEX.pack(_node(value[: INDEX.size]) | CLOSING) if table == _ENDING else value[: INDEX.size]


def _node(told: bytes) -> int:
    number: int = INDEX.unpack(told)[0]
    return number & ~CLOSING


def _is_ending(told: bytes) -> bool:
    return bool(INDEX.unpack(told)[0] & CLOSING)


def _batched(records: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(records, MOST_ENTRIES)):
        yield batch
