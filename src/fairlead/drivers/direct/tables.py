"""The listeners in the maps: whose they are, and the slots of each.

In: slots by node name. Out: the same, read back. The mirror holds what was last read or written; one process writes.
Invariant: at every moment a packet finds either the old tables of its listener or the new ones, whole: new tables are
written where nobody reads, and one update of the listener's record makes both live. A change that cannot be made changes
nothing. Whoever asks the mirror sees all listeners at every moment, also while they are being read anew.
"""

import math
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping

from fairlead.drivers.direct.arena import GRACE_S, Arena
from fairlead.drivers.direct.keepers import Keepers
from fairlead.drivers.direct.layout import (
    BY_SOURCE,
    CHUNK_BYTES,
    COUNTER,
    INDEX,
    LISTENER,
    PREVIOUS_BY_SOURCE,
    RANGES,
    TRAFFIC,
    ListenerRecord,
    pack_address,
    pack_listener_key,
    pack_owner,
)
from fairlead.drivers.direct.mirror import Draining, InstalledListener, Mirror
from fairlead.drivers.direct.nodes import Nodes
from fairlead.drivers.direct.ranges import Ranges
from fairlead.drivers.direct.spec import DirectActual, ListenerKey, ListenerSpec, SetListener
from fairlead.drivers.direct.survey import NOBODY, Known, Survey, Surveyor
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.model import ServiceKey
from fairlead.net.bpf import Map
from fairlead.net.transition import Slots, renumber

_PRESENT = INDEX.pack(1)
CLEARED = 64
"""So many places to count at are set to zero in one go."""
_DEADLINE_MARGIN_S = 0.01
"""A deadline is looked at so much later, not a moment too early, when there would be nothing to do yet."""


def _named_sets(mirror: Mirror) -> dict[ServiceKey, int]:
    """The sets of source ranges that Services' listeners name. A change that was interrupted may have left a listener with
    the sets of the Service that had it before: they stay that one's alone."""
    owners: dict[int, ServiceKey] = {}
    for each in mirror.listeners.values():
        if each.record.sets is not None:
            owners.setdefault(each.record.sets, each.service)
    return {service: number for number, service in owners.items()}


