"""The plan of each role: from the whole cluster to one intent for each Service that concerns the
role.

In: a view of the cluster, the configuration, the Services to look at. Out: intents, or why there is
none. A Service that needs nothing of the role is left out. Pure: what must be remembered from one
time to the next (who was given which address) is a Ledger that the caller keeps."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from fairlead.config import CLASSES, GATEWAY_CLASSES, OCTAVIA, Config
from fairlead.errors import Refused
from fairlead.kube.objects import ZONE_LABEL, EndpointSlice, Node, Service
from fairlead.kube.own import AddressGrant, AddressPool
from fairlead.model import (
    Finding,
    Grant,
    LoadBalancer,
    NodeService,
    ServiceKey,
    UnservedPort,
    Verdict,
    about,
)
from fairlead.plan.addresses import (
    Assigned,
    Facts,
    Rival,
    facts_of,
    family_of,
    held_by,
    keeps,
    order_of,
    ports_of,
    shown_by,
)
from fairlead.plan.balancer import (
    CLASS_PREFIX,
    PORT_CONFLICT,
    Unconfirmed,
    claimed_class,
    class_of,
    confirmed,
    plan_load_balancer,
    plan_unconfirmed,
)
from fairlead.plan.gateways import Gateways, gateway_notes
from fairlead.plan.keeping import NOT_KEPT, exceeded, limits_of
from fairlead.plan.ledger import Ledger
from fairlead.plan.node import plan_node_service
from fairlead.plan.pools import read_pools
from fairlead.plan.refusals import port_conflict


class Cluster(Protocol):
    """What is, as far as plans read it."""

    @property
    def services(self) -> Mapping[ServiceKey, Service]: ...

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    def slices_of(self, key: ServiceKey) -> Sequence[EndpointSlice]: ...

    def verdict_of(self, address: str, port: int) -> Verdict | None: ...

    def showing(self, address: str) -> Collection[ServiceKey]: ...


class Addressed(Cluster, Protocol):
    """What the controller reads besides, to give addresses. `pools` is another object whenever a
    pool is another one."""

    @property
    def pools(self) -> Mapping[str, AddressPool]: ...

    @property
    def granted(self) -> Collection[ServiceKey]: ...

    def grants_of(self, key: ServiceKey) -> Sequence[AddressGrant]: ...

    def namespace_labels(self, namespace: str) -> Mapping[str, str]: ...

    @property
    def gateways(self) -> Gateways | None: ...


def plan_controller(
    cluster: Addressed, config: Config, ledger: Ledger, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """The LoadBalancers of the classes that gateways serve, with the addresses that they are given.

    The ledger remembers who was given what. One change may touch others, who waited for what it
    freed: their intents come too. When it is new, or the pools are, everything is looked at,
    whatever the keys."""
    concerned: Collection[ServiceKey] = keys
    if ledger.source is not cluster.pools:
        ledger.use(read_pools(config.pools, cluster.pools.values()), cluster.pools)
        concerned = {*keys, *cluster.services, *cluster.granted, *ledger.known}
    touched = ledger.assign({key: _facts(cluster, config, key) for key in concerned})
    planned: dict[ServiceKey, LoadBalancer | Refused] = {}
    for key in touched.union(keys):
        service = cluster.services.get(key)
        class_name = class_of(service, config.default_class) if service is not None else None
        if service is None or class_name is None:
            continue  # gone or going: nothing is wanted for it any more
        if class_name not in CLASSES:
            if class_name.startswith(CLASS_PREFIX):
                known = ", ".join(sorted(CLASSES))
                planned[key] = Refused(
                    f"there is no class {class_name}",
                    fix=f"make the Service anew with one of {known}",
                )
            continue  # another controller's
        if class_name == OCTAVIA:
            if config.octavia is None:
                planned[key] = Refused(
                    f"class {OCTAVIA} is not configured",
                    fix="say in `octavia` which cloud is to serve it",
                )
            continue  # a plan of its own: plan.cloud
        try:
            planned[key] = _with_keep_note(
                _balancer(cluster, config, service, class_name, ledger.result(key)),
                config,
                service,
                ledger,
            )
        except Refused as error:
            planned[key] = error
    return planned


def _facts(cluster: Addressed, config: Config, key: ServiceKey) -> Facts:
    """Whatever a Service of ours shows in its status is taken, until it shows it no more."""
    service = cluster.services.get(key)
    return facts_of(
        key,
        service,
        cluster.grants_of(key),
        wants=service is not None and class_of(service, config.default_class) in GATEWAY_CLASSES,
        ours=service is not None and claimed_class(service) not in ("", OCTAVIA),
        namespace_labels=cluster.namespace_labels(key.namespace),
    )


def _balancer(
    cluster: Addressed,
    config: Config,
    service: Service,
    class_name: str,
    result: Assigned | Refused | None,
) -> LoadBalancer:
    """What a Service gets at the addresses that it was assigned. Raises Refused."""
    if not isinstance(result, Assigned):
        raise result or Refused("no address was assigned")
    lost = {rival.port for rival in result.rivals}
    unserved = [
        UnservedPort(port.port, port.protocol, CLASS_PREFIX + PORT_CONFLICT)
        for port in service.spec.ports
        if f"{port.protocol}/{port.port}" in lost
    ]
    balancer = plan_load_balancer(
        service,
        cluster.slices_of(service.key),
        cluster.nodes,
        result.addresses,
        class_name,
        unserved=unserved,
        suffix=config.proxy.hostname_suffix,
    )
    notes = result.notes
    if result.rivals:
        notes = (*notes, _port_conflict(result.rivals))
    notes = (*gateway_notes(cluster.gateways, service.key), *notes, *balancer.notes)
    notes = about(f"Service {service.key}", notes)
    return msgspec.structs.replace(balancer, notes=notes, grants=_served(balancer, result.grants))


def _port_conflict(rivals: Iterable[Rival]) -> Finding:
    return Finding(PORT_CONFLICT, port_conflict(rivals), severity="error", blocks="Programmed")


def _with_keep_note(
    balancer: LoadBalancer, config: Config, service: Service, ledger: Ledger
) -> LoadBalancer:
    """Tell the owner of the Service, before the Service is deleted, that its addresses will not be
    kept."""
    namespace = service.metadata.namespace
    if not keeps(service) or not (
        why := exceeded(namespace, ledger.kept_in(namespace), limits_of(config))
    ):
        return balancer
    note = Finding(NOT_KEPT, f"its addresses will not be kept when it is deleted: {why}")
    return msgspec.structs.replace(
        balancer, notes=about(f"Service {service.key}", (*balancer.notes, note))
    )


def _served(balancer: LoadBalancer, grants: Sequence[Grant]) -> tuple[Grant, ...]:
    """The grants with the ports that are served: a port that no class of ours can serve is held by
    nobody."""
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


def plan_gateway(
    cluster: Cluster, config: Config, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """The LoadBalancers of the classes that gateways serve, at the addresses that the controller
    published, their members confirmed by this gateway's own probes."""
    return {
        key: told if isinstance(told, Refused) else confirmed(told, cluster.verdict_of)
        for key, told in plan_gateway_unconfirmed(cluster, config, keys).items()
    }


