"""The plan of all classes together.

In: the cluster, the configuration, the ledger of addresses, the load balancers in the cloud. Out:
for every Service that asks for a class of Fairlead, its LoadBalancer or the reason why it has none.
Pure, except for the memory of the ledger. The controller plans the two families in loops of their
own, so that a cloud that is away delays no other class. `fairlead plan` needs both."""

from collections.abc import Collection, Mapping

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.model import LoadBalancer, OctaviaStanding, ServiceKey
from fairlead.plan.cloud import StandingOf, plan_cloud
from fairlead.plan.cluster import plan_controller
from fairlead.plan.ledger import Ledger
from fairlead.plan.view import Addressed


def nothing_known(_key: ServiceKey, _uid: str) -> OctaviaStanding | None:
    """Return None: the cloud has not been asked."""
    return None


def plan_services(
    cluster: Addressed,
    config: Config,
    ledger: Ledger,
    keys: Collection[ServiceKey],
    standing_of: StandingOf = nothing_known,
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """Return the plan of each Service, made by the family of its class: the classes whose
    addresses come from pools, or those whose addresses come from a cloud."""
    return {
        **plan_controller(cluster, config, ledger, keys),
        **plan_cloud(cluster, config, standing_of, keys),
    }
