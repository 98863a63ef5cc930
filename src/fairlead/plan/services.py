"""The plan of all classes together.

In: the cluster with the load balancers that the controller has found in the cloud, the
configuration, the ledger of addresses. Out: for every Service of a class of Fairlead, its
LoadBalancer or the reason why it has none. Pure, except for the memory of the ledger.

The classes form two groups: their addresses come from pools, or from a cloud. The controller plans
each group in a separate loop, so that an unreachable cloud does not delay the other classes.
`fairlead plan` needs both groups."""

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
    """The state that the plans of both groups read."""


def plan_services(
    cluster: WholeCluster, config: Config, ledger: Ledger, keys: Collection[ServiceKey]
) -> Mapping[ServiceKey, LoadBalancer | Refused]:
    """Return the plan of each of these Services, by the group of its class."""
    return {
        **plan_controller(cluster, config, ledger, keys),
        **plan_cloud(cluster, config, keys),
    }
