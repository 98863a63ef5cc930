"""Metrics of the announcement of addresses. In: what the driver knows. Out: metric families."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class WatchCounts(NamedTuple):
    """The watch over other gateways. `watched`: how many are watched. `misses`: questions without
    an answer. `takeovers`: how often one of them counted as lost."""

    watched: int
    misses: int
    takeovers: int


class AnnounceCollector(Collector):
    """How many addresses this gateway announces, the requests for announced addresses, and the
    watch over other gateways.

    `owned`: returns the interface of each address. `requests`: returns the requests by outcome."""

    def __init__(
        self,
        owned: Callable[[], Mapping[str, str]],
        requests: Callable[[], Mapping[str, int]],
        watch: Callable[[], WatchCounts],
    ) -> None:
        self._owned = owned
        self._requests = requests
        self._watch = watch

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        addresses = GaugeMetricFamily(
            "fairlead_announced_addresses",
            "Addresses that this gateway announces on layer 2",
            labels=["interface"],
        )
        for interface, count in Counter(self._owned().values()).items():
            addresses.add_metric([interface], count)
        requests = CounterMetricFamily(
            "fairlead_neighbor_requests",
            "ARP requests and neighbor solicitations for announced addresses, by outcome",
            labels=["outcome"],
        )
        for outcome, count in self._requests().items():
            requests.add_metric([outcome], count)
        watch = self._watch()
        watched = GaugeMetricFamily(
            "fairlead_watched_gateways",
            "Gateways that this gateway watches, because it is the heir of their addresses",
            value=watch.watched,
        )
        misses = CounterMetricFamily(
            "fairlead_watch_misses",
            "Requests to watched gateways that were not answered in time",
            value=watch.misses,
        )
        takeovers = CounterMetricFamily(
            "fairlead_takeovers",
            "How often a watched gateway did not answer, and its addresses were taken over",
            value=watch.takeovers,
        )
        return [addresses, requests, watched, misses, takeovers]
