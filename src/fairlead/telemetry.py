"""Logs and metrics: set up and declared here, once.

Logs are events with keys, one line each: key=value on a terminal, JSON elsewhere. Metrics live in a registry of their own
that is passed in, so that two roles in one process (tests) do not mix.
"""

import logging
import sys
from collections.abc import Mapping
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from fairlead.model import LoadBalancer, Outcome, ServiceKey


def configure_logging(verbose: bool = False) -> None:
    """Send structlog's and the standard library's records to standard error in one form."""
    level = logging.DEBUG if verbose else logging.INFO
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    terminal = sys.stderr.isatty()
    render: structlog.typing.Processor = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=shared))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


class Metrics:
    """Every metric of a role."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.services = Gauge("fairlead_services", "Services looked at, by outcome", ["outcome"], registry=self.registry)
        self.members = Gauge("fairlead_members", "Members of all listeners, by state", ["state"], registry=self.registry)
        self.passes = Counter("fairlead_reconciled_services", "Services brought in line", ["loop"], registry=self.registry)

    def show(self, outcomes: Mapping[ServiceKey, Outcome], balancers: Mapping[ServiceKey, LoadBalancer]) -> None:
        """Set the gauges from what is."""
        by_outcome = dict.fromkeys(("done", "refused", "unavailable"), 0)
        for outcome in outcomes.values():
            by_outcome[outcome.state] += 1
        for name, count in by_outcome.items():
            self.services.labels(name).set(count)
        by_state = dict.fromkeys(("active", "draining", "pending", "down"), 0)
        for balancer in balancers.values():
            for listener in balancer.listeners:
                for member in listener.members:
                    by_state[member.state] += 1
        for name, count in by_state.items():
            self.members.labels(name).set(count)


class Traffic(Protocol):
    """A data plane that counts."""

    def counters(self) -> Mapping[ServiceKey, "Counted"]:
        """What was forwarded for each Service."""

    def drops(self) -> Mapping[str, int]:
        """Packets dropped, by reason."""


class Counted(Protocol):
    """What was forwarded since the data plane came up."""

    @property
    def packets(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def flows(self) -> int: ...


class TrafficCollector(Collector):
    """Packets, bytes and new flows of each Service, read from the data plane when a scrape asks."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> list[CounterMetricFamily]:
        packets = CounterMetricFamily("fairlead_packets", "Packets forwarded", labels=["service"])
        octets = CounterMetricFamily("fairlead_bytes", "Bytes forwarded", labels=["service"])
        flows = CounterMetricFamily("fairlead_flows", "New flows forwarded", labels=["service"])
        drops = CounterMetricFamily("fairlead_drops", "Packets dropped by the data plane", labels=["reason"])
        for key, counted in self._traffic.counters().items():
            packets.add_metric([str(key)], counted.packets)
            octets.add_metric([str(key)], counted.bytes)
            flows.add_metric([str(key)], counted.flows)
        for reason, count in self._traffic.drops().items():
            drops.add_metric([reason], count)
        return [packets, octets, flows, drops]
