"""What one node must do for one Service: the node's view of the plan.

In: a Service, its EndpointSlices, the node's name. Out: a NodeService, or None if the service proxy
does not serve the Service (it has no ClusterIP, is of type ExternalName, or belongs to another
service proxy). The semantics are those of kube-proxy, except that an external IP that is the
address of a host is not served: any tenant may write spec.externalIPs, and would answer for the
host, for example at its health port. Old API servers admitted invalid addresses and ports: such a
value is skipped with a Finding, and the rest of the Service is served."""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from fairlead.kube.networks import read_address
from fairlead.kube.objects import (
    SERVICE_PROXY_NAME_LABEL,
    EndpointSlice,
    LoadBalancerIngress,
    Service,
    ServicePort,
)
from fairlead.model import (
    Backend,
    Family,
    Finding,
    HealthCheck,
    NodeService,
    NodeServicePort,
    about,
)
from fairlead.net.address import family_of
from fairlead.plan import budget
from fairlead.plan.endpoints import Candidate, candidates, near, usable
from fairlead.plan.exclusions import Exclusions
from fairlead.plan.service import affinity_timeout_s, source_ranges

LAST_PORT = 65_535
NOT_UNDERSTOOD = "FieldNotUnderstood"
"""Code of a Finding about an invalid value that is skipped."""
NOT_EXTERNAL = "ExternalIPNotServed"
"""Code of a Finding about an external IP that is the address of a host."""


def plan_node_service(
    service: Service,
    slices: Sequence[EndpointSlice],
    node_name: str,
    zone: str = "",
    exclusions: Exclusions | None = None,
) -> NodeService | None:
    """Return what the node does for the Service; None if its service proxy does not serve it.
    `zone` is the node's zone, or empty. `exclusions`: the addresses of hosts, which are not served
    as external IPs. A Service that is being deleted is served until it is gone."""
    spec = service.spec
    labels = service.metadata.labels
    if spec.type == "ExternalName" or SERVICE_PROXY_NAME_LABEL in labels:
        return None
    budget.check(service, slices, budget.NODE_STEPS)
    budget.check_elements(service, slices)
    notes: list[Finding] = []
    named = spec.cluster_ips or (spec.cluster_ip,)
    cluster_ips = _read(
        (address for address in named if address and address != "None"), "spec.clusterIPs", notes
    )
    external_ips = _without_hosts(
        _read(spec.external_ips, "spec.externalIPs", notes), exclusions, notes
    )
    ingress = (
        _served_ingress(service.status.load_balancer.ingress, notes)
        if spec.type == "LoadBalancer"
        else ()
    )
    if not cluster_ips and not notes:
        return None
    local: set[str] = set()
    errors = [
        {(each.port, each.protocol) for each in entry.ports if each.error} for entry, _ in ingress
    ]
    ports = []
    for port in spec.ports:
        if not 0 < port.port <= LAST_PORT or not 0 <= port.node_port <= LAST_PORT:
            notes.append(
                _note(
                    f"port {port.port}, node port {port.node_port} of spec.ports is not a port "
                    "number"
                )
            )
            continue
        for family in dict.fromkeys(family_of(address) for address in cluster_ips):
            known = _valid_endpoints(
                candidates(slices, port_name=port.name, protocol=port.protocol, family=family),
                family,
                notes,
            )
            here = tuple(candidate for candidate in known if candidate.node == node_name)
            local |= {candidate.address for candidate in here if candidate.ready}
            # The status may show an address with an error for the port, which then may belong to
            # another Service that shares the address.
            shown = [
                address
                for (_, address), without in zip(ingress, errors, strict=True)
                if (port.port, port.protocol) not in without
            ]
            ports.append(
                _port(
                    service,
                    port,
                    family,
                    (cluster_ips, shown, external_ips),
                    known,
                    here,
                    node_name,
                    zone,
                )
            )
    return NodeService(
        service=service.key,
        uid=service.metadata.uid,
        internal_policy=spec.internal_traffic_policy or "Cluster",
        external_policy=spec.external_traffic_policy or "Cluster",
        ports=tuple(sorted(ports)),
        affinity_timeout_s=affinity_timeout_s(service),
        source_ranges=source_ranges(service),
        health_check=_health_check(service, local, notes),
        notes=about(f"Service {service.key}", dict.fromkeys(notes)),
    )


