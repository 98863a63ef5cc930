"""The plan of each role: from the whole cluster to one intent for each Service that concerns the role.

In: a view of the cluster, the configuration, the Services to look at. Out: intents, or why there is none. A Service that
needs nothing of the role is left out. Pure: what must be remembered from one time to the next (the grants of addresses)
goes in and comes out.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from fairlead.config import CLASSES, Config
from fairlead.errors import Refused
from fairlead.kube.objects import EndpointSlice, Node, Service
from fairlead.model import LoadBalancer, NodeService, ServiceKey, Verdict
from fairlead.plan.addresses import Grant, Wanted, assign, held_by, wanted_by
from fairlead.plan.balancer import CLASS_ANNOTATION, CLASS_PREFIX, DIRECT, class_of, plan_load_balancer
from fairlead.plan.node import plan_node_service


class Cluster(Protocol):
    """What is, as far as plans read it."""

    @property
    def services(self) -> Mapping[ServiceKey, Service]: ...

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    def slices_of(self, key: ServiceKey) -> Sequence[EndpointSlice]: ...

    def verdict_of(self, address: str, port: int) -> Verdict | None: ...


class Granted(msgspec.Struct, frozen=True):
    """What one Service was given, and to which Service of that name."""

    uid: str
    grant: Grant | Refused


Grants = Mapping[ServiceKey, Granted]


def plan_controller(
    cluster: Cluster, config: Config, before: Grants, keys: Collection[ServiceKey]
) -> tuple[Mapping[ServiceKey, LoadBalancer | Refused], Grants]:
    """The LoadBalancers of all classes of ours, with the addresses that they are given.

    Addresses are assigned over all Services at once, so one change may touch others: their intents come too. `before` are the
    grants of the last time, so that a Service whose status is still on its way does not lose its address to the next one.
    """
    grants = _assign(cluster, config, before)
    touched = {key for key in before.keys() | grants.keys() if before.get(key) != grants.get(key)}
    planned: dict[ServiceKey, LoadBalancer | Refused] = {}
    for key in touched.union(keys):
        service = cluster.services.get(key)
        class_name = class_of(service, config.default_class) if service is not None else None
        if service is None or class_name is None:
            continue  # gone or going: nothing is wanted for it any more
        if class_name not in CLASSES:
            if class_name.startswith(CLASS_PREFIX):
                known = ", ".join(sorted(CLASSES))
                planned[key] = Refused(f"there is no class {class_name}", fix=f"make the Service anew with one of {known}")
            continue  # another controller's
        grant = grants[key].grant
        if isinstance(grant, Refused):
            planned[key] = grant
            continue
        try:
            balancer = plan_load_balancer(service, cluster.slices_of(key), cluster.nodes, grant.addresses, class_name)
            planned[key] = msgspec.structs.replace(balancer, notes=grant.notes + balancer.notes)
        except Refused as error:
            planned[key] = error
    return planned, grants


def plan_gateway(cluster: Cluster, config: Config, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """The LoadBalancers of the class that gateways serve, at the addresses that the controller published, their members
    confirmed by this gateway's own probes."""
    planned: dict[ServiceKey, LoadBalancer | Refused] = {}
    for key in keys:
        service = cluster.services.get(key)
        if service is None or class_of(service, config.default_class) != DIRECT or not (addresses := held_by(service)):
            continue
        slices = cluster.slices_of(key)
        try:
            planned[key] = plan_load_balancer(service, slices, cluster.nodes, addresses, DIRECT, cluster.verdict_of)
        except Refused as error:
            planned[key] = error
    return planned


def plan_node(cluster: Cluster, node_name: str, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, NodeService | Refused]:
    """What this node must do for each Service that a service proxy has business with."""
    planned: dict[ServiceKey, NodeService | Refused] = {}
    for key in keys:
        service = cluster.services.get(key)
        if service is None:
            continue
        if (node_service := plan_node_service(service, cluster.slices_of(key), node_name)) is not None:
            planned[key] = node_service
    return planned


def _assign(cluster: Cluster, config: Config, before: Grants) -> Grants:
    """Grants for all that want one. Whatever a Service of ours shows in its status is taken, until it shows it no more."""
    wanted: dict[ServiceKey, Wanted] = {}
    held: dict[ServiceKey, tuple[str, ...]] = {}
    grants: dict[ServiceKey, Granted] = {}
    for key, service in cluster.services.items():
        wants = class_of(service, config.default_class) in CLASSES
        if wants or CLASS_ANNOTATION in service.metadata.annotations:
            held[key] = held_by(service) or _remembered(before.get(key), service)
        if wants:
            try:
                wanted[key] = wanted_by(service)
            except Refused as error:
                grants[key] = Granted(service.metadata.uid, error)
    for key, grant in assign(config.pools, held, wanted).items():
        grants[key] = Granted(cluster.services[key].metadata.uid, grant)
    return grants


def _remembered(granted: Granted | None, service: Service) -> tuple[str, ...]:
    if granted is None or granted.uid != service.metadata.uid or isinstance(granted.grant, Refused):
        return ()
    return granted.grant.addresses
