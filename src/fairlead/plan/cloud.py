"""The plan of class `fairlead.io/octavia`: what a load balancer of OpenStack must do for each Service of it.

In: a view of the cluster, the configuration, the provider of each load balancer that is there. Out: LoadBalancers, or why
there is none. Pure. Members are nodes with ready pods, weighted by them, on the API's word alone: no probes of ours,
Octavia asks by itself. `addresses` are those that the Service shows, to be had again should the load balancer be lost.
"""

from collections.abc import Callable, Collection, Mapping

from fairlead.config import OCTAVIA, Config, OctaviaConfig
from fairlead.errors import Refused
from fairlead.kube.objects import Service, ServicePort
from fairlead.model import Family, Listener, LoadBalancer, Note, Provider, ServiceKey, UnservedPort
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
from fairlead.plan.members import members_of
from fairlead.plan.notes import endpoint_notes, spec_notes
from fairlead.plan.octavia import Asks, settings_of
from fairlead.plan.proxying import hostname_suffix_after
from fairlead.plan.refusals import SKIPPED

SHARES_BY_NODE = "SharesByNode"

StandingOf = Callable[[ServiceKey, str], Provider | None]
"""The provider of the load balancer that the Service of this uid has, as far as is known."""


def plan_cloud(
    cluster: Cluster, config: Config, standing_of: StandingOf, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """The LoadBalancers of class octavia."""
    planned: dict[ServiceKey, LoadBalancer | Refused] = {}
    for key in keys:
        service = cluster.services.get(key)
        if service is None or class_of(service, config.default_class) != OCTAVIA or config.octavia is None:
            continue
        try:
            planned[key] = _balancer(cluster, service, config, config.octavia, standing_of(key, service.metadata.uid))
        except Refused as error:
            planned[key] = error
    return planned


def _balancer(
    cluster: Cluster, service: Service, config: Config, octavia: OctaviaConfig, standing: Provider | None
) -> LoadBalancer:
    slices, annotations = cluster.slices_of(service.key), service.metadata.annotations
    served, unserved, notes = _ports(service)
    wanted = wanted_by(service)
    family, more = _family(wanted)
    notes += more
    ranges = source_ranges(service)
    monitor = health_monitor_of(service)
    policy = service.spec.external_traffic_policy or "Cluster"
    asks = Asks(
        policy == "Local",
        monitor.port if monitor is not None and policy == "Local" else 0,
        sorted({port.protocol for port in served}),
        bool(ranges),
        next((address for address in wanted.requested if family_of(address) == family), ""),
    )
    settings, more = settings_of(annotations, asks, octavia, standing)
    expected = bool(settings.header or settings.forwarded_for)
    suffix, hostname_notes = hostname_suffix_after(annotations, config.proxy.hostname_suffix if expected else "")
    notes += [*more, *hostname_notes, *spec_notes(service, [family], ranges, cluster.nodes)]
    notes += [*endpoint_notes(service, served, [family], slices, cluster.nodes)]
    notes += [*without_effect(annotations, INSTEAD_OCTAVIA), *not_understood(annotations)]
    listeners = []
    for port in served:
        found, more = members_of(service, port, family, slices, cluster.nodes)
        notes += more
        listeners.append(Listener(family, port.port, port.protocol, policy, port.node_port, found.members))
    if settings.provider == "ovn" and any(len({each.weight for each in one.members} - {0}) > 1 for one in listeners):
        message = "nodes have different numbers of ready pods, and provider ovn gives each node the same share"
        notes.append(Note(SHARES_BY_NODE, f"{message}; spread pods evenly (topologySpreadConstraints)"))
    by_proxy = settings.provider == "amphora" and (expected or octavia.ip_mode == "Proxy")
    return LoadBalancer(
        service=service.key,
        uid=service.metadata.uid,
        class_name=OCTAVIA,
        addresses=tuple(address for address in held_by(service) if family_of(address) == family),
        listeners=tuple(sorted(listeners)),
        health_monitor=monitor,
        affinity_timeout_s=affinity_timeout_s(service),
        source_ranges=ranges,
        ip_mode="Proxy" if by_proxy else "VIP",
        octavia=settings,
        hostname_suffix=suffix,
        notes=tuple(dict.fromkeys(notes)),
        unserved_ports=unserved,
    )


def _family(wanted: Wanted) -> tuple[Family, list[Note]]:
    """A load balancer has addresses of the Service's first family. Raises Refused for one that must have both."""
    first, *others = wanted.families
    if others and wanted.all_families:
        raise Refused(f"class {OCTAVIA} serves one address family", fix="set spec.ipFamilyPolicy to PreferDualStack")
    return first, [Note(SKIPPED, f"class {OCTAVIA} serves one address family: {first}, the Service's first")] if others else []


def _ports(service: Service) -> tuple[list[ServicePort], tuple[UnservedPort, ...], list[Note]]:
    """Nodes are reached by node ports. Raises Refused if there is none."""
    homeless = [port for port in service.spec.ports if not port.node_port]
    if not homeless:
        return list(service.spec.ports), (), []
    names = ", ".join(f"{port.port}/{port.protocol}" for port in homeless)
    message = f"not served: {names}: class {OCTAVIA} reaches nodes by node ports, and there are none"
    message += "; set spec.allocateLoadBalancerNodePorts to true"
    if len(homeless) == len(service.spec.ports):
        raise Refused(message)
    unserved = sorted(UnservedPort(port.port, port.protocol, CLASS_PREFIX + NODE_PORT_MISSING) for port in homeless)
    served = [port for port in service.spec.ports if port.node_port]
    return served, tuple(unserved), [Note(NODE_PORT_MISSING, message, "Programmed")]
