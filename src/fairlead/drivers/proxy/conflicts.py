"""Notice other stations that have an address which this gateway accepts.

In: the addresses of Services of class proxy, which are local to this host. Out: those for which
another station on one of its links answers. Clients on that link may reach the station instead of
the gateway, and the gateway cannot reach it. The gateway goes on serving the address: it cannot
tell a foreign host from another gateway, whose kernel answers for its local addresses too. The
controller can, by the MAC addresses in the Leases of gateways (`roles.gateways`), and reports it.
The kernel keeps the first answer: a host that answers later than another gateway is not noticed."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

import structlog

from fairlead.errors import FairleadError
from fairlead.kube.presence import Claimed
from fairlead.net.stations import stations_at

log = structlog.get_logger()

INTERVAL_S = 30.0


class Conflicts:
    """`addresses`: returns the addresses that are local to this host."""

    def __init__(self, addresses: Callable[[], Collection[str]]) -> None:
        self._addresses = addresses
        self.claimed: tuple[Claimed, ...] = ()
        """The addresses that other stations have, by the last check."""

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                found = await stations_at(self._addresses())
            except FairleadError as error:
                log.warning("cannot look for other stations with our addresses", problem=str(error))
                continue
            # The kernels of other gateways answer for all these addresses, another station for one
            # or a few, and a Lease has room for the first ones only.
            number = Counter(each.mac for each in found.values())
            rare = sorted(found.items(), key=lambda item: (number[item[1].mac], item[0]))
            self.claimed = tuple(
                Claimed(address, each.interface, each.mac) for address, each in rare
            )
