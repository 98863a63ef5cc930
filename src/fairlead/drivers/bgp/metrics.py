"""Metrics of BGP sessions.

In: the tracked sessions, the names of refused peers, whether routes are held back, and the results
of the checks of routes. Out: metric
families, collected at each scrape, in a thread."""

from collections.abc import Callable, Mapping, Set

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlead.drivers.bgp.route_checks import ROUTE_STATES
from fairlead.drivers.bgp.sessions import Tracked


class BgpCollector(Collector):
    """The state of the session with each peer, and the number of prefixes that the peer gets.
    `refused`: returns the names of the peers that cannot be configured, which have no session.
    `cut_off`: returns whether the host is cut off or catches up, and how often it was cut off.
    `routes`: returns the number of checked routes by peer and state."""

    def __init__(
        self,
        sessions: Callable[[], Mapping[str, Tracked]],
        refused: Callable[[], Set[str]],
        cut_off: Callable[[], tuple[bool, int]],
        routes: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        self._sessions = sessions
        self._refused = refused
        self._cut_off = cut_off
        self._routes = routes

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        labels = ["peer"]
        up = GaugeMetricFamily(
            "fairlead_bgp_session_up", "1 if the BGP session is established", labels=labels
        )
        changes = CounterMetricFamily(
            "fairlead_bgp_session_changes",
            "How often the BGP session was established or lost",
            labels=labels,
        )
        prefixes = GaugeMetricFamily(
            "fairlead_bgp_announced_prefixes", "Prefixes that the peer gets", labels=labels
        )
        bfd = GaugeMetricFamily(
            "fairlead_bfd_session_up", "1 if the BFD session is up", labels=labels
        )
        sessions = self._sessions()
        for name in sorted(self._refused() - sessions.keys()):
            up.add_metric([name], 0)
        for name, one in sorted(sessions.items()):
            up.add_metric([name], one.established)
            changes.add_metric([name], one.changes)
            prefixes.add_metric([name], one.session.announced)
            if one.session.bfd:
                bfd.add_metric([name], one.session.bfd == "up")
        routes = GaugeMetricFamily(
            "fairlead_bgp_routes",
            "Announced addresses by what probes show about their routes at the peer",
            labels=["peer", "state"],
        )
        counts = self._routes()
        for name in sorted({name for name, _ in counts}):
            for state in ROUTE_STATES:
                routes.add_metric([name, state], counts.get((name, state), 0))
        held_back, times = self._cut_off()
        cut_off = GaugeMetricFamily(
            "fairlead_bgp_cut_off",
            "1 while no route is exported, because the host is cut off or catches up",
            value=held_back,
        )
        cuts = CounterMetricFamily(
            "fairlead_bgp_cuts", "How often the host was cut off from the network", value=times
        )
        return [up, changes, prefixes, bfd, routes, cut_off, cuts]
