"""Listeners of which other gateways may not have the same tables yet: all their connections get
entries.

In: listeners as they are put into force, and whether there are other gateways. Out: which are
converging, and whose time is over. Gateways learn of nodes in moments of their own. What a listener goes
through before its first packet leaves no past to tell apart, so a connection may be opened by
tables that only one gateway ever had, and no slot of another would ask where it is. It has an entry
instead, which the others are told of; by the time that they all have had the same tables for a
while, slots that went through others in between are in transition, and tracked, and the rest need
nothing."""

import math
from collections.abc import Callable

from fairlead.drivers.direct.maps.mirror import InstalledListener
from fairlead.drivers.direct.spec import ListenerKey

CONVERGENCE_S = 10.0
"""A listener's tables have been the same for so long before all gateways are taken to have the
same."""
BATCH = 256


class Convergence:
    """peers: there are other gateways; without them nothing is converging for long."""

    def __init__(self, peers: bool, clock: Callable[[], float]) -> None:
        self.peers = peers
        self._clock = clock
        self._since_s: dict[ListenerKey, float] = {}

    def record(
        self, key: ListenerKey, new: InstalledListener, old: InstalledListener | None
    ) -> None:
        """What has been put into force, and what was there before it."""
        if new.record.converging and (
            key not in self._since_s or old is None or old.slots != new.slots
        ):
            self._since_s[key] = self._clock() if self.peers else -math.inf

    def take_converged(self) -> list[ListenerKey]:
        """Some whose tables have been the same for long enough; each is named once."""
        end_s = self._clock() - CONVERGENCE_S
        keys = [key for key, since_s in self._since_s.items() if since_s <= end_s][:BATCH]
        for key in keys:
            del self._since_s[key]
        return keys
