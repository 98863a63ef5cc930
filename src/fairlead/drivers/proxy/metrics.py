"""Metrics of the HAProxy of class fairlead.io/proxy, and of the API server's balancer.

In: what HAProxy has counted. Out: metric families, read when a scrape asks, in a thread."""

from collections.abc import Callable, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlead.drivers.proxy.counters import ProxyCounters


class BalancedServer(Protocol):
    """An API server behind the API's balancer."""

    @property
    def state(self) -> str: ...

    @property
    def open(self) -> int: ...


class ProxyCollector(Collector):
    """Connections and bytes of each Service of class proxy, from HAProxy's own counters; how near
    all together are to its limit; how often it has died."""

    def __init__(self, counters: ProxyCounters) -> None:
        self._counters = counters

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        services, worker = self._counters.services(), self._counters.worker
        labels = ["service"]
        connections = CounterMetricFamily(
            "fairlead_proxy_connections", "Connections taken", labels=labels
        )
        opened = GaugeMetricFamily(
            "fairlead_proxy_open_connections", "Connections open, in old workers too", labels=labels
        )
        octets = CounterMetricFamily(
            "fairlead_proxy_bytes",
            "Bytes from (in) and to clients, but for old workers",
            labels=[*labels, "direction"],
        )
        refused = CounterMetricFamily(
            "fairlead_proxy_refused", "Connections of no source range", labels=labels
        )
        failed = CounterMetricFamily(
            "fairlead_proxy_member_failures",
            "Connections that a member did not take",
            labels=labels,
        )
        deaths = CounterMetricFamily(
            "fairlead_proxy_deaths", "How often HAProxy has died, with all connections"
        )
        deaths.add_metric([], self._counters.deaths())
        used = GaugeMetricFamily(
            "fairlead_proxy_worker_connections",
            "Connections of all Services in the HAProxy worker that takes new ones",
            worker.connections,
        )
        most = GaugeMetricFamily(
            "fairlead_proxy_worker_connections_limit",
            "Connections that this worker can have; more of them wait",
            worker.limit,
        )
        for key, counted in services.items():
            connections.add_metric([str(key)], counted.connections)
            opened.add_metric([str(key)], counted.open)
            octets.add_metric([str(key), "in"], counted.bytes_in)
            octets.add_metric([str(key), "out"], counted.bytes_out)
            refused.add_metric([str(key)], counted.refused)
            failed.add_metric([str(key)], counted.failed)
        return [connections, opened, octets, refused, failed, deaths, used, most]


class ApiServersCollector(Collector):
    """Which API servers get connections, and how many these have, where a gateway balances
    these."""

    def __init__(self, servers: Callable[[], Mapping[str, BalancedServer]]) -> None:
        self._servers = servers

    def collect(self) -> list[GaugeMetricFamily]:
        labels = ["server"]
        ready = GaugeMetricFamily(
            "fairlead_apiserver_ready", "Whether it says that it is ready", labels=labels
        )
        opened = GaugeMetricFamily(
            "fairlead_apiserver_open_connections", "Connections open", labels=labels
        )
        for server, found in self._servers().items():
            ready.add_metric([server], found.state == "ready")
            opened.add_metric([server], found.open)
        return [ready, opened]
