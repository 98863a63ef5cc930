"""Findings for the owner of a Service, about its spec. `plan.endpoint_notes` has those about its
endpoints.

In: a Service that has addresses, the Nodes, the networks of pods. Out: Findings. Each message
states the problem and ends with the remedy, because `kubectl describe` shows only the message.
Invariant: pure; a Finding does not change while its cause lasts. Follows what kube-proxy and the
upstream service controller do with such Services."""

import functools
import ipaddress
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from fairlead.kube.networks import read_network
from fairlead.kube.objects import SERVICE_PROXY_NAME_LABEL, Node, Service
from fairlead.model import Family, Finding
from fairlead.net.address import family_of

NO_READY_ENDPOINTS = "NoReadyEndpoints"
NO_NODES = "UnAvailableLoadBalancer"
"""The reason of the upstream service controller, in its spelling."""
SOURCE_RANGES = "LoadBalancerSourceRanges"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def spec_notes(
    service: Service,
    families: Sequence[Family],
    ranges: Sequence[str],
    nodes: Mapping[str, Node],
    pod_cidrs: Sequence[str] = (),
) -> list[Finding]:
    """Return Findings about settings of the Service that may not work as its owner expects.

    `ranges`: the source ranges of the Service. `pod_cidrs`: the configured networks of pods, which
    count for a family in which no Node has a podCIDR, as with network plugins that manage addresses
    themselves."""
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
            families,
            [ipaddress.ip_network(text, strict=False) for text in ranges],
            nodes,
            pod_cidrs,
        ),
    ]


def _range_notes(
    families: Sequence[Family],
    ranges: Sequence[Network],
    nodes: Mapping[str, Node],
    pod_cidrs: Sequence[str],
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
        of_nodes = (cidr for node in nodes.values() for cidr in node.spec.pod_cidrs)
        pods = sorted(cidr for cidr in of_nodes if family_of(cidr) == family) or [
            cidr for cidr in pod_cidrs if family_of(cidr) == family
        ]
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
