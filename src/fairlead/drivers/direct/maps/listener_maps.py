"""The listeners in the maps: whose they are, and the slots of each.

In: slots by node name. Out: the same, read back. The mirror holds what was last read or written;
one process writes. Invariant: at every moment a packet finds either the old tables of its listener
or the new ones, whole: new tables are written where nobody reads, and one update of the listener's
record makes both live (see `listeners`). A change that cannot be made changes nothing. Whoever asks
the mirror sees all listeners at every moment, also while they are being read anew."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import structlog

from fairlead.drivers.direct.maps.arena import GRACE_S
from fairlead.drivers.direct.maps.convergence import Convergence
from fairlead.drivers.direct.maps.counter_indexes import CounterIndexPool
from fairlead.drivers.direct.maps.listeners import Listeners
from fairlead.drivers.direct.maps.mirror import Draining, InstalledListener, Mirror, Prepared
from fairlead.drivers.direct.maps.nodes import Nodes
from fairlead.drivers.direct.maps.quota import OutOfMemory, Quotas
from fairlead.drivers.direct.maps.records import (
    CONVERGING,
    INDEX,
    LISTENER,
    RANGES,
    REFUSES,
    pack_listener_key,
    pack_owner,
    unpack_listener_key,
)
from fairlead.drivers.direct.maps.retained_nodes import RetainedNodes
from fairlead.drivers.direct.maps.sizing import Fitting, claim, fittings
from fairlead.drivers.direct.maps.source_ranges import Ranges
from fairlead.drivers.direct.maps.survey import NOBODY, Known, Survey, Surveyor
from fairlead.drivers.direct.maps.table_allocator import TableAllocator
from fairlead.drivers.direct.spec import DirectActual, ListenerKey, ListenerSpec, SetListener
from fairlead.errors import FairleadError, Unavailable
from fairlead.model import ServiceKey
from fairlead.net.address import is_ipv6, pack_address
from fairlead.net.bpf import Map
from fairlead.net.maglev import SMALLEST
from fairlead.net.transition import Slots

log = structlog.get_logger()

_PRESENT = INDEX.pack(1)
_DEADLINE_MARGIN_S = 0.01
"""A deadline is looked at so much later, not a moment too early, when there would be nothing to do
yet."""


def _named_sets(mirror: Mirror) -> dict[ServiceKey, int]:
    """The sets of source ranges that Services' listeners name. A change that was interrupted may
    have left a listener with the sets of the Service that had it before: they stay that one's
    alone."""
    owners: dict[int, ServiceKey] = {}
    for each in mirror.listeners.values():
        if each.record.sets is not None:
            owners.setdefault(each.record.sets, each.service)
    return {service: number for number, service in owners.items()}


class ListenerMaps:
    """The maps `listeners`, `owners`, `addresses`, `ranges`, `arena` and `statistics`, mirrored;
    and the nodes. To be filled by a first survey.

    peers: other gateways serve the same addresses; see `convergence`. share: the fraction of each limited
    resource that one namespace may have; see `quota`."""

    def __init__(
        self,
        maps: dict[str, Map],
        *,
        peers: bool = False,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listeners = Listeners(maps)
        self._owners, self._addresses = maps["owners"], maps["addresses"]
        self._memory = maps["arena"].memory()
        self._clock = clock
        self._places = CounterIndexPool(maps["statistics"])
        self._room = TableAllocator(
            self._memory, maps["arena"].spec.max_entries, self._places, clock
        )
        self.quotas = Quotas.of({name: each.spec.max_entries for name, each in maps.items()}, share)
        self._mirror = Mirror(self.quotas)
        self._touched: set[ListenerKey] = set()
        """Listeners that were changed since the last survey began."""
        self._youth = Convergence(peers, clock)
        self._looked_for_unused_s = -math.inf
        self._ranges = Ranges(maps["ranges"], self.quotas.ranges)
        self._keepers = RetainedNodes(maps["retained_nodes"], self.quotas.retained)
        self.nodes = Nodes(maps["ways"], maps["node_names"], maps["node_statistics"])
        self._surveyor = Surveyor(
            maps, self._memory, self.nodes, self._ranges, self._keepers, clock
        )
        self.touched: set[ListenerKey] = set()
        """Listeners whose slots have changed; whoever wants to know empties it."""

    def close(self) -> None:
        """Let go of the maps' memory."""
        self._memory.close()
        self._listeners.close()

    def known(self) -> Known:
        """What a survey begins with. To be asked for where changes are made, so that none is half
        done; from here on it is noted what is changed."""
        for touched in (
            self._touched,
            self.nodes.touched,
            self._ranges.touched,
            self._keepers.touched,
        ):
            touched.clear()
        return Known(self._mirror.listeners.copy(), self.nodes.names())

    def surveying(self, known: Known, *, with_entries: bool = False) -> Iterator[Survey | None]:
        """See `Surveyor.survey`."""
        return self._surveyor.survey(known, with_entries=with_entries)

    def survey(self, known: Known, *, with_entries: bool = False) -> Survey:
        """The same at once."""
        *_, survey = self.surveying(known, with_entries=with_entries)
        assert survey is not None
        return survey

    def adopt(self, survey: Survey) -> None:
        """Have the mirror be what was found, but for what was changed since `known`: of that it
        says more. One survey at a time."""
        self._listeners.renew()  # somebody else may have changed them
        for mark in survey.stale_marks:
            if unpack_listener_key(mark) not in self._touched:
                self._owners.delete(mark)
        changed = {key: each for key, each in survey.changed.items() if key not in self._touched}
        gone = survey.gone - self._touched
        elsewhere = bool(gone)
        for key in gone:
            self._mirror.count(self._mirror.take(key), None)
        for key, each in changed.items():
            old = self._put(key, each)
            self._mirror.count(old, each)
            elsewhere |= old is None or old.record != each.record
        if elsewhere:  # somebody else has changed where tables are
            self._room.find([each.record for each in self._mirror.listeners.values()])
        self.nodes.adopt(survey.nodes)
        self._ranges.adopt(survey.ranges, _named_sets(self._mirror))
        namespaces = {
            each.record.statistics: each.service.namespace
            for each in self._mirror.listeners.values()
        }
        self._keepers.adopt(survey.retained_nodes, namespaces)
        at, settled = self._mirror.addresses.keys(), {key.address for key in self._touched}
        for address in at - survey.addresses - settled:
            self._addresses.update(pack_address(address), _PRESENT)
        for address in survey.addresses - at - settled:
            self._addresses.delete(pack_address(address))

    def _put(self, key: ListenerKey, installed: InstalledListener) -> InstalledListener | None:
        """Note it in the mirror; what was there before it."""
        old = self._mirror.put(key, installed)
        self._youth.note(key, installed, old)
        return old

    def end_convergence(self) -> None:
        """Listeners whose tables have been the same for a while are converging no more. Those whose
        slots are in transition by then stay tracked where they are. To be called often: each time
        some are seen to."""
        prepared = []
        for key in self._youth.over():
            old = self.installed(key)
            if old is None or not old.record.converging:
                continue
            self._touched.add(key)
            new = old._replace(record=old.record._replace(flags=old.record.flags & ~CONVERGING))
            retained_nodes = self._keeping(key, new.slots, old.keeping, converging=False)
            prepared.append(Prepared(key, pack_listener_key(key), new, old, retained_nodes))
        for key, error in self._go_live(prepared).items():
            log.warning(
                "all connections of a listener go on having entries",
                listener=str(key),
                problem=str(error),
            )

    @property
    def addresses(self) -> Collection[str]:
        """Where there are listeners."""
        return self._mirror.addresses.keys()

    @property
    def services(self) -> Collection[ServiceKey]:
        """Those that have listeners."""
        return self._mirror.of_service.keys()

    def statistics(self) -> list[tuple[ServiceKey, int]]:
        """Whose listener counts at which index of the map `statistics`. May be asked for in a
        thread, as `draining`."""
        return [
            (each.service, each.record.statistics)
            for each in self._mirror.listeners.copy().values()
        ]

    def actual(self, services: Collection[ServiceKey] | None) -> dict[ServiceKey, DirectActual]:
        """What these Services have, or all of them; from the mirror."""
        listeners = (
            self._mirror.listeners.values()
            if services is None
            else self._mirror.listeners_of(services)
        )
        self._places.notice(each.record.statistics for each in listeners)
        used = self._places.used
        return self._mirror.actual(
            services,
            self.nodes.usable,
            self._ranges.of,
            lambda each: each.record.statistics in used,
            self._clock(),
        )

    def is_used(self, installed: InstalledListener) -> bool:
        """Whether packets have been sent on for the listener."""
        self._places.notice((installed.record.statistics,))
        return installed.record.statistics in self._places.used

    def draining(self) -> list[Draining]:
        """Which nodes keep connections of which listener without getting new ones, where that has a
        limit."""
        listeners, keys = self._mirror.listeners, self._mirror.draining.copy()
        found = ((key, listeners.get(key)) for key in keys)
        return [drain for key, each in found if each for drain in each.drains(key, self._clock())]

    def next_deadline_s(self, service: ServiceKey) -> float:
        """In how many seconds the time of a node to keep connections of the Service is over; 0 if
        none has such a limit."""
        if not self._mirror.draining:
            return 0.0
        keys = self._mirror.draining & self._mirror.of_service.get(service, set())
        drains = [
            each for key in keys for each in self._mirror.listeners[key].drains(key, self._clock())
        ]
        return max(0.0, min(each.left_s for each in drains)) + _DEADLINE_MARGIN_S if drains else 0.0

    def set_ranges(self, service: ServiceKey, cidrs: tuple[str, ...]) -> None:
        """Set the source ranges of the Service. Raises OutOfMemory, see `ranges`."""
        self._ranges.set(service, cidrs)

    def forget_ranges(self, service: ServiceKey) -> None:
        """Take the Service's source ranges away if none of its listeners follows them any more."""
        if not self._ranges.has(service):
            return
        keys = self._mirror.of_service.get(service, ())
        if not any(self._mirror.listeners[key].record.flags & RANGES for key in keys):
            self._ranges.remove(service)

    def keys(self) -> set[ListenerKey]:
        """The listeners that there are."""
        return set(self._mirror.listeners)

    def short(self, service: ServiceKey) -> list[str]:
        """What the listeners of the Service lack because there was no room: one text for each
        listener that lacks something."""
        return [each.short for each in self._mirror.listeners_of((service,)) if each.short]

    def count_of(self, service: ServiceKey) -> int:
        """How many listeners the Service has."""
        return len(self._mirror.of_service.get(service, ()))

    def serves(self, service: ServiceKey) -> bool:
        """Whether any listener of the Service has a node within reach, or refuses connections
        because the Service has no endpoint."""
        return any(
            not each.slots.nodes or self._has_reach(key, each.slots.nodes)
            for key in self._mirror.of_service.get(service, ())
            if (each := self._mirror.listeners[key])
        )

    def _has_reach(self, key: ListenerKey, nodes: Collection[str]) -> bool:
        ipv6 = ":" in key.address
        return any(self.nodes.within_reach((node,), ipv6=ipv6) for node in nodes)

    def services_of(self, nodes: Collection[str]) -> set[ServiceKey]:
        """The Services of which these nodes have or keep connections."""
        return {
            each.service
            for each in self._mirror.listeners.values()
            if not each.uses.isdisjoint(nodes)
        }

    def installed(self, key: ListenerKey) -> InstalledListener | None:
        """A listener as it was last read or written."""
        return self._mirror.listeners.get(key)

    def set_listeners(
        self,
        changes: Iterable[SetListener],
        leaving: Mapping[ServiceKey, list[ListenerKey]] = MappingProxyType({}),
    ) -> dict[ListenerKey, FairleadError]:
        """Give listeners, no two of them the same, these slots and these owners, each from one
        packet to the next. `leaving`: listeners of Services that are to be removed later; a new
        listener may use the room of one of them, which is then removed from the list.

        Returns the errors: Unavailable where another Service holds a listener, OutOfMemory where there
        is no room for a new one, Refused where something is too long or too many. Such a listener
        is unchanged; the others have what they ask for, or as much of it as there is room for
        (`InstalledListener.short`)."""
        failures: dict[ListenerKey, FairleadError] = {}
        prepared = []
        for change in changes:
            try:
                prepared.append(self._prepare(change, leaving.get(change.service, [])))
            except FairleadError as error:
                failures[change.listener.key] = error
        return failures | self._go_live(prepared)

    def _prepare(self, change: SetListener, leaving: list[ListenerKey]) -> Prepared:
        key, slots, old = change.listener.key, change.slots, self.installed(change.listener.key)
        # The last line of defence, which decides no conflict: the plan gives a port to one Service
        # (see `plan.conflicts`). Until the other one is planned without the port, it keeps it.
        if old and old.service not in (change.service, change.taken_from, NOBODY):
            raise Unavailable(
                f"listener {key} is held by Service {old.service}",
                fix="give one of the two another address or port",
            )
        now_s, listener = self._clock(), change.listener
        since_s = old.idle_since if old else {}
        idle_since = {node: since_s.get(node, now_s) for node in listener.idle}
        converging = self._is_young(old, slots)
        sets = self._ranges.number(change.service) if listener.restricted else None
        granted, room = (
            self._granted(change.service, old, leaving),
            self._may_claim(change.service, old),
        )
        owner, why = (change.service, change.uid), None
        for fitting in fittings(change, old and old.slots, room, granted):
            retained_nodes = self._keeping(
                key,
                fitting.slots,
                (*listener.retained_nodes, *listener.departed),
                converging=converging,
            )
            try:
                made = self._written(
                    *(key, owner, fitting.slots, listener, idle_since, sets, retained_nodes),
                    converging=converging,
                    over=fitting.over,
                )
            except OutOfMemory as error:
                self.quotas.memory.waiting.add(change.service)
                why = error
                continue
            if fitting.slots == slots:
                return made
            lack = _lack(fitting, why or self.quotas.memory.refusal(change.service))
            return made._replace(new=made.new._replace(short=lack))
        raise why or self.quotas.memory.refusal(change.service)

    def _may_claim(self, service: ServiceKey, old: InstalledListener | None) -> int:
        """Chunks that the listener may use."""
        return self.quotas.memory.room(service.namespace) + (claim(old.record) if old else 0)

    def _granted(
        self, service: ServiceKey, old: InstalledListener | None, leaving: list[ListenerKey]
    ) -> int:
        """The size of table that a listener may have however much its namespace uses: its own, or
        that of the listener that it replaces. Raises OutOfMemory for a new listener if its namespace may
        have no more listeners."""
        listeners = self.quotas.listeners
        if old is None:
            old = (
                self.installed(leaving.pop())
                if leaving and listeners.used < listeners.capacity
                else None
            )
            if old is None and not listeners.room(
                service.namespace, changing=service in self._mirror.of_service
            ):
                raise listeners.refusal(service)
        return max(old.record.current_size, SMALLEST) if old else -1

    def _keeping(
        self, key: ListenerKey, slots: Slots, nodes: Iterable[str], *, converging: bool
    ) -> frozenset[int]:
        """Those of these nodes whose entries count. Connections of one that is not converging, without a
        previous table, have none to ask for."""
        asked = key.protocol == "UDP" or slots.previous or converging
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
        converging: bool = False,
    ) -> None:
        """Make the listener have slots that no plan has asked for, because another gateway's
        connections need them. `service`, `uid`: whose it is if it is not there yet; `keeping`: the
        nodes that may have connections of it then; `restricted`: whether only those in the
        Service's source ranges are let in, so that nobody is until these are set; `used`: whether
        the other gateway has sent packets on for it; `converging`: whether its listener is.

        Raises the errors that `set_listeners` returns.
        """
        old = self.installed(key)
        converging |= self._is_young(old, slots)
        retained_nodes = self._keeping(key, slots, keeping, converging=converging)
        prepared = []
        if old is None:
            since_s = dict.fromkeys({*slots.nodes, *keeping}, self._clock())
            sets = self._ranges.number(service) if restricted else None
            prepared.append(
                self._written(
                    key,
                    (service, uid),
                    slots,
                    None,
                    since_s,
                    sets,
                    retained_nodes,
                    converging=converging,
                )
            )
        elif old.slots != slots or old.record.converging != converging:
            owner = old.service, old.uid
            made = self._written(
                key,
                owner,
                slots,
                old.spec,
                old.idle_since,
                old.record.sets,
                retained_nodes,
                converging=converging,
            )
            prepared.append(made._replace(new=made.new._replace(short=old.short)))
        for error in self._go_live(prepared).values():
            raise error
        if used:
            self._places.used.add(self._mirror.listeners[key].record.statistics)

    def _written(
        self,
        key: ListenerKey,
        owner: tuple[ServiceKey, str],
        slots: Slots,
        listener: ListenerSpec | None,
        idle_since: Mapping[str, float],
        sets: int | None,
        retained_nodes: frozenset[int],
        *,
        converging: bool,
        over: bool = False,
    ) -> Prepared:
        """Write the tables to memory in which no packet is looked up, unless the listener has
        exactly these. `over`: they are to be written over its present tables, once everything else
        is ready."""
        old = self.installed(key)
        self._touched.add(key)
        if old and old.slots == slots:
            record, digest = old.record._replace(flags=old.record.flags & ~CONVERGING), old.digest
        elif old and over:
            digest = hash(self._room.encode(slots, self.nodes.numbers_of(slots.nodes)))
            record = old.record._replace(flags=old.record.flags & ~CONVERGING)
            record = record if slots.current else record._replace(current_offset=0, current_size=0)
        else:
            record = self._room.reserve(slots, old and old.record)
            try:
                tables = self._room.encode(slots, self.nodes.numbers_of(slots.nodes))
            except FairleadError:
                self._room.give_back(record, old and old.record)
                raise
            self._room.write(tables, record)
            digest = hash(tables)
        record = record.following(sets, ipv6=is_ipv6(key.address))
        refuses = listener is not None and listener.refuses
        record = record._replace(
            flags=record.flags & ~REFUSES | REFUSES * refuses | CONVERGING * converging
        )
        new = InstalledListener(*owner, slots, record, digest, listener, idle_since)
        self._mirror.count(old, new)
        return Prepared(key, pack_listener_key(key), new, old, retained_nodes, over)

    def _go_live(self, prepared: Sequence[Prepared]) -> dict[ListenerKey, FairleadError]:
        """Have packets find these from now on; what went wrong. Each map is written once for all of
        them: marks and addresses first, records last. Where that fails each is tried by itself."""
        there = (
            self._mirror.addresses
        )  # a Counter, of which `difference` would look at every address that there is
        addresses = {each.key.address for each in prepared if each.key.address not in there}
        others = [each for each in prepared if not each.old or each.old[:2] != each.new[:2]]
        records = [each for each in prepared if not each.old or each.old.record != each.new.record]
        try:
            self._owners.update_all({each.packed: pack_owner(*each.new[:2]) for each in others})
            self._addresses.update_all(dict.fromkeys(map(pack_address, addresses), _PRESENT))
            prepared = [self._with_keepers(each) for each in prepared]
            for each in prepared:
                if each.over:
                    self._room.rewrite(
                        each.new.slots, each.new.record, self.nodes.numbers_of(each.new.slots.nodes)
                    )
            self._listeners.set({each.packed: LISTENER.pack(*each.new.record) for each in records})
        except FairleadError as error:
            if len(prepared) > 1:
                return {
                    key: found for each in prepared for key, found in self._go_live((each,)).items()
                }
            for each in prepared:
                self._mirror.count(each.new, each.old)
                if each.moves:
                    self._room.give_back(each.new.record, each.old and each.old.record)
            return {each.key: error for each in prepared}
        for each in prepared:
            self._keepers.only(each.new.record.statistics, each.retained_nodes)
            if each.moves:
                if each.old:
                    self._room.release(each.old.record, each.new.record)
                self.touched.add(each.key)
            self._put(each.key, each.new)
        return {}

    def _with_keepers(self, each: Prepared) -> Prepared:
        """Let the nodes keep their flows of the listener, as far as there is room."""
        namespace, index = each.new.service.namespace, each.new.record.statistics
        kept = self._keepers.add(
            index, each.retained_nodes, namespace, changing=each.old is not None
        )
        if len(kept) == len(each.retained_nodes):
            return each
        why = self.quotas.retained.refusal(each.new.service)
        lack = f"nodes whose connections may move, because not all are retained: {why}"
        return each._replace(
            new=each.new._replace(short="; ".join(filter(None, (each.new.short, lack))))
        )

    def _is_young(self, old: InstalledListener | None, slots: Slots) -> bool:
        """Whether a listener that gets these slots is: a new one, and one that gets other ones
        before its first packet."""
        if not self._youth.peers or old is None or old.record.converging:
            return self._youth.peers
        return old.slots != slots and not self.is_used(old)

    def remove_listener(self, key: ListenerKey, service: ServiceKey) -> None:
        """Take the listener away, unless it has passed to another Service meanwhile."""
        old = self.installed(key)
        if old is None or old.service != service:
            return
        self._touched.add(key)
        packed = pack_listener_key(key)
        self._listeners.remove(packed)
        self._owners.delete(packed)
        self._mirror.count(self._mirror.take(key), None)
        if key.address not in self._mirror.addresses:
            self._addresses.delete(pack_address(key.address))
        self._room.release(old.record)
        self._keepers.only(old.record.statistics, frozenset())
        self._places.give_back(old.record.statistics)

    def forget_unused_nodes(self) -> None:
        """Free what stands for nodes that no listener names any more, and no connection entry that
        counts. Which those are only the plan knows: after a start nothing is forgotten until it has
        spoken of every listener."""
        now_s = self._clock()
        # Not with every change: it goes through all nodes, and the grace that they have is no
        # shorter.
        if not self._mirror.unplanned and now_s - self._looked_for_unused_s >= GRACE_S:
            self._looked_for_unused_s = now_s
            self.nodes.forget_unused(self._mirror.uses, now_s)


def _lack(fitting: Fitting, why: OutOfMemory) -> str:
    """What a listener with these slots lacks of what it asks for. Listeners that lack the same have
    the same text."""
    if fitting.over:
        return (
            f"tables that were changed in place, so that shares may differ from the weights: {why}"
        )
    return f"tables with fewer slots, so that shares are less exact: {why}"
