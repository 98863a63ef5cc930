"""Logs and metrics: set up and declared here, once.

Logs are events with keys, one line each: key=value on a terminal, JSON elsewhere. Metrics are
collected when a scrape asks, from what is there then, so that no pass of a loop pays for them; each
role has a registry of its own. They are collected in a thread: what others change meanwhile is
copied first, in one step."""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    render: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=shared)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


class CountsTraffic(Protocol):
    """A data plane that counts what it forwards."""

    def services(self) -> Mapping[ServiceKey, "CountedWithDrops"]:
        """What was forwarded for each Service, and dropped."""

    def nodes(self) -> Mapping[str, "CountedWithReturned"]:
        """What was forwarded to each node, and came back."""

    def drops(self) -> Mapping[str, int]:
        """Packets dropped, by reason."""

    def messages(self) -> Mapping[str, int]:
        """Packets of its own that it sent, by kind."""

    def untracked(self) -> int:
        """New flows without an entry, because the limit of new entries was reached."""

    def untold(self) -> int:
        """New entries that other gateways were not told of."""

    def entries(self) -> Mapping[str, "Filled"]:
        """How full each table of connection entries is."""

    def resources(self) -> Mapping[str, "Filled"]:
        """How much is used of each resource whose size is fixed."""


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


class CountedWithDrops(Counted, Protocol):
    """And what was dropped, by reason."""

    @property
    def drops(self) -> Mapping[str, int]: ...


class CountedWithReturned(Counted, Protocol):
    """Also counts the packets that came back to the gateway."""

    @property
    def returned(self) -> int: ...


class Shown(Protocol):
    """What a role shows of itself; see `web.View`."""

    @property
    def outcomes(self) -> dict[ServiceKey, Outcome]: ...

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
            "fairlead_ready",
            "Whether this role is in step with the cluster, or stands by",
            self._shown.ready,
        )
        working = GaugeMetricFamily(
            "fairlead_working",
            "Whether this process does its role's work: of several controllers the leader",
            self._shown.working,
        )
        return [
            InfoMetricFamily("fairlead_build", "Version and role of this process", self._info),
            ready,
            working,
        ]


class Ages(Protocol):
    """The ages of a process's watches; see `kube.freshness`."""

    @property
    def reachable(self) -> bool: ...

    def ages(self) -> Mapping[str, float]: ...


