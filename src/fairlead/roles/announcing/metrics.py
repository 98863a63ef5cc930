"""Metrics of the announcement of addresses, whatever the method is.

In: the state of the announcements of this host. Out: metric families. The metrics of BGP sessions
and of other announcers are those of the drivers."""

from collections.abc import Callable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlead.plan.announcer_events import Announced


class AnnouncementCollector(Collector):
    """A Prometheus collector of announced addresses, their moves and conflicts. `conflicts_seen`:
    returns how many conflicts have begun since the start."""

    def __init__(
        self, announced: Callable[[], Announced], conflicts_seen: Callable[[], int]
    ) -> None:
        self._announced = announced
        self._conflicts_seen = conflicts_seen

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        announced = self._announced()
        l2, bgp = announced.l2, announced.bgp
        addresses = GaugeMetricFamily(
            "fairlead_announced_addresses",
            "Addresses that this host announces; with BGP, the addresses that a neighbor has now",
            labels=["method"],
        )
        addresses.add_metric(["l2"], len(l2.addresses))
        by_speaker = bgp.speaker == "routes"
        addresses.add_metric(["bgp"], sum(bool(each.peers) or by_speaker for each in bgp.addresses))
        return [
            addresses,
            CounterMetricFamily(
                "fairlead_address_moves",
                "Addresses that this host began to announce after another announcer",
                l2.moves,
            ),
            CounterMetricFamily(
                "fairlead_address_conflicts",
                "Conflicts with foreign hosts about an address that have begun",
                self._conflicts_seen(),
            ),
            GaugeMetricFamily(
                "fairlead_conflicting_addresses",
                "Announced addresses that a foreign host claims too",
                len({each.address for each in l2.conflicts}),
            ),
        ]
