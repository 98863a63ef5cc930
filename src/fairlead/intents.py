"""The plan of each role: from the state of the cluster to one intent per Service.

In: a State and the configuration. Out: callables that the loop asks for the intents of the dirty Services: a Publication
for the controller, a LoadBalancer for a gateway, a NodeService for a node. They only choose which Services concern the
role and call the pure functions of `plan`; no I/O.
"""

from collections.abc import Collection, Mapping

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import Ingress, LoadBalancer, NodeService, Note, Publication, ServiceKey
from fairlead.plan.addresses import Grant, Wanted, assign, held_by, wanted_by
from fairlead.plan.balancer import CLASS_ANNOTATION, CLASSES, DIRECT, class_of, plan_load_balancer
from fairlead.plan.node import plan_node_service
from fairlead.state import State


class Publications:
    """The controller's plan. Addresses are assigned over all Services at once, so one change may touch others.

    Remembers its last grants: a Service whose status is still on its way must not lose its address to the next one.
    """

    def __init__(self, state: State, config: Config) -> None:
        self._state = state
        self._config = config
        self._granted: dict[ServiceKey, tuple[str, Grant | Refused]] = {}

    def __call__(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, Publication | Refused]:
        before = self._granted
        self._granted = self._assign()
        touched = {key for key in before.keys() | self._granted.keys() if before.get(key) != self._granted.get(key)}
        planned: dict[ServiceKey, Publication | Refused] = {}
        for key in set(keys) | touched:
            if (service := self._state.services.get(key)) is None or key not in self._granted:
                continue
            class_name = class_of(service, self._config.default_class)
            grant = self._granted[key][1]
            if class_name not in CLASSES:
                continue  # deleted or handed to another class: to be released, its address is held until it is gone
            planned[key] = grant if isinstance(grant, Refused) else _publication(service, class_name, grant)
        return planned

    def notes_of(self, key: ServiceKey) -> tuple[Note, ...]:
        """What the user should know about a Service that is served: of its grant and of its plan."""
        service = self._state.services.get(key)
        _, grant = self._granted.get(key, ("", None))
        if service is None or not isinstance(grant, Grant):
            return ()
        class_name = class_of(service, self._config.default_class)
        if class_name not in CLASSES:
            return ()
        slices = self._state.slices_of(key)
        return grant.notes + plan_load_balancer(service, slices, self._state.nodes, grant.addresses, class_name).notes

    def _assign(self) -> dict[ServiceKey, tuple[str, Grant | Refused]]:
        wanted: dict[ServiceKey, Wanted] = {}
        held: dict[ServiceKey, tuple[str, ...]] = {}
        result: dict[ServiceKey, tuple[str, Grant | Refused]] = {}
        for key, service in self._state.services.items():
            if class_of(service, self._config.default_class) not in CLASSES and not _going(service):
                continue
            held[key] = held_by(service) or self._remembered(key, service)
            try:
                wanted[key] = wanted_by(service)
            except Refused as error:
                result[key] = (service.metadata.uid, error)
        for key, grant in assign(self._config.pools, held, wanted).items():
            result[key] = (self._state.services[key].metadata.uid, grant)
        return result

    def _remembered(self, key: ServiceKey, service: Service) -> tuple[str, ...]:
        uid, grant = self._granted.get(key, ("", None))
        return grant.addresses if uid == service.metadata.uid and isinstance(grant, Grant) else ()


def _going(service: Service) -> bool:
    """Deleted, but still ours: its addresses may still be forwarded somewhere and must not be given away yet."""
    return service.metadata.deletion_timestamp is not None and CLASS_ANNOTATION in service.metadata.annotations


def _publication(service: Service, class_name: str, grant: Grant) -> Publication:
    # Packets reach the node unmodified, so the node may answer for the address itself: ipMode VIP (KEP-1860).
    ingress = tuple(Ingress(address, "VIP") for address in grant.addresses)
    return Publication(service.key, service.metadata.uid, class_name, ingress)


class Balancers:
    """The gateway's plan: one LoadBalancer for each Service of our class that has an address."""

    def __init__(self, state: State, config: Config) -> None:
        self._state = state
        self._config = config

    def __call__(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        state = self._state
        planned: dict[ServiceKey, LoadBalancer | Refused] = {}
        for key in keys:
            service = state.services.get(key)
            if service is None or class_of(service, self._config.default_class) != DIRECT:
                continue
            if addresses := held_by(service):
                slices = state.slices_of(key)
                planned[key] = plan_load_balancer(service, slices, state.nodes, addresses, DIRECT, state.verdict_of)
        return planned


class NodeServices:
    """The node's plan: one NodeService for each Service that a service proxy has business with."""

    def __init__(self, state: State, node_name: str) -> None:
        self._state = state
        self._node_name = node_name

    def __call__(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, NodeService | Refused]:
        planned: dict[ServiceKey, NodeService | Refused] = {}
        for key in keys:
            service = self._state.services.get(key)
            if service is None:
                continue
            if (node_service := plan_node_service(service, self._state.slices_of(key), self._node_name)) is not None:
                planned[key] = node_service
        return planned
