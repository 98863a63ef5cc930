"""Which nodes are members of a listener, with which weight, in which state.

In: a Service's port, its EndpointSlices, the Nodes, and what probes of the nodes have shown. Out:
Members. Members are nodes with usable pods, weighted by their number, under policy Local by
obligation and under Cluster because it saves the hop. A node enters once its health port has
confirmed it and leaves on the API's word or on failed probes, whichever is first; if no probe
succeeds although the API shows usable pods, the API is believed: a broken prober must not take a
service down. Follows KEP-1669 (terminating endpoints), KEP-3458 (readiness of nodes does not
count), KEP-3836 (leaving nodes). Invariant: pure; sorted; equal clusters give equal values."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

from fairlead.kube.objects import (
    AUTOSCALER_TAINT,
    EXCLUDE_LABEL,
    EndpointSlice,
    Node,
    Service,
    ServicePort,
)
from fairlead.model import Family, Finding, HealthMonitor, Member, MemberState, Verdict
from fairlead.net.address import is_ipv6
from fairlead.plan.endpoints import endpoints

HEALTH_CHECKS_FAILING = "HealthChecksFailing"
"""Code of the Finding that says: every probe fails, the API is believed instead."""

HEALTH_CHECKS_FLAPPING = "HealthChecksFlapping"
"""Code of the Finding that says: a node ceases to answer again and again, and gets nothing new
until it is well for a while."""

NODE_NOT_ANSWERING = "NodeNotAnswering"
"""Code of a Finding: a node with ready pods does not answer this gateway, while others answer,
and gets no new connections. If the path to the node is the cause, Kubernetes cannot detect it."""

MOST_LISTED = 5
"""So many nodes are named in a message."""

NO_TUNNELS: Mapping[str, str] = MappingProxyType({})

INCLUDED = frozenset({"0", "f", "F", "false", "False", "FALSE"})
"""What Go's strconv.ParseBool takes for false. The label with any other value, or none, excludes
(Kubernetes 1.34)."""

VerdictOf = Callable[[str, int], Verdict | None]
"""(node address, health port) -> verdict."""


def node_address(node: Node, family: Family) -> str | None:
    """The node's InternalIP of that family, by which the balancer reaches it."""
    ipv6 = family == "IPv6"
    for entry in node.status.addresses:
        if entry.type == "InternalIP" and is_ipv6(entry.address) == ipv6:
            return entry.address
    return None


def leaving(node: Node) -> bool:
    """Whether the node is on its way out: being deleted, or about to be by the autoscaler
    (KEP-3836)."""
    return node.metadata.deletion_timestamp is not None or any(
        taint.key == AUTOSCALER_TAINT for taint in node.spec.taints
    )


def excluded(node: Node) -> bool:
    """Whether the node must get no load-balancer traffic: it is leaving, or excluded by label.
    Readiness does not count here (KEP-3458): probes know better and sooner."""
    # Asked for every endpoint there is, and of nodes of which hardly any is leaving.
    metadata = node.metadata
    if (node.spec.taints or metadata.deletion_timestamp is not None) and leaving(node):
        return True
    label = metadata.labels.get(EXCLUDE_LABEL)
    return label is not None and label not in INCLUDED


class UnconfirmedMembers(NamedTuple):
    """Members of a listener on the API's word, and what of its endpoints matters once probes have
    their say."""

    members: tuple[Member, ...]
    leaving_weights: Mapping[str, int]
    """By node, endpoints that are about to go and still serve."""
    any_ready: bool
    """Whether any endpoint is ready, on whatever node."""
    any_usable: bool
    """Whether any endpoint, on any node, is ready or serves while it terminates."""


def members_of(
    service: Service,
    port: ServicePort,
    family: Family,
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
) -> tuple[UnconfirmedMembers, list[Finding]]:
    """Every node that has an endpoint of the port, in the state that its endpoints put it in."""
    known = endpoints(slices, port_name=port.name, protocol=port.protocol, family=family).values()
    ready = [each.node_name or "" for each in known if each.conditions.ready is not False]
    leaving = [
        each.node_name or "" for each in known if each.conditions.terminating and each.serving
    ]
    there = nodes.keys() & {each.node_name or "" for each in known}
    admitted = {name for name in there if not excluded(nodes[name])}
    leaving_weights = _counted(leaving, admitted)
    weights = _counted(ready, admitted) or leaving_weights
    if not weights and service.spec.external_traffic_policy != "Local" and (ready or leaving):
        # Endpoints that name no node: any node can reach them, and a VIP must not vanish because of
        # them.
        weights = {name: 1 for name, node in nodes.items() if not excluded(node)}
    # A connection outlives the readiness of its pod. A flow of datagrams does not: nodes hand it to
    # another pod at once, so that it must not be kept on a node where nobody serves.
    holding = (
        there
        if port.protocol != "UDP"
        else there & {each.node_name or "" for each in known if each.serving}
    )
    notes, members = [], []
    for name in sorted(weights.keys() | holding):
        if (address := node_address(nodes[name], family)) is None:
            message = (
                f"node {name} has pods of this Service but no {family} InternalIP, and "
                f"gets no traffic over {family}"
            )
            notes.append(
                Finding(
                    "NodeAddressMissing",
                    message,
                    remedy="does its kubelet know the address (--node-ip)?",
                )
            )
        else:
            weight = weights.get(name, 0)
            members.append(Member(name, address, weight, "active" if weight else "draining"))
    return UnconfirmedMembers(
        tuple(members), leaving_weights, bool(ready), bool(ready or leaving)
    ), notes


