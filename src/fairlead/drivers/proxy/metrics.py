"""Metrics of the HAProxy of class fairlead.io/proxy, and of the API server balancer.

In: HAProxy's counters. Out: metric families, collected at each scrape, in a thread."""

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
    """Connections and bytes of each Service of class proxy, from HAProxy's own counters; the use of
    HAProxy's limit of connections; the number of its crashes."""

    def __init__(self, counters: ProxyCounters) -> None:
        self._counters = counters

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        services, worker = self._counters.services(), self._counters.worker
        labels = ["service"]
        connections = CounterMetricFamily(
            "fairlead_proxy_connections", "Accepted connections", labels=labels
        )
        opened = GaugeMetricFamily(
            "fairlead_proxy_open_connections",
            "Open connections, also in old workers",
            labels=labels,
        )
        octets = CounterMetricFamily(
            "fairlead_proxy_bytes",
            "Bytes from (in) and to (out) clients, without those of old workers",
            labels=[*labels, "direction"],
        )
        refused = CounterMetricFamily(
            "fairlead_proxy_refused", "Connections from outside of the source ranges", labels=labels
        )
        failed = CounterMetricFamily(
            "fairlead_proxy_member_failures",
            "Connections that a member did not accept",
            labels=labels,
        )
        over_share = CounterMetricFamily(
            "fairlead_proxy_over_share",
            "Connections that were closed because the Service or namespace had reached its share",
            labels=labels,
        )
        unexpected_exits = CounterMetricFamily(
            "fairlead_proxy_unexpected_exits",
            "Unexpected ends of HAProxy, which close all connections",
        )
        unexpected_exits.add_metric([], self._counters.unexpected_exits())
        used = GaugeMetricFamily(
            "fairlead_proxy_worker_connections",
            "Connections of all Services in the current HAProxy worker",
            worker.connections,
        )
        limit = GaugeMetricFamily(
            "fairlead_proxy_worker_connections_limit",
            "Maximum number of connections of this worker; further ones wait",
            worker.limit,
        )
        for key, counted in services.items():
            connections.add_metric([str(key)], counted.connections)
            opened.add_metric([str(key)], counted.open)
            octets.add_metric([str(key), "in"], counted.bytes_in)
            octets.add_metric([str(key), "out"], counted.bytes_out)
            refused.add_metric([str(key)], counted.refused)
            failed.add_metric([str(key)], counted.failed)
            over_share.add_metric([str(key)], counted.over_share)
        return [
            *(connections, opened, octets, refused, failed, over_share),
            *(unexpected_exits, used, limit),
        ]


class ApiServersCollector(Collector):
    """The readiness and the open connections of each API server behind the API server balancer."""

    def __init__(self, servers: Callable[[], Mapping[str, BalancedServer]]) -> None:
        self._servers = servers

    def collect(self) -> list[GaugeMetricFamily]:
        labels = ["server"]
        ready = GaugeMetricFamily(
            "fairlead_apiserver_ready",
            "1 if the API server reports that it is ready",
            labels=labels,
        )
        opened = GaugeMetricFamily(
            "fairlead_apiserver_open_connections", "Open connections", labels=labels
        )
        for server, found in self._servers().items():
            ready.add_metric([server], found.state == "ready")
            opened.add_metric([server], found.open)
        return [ready, opened]
