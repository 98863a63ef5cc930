"""Metrics of the node's end of the tunnel.

In: its counters. Out: metric families, collected at each scrape, in a thread."""

from collections.abc import Callable, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class TunnelCollector(Collector):
    """Packets that arrived through the tunnel, by outcome."""

    def __init__(self, counters: Callable[[], Mapping[str, int]]) -> None:
        self._counters = counters

    def collect(self) -> list[CounterMetricFamily]:
        packets = CounterMetricFamily(
            "fairlead_tunnel_packets", "Packets at the end of a tunnel", labels=["outcome"]
        )
        for outcome, count in self._counters().items():
            packets.add_metric([outcome], count)
        return [packets]
