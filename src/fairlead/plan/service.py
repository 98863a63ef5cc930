"""Properties of a Service that every class needs: class, source ranges, health port, session
affinity.

In: a Service. Out: the values that plans use. Pure."""

from collections.abc import Sequence

from fairlead.errors import Refused
from fairlead.kube.networks import read_network
from fairlead.kube.objects import SOURCE_RANGES_ANNOTATION, Service
from fairlead.model import HealthMonitor
from fairlead.plan.annotations import quoted

CLASS_PREFIX = "fairlead.io/"
"""The domain of Fairlead's classes, including classes that this version does not know."""

CLASS_ANNOTATION = "fairlead.io/class"
"""This annotation names the class that has claimed the Service. The controller writes it together
with the finalizer."""
CLAIM_MANAGER = "fairlead-claim"
"""The field manager of claims. Any user can write the annotation, so it counts only if this manager
owns fields of the Service."""

PROXY_HEALTH_PORT = 10256
"""The service proxy's own health port, which answers for the node as a whole (KEP-3836)."""

MAX_SOURCE_RANGES = 10_000
"""The maximum number of source ranges of a Service; reading them takes a tenth of a second."""

MAX_AFFINITY_S = 86_400
"""The longest session affinity that the API server accepts."""


def class_of(service: Service, default_class: str | None) -> str | None:
    """Return the name of the class that is to serve this Service, which may be the class of another
    controller; None if the Service requests no load balancer."""
    if service.spec.type != "LoadBalancer" or service.metadata.deletion_timestamp is not None:
        return None
    return service.spec.load_balancer_class or default_class


def claimed_class(service: Service) -> str:
    """Return the name of the class that has claimed this Service; empty if none has. An annotation
    that a user has written does not count."""
    if not any(each.manager == CLAIM_MANAGER for each in service.metadata.managed_fields):
        return ""
    return service.metadata.annotations.get(CLASS_ANNOTATION, "")


def health_monitor_of(service: Service) -> HealthMonitor | None:
    """Return the port and path by which a node reports whether it can serve this Service; None if
    the Service has no health check node port."""
    if service.spec.external_traffic_policy == "Local":
        port = service.spec.health_check_node_port
        return HealthMonitor(port, "/healthz") if port else None
    return HealthMonitor(PROXY_HEALTH_PORT, "/healthz")


def affinity_timeout_s(service: Service) -> int:
    """Return for how many seconds connections of a client go to the same pod, at most one day; 0
    without session affinity."""
    if service.spec.session_affinity != "ClientIP":
        return 0
    config = service.spec.session_affinity_config
    return min(max(config.client_ip.timeout_seconds, 0), MAX_AFFINITY_S) if config else 10800


def source_ranges(service: Service) -> tuple[str, ...]:
    """Return the CIDRs whose clients may connect, sorted; empty if every client may. The field
    takes precedence over the older annotation, and spaces around an entry are ignored. Raise
    Refused for an invalid entry, because ignoring it could admit every client, and for too many."""
    if (
        not service.spec.load_balancer_source_ranges
        and SOURCE_RANGES_ANNOTATION not in service.metadata.annotations
    ):
        return ()
    ranges: Sequence[str] = service.spec.load_balancer_source_ranges or ()
    ranges = ranges or service.metadata.annotations.get(SOURCE_RANGES_ANNOTATION, "").split(",")
    if len(ranges) > MAX_SOURCE_RANGES:
        raise Refused(
            f"the Service has {len(ranges):,} source ranges, and at most {MAX_SOURCE_RANGES:,} are "
            "read",
            fix="combine ranges, or let a firewall apply them",
        )
    read = {text.strip(): read_network(text) for text in ranges if text.strip()}
    if unread := sorted(text for text, network in read.items() if network is None):
        raise Refused(
            f"source range {quoted(unread[0])} is not a CIDR",
            fix="write it as ADDRESS/LENGTH in spec.loadBalancerSourceRanges",
        )
    return tuple(sorted({network for network in read.values() if network is not None}))
