"""The counters of the data plane: for each Service, listener and node, and in total.

In: the maps. Out: numbers, which are read from the maps on each call. The kernel keeps the
counters, so they survive this process. The counters of a listener start when the listener is
created, and end with it. The counters of a node end when the node's number is released, because no
listener names the node any more (see `maps.nodes`)."""

from array import array
from collections.abc import Iterable, Mapping
from operator import add

from fairlead.drivers.direct.host_network.next_hops import METHOD_NAMES
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.nodes import NO_NEXT_HOPS
from fairlead.drivers.direct.maps.quota import Usage
from fairlead.drivers.direct.maps.records import COUNTER, DROPS, UNREACHABLE, NextHop
from fairlead.model import ServiceKey
from fairlead.net.bpf import Map
from fairlead.role_state import ListenerTraffic, NodeTraffic, ServiceTraffic

FLOW_TABLES = (
    "connections",
    "datagrams",
    "new_connections",
    "new_datagrams",
    "closing_connections",
    "excess_flows",
)
MESSAGES = {
    "echo_reply": "ECHO_ANSWERED",
    "too_big": "SIZE_MESSAGES_SENT",
    "refusal": "REFUSALS_SENT",
}
"""Packets that the data plane itself creates: the kind in metrics, and the member of `enum event`
in bpf/structs.h that counts them."""


class Counters:
    """Reads the counters of the listeners and nodes that exist when the object is created.

    The constructor copies the lists of listeners and nodes, so the methods may run in a thread
    while the event loop changes the maps. `events`: the members of `enum event`, number by name."""

    def __init__(
        self, tables: ListenerMaps, maps: Mapping[str, Map], events: Mapping[str, int]
    ) -> None:
        self._maps, self._events = maps, events
        self._listeners = tables.statistics()
        self._resources = tables.quotas.usage()
        self._numbers, self._next_hops = tables.nodes.numbers.copy(), tables.nodes.next_hops.copy()

    def services(self) -> dict[ServiceKey, ServiceTraffic]:
        """Return the traffic of each Service, summed over its listeners."""
        sums = self._sums_of_listeners()
        totals: dict[ServiceKey, list[int]] = {}
        for service, _, index in self._listeners:
            total, row = totals.get(service), sums[index]
            totals[service] = list(map(add, total, row)) if total else row
        return {
            service: ServiceTraffic(packets, octets, flows, _by_reason(drops) if any(drops) else {})
            for service, (packets, octets, flows, *drops) in totals.items()
        }

    def listeners(self) -> dict[str, ListenerTraffic]:
        """Return the traffic of each listener, by `address:port/protocol`."""
        sums = self._sums_of_listeners()
        return {str(key): ListenerTraffic(*sums[index][:3]) for _, key, index in self._listeners}

    def _sums_of_listeners(self) -> dict[int, list[int]]:
        return self._sums("statistics", [index for *_, index in self._listeners])

    def nodes(self) -> dict[str, NodeTraffic]:
        """Return the traffic of each node since the node got its number, by name of the node."""
        sums = self._sums("node_statistics", self._numbers.values())
        return {
            name: NodeTraffic(
                *_forwarding_and_next_hops(self._next_hops.get(name, NO_NEXT_HOPS)), *sums[number]
            )
            for name, number in sorted(self._numbers.items())
        }

    def drops(self) -> dict[str, int]:
        """Return the number of packets for listeners that were dropped since the maps were created,
        by reason."""
        return {reason: self._event(reason.upper()) for reason in DROPS}

    def messages(self) -> dict[str, int]:
        """Return the number of packets that the data plane itself created, by kind."""
        return {kind: self._event(event) for kind, event in MESSAGES.items()}

    def untracked(self) -> int:
        """Return the number of new flows without a flow entry, because the limit of new entries for
        each second was reached. Under a flood of SYNs most of them belong to the flood."""
        return self._event("TRACK_REFUSED")

    def unsent(self) -> int:
        """Return the number of new flow entries that were not sent to peers, because the data plane
        created entries faster than this process read them."""
        return self._event("REPORTS_LOST")

    def entries(self) -> dict[str, Usage]:
        """Return how full each table of flow entries is.

        In a full table each new entry evicts an entry that was not used for a long time. If the
        connection of the evicted entry is still open, and its slot has changed since, the
        connection breaks."""
        return {
            name: Usage(self._maps[name].count(), self._maps[name].spec.max_entries)
            for name in FLOW_TABLES
        }

    def resources(self) -> dict[str, Usage]:
        """Return how full each resource of fixed size is; see `maps.quota`."""
        return self._resources

    def _event(self, name: str) -> int:
        number = self._events[name]
        return self._sums("events", [number])[number][0]

    def _sums(self, name: str, indices: Iterable[int]) -> dict[int, list[int]]:
        """Return the row of 64-bit counters at each of these indices of a map.

        The kernel returns a row for each CPU, one after the other. The rows are summed."""
        columns = self._maps[name].spec.value_size // COUNTER.size
        sums: dict[int, list[int]] = {}
        for index, values in self._maps[name].rows(indices):
            numbers = array("Q", values)
            sums[index] = [sum(numbers[column::columns]) for column in range(columns)]
        return sums


def _by_reason(row: list[int]) -> dict[str, int]:
    return {reason: count for reason, count in zip(DROPS, row, strict=True) if count}


def _forwarding_and_next_hops(
    next_hops: tuple[NextHop, ...],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    known = [each for each in next_hops if each.kind != UNREACHABLE]
    methods = dict.fromkeys(METHOD_NAMES[each.kind] for each in known)
    return tuple(methods), tuple(each.next_hop for each in known)
