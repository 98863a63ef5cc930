"""What a load balancer in front of the nodes must do for one Service.

In: a Service, its EndpointSlices, the Nodes, the addresses it holds; at a gateway also what probes
of the nodes have shown. Out: one LoadBalancer value: listeners with their members (`members.py`),
what users should know (`notes.py`). Invariant: pure; sorted; equal clusters give equal values."""

from collections.abc import Collection, Mapping, Sequence
from operator import is_, itemgetter
from typing import NamedTuple

import msgspec

from fairlead.config import Config
from fairlead.kube.objects import EndpointSlice, Node, Service
from fairlead.model import (
    ExistingLoadBalancer,
    Family,
    Finding,
    Listener,
    LoadBalancer,
    UnservedPort,
    about,
)
from fairlead.net.address import family_of
from fairlead.plan.addresses import shown_address
from fairlead.plan.annotations import not_understood, without_effect
from fairlead.plan.classes import ServiceClass
from fairlead.plan.members import NO_TUNNELS, UnconfirmedMembers, VerdictOf, confirm, members_of
from fairlead.plan.notes import endpoint_notes, spec_notes
from fairlead.plan.selection import all_members
from fairlead.plan.service import affinity_timeout_s, health_monitor_of, source_ranges
from fairlead.plan.terms import Asked

PORT_CONFLICT = "PortConflict"
"""Why a port is not served: code of a Finding, and, with our domain before it, error of a port in
the status."""


DEFAULTS = Config()


class Unconfirmed(NamedTuple):
    """A LoadBalancer on the API's word, and of each of its listeners what probes are held against.
    It depends on objects alone: whoever keeps it need not plan anew because a probe has shown
    something."""

    balancer: LoadBalancer
    found: tuple[UnconfirmedMembers, ...]
    """In the order of the listeners."""


def plan_load_balancer(
    service: Service,
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
    addresses: Sequence[str],
    class_: ServiceClass,
    *,
    config: Config = DEFAULTS,
    existing: ExistingLoadBalancer | None = None,
    unserved: Collection[UnservedPort] = (),
) -> LoadBalancer:
    """The LoadBalancer of a Service of this class, on the API's word. `addresses` and `existing`:
    see `Asked`. `unserved`: ports that it cannot have at its addresses; whoever found that out says
    it.

    Raises Refused for source ranges that are none, and for a Service none of whose ports its class
    can serve."""
    asked = Asked(service, config, nodes, addresses, existing)
    return plan_unconfirmed(asked, slices, class_, unserved=unserved, at_gateway=False).balancer


def plan_unconfirmed(
    asked: Asked,
    slices: Sequence[EndpointSlice],
    class_: ServiceClass,
    *,
    unserved: Collection[UnservedPort] = (),
    at_gateway: bool,
) -> Unconfirmed:
    """As `plan_load_balancer`, with what probes are to be held against. `at_gateway`: a gateway
    serves what is published, and says only what it alone knows."""
    service = asked.service
    annotations = service.metadata.annotations
    terms = class_.terms(asked)
    if terms.unserved:
        unserved = {*unserved, *terms.unserved}
    refused = {(port.port, port.protocol) for port in unserved}
    served = [port for port in service.spec.ports if (port.port, port.protocol) not in refused]
    families = terms.families
    addresses = tuple(asked.addresses)
    if families is None:
        families = sorted({family_of(address) for address in addresses})
    else:
        addresses = tuple(address for address in addresses if family_of(address) in families)
    ranges = source_ranges(service)
    # A gateway asks the nodes that a monitor names.
    probed = not at_gateway or class_.members == "probed"
    monitor = health_monitor_of(service) if probed else None
    notes: list[Finding] = []
    if not at_gateway:
        notes += [
            *terms.notes,
            *spec_notes(service, families, ranges, asked.nodes),
            *endpoint_notes(service, served, families, slices, asked.nodes),
            *without_effect(annotations, class_.substitutes),
            *not_understood(annotations),
        ]
    nodes = asked.nodes if terms.nodes is None else terms.nodes
    policy = service.spec.external_traffic_policy or "Cluster"
    listeners: list[tuple[Listener, UnconfirmedMembers]] = []
    for family in families:
        for port in served:
            if at_gateway and not is_published(service, family, port.port, port.protocol):
                continue
            found, member_notes = members_of(service, port, family, slices, nodes)
            members = found.members
            if port.protocol in terms.all_nodes:
                members = all_members(nodes, family)
            else:
                notes += member_notes
            listener = Listener(
                family,
                port.port,
                port.protocol,
                policy,
                port.node_port,
                members,
                has_endpoints=found.any_usable,
            )
            listeners.append((listener, found))
    if len(listeners) > 1:
        listeners.sort(key=itemgetter(0))
    made = tuple([listener for listener, _ in listeners])
    notes += terms.remarks(made)
    balancer = LoadBalancer(
        service=service.key,
        uid=service.metadata.uid,
        class_name=class_.name,
        addresses=addresses,
        listeners=made,
        health_monitor=monitor,
        affinity_timeout_s=affinity_timeout_s(service),
        source_ranges=ranges,
        ip_mode=terms.ip_mode,
        settings=terms.settings,
        hostname_suffix=terms.hostname_suffix,
        hostname=terms.hostname,
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
