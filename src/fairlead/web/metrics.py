"""Metrics of every role: its version, whether it is in step with the cluster, the outcomes of
Services, the ages of its watches.

In: the state of the role. Out: metric families, computed at each scrape, in a thread: data that the
event loop changes meanwhile is first copied in one step."""

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from typing import Protocol, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from fairlead.kube.freshness import Freshness
from fairlead.model import LoadBalancer, MemberState, Outcome, OutcomeState, ServiceKey


class Shown(Protocol):
    """The state of a role; see `web.View`."""

    @property
    def outcomes(self) -> dict[ServiceKey, Outcome]: ...

    @property
    def intents(self) -> Mapping[ServiceKey, object]: ...

    @property
    def drift(self) -> int: ...

    @property
    def slow(self) -> int: ...

    @property
    def ready(self) -> bool: ...

    @property
    def working(self) -> bool: ...


class RoleCollector(Collector):
    """The version and role of this process, and whether it is in step with the cluster."""

    def __init__(self, shown: Shown, role: str) -> None:
        self._shown = shown
        self._info = {"role": role, "version": version("fairlead")}

    def collect(self) -> list[GaugeMetricFamily | InfoMetricFamily]:
        ready = GaugeMetricFamily(
            "fairlead_ready",
            "Whether this role is in step with the cluster, or stands by",
            self._shown.ready,
        )
        working = GaugeMetricFamily(
            "fairlead_working",
            "Whether this process does the work of its role; only the leading controller does",
            self._shown.working,
        )
        return [
            InfoMetricFamily("fairlead_build", "Version and role of this process", self._info),
            ready,
            working,
        ]


class FreshnessCollector(Collector):
    """The age of each watch, and whether the API server answers."""

    def __init__(self, freshness: Freshness) -> None:
        self._freshness = freshness

    def collect(self) -> list[GaugeMetricFamily]:
        age = GaugeMetricFamily(
            "fairlead_watch_age_seconds",
            "Time since a watch of the API server was last proved to be current",
            labels=["watch"],
        )
        for name, age_s in self._freshness.ages().items():
            age.add_metric([name], age_s)
        reachable = GaugeMetricFamily(
            "fairlead_api_reachable",
            "Whether the API server answers the requests of this process",
            self._freshness.reachable,
        )
        return [age, reachable]


class ServicesCollector(Collector):
    """Services by outcome, members of load balancers by state, and the number of Services that
    audits found to differ from the plan."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        services = GaugeMetricFamily(
            "fairlead_services", "Services, by outcome", labels=["outcome"]
        )
        states = Counter(outcome.state for outcome in self._shown.outcomes.copy().values())
        for state in get_args(OutcomeState):
            services.add_metric([state], states[state])
        members = GaugeMetricFamily(
            "fairlead_members", "Members of all listeners, by state", labels=["state"]
        )
        balancers = [
            intent
            for intent in dict(self._shown.intents).values()
            if isinstance(intent, LoadBalancer)
        ]
        found = Counter(
            member.state
            for each in balancers
            for listener in each.listeners
            for member in listener.members
        )
        for member_state in get_args(MemberState):
            members.add_metric([member_state], found[member_state])
        drift = CounterMetricFamily(
            "fairlead_drift",
            "Services that audits found to differ from the plan",
            self._shown.drift,
        )
        slow = GaugeMetricFamily(
            "fairlead_slow_services",
            "Services whose plan takes more than half a second of CPU time",
            self._shown.slow,
        )
        return [services, members, drift, slow]
