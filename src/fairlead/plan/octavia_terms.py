"""The terms of class `fairlead.io/octavia`: a load balancer of OpenStack.

In: a Service, the configuration, the load balancer that the Service has in the cloud. Out: `Terms`.
Pure. Members are nodes with ready pods, weighted by the number of these pods. Fairlead does not
probe them, because Octavia has its own health monitors. `plan.octavia` reads the annotations."""

from collections.abc import Mapping, Sequence

import msgspec

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import Service, ServicePort
from fairlead.model import (
    ExistingLoadBalancer,
    Family,
    Finding,
    Listener,
    LoadBalancer,
    OctaviaSettings,
    UnservedPort,
)
from fairlead.net.address import family_of
from fairlead.plan.addresses import AddressRequest, address_request_of
from fairlead.plan.octavia import OctaviaRequest, settings_of, why_single_family
from fairlead.plan.proxying import hostname_in, hostname_suffix_after
from fairlead.plan.refusals import SKIPPED
from fairlead.plan.selection import selected
from fairlead.plan.service import health_monitor_of, source_ranges
from fairlead.plan.shared_or_adopted import shared_or_adopted_of
from fairlead.plan.terms import ServiceContext, Terms, without_node_port
from fairlead.sections import OctaviaConfig

OCTAVIA = "fairlead.io/octavia"
SHARES_BY_NODE = "SharesByNode"
NO_NODE_SELECTED = "NoNodeSelected"

SUBSTITUTES = {
    "address-pool": "the cloud assigns addresses; select the subnet with fairlead.io/subnet-id",
    "sharing-key": "Services share a load balancer by its ID: fairlead.io/load-balancer-id",
    "announce": "the network of the cloud knows where the addresses are",
    "bgp-peers": "the network of the cloud knows where the addresses are",
    "drain-timeout": "connections stay with a node until the load balancer ends them",
}
"""By short name of each annotation without effect, what class octavia does instead."""


def octavia_terms(context: ServiceContext) -> Terms:
    """Return the terms of class octavia. Raise Refused for a Service that Octavia cannot serve, and
    if no cloud is configured."""
    service, config, existing = context.service, context.config, context.existing
    octavia = config.octavia
    if octavia is None:
        raise not_configured()
    annotations = service.metadata.annotations
    served, unserved, notes = _ports(service)
    request = address_request_of(service)
    provider = existing.provider if existing is not None else None
    families, more = _families(annotations, request, octavia, existing if provider else None)
    notes += more
    settings, more = settings_of(
        annotations, _request(service, octavia, served, request, families), octavia, provider
    )
    held = tuple(address for address in context.addresses if family_of(address) in families)
    settings = msgspec.structs.replace(settings, held=held)
    expected = bool(settings.header or settings.forwarded_for)
    suffix, hostname_notes = hostname_suffix_after(
        annotations, config.proxy.hostname_suffix if expected else ""
    )
    notes += [*more, *hostname_notes]
    nodes = selected(context.nodes, settings.node_selector)
    hostname, hostname_findings = hostname_in(annotations)

    def remarks(listeners: Sequence[Listener]) -> list[Finding]:
        return [
            *_none_selected(settings, bool(nodes)),
            *hostname_findings,
            *_uneven(settings, listeners),
        ]

    by_proxy = settings.provider == "amphora" and (expected or octavia.ip_mode == "Proxy")
    return Terms(
        settings,
        notes,
        unserved,
        families,
        ip_mode="Proxy" if by_proxy else "VIP",
        hostname_suffix=suffix,
        hostname=hostname,
        nodes=nodes,
        all_nodes=settings.all_nodes,
        remarks=remarks,
    )


def configured(config: Config) -> Refused | None:
    """Return why the class cannot be served; None if a cloud is configured."""
    return not_configured() if config.octavia is None else None


