"""The content of the maps as this process last read or wrote it, with the plan for each listener.

In: listeners as they are read or set. Out: answers to queries about them, without a system call.
Invariant: the indexes agree with the listeners.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from fairlead.drivers.direct.maps.quota import NO_USAGE, Quotas
from fairlead.drivers.direct.maps.records import ListenerRecord
from fairlead.drivers.direct.maps.sizing import claim
from fairlead.drivers.direct.spec import ActualListener, DirectActual, ListenerKey, ListenerSpec
from fairlead.model import ServiceKey
from fairlead.net.transition import Slots


class Draining(NamedTuple):
    """A draining node, which may keep its connections of a listener for `left_s` more seconds."""

    service: ServiceKey
    listener: ListenerKey
    node: str
    left_s: float


class InstalledListener(NamedTuple):
    """A listener as it is in the maps.

    `spec`: the plan for which its slots were last set; None until a plan contains it. `idle_since`:
    for each node that gets no new connections, the monotonic time in seconds at which this began;
    without a spec, the start of this process, for every node that may have connections. `digest`: a
    hash of its tables in the arena, by which a survey recognizes unchanged tables. `shortfall`:
    what it lacks of its spec, and why; empty if it lacks nothing, or if no plan contains it yet.
    """

    service: ServiceKey
    uid: str
    slots: Slots
    record: ListenerRecord
    digest: int
    spec: ListenerSpec | None
    idle_since: Mapping[str, float]
    shortfall: str = ""

    @property
    def uses(self) -> set[str]:
        """The nodes that slots name, or that flow entries may name."""
        return {
            *self.slots.nodes,
            *(self.spec.retained_nodes if self.spec else ()),
            *self.idle_since,
        }

    @property
    def nodes_with_connections(self) -> tuple[str, ...]:
        """The nodes that may have connections, sorted."""
        return tuple(
            sorted(
                {*self.spec.retained_nodes, *self.spec.departed} if self.spec else self.idle_since
            )
        )

    def idle_s(self, now_s: float) -> tuple[tuple[str, float], ...]:
        """Return (node, seconds) of the nodes that get no new connections: the time since this
        began."""
        return tuple((node, now_s - since_s) for node, since_s in self.idle_since.items())

    def drains(self, key: ListenerKey, now_s: float) -> list[Draining]:
        """Return the draining nodes that may keep connections for a limited time only."""
        if self.spec is None or not self.spec.drain_s:
            return []
        limit_s, draining = self.spec.drain_s, {*self.spec.retained_nodes, *self.spec.departed}
        since = sorted(
            (node, since_s) for node, since_s in self.idle_since.items() if node in draining
        )
        return [
            Draining(self.service, key, node, since_s + limit_s - now_s) for node, since_s in since
        ]


class Prepared(NamedTuple):
    """A listener whose tables are written but do not take effect yet.

    `packed`: its key as bytes. `retained_nodes`: the numbers of the nodes whose flow entries are
    followed. `in_place`: the tables are not written yet; they will overwrite the present tables.
    """

    key: ListenerKey
    packed: bytes
    new: InstalledListener
    old: InstalledListener | None
    retained_nodes: frozenset[int]
    in_place: bool = False

    @property
    def has_new_tables(self) -> bool:
        """Whether the tables differ from the present ones."""
        return self.old is None or self.old.slots != self.new.slots


class Mirror:
    """The listeners by key, and indexes of them. `quotas` records the memory and listeners that
    each namespace uses."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self.listeners: dict[ListenerKey, InstalledListener] = {}
        self.of_service: dict[ServiceKey, set[ListenerKey]] = {}
        """The listeners of each Service."""
        self.uses: Counter[str] = Counter()
        """The number of listeners that use each node, see `InstalledListener.uses`."""
        self.addresses: Counter[str] = Counter()
        """The number of listeners at each address."""
        self.draining: set[ListenerKey] = set()
        """Listeners with draining nodes that have a drain time."""
        self.unplanned = 0
        """The number of listeners that no plan has contained yet."""

    def put(self, key: ListenerKey, installed: InstalledListener) -> InstalledListener | None:
        """Store the listener, and return the listener that it replaces."""
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
        """Remove and return a listener."""
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
        """Record in the quotas that `new` replaces `old`.

        This is separate from `put`, because many listeners are prepared before one of them takes
        effect.
        """
        before, after = (
            (each.service.namespace, claim(each.record)) if each else NO_USAGE
            for each in (old, new)
        )
        self._quotas.memory.change(before, after)
        before, after = ((each.service.namespace, 1) if each else NO_USAGE for each in (old, new))
        self._quotas.listeners.change(before, after)

    def listeners_of(self, services: Iterable[ServiceKey]) -> list[InstalledListener]:
        """Return all listeners of these Services."""
        return [
            self.listeners[key] for service in services for key in self.of_service.get(service, ())
        ]

    def actual(
        self,
        services: Collection[ServiceKey] | None,
        reachable_addresses: Callable[[str], Iterable[tuple[str, str]]],
        ranges_of: Callable[[ServiceKey], tuple[str, ...]],
        is_used: Callable[[InstalledListener], bool],
        now_s: float,
    ) -> dict[ServiceKey, DirectActual]:
        """Return the actual state of these Services, or with None of all Services.

        `reachable_addresses` returns (node, address) for each address at which a node can be
        reached, `ranges_of` the source ranges of a Service, and `is_used` whether the listener has
        forwarded packets.
        """
        wanted: Iterable[ServiceKey] = self.of_service if services is None else services
        found = {}
        for service in wanted:
            if keys := sorted(self.of_service.get(service, ())):
                installed = [self.listeners[key] for key in keys]
                listeners = tuple(
                    ActualListener(
                        key,
                        each.slots,
                        each.spec,
                        each.nodes_with_connections,
                        each.idle_s(now_s),
                        is_used(each),
                        bool(each.shortfall),
                    )
                    for key, each in zip(keys, installed, strict=True)
                )
                names = sorted({name for each in installed for name in each.slots.nodes})
                addresses = tuple(chain.from_iterable(map(reachable_addresses, names)))
                found[service] = DirectActual(
                    installed[0].uid, listeners, addresses, ranges_of(service)
                )
        return found


def _subtract(counts: Counter[str], names: Iterable[str]) -> None:
    """Decrement each count, and drop the names that reach zero."""
    for name in names:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]
