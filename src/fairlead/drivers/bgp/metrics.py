"""Metrics of the announcement of addresses by BGP. In: what the driver knows. Out: metric
families."""

from collections.abc import Callable, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlead.role_state import BgpSessionState


class BgpCollector(Collector):
    """The sessions with routers, and the number of announced addresses. The functions return
    these."""

    def __init__(
        self, sessions: Callable[[], Sequence[BgpSessionState]], addresses: Callable[[], int]
    ) -> None:
        self._sessions = sessions
        self._addresses = addresses

    def collect(self) -> list[GaugeMetricFamily]:
        up = GaugeMetricFamily(
            "fairlead_bgp_session_up",
            "Whether the BGP session with a router is established",
            labels=["router"],
        )
        bfd = GaugeMetricFamily(
            "fairlead_bgp_bfd_up",
            "Whether the BFD session with a router is up",
            labels=["router"],
        )
        for each in self._sessions():
            up.add_metric([each.router], each.state == "Established")
            if each.bfd:
                bfd.add_metric([each.router], each.bfd == "Up")
        addresses = GaugeMetricFamily(
            "fairlead_bgp_announced_addresses",
            "Addresses that this gateway announces by BGP",
            value=self._addresses(),
        )
        return [up, bfd, addresses]
