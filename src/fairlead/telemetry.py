"""Logs and metrics: set up and declared here, once.

Logs are events with keys, one line each: key=value on a terminal, JSON elsewhere. Metrics are collected when a scrape asks,
from what is there then, so that no pass of a loop pays for them; each role has a registry of its own.
"""

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from typing import Protocol, get_args

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from fairlead.model import LoadBalancer, MemberState, Outcome, OutcomeState, ServiceKey


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


class CountsTraffic(Protocol):
    """A data plane that counts what it forwards."""

    def counters(self) -> Mapping[ServiceKey, "Counted"]:
        """What was forwarded for each Service."""

    def drops(self) -> Mapping[str, int]:
        """Packets dropped, by reason."""

    def untracked(self) -> int:
        """New flows without an entry, because the limit of new entries was reached."""

    def entries(self) -> Mapping[str, "Filled"]:
        """How full each table of connection entries is."""


class Filled(Protocol):
    """A table of the data plane: how many entries it has, and can have."""

    @property
    def used(self) -> int: ...

    @property
    def most(self) -> int: ...


class Counted(Protocol):
    """What was forwarded since the data plane came up."""

    @property
    def packets(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def flows(self) -> int: ...


class Shown(Protocol):
    """What a role shows of itself; see `web.View`."""

    @property
    def outcomes(self) -> Mapping[ServiceKey, Outcome]: ...

    @property
    def intents(self) -> Mapping[ServiceKey, object]: ...

    @property
    def drift(self) -> int: ...

    @property
    def ready(self) -> bool: ...

    @property
    def working(self) -> bool: ...


class RoleCollector(Collector):
    """What is running here, and whether it is in step."""

    def __init__(self, shown: Shown, role: str) -> None:
        self._shown = shown
        self._info = {"role": role, "version": version("fairlead")}

    def collect(self) -> list[GaugeMetricFamily | InfoMetricFamily]:
        ready = GaugeMetricFamily(
            "fairlead_ready", "Whether this role is in step with the cluster, or stands by", self._shown.ready
        )
        working = GaugeMetricFamily(
            "fairlead_working",
            "Whether this process does its role's work: of several controllers the leader",
            self._shown.working,
        )
        return [InfoMetricFamily("fairlead_build", "Version and role of this process", self._info), ready, working]


class ServicesCollector(Collector):
    """Services by outcome, members of load balancers by state, and how many Services audits found changed by others."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        services = GaugeMetricFamily("fairlead_services", "Services, by what became of them", labels=["outcome"])
        states = Counter(outcome.state for outcome in self._shown.outcomes.values())
        for state in get_args(OutcomeState):
            services.add_metric([state], states[state])
        members = GaugeMetricFamily("fairlead_members", "Members of all listeners, by state", labels=["state"])
        balancers = [intent for intent in self._shown.intents.values() if isinstance(intent, LoadBalancer)]
        found = Counter(member.state for each in balancers for listener in each.listeners for member in listener.members)
        for member_state in get_args(MemberState):
            members.add_metric([member_state], found[member_state])
        drift = CounterMetricFamily("fairlead_drift", "Services that audits found other than planned", self._shown.drift)
        return [services, members, drift]


class TrafficCollector(Collector):
    """Packets, bytes and new flows of each Service, read from the data plane when a scrape asks; and how near the data plane
    is to losing track of connections."""

    def __init__(self, traffic: CountsTraffic) -> None:
        self._traffic = traffic

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
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
        return [packets, octets, flows, drops, *self._entries()]

    def _entries(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        untracked = CounterMetricFamily(
            "fairlead_untracked_flows", "New flows that got no entry: the insert limit was reached", self._traffic.untracked()
        )
        used = GaugeMetricFamily("fairlead_flow_entries", "Connections and UDP flows that have an entry", labels=["table"])
        most = GaugeMetricFamily(
            "fairlead_flow_entries_limit", "Entries there is room for; when all are used, old ones make way", labels=["table"]
        )
        for table, filled in self._traffic.entries().items():
            used.add_metric([table], filled.used)
            most.add_metric([table], filled.most)
        return [untracked, used, most]
