"""Metrics of what gateways tell each other.

In: the other gateways, and counts. Out: metric families, read when a scrape asks, in a thread."""

from collections.abc import Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class PeerState(Protocol):
    """Another gateway."""

    @property
    def address(self) -> str: ...

    @property
    def connected(self) -> bool: ...


class PeersState(Protocol):
    """What gateways tell each other."""

    @property
    def shown(self) -> Sequence[PeerState]: ...

    @property
    def followers(self) -> int: ...

    @property
    def sent(self) -> int: ...

    @property
    def received(self) -> int: ...


class PeersCollector(Collector):
    """Whether other gateways are connected, and what they tell each other."""

    def __init__(self, peers: PeersState) -> None:
        self._peers = peers

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        connected = GaugeMetricFamily(
            "fairlead_peer_connected", "Whether this gateway follows that one", labels=["peer"]
        )
        for peer in self._peers.shown:
            connected.add_metric([peer.address], peer.connected)
        return [
            connected,
            GaugeMetricFamily(
                "fairlead_peer_followers", "Gateways that follow this one", self._peers.followers
            ),
            CounterMetricFamily(
                "fairlead_peer_entries_sent",
                "Entries of flows told to other gateways",
                self._peers.sent,
            ),
            CounterMetricFamily(
                "fairlead_peer_entries_received",
                "Entries taken over from them",
                self._peers.received,
            ),
        ]
