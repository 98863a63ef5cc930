"""The share of each namespace in the resources of a gateway whose size is fixed: table memory,
listeners, retained nodes and source ranges.

In: how much each namespace uses. Out: how much more it may use now, or the error that says why it
may not; and the Services that wait for a resource, when a part of it was released.

Invariant: new usage leaves the reserve free, an eighth of each resource, which is for changes of
Services that are served already. No namespace gets more than its share of what the other namespaces
leave free, so some of the resource is always free for another namespace (dynamic thresholds:
Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998). A resource that is in use is
never taken away.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from fairlead.drivers.direct.maps.records import CHUNK_BYTES
from fairlead.drivers.direct.maps.sizing import MAX_LISTENERS
from fairlead.errors import Unavailable
from fairlead.model import ServiceKey

RESERVE = 8
"""The reserve is one part in RESERVE of each resource."""

NamespaceUsage = tuple[str, int]
"""A namespace, and how much it uses."""

NO_USAGE: NamespaceUsage = ("", 0)


class OutOfMemory(Unavailable):
    """A resource of fixed size is used up. The Service is retried as soon as part of the resource
    is free."""


class Usage(NamedTuple):
    """How much of a resource is used, and its size."""

    used: int
    capacity: int


class Quota:
    """The usage of one resource by namespaces.

    For messages, `what` names the resource, `users` names what uses it, and `remedy` says how to
    get more of it. `share`: the fraction that one namespace may have of what other namespaces leave
    free; with 1 a namespace has no limit.
    """

    def __init__(self, what: str, users: str, capacity: int, share: float, remedy: str) -> None:
        self._what, self._users, self._remedy = what, users, remedy
        self._share = share
        self.capacity = capacity
        self.used = 0
        self.waiting: set[ServiceKey] = set()
        """Services that did not get everything that they requested."""
        self._freed = False
        self._of: Counter[str] = Counter()

    def change(self, before: NamespaceUsage, after: NamespaceUsage) -> None:
        """Record that a user of the resource now uses `after` instead of `before`."""
        self._freed |= before[1] > after[1] or (before[0] != after[0] and before[1] > 0)
        for (namespace, amount), sign in ((before, -1), (after, 1)):
            if amount:
                self.used += sign * amount
                self._of[namespace] += sign * amount
                if not self._of[namespace]:
                    del self._of[namespace]

    def available(self, namespace: str, *, changing: bool = False) -> int:
        """Return how much more the namespace may use now.

        `changing`: the request is of a Service that is served already, and may use the reserve.
        """
        own = self._of[namespace]
        usable = self.capacity if changing else self.capacity - self.capacity // RESERVE
        return max(0, int(self._share * (usable - (self.used - own))) - own)

    def take_retriable(self) -> set[ServiceKey]:
        """Return the waiting Services if some of the resource was released since the last call, and
        remove them from `waiting`. They wait again when they are refused again."""
        if not self._freed:
            return set()
        self._freed = False
        waiting, self.waiting = self.waiting, set()
        return waiting

    def refusal(self, service: ServiceKey) -> OutOfMemory:
        """Return the error for a Service that may not have what it requests, and add the Service to
        `waiting`. The text does not change while the cause lasts."""
        self.waiting.add(service)
        if self._of[service.namespace] and self._share < 1:
            return OutOfMemory(
                f"namespace {service.namespace} has reached its share of this gateway's "
                f"{self._what}",
                fix=f"use fewer {self._users} in it, raise gateway.namespaceShare, or "
                f"{self._remedy}",
            )
        return OutOfMemory(
            f"this gateway's {self._what} is used up except for the reserve", fix=self._remedy
        )

    @property
    def usage(self) -> Usage:
        """The usage of the whole resource, for gauges."""
        return Usage(self.used, self.capacity)


class Quotas(NamedTuple):
    """The quotas of a gateway. `memory` counts chunks, and counts two tables for each listener, see
    `sizing.claim`."""

    memory: Quota
    listeners: Quota
    retained: Quota
    ranges: Quota

    def take_retriable(self) -> set[ServiceKey]:
        """Return the Services that wait for a resource if a part of it was released since the last
        call."""
        return set().union(*(each.take_retriable() for each in self))

    def usage(self) -> dict[str, Usage]:
        """Return the usage of each resource, by its name in metrics. Table memory is in bytes."""
        memory = Usage(*(each * CHUNK_BYTES for each in self.memory.usage))
        rest = (self.listeners.usage, self.retained.usage, self.ranges.usage)
        return dict(
            zip(
                ("table_memory", "listeners", "retained_nodes", "source_ranges"),
                (memory, *rest),
                strict=True,
            )
        )

    @classmethod
    def of(cls, capacities: Mapping[str, int], share: float) -> "Quotas":
        """Return the quotas for maps of these sizes.

        `capacities`: the number of entries of each map, by name.
        """
        gateways = "use more gateways with fewer Services each"
        more = (
            "raise gateway.tableMemoryMiB, or " * (capacities["listeners"] < MAX_LISTENERS)
            + gateways
        )
        return cls(
            Quota(
                "table memory",
                "ports and endpoints",
                capacities["arena"],
                share,
                "raise gateway.tableMemoryMiB",
            ),
            Quota(
                "capacity for listeners",
                "ports and addresses",
                capacities["listeners"],
                share,
                more,
            ),
            Quota(
                "capacity for retained nodes",
                "ports",
                capacities["retained_nodes"],
                share,
                more,
            ),
            Quota(
                "capacity for source ranges", "source ranges", capacities["ranges"], share, gateways
            ),
        )
