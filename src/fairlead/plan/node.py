"""What one node must do for one Service: the node's view of the plan.

In: a Service, its EndpointSlices, the node's name. Out: one NodeService value, or None if a service proxy has no business
with it (headless, ExternalName, another proxy's). Semantics are kube-proxy's.
"""

from collections.abc import Iterable, Sequence

from fairlead.kube.objects import (
    HEADLESS_LABEL,
    SERVICE_PROXY_NAME_LABEL,
    EndpointSlice,
    LoadBalancerIngress,
    Service,
    ServicePort,
)
from fairlead.model import Backend, Family, HealthCheck, NodeService, NodeServicePort
from fairlead.plan.addresses import family_of
from fairlead.plan.balancer import affinity_timeout_s, source_ranges
from fairlead.plan.endpoints import Candidate, candidates, usable


def plan_node_service(service: Service, slices: Sequence[EndpointSlice], node_name: str) -> NodeService | None:
    """The share of one node in one Service. A Service being deleted is served until it is gone."""
    spec = service.spec
    labels = service.metadata.labels
    if spec.type == "ExternalName" or SERVICE_PROXY_NAME_LABEL in labels or HEADLESS_LABEL in labels:
        return None
    cluster_ips = tuple(address for address in spec.cluster_ips or (spec.cluster_ip,) if address and address != "None")
    if not cluster_ips:
        return None
    local: set[str] = set()
    ports = []
    for family in dict.fromkeys(family_of(address) for address in cluster_ips):
        for port in spec.ports:
            known = candidates(slices, port_name=port.name, protocol=port.protocol, family=family)
            here = tuple(candidate for candidate in known if candidate.node == node_name)
            local |= {candidate.address for candidate in here if candidate.ready}
            ports.append(_port(service, port, family, cluster_ips, known, here, node_name))
    return NodeService(
        service=service.key,
        uid=service.metadata.uid,
        internal_policy=spec.internal_traffic_policy or "Cluster",
        external_policy=spec.external_traffic_policy or "Cluster",
        ports=tuple(sorted(ports)),
        affinity_timeout_s=affinity_timeout_s(service),
        source_ranges=source_ranges(service),
        health_check=_health_check(service, local, cluster_ips),
    )


def _port(
    service: Service,
    port: ServicePort,
    family: Family,
    cluster_ips: Sequence[str],
    known: Sequence[Candidate],
    here: Sequence[Candidate],
    node_name: str,
) -> NodeServicePort:
    ingress = service.status.load_balancer.ingress if service.spec.type == "LoadBalancer" else ()
    return NodeServicePort(
        family=family,
        protocol=port.protocol,
        port=port.port,
        name=port.name,
        cluster_ips=_of(family, cluster_ips),
        load_balancer_ips=_of(
            family, (each.ip for each in ingress if each.ip and each.ip_mode != "Proxy" and not _failed(each, port))
        ),
        external_ips=_of(family, service.spec.external_ips),
        node_port=port.node_port if service.spec.type != "ClusterIP" else 0,
        cluster_backends=_backends(usable(known), node_name),
        local_backends=_backends(usable(here), node_name),
        serving_backends=_backends((c for c in known if c.serving), node_name) if port.protocol != "TCP" else (),
    )


def _failed(ingress: LoadBalancerIngress, port: ServicePort) -> bool:
    """Whether the address is shown with an error for the port: there, it may be another Service's that shares the address."""
    return any(each.error and (each.port, each.protocol) == (port.port, port.protocol) for each in ingress.ports)


def _of(family: Family, addresses: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(address for address in addresses if family_of(address) == family))


def _backends(chosen: Iterable[Candidate], node_name: str) -> tuple[Backend, ...]:
    return tuple(sorted(Backend(c.address, c.port, c.node == node_name) for c in chosen))


def _health_check(service: Service, local: Iterable[str], cluster_ips: Sequence[str]) -> HealthCheck | None:
    """Counts *ready* local endpoints, in the family that has most of them: a pod that has two addresses is one pod."""
    spec = service.spec
    if spec.type != "LoadBalancer" or spec.external_traffic_policy != "Local" or not spec.health_check_node_port:
        return None
    by_family: dict[Family, int] = {}
    for address in local:
        by_family[family_of(address)] = by_family.get(family_of(address), 0) + 1
    return HealthCheck(spec.health_check_node_port, max(by_family.values(), default=0))
