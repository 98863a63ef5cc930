"""The members of a listener: which nodes, with which weight, in which state.

In: a port of a Service, its EndpointSlices, the Nodes, and the verdicts of probes. Out: Members. A
member is a node with usable pods, and its weight is their number. With policy Local no other node
can serve; with policy Cluster this saves a hop. A node gets traffic once a probe of its health port
has confirmed it, until the API or a probe reports that it cannot serve. If every probe fails
although the API shows ready pods, the plan follows the API: a broken prober must not take a Service
down. Follows KEP-1669 (terminating endpoints), KEP-3458 (the readiness of nodes is ignored) and
KEP-3836 (nodes that are about to be deleted). Invariant: pure; sorted; equal clusters give equal
values."""

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
"""Code of a Finding: every probe fails, and the plan follows the API instead."""

HEALTH_CHECKS_FLAPPING = "HealthChecksFlapping"
"""Code of a Finding: a node stopped answering more than once recently, and gets no new connections
until it has answered for a while."""

NODE_NOT_ANSWERING = "NodeNotAnswering"
"""Code of a Finding: a node with ready pods does not answer this gateway, while others answer,
and gets no new connections. If the path to the node is the cause, Kubernetes cannot detect it."""

MAX_LISTED = 5
"""The maximum number of nodes that a message names."""

NO_TUNNELS: Mapping[str, str] = MappingProxyType({})

INCLUDED = frozenset({"0", "f", "F", "false", "False", "FALSE"})
"""The texts that Go's strconv.ParseBool reads as false. With any other value, also an empty one,
the label excludes its node (Kubernetes 1.34)."""

VerdictOf = Callable[[str, int], Verdict | None]
"""(node address, health port) -> verdict."""


def node_address(node: Node, family: Family) -> str | None:
    """Return the first InternalIP of this family, at which a load balancer reaches the node; None
    if the node has none."""
    ipv6 = family == "IPv6"
    for entry in node.status.addresses:
        if entry.type == "InternalIP" and is_ipv6(entry.address) == ipv6:
            return entry.address
    return None


def leaving(node: Node) -> bool:
    """Return whether the node is being deleted, or the autoscaler is about to delete it
    (KEP-3836)."""
    return node.metadata.deletion_timestamp is not None or any(
        taint.key == AUTOSCALER_TAINT for taint in node.spec.taints
    )


def excluded(node: Node) -> bool:
    """Return whether the node must get no load-balancer traffic: it is leaving, or a label excludes
    it. The Ready condition of the node is ignored (KEP-3458): probes are more exact and faster."""
    # This runs for every endpoint, and hardly any node is leaving: test the cheap conditions first.
    metadata = node.metadata
    if (node.spec.taints or metadata.deletion_timestamp is not None) and leaving(node):
        return True
    label = metadata.labels.get(EXCLUDE_LABEL)
    return label is not None and label not in INCLUDED


class UnconfirmedMembers(NamedTuple):
    """The members of a listener according to the API alone, and the facts about its endpoints that
    `confirm` needs."""

    members: tuple[Member, ...]
    terminating_weights: Mapping[str, int]
    """The number of endpoints that terminate and still serve, by node."""
    any_ready: bool
    """Whether an endpoint is ready, on any node."""
    any_usable: bool
    """Whether an endpoint, on any node, is ready, or terminates and still serves."""
    without_address: tuple[str, ...] = ()
    """The admitted nodes that have endpoints but no address of the family, sorted."""

    @property
    def served(self) -> bool:
        """Whether a member gets new connections."""
        return any(each.weight and each.state == "active" for each in self.members)