def plan_gateway_unconfirmed(
    cluster: Cluster, config: Config, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, Unconfirmed | Refused]:
    """The same before probes have their say: what follows from objects alone."""
    planned: dict[ServiceKey, Unconfirmed | Refused] = {}
    for key in keys:
        service = cluster.services.get(key)
        if (
            service is None
            or (class_name := class_of(service, config.default_class)) not in GATEWAY_CLASSES
        ):
            continue
        if class_name is None or not (addresses := held_by(service)):
            continue
        try:
            told = plan_unconfirmed(
                service,
                cluster.slices_of(key),
                cluster.nodes,
                addresses,
                class_name,
                at_gateway=True,
            )
        except Refused as error:
            planned[key] = error
        else:
            planned[key] = _without_rivals(cluster, config, service, told)
    return planned


def _without_rivals(
    cluster: Cluster, config: Config, service: Service, told: Unconfirmed
) -> Unconfirmed:
    """The controller never lets two Services show one port of an address. Should it happen all the
    same, the older has it, so that all gateways agree."""
    balancer = told.balancer
    older: dict[tuple[str, str], ServiceKey] = {}
    for address in balancer.addresses:
        for key in cluster.showing(address):
            other = cluster.services[key]
            if (
                order_of(key, other) < order_of(service.key, service)
                and class_of(other, config.default_class) in GATEWAY_CLASSES
            ):
                ports = shown_by(other).get(address, frozenset()) & ports_of(other)
                older |= {(address, port): key for port in ports}
    if not older:
        return told
    rivals = [
        Rival(port, address, older[address, port])
        for listener in balancer.listeners
        for address in balancer.listening(listener)
        for port in (f"{listener.protocol}/{listener.port}",)
        if (address, port) in older
    ]
    lost = {(family_of(rival.address), rival.port) for rival in rivals}
    pairs = zip(balancer.listeners, told.found, strict=True)
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
    """What this node must do for each Service that a service proxy has business with."""
    planned: dict[ServiceKey, NodeService | Refused] = {}
    node = cluster.nodes.get(node_name)
    zone = node.metadata.labels.get(ZONE_LABEL, "") if node else ""
    for key in keys:
        service = cluster.services.get(key)
        if service is None:
            continue
        try:
            node_service = plan_node_service(service, cluster.slices_of(key), node_name, zone)
        except Refused as error:
            planned[key] = error
            continue
        if node_service is not None:
            planned[key] = node_service
    return planned
