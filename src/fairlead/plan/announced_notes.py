"""Findings about a Service of class `fairlead.io/announce`, for its owner.

In: the Service with its addresses, how hosts announce them, the other Services at these addresses,
and the Nodes. Out: Findings. Only the controller reports them. Pure."""

from collections.abc import Iterable, Sequence

from fairlead.config import Config
from fairlead.kube.objects import Service
from fairlead.model import Announcement, Finding, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.announce import admitted
from fairlead.plan.announced import AGGREGATION_IGNORED, ON_NODES, limits, no_common_node
from fairlead.plan.announcing_nodes import announcing_nodes
from fairlead.plan.classes import service_class_of
from fairlead.plan.pool_terms import PoolTerms
from fairlead.plan.view import Cluster


def services_at(cluster: Cluster, config: Config, address: str) -> Sequence[Service]:
    """Return the Services whose status shows the address, and whose class nodes serve, sorted."""
    shown = (cluster.services[key] for key in sorted(cluster.showing(address)))
    return [each for each in shown if served_by_nodes(each, config)]


def served_by_gateways_at(cluster: Cluster, config: Config, address: str) -> list[ServiceKey]:
    """Return the Services whose status shows the address, and whose class gateways serve, sorted.
    The class of a Service at a shared address may have changed. Gateways have the address then."""
    return [
        key
        for key in sorted(cluster.showing(address))
        if (class_ := service_class_of(cluster.services[key], config.default_class)) is not None
        and class_.served_by == "gateways"
    ]


def served_by_nodes(service: Service, config: Config) -> bool:
    """Return whether the class of the Service has no load balancer in front of the nodes."""
    class_ = service_class_of(service, config.default_class)
    return class_ is not None and class_.served_by == "nodes"


def announced_notes(
    cluster: Cluster, config: Config, service: Service, announcements: Iterable[Announcement]
) -> Sequence[Finding]:
    """Return the Findings about a Service whose addresses hosts announce like this."""
    if config.announce is None:
        return ()
    notes: list[Finding] = []
    for announcement in announcements:
        nodes = admitted(cluster.nodes, announcement.candidates)
        for address in announcement.addresses:
            at_address = services_at(cluster, config, address) or [service]
            found = announcing_nodes(cluster, address, at_address, nodes)
            if found.disjoint:
                notes.append(no_common_node(address, found.disjoint))
            notes += limits(
                announcement.method,
                found.weights,
                resilient=config.announce.resilient,
                local=found.local,
                weights_announced=config.announce.bgp.speaker == "bird",
            )
    return tuple(dict.fromkeys(notes))


def without_aggregates(announced: Iterable[tuple[PoolTerms, str]]) -> Sequence[Finding]:
    """Return the Findings about pools whose aggregates nodes do not announce. `announced`: the
    addresses that are announced by BGP, each with the terms of its pool."""
    fields = {
        (terms.name, field)
        for terms, address in announced
        for field, length, whole in (
            ("aggregationLength", terms.section.aggregation_length, 32)
            if family_of(address) == "IPv4"
            else ("aggregationLengthV6", terms.section.aggregation_length_v6, 128),
        )
        if length < whole
    }
    return [
        Finding(
            AGGREGATION_IGNORED,
            f"{field} of pool {name} has no effect: a node announces a route for each address, "
            "because a shorter prefix would bring it the packets of addresses that it does not "
            "serve",
            remedy=f"remove {field}, or {ON_NODES}",
        )
        for name, field in sorted(fields)
    ]
