"""What a load balancer in front of the nodes must do for one Service.

In: a Service, its EndpointSlices, the Nodes, the addresses it holds; at a gateway also what probes
of the nodes have shown. Out: one LoadBalancer value: listeners with their members (`members.py`),
what users should know (`notes.py`). Invariant: pure; sorted; equal clusters give equal values."""

from collections.abc import Iterable, Mapping, Sequence
from operator import is_, itemgetter
from typing import NamedTuple

import msgspec

from fairlead.errors import Refused
from fairlead.kube.networks import read_network
from fairlead.kube.objects import (
    SOURCE_RANGES_ANNOTATION,
    EndpointSlice,
    Node,
    Service,
    ServicePort,
)
from fairlead.model import (
    Family,
    Finding,
    HealthMonitor,
    Listener,
    LoadBalancer,
    UnservedPort,
    about,
)
from fairlead.plan.addresses import family_of, shown_address
from fairlead.plan.annotations import (
    INSTEAD,
    INSTEAD_PROXY,
    drain_timeout_s,
    not_understood,
    without_effect,
)
from fairlead.plan.members import NO_TUNNELS, Unproved, VerdictOf, confirm, members_of
from fairlead.plan.notes import endpoint_notes, spec_notes
from fairlead.plan.proxying import hostname_suffix, settings_of

DIRECT = "fairlead.io/direct"
PROXY = "fairlead.io/proxy"
CLASS_PREFIX = "fairlead.io/"
"""Classes of this domain are ours, known or not."""

CLASS_ANNOTATION = "fairlead.io/class"
"""Marks a Service as ours, with the class that serves it; written by the controller together with
the finalizer."""
CLAIM_MANAGER = "fairlead-claim"
"""The field manager of our claims. Any user can write the annotation; without this manager it does
not count."""

PROXY_HEALTH_PORT = 10256
"""The service proxy's own health port, which answers for the node as a whole (KEP-3836)."""

LONGEST_AFFINITY_S = 86_400
"""The API server takes no more today."""

PROTOCOL_NOT_SUPPORTED = "ProtocolNotSupported"
NODE_PORT_MISSING = "NodePortMissing"
"""Why class proxy does not serve a port: codes of a Finding, and of the port's error."""
PORT_CONFLICT = "PortConflict"
"""Why a port is not served: code of a Finding, and, with our domain before it, error of a port in
the status."""


def class_of(service: Service, default_class: str | None) -> str | None:
    """The class that serves this Service, ours or not; None if it wants no load balancer."""
    if service.spec.type != "LoadBalancer" or service.metadata.deletion_timestamp is not None:
        return None
    return service.spec.load_balancer_class or default_class


def claimed_class(service: Service) -> str:
    """The class that has claimed this Service; empty if none has. Annotations that a user has
    written do not count."""
    if not any(each.manager == CLAIM_MANAGER for each in service.metadata.managed_fields):
        return ""
    return service.metadata.annotations.get(CLASS_ANNOTATION, "")


class Unconfirmed(NamedTuple):
    """A LoadBalancer on the API's word, and of each of its listeners what probes are held against.
    It depends on objects alone: whoever keeps it need not plan anew because a probe has shown
    something."""

    balancer: LoadBalancer
    found: tuple[Unproved, ...]
    """In the order of the listeners."""


def plan_load_balancer(
    service: Service,
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
    addresses: Sequence[str],
    class_name: str,
    verdict_of: VerdictOf | None = None,
    *,
    unserved: Sequence[UnservedPort] = (),
    suffix: str = "",
) -> LoadBalancer:
    """The LoadBalancer of a Service that a class of ours serves. `unserved`: ports that it cannot
    have at its addresses; whoever found that out says it. With `verdict_of` it is that of a
    gateway, which serves what is published, confirms members by its probes, and says only what it
    alone knows. Without it the API is believed. `suffix`: proxy.hostnameSuffix.

    Raises Refused for source ranges that are none, and for a Service none of whose ports its class
    can serve."""
    told = plan_unconfirmed(
        service,
        slices,
        nodes,
        addresses,
        class_name,
        unserved=unserved,
        suffix=suffix,
        at_gateway=verdict_of is not None,
    )
    return told.balancer if verdict_of is None else confirmed(told, verdict_of)