def _counted(names: Sequence[str], among: Set[str]) -> dict[str, int]:
    """How often each of those among them occurs; a Counter takes longer to make than to fill."""
    counts: dict[str, int] = {}
    for name in names:
        if name in among:
            counts[name] = counts.get(name, 0) + 1
    return counts


STATE_OF: Mapping[Verdict | None, MemberState] = {
    "up": "active",
    "assumed_up": "active",
    "unready": "draining",
    "flapping": "draining",
    "down": "down",
    "probe_failed": "pending",
    None: "pending",
}
_WELL = frozenset[Verdict | None](("up", "assumed_up"))


def confirm(
    found: UnconfirmedMembers,
    monitor: HealthMonitor,
    verdict_of: VerdictOf,
    tunnels: Mapping[str, str] = NO_TUNNELS,
) -> tuple[tuple[Member, ...], list[Finding]]:
    """Combine the API's statements with the results of probes. `tunnels`: the kind of tunnel by the
    address of each node that is probed through one.

    While no node is confirmed and some have not been asked yet, the members that have not been
    asked are `pending`. Terminating pods that still serve give their draining nodes a weight then,
    for the case that no pending node serves (see `plan.serving`); the nodes stay draining, because
    such a pod may have closed its port already. If all have been asked and none is confirmed, the
    probes are not believed."""
    members = found.members
    if _WELL.issuperset(
        [verdict_of(each.address, monitor.port) for each in members if each.state == "active"]
    ):
        return members, []  # mostly it is so
    proved = {
        member: verdict_of(member.address, monitor.port)
        for member in members
        if member.state == "active"
    }
    confirmed = tuple(
        [_in_state(each, STATE_OF[proved[each]]) if each in proved else each for each in members]
    )
    flapping = [member.node for member, verdict in proved.items() if verdict == "flapping"]
    notes = [_flapping(flapping, monitor)] if flapping and found.any_ready else []
    silent = [each for each in proved if proved[each] == "down"]
    if silent and found.any_ready and not _WELL.isdisjoint(proved.values()):
        notes.append(_silent(silent, monitor, tunnels))
    if not _WELL.isdisjoint(proved.values()):
        return confirmed, notes
    if flapping:  # better than nobody
        return tuple(
            _in_state(each, "active") if each.node in flapping else each for each in confirmed
        ), notes
    if None in proved.values():
        asked = {each.node for each in proved}
        return tuple(
            Member(
                each.node,
                each.address,
                0 if each.node in asked else found.leaving_weights.get(each.node, 0),
                "draining",
            )
            if each.state == "draining" and verdict_of(each.address, monitor.port) != "down"
            else each
            for each in confirmed
        ), []
    answering = {member for member in proved if verdict_of(member.address, monitor.port) != "down"}
    note = Finding(
        HEALTH_CHECKS_FAILING,
        f"no node with ready pods answers 200 at its health port {monitor.port} "
        f"({_ways(proved, tunnels)}); "
        "traffic goes to these nodes, because the API shows their pods as ready",
        remedy=_to_check(proved, tunnels),
    )
    # Where all pods are on their way out every health port says 503, as it should (KEP-1669).
    notes = [note] if found.any_ready else []
    # A node that answers nothing at all is the worst choice, unless there is no other.
    if answering:
        return tuple(
            _in_state(each, "down") if each in proved and each not in answering else each
            for each in members
        ), notes
    return members, notes


def listed(texts: Sequence[str]) -> str:
    """The first texts, and the number of the others: an Event has 1,024 characters, and its remedy
    comes last."""
    more = f" and {len(texts) - MOST_LISTED} more" if len(texts) > MOST_LISTED else ""
    return ", ".join(texts[:MOST_LISTED]) + more


def _ways(members: Collection[Member], tunnels: Mapping[str, str]) -> str:
    """These nodes with their addresses, and with the tunnel through which each is probed, if
    any."""
    return listed(
        [
            f"{each.node} ({each.address})"
            + (f" through the {tunnels[each.address]} tunnel" if each.address in tunnels else "")
            for each in members
        ]
    )


def _to_check(members: Iterable[Member], tunnels: Mapping[str, str]) -> str:
    """What the operator should check when these nodes do not answer."""
    carried = {"ipip": "IP protocols 4 and 41", "vxlan": "the tunnel's UDP port"}
    kinds = {tunnels[each.address] for each in members if each.address in tunnels}
    if not kinds:
        return "check the gateway's routes to the nodes, the service proxy there, and firewalls"
    let = " and ".join(carried[kind] for kind in sorted(kinds))
    return (
        "check that `fairlead node` runs there in the gateway's version, that its `tunnel` "
        "section is the same and names the "
        f"gateway, and that firewalls between gateway and nodes let {let} pass"
    )


def _silent(
    silent: Sequence[Member], monitor: HealthMonitor, tunnels: Mapping[str, str]
) -> Finding:
    """The Finding does not change while the same nodes do not answer."""
    message = (
        f"no answer from the health port {monitor.port} of {_ways(silent, tunnels)}: no "
        "new connections go there"
    )
    return Finding(NODE_NOT_ANSWERING, message, remedy=_to_check(silent, tunnels))


def _flapping(names: Sequence[str], monitor: HealthMonitor) -> Finding:
    """The same for as long as the same nodes flap."""
    message = f"the health port {monitor.port} of {listed(names)} ceases to answer again and again"
    remedy = "look at the service proxy, the load and the network there"
    return Finding(
        HEALTH_CHECKS_FLAPPING,
        f"{message}: no new connections go there until it has answered for a while",
        remedy=remedy,
    )


def _in_state(member: Member, state: MemberState) -> Member:
    return Member(member.node, member.address, member.weight, state)
