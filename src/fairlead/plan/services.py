"""The plan of all classes together.

In: the cluster, the configuration, who was given which address, which load balancers are in the
cloud. Out: for every Service that asks for a class of ours its LoadBalancer, or why it has none.
Pure, but for the ledger's memory. The loops of the controller run the two families apart, so that a
cloud that is away holds up no other class; here they are seen as a whole."""

from collections.abc import Collection, Mapping

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.model import LoadBalancer, OctaviaStanding, ServiceKey
from fairlead.plan.cloud import StandingOf, plan_cloud
from fairlead.plan.cluster import plan_controller
from fairlead.plan.ledger import Ledger
from fairlead.plan.view import Addressed


def nothing_known(_key: ServiceKey, _uid: str) -> OctaviaStanding | None:
    """A cloud that has not been asked."""
    return None


def plan_services(
    cluster: Addressed,
    config: Config,
    ledger: Ledger,
    keys: Collection[ServiceKey],
    standing_of: StandingOf = nothing_known,
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """The plan of each Service, by the family of its class. No Service is in both."""
    return {
        **plan_controller(cluster, config, ledger, keys),
        **plan_cloud(cluster, config, standing_of, keys),
    }
