"""The plan of class `fairlead.io/octavia`: what a load balancer of OpenStack must do for each
Service of it.

In: a view of the cluster with what the driver has seen at the cloud, the configuration. Out:
LoadBalancers, or why there is none. Pure. Members are nodes with ready pods, weighted by them, on
the API's word alone: no probes of ours, Octavia asks by itself. `addresses` are those of the load
balancer that exists; the addresses that the Service shows are in the settings (`held`), for a load
balancer that is made asks for them again."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from fairlead.config import OCTAVIA, Config
from fairlead.errors import Refused
from fairlead.kube.objects import Service, ServicePort
from fairlead.model import (
    ExistingLoadBalancer,
    Family,
    FloatingWish,
    Listener,
    LoadBalancer,
    Note,
    ServiceKey,
    SharedOrAdopted,
    UnservedPort,
)
from fairlead.net.address import family_of
from fairlead.plan.addresses import Wanted, held_by, wanted_by
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


class CloudCluster(Cluster, Protocol):
    """What this plan reads besides: the load balancers that Services have at the cloud."""

    @property
    def load_balancers(self) -> Mapping[ServiceKey, ExistingLoadBalancer]: ...


class Claimant(NamedTuple):
    """A Service that is to have a load balancer at the cloud, as far as the driver has to know it
    before it looks there. `held`: the addresses that the Service shows. `elsewhere`: the load
    balancer that the Service is to be on, unless it gets one of its own."""

    uid: str
    held: tuple[str, ...] = ()
    elsewhere: SharedOrAdopted | None = None


def plan_cloud(
    cluster: CloudCluster, config: Config, keys: Collection[ServiceKey]
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
        existing = cluster.load_balancers.get(key)
        if existing is not None and existing.uid != service.metadata.uid:
            existing = None
        try:
            planned[key] = _balancer(cluster, service, config, config.octavia, existing)
        except Refused as error:
            planned[key] = error
    return planned


def claimant_of(cluster: Cluster, config: Config, key: ServiceKey) -> Claimant | None:
    """None: there is no such Service, or it is not of class octavia any more."""
    service = cluster.services.get(key)
    if (
        service is None
        or config.octavia is None
        or class_of(service, config.default_class) != OCTAVIA
    ):
        return None
    try:
        elsewhere = elsewhere_of(service, config.octavia)
    except Refused:
        elsewhere = None  # the plan tells the user
    return Claimant(service.metadata.uid, tuple(held_by(service)), elsewhere)


def with_existing(balancer: LoadBalancer, existing: ExistingLoadBalancer | None) -> LoadBalancer:
    """The LoadBalancer as it is planned where this one exists: with the addresses by which clients
    reach it. While it has none of them, the Service goes on to show those that it shows."""
    assert balancer.octavia is not None
    settings = msgspec.structs.replace(balancer.octavia, existing=existing)
    families = {each.family for each in balancer.listeners}
    addresses = _addresses(existing, settings.floating, families) if existing is not None else ()
    return msgspec.structs.replace(balancer, octavia=settings, addresses=addresses or settings.held)


def _addresses(
    existing: ExistingLoadBalancer, wish: FloatingWish | None, families: Collection[Family]
) -> tuple[str, ...]:
    """The addresses by which clients reach it. Empty: the floating IP that is to be the first one
    does not lead to it yet."""
    vip = existing.addresses[0] if existing.addresses else ""
    if existing.shared:
        first = next(iter(existing.floating), vip)
    elif wish is None:
        first = vip
    else:
        first = next((each for each in existing.floating if wish.address in ("", each)), "")
    if not (vip and first):
        return ()
    further = [each for each in existing.addresses[1:] if family_of(each) in families]
    return tuple([first, *further] if family_of(first) in families or not further else further)


def _balancer(
    cluster: Cluster,
    service: Service,
    config: Config,
    octavia: OctaviaConfig,
    existing: ExistingLoadBalancer | None,
) -> LoadBalancer:
    slices, annotations = cluster.slices_of(service.key), service.metadata.annotations
    served, unserved, notes = _ports(service)
    wanted = wanted_by(service)
    provider = existing.provider if existing is not None else None
    families, more = _families(annotations, wanted, octavia, existing if provider else None)
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
    settings, more = settings_of(annotations, asks, octavia, provider)
    held = tuple(address for address in held_by(service) if family_of(address) in families)
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
        notes.append(Note(NO_NODE_SELECTED, message))
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
            Note(SHARES_BY_NODE, f"{message}; spread pods evenly (topologySpreadConstraints)")
        )
    by_proxy = settings.provider == "amphora" and (expected or octavia.ip_mode == "Proxy")
    balancer = LoadBalancer(
        service=service.key,
        uid=service.metadata.uid,
        class_name=OCTAVIA,
        addresses=held,
        listeners=tuple(sorted(listeners)),
        health_monitor=monitor,
        affinity_timeout_s=affinity_timeout_s(service),
        source_ranges=ranges,
        ip_mode="Proxy" if by_proxy else "VIP",
        octavia=msgspec.structs.replace(settings, held=held),
        hostname_suffix=suffix,
        hostname=hostname,
        notes=tuple(dict.fromkeys(notes)),
        unserved_ports=unserved,
    )
    return with_existing(balancer, existing)


def _families(
    annotations: Mapping[str, str],
    wanted: Wanted,
    octavia: OctaviaConfig,
    existing: ExistingLoadBalancer | None,
) -> tuple[Sequence[Family], list[Note]]:
    """Of what its load balancer has addresses; IPv4 first, and of one family the Service's first.
    What there is stays as it is. Raises Refused for a Service that must have both and cannot."""
    first, *others = wanted.families
    if not others:
        return (first,), []
    if existing is None:
        lacks = has_both(annotations, octavia)
        fix = "see octavia.subnetIdV6"
    else:
        has = [family for family in wanted.families if family in existing.families]
        lacks = (
            ""
            if len(has) > 1
            else (
                f"its load balancer has addresses of {existing.families[0]} alone, and that "
                "cannot change"
            )
        )
        first = has[0] if has else first
        fix = "make the Service anew for another"
    if not lacks:
        return sorted(wanted.families), []
    if wanted.all_families and existing is None:
        raise Refused(f"class {OCTAVIA} cannot serve both address families: {lacks}", fix=fix)
    return (first,), [Note(SKIPPED, f"class {OCTAVIA} serves {first} alone: {lacks}; {fix}")]


def _ports(service: Service) -> tuple[list[ServicePort], tuple[UnservedPort, ...], list[Note]]:
    """Nodes are reached by node ports. Raises Refused if there is none."""
    homeless = [port for port in service.spec.ports if not port.node_port]
    if not homeless:
        return list(service.spec.ports), (), []
    names = ", ".join(f"{port.port}/{port.protocol}" for port in homeless)
    message = (
        f"not served: {names}: class {OCTAVIA} reaches nodes by node ports, and there are none"
    )
    message += "; set spec.allocateLoadBalancerNodePorts to true"
    if len(homeless) == len(service.spec.ports):
        raise Refused(message)
    unserved = sorted(
        UnservedPort(port.port, port.protocol, CLASS_PREFIX + NODE_PORT_MISSING)
        for port in homeless
    )
    served = [port for port in service.spec.ports if port.node_port]
    return served, tuple(unserved), [Note(NODE_PORT_MISSING, message, "Programmed")]