class FreshnessCollector(Collector):
    """The age of each watch, and whether the API server answers."""

    def __init__(self, freshness: Ages) -> None:
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
    """Services by outcome, members of load balancers by state, and how many Services audits found
    changed by others."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        services = GaugeMetricFamily(
            "fairlead_services", "Services, by what became of them", labels=["outcome"]
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
            "fairlead_drift", "Services that audits found other than planned", self._shown.drift
        )
        return [services, members, drift]


class Heard(Protocol):
    """Another gateway."""

    @property
    def address(self) -> str: ...

    @property
    def connected(self) -> bool: ...


class Exchanges(Protocol):
    """What gateways tell each other."""

    @property
    def shown(self) -> Sequence[Heard]: ...

    @property
    def followers(self) -> int: ...

    @property
    def sent(self) -> int: ...

    @property
    def received(self) -> int: ...


class CountsTunnel(Protocol):
    """The end of a tunnel, which counts what arrives."""

    def counters(self) -> Mapping[str, int]:
        """Packets, by what became of them."""


class TunnelCollector(Collector):
    """What came through the tunnel to this node, by what became of it."""

    def __init__(self, tunnel: CountsTunnel) -> None:
        self._tunnel = tunnel

    def collect(self) -> list[CounterMetricFamily]:
        packets = CounterMetricFamily(
            "fairlead_tunnel_packets", "Packets at the end of a tunnel", labels=["outcome"]
        )
        for outcome, count in self._tunnel.counters().items():
            packets.add_metric([outcome], count)
        return [packets]


class PeersCollector(Collector):
    """Whether other gateways are heard, and what they tell each other."""

    def __init__(self, peers: "Exchanges") -> None:
        self._peers = peers

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        heard = GaugeMetricFamily(
            "fairlead_peer_connected", "Whether this gateway follows that one", labels=["peer"]
        )
        for peer in self._peers.shown:
            heard.add_metric([peer.address], peer.connected)
        return [
            heard,
            GaugeMetricFamily(
                "fairlead_peer_followers", "Gateways that follow this one", self._peers.followers
            ),
            CounterMetricFamily(
                "fairlead_peer_entries_sent",
                "Entries of flows told to other gateways",
                self._peers.sent,
            ),
            CounterMetricFamily(
                "fairlead_peer_entries_received",
                "Entries taken over from them",
                self._peers.received,
            ),
        ]


class Proxied(Protocol):
    """What a balancer that ends connections has counted for a Service."""

    @property
    def connections(self) -> int: ...

    @property
    def open(self) -> int: ...

    @property
    def bytes_in(self) -> int: ...

    @property
    def bytes_out(self) -> int: ...

    @property
    def refused(self) -> int: ...

    @property
    def failed(self) -> int: ...


class ProxyWorker(Protocol):
    """The process that takes connections for such a balancer."""

    @property
    def connections(self) -> int: ...

    @property
    def limit(self) -> int: ...


class CountsProxied(Protocol):
    """What such a balancer has counted."""

    @property
    def worker(self) -> ProxyWorker: ...

    def services(self) -> Mapping[ServiceKey, Proxied]:
        """What was passed on for each Service."""

    def deaths(self) -> int:
        """How often it has died."""


class ProxyCollector(Collector):
    """Connections and bytes of each Service of class proxy, from HAProxy's own counters; how near
    all together are to its limit; how often it has died."""

    def __init__(self, counters: CountsProxied) -> None:
        self._counters = counters

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        services, worker = self._counters.services(), self._counters.worker
        labels = ["service"]
        connections = CounterMetricFamily(
            "fairlead_proxy_connections", "Connections taken", labels=labels
        )
        opened = GaugeMetricFamily(
            "fairlead_proxy_open_connections", "Connections open, in old workers too", labels=labels
        )
        octets = CounterMetricFamily(
            "fairlead_proxy_bytes",
            "Bytes from (in) and to clients, but for old workers",
            labels=[*labels, "direction"],
        )
        refused = CounterMetricFamily(
            "fairlead_proxy_refused", "Connections of no source range", labels=labels
        )
        failed = CounterMetricFamily(
            "fairlead_proxy_member_failures",
            "Connections that a member did not take",
            labels=labels,
        )
        deaths = CounterMetricFamily(
            "fairlead_proxy_deaths", "How often HAProxy has died, with all connections"
        )
        deaths.add_metric([], self._counters.deaths())
        used = GaugeMetricFamily(
            "fairlead_proxy_worker_connections",
            "Connections of all Services in the HAProxy worker that takes new ones",
            worker.connections,
        )
        most = GaugeMetricFamily(
            "fairlead_proxy_worker_connections_limit",
            "Connections that this worker can have; more of them wait",
            worker.limit,
        )
        for key, counted in services.items():
            connections.add_metric([str(key)], counted.connections)
            opened.add_metric([str(key)], counted.open)
            octets.add_metric([str(key), "in"], counted.bytes_in)
            octets.add_metric([str(key), "out"], counted.bytes_out)
            refused.add_metric([str(key)], counted.refused)
            failed.add_metric([str(key)], counted.failed)
        return [connections, opened, octets, refused, failed, deaths, used, most]


class BalancedServer(Protocol):
    """An API server behind the API's balancer."""

    @property
    def state(self) -> str: ...

    @property
    def open(self) -> int: ...


class ApiServersCollector(Collector):
    """Which API servers get connections, and how many these have, where a gateway balances
    these."""

    def __init__(self, servers: Callable[[], Mapping[str, BalancedServer]]) -> None:
        self._servers = servers

    def collect(self) -> list[GaugeMetricFamily]:
        labels = ["server"]
        ready = GaugeMetricFamily(
            "fairlead_apiserver_ready", "Whether it says that it is ready", labels=labels
        )
        opened = GaugeMetricFamily(
            "fairlead_apiserver_open_connections", "Connections open", labels=labels
        )
        for server, found in self._servers().items():
            ready.add_metric([server], found.state == "ready")
            opened.add_metric([server], found.open)
        return [ready, opened]


