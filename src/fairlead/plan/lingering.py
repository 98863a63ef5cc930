"""How long a node continues to serve a Service with the pods of all nodes after the policy of the
Service has changed from Cluster to Local.

In: the policy, whether this node announces an address of the Service, the time. Out: whether the
node still serves the Service as with policy Cluster. When the policy changes to Local, a node
without pods withdraws the address, but its packets still arrive until all routers have removed the
route, or until all neighbors have the new owner. A node that drops them fails connections that
began before the withdrawal was known. Pods do not learn the addresses of the clients of these
packets, as before the change. Pure: the time is an argument.

Invariant: only a node that has announced the address with policy Cluster serves like this, and only
for `LINGER_S`; a node that announces the address with policy Local uses its own pods at once."""

import math
from typing import NamedTuple

LINGER_S = 10.0
"""Longer than routers take to remove a route, also if they pass it on to others."""


class Lingering(NamedTuple):
    """A Service whose packets may arrive at this node because of policy Cluster. `until_s`: until
    when the node serves them; infinity while the policy is Cluster."""

    until_s: float = math.inf


def linger(
    before: Lingering | None, now_s: float, *, local: bool, announces: bool
) -> Lingering | None:
    """Return the state now; None: the node serves the Service according to its policy. `local`: the
    policy is Local. `announces`: this node announces an address of the Service now."""
    if not local:
        return Lingering() if announces or before is not None else None
    if before is None or announces:
        return None
    until_s = min(before.until_s, now_s + LINGER_S)
    return Lingering(until_s) if now_s < until_s else None