def members_of(
    service: Service,
    port: ServicePort,
    family: Family,
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
) -> UnconfirmedMembers:
    """Return every node that has an endpoint of the port and an address of this family, in the
    state that follows from its endpoints.

    A node with ready endpoints is `active`, with their number as its weight. If no admitted node
    has a ready endpoint, endpoints that terminate and still serve count instead. Any other node is
    `draining`: it keeps its connections."""
    known = endpoints(slices, port_name=port.name, protocol=port.protocol, family=family).values()
    ready = [each.node_name or "" for each in known if each.conditions.ready is not False]
    terminating = [
        each.node_name or "" for each in known if each.conditions.terminating and each.serving
    ]
    with_endpoints = nodes.keys() & {each.node_name or "" for each in known}
    addresses = _addresses(nodes, with_endpoints, family)
    present = set(addresses)
    admitted = {name for name in present if not excluded(nodes[name])}
    terminating_weights = _counted(terminating, admitted)
    weights = _counted(ready, admitted) or terminating_weights
    if not weights and service.spec.external_traffic_policy != "Local" and (ready or terminating):
        # The usable endpoints are on no admitted node, for example because they name no node. With
        # policy Cluster every node can reach them, so the load balancer must not lose all members.
        others = [name for name, node in nodes.items() if not excluded(node)]
        reached = _addresses(nodes, others, family)
        addresses |= reached
        weights = dict.fromkeys(reached, 1)
    # A TCP connection stays with a pod that becomes unready. A UDP flow does not: the node sends it
    # to another pod at once, so it must not be kept on a node where no pod serves.
    holding = (
        present
        if port.protocol != "UDP"
        else present & {each.node_name or "" for each in known if each.serving}
    )
    members = [
        Member(name, addresses[name], weight, "active" if weight else "draining")
        for name in sorted(weights.keys() | holding)
        for weight in (weights.get(name, 0),)
    ]
    unreached = with_endpoints - present
    return UnconfirmedMembers(
        tuple(members),
        terminating_weights,
        bool(ready),
        bool(ready or terminating),
        tuple(sorted(name for name in unreached if not excluded(nodes[name]))),
    )


def _addresses(nodes: Mapping[str, Node], names: Iterable[str], family: Family) -> dict[str, str]:
    """Return the address of each of these nodes that has one of the family."""
    found = ((name, node_address(nodes[name], family)) for name in names)
    return {name: address for name, address in found if address is not None}


def _counted(names: Sequence[str], among: Set[str]) -> dict[str, int]:
    """Return how often each name that is in `among` occurs. A dict, because making a Counter takes
    longer than filling it."""
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
"""The state of a member by the verdict about its node; None: the node has not been probed yet."""

_WELL = frozenset[Verdict | None](("up", "assumed_up"))


