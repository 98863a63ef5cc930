"""Notice other stations that have an address which this gateway accepts.

In: the addresses of Services of class proxy, which are local to this host. Out: those for which
another station on one of its links answers. Clients on that link may reach the station instead of
the gateway, and the gateway cannot reach it. The gateway goes on serving the address: it cannot
tell a foreign host from another gateway, whose kernel answers for its local addresses too. The
controller can, by the MAC addresses in the Leases of gateways (`roles.gateways`), and reports it.
Without CAP_NET_RAW, a host beside another gateway is found only in those checks in which it answers
sooner than the gateway does. Therefore a station counts for some checks more."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

import structlog

from fairlead.errors import FairleadError
from fairlead.kube.presence import Claimed
from fairlead.net.stations import Found, Station, stations_at

log = structlog.get_logger()

INTERVAL_S = 30.0
"""The pause between two checks. A check takes a second for each 64 addresses."""
CHECKS = 5
"""For how many checks a station counts, beginning with the one that has found it."""


class Conflicts:
    """`addresses`: returns the addresses that are local to this host."""

    def __init__(self, addresses: Callable[[], Collection[str]]) -> None:
        self._addresses = addresses
        self._left: dict[tuple[str, Station], int] = {}
        """For how many further checks each station that has an address counts."""
        self.claimed: tuple[Claimed, ...] = ()
        """The addresses that other stations have, by the last checks."""

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self.take(await stations_at(self._addresses()))
            except FairleadError as error:
                log.warning("cannot look for other stations with our addresses", problem=str(error))

    def take(self, found: Found) -> None:
        """Process what one check has found."""
        kept = {each: left - 1 for each, left in self._left.items() if left > 1}
        self._left = {**kept, **dict.fromkeys(found, CHECKS)}
        # The kernels of other gateways answer for all these addresses, another station for one or a
        # few, and a Lease has room for the first ones only.
        number = Counter(station.mac for _, station in self._left)
        rare = sorted(self._left, key=lambda each: (number[each[1].mac], each))
        self.claimed = tuple(
            Claimed(address, station.interface, station.mac) for address, station in rare
        )
