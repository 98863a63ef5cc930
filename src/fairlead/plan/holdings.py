"""The index of held addresses that `plan.ledger` uses: their holders and sharing keys.

In: the Services that begin or cease to hold an address. Out: the holders of an address, the
addresses of a sharing key, the lowest free address of a pool, and notifications for the Services
that wait. The index also counts the held addresses of each pool. Invariant: pure, except for its
memory; the cost of a query does not grow with the number of Services."""

import ipaddress
from collections.abc import Collection

from fairlead.model import Family, ServiceKey
from fairlead.net.address import family_of, is_ipv6
from fairlead.plan.exclusions import Span
from fairlead.plan.pools import Pool, Pools
from fairlead.plan.waiting import WaitQueues

Sharing = tuple[str, str]
"""Namespace and sharing key."""


class Holdings:
    """All held addresses. `use` replaces the pools."""

    def __init__(self, queues: WaitQueues) -> None:
        self.pools = Pools((), {})
        self._queues = queues
        self._holders: dict[str, set[ServiceKey]] = {}
        self._by_sharing: dict[Sharing, set[str]] = {}
        self._sharings: dict[str, set[Sharing]] = {}  # the inverse of _by_sharing

    def use(self, pools: Pools) -> None:
        """Replace the pools, and notify all Services that wait for an address from a pool."""
        self.pools = pools
        for address in self._holders:
            if (found := pools.find(address)) is not None:
                found[0].assigned[family_of(address)] += 1
        self._queues.notify_all("pool")

    def of(self, address: str) -> Collection[ServiceKey]:
        """Return the Services that hold this address."""
        return self._holders.get(address, ())

    def has(self, span: Span) -> bool:
        """Return whether a Service holds an address of this network."""
        if span.size == 1:
            return str(span) in self._holders
        return any(
            span.first <= number(address) <= span.last
            for address in self._holders
            if (6 if is_ipv6(address) else 4) == span.version
        )

    def shared(self, sharing: Sharing) -> Collection[str]:
        """Return the addresses that are or were shared under this key. An address stays in the
        result until its last holder leaves it."""
        return self._by_sharing.get(sharing, ())

    def lowest_free(self, pool: Pool, family: Family) -> str | None:
        """Return the lowest address of the pool that no Service holds; None if there is none."""
        return pool.lowest_free(family, self._holders.__contains__)

    def enter(self, key: ServiceKey, address: str) -> None:
        """Record that the Service holds the address."""
        holders = self._holders.setdefault(address, set())
        if not holders and (found := self.pools.find(address)) is not None:
            found[0].assigned[family_of(address)] += 1
        holders.add(key)

    def share(self, address: str, sharing: Sharing) -> None:
        """Record that a holder of the address shares it under this key."""
        sharings = self._sharings.setdefault(address, set())
        if sharing not in sharings:
            sharings.add(sharing)
            self._by_sharing.setdefault(sharing, set()).add(address)
            self._queues.notify(("sharing", *sharing))

    def leave(self, key: ServiceKey, address: str) -> None:
        """Record that the Service no longer holds the address, and notify the Services that wait
        for it."""
        holders = self._holders[address]
        holders.discard(key)
        self._queues.notify(("address", address))
        if holders:
            return
        del self._holders[address]
        for sharing in self._sharings.pop(address, ()):
            self._by_sharing[sharing].discard(address)
            if not self._by_sharing[sharing]:
                del self._by_sharing[sharing]
        if (found := self.pools.find(address)) is not None:
            pool, range_ = found
            pool.assigned[family_of(address)] -= 1
            range_.give_back(number(address))
            self._queues.notify(("pool", pool.name, family_of(address)))


def number(address: str) -> int:
    """Return the address as an integer, to sort by."""
    return int(ipaddress.ip_address(address))