def confirm(
    found: UnconfirmedMembers,
    monitor: HealthMonitor,
    verdict_of: VerdictOf,
    tunnels: Mapping[str, str] = NO_TUNNELS,
) -> tuple[tuple[Member, ...], list[Finding]]:
    """Return the members in the state that probes give them, with Findings about failing probes.

    Only members that are `active` according to the API change. `tunnels`: the type of tunnel, by
    the address of each node that is probed through one. The result depends on the verdicts about
    the members:
      1. At least one is `up` or `assumed_up`: each member gets the state of its verdict.
      2. Otherwise, at least one is `flapping`: the flapping members become `active`, because no
         better member is left.
      3. Otherwise, at least one has not been probed: such a member is `pending`. Pods that
         terminate and still serve give their draining nodes a weight, for the case that no pending
         node serves (see `plan.serving`). Such a node stays draining, because the pod may have
         closed its port.
      4. Otherwise no probe succeeded, and the plan follows the API. Members that are `down` stay
         `down` unless all are."""
    members = found.members
    if _WELL.issuperset(
        [verdict_of(each.address, monitor.port) for each in members if each.state == "active"]
    ):
        return members, []  # the usual case
    verdicts = {
        member: verdict_of(member.address, monitor.port)
        for member in members
        if member.state == "active"
    }
    confirmed = tuple(
        [
            _in_state(each, STATE_OF[verdicts[each]]) if each in verdicts else each
            for each in members
        ]
    )
    flapping = [member.node for member, verdict in verdicts.items() if verdict == "flapping"]
    notes = [_flapping(flapping, monitor)] if flapping and found.any_ready else []
    silent = [each for each in verdicts if verdicts[each] == "down"]
    if silent and found.any_ready and not _WELL.isdisjoint(verdicts.values()):
        notes.append(_silent(silent, monitor, tunnels))
    if not _WELL.isdisjoint(verdicts.values()):
        return confirmed, notes
    if flapping:
        return tuple(
            _in_state(each, "active") if each.node in flapping else each for each in confirmed
        ), notes
    if None in verdicts.values():
        active_by_api = {each.node for each in verdicts}
        return tuple(
            Member(
                each.node,
                each.address,
                0 if each.node in active_by_api else found.terminating_weights.get(each.node, 0),
                "draining",
            )
            if each.state == "draining" and verdict_of(each.address, monitor.port) != "down"
            else each
            for each in confirmed
        ), []
    answering = {
        member for member in verdicts if verdict_of(member.address, monitor.port) != "down"
    }
    note = Finding(
        HEALTH_CHECKS_FAILING,
        f"no node with ready pods answers 200 at its health port {monitor.port} "
        f"({_paths(verdicts, tunnels)}); "
        "traffic goes to these nodes, because the API shows their pods as ready",
        remedy=_to_check(verdicts, tunnels),
    )
    # If all pods terminate, every health port correctly answers 503 (KEP-1669): no Finding.
    notes = [note] if found.any_ready else []
    # A node that does not answer at all is the worst choice, unless there is no other node.
    if answering:
        return tuple(
            _in_state(each, "down") if each in verdicts and each not in answering else each
            for each in members
        ), notes
    return members, notes


def listed(texts: Sequence[str]) -> str:
    """Return the first texts, and the number of the others. An Event holds 1,024 characters, and
    its remedy comes last."""
    more = f" and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return ", ".join(texts[:MAX_LISTED]) + more


def _paths(members: Collection[Member], tunnels: Mapping[str, str]) -> str:
    """Return the nodes with their addresses, and with the tunnels through which they are
    probed."""
    return listed(
        [
            f"{each.node} ({each.address})"
            + (f" through the {tunnels[each.address]} tunnel" if each.address in tunnels else "")
            for each in members
        ]
    )


def _to_check(members: Iterable[Member], tunnels: Mapping[str, str]) -> str:
    """Return what the operator should check if these nodes do not answer."""
    carried = {"ipip": "IP protocols 4 and 41", "vxlan": "the tunnel's UDP port"}
    kinds = {tunnels[each.address] for each in members if each.address in tunnels}
    if not kinds:
        return "check the gateway's routes to the nodes, the service proxy there, and firewalls"
    protocols = " and ".join(carried[kind] for kind in sorted(kinds))
    return (
        "check that `fairlead node` runs there in the gateway's version, that its `tunnel` "
        "section is the same and names the "
        f"gateway, and that firewalls between gateway and nodes allow {protocols}"
    )


def _silent(
    silent: Sequence[Member], monitor: HealthMonitor, tunnels: Mapping[str, str]
) -> Finding:
    """Return the Finding about nodes that do not answer. It does not change while the nodes are the
    same."""
    message = (
        f"no answer from the health port {monitor.port} of {_paths(silent, tunnels)}: no "
        "new connections are sent there"
    )
    return Finding(NODE_NOT_ANSWERING, message, remedy=_to_check(silent, tunnels))


def _flapping(names: Sequence[str], monitor: HealthMonitor) -> Finding:
    """Return the Finding about flapping nodes. It does not change while the nodes are the same."""
    message = f"the health port {monitor.port} of {listed(names)} repeatedly stops answering"
    remedy = "check the service proxy, the load and the network of the node"
    return Finding(
        HEALTH_CHECKS_FLAPPING,
        f"{message}: no new connections until it has answered for a while",
        remedy=remedy,
    )


def _in_state(member: Member, state: MemberState) -> Member:
    return Member(member.node, member.address, member.weight, state)
