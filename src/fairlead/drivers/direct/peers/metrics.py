"""Metrics of the exchange between gateways.

In: the other gateways, and counts. Out: metric families. A scrape reads them in a thread.
"""

from collections.abc import Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class ConnectedPeer(Protocol):
    """Another gateway."""

    @property
    def address(self) -> str: ...

    @property
    def connected(self) -> bool: ...


class PeerConnections(Protocol):
    """What the metrics read: `Peers`."""

    @property
    def shown(self) -> Sequence[ConnectedPeer]: ...

    @property
    def listening(self) -> bool: ...

    @property
    def followers(self) -> int: ...

    @property
    def sent(self) -> int: ...

    @property
    def received(self) -> int: ...


class PeersCollector(Collector):
    """The connections to other gateways, and the entries that were exchanged."""

    def __init__(self, peers: PeerConnections) -> None:
        self._peers = peers

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        connected = GaugeMetricFamily(
            "fairlead_peer_connected", "Whether this gateway follows the peer", labels=["peer"]
        )
        for peer in self._peers.shown:
            connected.add_metric([peer.address], peer.connected)
        return [
            connected,
            GaugeMetricFamily(
                "fairlead_peer_listening",
                "1 while this gateway listens for other gateways",
                self._peers.listening,
            ),
            GaugeMetricFamily(
                "fairlead_peer_followers", "Gateways that follow this one", self._peers.followers
            ),
            CounterMetricFamily(
                "fairlead_peer_entries_sent",
                "Flow entries sent to other gateways",
                self._peers.sent,
            ),
            CounterMetricFamily(
                "fairlead_peer_entries_received",
                "Flow entries received from other gateways and stored",
                self._peers.received,
            ),
        ]
