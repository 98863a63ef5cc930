"""What the data plane has counted: for each Service, for each node, and in all.

In: the maps. Out: numbers, read when somebody asks. They are the kernel's, and so survive this
process; those of a listener begin when it is made and end with it, those of a node end when nothing
stands for it any more."""

from array import array
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fairlead.drivers.direct.host_network.next_hops import WAY_NAMES
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.nodes import NO_WAYS
from fairlead.drivers.direct.maps.quota import Filled
from fairlead.drivers.direct.maps.records import COUNTER, DROPS, NOWHERE, NextHop
from fairlead.model import ServiceKey
from fairlead.net.bpf import Map

FLOW_TABLES = (
    "connections",
    "datagrams",
    "new_connections",
    "new_datagrams",
    "closing_connections",
)
MESSAGES = {"echo_reply": "ECHO_ANSWERED", "too_big": "TOLD_TOO_BIG", "refusal": "TOLD_REFUSED"}
"""Packets that the data plane sends of its own, and the event that counts them."""


class Traffic(NamedTuple):
    """What was forwarded so far. `flows`: TCP and SCTP connections that opened, UDP flows that were
    new."""

    packets: int = 0
    bytes: int = 0
    flows: int = 0


class ServiceTraffic(NamedTuple):
    """What a Service's listeners got. `drops`: packets for them that were dropped, by reason, those
    that there were."""

    packets: int
    bytes: int
    flows: int
    drops: Mapping[str, int]


class NodeTraffic(NamedTuple):
    """What was sent to a node, and how: the kinds of its ways and the next-hop addresses, for each
    of its families. `returned`: packets that came back to this gateway after they had been sent to
    this node."""

    forwarding: tuple[str, ...]
    next_hops: tuple[str, ...]
    packets: int
    bytes: int
    flows: int
    returned: int = 0


class Counters:
    """What there is to count for is noted when this is made; all else may be asked for in a thread,
    beside changes.

    `events`: the numbers of what is counted for all, by name."""

    def __init__(
        self, tables: ListenerMaps, maps: Mapping[str, Map], events: Mapping[str, int]
    ) -> None:
        self._maps, self._events = maps, events
        self._listeners = tables.statistics()
        self._resources = tables.quotas.filled()
        self._numbers, self._ways = tables.nodes.numbers.copy(), tables.nodes.by_name.copy()

    def services(self) -> dict[ServiceKey, ServiceTraffic]:
        """What each Service got since its listeners were made."""
        counted = self._sums("statistics", [index for _, index in self._listeners])
        totals: dict[ServiceKey, list[int]] = {}
        for service, index in self._listeners:
            before, row = totals.get(service), counted[index]
            totals[service] = (
                [one + other for one, other in zip(before, row, strict=True)] if before else row
            )
        return {
            service: ServiceTraffic(packets, octets, flows, _by_reason(drops) if any(drops) else {})
            for service, (packets, octets, flows, *drops) in totals.items()
        }

    def nodes(self) -> dict[str, NodeTraffic]:
        """What each node got since it has been known here, by name."""
        counted = self._sums("node_statistics", self._numbers.values())
        return {
            name: NodeTraffic(
                *_forwarding_and_next_hops(self._ways.get(name, NO_WAYS)), *counted[number]
            )
            for name, number in sorted(self._numbers.items())
        }

    def drops(self) -> dict[str, int]:
        """Packets for listeners that were dropped since the maps were made, by reason: those of
        `enum event`."""
        return {reason: self._event(reason.upper()) for reason in DROPS}

    def messages(self) -> dict[str, int]:
        """Packets sent of the data plane's own, by kind."""
        return {kind: self._event(event) for kind, event in MESSAGES.items()}

    def untracked(self) -> int:
        """New flows that got no entry, because the insert limit was reached. Under a flood of SYNs,
        the flood."""
        return self._event("TRACK_REFUSED")

    def unsent(self) -> int:
        """New entries that other gateways were not told of, because they came faster than they were
        read."""
        return self._event("NEWS_LOST")

    def entries(self) -> dict[str, Filled]:
        """How full the tables of flows are. In a full table each new entry evicts one that was not
        used for long; if the connection of the evicted entry is still open, and its slot has
        changed since, the connection breaks."""
        return {
            name: Filled(self._maps[name].count(), self._maps[name].spec.max_entries)
            for name in FLOW_TABLES
        }

    def resources(self) -> dict[str, Filled]:
        """How much is used of each resource whose size is fixed: see `quota`."""
        return self._resources

    def _event(self, name: str) -> int:
        number = self._events[name]
        return self._sums("events", [number])[number][0]

    def _sums(self, name: str, indices: Iterable[int]) -> dict[int, list[int]]:
        """What is counted at these indices of a map, each a row of 64-bit numbers, over all
        CPUs."""
        columns = self._maps[name].spec.value_size // COUNTER.size
        found: dict[int, list[int]] = {}
        for index, values in self._maps[name].rows(indices):
            numbers = array("Q", values)
            found[index] = [sum(numbers[column::columns]) for column in range(columns)]
        return found


def _by_reason(row: list[int]) -> dict[str, int]:
    return {reason: count for reason, count in zip(DROPS, row, strict=True) if count}


def _forwarding_and_next_hops(ways: tuple[NextHop, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    there = [way for way in ways if way.kind != NOWHERE]
    return tuple(dict.fromkeys(WAY_NAMES[way.kind] for way in there)), tuple(
        way.next_hop for way in there
    )
