"""Metrics of the announcement of addresses. In: what the driver knows. Out: metric families."""

from collections import Counter
from collections.abc import Callable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class AnnounceCollector(Collector):
    """How many addresses this gateway announces, and the ARP requests for announced addresses.

    `owned`: returns the interface of each address. `requests`: returns the requests by outcome."""

    def __init__(
        self, owned: Callable[[], Mapping[str, str]], requests: Callable[[], Mapping[str, int]]
    ) -> None:
        self._owned = owned
        self._requests = requests

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        addresses = GaugeMetricFamily(
            "fairlead_announced_addresses",
            "Addresses that this gateway announces on layer 2",
            labels=["interface"],
        )
        for interface, count in Counter(self._owned().values()).items():
            addresses.add_metric([interface], count)
        requests = CounterMetricFamily(
            "fairlead_arp_requests",
            "ARP requests for announced addresses, by outcome",
            labels=["outcome"],
        )
        for outcome, count in self._requests().items():
            requests.add_metric([outcome], count)
        return [addresses, requests]
