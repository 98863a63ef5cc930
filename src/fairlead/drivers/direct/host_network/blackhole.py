"""A blackhole route for each load-balancer address, which drops packets that match no listener.

The router sends packets for such an address to this host. Without the blackhole route, the host
routes a packet that matches no listener back to the router, and the packet loops until its hop
limit is used up.

In: the addresses that have listeners. Out: routes in the kernel (`net/blackhole`), which apply only
to packets that arrive on the gateway's interfaces. On a node, where the service proxy answers for
these addresses, processes of the node can still connect to them.

Invariant: an address has its route when the change that creates its first listener is done, and no
route after its last listener is removed. If another owner has a route to exactly this address, or
the address belongs to this host, no blackhole route is added. An error here never prevents a
Service from being served: it is logged, and the next audit tries again.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import closing

import structlog

from fairlead.errors import FairleadError
from fairlead.net.address import is_ipv6
from fairlead.net.blackhole import Blackholes, Rule

log = structlog.get_logger()

PROTOCOL = 171
"""The routing protocol number of our routes (`ip route show proto 171`)."""
FIRST_TABLE = 7471000
"""The number of a gateway's routing table is this plus the priority of its tc filter, which differs
between instances on one host."""


class BlackholeRoutes:
    """The blackhole routes of one gateway. Create it in the gateway's network namespace."""

    def __init__(self, interfaces: Callable[[], Collection[str]], priority: int) -> None:
        """`interfaces` returns the names of the gateway's interfaces; it is called at each use."""
        self._interfaces = interfaces
        self._ruled_interfaces: frozenset[str] = frozenset(interfaces())
        """The interfaces that have routing rules."""
        self._kernel = Blackholes(FIRST_TABLE + priority, PROTOCOL)
        self._installed: set[str] = set()
        """Addresses with a route, which have listeners or will have listeners soon."""
        self._lock = asyncio.Lock()
        """Serializes audits and changes, which run concurrently and share one socket to the
        kernel."""
        self.routed_elsewhere: tuple[str, ...] = ()
        """Addresses to which other routes lead, or that belong to this host."""

    def close(self) -> None:
        """Close the socket. Routes and rules stay in the kernel."""
        self._kernel.close()

    @property
    def outdated(self) -> bool:
        """Whether the gateway's interfaces have changed since the rules were written."""
        return self._ruled_interfaces != frozenset(self._interfaces())

    def missing(self, addresses: Collection[str]) -> set[str]:
        """Return the addresses that still need a blackhole route."""
        return set(addresses) - self._installed - set(self.routed_elsewhere)

    async def add(self, new: Collection[str]) -> None:
        """Add routes for addresses that will have listeners, or have just got them."""
        await self._run(lambda: self._add(set(new)))

    async def remove(self, addresses: Collection[str]) -> None:
        """Remove the routes of addresses that have no listeners any more."""
        if removed := self._installed.intersection(addresses):
            await self._run(lambda: self._remove(removed))

    async def sync(self, addresses: Collection[str]) -> None:
        """Set the routes to exactly these addresses and the addresses that will have listeners
        soon, regardless of what other processes have changed."""
        await self._run(lambda: self._sync(self._installed.union(addresses)))

    async def restore(self) -> None:
        """Set rules and routes again if another program has removed a rule, as systemd-networkd
        does with rules and routes of others when it is restarted."""
        await self._run(self._restore)

    def _restore(self) -> None:
        wanted = {
            Rule(is_ipv6(address), name)
            for address in self._installed
            for name in self._ruled_interfaces
        }
        if wanted and (missing := wanted - self._kernel.rules()):
            log.warning(
                "another program has removed rules that lead to the blackhole routes: they are "
                "added again",
                interfaces=sorted({each.interface for each in missing}),
            )
            self._sync(set(self._installed))

    def _add(self, new: set[str]) -> None:
        self._put(new, set(self._kernel.routed_elsewhere(sorted(new))))

    def _remove(self, removed: set[str]) -> None:
        self._installed -= removed
        self._kernel.delete_routes(removed)

    def _sync(self, wanted: set[str]) -> None:
        elsewhere = set(self._kernel.routed_elsewhere(sorted(wanted)))
        present = self._kernel.routes()
        self._installed = present & (wanted - elsewhere)
        self.routed_elsewhere = tuple(each for each in self.routed_elsewhere if each in elsewhere)
        self._kernel.delete_routes(present - self._installed)
        self._put(wanted - self._installed, elsewhere)
        self._ruled_interfaces = frozenset(self._interfaces())
        self._kernel.add_rules(
            {
                Rule(is_ipv6(address), name)
                for address in self._installed
                for name in self._ruled_interfaces
            }
        )
        # The rules of our interfaces stay even if there are no routes, as after the last `remove`.
        self._kernel.delete_rules(
            {rule for rule in self._kernel.rules() if rule.interface not in self._ruled_interfaces}
        )

    def _put(self, new: set[str], elsewhere: set[str]) -> None:
        usable = new - elsewhere
        self._kernel.add_rules(
            {Rule(is_ipv6(address), name) for address in usable for name in self._interfaces()}
        )
        self._kernel.add_routes(usable)
        self._installed |= usable
        if reported := sorted((new & elsewhere).difference(self.routed_elsewhere)):
            self.routed_elsewhere = tuple(sorted({*self.routed_elsewhere, *reported}))
            log.warning(
                "no blackhole route: another route leads to the address",
                addresses=reported[:5],
                count=len(reported),
            )

    async def _run(self, step: Callable[[], None]) -> None:
        async with self._lock:
            try:
                await asyncio.to_thread(step)
            except FairleadError as error:
                log.warning("updating the blackhole routes failed", problem=str(error))


def remove(priority: int) -> list[str]:
    """Remove all routes and rules of a gateway with this priority, and return a description of
    each. Raise Refused or Unavailable."""
    with closing(Blackholes(FIRST_TABLE + priority, PROTOCOL)) as kernel:
        rules, routes = kernel.rules(), kernel.routes()
        kernel.delete_rules(rules)
        kernel.delete_routes(routes)
    removed = [f"rule for interface {name}" for name in sorted({each.interface for each in rules})]
    return removed + ([f"blackhole routes ({len(routes)})"] if routes else [])
