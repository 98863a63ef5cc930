"""Whether the service proxy of a node serves a Service, according to the node's own health port.

In: the verdicts of the probes of one health port, with the time. Out: whether the node may announce
the addresses. A node begins to announce only once its health port answers 200, because the service
proxy answers so after it has installed the rules. While it announces, a health port that does not
answer is tolerated for `HOLD_S`: a service proxy that is restarted leaves its rules in the kernel,
and a withdrawal would break all connections of the node. That pods are not ready any more is known
from the API at once. Pure: the time is an argument."""

import math
from typing import NamedTuple

from fairlead.model import Verdict

HOLD_S = 30.0
"""How long a confirmed service proxy may not answer before it counts as gone."""
_GOOD = frozenset[Verdict | None](("up", "assumed_up"))


class Confirmation(NamedTuple):
    """The state of one health port. `confirmed`: the node may announce. `lost_s`: since when the
    port has not answered well; infinity while it does, or was never confirmed."""

    confirmed: bool = False
    lost_s: float = math.inf

    @property
    def due_s(self) -> float:
        """When the confirmation ends unless the port answers again; infinity: never."""
        return self.lost_s + HOLD_S


def confirm(before: Confirmation, verdict: Verdict | None, now_s: float) -> Confirmation:
    """Return the state after this verdict."""
    if verdict in _GOOD:
        return Confirmation(confirmed=True)
    if not before.confirmed:
        return Confirmation()
    lost_s = min(before.lost_s, now_s)
    return (
        Confirmation(confirmed=True, lost_s=lost_s) if now_s < lost_s + HOLD_S else Confirmation()
    )
