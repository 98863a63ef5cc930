"""The listeners in the maps: the Service of each, and its slots.

In: slots by node name. Out: the same, read back. The mirror holds the content that was last read or
written; one process writes.

Invariant: at every moment a packet finds either the old tables of its listener or the new ones,
complete. New tables are written to memory that no packet reads, and one update of the listener's
record puts both tables into effect (see `listeners`). A failed change changes nothing. The mirror
contains all listeners at every moment, also during a survey.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import structlog

from fairlead.drivers.direct.maps.arena import GRACE_S
from fairlead.drivers.direct.maps.convergence import Convergence
from fairlead.drivers.direct.maps.counter_indexes import CounterIndexPool
from fairlead.drivers.direct.maps.flow_shares import NO_SHARE, FlowShares
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
from fairlead.drivers.direct.maps.sizing import SlotsChoice, claim, slots_choices
from fairlead.drivers.direct.maps.source_ranges import Ranges
from fairlead.drivers.direct.maps.survey import NO_OWNER, Baseline, Survey, Surveyor
from fairlead.drivers.direct.maps.table_allocator import TableAllocator
from fairlead.drivers.direct.spec import DirectActual, ListenerKey, ListenerSpec, SetListener
from fairlead.errors import FairleadError, Unavailable
from fairlead.model import ServiceKey
from fairlead.net.address import is_ipv6, pack_address
from fairlead.net.bpf import Map
from fairlead.net.maglev import MIN_SIZE
from fairlead.net.transition import Slots

log = structlog.get_logger()

_PRESENT = INDEX.pack(1)
_DEADLINE_MARGIN_S = 0.01
"""A deadline is checked this much later, because there would be nothing to do a moment before
it."""


def _named_sets(mirror: Mirror) -> dict[ServiceKey, int]:
    """Return the number of the range sets that each Service's listeners name.

    A change that was interrupted may have left a listener of a Service with the range sets of its
    previous Service. They belong to the previous Service only.
    """
    owners: dict[int, ServiceKey] = {}
    for each in mirror.listeners.values():
        if each.record.range_sets is not None:
            owners.setdefault(each.record.range_sets, each.service)
    return {service: number for number, service in owners.items()}


class ListenerMaps:
    """The maps `listeners`, `owners`, `addresses`, `ranges`, `arena` and `statistics`, mirrored;
    and the nodes. The mirror is empty until a first survey is adopted.

    `peers`: whether other gateways serve the same addresses, see `convergence`. `share`: the
    fraction of each limited resource that one namespace may use, see `quota`.
    """

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
        self._counter_indexes = CounterIndexPool(maps["statistics"])
        self._allocator = TableAllocator(
            self._memory, maps["arena"].spec.max_entries, self._counter_indexes, clock
        )
        self.quotas = Quotas.of({name: each.spec.max_entries for name, each in maps.items()}, share)
        self.flow_shares = FlowShares(maps, share)
        self._settled: tuple[set[ListenerKey], set[ListenerKey]] = set(), set()
        """Listeners that were not in transition when the last but one survey was adopted, and the
        last one."""
        self._mirror = Mirror(self.quotas)
        self._changed_since_survey: set[ListenerKey] = set()
        """Listeners that were changed since the last survey began."""
        self._convergence = Convergence(peers, clock)
        self._unused_checked_s = -math.inf
        self._ranges = Ranges(maps["ranges"], self.quotas.ranges)
        self._retained_nodes = RetainedNodes(maps["retained_nodes"], self.quotas.retained)
        self.nodes = Nodes(maps["next_hops"], maps["node_names"], maps["node_statistics"])
        self._surveyor = Surveyor(
            maps, self._memory, self.nodes, self._ranges, self._retained_nodes, clock
        )
        self.changed_listeners: set[ListenerKey] = set()
        """Listeners whose slots have changed. The reader of this set empties it."""

    def close(self) -> None:
        """Release the memory of the maps."""
        self._memory.close()
        self._listeners.close()
        self.flow_shares.close()

    def baseline(self) -> Baseline:
        """Return the known state with which a survey begins.

        Call it in the task that applies changes, so that no change is half done. From now on,
        changed objects are recorded, and `adopt` keeps them.
        """
        for changed in (
            self._changed_since_survey,
            self.nodes.changed_since_survey,
            self._ranges.changed_since_survey,
            self._retained_nodes.changed_since_survey,
        ):
            changed.clear()
        return Baseline(self._mirror.listeners.copy(), self.nodes.names())

    def survey_in_parts(
        self, baseline: Baseline, *, with_entries: bool = False
    ) -> Iterator[Survey | None]:
        """Yield the survey in parts; see `Surveyor.survey`."""
        return self._surveyor.survey(baseline, with_entries=with_entries)

    def survey(self, baseline: Baseline, *, with_entries: bool = False) -> Survey:
        """Return the survey, without interruption."""
        *_, survey = self.survey_in_parts(baseline, with_entries=with_entries)
        assert survey is not None
        return survey

    def adopt(self, survey: Survey) -> None:
        """Set the mirror to what the survey found, except for objects that were changed since
        `baseline` was called: for them the mirror is newer. Only one survey may run at a time."""
        # Another process may have changed the records.
        self._listeners.invalidate_caches()
        for stale in survey.stale_owners:
            if unpack_listener_key(stale) not in self._changed_since_survey:
                self._owners.delete(stale)
        changed = {
            key: each
            for key, each in survey.changed.items()
            if key not in self._changed_since_survey
        }
        removed = survey.removed - self._changed_since_survey
        tables_moved = bool(removed)
        for key in removed:
            self._mirror.count(self._mirror.take(key), None)
        for key, each in changed.items():
            old = self._put(key, each)
            self._mirror.count(old, each)
            tables_moved |= old is None or old.record != each.record
        # Another process has changed where tables are stored.
        if tables_moved:
            self._allocator.set_in_force([each.record for each in self._mirror.listeners.values()])
        self.nodes.adopt(survey.nodes)
        self._ranges.adopt(survey.ranges, _named_sets(self._mirror))
        namespaces = {
            each.record.statistics: each.service.namespace
            for each in self._mirror.listeners.values()
        }
        self._retained_nodes.adopt(survey.retained_nodes, namespaces)
        present, changed_addresses = (
            self._mirror.addresses.keys(),
            {key.address for key in self._changed_since_survey},
        )
        for address in present - survey.addresses - changed_addresses:
            self._addresses.update(pack_address(address), _PRESENT)
        for address in survey.addresses - present - changed_addresses:
            self._addresses.delete(pack_address(address))

        self._adopt_shares()
        settled = {key for key, each in self._mirror.listeners.items() if not _is_tracked(each)}
        self._settled = self._settled[1], settled

    def _adopt_shares(self) -> None:
        """Adopt the numbers of namespaces that records name, and give a number to each listener
        that has none, or the number of another namespace: a listener of an older version, or one
        whose change was interrupted."""
        listeners = self._mirror.listeners
        self.flow_shares.adopt(
            (each.service.namespace, each.record.share) for each in listeners.values()
        )
        records = {}
        for key, each in listeners.copy().items():
            share = self.flow_shares.number(each.service.namespace)
            if each.record.share != share:
                record = each.record._replace(share=share)
                records[pack_listener_key(key)] = LISTENER.pack(*record)
                self._mirror.put(key, each._replace(record=record))
        if records:
            self._listeners.set(records)

    def recount_flows(self) -> Iterator[None]:
        """Count the flow entries of each namespace again, see `FlowShares.recount`."""
        return self.flow_shares.recount(self._flow_use)

    def _flow_use(self, packed: bytes) -> tuple[int, bool] | None:
        key = unpack_listener_key(packed)
        installed = self.installed(key)
        if installed is None:
            return None
        # A peer may have begun a transition a moment before this gateway does, and has sent the
        # entries of its connections. So a transition must have been over for some time.
        settled = all(key in each for each in self._settled) and not _is_tracked(installed)
        return installed.record.share, settled

    def share_of_flow(self, packed: bytes) -> int:
        """Return the number of the namespace in `flow_shares` whose listener has this packed
        key. The listener of a peer's entry may not exist here yet: NO_SHARE."""
        use = self._flow_use(packed)
        return use[0] if use is not None else NO_SHARE

    def _put(self, key: ListenerKey, installed: InstalledListener) -> InstalledListener | None:
        """Store the listener in the mirror, and return the listener that it replaces."""
        old = self._mirror.put(key, installed)
        self._convergence.record(key, installed, old)
        return old

    def end_convergence(self) -> None:
        """End the convergence of listeners whose tables have been the same for some time.

        Slots that are in transition by then stay tracked. Call this often, because each call
        handles a limited number of listeners.
        """
        prepared = []
        for key in self._convergence.take_converged():
            old = self.installed(key)
            if old is None or not old.record.converging:
                continue
            self._changed_since_survey.add(key)
            new = old._replace(record=old.record._replace(flags=old.record.flags & ~CONVERGING))
            retained_nodes = self._retained_numbers(
                key, new.slots, old.nodes_with_connections, converging=False
            )
            prepared.append(Prepared(key, pack_listener_key(key), new, old, retained_nodes))
        for key, error in self._go_live(prepared).items():
            log.warning(
                "a listener could not end its convergence, and still tracks every connection",
                listener=str(key),
                problem=str(error),
            )

    @property
    def addresses(self) -> Collection[str]:
        """The addresses of all listeners."""
        return self._mirror.addresses.keys()

    @property
    def services(self) -> Collection[ServiceKey]:
        """The Services that have listeners."""
        return self._mirror.of_service.keys()

    def statistics(self) -> list[tuple[ServiceKey, ListenerKey, int]]:
        """Return each listener with its Service, and the index of the listener's counters in the
        map `statistics`. Like `draining`, it may be called in another thread."""
        return [
            (each.service, key, each.record.statistics)
            for key, each in self._mirror.listeners.copy().items()
        ]

    def actual(self, services: Collection[ServiceKey] | None) -> dict[ServiceKey, DirectActual]:
        """Return the actual state of these Services, or with None of all Services, from the
        mirror."""
        listeners = (
            self._mirror.listeners.values()
            if services is None
            else self._mirror.listeners_of(services)
        )
        self._counter_indexes.find_used(each.record.statistics for each in listeners)
        used = self._counter_indexes.used
        return self._mirror.actual(
            services,
            self.nodes.reachable_addresses,
            self._ranges.of,
            lambda each: each.record.statistics in used,
            self._clock(),
        )

    def is_used(self, installed: InstalledListener) -> bool:
        """Return whether packets have been forwarded for the listener."""
        self._counter_indexes.find_used((installed.record.statistics,))
        return installed.record.statistics in self._counter_indexes.used

    def draining(self) -> list[Draining]:
        """Return the draining nodes of all listeners whose drain time is limited."""
        listeners, keys = self._mirror.listeners, self._mirror.draining.copy()
        found = ((key, listeners.get(key)) for key in keys)
        return [drain for key, each in found if each for drain in each.drains(key, self._clock())]

    def next_deadline_s(self, service: ServiceKey) -> float:
        """Return in how many seconds the first drain of the Service ends; 0 if no drain has a
        limit."""
        if not self._mirror.draining:
            return 0.0
        keys = self._mirror.draining & self._mirror.of_service.get(service, set())
        drains = [
            each for key in keys for each in self._mirror.listeners[key].drains(key, self._clock())
        ]
        return max(0.0, min(each.left_s for each in drains)) + _DEADLINE_MARGIN_S if drains else 0.0

    def set_ranges(self, service: ServiceKey, cidrs: tuple[str, ...]) -> None:
        """Set the source ranges of the Service. Raise OutOfMemory, see `Ranges.set`."""
        self._ranges.set(service, cidrs)

    def forget_ranges(self, service: ServiceKey) -> None:
        """Remove the Service's source ranges if none of its listeners uses them any more."""
        if not self._ranges.has(service):
            return
        keys = self._mirror.of_service.get(service, ())
        if not any(self._mirror.listeners[key].record.flags & RANGES for key in keys):
            self._ranges.remove(service)

    def keys(self) -> set[ListenerKey]:
        """Return the keys of all listeners."""
        return set(self._mirror.listeners)

    def shortfalls(self, service: ServiceKey) -> list[str]:
        """Return what the listeners of the Service lack because a resource is short: one text for
        each listener that lacks something."""
        return [each.shortfall for each in self._mirror.listeners_of((service,)) if each.shortfall]

    def count_of(self, service: ServiceKey) -> int:
        """Return the number of listeners of the Service."""
        return len(self._mirror.of_service.get(service, ()))

    def serves(self, service: ServiceKey) -> bool:
        """Return whether any listener of the Service has a reachable node, or refuses connections
        because the Service has no endpoint."""
        return any(
            not each.slots.nodes or self._reaches_any(key, each.slots.nodes)
            for key in self._mirror.of_service.get(service, ())
            if (each := self._mirror.listeners[key])
        )

    def _reaches_any(self, key: ListenerKey, nodes: Collection[str]) -> bool:
        ipv6 = ":" in key.address
        return any(self.nodes.all_reachable((node,), ipv6=ipv6) for node in nodes)

    def services_of(self, nodes: Collection[str]) -> set[ServiceKey]:
        """Return the Services for which these nodes get or keep connections."""
        return {
            each.service
            for each in self._mirror.listeners.values()
            if not each.uses.isdisjoint(nodes)
        }

    def installed(self, key: ListenerKey) -> InstalledListener | None:
        """Return the listener as it was last read or written."""
        return self._mirror.listeners.get(key)

    def set_listeners(
        self,
        changes: Iterable[SetListener],
        leaving: Mapping[ServiceKey, list[ListenerKey]] = MappingProxyType({}),
    ) -> dict[ListenerKey, FairleadError]:
        """Set the slots and the owners of listeners. For packets, each listener changes
        atomically. No two changes may be of the same listener.

        `leaving`: listeners that will be removed later, by Service. A new listener of the same
        Service may use the quota of one of them; the listener is then removed from the list.

        Return the errors: Unavailable if another Service has the listener, OutOfMemory if a
        resource is used up, Refused if a value is too long or a limit is exceeded. A listener with
        an error is unchanged. Every other listener has its new slots, or as much of them as fits
        (`InstalledListener.shortfall`).
        """
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
        # This is a safety net and resolves no conflict: the plan gives a port to one Service (see
        # `plan.conflicts`). The Service that has the port keeps it until it is planned without the
        # port.
        if old and old.service not in (change.service, change.taken_from, NO_OWNER):
            raise Unavailable(
                f"listener {key} is held by Service {old.service}",
                fix="give one of the two another address or port",
            )
        now_s, listener = self._clock(), change.listener
        since_s = old.idle_since if old else {}
        idle_since = {node: since_s.get(node, now_s) for node in listener.idle}
        converging = self._is_converging(old, slots)
        range_sets = self._ranges.number(change.service) if listener.restricted else None
        granted, available = (
            self._granted_size(change.service, old, leaving),
            self._available_chunks(change.service, old),
        )
        owner, why = (change.service, change.uid), None
        for choice in slots_choices(change, old and old.slots, available, granted):
            retained_nodes = self._retained_numbers(
                key,
                choice.slots,
                (*listener.retained_nodes, *listener.departed),
                converging=converging,
            )
            try:
                made = self._write_tables(
                    *(key, owner, choice.slots, listener, idle_since, range_sets, retained_nodes),
                    converging=converging,
                    in_place=choice.in_place,
                )
            except OutOfMemory as error:
                self.quotas.memory.waiting.add(change.service)
                why = error
                continue
            if choice.slots == slots:
                return made
            shortfall = _describe_shortfall(
                choice, why or self.quotas.memory.refusal(change.service)
            )
            return made._replace(new=made.new._replace(shortfall=shortfall))
        raise why or self.quotas.memory.refusal(change.service)

    def _available_chunks(self, service: ServiceKey, old: InstalledListener | None) -> int:
        """Return the number of chunks that the listener may use: what its namespace may still
        use, and what the listener is charged for now."""
        return self.quotas.memory.available(service.namespace) + (claim(old.record) if old else 0)

    def _granted_size(
        self, service: ServiceKey, old: InstalledListener | None, leaving: list[ListenerKey]
    ) -> int:
        """Return the table size that a listener may have regardless of its namespace's usage: its
        own size, or the size of the listener that it replaces; -1 if there is none.

        Raise OutOfMemory for a new listener if its namespace may not have another listener.
        """
        listeners = self.quotas.listeners
        if old is None:
            old = (
                self.installed(leaving.pop())
                if leaving and listeners.used < listeners.capacity
                else None
            )
            if old is None and not listeners.available(
                service.namespace, changing=service in self._mirror.of_service
            ):
                raise listeners.refusal(service)
        return max(old.record.current_size, MIN_SIZE) if old else -1

    def _retained_numbers(
        self, key: ListenerKey, slots: Slots, nodes: Iterable[str], *, converging: bool
    ) -> frozenset[int]:
        """Return the numbers of the nodes whose flow entries the program must follow. The set is
        empty if the program looks up no flow entry: for TCP and SCTP, without a previous table,
        after convergence."""
        looked_up = key.protocol == "UDP" or slots.previous or converging
        return frozenset(map(self.nodes.number, nodes)) if looked_up else frozenset()

    def set_peer_slots(
        self,
        key: ListenerKey,
        service: ServiceKey,
        uid: str,
        slots: Slots,
        nodes_with_connections: Collection[str],
        *,
        restricted: bool,
        used: bool,
        converging: bool = False,
    ) -> None:
        """Give the listener slots that no plan contains, because connections of another gateway
        need them.

        For a listener that does not exist yet, `service` and `uid` are its owner, and
        `nodes_with_connections` the nodes that may have connections of it. `restricted`: whether
        only the Service's source ranges may connect; until these are set, no client can. `used`:
        whether the other gateway has forwarded packets for the listener. `converging`: whether its
        listener is converging.

        Raise the errors that `set_listeners` returns.
        """
        old = self.installed(key)
        converging |= self._is_converging(old, slots)
        retained_nodes = self._retained_numbers(
            key, slots, nodes_with_connections, converging=converging
        )
        prepared = []
        if old is None:
            since_s = dict.fromkeys({*slots.nodes, *nodes_with_connections}, self._clock())
            range_sets = self._ranges.number(service) if restricted else None
            prepared.append(
                self._write_tables(
                    key,
                    (service, uid),
                    slots,
                    None,
                    since_s,
                    range_sets,
                    retained_nodes,
                    converging=converging,
                )
            )
        elif old.slots != slots or old.record.converging != converging:
            owner = old.service, old.uid
            made = self._write_tables(
                key,
                owner,
                slots,
                old.spec,
                old.idle_since,
                old.record.range_sets,
                retained_nodes,
                converging=converging,
            )
            prepared.append(made._replace(new=made.new._replace(shortfall=old.shortfall)))
        for error in self._go_live(prepared).values():
            raise error
        if used:
            self._counter_indexes.used.add(self._mirror.listeners[key].record.statistics)

    def _write_tables(
        self,
        key: ListenerKey,
        owner: tuple[ServiceKey, str],
        slots: Slots,
        listener: ListenerSpec | None,
        idle_since: Mapping[str, float],
        range_sets: int | None,
        retained_nodes: frozenset[int],
        *,
        converging: bool,
        in_place: bool = False,
    ) -> Prepared:
        """Write the tables to memory in which no packet is looked up, unless the listener has
        exactly these tables already.

        `in_place`: the tables will overwrite the present tables, once everything else is ready.
        """
        old = self.installed(key)
        self._changed_since_survey.add(key)
        if old and old.slots == slots:
            record, digest = old.record._replace(flags=old.record.flags & ~CONVERGING), old.digest
        elif old and in_place:
            digest = hash(self._allocator.encode(slots, self.nodes.numbers_of(slots.nodes)))
            record = old.record._replace(flags=old.record.flags & ~CONVERGING)
            record = record if slots.current else record._replace(current_offset=0, current_size=0)
        else:
            record = self._allocator.reserve(slots, old and old.record)
            try:
                tables = self._allocator.encode(slots, self.nodes.numbers_of(slots.nodes))
            except FairleadError:
                self._allocator.cancel(record, old and old.record)
                raise
            self._allocator.write(tables, record)
            digest = hash(tables)
        record = record.with_range_sets(range_sets, ipv6=is_ipv6(key.address))
        refuses = listener is not None and listener.refuses
        record = record._replace(
            flags=record.flags & ~REFUSES | REFUSES * refuses | CONVERGING * converging,
            share=self.flow_shares.number(owner[0].namespace),
        )
        new = InstalledListener(*owner, slots, record, digest, listener, idle_since)
        # The quotas count the listener now, because other listeners are prepared before it takes
        # effect. After an error `_go_live` undoes this.
        self._mirror.count(old, new)
        return Prepared(key, pack_listener_key(key), new, old, retained_nodes, in_place)

    def _go_live(self, prepared: Sequence[Prepared]) -> dict[ListenerKey, FairleadError]:
        """Put these listeners into effect, and return the errors.

        Each map is written once for all listeners: owners and addresses first, records last. If
        this fails, each listener is tried separately.
        """
        # A comprehension, because a set difference would visit every known address.
        known = self._mirror.addresses
        addresses = {each.key.address for each in prepared if each.key.address not in known}
        others = [each for each in prepared if not each.old or each.old[:2] != each.new[:2]]
        records = [each for each in prepared if not each.old or each.old.record != each.new.record]
        try:
            self._owners.update_all({each.packed: pack_owner(*each.new[:2]) for each in others})
            self._addresses.update_all(dict.fromkeys(map(pack_address, addresses), _PRESENT))
            prepared = [self._with_retained_nodes(each) for each in prepared]
            for each in prepared:
                if each.in_place:
                    self._allocator.rewrite(
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
                if each.has_new_tables:
                    self._allocator.cancel(each.new.record, each.old and each.old.record)
            return {each.key: error for each in prepared}
        for each in prepared:
            # From now on, no slot names the nodes that are no longer retained.
            self._retained_nodes.only(each.new.record.statistics, each.retained_nodes)
            if each.has_new_tables:
                if each.old:
                    self._allocator.release(each.old.record, each.new.record)
                self.changed_listeners.add(each.key)
            self._put(each.key, each.new)
        return {}

    def _with_retained_nodes(self, each: Prepared) -> Prepared:
        """Let the nodes keep their flows of the listener, as far as the quota permits."""
        namespace, index = each.new.service.namespace, each.new.record.statistics
        kept = self._retained_nodes.add(
            index, each.retained_nodes, namespace, changing=each.old is not None
        )
        if len(kept) == len(each.retained_nodes):
            return each
        why = self.quotas.retained.refusal(each.new.service)
        shortfall = f"nodes whose connections may move, because not all are retained: {why}"
        return each._replace(
            new=each.new._replace(
                shortfall="; ".join(filter(None, (each.new.shortfall, shortfall)))
            )
        )

    def _is_converging(self, old: InstalledListener | None, slots: Slots) -> bool:
        """Return whether a listener with these slots converges: a new listener, or a listener whose
        slots change before its first packet."""
        if not self._convergence.peers or old is None or old.record.converging:
            return self._convergence.peers
        return old.slots != slots and not self.is_used(old)

    def remove_listener(self, key: ListenerKey, service: ServiceKey) -> None:
        """Remove the listener, unless another Service has it now."""
        old = self.installed(key)
        if old is None or old.service != service:
            return
        self._changed_since_survey.add(key)
        packed = pack_listener_key(key)
        self._listeners.remove(packed)
        self._owners.delete(packed)
        self._mirror.count(self._mirror.take(key), None)
        if key.address not in self._mirror.addresses:
            self._addresses.delete(pack_address(key.address))
        self._allocator.release(old.record)
        self._retained_nodes.only(old.record.statistics, frozenset())
        self._counter_indexes.release(old.record.statistics)

    def forget_unused_nodes(self) -> None:
        """Free the numbers of nodes that no listener names and that no flow entry needs.

        Only the plan knows which flow entries are needed. After a start nothing is freed until
        every listener has been planned.
        """
        now_s = self._clock()
        # This visits all nodes, so it runs at most once in a grace period. More often would be of
        # no use, because a number becomes free only after a grace period.
        if not self._mirror.unplanned and now_s - self._unused_checked_s >= GRACE_S:
            self._unused_checked_s = now_s
            self.nodes.forget_unused(self._mirror.uses, now_s)


def _is_tracked(installed: InstalledListener) -> bool:
    """Return whether connections of the listener may have flow entries that the program looks
    up."""
    return bool(installed.record.previous_size) or installed.record.converging


def _describe_shortfall(choice: SlotsChoice, why: OutOfMemory) -> str:
    """Return what a listener with these slots lacks, and why. The text is the same for all
    listeners that lack the same."""
    if choice.in_place:
        return (
            f"tables that were changed in place, so that shares may differ from the weights: {why}"
        )
    return f"tables with fewer slots, so that shares are less exact: {why}"