def _port(
    service: Service,
    port: ServicePort,
    family: Family,
    addresses: tuple[Sequence[str], Sequence[str], Sequence[str]],
    known: Sequence[Candidate],
    here: Sequence[Candidate],
    node_name: str,
    zone: str,
) -> NodeServicePort:
    """Return one port in one family. `addresses`: the ClusterIPs, the load-balancer addresses, and
    the external IPs. `known`: all endpoints of the port; `here`: the endpoints on this node."""
    cluster_ips, load_balancer_ips, external_ips = addresses
    return NodeServicePort(
        family=family,
        protocol=port.protocol,
        port=port.port,
        name=port.name,
        cluster_ips=_of(family, cluster_ips),
        load_balancer_ips=_of(family, load_balancer_ips),
        external_ips=_of(family, external_ips),
        node_port=port.node_port if service.spec.type != "ClusterIP" else 0,
        cluster_backends=_backends(near(usable(known), node_name, zone), node_name),
        local_backends=_backends(usable(here), node_name),
        serving_backends=_backends((c for c in known if c.serving), node_name)
        if port.protocol != "TCP"
        else (),
    )


def _of(family: Family, addresses: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(address for address in addresses if family_of(address) == family))


def _backends(chosen: Iterable[Candidate], node_name: str) -> tuple[Backend, ...]:
    return tuple(sorted(Backend(c.address, c.port, c.node in (node_name, "")) for c in chosen))


def _read(texts: Iterable[str], where: str, notes: list[Finding]) -> tuple[str, ...]:
    """Return the valid addresses in canonical form, and record a Finding for each invalid text.
    `where`: the field that contains them."""
    found: list[str] = []
    for text in texts:
        if (address := read_address(text)) is None:
            notes.append(_note(f"{text!r} of {where} is not an IP address"))
        else:
            found.append(address)
    return tuple(found)


def _without_hosts(
    addresses: Sequence[str], exclusions: Exclusions | None, notes: list[Finding]
) -> Sequence[str]:
    """Return the addresses that no host of the cluster has, and record a Finding for each other
    address."""
    if exclusions is None:
        return addresses
    left = []
    for address in addresses:
        if (use := exclusions.host_at(address)) is None:
            left.append(address)
            continue
        message = (
            f"{address} of spec.externalIPs is {use.words}: it is not served, because the Service "
            "would answer for that host (kube-proxy serves it)"
        )
        remedy = "remove it; for ports of nodes use type NodePort, or the hostPort of a pod"
        notes.append(Finding(NOT_EXTERNAL, message, remedy=remedy))
    return left


def _served_ingress(
    ingress: Iterable[LoadBalancerIngress], notes: list[Finding]
) -> Sequence[tuple[LoadBalancerIngress, str]]:
    """Return the entries whose addresses a node may serve itself, with these addresses. With ipMode
    `Proxy` a node must send packets to the load balancer (KEP-1860)."""
    entries = [entry for entry in ingress if entry.ip and entry.ip_mode != "Proxy"]
    return [
        (entry, address)
        for entry in entries
        for address in _read((entry.ip,), "status.loadBalancer.ingress", notes)
    ]


def _valid_endpoints(
    found: Sequence[Candidate], family: Family, notes: list[Finding]
) -> Sequence[Candidate]:
    """Return the endpoints that have a valid address of the family and a valid port, and record a
    Finding for each other endpoint."""
    valid = []
    for each in found:
        address = read_address(each.address)
        if address is None or family_of(address) != family or not 0 < each.port <= LAST_PORT:
            notes.append(
                _note(
                    f"endpoint {each.address!r} port {each.port} is not an {family} address and "
                    "port"
                )
            )
        else:
            valid.append(
                each if address == each.address else msgspec.structs.replace(each, address=address)
            )
    return valid


def _note(what: str) -> Finding:
    return Finding(NOT_UNDERSTOOD, f"{what}; it is ignored, and the rest is served")


def _health_check(
    service: Service, local: Collection[str], notes: list[Finding]
) -> HealthCheck | None:
    """Return the health check node port and its ready local endpoints; None if the Service has no
    such port. `local`: the addresses of these endpoints.

    The count is that of the family with the most endpoints: a pod with an address in each family
    counts once."""
    spec = service.spec
    if (
        spec.type != "LoadBalancer"
        or spec.external_traffic_policy != "Local"
        or not spec.health_check_node_port
    ):
        return None
    if not 0 < spec.health_check_node_port <= LAST_PORT:
        notes.append(
            _note(f"{spec.health_check_node_port} of spec.healthCheckNodePort is not a port number")
        )
        return None
    by_family: dict[Family, int] = {}
    for address in local:
        by_family[family_of(address)] = by_family.get(family_of(address), 0) + 1
    count = max(by_family.values(), default=0)
    return HealthCheck(spec.health_check_node_port, count, tuple(sorted(local)))
