"""The terms of class `fairlead.io/announce`: nodes with ready pods announce the addresses, and no
load balancer is in front of them.

In: a Service; the nodes that announce its addresses (`plan.announcing_nodes`). Out: `Terms`, and
the Findings about what the class cannot do. The service proxy of each node does the rest, so the
class serves every port of every protocol, and source ranges and session affinity are those of the
service proxy. Pure. Invariant: each limit that the owner of a Service may notice is a Finding, and
its remedy names the class that does not have the limit."""

from collections.abc import Iterable, Mapping, Sequence

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.model import AnnounceSettings, Finding, ServiceKey
from fairlead.plan import direct
from fairlead.plan.terms import ServiceContext, Terms

ANNOUNCE = "fairlead.io/announce"

CONNECTIONS_NOT_KEPT = "ConnectionsNotKept"
"""Code of a Finding: the class cannot keep connections when the announcing nodes change."""
SHARES_BY_NODE = "SharesByNode"
"""Code of a Finding: nodes have different numbers of ready pods, and get equal shares from routers
that do not use weights."""
ONE_NODE_AT_A_TIME = "OneNodeAtATime"
"""Code of a Finding: only the pods of one node get traffic."""
NO_COMMON_NODE = "NoCommonNode"
"""Code of a Finding: no node serves everything at an address, so no node announces it."""
AGGREGATION_IGNORED = "AggregationIgnored"
"""Code of a Finding: nodes announce host routes, although the pool has an aggregation length."""

_UNMODIFIED = "packets reach the nodes unmodified, so only the pods can do this"
_BY_ROUTERS = (
    "routers choose the node of each connection; for one pod per client, set spec.sessionAffinity "
    "and run gateways on the nodes (class fairlead.io/direct)"
)
_NO_DRAIN = (
    "a node that stops announcing the address gets no more packets; class fairlead.io/direct "
    "drains nodes"
)
_PROBED = "each node announces the address while its own service proxy confirms ready pods"

SUBSTITUTES: Mapping[str, str] = {
    **direct.SUBSTITUTES,
    "timeout-client-data": _UNMODIFIED,
    "timeout-member-connect": _UNMODIFIED,
    "timeout-member-data": _UNMODIFIED,
    "timeout-tcp-inspect": _UNMODIFIED,
    "connection-limit": _UNMODIFIED,
    "default-tls-container-ref": _UNMODIFIED,
    "lb-method": _BY_ROUTERS,
    "drain-timeout": _NO_DRAIN,
    "enable-health-monitor": _PROBED,
    "health-monitor-delay": _PROBED,
    "health-monitor-timeout": _PROBED,
    "health-monitor-max-retries": _PROBED,
    "health-monitor-max-retries-down": _PROBED,
    "members": "nodes with ready pods announce the address",
}
"""By short name of each annotation without effect, what class announce does instead."""

ON_NODES = "use class fairlead.io/direct, with gateways on the nodes"


def nodes_announce(config: Config) -> bool:
    """Return whether nodes announce addresses."""
    return config.announce is not None and config.node.announce


def configured(config: Config) -> Refused | None:
    """Return why the class is unavailable: nodes announce nothing."""
    if nodes_announce(config):
        return None
    missing = "node.announce to true" if config.announce is not None else "announce.method to l2 or"
    if config.announce is None:
        missing += " bgp, and node.announce to true"
    return Refused(
        f"class {ANNOUNCE} is not configured",
        fix=f"set {missing} in the configuration, or use class {direct.DIRECT}",
    )


def announced_terms(context: ServiceContext) -> Terms:
    """Return the terms of class announce. Raise Refused if no host announces addresses."""
    if refusal := configured(context.config):
        raise refusal
    return Terms(AnnounceSettings())


def limits(
    method: str,
    weights: Mapping[str, int],
    *,
    resilient: bool,
    local: bool,
    weights_announced: bool = True,
) -> Sequence[Finding]:
    """Return what the class cannot do for a Service whose addresses these nodes announce.
    `weights`: the ready pods of each announcing node. `local`: the traffic policy is Local, so a
    node serves only with its own pods. `weights_announced`: whether routers learn the weights."""
    found = [_not_kept(method, resilient)]
    several = len(weights) > 1 and local
    if several and method == "l2":
        message = (
            "one node at a time answers for the address in its network segment, so only the pods "
            "of this node get traffic from outside of the cluster"
        )
        remedy = f"{ON_NODES}, or announce.method bgp, or externalTrafficPolicy Cluster"
        found.append(Finding(ONE_NODE_AT_A_TIME, message, remedy=remedy))
    elif several and method == "bgp" and len(set(weights.values())) > 1:
        found.append(_shares_by_node(weights_announced))
    return found


def _shares_by_node(weights_announced: bool) -> Finding:
    """Return the Finding about nodes with different numbers of ready pods."""
    spread = f"spread pods evenly (topologySpreadConstraints), or {ON_NODES}"
    if weights_announced:
        reason = "routers that use neither the link bandwidth nor the communities of routes"
        ways = "enable weighted ECMP on the routers, or set nextHops of the peers, or "
    else:
        reason = "with announce.bgp.speaker routes, routers learn no weights and"
        ways = "set announce.bgp.speaker to bird, or "
    return Finding(
        SHARES_BY_NODE,
        f"nodes have different numbers of ready pods, and {reason} give each node the same share",
        remedy=f"{ways}{spread}, which gives each pod the same share",
    )


def _not_kept(method: str, resilient: bool) -> Finding:
    """Return the Finding about connections that the class cannot keep."""
    message = "the connections of a node break when it stops announcing the address"
    remedy = f"{ON_NODES}, if connections must be kept"
    if method == "bgp" and not resilient:
        message += (
            "; unless routers use resilient hashing, each change of the announcing nodes or of "
            "their weights also breaks 15 to 50 % of the other connections, so changes are "
            "collected for some seconds"
        )
        remedy += "; if the routers use resilient hashing, set announce.resilient"
    return Finding(CONNECTIONS_NOT_KEPT, message, severity="info", remedy=remedy)


def no_common_node(address: str, services: Iterable[ServiceKey]) -> Finding:
    """Return the Finding that no node announces the address, because no node has ready pods for
    everything that the address serves."""
    names = sorted(map(str, services))
    what = f"of every Service at this address ({', '.join(names)})" if names[1:] else "of all ports"
    return Finding(
        NO_COMMON_NODE,
        f"no node announces {address}: no node has ready pods {what}",
        severity="error",
        remedy="use class fairlead.io/direct, whose gateways choose a node for each port, or give "
        "each Service an address of its own",
        blocks="Ready",
    )
