"""Findings for the owner of a Service, about its endpoints and the nodes that have them.

In: a Service that has addresses, its EndpointSlices, the Nodes, the members of its listeners. Out:
Findings. Each message states the problem and ends with the remedy, because `kubectl describe` shows
only the message. Invariants: pure. A Finding blocks Ready exactly if a listener has no member that
gets new connections. A Finding does not change while its cause lasts, so it contains no number that
varies, such as the number of pods. Follows what kube-proxy and the upstream service controller do
with such Services."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from fairlead.kube.objects import HEADLESS_LABEL, EndpointSlice, Node, Service, ServicePort
from fairlead.model import Family, Finding
from fairlead.plan.endpoints import candidates, usable
from fairlead.plan.members import UnconfirmedMembers, excluded
from fairlead.plan.notes import NO_NODES, NO_READY_ENDPOINTS

NO_ADDRESS = "NodeAddressMissing"
WITHOUT_NODE = "EndpointsWithoutNode"
NODE_GONE = "EndpointsOfMissingNode"
MAX_NAMES = 5

NO_TRAFFIC = "with externalTrafficPolicy Local they get no traffic from outside the cluster"
INCLUDE = (
    "place pods on another node, or remove the label "
    "node.kubernetes.io/exclude-from-external-load-balancers"
)
SELECT = "place pods on nodes with these labels, or change the node selector"
PLACE = "place pods on another node"
NODE_IP = "check that its kubelet knows the address (--node-ip)"
NAME_NODES = "set nodeName in their EndpointSlice, or set externalTrafficPolicy to Cluster"


class PlannedListener(NamedTuple):
    """A port of a Service in one family, and its members according to the API."""

    family: Family
    port: ServicePort
    found: UnconfirmedMembers


class Nodes(NamedTuple):
    """All nodes, and those that the class of the Service admits as members."""

    every: Mapping[str, Node]
    selected: Mapping[str, Node]


def endpoint_notes(
    service: Service,
    listeners: Sequence[PlannedListener],
    slices: Sequence[EndpointSlice],
    nodes: Nodes,
) -> list[Finding]:
    """Return Findings about the listeners that clients outside the cluster cannot use, or not
    fully. Each Finding names its ports, unless it is about all ports in all families."""
    by_finding: dict[Finding, list[str]] = {}
    for each in listeners:
        for note in _notes_about(service, each, slices, nodes):
            by_finding.setdefault(note, []).append(
                f"{each.port.port}/{each.port.protocol} ({each.family})"
            )
    return [
        note
        if len(where) == len(listeners)
        else msgspec.structs.replace(note, message=f"{_listed(where)}: {note.message}")
        for note, where in by_finding.items()
    ]


def _notes_about(
    service: Service, listener: PlannedListener, slices: Sequence[EndpointSlice], nodes: Nodes
) -> Iterator[Finding]:
    family, port, found = listener
    known = candidates(slices, port_name=port.name, protocol=port.protocol, family=family)
    chosen = usable(known)
    names = {each.node for each in chosen}
    local = service.spec.external_traffic_policy == "Local"
    if not chosen:
        message, remedy = _none_ready(service) if known else _none(service, port, family, slices)
        yield Finding(
            NO_READY_ENDPOINTS,
            message,
            severity="error",
            remedy=remedy,
            blocks="Ready",
            at_start=True,
        )
    elif not found.served:
        yield _unserved_local(names, family, nodes) if local else _unserved(family, nodes)
    else:
        if found.without_address:
            yield _without_address(found.without_address, family)
        if local:
            yield from _left_out(names, nodes)


def _left_out(names: Set[str], nodes: Nodes) -> Iterator[Finding]:
    """Yield Findings about endpoints that get no traffic while others do. `names`: the nodes that
    the endpoints name; an empty text: no node."""
    if "" in names:
        yield Finding(
            WITHOUT_NODE, f"some of its endpoints name no node: {NO_TRAFFIC}", remedy=NAME_NODES
        )
    if gone := names - nodes.every.keys() - {""}:
        yield Finding(
            NODE_GONE,
            f"some of its endpoints are on {_listed(gone)}, not in the cluster: {NO_TRAFFIC}",
            remedy="delete the pods of nodes that are gone, or correct nodeName in the "
            "EndpointSlice",
        )


def _unserved_local(names: Set[str], family: Family, nodes: Nodes) -> Finding:
    """Return why none of the nodes that have usable endpoints is a member, with policy Local.
    `names`: as for `_left_out`."""
    present = names & nodes.every.keys()
    gone = names - present - {""}
    barred = {name for name in present if excluded(nodes.every[name])}
    unselected = present - barred - nodes.selected.keys()
    reachable = present - barred - unselected
    if not gone and not barred and not unselected:
        if not reachable:
            return Finding(
                WITHOUT_NODE,
                f"its endpoints name no node: {NO_TRAFFIC}",
                severity="error",
                remedy=NAME_NODES,
                blocks="Ready",
            )
        if "" not in names:
            without = _without_address(sorted(reachable), family)
            return msgspec.structs.replace(without, severity="error", blocks="Ready")
    causes = [
        (barred, "excluded by label or about to be deleted", INCLUDE),
        (unselected, "without the labels of the node selector", SELECT),
        (reachable, f"without an {family} InternalIP", NODE_IP),
        (gone, "not in the cluster", PLACE),
    ]
    where = [f"{_listed(found)}, {cause}" for found, cause, _ in causes if found]
    remedies = [remedy for found, _, remedy in causes if found]
    if "" in names:
        where.append("nodes that their EndpointSlice does not name")
        remedies.append(NAME_NODES)
    return _no_nodes(f"its pods are ready on {'; on '.join(where)}", "; ".join(remedies))


def _unserved(family: Family, nodes: Nodes) -> Finding:
    """Return why no node is a member although there are usable endpoints, with policy Cluster."""
    if not nodes.every:
        return _no_nodes("there is no Node", "add a node")
    admitted = {name for name, node in nodes.every.items() if not excluded(node)}
    if not admitted:
        return _no_nodes("every node is excluded by label or about to be deleted", INCLUDE)
    if not admitted & nodes.selected.keys():
        why = "no node that is not excluded has the labels of the node selector"
        return _no_nodes(why, "change the node selector, or the labels of nodes")
    return Finding(
        NO_ADDRESS,
        f"no node has an {family} InternalIP, so there is no traffic over {family}",
        severity="error",
        remedy="check that the kubelets know their addresses (--node-ip)",
        blocks="Ready",
    )


def _without_address(names: Sequence[str], family: Family) -> Finding:
    nodes, have, get = ("node", "has", "gets") if len(names) == 1 else ("nodes", "have", "get")
    return Finding(
        NO_ADDRESS,
        f"{nodes} {_listed(names)} {have} pods of this Service but no {family} InternalIP, and "
        f"{get} no traffic over {family}",
        remedy=NODE_IP,
    )


def _no_nodes(why: str, remedy: str) -> Finding:
    return Finding(
        NO_NODES,
        f"There are no available nodes for LoadBalancer: {why}",
        severity="error",
        remedy=remedy,
        blocks="Ready",
    )


def _pods(service: Service) -> str:
    """Return the command that shows the pods of the Service; empty if it has no selector."""
    selector = (service.spec.selector or {}).items()
    labels = ",".join(f"{key}={value}" for key, value in sorted(selector))
    return f"kubectl get pods -n {service.metadata.namespace} -l {labels}" if labels else ""


def _none_ready(service: Service) -> tuple[str, str]:
    """Return the message and the remedy for a port of which no endpoint is usable."""
    message = "it has endpoints, and none of them is ready"
    if pods := _pods(service):
        return message, f"see `{pods}` and the readiness probes of the pods"
    return message, "see the controller that writes its EndpointSlices"


def _none(
    service: Service, port: ServicePort, family: Family, slices: Sequence[EndpointSlice]
) -> tuple[str, str]:
    """Return the message and the remedy for a port without an endpoint."""
    pods = _pods(service)
    if filled := [each for each in slices if each.endpoints]:
        of_family = [each for each in filled if each.address_type == family]
        if not of_family:
            return _other_types(sorted({each.address_type for each in filled}), family, bool(pods))
        return _other_ports(port, of_family, bool(pods))
    if pods:
        # A pod gets an endpoint only once it has an address, and Fairlead does not watch pods: the
        # remedy has to cover both causes.
        return (
            "it has no endpoint",
            f"see `{pods}`; if it shows no pod, make spec.selector match the labels of the pods; "
            "pods without an IP are waiting for a node, an image or a volume",
        )
    if slices:
        return "its EndpointSlices have no endpoint", "see the controller that writes them"
    return (
        "it has neither a selector nor an EndpointSlice",
        "create an EndpointSlice with the label kubernetes.io/service-name, and without the label "
        f"{HEADLESS_LABEL}; an Endpoints object counts only once the control plane has mirrored it "
        "into an EndpointSlice",
    )


def _other_types(types: Sequence[str], family: Family, pods: bool) -> tuple[str, str]:
    """Return the message and the remedy if endpoints have only addresses of these other types."""
    message = f"no endpoint has an {family} address: the addressType of its EndpointSlices is "
    if pods:
        remedy = f"give the pods {family} addresses, or remove {family} from spec.ipFamilies"
    else:
        remedy = f"create an EndpointSlice with addressType {family}"
    if "FQDN" in types:
        remedy += "; service proxies serve no host names"
    return message + " and ".join(types), remedy


def _other_ports(port: ServicePort, slices: Sequence[EndpointSlice], pods: bool) -> tuple[str, str]:
    """Return the message and the remedy if these slices, which have endpoints, do not have the
    port."""
    offered = [each for slice_ in slices for each in slice_.ports or ()]
    same = [each for each in offered if (each.name or "") == port.name]
    own = f"named {port.name!r}" if port.name else "without a name"
    message = "no endpoint has this port"
    if any(each.protocol == port.protocol for each in same):
        return f"{message}: in its EndpointSlices the port {own} has no number", "set it there"
    if same:
        protocols = " and ".join(sorted({each.protocol for each in same}))
        return (
            f"{message}: in its EndpointSlices the port {own} has protocol {protocols}",
            f"set protocol {port.protocol} there, or the other protocol in the Service",
        )
    names = sorted({repr(each.name) if each.name else "without a name" for each in offered})
    if names:
        message += (
            f": ports are joined by name, and the port of the Service is {own}, those of its "
            f"EndpointSlices are {_listed(names)}"
        )
    if pods:
        return message, "check that its targetPort names a port of the pods"
    return message, "give the port the same name in the Service and in its EndpointSlices"


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:MAX_NAMES]) + (" and others" if len(names) > MAX_NAMES else "")
