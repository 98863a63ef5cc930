"""The listeners in the maps: whose they are, and the slots of each.

In: slots by node name. Out: the same, read back. The mirror holds what was last read or written; one process writes.
Invariant: at every moment a packet finds either the old tables of its listener or the new ones, whole: new tables are
written where nobody reads, and one update of the listener's record makes both live. A change that cannot be made changes
nothing. Whoever asks the mirror sees all listeners at every moment, also while they are being read anew.
"""

import time
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

from fairlead.drivers.direct.arena import Arena
from fairlead.drivers.direct.layout import (
    BY_SOURCE,
    CHUNK_BYTES,
    INDEX,
    LISTENER,
    PREVIOUS_BY_SOURCE,
    ListenerRecord,
    pack_listener_key,
    pack_owner,
    unpack_entry,
    unpack_listener_key,
    unpack_owner,
)
from fairlead.drivers.direct.mirror import InstalledListener, Mirror
from fairlead.drivers.direct.nodes import Nodes, NodesFound
from fairlead.drivers.direct.spec import DirectActual, ListenerKey, SetListener
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.model import ServiceKey
from fairlead.net.bpf import Map
from fairlead.net.transition import NONE, TRACKED, Slots

NOBODY = ServiceKey("", "")
"""Owner of a listener without a mark. It is wanted by no plan, so it is taken away."""


class Known(NamedTuple):
    """What is known when a survey begins: what has not changed need not be read in full."""

    generation: int
    mirror: Mirror
    names: dict[int, str]


class Survey(NamedTuple):
    """What was found in the maps. Holds if nothing was changed since it began."""

    generation: int
    mirror: Mirror
    nodes: NodesFound
    stale_marks: tuple[bytes, ...]
    """Marks without a listener: what an interrupted change left."""


