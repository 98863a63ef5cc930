"""The ledger: the assignment of addresses to all Services, updated incrementally.

In: the pools, and `Facts` of the Services that changed. Out: for each Service an `Assigned` or a
refusal, and the keys of the Services whose result changed. A change of one Service may also change
the result of Services that waited for an address or port that it released. Rules:

- A Service keeps the addresses that it holds. They are confirmed before any new address is given.
- New addresses: Services that request an address by name come first, then the older Service comes
  first. A Service gets the requested address, or an address with its sharing key, or the lowest
  free address of the first pool that it may use.
- The address of a Service changes only if the Service requests another one.
- No Service gets an address that the cluster itself uses (`plan.exclusions`). A Service that holds
  such an address keeps it, and a Finding reports it.
- A port that another Service has at the address is refused; the other ports are served.

Invariants: pure, except for its memory; no port of an address is given twice; an assignment of all
Services gives the same result as an assignment of the changed ones; the cost of a change depends on
the Services that it concerns, not on the number of all Services."""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping

from fairlead.errors import Refused
from fairlead.model import Family, Grant, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan import refusals
from fairlead.plan.addresses import (
    AddressRequest,
    Assigned,
    Facts,
    HeldAddress,
    Order,
    Ports,
    Rival,
)
from fairlead.plan.conflicts import Basis, Precedence, rivals_of
from fairlead.plan.exclusions import Exclusions
from fairlead.plan.holdings import Holdings, number
from fairlead.plan.pools import Pool, Pools
from fairlead.plan.waiting import Wait, WaitQueues

NO_PORTS: Ports = frozenset()


