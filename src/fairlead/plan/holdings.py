"""Which addresses are held, by whom and under which sharing key: the index under `plan.ledger`.

In: Services that come to an address or leave it. Out: its holders; the addresses of a sharing key;
what is free in a pool; news for those who wait. It also counts how many addresses of each pool are
held. Invariant: pure, but for its memory; no answer costs more when there are many Services."""

import ipaddress
from collections.abc import Collection

from fairlead.model import Family, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.pools import Pool, Pools
from fairlead.plan.waiting import WaitQueues

Sharing = tuple[str, str]
"""Namespace and sharing key."""


class Holdings:
    """`pools` may be exchanged by `use`."""

    def __init__(self, queues: WaitQueues) -> None:
        self.pools = Pools((), {})
        self._queues = queues
        self._holders: dict[str, set[ServiceKey]] = {}
        self._by_sharing: dict[Sharing, set[str]] = {}
        self._sharings: dict[str, set[Sharing]] = {}  # the same, by address

    def use(self, pools: Pools) -> None:
        """From here on these are the pools."""
        self.pools = pools
        for address in self._holders:
            if (found := pools.find(address)) is not None:
                found[0].assigned[family_of(address)] += 1
        self._queues.notify_all("pool")

    def of(self, address: str) -> Collection[ServiceKey]:
        """Who holds this address."""
        return self._holders.get(address, ())

    def shared(self, sharing: Sharing) -> Collection[str]:
        """The addresses that somebody holds, or held while nobody left it free, under this key."""
        return self._by_sharing.get(sharing, ())

    def lowest_free(self, pool: Pool, family: Family) -> str | None:
        """The lowest address of the pool that nobody holds."""
        return pool.lowest_free(family, self._holders.__contains__)

    def enter(self, key: ServiceKey, address: str) -> None:
        holders = self._holders.setdefault(address, set())
        if not holders and (found := self.pools.find(address)) is not None:
            found[0].assigned[family_of(address)] += 1
        holders.add(key)

    def share(self, address: str, sharing: Sharing) -> None:
        """One of its holders shares this address under that key."""
        sharings = self._sharings.setdefault(address, set())
        if sharing not in sharings:
            sharings.add(sharing)
            self._by_sharing.setdefault(sharing, set()).add(address)
            self._queues.notify(("sharing", *sharing))

    def leave(self, key: ServiceKey, address: str) -> None:
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
    """Addresses in their order."""
    return int(ipaddress.ip_address(address))
