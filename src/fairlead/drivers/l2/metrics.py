"""Metrics of layer 2 announcement, apart from moves and conflicts (`roles.announcing.metrics`).

In: what the driver knows, and the counters of the kernel. Out: metric families, collected at each
scrape, in a thread."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Numbers(NamedTuple):
    """`owned`: the number of owned addresses by interface. `members`: the standing of each other
    announcer, by interface and name. `events`: the counters of the kernel."""

    owned: Mapping[str, int]
    members: Sequence[tuple[str, str]]
    announcements: int
    events: Mapping[str, int]


class L2Collector(Collector):
    """The addresses that this host announces, and what the kernel has answered."""

    def __init__(self, numbers: Callable[[], Numbers]) -> None:
        self._numbers = numbers

    def collect(self) -> list[Metric]:
        numbers = self._numbers()
        owned = GaugeMetricFamily(
            "fairlead_l2_owned_addresses",
            "Addresses for which this host answers",
            labels=["interface"],
        )
        for interface, count in numbers.owned.items():
            owned.add_metric([interface], count)
        members = GaugeMetricFamily(
            "fairlead_l2_members", "Other announcers, by state", labels=["interface", "state"]
        )
        for labels, count in Counter(numbers.members).items():
            members.add_metric(labels, count)
        sent = CounterMetricFamily(
            "fairlead_l2_announcements", "Frames with which this host announced addresses"
        )
        sent.add_metric([], numbers.announcements)
        events = CounterMetricFamily(
            "fairlead_l2_events",
            "Frames that the kernel answered, dropped or recorded",
            labels=["event"],
        )
        for event, count in numbers.events.items():
            events.add_metric([event], count)
        return [owned, members, sent, events]
