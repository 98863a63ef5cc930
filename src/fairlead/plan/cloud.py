"""The plan of the classes whose addresses come from a cloud.

In: a view of the cluster, the configuration, the load balancers that exist in the cloud. Out: for
each Service its LoadBalancer, or why it has none. Pure. `addresses` are those that the Service
shows: a load balancer that is lost is made again with them."""

from collections.abc import Callable, Collection, Mapping

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.model import LoadBalancer, OctaviaStanding, ServiceKey
from fairlead.plan.addresses import held_by
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import service_class_of
from fairlead.plan.view import Cluster

StandingOf = Callable[[ServiceKey, str], OctaviaStanding | None]
"""Return the load balancer that the Service of this uid has in the cloud; None if there is none, or
none is known."""


def plan_cloud(
    cluster: Cluster, config: Config, standing_of: StandingOf, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """Return the plan of the Services whose class has its addresses from a cloud. A Service of a
    class that is not configured is left out: `plan_controller` says why."""
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
