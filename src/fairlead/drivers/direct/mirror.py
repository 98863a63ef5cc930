"""What the maps hold, as this process last read or wrote it, and what only a plan could say of it.

In: listeners as they are read or set. Out: the answers to questions about them, at once and without a system call.
Invariant: indexes and listeners agree. A new mirror takes the place of the old one whole, once it is filled.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from fairlead.drivers.direct.layout import ListenerRecord
from fairlead.drivers.direct.spec import ActualListener, DirectActual, ListenerKey, ListenerSpec
from fairlead.model import ServiceKey
from fairlead.net.transition import Slots


class InstalledListener(NamedTuple):
    """A listener as it is in the maps.

    `spec`: what its slots were last set for, None until a plan has said it. `left_since`: when the nodes in `spec.left` ceased
    to be members, in monotonic seconds; without a spec, all that may have connections, since this process began.
    `digest`: of its tables in the arena, to see whether they are still what was read or written.
    """

    service: ServiceKey
    uid: str
    slots: Slots
    record: ListenerRecord
    digest: int
    spec: ListenerSpec | None
    left_since: Mapping[str, float]

    @property
    def uses(self) -> set[str]:
        """The nodes that slots name, or that connection entries may name."""
        return {*self.slots.nodes, *(self.spec.keepers if self.spec else ()), *self.left_since}

    def keeping(self, oldest_s: float) -> tuple[str, ...]:
        """The nodes that may have connections; not those that left before `oldest_s`."""
        left = {node for node, since_s in self.left_since.items() if since_s >= oldest_s}
        return tuple(sorted(left.union(self.spec.keepers if self.spec else ())))


class Mirror:
    """Listeners by key, and what follows from them."""

    def __init__(self, listeners: Iterable[tuple[ListenerKey, InstalledListener]] = ()) -> None:
        self.listeners: dict[ListenerKey, InstalledListener] = {}
        self.of_service: dict[ServiceKey, set[ListenerKey]] = {}
        self.uses: Counter[str] = Counter()
        self.unplanned = 0
        """How many listeners no plan has spoken of yet."""
        for key, installed in listeners:
            self.put(key, installed)

    def put(self, key: ListenerKey, installed: InstalledListener) -> InstalledListener | None:
        """Note it; what was there before it."""
        old = self.take(key)
        self.listeners[key] = installed
        self.of_service.setdefault(installed.service, set()).add(key)
        self.uses.update(installed.uses)
        self.unplanned += installed.spec is None
        return old

    def take(self, key: ListenerKey) -> InstalledListener | None:
        """Forget it; what was there."""
        old = self.listeners.pop(key, None)
        if old:
            self.uses.subtract(old.uses)
            self.unplanned -= old.spec is None
            self.of_service[old.service].discard(key)
            if not self.of_service[old.service]:
                del self.of_service[old.service]
        return old

    def actual(
        self, services: Collection[ServiceKey] | None, addresses: Mapping[str, tuple[str, ...]], oldest_s: float
    ) -> dict[ServiceKey, DirectActual]:
        """What these Services have, or all of them. `addresses`: of the nodes, those that can be used."""
        wanted: Iterable[ServiceKey] = self.of_service if services is None else services
        found = {}
        for service in wanted:
            if keys := sorted(self.of_service.get(service, ())):
                mine = [self.listeners[key] for key in keys]
                listeners = tuple(
                    ActualListener(key, each.slots, each.spec, each.keeping(oldest_s))
                    for key, each in zip(keys, mine, strict=True)
                )
                names = sorted({name for each in mine for name in each.slots.nodes})
                usable = tuple((name, address) for name in names for address in addresses.get(name, ()))
                found[service] = DirectActual(mine[0].uid, listeners, usable)
        return found
