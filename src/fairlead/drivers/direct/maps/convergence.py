"""New listeners, whose tables may still differ between gateways.

In: listeners as their tables take effect. Out: the listeners that have converged.

Gateways see changes of nodes at slightly different times. If a listener's table changes before its
first packet, its previous table records nothing of the change. So a connection may be opened by a
table that only one gateway ever had, and no other gateway would look for its flow entry. Therefore
every connection of a new listener is tracked, and gateways send these flow entries to each other.
After all gateways have had the same tables for a while, the slots that had different nodes are in
transition, and tracked. The connections of the other slots need no flow entry.
"""

import math
from collections.abc import Callable

from fairlead.drivers.direct.maps.mirror import InstalledListener
from fairlead.drivers.direct.spec import ListenerKey

CONVERGENCE_S = 10.0
"""Time without a change of a listener's tables after which all gateways count as having the same
tables."""
BATCH = 256
"""Listeners that one call of `take_converged` returns at most."""


class Convergence:
    """The converging listeners of this gateway.

    `peers`: whether there are other gateways. Without peers a listener converges immediately.
    """

    def __init__(self, peers: bool, clock: Callable[[], float]) -> None:
        self.peers = peers
        self._clock = clock
        self._since_s: dict[ListenerKey, float] = {}

    def record(
        self, key: ListenerKey, new: InstalledListener, old: InstalledListener | None
    ) -> None:
        """Record that `new` has taken effect in place of `old`."""
        if new.record.converging and (
            key not in self._since_s or old is None or old.slots != new.slots
        ):
            self._since_s[key] = self._clock() if self.peers else -math.inf

    def take_converged(self) -> list[ListenerKey]:
        """Return listeners that have converged. Each listener is returned once."""
        end_s = self._clock() - CONVERGENCE_S
        keys = [key for key, since_s in self._since_s.items() if since_s <= end_s][:BATCH]
        for key in keys:
            del self._since_s[key]
        return keys
