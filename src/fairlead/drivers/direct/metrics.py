"""Metrics of the data plane of class fairlead.io/direct.

In: its counters. Out: metric families, read when a scrape asks, in a thread."""

from collections.abc import Callable, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlead.model import ServiceKey


class TrafficSource(Protocol):
    """A data plane that counts what it forwards."""

    def services(self) -> Mapping[ServiceKey, "TrafficCountsWithDrops"]:
        """What was forwarded for each Service, and dropped."""

    def nodes(self) -> Mapping[str, "TrafficCountsWithReturned"]:
        """What was forwarded to each node, and came back."""

    def drops(self) -> Mapping[str, int]:
        """Packets dropped, by reason."""

    def messages(self) -> Mapping[str, int]:
        """Packets of its own that it sent, by kind."""

    def untracked(self) -> int:
        """New flows without an entry, because the limit of new entries was reached."""

    def unsent(self) -> int:
        """New entries that other gateways were not told of."""

    def entries(self) -> Mapping[str, "Filled"]:
        """How full each table of connection entries is."""

    def resources(self) -> Mapping[str, "Filled"]:
        """How much is used of each resource whose size is fixed."""


class Filled(Protocol):
    """A table of the data plane: how many entries it has, and can have."""

    @property
    def used(self) -> int: ...

    @property
    def most(self) -> int: ...


class TrafficCounts(Protocol):
    """What was forwarded since the data plane came up."""

    @property
    def packets(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def flows(self) -> int: ...


class TrafficCountsWithDrops(TrafficCounts, Protocol):
    """And what was dropped, by reason."""

    @property
    def drops(self) -> Mapping[str, int]: ...


class TrafficCountsWithReturned(TrafficCounts, Protocol):
    """Also counts the packets that came back to the gateway."""

    @property
    def returned(self) -> int: ...


class TrafficCollector(Collector):
    """Packets, bytes and new flows of each Service and of each node, read from the data plane when
    a scrape asks; what it dropped and why; and how near it is to losing track of connections."""

    def __init__(self, traffic: Callable[[], TrafficSource]) -> None:
        self._traffic = traffic

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        traffic = self._traffic()
        services, nodes = traffic.services(), traffic.nodes()
        returned = {name: counted.returned for name, counted in nodes.items()}
        drops = CounterMetricFamily(
            "fairlead_service_drops",
            "Packets for a Service that were dropped",
            labels=["service", "reason"],
        )
        for key, counted in services.items():
            for (
                reason,
                count,
            ) in (
                counted.drops.items()
            ):  # only what there was: seven for each of 10,000 Services are too many
                drops.add_metric([str(key), reason], count)
        return [
            *_traffic_families(
                "fairlead", "service", {str(key): counted for key, counted in services.items()}
            ),
            drops,
            *_traffic_families("fairlead_node", "node", nodes),
            _labelled_family(
                "fairlead_node_returned_packets",
                "Packets sent to the node that came back to this gateway",
                "node",
                returned,
            ),
            _labelled_family(
                "fairlead_drops", "Packets dropped by the data plane", "reason", traffic.drops()
            ),
            _labelled_family(
                "fairlead_messages",
                "Packets that the data plane sent of its own",
                "kind",
                traffic.messages(),
            ),
            *self._entries(traffic),
            *self._resources(traffic),
        ]

    def _resources(self, traffic: TrafficSource) -> list[GaugeMetricFamily]:
        used = GaugeMetricFamily(
            "fairlead_gateway_resource_used",
            "Table memory (bytes), listeners, retained nodes and source ranges in use",
            labels=["resource"],
        )
        limit = GaugeMetricFamily(
            "fairlead_gateway_resource_limit",
            "Size of each resource; the last eighth is for changes of Services that are served",
            labels=["resource"],
        )
        for resource, filled in traffic.resources().items():
            used.add_metric([resource], filled.used)
            limit.add_metric([resource], filled.most)
        return [used, limit]

    def _entries(self, traffic: TrafficSource) -> list[GaugeMetricFamily | CounterMetricFamily]:
        untracked = CounterMetricFamily(
            "fairlead_untracked_flows",
            "New flows that got no entry: the insert limit was reached",
            traffic.untracked(),
        )
        unsent = CounterMetricFamily(
            "fairlead_peer_entries_unsent",
            "Entries that peers were not told of: they came too fast",
            traffic.unsent(),
        )
        used = GaugeMetricFamily(
            "fairlead_flow_entries",
            "Connections and UDP flows that have an entry",
            labels=["table"],
        )
        limit = GaugeMetricFamily(
            "fairlead_flow_entries_limit",
            "Entries there is room for; when all are used, old ones make way",
            labels=["table"],
        )
        for table, filled in traffic.entries().items():
            used.add_metric([table], filled.used)
            limit.add_metric([table], filled.most)
        return [untracked, unsent, used, limit]


def _traffic_families(
    prefix: str, label: str, rows: Mapping[str, TrafficCounts]
) -> list[CounterMetricFamily]:
    """Three families: packets, bytes, flows."""
    packets = CounterMetricFamily(f"{prefix}_packets", "Packets forwarded", labels=[label])
    octets = CounterMetricFamily(f"{prefix}_bytes", "Bytes forwarded", labels=[label])
    flows = CounterMetricFamily(f"{prefix}_flows", "New flows forwarded", labels=[label])
    for name, counted in rows.items():
        packets.add_metric([name], counted.packets)
        octets.add_metric([name], counted.bytes)
        flows.add_metric([name], counted.flows)
    return [packets, octets, flows]


def _labelled_family(
    name: str, what: str, label: str, counts: Mapping[str, int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, what, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