def _chunks(size: int) -> int:
    return -(-size * 2 // CHUNK_BYTES)


def _regions(record: ListenerRecord) -> tuple[tuple[int, int], tuple[int, int]]:
    return (
        (record.current_offset, _chunks(record.current_size)),
        (record.previous_offset, _chunks(record.previous_size)),
    )


def _decode(names: dict[int, str], current: bytes, previous: bytes, flags: int) -> Slots:
    """Slots by node name, from tables of numbers. A number that stands for nobody gives the empty name, which no plan wants."""
    tables = array("H", current), array("H", previous)
    numbers = {*tables[0], *tables[1]} - {NONE, TRACKED}
    nodes = tuple(sorted({names.get(number, "") for number in numbers}))
    place = {number: nodes.index(names.get(number, "")) for number in numbers} | {NONE: NONE, TRACKED: TRACKED}
    now, before = (array("H", map(place.__getitem__, each)).tobytes() for each in tables)
    return Slots(nodes, now, before, bool(flags & BY_SOURCE), bool(flags & PREVIOUS_BY_SOURCE))


class Tables:
    """The maps `listeners`, `owners`, `arena` and `statistics`, mirrored; and the nodes. To be filled by a first survey.

    keep_left_s: so long a node that is no member of a listener any more may keep connections of it.
    """

    def __init__(self, maps: dict[str, Map], *, keep_left_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._listeners, self._owners, self._statistics = maps["listeners"], maps["owners"], maps["statistics"]
        self._connections = maps["connections"]
        self._memory = maps["arena"].memory()
        self._chunks = maps["arena"].spec.max_entries
        self._keep_left_s = keep_left_s
        self._clock = clock
        self._arena = Arena(self._chunks)
        self._idle_statistics = list(range(self._statistics.spec.max_entries))
        self._generation = 0
        self._mirror = Mirror()
        self.nodes = Nodes(maps["nodes"], maps["node_names"])

    def close(self) -> None:
        """Let go of the arena's memory."""
        self._memory.close()

    @property
    def generation(self) -> int:
        """Counts the changes of the maps by this process."""
        return self._generation + self.nodes.generation

    def known(self) -> Known:
        """What a survey begins with. To be asked for where changes are made, so that none is half done."""
        return Known(self.generation, self._mirror, self.nodes.names())

    def survey(self, known: Known, *, with_entries: bool = False) -> Survey:
        """Read the maps anew. Takes up to a second for 10,000 listeners: call it in a thread; it changes nothing.

        with_entries: also which nodes the connection entries name. The first survey needs it, later the plan has said more.
        """
        nodes = self.nodes.survey()
        names = nodes.names()
        decode = cache(partial(_decode, names))  # most Services have several listeners with equal tables
        same_names = names == known.names
        entries = self._named_by_entries(names) if with_entries else {}
        owners = dict(self._owners.items())
        found: list[tuple[ListenerKey, InstalledListener]] = []
        for packed, value in self._listeners.items():
            key, record = unpack_listener_key(packed), ListenerRecord(*LISTENER.unpack(value))
            owner = unpack_owner(owners.pop(packed)) if packed in owners else (NOBODY, "")
            tables = self._table(*record[:2]), self._table(*record[2:4])
            old, digest = known.mirror.listeners.get(key), hash(tables)
            if old and same_names and (old[:2], old.record, old.digest) == (owner, record, digest):
                found.append((key, old))
                continue
            slots = decode(*tables, record.flags)
            left_since = dict.fromkeys({*slots.nodes, *entries.get(packed, ())}, self._clock())
            found.append((key, InstalledListener(*owner, slots, record, digest, None, left_since)))
        return Survey(known.generation, Mirror(found), nodes, tuple(owners))

    def _named_by_entries(self, names: dict[int, str]) -> dict[bytes, set[str]]:
        found: dict[bytes, set[str]] = {}
        for listener, number in {unpack_entry(key, value) for key, value in self._connections.items()}:
            if number in names:
                found.setdefault(listener, set()).add(names[number])
        return found

    def adopt(self, survey: Survey) -> bool:
        """Have the mirror be what was found, unless the maps were changed meanwhile: then False, and nothing is done."""
        if survey.generation != self.generation:
            return False
        for mark in survey.stale_marks:
            self._owners.delete(mark)
        records = {key: each.record for key, each in survey.mirror.listeners.items()}
        if records != {key: each.record for key, each in self._mirror.listeners.items()}:
            self._arena = Arena(self._chunks, (region for each in records.values() for region in _regions(each)))
            counting = {each.statistics for each in records.values()}
            self._idle_statistics = [i for i in range(self._statistics.spec.max_entries) if i not in counting]
        self._mirror = survey.mirror
        self.nodes.adopt(survey.nodes)
        return True

    def _table(self, offset: int, size: int) -> bytes:
        """A table as the arena holds it, with the numbers of nodes."""
        return self._memory[offset * CHUNK_BYTES : offset * CHUNK_BYTES + size * 2]

    def statistics(self) -> list[tuple[ServiceKey, int]]:
        """Whose listener counts at which index of the map `statistics`."""
        return [(each.service, each.record.statistics) for each in self._mirror.listeners.values()]

    def actual(self, services: Collection[ServiceKey] | None) -> dict[ServiceKey, DirectActual]:
        """What these Services have, or all of them; from the mirror."""
        return self._mirror.actual(services, self.nodes.usable(), self._clock() - self._keep_left_s)

    def installed(self, key: ListenerKey) -> InstalledListener | None:
        """A listener as it was last read or written."""
        return self._mirror.listeners.get(key)

    def set_listener(self, change: SetListener) -> None:
        """Make the listener have these slots and this owner, from one packet to the next.

        Raises Unavailable where another Service holds it or the arena is full, Refused where something is too long or too
        many; then all is as it was.
        """
        key, slots, old = change.listener.key, change.slots, self.installed(change.listener.key)
        if old and old.service not in (change.service, change.taken_from, NOBODY):
            raise Unavailable(
                f"listener {key} is held by Service {old.service}", fix="give one of the two another address or port"
            )
        self._generation += 1
        owner = (change.service, change.uid)
        left_since = {node: old.left_since.get(node, self._clock()) if old else self._clock() for node in change.listener.left}
        if old and old.slots == slots:
            if old[:2] != owner:
                self._owners.update(pack_listener_key(key), pack_owner(*owner))
            kept = old._replace(service=change.service, uid=change.uid, spec=change.listener, left_since=left_since)
            self._mirror.put(key, kept)
            return
        with self._reserved(slots, old) as record:
            if old is None or old[:2] != owner:
                self._owners.update(pack_listener_key(key), pack_owner(*owner))
            digest = self._write(slots, record)
            self._listeners.update(pack_listener_key(key), LISTENER.pack(*record))
        self._release(old)
        self._mirror.put(key, InstalledListener(*owner, slots, record, digest, change.listener, left_since))

    @contextmanager
    def _reserved(self, slots: Slots, old: InstalledListener | None) -> Iterator[ListenerRecord]:
        """Room for the tables, and a place to count at. Given back if what is done with them fails."""
        sizes, taken = (len(slots.current) // 2, len(slots.previous) // 2), list[tuple[int, int]]()
        statistics = old.record.statistics if old else self._take_statistics()
        try:
            for size in sizes:
                length = _chunks(size)
                taken.append((self._arena.reserve(length, self._clock()) if length else 0, length))
            flags = BY_SOURCE * slots.by_source | PREVIOUS_BY_SOURCE * slots.previous_by_source
            yield ListenerRecord(taken[0][0], sizes[0], taken[1][0], sizes[1], flags, statistics)
        except FairleadError:
            for region in taken:
                self._arena.give_back(*region, self._clock())
            if old is None:
                self._idle_statistics.append(statistics)
            raise

    def _write(self, slots: Slots, record: ListenerRecord) -> int:
        """Put the tables where nobody reads. Their digest."""
        numbers = {place: self.nodes.number(name) for place, name in enumerate(slots.nodes)} | {NONE: NONE, TRACKED: TRACKED}
        written = []
        for table, offset in ((slots.current, record.current_offset), (slots.previous, record.previous_offset)):
            data = array("H", map(numbers.__getitem__, array("H", table))).tobytes()
            self._memory[offset * CHUNK_BYTES : offset * CHUNK_BYTES + len(data)] = data
            written.append(data)
        return hash(tuple(written))

    def remove_listener(self, key: ListenerKey, service: ServiceKey) -> None:
        """Take the listener away, unless it has passed to another Service meanwhile."""
        old = self.installed(key)
        if old is None or old.service != service:
            return
        self._generation += 1
        packed = pack_listener_key(key)
        self._listeners.delete(packed)
        self._owners.delete(packed)
        self._mirror.take(key)
        self._release(old)
        self._idle_statistics.append(old.record.statistics)

    def _release(self, old: InstalledListener | None) -> None:
        if old:
            for offset, length in _regions(old.record):
                self._arena.give_back(offset, length, self._clock())

    def _take_statistics(self) -> int:
        if not self._idle_statistics:
            limit = self._statistics.spec.max_entries
            raise Refused(f"no listener is left of {limit}", fix="use more gateways with fewer Services each")
        index = self._idle_statistics.pop()
        self._statistics.clear_values(INDEX.pack(index))
        return index

    def forget_unused_nodes(self) -> None:
        """Free what stands for nodes that no listener names any more, and no connection entry that counts. Which those are
        only the plan knows: after a start nothing is forgotten until it has spoken of every listener."""
        if not self._mirror.unplanned:
            used = [node for node, count in self._mirror.uses.items() if count > 0]
            self.nodes.forget_unused(used, self._clock())
