"""The plan of all classes together.

In: the cluster with the load balancers that were seen in the cloud, the configuration, the ledger
of addresses. Out: for every Service that asks for a class of Fairlead, its LoadBalancer or the
reason why it has none. Pure, except for the memory of the ledger. The controller plans the two
families in loops of their own, so that a cloud that is away delays no other class. `fairlead plan`
needs both."""

from collections.abc import Collection, Mapping
from typing import Protocol

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.cloud import plan_cloud
from fairlead.plan.cluster import plan_controller
from fairlead.plan.ledger import Ledger
from fairlead.plan.view import Addressed, CloudCluster


class WholeCluster(Addressed, CloudCluster, Protocol):
    """The state that the plans of both families read."""


def plan_services(
    cluster: WholeCluster, config: Config, ledger: Ledger, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """Return the plan of each Service, made by the family of its class: the classes whose
    addresses come from pools, or those whose addresses come from a cloud."""
    return {
        **plan_controller(cluster, config, ledger, keys),
        **plan_cloud(cluster, config, keys),
    }
