"""Who has which address: every Service's share of the pools, kept up to date Service by Service.

In: the pools, and `Facts` of the Services that changed. Out: for each Service an `Assigned` or a
refusal, and which of them are new: a change of one Service may touch those that waited for what it
gave back. Rules: what is held stays, before anything new is given; a request by name comes next,
then an address of the same sharing key, then the lowest free address of the first pool that may be
used; the older Service comes first. An address never changes unless its Service asks for another
one. A port that another Service has at the address is refused, the others are served. Invariants:
pure, but for its memory; no port of an address is given twice; to assign all anew gives the same as
to assign what changed; what one change costs depends on the Services that it concerns, not on how
many there are."""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping

from fairlead.errors import Refused
from fairlead.model import Family, Grant, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan import refusals
from fairlead.plan.addresses import Assigned, Facts, Order, Ports, Rival, Taken, Wanted
from fairlead.plan.conflicts import Basis, Precedence, rivals_of
from fairlead.plan.holdings import Holdings, number
from fairlead.plan.pools import Pool, Pools
from fairlead.plan.waiting import Wait, WaitQueues

NOTHING: Ports = frozenset()


class _Record:
    """One Service in the ledger. `given` is what it may have; what it holds besides is in its
    facts. `draft` is what it will be given, as far as is found out yet."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.order: Order = ("", ServiceKey("", ""))
        self.draft: dict[Family, str] = {}
        self.given: dict[Family, str] = {}
        self.ports: Ports = NOTHING
        self.result: Assigned | Refused | None = None
        self.waits: set[Wait] = set()
        self.holding: dict[str, Ports] = {}  # all that others must leave to it, by address


class Ledger:
    """All assignments. `looked_at` counts how often a Service was looked at."""

    def __init__(self) -> None:
        self.source: object = None
        """What the pools were made of."""
        self.looked_at = 0
        self._records: dict[ServiceKey, _Record] = {}
        self._keepers: dict[
            str, set[ServiceKey]
        ] = {}  # by namespace, the deleted Services for which an address is kept
        self._queues = WaitQueues()
        self._holdings = Holdings(self._queues)

    @property
    def pools(self) -> Pools:
        """The pools in use."""
        return self._holdings.pools

    def result(self, key: ServiceKey) -> Assigned | Refused | None:
        """What became of this Service; None: it wants nothing."""
        record = self._records.get(key)
        return record.result if record is not None else None

    def granted(self) -> Iterator[tuple[str, str, ServiceKey]]:
        """All addresses that were granted: from which pool, which, and who has it."""
        for key, record in self._records.items():
            for address, taken in record.facts.taken.items():
                if taken.pool:
                    yield taken.pool, address, key

    def kept(self) -> Iterator[tuple[str, ServiceKey, str]]:
        """All addresses that are kept for deleted Services: the pool, the Service, and since
        when."""
        for keys in self._keepers.values():
            for key in keys:
                for taken in self._records[key].facts.taken.values():
                    if taken.kept:
                        yield taken.pool, key, taken.kept_since

    def kept_in(self, namespace: str) -> int:
        """How many addresses this namespace keeps."""
        retained_nodes = self._keepers.get(namespace, ())
        return sum(
            taken.kept
            for key in retained_nodes
            for taken in self._records[key].facts.taken.values()
        )

    @property
    def known(self) -> Collection[ServiceKey]:
        """All Services that have or want something."""
        return self._records.keys()

    def use(self, pools: Pools, source: object = None) -> None:
        """From here on these are the pools, made of `source`. Every Service must then be assigned
        anew."""
        self.source = source
        self._holdings.use(pools)

    def assign(self, facts: Mapping[ServiceKey, Facts]) -> set[ServiceKey]:
        """Take in what these Services are now; the keys of all whose result is another one now."""
        before = {key: self.result(key) for key in facts}
        batch = set(facts)
        for key, each in facts.items():
            batch |= self._learn(key, each)
        for key in sorted(batch, key=lambda key: self._records[key].order):
            before.setdefault(key, self.result(key))
            self._hold(key)
        self._serve(batch, before)
        for key in [
            key
            for key in before
            if not self._records[key].facts.taken and self._records[key].facts.wanted is None
        ]:
            self._refresh(key)
            del self._records[key]
        return {key for key, result in before.items() if _words(self.result(key)) != _words(result)}

    def _learn(self, key: ServiceKey, facts: Facts) -> set[ServiceKey]:
        """Note the facts of a Service. Answers whose assignments they call in question."""
        record = self._records.setdefault(key, _Record())
        old, record.facts = record.facts, facts
        self._note_keeper(key)
        wanted = facts.wanted
        if (
            order := (wanted.since if isinstance(wanted, Wanted) else record.order[0], key)
        ) != record.order:
            self._await(record, set())  # it waits at another place from now on
            record.order = order
        if isinstance(wanted, Wanted) and wanted.sharing_key:
            self._queues.notify(("sharing", key.namespace, wanted.sharing_key))
        doubted: set[ServiceKey] = set()
        if old.wanted != wanted:
            self._queues.notify(*(("address", address) for address in record.holding))
            doubted.update(*(self._holdings.of(address) for address in record.holding))
        if not isinstance(wanted, Wanted):
            record.given, record.ports = {}, NOTHING
        self._refresh(key)
        for address, taken in facts.taken.items():
            if old.taken.get(address) != taken:
                doubted.update(self._holdings.of(address))
                self._queues.notify(
                    ("address", address), ("sharing", key.namespace, taken.sharing_key)
                )
        return doubted - {key}

    def _note_keeper(self, key: ServiceKey) -> None:
        retained_nodes = self._keepers.setdefault(key.namespace, set())
        if any(taken.kept for taken in self._records[key].facts.taken.values()):
            retained_nodes.add(key)
        else:
            retained_nodes.discard(key)
        if not retained_nodes:
            del self._keepers[key.namespace]

    def _refresh(self, key: ServiceKey) -> None:
        """Bring the index in line with what a Service holds now, and note what became free by that,
        and what was taken."""
        record = self._records[key]
        holding = {address: taken.ports for address, taken in record.facts.taken.items()}
        for address in record.given.values():
            holding[address] = holding.get(address, NOTHING) | record.ports
        for address in record.holding.keys() - holding.keys():
            self._holdings.leave(key, address)
        for address in holding.keys() - record.holding.keys():
            self._holdings.enter(key, address)
        for address in record.holding.keys() | holding.keys():
            if record.holding.get(address, NOTHING) != holding.get(address, NOTHING):
                self._queues.notify(("address", address))
        record.holding = holding
        for address in holding:
            if name := self._sharing_key(key, address):
                self._holdings.share(address, (key.namespace, name))

    def _sharing_key(self, key: ServiceKey, address: str) -> str:
        """Under which key this Service shares that address: that of the grant, if it has one, else
        what it asks for."""
        facts = self._records[key].facts
        if (taken := facts.taken.get(address)) is not None and (
            taken.granted is not None or taken.kept
        ):
            return taken.sharing_key
        return facts.wanted.sharing_key if isinstance(facts.wanted, Wanted) else ""

    def _others(self, key: ServiceKey, address: str) -> list[ServiceKey]:
        return [other for other in self._holdings.of(address) if other != key]

    def _stranger(self, key: ServiceKey, address: str) -> ServiceKey | None:
        """Somebody who has the address and does not share it with this Service: by the grant as
        well as by its own wish."""
        wanted = self._records[key].facts.wanted
        mine = wanted.sharing_key if isinstance(wanted, Wanted) else ""
        for other in sorted(self._others(key, address)):
            theirs = self._records[other].facts.wanted
            wishes = theirs.sharing_key if isinstance(theirs, Wanted) else mine
            if (
                not mine
                or other.namespace != key.namespace
                or {wishes, self._sharing_key(other, address)} != {mine}
            ):
                return other
        return None

    def _rivals(self, key: ServiceKey, address: str, port: str) -> list[ServiceKey]:
        """The Services that keep this one from having that port there (see `plan.conflicts`)."""
        if not (others := self._others(key, address)):
            return []
        mine = _precedence(self._records[key], address, port)
        return rivals_of(
            mine, [_precedence(self._records[other], address, port) for other in others]
        )

    def _free_ports(self, key: ServiceKey, wanted: Wanted, address: str) -> Ports:
        """Those of its ports that a Service may have at that address."""
        return frozenset(port for port in wanted.ports if not self._rivals(key, address, port))

    def _hold(self, key: ServiceKey) -> None:
        """What is held stays, unless the Service now asks for another address of that family or no
        longer for the family."""
        record = self._records[key]
        wanted = record.facts.wanted
        if not isinstance(wanted, Wanted):
            return
        asked = {family_of(address): address for address in wanted.requested}
        record.draft = {}
        for address in sorted(
            {*record.facts.taken, *record.given.values()}, key=lambda each: _claim(record, each)
        ):
            family = family_of(address)
            taken = record.facts.taken.get(address, Taken())
            if (
                family in record.draft
                or family not in wanted.families
                or asked.get(family, address) != address
            ):
                continue
            owned = taken.granted is not None or taken.shown is not None
            if owned or (
                self._stranger(key, address) is None and self._may_keep(key, wanted, address)
            ):
                record.draft[family] = address

        kept = {
            family: address
            for family, address in record.given.items()
            if record.draft.get(family) == address
        }
        if kept != record.given:
            self._give(key, kept, record.ports)

    def _may_keep(self, key: ServiceKey, wanted: Wanted, address: str) -> bool:
        """Whether an address that was not granted yet, or was kept, would be given to this Service
        now."""
        if wanted.ports and not self._free_ports(key, wanted, address):
            return False
        if self._records[key].facts.taken.get(address, Taken()).kept:
            return True
        if (found := self.pools.find(address)) is None:
            return False
        pool, asked = found[0], bool(wanted.pool) or address in wanted.requested
        return (
            (not wanted.pool or pool.name == wanted.pool)
            and (asked or pool.auto_assign or bool(self._others(key, address)))
            and pool.allows(wanted.applicant)
        )

    def _ports_at(self, key: ServiceKey, wanted: Wanted, addresses: Iterable[str]) -> Ports:
        """A port is served at all addresses of the Service or at none."""
        ports = wanted.ports
        for address in addresses:
            ports &= self._free_ports(key, wanted, address)
        return ports

    def _give(self, key: ServiceKey, given: dict[Family, str], ports: Ports) -> None:
        record = self._records[key]
        record.given, record.ports = given, ports
        self._refresh(key)

    def _request(self, key: ServiceKey, wanted: Wanted) -> Refused | None:
        """Draft the addresses that a Service asks for by name: all of them or none."""
        record = self._records[key]
        draft = dict(record.draft)
        for address in wanted.requested:
            if draft.get(family_of(address)) != address:
                if (refused := self._on_request(key, wanted, address)) is not None:
                    return refused
                draft[family_of(address)] = address
        record.draft = draft
        return None

    def _on_request(self, key: ServiceKey, wanted: Wanted, address: str) -> Refused | None:
        """Why a Service cannot have an address that it asks for and has not."""
        found = self.pools.find(address)
        if family_of(address) not in wanted.families:
            return refusals.not_of_families(address)
        if found is None:
            return refusals.in_no_pool(address, self.pools)
        if wanted.pool and found[0].name != wanted.pool:
            return refusals.in_another_pool(address, found[0].name, wanted)
        if not found[0].allows(wanted.applicant):
            return refusals.not_for(address, found[0].name)
        if (other := self._stranger(key, address)) is not None:
            is_kept = (
                self._records[other].holding[address] == NOTHING
                and self._records[other].facts.wanted is None
            )
            return refusals.kept(address, other) if is_kept else refusals.held(address, other)
        if wanted.ports and not self._free_ports(key, wanted, address):
            return refusals.all_ports_taken(self._all_rivals(key, wanted.ports, [address]))
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
        """Give these Services what they want, those that ask by name first; and with them, one
        after the other, those that wait for what is free now. `before` takes in the results of all
        that are looked at."""
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
        wanted = self._records[order[1]].facts.wanted
        return not (isinstance(wanted, Wanted) and wanted.requested), order, wait

    def _next_in_line(
        self, queue: list[tuple[bool, Order, Wait]], wait: Wait, after: Order | None
    ) -> None:
        """Put the next Service into the queue that waits for this, if there is any of it."""
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
        """Give a Service what it lacks yet, or find out what it has to wait for."""
        self.looked_at += 1
        self._hold(key)
        record = self._records[key]
        wanted = record.facts.wanted
        waits: set[Wait] = set()
        if not isinstance(wanted, Wanted):
            record.result = wanted
        elif (refused := self._request(key, wanted)) is not None:
            record.result = refused
            waits = {("address", address) for address in wanted.requested}
        else:
            record.result = self._fill(key, wanted, waits)
        if not isinstance(record.result, Assigned):
            self._give(key, {}, NOTHING)  # what it holds it goes on holding, by its facts
        self._await(record, waits)

    def _await(self, record: _Record, waits: set[Wait]) -> None:
        """These, and no others, are the things that a Service waits for."""
        self._queues.move(record.order, record.waits, waits)
        record.waits = waits

    def _fill(self, key: ServiceKey, wanted: Wanted, waits: set[Wait]) -> Assigned | Refused:
        record = self._records[key]
        notes = []
        given = dict(record.draft)
        for family in wanted.families:
            if family in record.draft:
                continue
            address = self._shared(key, wanted, family) or self._free(wanted, family)
            if address is not None and wanted.ports and not self._free_ports(key, wanted, address):
                waits |= {("address", address), ("sharing", key.namespace, wanted.sharing_key)}
                return refusals.all_ports_taken(self._all_rivals(key, wanted.ports, [address]))
            if address is not None:
                given[family] = address
                continue
            waits |= {("pool", pool.name, family) for pool in self._candidates(wanted)}
            if wanted.sharing_key:
                waits.add(("sharing", key.namespace, wanted.sharing_key))
            if family == wanted.families[0] or wanted.all_families:
                return refusals.none_free(self.pools, wanted, family)
            notes.append(refusals.skipped(family))
        ports = self._ports_at(key, wanted, given.values())
        rivals = self._all_rivals(key, wanted.ports - ports, given.values())
        # which may be others later, at each of the addresses: it has a port at all of them or at
        # none
        if rivals:
            waits |= {("address", address) for address in given.values()}
        if wanted.ports and not ports:
            return refusals.all_ports_taken(rivals)
        self._give(key, given, ports)
        addresses = tuple(given[family] for family in wanted.families if family in given)
        taken = {address: record.facts.taken.get(address, Taken()) for address in addresses}
        grants = tuple(self._grant(wanted, each, ports, taken[each].pool) for each in addresses)
        notes += refusals.stranded(self.pools, wanted, taken)
        return Assigned(grants, tuple(rivals), tuple(notes))

    def _grant(self, wanted: Wanted, address: str, ports: Ports, before: str) -> Grant:
        found = self.pools.find(address)
        pool = found[0].name if found is not None else before
        return Grant(address, tuple(sorted(ports)), pool, wanted.sharing_key, wanted.keep)

    def _candidates(self, wanted: Wanted) -> list[Pool]:
        """The pools that a Service may have a new address of, in the order in which they are
        tried."""
        named = [
            pool
            for pool in self.pools.in_order
            if (pool.name == wanted.pool if wanted.pool else pool.auto_assign)
        ]
        return [pool for pool in named if pool.allows(wanted.applicant)]

    def _free(self, wanted: Wanted, family: Family) -> str | None:
        found = (self._holdings.lowest_free(pool, family) for pool in self._candidates(wanted))
        return next((address for address in found if address is not None), None)

    def _shared(self, key: ServiceKey, wanted: Wanted, family: Family) -> str | None:
        """An address of the same sharing key: one where all its ports are free, else where some
        are, never one where none is. What it serves already at its other address must be free there
        too."""
        if not wanted.sharing_key:
            return None
        record = self._records[key]
        needed = self._ports_at(key, wanted, record.draft.values()) if record.draft else NOTHING
        some = None
        for address in sorted(
            self._holdings.shared((key.namespace, wanted.sharing_key)), key=number
        ):
            if (
                family_of(address) != family
                or self._stranger(key, address)
                or not self._others(key, address)
            ):
                continue
            found = self.pools.find(address)
            if (
                found is None
                or not found[0].allows(wanted.applicant)
                or (wanted.pool and found[0].name != wanted.pool)
            ):
                continue  # nobody new gets an address that has left its pool
            free = self._free_ports(key, wanted, address)
            if free == wanted.ports:
                return address
            if some is None and free and needed <= free:
                some = address
        return some


def _precedence(record: _Record, address: str, port: str) -> Precedence:
    """The precedence of a Service for a port of an address."""
    taken = record.facts.taken.get(address, Taken())
    if taken.granted is not None and port in taken.granted:
        basis = Basis.GRANTED
    elif taken.shown is not None and port in taken.shown:
        basis = Basis.SHOWN
    elif port in record.ports and address in record.given.values():
        basis = Basis.GIVEN
    else:
        basis = Basis.WISHED
    return Precedence(basis, *record.order)


def _claim(record: _Record, address: str) -> tuple[int, int]:
    """How good the claim of a Service to an address is: granted, then shown, then given a moment
    ago, then kept for it."""
    taken = record.facts.taken.get(address, Taken())
    rank = (
        0 if taken.granted is not None else 1 if taken.shown is not None else 3 if taken.kept else 2
    )
    return rank, number(address)


def _words(result: Assigned | Refused | None) -> Assigned | str | None:
    """Exceptions are equal to none but themselves; two refusals are the same when they say the
    same."""
    return str(result) if isinstance(result, Refused) else result
