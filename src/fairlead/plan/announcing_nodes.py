"""The nodes that announce an address of class `fairlead.io/announce`, and their weights.

In: the Services that show the address, their EndpointSlices, the Nodes. Out: the weight of each
node that serves everything at the address. A node that announces an address gets the packets for
all its ports, so it must serve every port of every Service there.

With policy Local, a node serves a port if it has ready pods; if no node has any, pods that still
serve while they terminate count (KEP-1669). The weight of the node is the number of these pods.
With policy Cluster, every admitted node serves the port, and nodes have no weights (0). A port
without any usable pod counts for no node: otherwise a port that nothing serves would withdraw the
others.

A cordoned node is about to be drained and rebooted. It announces the address as long as it has pods
of the Services, because these still serve (KEP-3458). A cordoned node without pods, which announces
because of policy Cluster alone, leaves the address to other nodes, so that its reboot loses
nothing. If only such nodes are left, they announce: a cluster whose nodes are all cordoned stays
reachable.

Pure. Invariant: the result depends on objects of the cluster alone, so all nodes compute the same
one."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from fairlead.kube.objects import Endpoint, Node, Service, ServicePort
from fairlead.model import ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.addresses import shown_by
from fairlead.plan.endpoints import endpoints
from fairlead.plan.view import Cluster

NO_WEIGHT = 0
"""The weight of nodes that can all serve every connection."""


class AnnouncingNodes(NamedTuple):
    """The nodes that announce one address."""

    weights: Mapping[str, int]
    """By node that serves everything at the address, the number of its pods; 0 with policy Cluster.
    Sorted by node."""
    local: bool = False
    """At least one Service at the address has policy Local."""
    disjoint: Collection[ServiceKey] = ()
    """The Services at the address, if there are usable pods, but no node serves everything."""
    retiring: Mapping[str, int] = {}
    """By node that does not count any more, because other nodes have ready pods, but whose pods
    still serve everything while they terminate, the number of these pods."""
    idle: Collection[ServiceKey] = ()
    """The Services at the address that have no ready pod on any of these nodes."""


def announcing_nodes(
    cluster: Cluster, address: str, services: Sequence[Service], nodes: Mapping[str, Node]
) -> AnnouncingNodes:
    """Return which of these nodes announce the address, on which these Services are served."""
    family = family_of(address)
    serving: list[Sequence[Mapping[str, int]]] = []
    lasting: list[Sequence[Mapping[str, int]]] = []
    occupied: set[str] = set()
    idle: list[ServiceKey] = []
    for service in services:
        slices = cluster.slices_of(service.key)
        ports = [
            endpoints(slices, port_name=each.name, protocol=each.protocol, family=family).values()
            for each in _served_ports(service, address)
        ]
        served = [(each, now) for each in ports if (now := _serving(service, each, nodes))]
        serving.append([now for _, now in served])
        lasting.append([_lasting(service, each, nodes) for each, _ in served])
        occupied |= {each.node_name or "" for found in ports for each in found if _usable(each)}
        if not any(_is_ready(service, each, nodes) for found in ports for each in found):
            idle.append(service.key)
    weights = _in_common(serving)
    retiring = {name: count for name, count in _in_common(lasting).items() if name not in weights}
    keys = sorted(each.key for each in services)
    staying = _without_idle(weights, occupied, nodes)
    return AnnouncingNodes(
        {name: weights[name] for name in staying},
        any(map(is_local, services)),
        keys if any(serving) and not weights else (),
        retiring,
        tuple(idle),
    )


def _in_common(services: Sequence[Sequence[Mapping[str, int]]]) -> Mapping[str, int]:
    """Return the nodes that every port has, sorted, with the number of their pods. `services`: for
    each Service, the nodes of each port."""
    ports = [set(port) for some in services for port in some]
    names = set.intersection(*ports) if ports else set()
    return {
        name: sum(max(port[name] for port in some) for some in services if some)
        for name in sorted(names)
    }


def is_local(service: Service) -> bool:
    """Return whether a node may serve the Service with its own pods only."""
    return service.spec.external_traffic_policy == "Local"


def _without_idle(
    names: Collection[str], occupied: Collection[str], nodes: Mapping[str, Node]
) -> Collection[str]:
    """Return these nodes without cordoned ones that have no pods, unless no other node is left.
    `occupied`: the nodes that have usable pods."""
    staying = [each for each in names if each in occupied or not nodes[each].spec.unschedulable]
    return staying or names


def _usable(endpoint: Endpoint) -> bool:
    """Return whether the pod is ready, or serves while it terminates."""
    ready, serving, terminates = endpoint.state
    return ready or (serving and terminates)


def _is_ready(service: Service, endpoint: Endpoint, nodes: Mapping[str, Node]) -> bool:
    """Return whether the pod is ready, and one of these nodes may serve with it."""
    ready, _, _ = endpoint.state
    return ready and (not is_local(service) or endpoint.node_name in nodes)


def _serving(
    service: Service, found: Iterable[Endpoint], nodes: Mapping[str, Node]
) -> Mapping[str, int]:
    """Return the nodes that serve a port with these endpoints, each with its weight."""
    states = [(each.node_name or "", *each.state) for each in found]
    if not is_local(service):
        usable = any(ready or (serving and ends) for _, ready, serving, ends in states)
        return dict.fromkeys(nodes, NO_WEIGHT) if usable else {}
    here = [each for each in states if each[0] in nodes]
    ready_on = [name for name, ready, _, _ in here if ready]
    return Counter(ready_on or [name for name, _, serving, ends in here if serving and ends])


def _lasting(
    service: Service, found: Iterable[Endpoint], nodes: Mapping[str, Node]
) -> Mapping[str, int]:
    """Return the nodes that serve a port with pods that are ready or terminate."""
    if not is_local(service):
        return dict.fromkeys(nodes, NO_WEIGHT)
    names = [each.node_name or "" for each in found if _usable(each)]
    return Counter(name for name in names if name in nodes)


def _served_ports(service: Service, address: str) -> Sequence[ServicePort]:
    """Return the ports that the status of the Service shows as served at the address."""
    shown = shown_by(service).get(address, frozenset())
    return [each for each in service.spec.ports if f"{each.protocol}/{each.port}" in shown]
