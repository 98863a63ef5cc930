"""Plan the load balancer of one Service.

In: a Service, its EndpointSlices, the Nodes, the addresses that it holds; at a gateway also the
verdicts of probes. Out: one LoadBalancer value: listeners with their members (`members.py`), and
Findings for users (`notes.py`). Invariant: pure; sorted; equal clusters give equal values."""

from collections.abc import Collection, Mapping, Sequence, Set
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
from fairlead.plan import budget
from fairlead.plan.addresses import shown_address
from fairlead.plan.annotations import unknown, without_effect
from fairlead.plan.classes import ServiceClass
from fairlead.plan.endpoint_notes import Nodes, PlannedListener, endpoint_notes
from fairlead.plan.members import NO_TUNNELS, UnconfirmedMembers, VerdictOf, confirm, members_of
from fairlead.plan.notes import spec_notes
from fairlead.plan.selection import all_members
from fairlead.plan.service import affinity_timeout_s, health_monitor_of, source_ranges
from fairlead.plan.terms import ServiceContext
from fairlead.plan.understood import in_force

PORT_CONFLICT = "PortConflict"
"""The reason of a port that another Service has. It is the code of a Finding; with the domain of
Fairlead as a prefix, it is the error of the port in the status."""

DEFAULTS = Config()


class Unconfirmed(NamedTuple):
    """A LoadBalancer according to the API server, and for each of its listeners the data that
    `confirmed` combines with verdicts. It depends on Kubernetes objects alone, so the caller may
    store it and reuse it when a verdict changes."""

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
    """Return the LoadBalancer of a Service of this class, according to the API server, without
    probes. `addresses` and `existing`: see `ServiceContext`. `unserved`: ports that the Service
    cannot have at its addresses; the caller reports the reason.

    Raise Refused if a source range is invalid, or if the class cannot serve the Service."""
    context = ServiceContext(service, config, nodes, addresses, existing)
    return plan_unconfirmed(context, slices, class_, unserved=unserved, at_gateway=False).balancer


def plan_unconfirmed(
    context: ServiceContext,
    slices: Sequence[EndpointSlice],
    class_: ServiceClass,
    *,
    unserved: Collection[UnservedPort] = (),
    at_gateway: bool,
) -> Unconfirmed:
    """Return the result of `plan_load_balancer` together with the data for `confirmed`.
    `at_gateway`: plan only the ports that the status shows as served, and leave out the Findings
    that the controller reports."""
    service, wrong = in_force(context.service, class_.values)
    budget.check(service, slices, budget.BALANCER_STEPS)
    if service is not context.service:
        context = msgspec.structs.replace(context, service=service)
    annotations = service.metadata.annotations
    terms = class_.terms(context)
    if terms.unserved:
        unserved = {*unserved, *terms.unserved}
    refused = {(port.port, port.protocol) for port in unserved}
    served = [port for port in service.spec.ports if (port.port, port.protocol) not in refused]
    families = terms.families
    addresses = tuple(context.addresses)
    if families is None:
        families = sorted({family_of(address) for address in addresses})
    else:
        addresses = tuple(address for address in addresses if family_of(address) in families)
    ranges = source_ranges(service)
    # A gateway probes the members of every LoadBalancer that has a health monitor, so a class
    # whose members are not probed gets none there.
    probed = not at_gateway or class_.members == "probed"
    monitor = health_monitor_of(service) if probed else None
    nodes = context.nodes if terms.nodes is None else terms.nodes
    policy = service.spec.external_traffic_policy or "Cluster"
    planned: list[PlannedListener] = []
    listeners: list[tuple[Listener, UnconfirmedMembers]] = []
    for family in families:
        published = published_ports(service, family) if at_gateway else None
        for port in served:
            if published is not None and (port.port, port.protocol) not in published:
                continue
            found = members_of(service, port, family, slices, nodes)
            planned.append(PlannedListener(family, port, found))
            members = found.members
            if port.protocol in terms.all_nodes:
                members = all_members(nodes, family)
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
    notes: list[Finding] = []
    if not at_gateway:
        notes += [
            *terms.notes,
            *spec_notes(service, families, ranges, context.nodes, context.config.cluster.pod_cidrs),
            *endpoint_notes(service, planned, slices, Nodes(context.nodes, nodes)),
            *without_effect(annotations, class_.substitutes),
            *wrong,
            *unknown(annotations),
        ]
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
    unconfirmed: Unconfirmed, verdict_of: VerdictOf, tunnels: Mapping[str, str] = NO_TUNNELS
) -> LoadBalancer:
    """Return the LoadBalancer with the states of its members according to probes; the same object
    if no verdict makes a difference. `tunnels`: see `confirm`."""
    balancer = unconfirmed.balancer
    monitor = balancer.health_monitor
    if monitor is None:
        return balancer
    notes: list[Finding] = []
    listeners = []
    for listener, found in zip(balancer.listeners, unconfirmed.found, strict=True):
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


def published_ports(service: Service, family: Family) -> Set[tuple[int, str]] | None:
    """Return the ports that the status shows as served at an address of the family. None: the
    entries of the family have no ports, as other controllers write them, and all are served."""
    entries = [
        entry
        for entry in service.status.load_balancer.ingress
        if (address := shown_address(entry)) is not None and family_of(address) == family
    ]
    shown = [each for entry in entries for each in entry.ports]
    return {(each.port, each.protocol) for each in shown if each.error is None} if shown else None