def _chunks(size: int) -> int:
    return -(-size * 2 // CHUNK_BYTES)


def _regions(record: ListenerRecord) -> tuple[tuple[int, int], tuple[int, int]]:
    return (
        (record.current_offset, _chunks(record.current_size)),
        (record.previous_offset, _chunks(record.previous_size)),
    )


class Tables:
    """The maps `listeners`, `owners`, `addresses`, `ranges`, `arena` and `statistics`, mirrored; and the nodes. To be filled by
    a first survey."""

    def __init__(self, maps: dict[str, Map], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._listeners, self._owners, self._statistics = maps["listeners"], maps["owners"], maps["statistics"]
        self._addresses = maps["addresses"]
        self._memory = maps["arena"].memory()
        self._chunks = maps["arena"].spec.max_entries
        self._clock = clock
        self._arena = Arena(self._chunks)
        self._idle_statistics = list(range(self._statistics.spec.max_entries))
        self._cleared = list[int]()
        """Places to count at that are idle, and at zero."""
        self._generation = 0
        self._mirror = Mirror()
        self._looked_for_unused_s = -math.inf
        self._used: set[int] = set()
        """Places to count at where packets have been counted."""
        self._ranges, self._keepers = Ranges(maps["ranges"]), Keepers(maps["keepers"])
        self.nodes = Nodes(maps["ways"], maps["node_names"], maps["node_statistics"])
        self._surveyor = Surveyor(maps, self._memory, self.nodes, self._ranges, self._keepers, clock)
        self.touched: set[ListenerKey] = set()
        """Listeners whose slots have changed; whoever wants to know empties it."""

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
        """See `Surveyor.survey`."""
        return self._surveyor.survey(known, with_entries=with_entries)

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
            self._cleared = []
        self._mirror = survey.mirror
        self.nodes.adopt(survey.nodes)
        self._ranges.adopt(survey.ranges, _named_sets(survey.mirror))
        self._keepers.adopt(survey.keepers, {record.statistics for record in records.values()})
        for address in self._mirror.addresses.keys() - survey.addresses:
            self._addresses.update(pack_address(address), _PRESENT)
        for address in survey.addresses - self._mirror.addresses.keys():
            self._addresses.delete(pack_address(address))
        return True

    @property
    def addresses(self) -> Collection[str]:
        """Where there are listeners."""
        return self._mirror.addresses.keys()

    @property
    def services(self) -> Collection[ServiceKey]:
        """Those that have listeners."""
        return self._mirror.of_service.keys()

    def statistics(self) -> list[tuple[ServiceKey, int]]:
        """Whose listener counts at which index of the map `statistics`. May be asked for in a thread, as `draining`."""
        return [(each.service, each.record.statistics) for each in self._mirror.listeners.copy().values()]

    def actual(self, services: Collection[ServiceKey] | None) -> dict[ServiceKey, DirectActual]:
        """What these Services have, or all of them; from the mirror."""
        self._notice_use(self._mirror.listeners.values() if services is None else self._mirror.listeners_of(services))
        return self._mirror.actual(
            services, self.nodes.usable, self._ranges.of, lambda each: each.record.statistics in self._used, self._clock()
        )

    def _notice_use(self, listeners: Iterable[InstalledListener]) -> None:
        """Find out of all of these where packets have been counted, many at a time: by itself each takes a system call."""
        unsure = [each.record.statistics for each in listeners if each.record.statistics not in self._used]
        for index, counts in self._statistics.rows(unsure):
            if any(array("Q", counts)[:: TRAFFIC.size // COUNTER.size]):  # the first of a CPU's counters is that of packets
                self._used.add(index)

    def is_used(self, installed: InstalledListener) -> bool:
        """Whether packets have been sent on for the listener."""
        self._notice_use((installed,))
        return installed.record.statistics in self._used

    def draining(self) -> list[Draining]:
        """Which nodes keep connections of which listener without getting new ones, where that has a limit."""
        listeners, keys = self._mirror.listeners, self._mirror.draining.copy()
        found = ((key, listeners.get(key)) for key in keys)
        return [drain for key, each in found if each for drain in each.drains(key, self._clock())]

    def next_deadline_s(self, service: ServiceKey) -> float:
        """In how many seconds the time of a node to keep connections of the Service is over; 0 if none has such a limit."""
        if not self._mirror.draining:
            return 0.0
        keys = self._mirror.draining & self._mirror.of_service.get(service, set())
        drains = [each for key in keys for each in self._mirror.listeners[key].drains(key, self._clock())]
        return max(0.0, min(each.left_s for each in drains)) + _DEADLINE_MARGIN_S if drains else 0.0

    def set_ranges(self, service: ServiceKey, cidrs: tuple[str, ...]) -> None:
        """Have the Service's source ranges be these. Raises Refused when there is no room: see `ranges`."""
        self._generation += 1
        self._ranges.set(service, cidrs)

    def forget_ranges(self, service: ServiceKey) -> None:
        """Take the Service's source ranges away if none of its listeners follows them any more."""
        keys = self._mirror.of_service.get(service, ())
        if not any(self._mirror.listeners[key].record.flags & RANGES for key in keys):
            self._generation += 1
            self._ranges.remove(service)

    def keys(self) -> set[ListenerKey]:
        """The listeners that there are."""
        return set(self._mirror.listeners)

    def services_of(self, nodes: Collection[str]) -> set[ServiceKey]:
        """The Services of which these nodes have or keep connections."""
        return {each.service for each in self._mirror.listeners.values() if not each.uses.isdisjoint(nodes)}

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
        now_s, listener, owner = self._clock(), change.listener, (change.service, change.uid)
        since_s = old.idle_since if old else {}
        idle_since = {node: since_s.get(node, now_s) for node in listener.idle}
        keepers = self._keeping(key, slots, (*listener.keepers, *listener.left))
        sets = self._ranges.number(change.service) if listener.restricted else None
        if old is None or old.slots != slots:
            self._replace(key, owner, slots, listener, idle_since, sets, keepers)
            return
        record = old.record.following(sets, ipv6=":" in key.address)
        if old[:2] != owner:
            self._owners.update(pack_listener_key(key), pack_owner(*owner))
        if old.record != record:
            self._listeners.update(pack_listener_key(key), LISTENER.pack(*record))
        self._keepers.add(record.statistics, keepers)
        self._keepers.only(record.statistics, keepers)
        self._mirror.put(key, InstalledListener(*owner, slots, record, old.digest, listener, idle_since))

    def _keeping(self, key: ListenerKey, slots: Slots, nodes: Iterable[str]) -> frozenset[int]:
        """Those of these nodes whose entries count. Connections without a previous table have none to ask for."""
        asked = key.protocol == "UDP" or slots.previous
        return frozenset(map(self.nodes.number, nodes)) if asked else frozenset()

    def carry_over(
        self,
        key: ListenerKey,
        service: ServiceKey,
        uid: str,
        slots: Slots,
        keeping: Collection[str],
        *,
        restricted: bool,
        used: bool,
    ) -> None:
        """Make the listener have slots that no plan has asked for, because another gateway's connections need them. `service`,
        `uid`: whose it is if it is not there yet; `keeping`: the nodes that may have connections of it then; `restricted`:
        whether only those in the Service's source ranges are let in, so that nobody is until these are set; `used`: whether the
        other gateway has sent packets on for it.

        Raises what `set_listener` raises.
        """
        old = self.installed(key)
        keepers = self._keeping(key, slots, keeping)
        if old is None:
            since_s = dict.fromkeys({*slots.nodes, *keeping}, self._clock())
            sets = self._ranges.number(service) if restricted else None
            self._replace(key, (service, uid), slots, None, since_s, sets, keepers)
        elif old.slots != slots:
            self._replace(key, (old.service, old.uid), slots, old.spec, old.idle_since, old.record.sets, keepers)
        if used:
            self._used.add(self._mirror.listeners[key].record.statistics)

    def _replace(
        self,
        key: ListenerKey,
        owner: tuple[ServiceKey, str],
        slots: Slots,
        listener: ListenerSpec | None,
        idle_since: Mapping[str, float],
        sets: int | None,
        keepers: frozenset[int],
    ) -> None:
        """Write the tables where nobody reads, then make them live."""
        old = self.installed(key)
        self._generation += 1
        packed = pack_listener_key(key)
        reserved = self._reserve(slots, old)
        try:
            record = reserved.following(sets, ipv6=":" in key.address)
            if old is None or old[:2] != owner:
                self._owners.update(packed, pack_owner(*owner))
            if key.address not in self._mirror.addresses:
                self._addresses.update(pack_address(key.address), _PRESENT)
            self._keepers.add(record.statistics, keepers)
            digest = self._write(slots, record)
            self._listeners.update(packed, LISTENER.pack(*record))
        except FairleadError:
            self._give_back(reserved, old)
            raise
        self._keepers.only(record.statistics, keepers)
        self._release(old)
        self._mirror.put(key, InstalledListener(*owner, slots, record, digest, listener, idle_since))
        self.touched.add(key)

    def _reserve(self, slots: Slots, old: InstalledListener | None) -> ListenerRecord:
        """Room for the tables, and a place to count at."""
        current, previous, now_s = len(slots.current) // 2, len(slots.previous) // 2, self._clock()
        statistics = old.record.statistics if old else self._take_statistics()
        flags = BY_SOURCE * slots.by_source | PREVIOUS_BY_SOURCE * slots.previous_by_source
        record = ListenerRecord(0, 0, 0, 0, flags, statistics)
        try:
            if current:
                record = record._replace(current_offset=self._arena.reserve(_chunks(current), now_s), current_size=current)
            if previous:
                record = record._replace(previous_offset=self._arena.reserve(_chunks(previous), now_s), previous_size=previous)
        except FairleadError:
            self._give_back(record, old)
            raise
        return record

    def _give_back(self, reserved: ListenerRecord, old: InstalledListener | None) -> None:
        """What was reserved in the place of `old` is not needed."""
        for offset, length in _regions(reserved):
            self._arena.give_back(offset, length, self._clock())
        if old is None:
            self._idle_statistics.append(reserved.statistics)

    def _write(self, slots: Slots, record: ListenerRecord) -> int:
        """Put the tables where nobody reads. Their digest."""
        numbers = self.nodes.numbers_of(slots.nodes)
        written = []
        for table, offset in ((slots.current, record.current_offset), (slots.previous, record.previous_offset)):
            data = renumber(array("H", table), numbers).tobytes() if table else b""
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
        if key.address not in self._mirror.addresses:
            self._addresses.delete(pack_address(key.address))
        self._release(old)
        self._keepers.only(old.record.statistics, frozenset())
        self._idle_statistics.append(old.record.statistics)

    def _release(self, old: InstalledListener | None) -> None:
        if old:
            for offset, length in _regions(old.record):
                self._arena.give_back(offset, length, self._clock())

    def _take_statistics(self) -> int:
        if not self._cleared:
            # Many at a time: by itself each takes a system call.
            self._cleared = self._idle_statistics[-CLEARED:]
            del self._idle_statistics[-CLEARED:]
            self._statistics.clear_all([INDEX.pack(index) for index in self._cleared])
        if not self._cleared:
            limit = self._statistics.spec.max_entries
            raise Refused(f"no listener is left of {limit}", fix="use more gateways with fewer Services each")
        index = self._cleared.pop()
        self._used.discard(index)
        return index

    def forget_unused_nodes(self) -> None:
        """Free what stands for nodes that no listener names any more, and no connection entry that counts. Which those are
        only the plan knows: after a start nothing is forgotten until it has spoken of every listener."""
        now_s = self._clock()
        # Not with every change: it goes through all nodes, and the grace that they have is no shorter.
        if not self._mirror.unplanned and now_s - self._looked_for_unused_s >= GRACE_S:
            self._looked_for_unused_s = now_s
            self.nodes.forget_unused(self._mirror.uses, now_s)
