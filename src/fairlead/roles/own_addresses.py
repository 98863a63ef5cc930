"""The addresses that the host of a gateway or node needs itself: its own, and those of its next
hops.

In: the interfaces and routes of the host, the addresses of the API server, the routers towards
nodes. Out: exclusions in the state of the role, so that it does not serve a Service at such an
address; and the addresses themselves, which the Lease of a gateway passes on to the controller, so
that it does not assign them."""

import asyncio
from collections.abc import Callable, Collection, Sequence

import structlog

from fairlead.drivers import Component
from fairlead.errors import FairleadError
from fairlead.net import interfaces
from fairlead.net.own_addresses import needed_addresses
from fairlead.plan.exclusions import of_hosts
from fairlead.state import State

log = structlog.get_logger()

INTERVAL_S = 5.0
"""The interval at which interfaces and routes are read."""


class OwnAddresses(Component):
    """`role`: the role of this process, for messages. `api_servers`: returns the addresses at which
    this host reaches the API server. `routers`: returns the routers through which it reaches
    nodes."""

    name = "own addresses"

    def __init__(
        self,
        role: str,
        state: State,
        api_servers: Callable[[], Collection[str]] = tuple,
        routers: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.addresses: Sequence[str] = ()
        """Next hops first, because a Lease has room for a limited number of addresses."""
        self.macs: Sequence[str] = ()
        """The MAC addresses with which the host answers for its addresses."""
        self._words = f"an address or next hop of this {role}"
        self._state = state
        self._api_servers = api_servers
        self._routers = routers

    async def open(self) -> None:
        await self.refresh()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the addresses, and exclude them from those of Services. A failure is logged, and the
        previous addresses stay excluded."""
        try:
            needed = await asyncio.to_thread(needed_addresses, self._api_servers())
            self.macs = await asyncio.to_thread(interfaces.macs)
        except FairleadError as error:
            log.warning("cannot read the addresses of this host", problem=str(error))
            return
        self.addresses = list(dict.fromkeys((*sorted(self._routers()), *needed)))
        self._state.exclude("this host", of_hosts(self.addresses, self._words))
