"""Metrics of the data plane of class fairlead.io/direct.

In: the counters of the data plane. Out: metric families. The counters are read on each scrape, in a
thread."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlead.model import ServiceKey


class TrafficSource(Protocol):
    """The counters of a data plane."""

    def services(self) -> Mapping[ServiceKey, "TrafficCountsWithDrops"]:
        """Return the forwarded and dropped packets of each Service."""

    def nodes(self) -> Mapping[str, "TrafficCountsWithReturned"]:
        """Return, for each node, the packets that were sent to the node and that came back."""

    def drops(self) -> Mapping[str, int]:
        """Return the number of dropped packets by reason."""

    def messages(self) -> Mapping[str, int]:
        """Return the number of packets that the data plane itself created, by kind."""

    def untracked(self) -> int:
        """Return the number of new flows without an entry, because the limit of new entries was
        reached."""

    def unsent(self) -> int:
        """Return the number of new entries that were not sent to peers."""

    def entries(self) -> Mapping[str, "Usage"]:
        """Return how full each table of flow entries is."""

    def resources(self) -> Mapping[str, "Usage"]:
        """Return how full each resource of fixed size is."""


class Usage(Protocol):
    """A table or resource of the data plane: how much is in use, and how much fits."""

    @property
    def used(self) -> int: ...

    @property
    def capacity(self) -> int: ...


class TrafficCounts(Protocol):
    """Forwarded packets, bytes and new flows since the counters were created."""

    @property
    def packets(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def flows(self) -> int: ...


class TrafficCountsWithDrops(TrafficCounts, Protocol):
    """Also counts dropped packets, by reason."""

    @property
    def drops(self) -> Mapping[str, int]: ...


class TrafficCountsWithReturned(TrafficCounts, Protocol):
    """Also counts the packets that came back to the gateway."""

    @property
    def returned(self) -> int: ...


class TrafficCollector(Collector):
    """A Prometheus collector that reads the data plane on each scrape.

    It exports packets, bytes and new flows of each Service and each node, dropped packets by
    reason, and how full the tables of flow entries and the resources of fixed size are."""

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
            # `drops` has only reasons that occurred: a series for each reason of 10,000 Services
            # would be too many.
            for reason, count in counted.drops.items():
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
                "Packets that the data plane itself created",
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
            "Size of each resource; new listeners cannot use the last eighth",
            labels=["resource"],
        )
        for resource, filled in traffic.resources().items():
            used.add_metric([resource], filled.used)
            limit.add_metric([resource], filled.capacity)
        return [used, limit]

    def _entries(self, traffic: TrafficSource) -> list[GaugeMetricFamily | CounterMetricFamily]:
        untracked = CounterMetricFamily(
            "fairlead_untracked_flows",
            "New flows without an entry, because the limit of new entries was reached",
            traffic.untracked(),
        )
        unsent = CounterMetricFamily(
            "fairlead_peer_entries_unsent",
            "Entries that were not sent to peers, because they were created too fast",
            traffic.unsent(),
        )
        used = GaugeMetricFamily(
            "fairlead_flow_entries",
            "Flows that have an entry",
            labels=["table"],
        )
        limit = GaugeMetricFamily(
            "fairlead_flow_entries_limit",
            "Size of each table of flow entries; in a full table new entries evict old ones",
            labels=["table"],
        )
        for table, filled in traffic.entries().items():
            used.add_metric([table], filled.used)
            limit.add_metric([table], filled.capacity)
        return [untracked, unsent, used, limit]


class AttachedInterface(Protocol):
    """An interface of the gateway; see `role_state.InterfaceState`."""

    @property
    def name(self) -> str: ...

    @property
    def problem(self) -> str: ...


class InterfacesCollector(Collector):
    """Whether the programs at each interface forward now, and how often others removed them."""

    def __init__(
        self,
        interfaces: Callable[[], Sequence[AttachedInterface]],
        removals: Callable[[], Mapping[str, int]],
    ) -> None:
        self._interfaces = interfaces
        self._removals = removals

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        forwarding = GaugeMetricFamily(
            "fairlead_interface_forwarding",
            "1 while the interface is up and has the gateway's program",
            labels=["interface"],
        )
        interfaces = self._interfaces()
        for each in interfaces:
            forwarding.add_metric([each.name], not each.problem)
        removed = CounterMetricFamily(
            "fairlead_programs_removed",
            "Programs that another process has removed, and the gateway has attached again",
            labels=["interface"],
        )
        for name, count in ({each.name: 0 for each in interfaces} | dict(self._removals())).items():
            removed.add_metric([name], count)
        return [forwarding, removed]


def _traffic_families(
    prefix: str, label: str, rows: Mapping[str, TrafficCounts]
) -> list[CounterMetricFamily]:
    """Return three families: packets, bytes and flows."""
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
