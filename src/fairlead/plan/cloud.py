"""The plan of the classes whose addresses come from a cloud: what its load balancer must do for each
Service of them.

In: a view of the cluster, the configuration, the load balancers that are there. Out: LoadBalancers,
or why there is none. Pure. `addresses` are those that the Service shows, to be had again should the
load balancer be lost."""

from collections.abc import Callable, Collection, Mapping

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.model import LoadBalancer, OctaviaStanding, ServiceKey
from fairlead.plan.addresses import held_by
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import service_class_of
from fairlead.plan.view import Cluster

StandingOf = Callable[[ServiceKey, str], OctaviaStanding | None]
"""The load balancer that the Service of this uid has, as far as is known."""


def plan_cloud(
    cluster: Cluster, config: Config, standing_of: StandingOf, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """The LoadBalancers of the classes whose addresses come from a cloud. A Service of a class that
    is not configured is left out: `plan_controller` says why."""
    planned: dict[ServiceKey, LoadBalancer | Refused] = {}
    for key in keys:
        if (service := cluster.services.get(key)) is None:
            continue
        class_ = service_class_of(service, config.default_class)
        if class_ is None or class_.addresses != "cloud" or class_.configured(config):
            continue
        try:
            planned[key] = plan_load_balancer(
                service,
                cluster.slices_of(key),
                cluster.nodes,
                held_by(service),
                class_,
                config=config,
                standing=standing_of(key, service.metadata.uid),
            )
        except Refused as error:
            planned[key] = error
    return planned
