"""Metrics of the controller about the gateways of the cluster.

In: the gateways as the controller observes them. Out: a metric family, computed at each scrape."""

from collections.abc import Callable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlead.plan.gateways import Gateways


class GatewaysCollector(Collector):
    """Which gateways are alive. A gateway that is gone is shown until its Lease is deleted."""

    def __init__(self, gateways: Callable[[], Gateways | None]) -> None:
        self._gateways = gateways

    def collect(self) -> list[GaugeMetricFamily]:
        alive = GaugeMetricFamily(
            "fairlead_gateway_alive",
            "1 while the gateway renews its Lease, 0 when it is gone",
            labels=["gateway"],
        )
        known = self._gateways() or Gateways()
        for name in sorted(known.alive | known.gone):
            alive.add_metric([name], name in known.alive)
        return [alive]
