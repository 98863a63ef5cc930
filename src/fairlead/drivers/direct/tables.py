"""The listeners in the maps: whose they are, and the slots of each.

In: slots by node name. Out: the same, read back. The mirror holds what was last read or written; one process writes.
Invariant: at every moment a packet finds either the old tables of its listener or the new ones, whole: new tables are
written where nobody reads, and one update of the listener's record makes both live.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from itertools import chain
from typing import NamedTuple

from fairlead.drivers.direct.arena import Arena
from fairlead.drivers.direct.layout import (
    BY_SOURCE,
    CHUNK_BYTES,
    INDEX,
    LISTENER,
    PREVIOUS_BY_SOURCE,
    ListenerRecord,
    pack_owner,
    pack_server_key,
    unpack_owner,
    unpack_server_key,
)
from fairlead.drivers.direct.nodes import Nodes
from fairlead.drivers.direct.spec import ActualServer, DirectActual, ServerKey
from fairlead.errors import Refused
from fairlead.model import ServiceKey
from fairlead.net.bpf import Map
from fairlead.net.transition import NONE, TRACKED, Slots

NOBODY = ServiceKey("", "")
"""Owner of a listener without a mark. It is wanted by no plan, so it is taken away."""


class Installed(NamedTuple):
    """A listener as it is in the maps."""

    service: ServiceKey
    uid: str
    slots: Slots
    record: ListenerRecord


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
    """The maps `listeners`, `owners`, `arena` and `statistics`, mirrored; and the nodes."""

    def __init__(self, maps: dict[str, Map], clock: Callable[[], float] = time.monotonic) -> None:
        self._listeners, self._owners, self._statistics = maps["listeners"], maps["owners"], maps["statistics"]
        self._memory = maps["arena"].memory()
        self._chunks = maps["arena"].spec.max_entries
        self._clock = clock
        self._arena = Arena(self._chunks)
        self._idle_statistics = list(range(self._statistics.spec.max_entries))
        self._uses: Counter[str] = Counter()
        self._of_service: dict[ServiceKey, set[ServerKey]] = {}
        self._held: dict[ServiceKey, tuple[str, ...]] = {}
        self.installed: dict[ServerKey, Installed] = {}
        self.nodes = Nodes(maps["nodes"], maps["node_names"])

    def close(self) -> None:
        """Let go of the arena's memory."""
        self._memory.close()

    def load(self) -> None:
        """Read the maps anew. A mark without a listener is what an interrupted change left: it is taken away.

        Takes a second for 10,000 listeners: call it in a thread.
        """
        self.nodes.load()
        decode = cache(partial(_decode, self.nodes.names()))  # most Services have several listeners with equal tables
        owners = dict(self._owners.items())
        before = {key: each.record for key, each in self.installed.items()}
        found: dict[ServerKey, Installed] = {}
        for key, value in self._listeners.items():
            record = ListenerRecord(*LISTENER.unpack(value))
            service, uid = unpack_owner(owners.pop(key)) if key in owners else (NOBODY, "")
            slots = decode(self._table(*record[:2]), self._table(*record[2:4]), record.flags)
            found[unpack_server_key(key)] = Installed(service, uid, slots, record)
        for key in owners:
            self._owners.delete(key)
        self.installed, self._uses, self._of_service = {}, Counter(), {}
        for server, installed in found.items():
            self._note(server, installed)
        self._held = {service: nodes for service, nodes in self._held.items() if service in self._of_service}
        self._uses.update(chain.from_iterable(self._held.values()))
        if before != {key: each.record for key, each in self.installed.items()}:
            taken = (region for each in self.installed.values() for region in _regions(each.record))
            self._arena = Arena(self._chunks, taken)
            counting = {each.record.statistics for each in self.installed.values()}
            self._idle_statistics = [i for i in range(self._statistics.spec.max_entries) if i not in counting]

    def _table(self, offset: int, size: int) -> bytes:
        """A table as the arena holds it, with the numbers of nodes."""
        return self._memory[offset * CHUNK_BYTES : offset * CHUNK_BYTES + size * 2]

    def _note(self, key: ServerKey, installed: Installed) -> None:
        self.installed[key] = installed
        self._uses.update(installed.slots.nodes)
        self._of_service.setdefault(installed.service, set()).add(key)

    def _unnote(self, key: ServerKey) -> Installed | None:
        old = self.installed.pop(key, None)
        if old:
            self._uses.subtract(old.slots.nodes)
            self._of_service[old.service].discard(key)
            if not self._of_service[old.service]:
                del self._of_service[old.service]
        return old

    def statistics(self) -> list[tuple[ServiceKey, int]]:
        """Whose listener counts at which index of the map `statistics`."""
        return [(each.service, each.record.statistics) for each in list(self.installed.values())]

    def actual(self, services: Collection[ServiceKey] | None) -> dict[ServiceKey, DirectActual]:
        """What these Services have, or all of them; from the mirror."""
        wanted: Iterable[ServiceKey] = self._of_service if services is None else services
        found = {}
        for service in wanted:
            keys = sorted(self._of_service.get(service, ()))
            if keys:
                mine = [self.installed[key] for key in keys]
                servers = tuple(ActualServer(key, each.slots) for key, each in zip(keys, mine, strict=True))
                names = {name for each in mine for name in each.slots.nodes}
                addresses = tuple(self.nodes.addresses(names))
                found[service] = DirectActual(mine[0].uid, servers, addresses, self._held.get(service))
        return found

    def _write(self, slots: bytes, numbers: dict[int, int]) -> int:
        """Put a table where nobody reads; its offset in chunks."""
        if not slots:
            return 0
        data = array("H", map(numbers.__getitem__, array("H", slots))).tobytes()
        offset = self._arena.reserve(_chunks(len(slots) // 2), self._clock())
        self._memory[offset * CHUNK_BYTES : offset * CHUNK_BYTES + len(data)] = data
        return offset

    def set_server(self, key: ServerKey, service: ServiceKey, uid: str, slots: Slots) -> None:
        """Make the listener have these slots and this owner, from one packet to the next."""
        old = self.installed.get(key)
        packed = pack_server_key(key)
        if old is None or (old.service, old.uid) != (service, uid):
            self._owners.update(packed, pack_owner(service, uid))
        statistics = old.record.statistics if old else self._take_statistics()
        numbers = {place: self.nodes.number(name) for place, name in enumerate(slots.nodes)} | {NONE: NONE, TRACKED: TRACKED}
        record = ListenerRecord(
            self._write(slots.current, numbers),
            len(slots.current) // 2,
            self._write(slots.previous, numbers),
            len(slots.previous) // 2,
            BY_SOURCE * slots.by_source | PREVIOUS_BY_SOURCE * slots.previous_by_source,
            statistics,
        )
        self._listeners.update(packed, LISTENER.pack(*record))
        self._release(self._unnote(key))
        self._note(key, Installed(service, uid, slots, record))
        if old and old.service not in self._of_service:
            self.hold_nodes(old.service, None)

    def remove_server(self, key: ServerKey, service: ServiceKey) -> None:
        """Take the listener away, unless it has passed to another Service meanwhile."""
        if key not in self.installed or self.installed[key].service != service:
            return
        packed = pack_server_key(key)
        self._listeners.delete(packed)
        self._owners.delete(packed)
        old = self._unnote(key)
        self._release(old)
        if old:
            self._idle_statistics.append(old.record.statistics)
        if service not in self._of_service:
            self.hold_nodes(service, None)

    def _release(self, old: Installed | None) -> None:
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

    def hold_nodes(self, service: ServiceKey, nodes: tuple[str, ...] | None) -> None:
        """Connection entries of the Service may name these nodes: they are not forgotten, even if no slot names them.
        None: the Service has no listeners any more."""
        self._uses.subtract(self._held.pop(service, ()))
        if nodes is not None:
            self._held[service] = nodes
            self._uses.update(nodes)

    def forget_unused_nodes(self) -> None:
        """Free what stands for nodes that no listener names any more, and no connection entry that counts. Which those are
        only the plan knows: after a start nothing is forgotten until it has been told of every Service that has listeners."""
        if self._held.keys() == self._of_service.keys():
            self._uses = +self._uses
            self.nodes.forget_unused(self._uses, self._clock())