def not_configured() -> Refused:
    return Refused(
        f"class {OCTAVIA} is not configured",
        fix="configure the cloud in section `octavia` of the configuration",
    )


def known_later(balancer: LoadBalancer) -> str:
    """Return a text that names the provider of a new load balancer and the facts that only the
    cloud knows; empty for another class."""
    settings = balancer.settings
    if not isinstance(settings, OctaviaSettings):
        return ""
    address = "" if balancer.addresses else "its address, and "
    return (
        f"a new load balancer would be of provider {settings.provider}: {settings.why}; only the "
        f"cloud knows {address}whether a load balancer exists, which would keep its provider and "
        "its address families"
    )


def _request(
    service: Service,
    octavia: OctaviaConfig,
    served: Sequence[ServicePort],
    request: AddressRequest,
    families: Sequence[Family],
) -> OctaviaRequest:
    requested = {family_of(address): address for address in request.requested}
    monitor = health_monitor_of(service)
    local = service.spec.external_traffic_policy == "Local"
    return OctaviaRequest(
        local,
        monitor.port if monitor is not None and local else 0,
        sorted({port.protocol for port in served}),
        bool(source_ranges(service)),
        requested.get(families[0], ""),
        shared_or_adopted_of(service, octavia),
        families[0],
        requested.get("IPv6", ""),
        both=len(families) > 1,
    )


def _none_selected(settings: OctaviaSettings, any_node: bool) -> list[Finding]:
    if not settings.node_selector or any_node:
        return []
    message = (
        f"no node has the labels {settings.node_selector}, so the load balancer has no members"
    )
    return [Finding(NO_NODE_SELECTED, message)]


def _uneven(settings: OctaviaSettings, listeners: Sequence[Listener]) -> list[Finding]:
    if settings.provider != "ovn" or not any(
        len({each.weight for each in one.members} - {0}) > 1 for one in listeners
    ):
        return []
    message = (
        "nodes have different numbers of ready pods, and provider ovn gives each node "
        "the same share"
    )
    return [
        Finding(SHARES_BY_NODE, message, remedy="spread pods evenly (topologySpreadConstraints)")
    ]


def _families(
    annotations: Mapping[str, str],
    request: AddressRequest,
    octavia: OctaviaConfig,
    existing: ExistingLoadBalancer | None,
) -> tuple[Sequence[Family], list[Finding]]:
    """Return the address families of the load balancer: IPv4 and IPv6 if it can have both, else the
    first possible family of the Service. An existing load balancer keeps its families. Raise
    Refused for a new load balancer that cannot have both although the Service requires both."""
    first, *others = request.families
    if not others:
        return (first,), []
    if existing is None:
        obstacle = why_single_family(annotations, octavia)
        fix = "see octavia.subnetIdV6"
    else:
        has = [family for family in request.families if family in existing.families]
        obstacle = (
            ""
            if len(has) > 1
            else (
                f"its load balancer has only addresses of {existing.families[0]}, and that "
                "cannot change"
            )
        )
        first = has[0] if has else first
        fix = "recreate the Service to change it"
    if not obstacle:
        return sorted(request.families), []
    if request.all_families and existing is None:
        raise Refused(f"class {OCTAVIA} cannot serve both address families: {obstacle}", fix=fix)
    return (first,), [
        Finding(SKIPPED, f"class {OCTAVIA} serves only {first}: {obstacle}", remedy=fix)
    ]


def _ports(service: Service) -> tuple[list[ServicePort], list[UnservedPort], list[Finding]]:
    """Return the ports that have a node port, and the others as unserved, with a Finding.
    Octavia reaches nodes by node ports. Raise Refused if no port has one."""
    served = [port for port in service.spec.ports if port.node_port]
    unserved, notes = without_node_port(
        OCTAVIA, [port for port in service.spec.ports if not port.node_port]
    )
    if notes and not served:
        raise Refused(notes[0].message, fix=notes[0].remedy)
    return served, unserved, notes
