"""Which gateways can take over the addresses of one whose node may still serve them.

In: the Nodes, the addresses of the other gateways that are alive. Out: the names of the Nodes whose
gateways can take addresses over; a Node without the mark that excludes it. Pure.

A node that is excluded from external load balancers hands its addresses over first, and loses its
weight a moment later. A connection that is being opened while its packets move to another gateway
is unknown there; if the tables changed at the same moment, the connection would reach another node
than before. A cordoned node is about to be drained and rebooted, so its gateway hands its addresses
over as well, but only if another gateway can take them: a cluster whose nodes are all cordoned
stays reachable. The same holds for a node whose network is not ready. Whether another gateway may
announce a particular address depends on the pool of the address (`plan.announce`). Pods of a
cordoned node still get connections while they are ready, as Kubernetes expects it (KEP-3458)."""

from collections.abc import Collection, Mapping

import msgspec

from fairlead.kube.objects import AUTOSCALER_TAINT, EXCLUDE_LABEL, Node
from fairlead.plan.announce import must_not_announce


def yields_to_others(node: Node) -> bool:
    """Return whether the gateway of this Node hands over the addresses that others can take."""
    return node.spec.unschedulable or node.status.without_network


def takers_of(own: str, nodes: Mapping[str, Node], alive: Collection[str]) -> frozenset[str]:
    """Return the names of the Nodes whose gateways can take addresses of the gateway `own` over.
    `alive`: addresses of the other gateways that are alive."""
    return frozenset(
        name
        for name, other in nodes.items()
        if name != own and not other.spec.unschedulable and not must_not_announce(other)
        if any(entry.address in alive for entry in other.status.addresses)
    )


def without_exclusion(node: Node) -> Node:
    """Return the Node without the label and the taint that exclude it."""
    labels = {key: text for key, text in node.metadata.labels.items() if key != EXCLUDE_LABEL}
    taints = tuple(each for each in node.spec.taints if each.key != AUTOSCALER_TAINT)
    return msgspec.structs.replace(
        node,
        metadata=msgspec.structs.replace(node.metadata, labels=labels),
        spec=msgspec.structs.replace(node.spec, taints=taints),
    )
