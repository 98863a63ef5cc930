"""Metrics of class ovn.

In: the figures of the driver. Out: metric families, collected at each scrape, in a thread."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class Figures(NamedTuple):
    """`connected`: by the name of the database, whether its copy is up to date. `waiting_rows`: the
    rows for which no confirmation of all chassis has come. `chassis_behind`: the chassis that have
    not reached the last change of the northbound database. `transactions`: their number by result.
    """

    connected: Mapping[str, bool]
    rows: int
    waiting_rows: int
    chassis_behind: int
    transactions: Mapping[str, int]


class OvnCollector(Collector):
    """The figures of class ovn as metrics."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        found = self._figures()
        connected = GaugeMetricFamily(
            "fairlead_ovn_connected",
            "1 while the copy of the database of OVN is up to date",
            labels=["database"],
        )
        for name, is_connected in found.connected.items():
            connected.add_metric([name], is_connected)
        rows = GaugeMetricFamily(
            "fairlead_ovn_rows", "Load balancers of this cluster in OVN", value=found.rows
        )
        waiting = GaugeMetricFamily(
            "fairlead_ovn_waiting_rows",
            "Load balancers that some chassis may not have installed",
            value=found.waiting_rows,
        )
        behind = GaugeMetricFamily(
            "fairlead_ovn_chassis_behind",
            "Chassis that have not confirmed the last change",
            value=found.chassis_behind,
        )
        transactions = CounterMetricFamily(
            "fairlead_ovn_transactions",
            "Transactions on the northbound database of OVN",
            labels=["result"],
        )
        for result, count in found.transactions.items():
            transactions.add_metric([result], count)
        return [connected, rows, waiting, behind, transactions]
