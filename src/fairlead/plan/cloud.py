"""The plan of class `fairlead.io/octavia`: what a load balancer of OpenStack must do for each
Service of it.

In: a view of the cluster, the configuration, the provider of each load balancer that is there. Out:
LoadBalancers, or why there is none. Pure. Members are nodes with ready pods, weighted by them, on
the API's word alone: no probes of ours, Octavia asks by itself. `addresses` are those that the
Service shows, to be had again should the load balancer be lost."""

from collections.abc import Callable, Collection, Mapping, Sequence

from fairlead.config import OCTAVIA, Config
from fairlead.errors import Refused
from fairlead.kube.objects import Service, ServicePort
from fairlead.model import (
    Family,
    Finding,
    Listener,
    LoadBalancer,
    OctaviaStanding,
    ServiceKey,
    UnservedPort,
    about,
)
from fairlead.plan.addresses import Wanted, family_of, held_by, wanted_by
from fairlead.plan.annotations import INSTEAD_OCTAVIA, not_understood, without_effect
from fairlead.plan.balancer import (
    CLASS_PREFIX,
    NODE_PORT_MISSING,
    affinity_timeout_s,
    class_of,
    health_monitor_of,
    source_ranges,
)
from fairlead.plan.cluster import Cluster
from fairlead.plan.elsewhere import elsewhere_of
from fairlead.plan.members import members_of
from fairlead.plan.notes import endpoint_notes, spec_notes
from fairlead.plan.octavia import Asks, has_both, settings_of
from fairlead.plan.proxying import hostname_in, hostname_suffix_after
from fairlead.plan.refusals import SKIPPED
from fairlead.plan.selection import all_members, selected
from fairlead.sections import OctaviaConfig

SHARES_BY_NODE = "SharesByNode"
NO_NODE_SELECTED = "NoNodeSelected"

StandingOf = Callable[[ServiceKey, str], OctaviaStanding | None]
"""The load balancer that the Service of this uid has, as far as is known."""


