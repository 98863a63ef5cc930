"""The plan of objects that were read at once, as a controller makes it, without a controller.

In: the configuration, and the objects of a cluster or of manifests. Out: the state with these
objects, the ledger of addresses, and the plan of each Service. It has no effects. `fairlead plan`
and `fairlead migrate` use it, so they decide alike."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import ObjectKey, ObjectT
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.exclusions import of_config
from fairlead.plan.ledger import Ledger
from fairlead.plan.projection import of_controller
from fairlead.plan.services import plan_services
from fairlead.state import State

if TYPE_CHECKING:
    from fairlead.kube.manifests import Manifests


class Planning(NamedTuple):
    """The plan of all Services, and what it was made from."""

    state: State
    ledger: Ledger
    balancers: Mapping[ServiceKey, LoadBalancer | Refused]


def plan_manifests(config: Config, manifests: "Manifests") -> Planning:
    """Return the plan of all Services among these objects."""
    state, ledger = state_of(config, manifests), Ledger()
    return Planning(state, ledger, plan_services(state, config, ledger, state.services))


def state_of(config: Config, manifests: "Manifests") -> State:
    """Return the state of a controller that has read these objects."""
    state = State(())
    state.exclude("configuration", of_config(config))
    projection = of_controller(config)
    state.update_nodes(_projected(manifests.nodes, projection.node))
    state.update_services(_projected(manifests.services, projection.service))
    if projection.slice is not None:
        state.update_slices(_projected(manifests.endpoint_slices, projection.slice))
    state.update_namespaces({ObjectKey("", o.metadata.name): o for o in manifests.namespaces})
    state.update_pools({ObjectKey("", o.metadata.name): o for o in manifests.address_pools})
    state.update_grants({ObjectKey("", o.metadata.name): o for o in manifests.address_grants})
    return state


def _projected(
    objects: Iterable[ObjectT], projection: Callable[[ObjectT], ObjectT | None]
) -> dict[ObjectKey, ObjectT | None]:
    """Return the parts of these objects that the controller reads. Objects of kinds without
    namespaces have none."""
    return {
        ObjectKey(kept.metadata.namespace, kept.metadata.name): kept
        for kept in map(projection, objects)
        if kept is not None
    }