def plan_unconfirmed(
    service: Service,
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
    addresses: Sequence[str],
    class_name: str,
    *,
    unserved: Sequence[UnservedPort] = (),
    suffix: str = "",
    at_gateway: bool,
) -> Unconfirmed:
    """As `plan_load_balancer`, before probes have their say."""
    annotations = service.metadata.annotations
    notes: list[Finding] = []
    settings, hostnames = None, ""
    if class_name == PROXY:
        settings, notes = settings_of(annotations, affinity=affinity_timeout_s(service) > 0)
        hostnames, more = hostname_suffix(annotations, settings, suffix)
        impossible, why = _not_for_proxy(service)
        unserved = sorted({*unserved, *impossible})
        notes += [*more, *why]
    refused = {(port.port, port.protocol) for port in unserved}
    served = [port for port in service.spec.ports if (port.port, port.protocol) not in refused]
    families: Sequence[Family] = sorted({family_of(address) for address in addresses})
    ranges = source_ranges(service)
    if at_gateway:
        notes = []
    else:
        notes += [
            *spec_notes(service, families, ranges, nodes),
            *endpoint_notes(service, served, families, slices, nodes),
        ]
        notes += [
            *without_effect(annotations, INSTEAD_PROXY if settings else INSTEAD),
            *not_understood(annotations),
        ]
    policy = service.spec.external_traffic_policy or "Cluster"
    listeners: list[tuple[Listener, Unproved]] = []
    for family in families:
        for port in served:
            if at_gateway and not is_published(service, family, port.port, port.protocol):
                continue
            found, member_notes = members_of(service, port, family, slices, nodes)
            notes += member_notes
            listener = Listener(
                family,
                port.port,
                port.protocol,
                policy,
                port.node_port,
                found.members,
                has_endpoints=found.any_usable,
            )
            listeners.append((listener, found))
    if len(listeners) > 1:
        listeners.sort(key=itemgetter(0))
    balancer = LoadBalancer(
        service=service.key,
        uid=service.metadata.uid,
        class_name=class_name,
        addresses=tuple(addresses),
        listeners=tuple([listener for listener, _ in listeners]),
        health_monitor=health_monitor_of(service),
        affinity_timeout_s=affinity_timeout_s(service),
        source_ranges=ranges,
        drain_timeout_s=drain_timeout_s(annotations),
        # Also without a header: what nodes answer themselves would pass by time-outs, limits and,
        # where gateways run on nodes, the balancer as a whole.
        ip_mode="Proxy" if settings else "VIP",
        proxy=settings,
        hostname_suffix=hostnames,
        notes=about(f"Service {service.key}", dict.fromkeys(notes)),
        unserved_ports=tuple(sorted(unserved)),
    )
    return Unconfirmed(balancer, tuple([found for _, found in listeners]))


def confirmed(
    told: Unconfirmed, verdict_of: VerdictOf, tunnels: Mapping[str, str] = NO_TUNNELS
) -> LoadBalancer:
    """The LoadBalancer with its members as probes of their nodes have proved them; the same object
    where nothing differs. `tunnels`: see `confirm`."""
    balancer, monitor = told.balancer, told.balancer.health_monitor
    if monitor is None:
        return balancer
    notes: list[Finding] = []
    listeners = []
    for listener, found in zip(balancer.listeners, told.found, strict=True):
        members, member_notes = confirm(found, monitor, verdict_of, tunnels)
        notes += member_notes
        listeners.append(
            listener
            if members is found.members
            else msgspec.structs.replace(listener, members=members)
        )
    if not notes and all(map(is_, listeners, balancer.listeners)):
        return balancer
    every_note = dict.fromkeys(about(f"Service {balancer.service}", (*balancer.notes, *notes)))
    return msgspec.structs.replace(balancer, listeners=tuple(listeners), notes=tuple(every_note))