def plan_cloud(
    cluster: Cluster, config: Config, standing_of: StandingOf, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """The LoadBalancers of class octavia."""
    planned: dict[ServiceKey, LoadBalancer | Refused] = {}
    for key in keys:
        service = cluster.services.get(key)
        if (
            service is None
            or class_of(service, config.default_class) != OCTAVIA
            or config.octavia is None
        ):
            continue
        try:
            planned[key] = _balancer(
                cluster, service, config, config.octavia, standing_of(key, service.metadata.uid)
            )
        except Refused as error:
            planned[key] = error
    return planned


def _balancer(
    cluster: Cluster,
    service: Service,
    config: Config,
    octavia: OctaviaConfig,
    standing: OctaviaStanding | None,
) -> LoadBalancer:
    slices, annotations = cluster.slices_of(service.key), service.metadata.annotations
    served, unserved, notes = _ports(service)
    wanted = wanted_by(service)
    families, more = _families(annotations, wanted, octavia, standing)
    notes += more
    requested = {family_of(address): address for address in wanted.requested}
    ranges = source_ranges(service)
    monitor = health_monitor_of(service)
    policy = service.spec.external_traffic_policy or "Cluster"
    asks = Asks(
        policy == "Local",
        monitor.port if monitor is not None and policy == "Local" else 0,
        sorted({port.protocol for port in served}),
        bool(ranges),
        requested.get(families[0], ""),
        elsewhere_of(service, octavia),
        families[0],
        requested.get("IPv6", ""),
        both=len(families) > 1,
    )
    settings, more = settings_of(
        annotations, asks, octavia, standing.provider if standing is not None else None
    )
    expected = bool(settings.header or settings.forwarded_for)
    suffix, hostname_notes = hostname_suffix_after(
        annotations, config.proxy.hostname_suffix if expected else ""
    )
    notes += [*more, *hostname_notes, *spec_notes(service, families, ranges, cluster.nodes)]
    notes += [*endpoint_notes(service, served, families, slices, cluster.nodes)]
    notes += [*without_effect(annotations, INSTEAD_OCTAVIA), *not_understood(annotations)]
    nodes = selected(cluster.nodes, settings.node_selector)
    listeners = []
    for port, family in ((port, family) for family in families for port in served):
        found, more = members_of(service, port, family, slices, nodes)
        every = port.protocol in settings.all_nodes
        members = all_members(nodes, family) if every else found.members
        notes += more if not every else []
        listeners.append(
            Listener(family, port.port, port.protocol, policy, port.node_port, members)
        )
    if settings.node_selector and not nodes:
        message = (
            f"no node has the labels {settings.node_selector}, so the load balancer has no members"
        )
        notes.append(Finding(NO_NODE_SELECTED, message))
    hostname, more = hostname_in(annotations)
    notes += more
    if settings.provider == "ovn" and any(
        len({each.weight for each in one.members} - {0}) > 1 for one in listeners
    ):
        message = (
            "nodes have different numbers of ready pods, and provider ovn gives each node "
            "the same share"
        )
        notes.append(
            Finding(
                SHARES_BY_NODE,
                message,
                remedy="spread pods evenly (topologySpreadConstraints)",
            )
        )
    by_proxy = settings.provider == "amphora" and (expected or octavia.ip_mode == "Proxy")
    return LoadBalancer(
        service=service.key,
        uid=service.metadata.uid,
        class_name=OCTAVIA,
        addresses=tuple(address for address in held_by(service) if family_of(address) in families),
        listeners=tuple(sorted(listeners)),
        health_monitor=monitor,
        affinity_timeout_s=affinity_timeout_s(service),
        source_ranges=ranges,
        ip_mode="Proxy" if by_proxy else "VIP",
        octavia=settings,
        hostname_suffix=suffix,
        hostname=hostname,
        notes=about(f"Service {service.key}", dict.fromkeys(notes)),
        unserved_ports=unserved,
    )


def _families(
    annotations: Mapping[str, str],
    wanted: Wanted,
    octavia: OctaviaConfig,
    standing: OctaviaStanding | None,
) -> tuple[Sequence[Family], list[Finding]]:
    """Of what its load balancer has addresses; IPv4 first, and of one family the Service's first.
    What there is stays as it is. Raises Refused for a Service that must have both and cannot."""
    first, *others = wanted.families
    if not others:
        return (first,), []
    if standing is None:
        lacks = has_both(annotations, octavia)
        fix = "see octavia.subnetIdV6"
    else:
        has = [family for family in wanted.families if family in standing.families]
        lacks = (
            ""
            if len(has) > 1
            else (
                f"its load balancer has addresses of {standing.families[0]} alone, and that "
                "cannot change"
            )
        )
        first = has[0] if has else first
        fix = "make the Service anew for another"
    if not lacks:
        return sorted(wanted.families), []
    if wanted.all_families and standing is None:
        raise Refused(f"class {OCTAVIA} cannot serve both address families: {lacks}", fix=fix)
    return (first,), [
        Finding(SKIPPED, f"class {OCTAVIA} serves {first} alone: {lacks}", remedy=fix)
    ]


def _ports(service: Service) -> tuple[list[ServicePort], tuple[UnservedPort, ...], list[Finding]]:
    """Nodes are reached by node ports. Raises Refused if there is none."""
    homeless = [port for port in service.spec.ports if not port.node_port]
    if not homeless:
        return list(service.spec.ports), (), []
    names = ", ".join(f"{port.port}/{port.protocol}" for port in homeless)
    message = (
        f"not served: {names}: class {OCTAVIA} reaches nodes by node ports, and there are none"
    )
    fix = "set spec.allocateLoadBalancerNodePorts to true"
    if len(homeless) == len(service.spec.ports):
        raise Refused(message, fix=fix)
    unserved = sorted(
        UnservedPort(port.port, port.protocol, CLASS_PREFIX + NODE_PORT_MISSING)
        for port in homeless
    )
    served = [port for port in service.spec.ports if port.node_port]
    note = Finding(NODE_PORT_MISSING, message, severity="error", remedy=fix, blocks="Programmed")
    return served, tuple(unserved), [note]
