"""The plan of each role: one intent for each Service that concerns the role.

In: a view of the cluster, the configuration, the keys of the Services to plan. Out: for each
Service its intent, or the reason why there is none. A Service for which the role has nothing to do
is left out. Pure: the memory between two calls (which Service has which address) is a Ledger that
the caller owns."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import ZONE_LABEL, Service
from fairlead.model import Finding, Grant, LoadBalancer, NodeService, ServiceKey, about
from fairlead.net.address import family_of
from fairlead.plan.addresses import (
    Assigned,
    Facts,
    Rival,
    facts_of,
    held_by,
    keeps,
    ports_of,
    shown_by,
)
from fairlead.plan.announce import announce_notes
from fairlead.plan.balancer import PORT_CONFLICT, Unconfirmed, plan_load_balancer, plan_unconfirmed
from fairlead.plan.classes import ServiceClass, addresses_of, refusal_of, service_class_of
from fairlead.plan.conflicts import of_shown
from fairlead.plan.gateways import conflict_notes, gateway_notes
from fairlead.plan.keeping import NOT_KEPT, exceeded, limits_of
from fairlead.plan.ledger import Ledger
from fairlead.plan.node import plan_node_service
from fairlead.plan.pools import read_pools
from fairlead.plan.refusals import held_and_excluded, port_conflict
from fairlead.plan.service import claimed_class
from fairlead.plan.terms import ServiceContext, unserved
from fairlead.plan.view import Addressed, Cluster


def plan_controller(
    cluster: Addressed, config: Config, ledger: Ledger, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """Return the plan of the Services of classes whose addresses come from pools, with the
    addresses that the ledger assigns. For every other Service that requests a class of Fairlead and
    cannot be served, return the reason.

    The result also contains Services outside of `keys` whose assignment changed, because they
    waited for an address or port that became free. With a new ledger, after a change of pools, or
    if the exclusion of an address of a pool or a Service has changed, all Services are assigned
    again, whatever the keys."""
    concerned: Collection[ServiceKey] = keys
    if not ledger.is_current(cluster.pools, cluster.exclusions):
        pools = read_pools(config.pools, cluster.pools.values(), cluster.exclusions)
        ledger.use(pools, cluster.pools)
        concerned = {*keys, *cluster.services, *cluster.granted, *ledger.known}
    touched = ledger.assign({key: _facts(cluster, config, key) for key in concerned})
    planned: dict[ServiceKey, LoadBalancer | Refused] = {}
    for key in touched.union(keys):
        if (service := cluster.services.get(key)) is None:
            continue  # deleted: there is nothing to plan
        class_ = service_class_of(service, config.default_class)
        if refusal := refusal_of(service, config):
            planned[key] = refusal
        elif class_ is not None and class_.addresses == "pool":
            try:
                balancer = _balancer(cluster, config, service, class_, ledger.result(key))
            except Refused as error:
                planned[key] = error
            else:
                planned[key] = _with_keep_note(balancer, config, service, ledger)
    return planned


def _facts(cluster: Addressed, config: Config, key: ServiceKey) -> Facts:
    """Return what the Service requests and holds. While the Service is claimed for a class with
    addresses from pools, it holds every address that its status shows."""
    service = cluster.services.get(key)
    wanted = service_class_of(service, config.default_class) if service is not None else None
    claimed = claimed_class(service) if service is not None else ""
    return facts_of(
        key,
        service,
        cluster.grants_of(key),
        wants=wanted is not None and wanted.addresses == "pool",
        ours=bool(claimed) and addresses_of(claimed) == "pool",
        namespace_labels=cluster.namespace_labels(key.namespace),
    )


def _balancer(
    cluster: Addressed,
    config: Config,
    service: Service,
    class_: ServiceClass,
    result: Assigned | Refused | None,
) -> LoadBalancer:
    """Return the plan of a Service at its assigned addresses. Raise Refused if the ledger assigned
    none, or if the Service cannot be served."""
    if not isinstance(result, Assigned):
        raise result or Refused("no address was assigned")
    lost = {rival.port for rival in result.rivals}
    balancer = plan_load_balancer(
        service,
        cluster.slices_of(service.key),
        cluster.nodes,
        result.addresses,
        class_,
        config=config,
        unserved=unserved(
            [port for port in service.spec.ports if f"{port.protocol}/{port.port}" in lost],
            PORT_CONFLICT,
        ),
    )
    notes = result.notes
    if result.rivals:
        notes = (*notes, _port_conflict(result.rivals))
    if class_.served_by == "gateways":
        notes = (*gateway_notes(cluster.gateways, service.key, class_.name), *notes)
        if (gateways := cluster.gateways) is not None:
            found = (
                announce_notes(balancer.addresses, gateways, cluster.nodes)
                if config.announce.l2 is not None
                else conflict_notes(balancer.addresses, gateways)
            )
            notes = (*found, *notes)
    notes = about(f"Service {service.key}", (*notes, *balancer.notes))
    return msgspec.structs.replace(balancer, notes=notes, grants=_served(balancer, result.grants))


def _port_conflict(rivals: Iterable[Rival]) -> Finding:
    return Finding(PORT_CONFLICT, port_conflict(rivals), severity="error", blocks="Programmed")


def _with_keep_note(
    balancer: LoadBalancer, config: Config, service: Service, ledger: Ledger
) -> LoadBalancer:
    """Add a Finding if the addresses of the Service would not be kept, so that its owner knows it
    before the Service is deleted."""
    namespace = service.metadata.namespace
    if not keeps(service) or not (
        why := exceeded(namespace, ledger.kept_in(namespace), limits_of(config))
    ):
        return balancer
    note = Finding(NOT_KEPT, f"the addresses will not be kept when the Service is deleted: {why}")
    return msgspec.structs.replace(
        balancer, notes=about(f"Service {service.key}", (*balancer.notes, note))
    )


def _served(balancer: LoadBalancer, grants: Sequence[Grant]) -> tuple[Grant, ...]:
    """Return the grants without the ports that the class cannot serve. No Service holds such a
    port."""
    served = {
        (address, f"{each.protocol}/{each.port}")
        for each in balancer.listeners
        for address in balancer.listening(each)
    }
    return tuple(
        msgspec.structs.replace(
            grant, ports=tuple(port for port in grant.ports if (grant.address, port) in served)
        )
        for grant in grants
    )


def plan_gateway_unconfirmed(
    cluster: Cluster, config: Config, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, Unconfirmed | Refused]:
    """Return the plan of the Services that gateways serve, at the addresses that the controller has
    published. Members are not confirmed yet: see `plan.balancer.confirmed`."""
    planned: dict[ServiceKey, Unconfirmed | Refused] = {}
    for key in keys:
        service = cluster.services.get(key)
        class_ = _served_by_gateways(service, config) if service is not None else None
        if service is None or class_ is None or not (addresses := held_by(service)):
            continue
        context = ServiceContext(service, config, cluster.nodes, addresses)
        try:
            unconfirmed = plan_unconfirmed(context, cluster.slices_of(key), class_, at_gateway=True)
        except Refused as error:
            planned[key] = error
        else:
            served = _without_rivals(cluster, config, service, unconfirmed)
            planned[key] = _without_excluded(cluster, service, served)
    return planned


def _without_excluded(cluster: Cluster, service: Service, unconfirmed: Unconfirmed) -> Unconfirmed:
    """Return the plan without the addresses of hosts that take precedence over the Service. A
    Service may have got such an address before the host did, or from another controller. A gateway
    that received the packets for it would cut itself and others off from the host."""
    balancer, created = unconfirmed.balancer, service.metadata.creation_timestamp or ""
    uses = {address: cluster.exclusions.host_at(address, created) for address in balancer.addresses}
    hosts = {address: use for address, use in uses.items() if use is not None}
    if not hosts:
        return unconfirmed
    left = tuple(address for address in balancer.addresses if address not in hosts)
    families = {family_of(address) for address in left}
    pairs = [
        (listener, found)
        for listener, found in zip(balancer.listeners, unconfirmed.found, strict=True)
        if listener.family in families
    ]
    notes = [held_and_excluded(address, use, created) for address, use in hosts.items()]
    balancer = msgspec.structs.replace(
        balancer,
        addresses=left,
        listeners=tuple(listener for listener, _ in pairs),
        notes=about(f"Service {balancer.service}", (*balancer.notes, *notes)),
    )
    return Unconfirmed(balancer, tuple(found for _, found in pairs))


def _served_by_gateways(service: Service, config: Config) -> ServiceClass | None:
    """Return the class of the Service if gateways serve it, else None."""
    class_ = service_class_of(service, config.default_class)
    return class_ if class_ is not None and class_.served_by == "gateways" else None


def _without_rivals(
    cluster: Cluster, config: Config, service: Service, unconfirmed: Unconfirmed
) -> Unconfirmed:
    """Return the plan without the ports that another Service with precedence has (see
    `plan.conflicts`). The controller never publishes a port of an address for two Services. If two
    statuses show it nevertheless, all gateways give it to the same Service."""
    balancer = unconfirmed.balancer
    mine = of_shown(service.key, service)
    older: dict[tuple[str, str], ServiceKey] = {}
    for address in balancer.addresses:
        showing = [of_shown(key, cluster.services[key]) for key in cluster.showing(address)]
        for each in sorted(showing, reverse=True):  # the one with precedence overwrites
            other = cluster.services[each.service]
            if each < mine and _served_by_gateways(other, config) is not None:
                ports = shown_by(other).get(address, frozenset()) & ports_of(other)
                older |= {(address, port): each.service for port in ports}
    if not older:
        return unconfirmed
    rivals = [
        Rival(port, address, older[address, port])
        for listener in balancer.listeners
        for address in balancer.listening(listener)
        for port in (f"{listener.protocol}/{listener.port}",)
        if (address, port) in older
    ]
    lost = {(family_of(rival.address), rival.port) for rival in rivals}
    pairs = zip(balancer.listeners, unconfirmed.found, strict=True)
    left = [
        (each, found)
        for each, found in pairs
        if (each.family, f"{each.protocol}/{each.port}") not in lost
    ]
    notes = balancer.notes
    if rivals:
        notes = about(f"Service {service.key}", (*notes, _port_conflict(rivals)))
    balancer = msgspec.structs.replace(
        balancer, listeners=tuple(listener for listener, _ in left), notes=notes
    )
    return Unconfirmed(balancer, tuple(found for _, found in left))


def plan_node(
    cluster: Cluster, node_name: str, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, NodeService | Refused]:
    """Return what this node must do for each Service that a service proxy has to serve."""
    planned: dict[ServiceKey, NodeService | Refused] = {}
    node = cluster.nodes.get(node_name)
    zone = node.metadata.labels.get(ZONE_LABEL, "") if node else ""
    for key in keys:
        service = cluster.services.get(key)
        if service is None:
            continue
        try:
            node_service = plan_node_service(
                service, cluster.slices_of(key), node_name, zone, cluster.exclusions
            )
        except Refused as error:
            planned[key] = error
            continue
        if node_service is not None:
            planned[key] = node_service
    return planned
