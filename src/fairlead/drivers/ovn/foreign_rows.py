"""The parts of OVN that Fairlead does not own: whether OVN can be used, and the rows of other
programs at the same routers and switches.

In: the databases. Out: a Refused for all Services or for one frontend, and Findings. The rows of
others are read when an address is about to be used, and after each audit, because monitoring all
load balancers of a cloud would take its memory."""

import time
from collections.abc import Iterable, Mapping, Sequence

from fairlead.drivers.ovn import checks
from fairlead.drivers.ovn.foreign import ForeignRow, holder, taken
from fairlead.drivers.ovn.northbound import Northbound
from fairlead.drivers.ovn.southbound import Southbound
from fairlead.drivers.ovn.spec import Attachment, Frontend, Site
from fairlead.errors import Refused
from fairlead.model import Finding

Others = Mapping[Attachment, Sequence[ForeignRow]]
"""The rows of others at each router and switch."""
MAX_AGE_S = 30.0
"""The age at which the rows of others are read again before an address is used."""


class ForeignRows:
    """The parts of OVN that Fairlead does not own."""

    def __init__(self, site: Site, rows: Northbound, south: Southbound | None) -> None:
        self._site, self._rows, self._south = site, rows, south
        self._read_s = 0.0
        self._others: Others | None = None
        self._warnings: tuple[Finding, ...] = ()
        """What would not work if a chassis fails, as of the last `update`."""
        self._told: tuple[Finding, ...] = ()

    def take_warnings(self) -> tuple[Finding, ...]:
        """Return what does not work, or would not if a chassis fails; nothing if it was returned
        before, because it is about all Services."""
        missing = sorted(set(self._site.switches).difference(self._rows.switches()))
        warnings = (*self._warnings, *map(checks.no_switch, missing))
        if warnings == self._told:
            return ()
        self._told = warnings
        return warnings

    def forget(self) -> None:
        """Read everything again at the next `update`."""
        self._others = None

    def refusal(self) -> Refused | None:
        """Return why no row can be created or attached, by the rows that are monitored."""
        if refusal := checks.check_version(self._rows.options()):
            return refusal
        if self._site.topology == "gateways" or self._rows.routers():
            return None  # the router of a node concerns the pods of this node alone
        return checks.no_router(self._site.router)

    async def update(self) -> Others:
        """Return the rows of others. They are read unless they were read a moment ago. Raise
        Unavailable."""
        now_s = time.monotonic()
        if self._others is not None and now_s - self._read_s < MAX_AGE_S:
            return self._others
        others = await self._rows.foreign()
        self._others, self._read_s = others, now_s
        is_movable = self._site.topology == "router"  # a gateway router is on one chassis
        chassis = self._south.chassis if self._south is not None and is_movable else ()
        found = (
            checks.check_failover(self._site.router, await self._rows.gateways(), len(chassis))
            if chassis
            else None
        )
        self._warnings = (found,) if found is not None else ()
        return others


def refusal_of(frontend: Frontend, places: Iterable[Attachment], others: Others) -> Refused | None:
    """Return why this frontend cannot have a row at these routers and switches."""
    for place in places:
        found = others.get(place, ())
        if refusal := checks.check_owner(place, found):
            return refusal
        if (other := holder(found, frontend)) is not None:
            return taken(frontend, other, place)
    return None
