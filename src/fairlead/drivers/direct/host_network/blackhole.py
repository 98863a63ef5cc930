"""A blackhole route for each load-balancer address: what arrives for one and is for none of its
listeners ends here.

Without it such a packet is routed, back to the router that sent it here because the address is
routed here, and to and fro until its hop limit is used up. In: the addresses that have listeners.
Out: the kernel's routes, as `net/blackhole` makes them: for what arrives on the gateway's
interfaces alone, so that on a node, where the service proxy answers for these addresses, processes
of the node itself can still call them. Invariant: an address has its route when the change that
makes its first listener is done, and none after its last. Where somebody else has a route to
exactly such an address, or the address is this host's own, that stays as it is and ours is left
out. Nothing of this keeps a Service from being served: what goes wrong is logged, and tried again
with the next whole read."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import closing

import structlog

from fairlead.errors import FairleadError
from fairlead.net.address import is_ipv6
from fairlead.net.blackhole import Blackholes, Rule

log = structlog.get_logger()

PROTOCOL = 171
"""Ours among routing protocols (`ip route show proto 171`)."""
FIRST_TABLE = 7471000
"""A gateway's table is this and the priority of its filter, which differs between instances on one
host."""


class BlackholeRoutes:
    """Those of one gateway. Made in its network namespace."""

    def __init__(self, interfaces: Callable[[], Collection[str]], priority: int) -> None:
        """`interfaces`: returns the names of the gateway's interfaces; called at each use."""
        self._interfaces = interfaces
        self._ruled_interfaces: frozenset[str] = frozenset(interfaces())
        """The interfaces that the rules are for."""
        self._kernel = Blackholes(FIRST_TABLE + priority, PROTOCOL)
        self._installed: set[str] = set()
        """Those that have routes, and listeners or soon will."""
        self._lock = asyncio.Lock()
        """Audits and changes run beside each other, and the kernel's answers come by one socket."""
        self.routed_elsewhere: tuple[str, ...] = ()
        """Addresses that others have a route to, or that are this host's own."""

    def close(self) -> None:
        """Let go; what is in the kernel stays."""
        self._kernel.close()

    @property
    def outdated(self) -> bool:
        """Whether the rules are for other interfaces than the gateway has now."""
        return self._ruled_interfaces != frozenset(self._interfaces())

    def missing(self, addresses: Collection[str]) -> set[str]:
        """Those of these that should have routes and do not."""
        return set(addresses) - self._installed - set(self.routed_elsewhere)

    async def add(self, new: Collection[str]) -> None:
        """These are about to have listeners, or have just got them."""
        await self._run(lambda: self._add(set(new)))

    async def remove(self, addresses: Collection[str]) -> None:
        """These have no listeners any more."""
        if gone := self._installed.intersection(addresses):
            await self._run(lambda: self._remove(gone))

    async def sync(self, addresses: Collection[str]) -> None:
        """Have exactly these, and those that are about to have listeners, whatever was done to the
        routes meanwhile."""
        await self._run(lambda: self._sync(self._installed.union(addresses)))

    def _add(self, new: set[str]) -> None:
        self._put(new, set(self._kernel.routed_elsewhere(sorted(new))))

    def _remove(self, gone: set[str]) -> None:
        self._installed -= gone
        self._kernel.delete_routes(gone)

    def _sync(self, wanted: set[str]) -> None:
        elsewhere = set(self._kernel.routed_elsewhere(sorted(wanted)))
        there = self._kernel.routes()
        self._installed = there & (wanted - elsewhere)
        self.routed_elsewhere = tuple(each for each in self.routed_elsewhere if each in elsewhere)
        self._kernel.delete_routes(there - self._installed)
        self._put(wanted - self._installed, elsewhere)
        self._ruled_interfaces = frozenset(self._interfaces())
        self._kernel.add_rules(
            {
                Rule(is_ipv6(address), name)
                for address in self._installed
                for name in self._ruled_interfaces
            }
        )
        # Those of our interfaces stay without routes too, as they do when the last address goes.
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
                "no blackhole route: another route leads there",
                addresses=reported[:5],
                count=len(reported),
            )

    async def _run(self, step: Callable[[], None]) -> None:
        async with self._lock:
            try:
                await asyncio.to_thread(step)
            except FairleadError as error:
                log.warning("blackhole routes are not as they should be", problem=str(error))


def remove(priority: int) -> list[str]:
    """Take away all that a gateway with this priority left here; says what there was. Raises
    Refused or Unavailable."""
    with closing(Blackholes(FIRST_TABLE + priority, PROTOCOL)) as kernel:
        rules, routes = kernel.rules(), kernel.routes()
        kernel.delete_rules(rules)
        kernel.delete_routes(routes)
    removed = [f"rule for interface {name}" for name in sorted({each.interface for each in rules})]
    return removed + ([f"blackhole routes ({len(routes)})"] if routes else [])
