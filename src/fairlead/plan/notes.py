"""Findings for the owner of a Service, about its spec and its endpoints.

In: a Service that has addresses, its EndpointSlices, the Nodes. Out: Findings. Each message states
the problem and ends with the remedy, because `kubectl describe` shows only the message. Invariant:
pure; a Finding does not change while its cause lasts, so it contains no number that varies, such as
the number of pods. Follows what kube-proxy and the upstream service controller do with such
Services."""

import functools
import ipaddress
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

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
"""The reason of the upstream service controller, in its spelling."""
WITHOUT_NODE = "EndpointsWithoutNode"
SOURCE_RANGES = "LoadBalancerSourceRanges"
MAX_NAMES = 5

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def endpoint_notes(
    service: Service,
    ports: Sequence[ServicePort],
    families: Sequence[Family],
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
) -> list[Finding]:
    """Return Findings about the ports that clients outside the cluster cannot use, or not fully.

    Each Finding names its ports, unless it is about all ports in all families."""
    by_finding: dict[Finding, list[str]] = {}
    for family in families:
        for port in ports:
            known = candidates(slices, port_name=port.name, protocol=port.protocol, family=family)
            if (note := _obstacle(service, known, slices, nodes)) is not None:
                by_finding.setdefault(note, []).append(f"{port.port}/{port.protocol} ({family})")
    port_count = len(ports) * len(families)
    return [
        note
        if len(where) == port_count
        else msgspec.structs.replace(note, message=f"{_listed(where)}: {note.message}")
        for note, where in by_finding.items()
    ]


def spec_notes(
    service: Service, families: Sequence[Family], ranges: Sequence[str], nodes: Mapping[str, Node]
) -> list[Finding]:
    """Return Findings about settings of the Service that may not work as its owner expects.

    `ranges`: the source ranges of the Service."""
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
            "the Service has no healthCheckNodePort: nodes are not probed, and a dead node gets "
            "traffic until Kubernetes detects the failure"
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


def _obstacle(
    service: Service,
    known: Sequence[Candidate],
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
) -> Finding | None:
    """Return why clients outside the cluster cannot use these endpoints of one port, or only some
    of them; None if they can use all."""
    if not (chosen := usable(known)):
        message, remedy = _no_ready_endpoint(service, known, slices)
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
    without_node = any(not each.node for each in chosen)
    if not local and not serving and all(excluded(node) for node in nodes.values()):
        why = (
            "every node is excluded by label or about to be deleted"
            if nodes
            else "there is no Node"
        )
        return _no_nodes(why)
    if local and without_node:
        which = "some of its endpoints name" if serving else "its endpoints name"
        message = (
            f"{which} no node: with externalTrafficPolicy Local they get no traffic from outside "
            "the cluster"
        )
        remedy = "set nodeName in their EndpointSlice, or set externalTrafficPolicy to Cluster"
        if serving:
            return Finding(WITHOUT_NODE, message, remedy=remedy)
        return Finding(WITHOUT_NODE, message, severity="error", remedy=remedy, blocks="Ready")
    if local and not serving:
        names = {each.node for each in chosen}
        present = sorted(names & nodes.keys())
        why = (
            f"{_listed(present)}, excluded by label or about to be deleted"
            if present
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


def _no_ready_endpoint(
    service: Service, known: Sequence[Candidate], slices: Sequence[EndpointSlice]
) -> tuple[str, str]:
    """Return why a port has no usable endpoint, and the remedy."""
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
            "check that its targetPort names a port of the pods, and that the pods have addresses "
            "of this family",
        )
    if selector:
        # A pod gets an endpoint only once it has an address, and Fairlead does not watch pods: the
        # remedy has to cover both causes.
        return (
            "it has no endpoint",
            f"see `{look}`; if it shows no pod, make spec.selector match the labels of the pods; "
            "pods without an IP are waiting for a node, an image or a volume",
        )
    return (
        "it has neither a selector nor an EndpointSlice",
        "create an EndpointSlice with the label kubernetes.io/service-name, and without the label "
        f"{HEADLESS_LABEL}",
    )


def _range_notes(
    families: Sequence[Family], ranges: Sequence[Network], nodes: Mapping[str, Node]
) -> list[Finding]:
    """Return Findings about source ranges that exclude a whole family, or the cluster's own pods.

    The nodes apply the ranges too, also to packets from their own pods."""
    notes: list[Finding] = []
    given = {family: [each for each in ranges if _family(each) == family] for family in families}
    for family, own in given.items():
        if not own and ranges:
            message = (
                f"no range is {family}: no client outside the cluster may connect over {family}"
            )
            remedy = f"add an {family} range to loadBalancerSourceRanges"
            notes.append(Finding(SOURCE_RANGES, message, remedy=remedy))
        if not own:
            # Skip the CIDRs of the nodes: with 1,000 nodes and many Services this would take
            # seconds.
            continue
        pods = sorted(
            cidr
            for node in nodes.values()
            for cidr in node.spec.pod_cidrs
            if family_of(cidr) == family
        )
        merged = _merged(own)
        outside = next((cidr for cidr in pods if not _within(cidr, merged)), None)
        if outside is not None:
            message = (
                f"some pods (for example in {outside}) are in no source range: their packets to "
                "the load balancer are dropped"
            )
            notes.append(
                Finding(
                    SOURCE_RANGES,
                    message,
                    remedy="add the ranges of the pods, or let pods use the ClusterIP",
                )
            )
    return notes


def _family(network: Network) -> Family:
    return "IPv6" if network.version == 6 else "IPv4"


@functools.lru_cache(maxsize=1 << 14)
def _network(cidr: str) -> Network | None:
    """Parse the CIDR of a node; None if it is invalid. Cached, because every Service that has
    source ranges needs the CIDRs of all nodes."""
    read = read_network(cidr)
    return ipaddress.ip_network(read) if read is not None else None


def _merged(ranges: Iterable[Network]) -> Sequence[tuple[int, int]]:
    """Return the first and last addresses of the ranges of one family, sorted. Ranges that overlap
    or adjoin become one, so that a search finds the only one that may contain an address."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(
        (int(each.network_address), int(each.broadcast_address)) for each in ranges
    ):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _within(cidr: str, merged: Sequence[tuple[int, int]]) -> bool:
    """Return whether the ranges contain the CIDR. An invalid CIDR counts as contained."""
    if (inner := _network(cidr)) is None:
        return True
    at = bisect_right(merged, int(inner.network_address), key=itemgetter(0)) - 1
    return at >= 0 and int(inner.broadcast_address) <= merged[at][1]


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:MAX_NAMES]) + (" and others" if len(names) > MAX_NAMES else "")
