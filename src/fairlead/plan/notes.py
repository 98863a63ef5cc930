"""What the owner of a Service should know about it, and what to do about it.

In: a Service whose addresses are given, its EndpointSlices, the Nodes. Out: Findings. Each sentence
says what is the matter and ends with the remedy, for it is all that `kubectl describe` shows.
Invariant: pure; a note is the same as long as the matter is: it counts nothing that comes and goes,
such as pods. Follows what kube-proxy and the upstream service controller do with such Services."""

import functools
import ipaddress
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fairlead.kube.networks import read_network
from fairlead.kube.objects import (
    HEADLESS_LABEL,
    SERVICE_PROXY_NAME_LABEL,
    EndpointSlice,
    Node,
    Service,
    ServicePort,
)
from fairlead.model import Family, Finding
from fairlead.net.address import family_of
from fairlead.plan.endpoints import Candidate, candidates, usable
from fairlead.plan.members import excluded

NO_READY_ENDPOINTS = "NoReadyEndpoints"
NO_NODES = "UnAvailableLoadBalancer"
"""The upstream service controller's reason, in its spelling."""
WITHOUT_NODE = "EndpointsWithoutNode"
SOURCE_RANGES = "LoadBalancerSourceRanges"
MOST_NAMES = 5

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def endpoint_notes(
    service: Service,
    ports: Sequence[ServicePort],
    families: Sequence[Family],
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
) -> list[Finding]:
    """Which of these ports nobody answers for from outside, and why."""
    wanting: dict[Finding, list[str]] = {}
    for family in families:
        for port in ports:
            known = candidates(slices, port_name=port.name, protocol=port.protocol, family=family)
            if (note := _want(service, known, slices, nodes)) is not None:
                wanting.setdefault(note, []).append(f"{port.port}/{port.protocol} ({family})")
    whole = len(ports) * len(families)
    return [
        note
        if len(where) == whole
        else msgspec.structs.replace(note, message=f"{_listed(where)}: {note.message}")
        for note, where in wanting.items()
    ]


def spec_notes(
    service: Service, families: Sequence[Family], ranges: Sequence[str], nodes: Mapping[str, Node]
) -> list[Finding]:
    """What the Service asks for that works otherwise than its owner may think."""
    notes = []
    proxy = service.metadata.labels.get(SERVICE_PROXY_NAME_LABEL)
    if proxy is not None:
        message = (
            f"label {SERVICE_PROXY_NAME_LABEL} leaves this Service to the service proxy "
            f"{proxy!r}: kube-proxy does not serve it"
        )
        notes.append(
            Finding(
                "OtherServiceProxy",
                message,
                remedy="remove the label unless that proxy serves load-balancer addresses",
            )
        )
    if service.spec.external_traffic_policy == "Local" and not service.spec.health_check_node_port:
        message = (
            "the Service has no healthCheckNodePort: nodes are not probed, and a dead one "
            "gets traffic until Kubernetes knows"
        )
        notes.append(
            Finding(
                "HealthCheckNodePortMissing",
                message,
                remedy="set externalTrafficPolicy to Cluster and back to Local",
            )
        )
    return [
        *notes,
        *_range_notes(
            families, [ipaddress.ip_network(text, strict=False) for text in ranges], nodes
        ),
    ]


def _want(
    service: Service,
    known: Sequence[Candidate],
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
) -> Finding | None:
    """Why nobody outside can be served by these endpoints of one port; None if somebody can, or all
    can."""
    if not (chosen := usable(known)):
        message, remedy = _nobody(service, known, slices)
        return Finding(
            NO_READY_ENDPOINTS,
            message,
            severity="error",
            remedy=remedy,
            blocks="Ready",
            at_start=True,
        )
    local = service.spec.external_traffic_policy == "Local"
    serving = any(each.node in nodes and not excluded(nodes[each.node]) for each in chosen)
    homeless = any(not each.node for each in chosen)
    if not local and not serving and all(excluded(node) for node in nodes.values()):
        why = (
            "every node is excluded by label or about to be deleted"
            if nodes
            else "there is no Node"
        )
        return _no_nodes(why)
    if local and homeless:
        whose = "some of its endpoints name" if serving else "its endpoints name"
        message = f"{whose} no node: with externalTrafficPolicy Local they get nothing from outside"
        remedy = (
            "give them a nodeName in their EndpointSlice, or set externalTrafficPolicy to Cluster"
        )
        if serving:
            return Finding(WITHOUT_NODE, message, remedy=remedy)
        return Finding(WITHOUT_NODE, message, severity="error", remedy=remedy, blocks="Ready")
    if local and not serving:
        names = {each.node for each in chosen}
        there = sorted(names & nodes.keys())
        why = (
            f"{_listed(there)}, excluded by label or about to be deleted"
            if there
            else f"{_listed(names)}, not in the cluster"
        )
        return _no_nodes(f"its pods are ready on {why}")
    return None


