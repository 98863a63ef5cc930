"""What the maps hold, as this process last read or wrote it, and what only a plan could say of it.

In: listeners as they are read or set. Out: the answers to questions about them, at once and without
a system call. Invariant: indexes and listeners agree. A new mirror takes the place of the old one
whole, once it is filled."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from fairlead.drivers.direct.maps.quota import NO_USE, Quotas
from fairlead.drivers.direct.maps.records import ListenerRecord
from fairlead.drivers.direct.maps.sizing import claim
from fairlead.drivers.direct.spec import ActualListener, DirectActual, ListenerKey, ListenerSpec
from fairlead.model import ServiceKey
from fairlead.net.transition import Slots


class Draining(NamedTuple):
    """A node that keeps connections of a listener, gets no new ones, and may keep them for `left_s`
    seconds more."""

    service: ServiceKey
    listener: ListenerKey
    node: str
    left_s: float


class InstalledListener(NamedTuple):
    """A listener as it is in the maps.

    `spec`: what its slots were last set for, None until a plan has said it. `idle_since`: of the
    nodes that get no new connections, since when that is so, in monotonic seconds; without a spec,
    of all that may have any, since this process began. `digest`: of its tables in the arena, to see
    whether they are still what was read or written. `short`: what it lacks of its spec, and why;
    empty if it lacks nothing, or if no plan has named it yet."""

    service: ServiceKey
    uid: str
    slots: Slots
    record: ListenerRecord
    digest: int
    spec: ListenerSpec | None
    idle_since: Mapping[str, float]
    short: str = ""

    @property
    def uses(self) -> set[str]:
        """The nodes that slots name, or that connection entries may name."""
        return {
            *self.slots.nodes,
            *(self.spec.retained_nodes if self.spec else ()),
            *self.idle_since,
        }

    @property
    def keeping(self) -> tuple[str, ...]:
        """The nodes that may have connections."""
        return tuple(
            sorted(
                {*self.spec.retained_nodes, *self.spec.departed} if self.spec else self.idle_since
            )
        )

    def idle_s(self, now_s: float) -> tuple[tuple[str, float], ...]:
        """Of the nodes that get no new connections, for how long."""
        return tuple((node, now_s - since_s) for node, since_s in self.idle_since.items())

    def drains(self, key: ListenerKey, now_s: float) -> list[Draining]:
        """The nodes that have a limit to meet."""
        if self.spec is None or not self.spec.drain_s:
            return []
        limit_s, waning = self.spec.drain_s, {*self.spec.retained_nodes, *self.spec.departed}
        since = sorted(
            (node, since_s) for node, since_s in self.idle_since.items() if node in waning
        )
        return [
            Draining(self.service, key, node, since_s + limit_s - now_s) for node, since_s in since
        ]


class Prepared(NamedTuple):
    """A listener whose tables are written, and what is needed to put them into force. `packed`: its
    key as the maps have it. `retained_nodes`: numbers of the nodes whose entries count. `over`: the tables
    are to be written over the old ones."""

    key: ListenerKey
    packed: bytes
    new: InstalledListener
    old: InstalledListener | None
    retained_nodes: frozenset[int]
    over: bool = False

    @property
    def moves(self) -> bool:
        """Whether the tables are other ones than before."""
        return self.old is None or self.old.slots != self.new.slots


class Mirror:
    """Listeners by key, and what follows from them. `quotas`: record the memory and the listeners
    of each namespace."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self.listeners: dict[ListenerKey, InstalledListener] = {}
        self.of_service: dict[ServiceKey, set[ListenerKey]] = {}
        self.uses: Counter[str] = Counter()
        self.addresses: Counter[str] = Counter()
        self.draining: set[ListenerKey] = set()
        self.unplanned = 0
        """How many listeners no plan has spoken of yet."""

    def put(self, key: ListenerKey, installed: InstalledListener) -> InstalledListener | None:
        """Note it; what was there before it."""
        old = self.take(key)
        self.listeners[key] = installed
        self.of_service.setdefault(installed.service, set()).add(key)
        uses = self.uses
        for name in installed.uses:
            uses[name] += 1
        self.addresses[key.address] += 1
        self.unplanned += installed.spec is None
        if installed.spec and installed.spec.drain_s and installed.idle_since:
            self.draining.add(key)
        return old

    def take(self, key: ListenerKey) -> InstalledListener | None:
        """Forget it; what was there."""
        old = self.listeners.pop(key, None)
        if old:
            _subtract(self.uses, old.uses)
            _subtract(self.addresses, (key.address,))
            self.draining.discard(key)
            self.unplanned -= old.spec is None
            self.of_service[old.service].discard(key)
            if not self.of_service[old.service]:
                del self.of_service[old.service]
        return old

    def count(self, old: InstalledListener | None, new: InstalledListener | None) -> None:
        """Record in the quotas that `new` replaces `old`. Many listeners are prepared before they
        come into force."""
        before, after = (
            (each.service.namespace, claim(each.record)) if each else NO_USE for each in (old, new)
        )
        self._quotas.memory.change(before, after)
        before, after = ((each.service.namespace, 1) if each else NO_USE for each in (old, new))
        self._quotas.listeners.change(before, after)

    def listeners_of(self, services: Iterable[ServiceKey]) -> list[InstalledListener]:
        """All that these Services have."""
        return [
            self.listeners[key] for service in services for key in self.of_service.get(service, ())
        ]

    def actual(
        self,
        services: Collection[ServiceKey] | None,
        usable: Callable[[str], Iterable[tuple[str, str]]],
        ranges_of: Callable[[ServiceKey], tuple[str, ...]],
        is_used: Callable[[InstalledListener], bool],
        now_s: float,
    ) -> dict[ServiceKey, DirectActual]:
        """What these Services have, or all of them. `usable` says of a node its addresses that can
        be used, `ranges_of` of a Service its source ranges, `is_used` whether packets have been
        sent on for a listener."""
        wanted: Iterable[ServiceKey] = self.of_service if services is None else services
        found = {}
        for service in wanted:
            if keys := sorted(self.of_service.get(service, ())):
                mine = [self.listeners[key] for key in keys]
                listeners = tuple(
                    ActualListener(
                        key,
                        each.slots,
                        each.spec,
                        each.keeping,
                        each.idle_s(now_s),
                        is_used(each),
                        bool(each.short),
                    )
                    for key, each in zip(keys, mine, strict=True)
                )
                names = sorted({name for each in mine for name in each.slots.nodes})
                addresses = tuple(chain.from_iterable(map(usable, names)))
                found[service] = DirectActual(mine[0].uid, listeners, addresses, ranges_of(service))
        return found


def _subtract(counts: Counter[str], names: Iterable[str]) -> None:
    """One less of each; none left is none at all."""
    for name in names:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]