def _not_for_proxy(service: Service) -> tuple[list[UnservedPort], list[Finding]]:
    """The ports of a Service that no balancer that ends connections can serve, and what to do about
    each kind of them. Raises Refused if there is no other."""
    notes: list[Finding] = []
    strange = [port for port in service.spec.ports if port.protocol != "TCP"]
    homeless = [
        port for port in service.spec.ports if port.protocol == "TCP" and not port.node_port
    ]
    if strange:
        why = f"class {PROXY} ends TCP connections and serves nothing else"
        fix = (
            f"put these ports into a Service of class {DIRECT}, which passes TCP, UDP and SCTP "
            "on as they are"
        )
        notes.append(
            Finding(
                PROTOCOL_NOT_SUPPORTED,
                f"not served: {_ports(strange)}: {why}",
                severity="error",
                remedy=fix,
                blocks="Programmed",
            )
        )
    if homeless:
        why = f"class {PROXY} reaches nodes by node ports, and there are none"
        fix = "set spec.allocateLoadBalancerNodePorts to true"
        notes.append(
            Finding(
                NODE_PORT_MISSING,
                f"not served: {_ports(homeless)}: {why}",
                severity="error",
                remedy=fix,
                blocks="Programmed",
            )
        )
    if notes and len(strange) + len(homeless) == len(service.spec.ports):
        raise Refused("; ".join(map(str, notes)))
    unserved = [
        UnservedPort(each.port, each.protocol, CLASS_PREFIX + PROTOCOL_NOT_SUPPORTED)
        for each in strange
    ]
    unserved += [
        UnservedPort(each.port, each.protocol, CLASS_PREFIX + NODE_PORT_MISSING)
        for each in homeless
    ]
    return unserved, notes


def _ports(ports: Iterable[ServicePort]) -> str:
    return ", ".join(f"{port.port}/{port.protocol}" for port in ports)


def is_published(service: Service, family: Family, port: int, protocol: str) -> bool:
    """Whether the status shows this port as served at an address of the family. An address that is
    shown without ports, as other controllers do it, stands for all of them."""
    entries = [
        entry
        for entry in service.status.load_balancer.ingress
        if (address := shown_address(entry)) is not None and family_of(address) == family
    ]
    shown = [each for entry in entries for each in entry.ports]
    return not shown or any(
        (each.port, each.protocol, each.error) == (port, protocol, None) for each in shown
    )


def health_monitor_of(service: Service) -> HealthMonitor | None:
    """Where a node says whether it can serve this Service."""
    if service.spec.external_traffic_policy == "Local":
        port = service.spec.health_check_node_port
        return HealthMonitor(port, "/healthz") if port else None
    return HealthMonitor(PROXY_HEALTH_PORT, "/healthz")


def affinity_timeout_s(service: Service) -> int:
    """0 without session affinity; otherwise for how long a client stays with its pod, a day at
    most."""
    if service.spec.session_affinity != "ClientIP":
        return 0
    config = service.spec.session_affinity_config
    return min(max(config.client_ip.timeout_seconds, 0), LONGEST_AFFINITY_S) if config else 10800


def source_ranges(service: Service) -> tuple[str, ...]:
    """The CIDRs that may connect; the field wins over the older annotation, blanks around an entry
    do not count. Raises Refused for what is no CIDR: passing it over might let everybody in."""
    if (
        not service.spec.load_balancer_source_ranges
        and SOURCE_RANGES_ANNOTATION not in service.metadata.annotations
    ):
        return ()
    ranges: Iterable[str] = service.spec.load_balancer_source_ranges or ()
    ranges = ranges or service.metadata.annotations.get(SOURCE_RANGES_ANNOTATION, "").split(",")
    read = {text.strip(): read_network(text) for text in ranges if text.strip()}
    if unread := sorted(text for text, network in read.items() if network is None):
        raise Refused(
            f"source range {unread[0]!r} is no CIDR",
            fix="write it as ADDRESS/LENGTH in spec.loadBalancerSourceRanges",
        )
    return tuple(sorted({network for network in read.values() if network is not None}))