def _no_nodes(why: str) -> Finding:
    return Finding(
        NO_NODES,
        f"There are no available nodes for LoadBalancer: {why}",
        severity="error",
        remedy="place pods on another node, or remove the label "
        "node.kubernetes.io/exclude-from-external-load-balancers",
        blocks="Ready",
    )


def _nobody(
    service: Service, known: Sequence[Candidate], slices: Sequence[EndpointSlice]
) -> tuple[str, str]:
    """Why no endpoint answers for a port, and what to do about it."""
    selector = ",".join(
        f"{key}={value}" for key, value in sorted((service.spec.selector or {}).items())
    )
    look = f"kubectl get pods -n {service.metadata.namespace} -l {selector}"
    if known and selector:
        return (
            "it has endpoints, and none of them is ready",
            f"see `{look}` and the readiness probes of the pods",
        )
    if known:
        return (
            "it has endpoints, and none of them is ready",
            "see the controller that writes its EndpointSlices",
        )
    if any(each.endpoints for each in slices):
        return (
            "no endpoint has this port",
            "does its targetPort name a port of the pods, and have they addresses of this family?",
        )
    if selector:
        # A pod has no endpoint before it has an address, and pods are not watched.
        none, unborn = (
            "if it shows no pod, make spec.selector and the labels of the pods agree",
            "pods that have no IP yet",
        )
        return (
            "it has no endpoint",
            f"see `{look}`; {none}; {unborn} are waiting for a node, an image or a volume",
        )
    return (
        "it has neither a selector nor an EndpointSlice",
        "write one with the label kubernetes.io/service-name, and without the label "
        f"{HEADLESS_LABEL}",
    )


def _range_notes(
    families: Sequence[Family], ranges: Sequence[Network], nodes: Mapping[str, Node]
) -> list[Finding]:
    """Gateways let in who is in the ranges; nodes apply them as well, to their own pods too."""
    notes: list[Finding] = []
    given = {family: [each for each in ranges if _family(each) == family] for family in families}
    for family, own in given.items():
        if not own and ranges:
            message = f"no range is {family}: nobody outside may connect over {family}"
            notes.append(
                Finding(SOURCE_RANGES, message, remedy="add one to loadBalancerSourceRanges")
            )
        if not own:
            # and none of the nodes' CIDRs is looked at: of 1,000 nodes for each Service that would
            # be seconds
            continue
        pods = sorted(
            cidr
            for node in nodes.values()
            for cidr in node.spec.pod_cidrs
            if family_of(cidr) == family
        )
        outside = next((cidr for cidr in pods if not _within(cidr, own)), None)
        if outside is not None:
            message = (
                f"pods (such as those in {outside}) are in no range: what they send to the "
                "load balancer is dropped"
            )
            notes.append(
                Finding(
                    SOURCE_RANGES,
                    message,
                    remedy="add their ranges, or let pods use the ClusterIP",
                )
            )
    return notes


def _family(network: Network) -> Family:
    return "IPv6" if network.version == 6 else "IPv4"


@functools.lru_cache(maxsize=1 << 14)
def _network(cidr: str) -> Network | None:
    """Of a node's CIDR, which is asked for again with every Service that has ranges; None if it is
    none."""
    read = read_network(cidr)
    return ipaddress.ip_network(read) if read is not None else None


def _within(cidr: str, ranges: Iterable[Network]) -> bool:
    inner = _network(cidr)
    return inner is None or any(
        int(outer.network_address) <= int(inner.network_address)
        and int(inner.broadcast_address) <= int(outer.broadcast_address)
        for outer in ranges
        if outer.version == inner.version
    )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:MOST_NAMES]) + (" and others" if len(names) > MOST_NAMES else "")
