"""Metrics of `fairlead probe`. In: the records of a Monitor. Out: metric families.

They are collected in a thread of the metrics server, so the mapping of targets is copied first."""

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlead.reach.monitor import Monitor

QUANTILES = (0.5, 0.9, 0.99, 1.0)


class ProbeCollector(Collector):
    """What the calls of each target have shown."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        calls = CounterMetricFamily(
            "fairlead_probe_calls", "Calls by outcome", labels=["target", "outcome"]
        )
        answers = GaugeMetricFamily(
            "fairlead_probe_answers", "1 while the target answers", labels=["target"]
        )
        latency = GaugeMetricFamily(
            "fairlead_probe_latency_seconds",
            "Time until the answer, since the start",
            labels=["target", "quantile"],
        )
        gaps = CounterMetricFamily(
            "fairlead_probe_gaps", "Times without answers", labels=["target"]
        )
        gap_time = CounterMetricFamily(
            "fairlead_probe_gap_seconds", "Length of the gaps that are over", labels=["target"]
        )
        clients = CounterMetricFamily(
            "fairlead_probe_clients",
            "Answers by whether the server saw the address that called",
            labels=["target", "address"],
        )
        pods = CounterMetricFamily(
            "fairlead_probe_pods", "Answers by pod", labels=["target", "pod"]
        )
        held = GaugeMetricFamily(
            "fairlead_probe_held_connections", "Connections that are kept open", labels=["target"]
        )
        broken = CounterMetricFamily(
            "fairlead_probe_broken_connections",
            "Kept connections that broke",
            labels=["target"],
        )
        stalled = GaugeMetricFamily(
            "fairlead_probe_stalled_seconds", "Longest time for which the probe did not run"
        )
        stalled.add_metric([], self._monitor.stalled_s)
        for target, record in sorted(self._monitor.records.copy().items()):
            name = target.name
            for outcome in ("answered", "failed", "unknown"):
                calls.add_metric([name, outcome], getattr(record, outcome))
            if record.answered or record.failed:
                answers.add_metric([name], record.gap is None)
            if record.latencies.count:
                for quantile in QUANTILES:
                    latency.add_metric([name, f"{quantile:g}"], record.latencies.quantile(quantile))
            gaps.add_metric([name], record.gap_count)
            gap_time.add_metric([name], record.gap_total_s)
            if record.clients:
                clients.add_metric([name, "kept"], record.client_kept)
                clients.add_metric([name, "other"], record.client_hidden)
            for pod, count in record.pods.copy().items():
                pods.add_metric([name, pod], count)
            held.add_metric([name], record.held)
            broken.add_metric([name], record.broken_count)
        return [calls, answers, latency, gaps, gap_time, clients, pods, held, broken, stalled]