class TrafficCollector(Collector):
    """Packets, bytes and new flows of each Service and of each node, read from the data plane when
    a scrape asks; what it dropped and why; and how near it is to losing track of connections."""

    def __init__(self, traffic: Callable[[], CountsTraffic]) -> None:
        self._traffic = traffic

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        traffic = self._traffic()
        services, nodes = traffic.services(), traffic.nodes()
        returned = {name: counted.returned for name, counted in nodes.items()}
        refused = CounterMetricFamily(
            "fairlead_service_drops",
            "Packets for a Service that were dropped",
            labels=["service", "reason"],
        )
        for key, counted in services.items():
            for (
                reason,
                count,
            ) in (
                counted.drops.items()
            ):  # only what there was: seven for each of 10,000 Services are too many
                refused.add_metric([str(key), reason], count)
        return [
            *_counted(
                "fairlead", "service", {str(key): counted for key, counted in services.items()}
            ),
            refused,
            *_counted("fairlead_node", "node", nodes),
            _by(
                "fairlead_node_returned_packets",
                "Packets sent to the node that came back to this gateway",
                "node",
                returned,
            ),
            _by("fairlead_drops", "Packets dropped by the data plane", "reason", traffic.drops()),
            _by(
                "fairlead_messages",
                "Packets that the data plane sent of its own",
                "kind",
                traffic.messages(),
            ),
            *self._entries(traffic),
            *self._resources(traffic),
        ]

    def _resources(self, traffic: CountsTraffic) -> list[GaugeMetricFamily]:
        used = GaugeMetricFamily(
            "fairlead_gateway_resource_used",
            "Table memory (bytes), listeners, retained nodes and source ranges in use",
            labels=["resource"],
        )
        limit = GaugeMetricFamily(
            "fairlead_gateway_resource_limit",
            "Size of each resource; the last eighth is for changes of Services that are served",
            labels=["resource"],
        )
        for resource, filled in traffic.resources().items():
            used.add_metric([resource], filled.used)
            limit.add_metric([resource], filled.most)
        return [used, limit]

    def _entries(self, traffic: CountsTraffic) -> list[GaugeMetricFamily | CounterMetricFamily]:
        untracked = CounterMetricFamily(
            "fairlead_untracked_flows",
            "New flows that got no entry: the insert limit was reached",
            traffic.untracked(),
        )
        untold = CounterMetricFamily(
            "fairlead_untold_entries",
            "Entries that peers were not told of: they came too fast",
            traffic.untold(),
        )
        used = GaugeMetricFamily(
            "fairlead_flow_entries",
            "Connections and UDP flows that have an entry",
            labels=["table"],
        )
        most = GaugeMetricFamily(
            "fairlead_flow_entries_limit",
            "Entries there is room for; when all are used, old ones make way",
            labels=["table"],
        )
        for table, filled in traffic.entries().items():
            used.add_metric([table], filled.used)
            most.add_metric([table], filled.most)
        return [untracked, untold, used, most]


def _counted(prefix: str, label: str, rows: Mapping[str, Counted]) -> list[CounterMetricFamily]:
    """Three families: packets, bytes, flows."""
    packets = CounterMetricFamily(f"{prefix}_packets", "Packets forwarded", labels=[label])
    octets = CounterMetricFamily(f"{prefix}_bytes", "Bytes forwarded", labels=[label])
    flows = CounterMetricFamily(f"{prefix}_flows", "New flows forwarded", labels=[label])
    for name, counted in rows.items():
        packets.add_metric([name], counted.packets)
        octets.add_metric([name], counted.bytes)
        flows.add_metric([name], counted.flows)
    return [packets, octets, flows]


def _by(name: str, what: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, what, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