class _Record:
    """One Service in the ledger.

    - `assigned`: the addresses that are assigned to the Service, and `ports`: its ports there. The
      Service may also hold addresses that only its facts contain.
    - `draft`: the addresses that the current evaluation has found for the Service so far.
    - `waits`: what the Service waits for.
    - `holding`: all ports that other Services must leave to this one, by address."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.order: Order = ("", ServiceKey("", ""))
        self.draft: dict[Family, str] = {}
        self.assigned: dict[Family, str] = {}
        self.ports: Ports = NO_PORTS
        self.result: Assigned | Refused | None = None
        self.waits: set[Wait] = set()
        self.holding: dict[str, Ports] = {}


class Ledger:
    """All assignments. `evaluations`: how often a Service has been evaluated so far. Tests limit
    this number for each change."""

    def __init__(self) -> None:
        self.source: object = None
        """The object from which the current pools were read."""
        self.evaluations = 0
        self._exclusions_version = 0
        self._records: dict[ServiceKey, _Record] = {}
        self._keeping: dict[str, set[ServiceKey]] = {}
        """By namespace, the Services for which an address is kept."""
        self._queues = WaitQueues()
        self._holdings = Holdings(self._queues)

    @property
    def pools(self) -> Pools:
        """The pools in use."""
        return self._holdings.pools

    def result(self, key: ServiceKey) -> Assigned | Refused | None:
        """Return the assignment or the refusal of this Service; None: it requests nothing."""
        record = self._records.get(key)
        return record.result if record is not None else None

    def granted(self) -> Iterator[tuple[str, str, ServiceKey]]:
        """Yield pool, address and holder of each granted address."""
        for key, record in self._records.items():
            for address, held in record.facts.held.items():
                if held.pool:
                    yield held.pool, address, key

    def kept(self) -> Iterator[tuple[str, ServiceKey, str]]:
        """Yield pool, Service and start time of each address that is kept for a deleted Service."""
        for keys in self._keeping.values():
            for key in keys:
                for held in self._records[key].facts.held.values():
                    if held.kept:
                        yield held.pool, key, held.kept_since

    def kept_in(self, namespace: str) -> int:
        """Return the number of addresses that this namespace keeps."""
        return sum(
            held.kept
            for key in self._keeping.get(namespace, ())
            for held in self._records[key].facts.held.values()
        )

    def not_sharing(self, key: ServiceKey, address: str) -> ServiceKey | None:
        """Return another Service that holds the address and does not share it with this one, so
        that whichever gives the address up does not get it again; None if there is none."""
        return self._exclusive_holder(key, address)

    @property
    def known(self) -> Collection[ServiceKey]:
        """The Services that hold or request an address."""
        return self._records.keys()

    def use(self, pools: Pools, source: object = None) -> None:
        """Replace the pools. `source`: the object from which they were read. The caller must then
        call `assign` with all Services."""
        self.source = source
        self._exclusions_version = pools.exclusions.version
        self._holdings.use(pools)

    def is_current(self, source: object, exclusions: Exclusions) -> bool:
        """Return whether the pools were read from this source, and no address of a pool or of a
        Service has been excluded or released since."""
        if source is not self.source or exclusions is not self.pools.exclusions:
            return False
        changes = exclusions.changes_since(self._exclusions_version)
        if changes is None or any(
            self.pools.overlaps(span) or self._holdings.has(span) for span in changes
        ):
            return False
        self._exclusions_version = exclusions.version
        return True

    def assign(self, facts: Mapping[ServiceKey, Facts]) -> set[ServiceKey]:
        """Update the facts of these Services and all assignments that depend on them. Return the
        keys of the Services whose result changed.

        First all Services of the batch confirm what they hold, the older Service first; then new
        addresses are given. Otherwise an older Service could get an address that a younger one
        holds already."""
        before = {key: self.result(key) for key in facts}
        batch = set(facts)
        for key, each in facts.items():
            batch |= self._store_facts(key, each)
        for key in sorted(batch, key=lambda key: self._records[key].order):
            before.setdefault(key, self.result(key))
            self._draft_held(key)
        self._serve(batch, before)
        for key in [
            key
            for key in before
            if not self._records[key].facts.held and self._records[key].facts.request is None
        ]:
            self._refresh(key)
            del self._records[key]
        return {
            key
            for key, result in before.items()
            if _comparable(self.result(key)) != _comparable(result)
        }

    def _store_facts(self, key: ServiceKey, facts: Facts) -> set[ServiceKey]:
        """Store the facts of a Service. Return the other Services whose assignments may no
        longer be valid."""
        record = self._records.setdefault(key, _Record())
        old, record.facts = record.facts, facts
        self._note_kept(key)
        request = facts.request
        if (
            order := (
                request.since if isinstance(request, AddressRequest) else record.order[0],
                key,
            )
        ) != record.order:
            self._await(record, set())  # the old order is the key of the Service in the queues
            record.order = order
        if isinstance(request, AddressRequest) and request.sharing_key:
            self._queues.notify(("sharing", key.namespace, request.sharing_key))
        affected: set[ServiceKey] = set()
        if old.request != request:
            self._queues.notify(*(("address", address) for address in record.holding))
            affected.update(*(self._holdings.of(address) for address in record.holding))
        if not isinstance(request, AddressRequest):
            record.assigned, record.ports = {}, NO_PORTS
        self._refresh(key)
        for address, held in facts.held.items():
            if old.held.get(address) != held:
                affected.update(self._holdings.of(address))
                self._queues.notify(
                    ("address", address), ("sharing", key.namespace, held.sharing_key)
                )
        return affected - {key}

    def _note_kept(self, key: ServiceKey) -> None:
        keys = self._keeping.setdefault(key.namespace, set())
        if any(held.kept for held in self._records[key].facts.held.values()):
            keys.add(key)
        else:
            keys.discard(key)
        if not keys:
            del self._keeping[key.namespace]

    def _refresh(self, key: ServiceKey) -> None:
        """Update the index with the addresses that a Service holds now, and notify the Services
        that wait for an address whose holder or ports changed."""
        record = self._records[key]
        holding = {address: held.ports for address, held in record.facts.held.items()}
        for address in record.assigned.values():
            holding[address] = holding.get(address, NO_PORTS) | record.ports
        for address in record.holding.keys() - holding.keys():
            self._holdings.leave(key, address)
        for address in holding.keys() - record.holding.keys():
            self._holdings.enter(key, address)
        for address in record.holding.keys() | holding.keys():
            if record.holding.get(address, NO_PORTS) != holding.get(address, NO_PORTS):
                self._queues.notify(("address", address))
        record.holding = holding
        for address in holding:
            if name := self._sharing_key(key, address):
                self._holdings.share(address, (key.namespace, name))

    def _sharing_key(self, key: ServiceKey, address: str) -> str:
        """Return the key under which this Service shares the address: the sharing key of the grant
        if there is one, else the requested sharing key."""
        facts = self._records[key].facts
        if (held := facts.held.get(address)) is not None and (
            held.granted is not None or held.kept
        ):
            return held.sharing_key
        return facts.request.sharing_key if isinstance(facts.request, AddressRequest) else ""

    def _others(self, key: ServiceKey, address: str) -> list[ServiceKey]:
        return [other for other in self._holdings.of(address) if other != key]

    def _exclusive_holder(self, key: ServiceKey, address: str) -> ServiceKey | None:
        """Return another holder that does not share the address with this Service; None if there is
        none. A holder shares if it has the same namespace and sharing key, both in its grant and in
        its request."""
        request = self._records[key].facts.request
        mine = request.sharing_key if isinstance(request, AddressRequest) else ""
        for other in sorted(self._others(key, address)):
            theirs = self._records[other].facts.request
            requested = theirs.sharing_key if isinstance(theirs, AddressRequest) else mine
            if (
                not mine
                or other.namespace != key.namespace
                or {requested, self._sharing_key(other, address)} != {mine}
            ):
                return other
        return None

    def _rivals(self, key: ServiceKey, address: str, port: str) -> list[ServiceKey]:
        """Return the Services that prevent this one from having the port at the address (see
        `plan.conflicts`)."""
        if not (others := self._others(key, address)):
            return []
        mine = _precedence(self._records[key], address, port)
        return rivals_of(
            mine, [_precedence(self._records[other], address, port) for other in others]
        )

    def _free_ports(self, key: ServiceKey, request: AddressRequest, address: str) -> Ports:
        """Return the requested ports that the Service may have at the address."""
        return frozenset(port for port in request.ports if not self._rivals(key, address, port))

    def _draft_held(self, key: ServiceKey) -> None:
        """Draft the addresses that a Service keeps: every address that it holds, unless the Service
        now requests another address of the family, or no longer requests the family."""
        record = self._records[key]
        request = record.facts.request
        if not isinstance(request, AddressRequest):
            return
        requested = {family_of(address): address for address in request.requested}
        record.draft = {}
        for address in sorted(
            {*record.facts.held, *record.assigned.values()}, key=lambda each: _rank(record, each)
        ):
            family = family_of(address)
            held = record.facts.held.get(address, HeldAddress())
            if (
                family in record.draft
                or family not in request.families
                or requested.get(family, address) != address
            ):
                continue
            owned = held.granted is not None or held.shown is not None
            if owned or (
                self._exclusive_holder(key, address) is None
                and self._may_keep(key, request, address)
            ):
                record.draft[family] = address

        kept = {
            family: address
            for family, address in record.assigned.items()
            if record.draft.get(family) == address
        }
        if kept != record.assigned:
            self._assign(key, kept, record.ports)

    def _may_keep(self, key: ServiceKey, request: AddressRequest, address: str) -> bool:
        """Return whether the Service may keep an address that is neither granted nor shown yet, or
        take an address that is kept for it: whether it could get the address now."""
        if request.ports and not self._free_ports(key, request, address):
            return False
        if self._records[key].facts.held.get(address, HeldAddress()).kept:
            return self.pools.exclusions.find(address) is None
        if (found := self.pools.find(address)) is None:
            return False
        pool, requested = found[0], bool(request.pool) or address in request.requested
        return (
            (not request.pool or pool.name == request.pool)
            and (requested or pool.auto_assign or bool(self._others(key, address)))
            and pool.allows(request.service_labels)
        )

    def _ports_at(
        self, key: ServiceKey, request: AddressRequest, addresses: Iterable[str]
    ) -> Ports:
        """Return the ports that the Service may have at each of these addresses. A port is served
        at all addresses of a Service or at none."""
        ports = request.ports
        for address in addresses:
            ports &= self._free_ports(key, request, address)
        return ports

    def _assign(self, key: ServiceKey, assigned: dict[Family, str], ports: Ports) -> None:
        record = self._records[key]
        record.assigned, record.ports = assigned, ports
        self._refresh(key)

    def _draft_requested(self, key: ServiceKey, request: AddressRequest) -> Refused | None:
        """Draft the addresses that a Service requests by name: all of them or none. Return the
        refusal if there is one."""
        record = self._records[key]
        draft = dict(record.draft)
        for address in request.requested:
            if draft.get(family_of(address)) != address:
                if (refused := self._refusal_of_requested(key, request, address)) is not None:
                    return refused
                draft[family_of(address)] = address
        record.draft = draft
        return None

    def _refusal_of_requested(
        self, key: ServiceKey, request: AddressRequest, address: str
    ) -> Refused | None:
        """Return why a Service cannot get an address that it requests and does not have; None if it
        can."""
        found = self.pools.find(address)
        if family_of(address) not in request.families:
            return refusals.not_of_families(address)
        if (use := self.pools.excluded(address)) is not None:
            return refusals.excluded(address, use)
        if found is None:
            return refusals.in_no_pool(address, self.pools)
        if request.pool and found[0].name != request.pool:
            return refusals.in_another_pool(address, found[0].name, request)
        if not found[0].allows(request.service_labels):
            return refusals.not_for(address, found[0].name)
        if (other := self._exclusive_holder(key, address)) is not None:
            is_kept = (
                self._records[other].holding[address] == NO_PORTS
                and self._records[other].facts.request is None
            )
            return refusals.kept(address, other) if is_kept else refusals.held(address, other)
        if request.ports and not self._free_ports(key, request, address):
            return refusals.all_ports_taken(self._all_rivals(key, request.ports, [address]))
        return None

    def _all_rivals(
        self, key: ServiceKey, ports: Iterable[str], addresses: Iterable[str]
    ) -> list[Rival]:
        places = [(port, address) for port in sorted(ports) for address in sorted(addresses)]
        return [
            Rival(port, at, holder) for port, at in places for holder in self._rivals(key, at, port)
        ]

    def _serve(
        self, batch: Iterable[ServiceKey], before: dict[ServiceKey, Assigned | Refused | None]
    ) -> None:
        """Evaluate these Services, and the Services that wait for an address or port that becomes
        free; Services that request an address by name come first. The previous result of each
        evaluated Service is added to `before`.

        For each freed resource only the first waiting Service is evaluated, then the next one if
        some of the resource is left. So the cost does not depend on the length of the queue."""
        queue = [self._place(self._records[key].order, ()) for key in batch]
        heapq.heapify(queue)
        while True:
            for wait in self._queues.drain():
                self._next_in_line(queue, wait, None)
            if not queue:
                return
            _, order, wait = heapq.heappop(queue)
            before.setdefault(order[1], self.result(order[1]))
            self._settle(order[1])
            if wait:
                self._next_in_line(queue, wait, order)

    def _place(self, order: Order, wait: Wait) -> tuple[bool, Order, Wait]:
        request = self._records[order[1]].facts.request
        return not (isinstance(request, AddressRequest) and request.requested), order, wait

    def _next_in_line(
        self, queue: list[tuple[bool, Order, Wait]], wait: Wait, after: Order | None
    ) -> None:
        """Add the next Service that waits for this resource to the queue, unless the resource is an
        exhausted pool. `after`: the Service that was evaluated last; None: start with the first
        one."""
        if wait[0] == "pool":
            pool = self.pools.by_name.get(wait[1])
            if (
                pool is None
                or self._holdings.lowest_free(pool, "IPv6" if wait[2] == "IPv6" else "IPv4") is None
            ):
                return
        if (order := self._queues.next(wait, after)) is not None:
            heapq.heappush(queue, self._place(order, wait))

    def _settle(self, key: ServiceKey) -> None:
        """Evaluate a Service: assign all its addresses, or record the refusal and what the Service
        waits for."""
        self.evaluations += 1
        self._draft_held(key)
        record = self._records[key]
        request = record.facts.request
        waits: set[Wait] = set()
        if not isinstance(request, AddressRequest):
            record.result = request
        elif (refused := self._draft_requested(key, request)) is not None:
            record.result = refused
            waits = {("address", address) for address in request.requested}
        else:
            record.result = self._fill(key, request, waits)
        if not isinstance(record.result, Assigned):
            self._assign(key, {}, NO_PORTS)  # it still holds the addresses in its facts
        self._await(record, waits)

    def _await(self, record: _Record, waits: set[Wait]) -> None:
        """Replace what a Service waits for."""
        self._queues.move(record.order, record.waits, waits)
        record.waits = waits

    def _fill(
        self, key: ServiceKey, request: AddressRequest, waits: set[Wait]
    ) -> Assigned | Refused:
        """Assign the missing addresses of a Service, and its ports at all its addresses. The
        resources for which the Service has to wait are added to `waits`."""
        record = self._records[key]
        notes = []
        assigned = dict(record.draft)
        for family in request.families:
            if family in record.draft:
                continue
            address = self._shared(key, request, family) or self._free(request, family)
            if (
                address is not None
                and request.ports
                and not self._free_ports(key, request, address)
            ):
                waits |= {("address", address), ("sharing", key.namespace, request.sharing_key)}
                return refusals.all_ports_taken(self._all_rivals(key, request.ports, [address]))
            if address is not None:
                assigned[family] = address
                continue
            waits |= {("pool", pool.name, family) for pool in self._candidates(request)}
            if request.sharing_key:
                waits.add(("sharing", key.namespace, request.sharing_key))
            if family == request.families[0] or request.all_families:
                return refusals.none_free(self.pools, request, family)
            notes.append(refusals.skipped(family))
        ports = self._ports_at(key, request, assigned.values())
        rivals = self._all_rivals(key, request.ports - ports, assigned.values())
        # Wait for every address, not only for the addresses with rivals: a port is served at all
        # addresses or at none, so a change at any address can change the result.
        if rivals:
            waits |= {("address", address) for address in assigned.values()}
        if request.ports and not ports:
            return refusals.all_ports_taken(rivals)
        self._assign(key, assigned, ports)
        addresses = tuple(assigned[family] for family in request.families if family in assigned)
        held = {address: record.facts.held.get(address, HeldAddress()) for address in addresses}
        grants = tuple(self._grant(request, each, ports, held[each].pool) for each in addresses)
        notes += refusals.stranded(self.pools, request, held)
        return Assigned(grants, tuple(rivals), tuple(notes))

    def _grant(self, request: AddressRequest, address: str, ports: Ports, before: str) -> Grant:
        found = self.pools.find(address)
        pool = found[0].name if found is not None else before
        return Grant(address, tuple(sorted(ports)), pool, request.sharing_key, request.keep)

    def _candidates(self, request: AddressRequest) -> list[Pool]:
        """Return the pools from which the Service may get a new address, in the order in which they
        are tried."""
        named = [
            pool
            for pool in self.pools.in_order
            if (pool.name == request.pool if request.pool else pool.auto_assign)
        ]
        return [pool for pool in named if pool.allows(request.service_labels)]

    def _free(self, request: AddressRequest, family: Family) -> str | None:
        found = (self._holdings.lowest_free(pool, family) for pool in self._candidates(request))
        return next((address for address in found if address is not None), None)

    def _shared(self, key: ServiceKey, request: AddressRequest, family: Family) -> str | None:
        """Return an address with the sharing key of the Service: the lowest one where all its ports
        are free, else the lowest one where some are free; None if there is none. Ports that the
        Service already serves at its address of the other family must be free, too."""
        if not request.sharing_key:
            return None
        record = self._records[key]
        needed = self._ports_at(key, request, record.draft.values()) if record.draft else NO_PORTS
        some = None
        for address in sorted(
            self._holdings.shared((key.namespace, request.sharing_key)), key=number
        ):
            if (
                family_of(address) != family
                or self._exclusive_holder(key, address)
                or not self._others(key, address)
            ):
                continue
            found = self.pools.find(address)
            if (
                found is None
                or not found[0].allows(request.service_labels)
                or (request.pool and found[0].name != request.pool)
            ):
                continue  # an address that is no longer in a pool is not given to further Services
            free = self._free_ports(key, request, address)
            if free == request.ports:
                return address
            if some is None and free and needed <= free:
                some = address
        return some


def _precedence(record: _Record, address: str, port: str) -> Precedence:
    """Return the precedence of a Service for a port of an address."""
    held = record.facts.held.get(address, HeldAddress())
    if held.granted is not None and port in held.granted:
        basis = Basis.GRANTED
    elif held.shown is not None and port in held.shown:
        basis = Basis.SHOWN
    elif port in record.ports and address in record.assigned.values():
        basis = Basis.ASSIGNED
    else:
        basis = Basis.REQUESTED
    return Precedence(basis, *record.order)


def _rank(record: _Record, address: str) -> tuple[int, int]:
    """Return a sort key for the addresses that a Service may keep: granted addresses first, then
    shown ones, then newly given ones, then addresses that are kept for it."""
    held = record.facts.held.get(address, HeldAddress())
    rank = 0 if held.granted is not None else 1 if held.shown is not None else 3 if held.kept else 2
    return rank, number(address)


def _comparable(result: Assigned | Refused | None) -> Assigned | str | None:
    """Return the result in a form that can be compared. Two exceptions are never equal, but two
    refusals with the same text are the same result."""
    return str(result) if isinstance(result, Refused) else result
