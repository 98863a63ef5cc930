"""`fairlead gateway`: takes packets for load-balancer addresses and hands them to nodes that can
serve them.

In: Services with their addresses (from status, where the controller publishes them),
EndpointSlices, Nodes, its own probes of the nodes. Out: the eBPF data plane of this host (class
direct) and a HAProxy (class proxy). Any number of gateways share the work without talking to each
other: same objects, same plan. Stopped or killed, the kernel goes on forwarding by the last tables,
and HAProxy by what it was last told; the next start adopts them. It may be the balancer of the API
server itself, too: that is up before there is any answer of the API, and so the way to the API may
lead through it. Where it has peers they tell each other about what is in transition, so that
connections may pass between them then, too.

Two loops run over one plan. The first keeps the probes equal to it; what they show is part of the
plan of the second, which keeps the data plane equal to it. A start must not take traffic away from
nodes only because nothing is known of them yet: it waits for the first answers, and where there are
too many to ask the API is believed until each has had its turn."""

import asyncio
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from fairlead.config import Config
from fairlead.drivers import Component
from fairlead.drivers.direct import (
    DirectDriver,
    Peers,
    PeerTLS,
    ProbePaths,
    Rules,
    Sizes,
)
from fairlead.drivers.host import Host
from fairlead.drivers.prober import Prober
from fairlead.drivers.proxy import ApiServerBalancer, ProxyDriver
from fairlead.errors import FairleadError, Refused
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.model import Finding, LoadBalancer, ServiceKey
from fairlead.net.httpprobe import PROBE_MARK
from fairlead.net.selection import of_host
from fairlead.plan.members import HEALTH_CHECKS_FAILING, HEALTH_CHECKS_FLAPPING, NODE_NOT_ANSWERING
from fairlead.plan.projection import GATEWAY
from fairlead.reconcile import Loop, Pace
from fairlead.role_state import ProbedNode, ProbesState
from fairlead.roles.ahead import StartupPrefetch
from fairlead.roles.components import Context, Task, remove_components, run_components
from fairlead.roles.host import HostSettings
from fairlead.roles.planned import Planned
from fairlead.roles.presence import Announcer
from fairlead.roles.probing import command as probing_command
from fairlead.roles.process import SOURCES, Feed, freshness_of
from fairlead.roles.report import Reporter
from fairlead.roles.returned import watch_returned
from fairlead.state import State
from fairlead.web import View, serve

log = structlog.get_logger()

SYNC_FAILED = "SyncGatewayFailed"
DEFAULT_LISTEN = "127.0.0.1:9441"
PATIENCE_S = 5.0
"""So long something must be wrong before the Service's owner is told."""
TELL_NODES_S = 1.0
COALESCE_S = 0.002
"""A change waits so long for others after the one before. Each costs as much alone as among others;
what comes while a pass goes on is the next one's anyway."""
PROBE_AFTER_S = 0.005
"""Most changes are none of what is to be asked: the loop that probes looks at them after the one
that forwards has."""
PLAN_SLICE = 50
"""So many Services are planned, in some milliseconds, before others have their turn."""
SWITCH_S = 0.0005
"""Audits compare in a thread, which leaves the interpreter to a change after so long."""
FIRST_VERDICTS_S = 0.6
"""So long after it asked the last of the nodes for the first time a start waits for answers: long
enough to find every node that is dead."""
ACCESS_S = 1.0
"""So often a kubeconfig is looked for that is not there yet."""
NOTES = frozenset({HEALTH_CHECKS_FAILING, HEALTH_CHECKS_FLAPPING, NODE_NOT_ANSWERING})
"""What only a gateway knows; the rest is the controller's to tell."""


class DataPlane(NamedTuple):
    """What serves Services on this host."""

    apiserver: ApiServerBalancer
    probe_paths: ProbePaths
    direct: DirectDriver
    proxy: ProxyDriver


async def run(config: Config, find: Callable[[], Access], node_name: str) -> None:
    """Run the gateway until cancelled. What the kernel does stays in place then. `find`: the way to
    the API server."""
    section = config.gateway
    selectors = of_host(node_name, section.interfaces, section.interfaces_by_node)
    if not selectors:
        raise Refused(
            f"gateway {node_name} has no interface: neither gateway.interfaces nor "
            "gateway.interfacesByNode names one for it",
            fix="set gateway.interfaces, or give --interface",
        )
    sys.setswitchinterval(SWITCH_S)
    state, peers = State(SOURCES), peers_of(config)
    plane = data_plane(config, selectors, state, peers)
    access = find() if section.api_server is None else await found_in_time(find, plane.apiserver)
    async with Client(access) as client:
        view = View("gateway", node_name)
        await run_components(components(config, view, client, state, plane, peers), view)


def data_plane(
    config: Config, selectors: Sequence[str], state: State, peers: Peers | None = None
) -> DataPlane:
    """All that a gateway may leave behind, as it is configured."""
    section = config.gateway
    return DataPlane(
        apiserver_balancer(config),
        ProbePaths(rules_of(config), Path(section.pin_path), partial(setattr, state, "tunnels")),
        direct_driver(config, selectors, state, peers),
        ProxyDriver(
            Path(section.proxy_path),
            requeue=state.subscribers.mark,
            drain_s=section.drain_timeout_s,
            old_workers=section.proxy_old_workers,
        ),
    )


def components(
    config: Config,
    view: View,
    client: Client,
    state: State,
    plane: DataPlane,
    peers: Peers | None,
) -> Sequence[Component]:
    """The gateway, in the order of its start. The reflectors, the prober and the plan work while
    the programs are loaded into the kernel, which takes most of a second; traffic is changed only
    once the first verdicts are there."""
    name, direct = view.node_name, plane.direct
    recorder = EventRecorder(client, "fairlead-gateway")
    report = reporter_of(view, state, recorder)
    planned = Planned(state, config)
    prober, ahead, probing = probing_of(config, state, plane, planned)
    forwarding = Loop(
        "forwarding",
        state,
        planned.confirmed,
        [direct, plane.proxy],
        report,
        pace=Pace(coalesce_s=COALESCE_S, plan_slice=PLAN_SLICE),
    )
    freshness = freshness_of(client, config)
    view.watch(freshness)
    view.follow(forwarding)
    announcer = Announcer(
        client,
        config.presence,
        view,
        name,
        interfaces=lambda: [each.name for each in direct.interfaces],
        warned=report.warned,
    )
    returned = partial(watch_returned, lambda: direct.counters, state, recorder, name)
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    return [
        plane.apiserver,
        plane.probe_paths,
        prober,
        Feed(client, state, freshness, GATEWAY, started=forwarding.settled),
        Task("freshness", freshness.run),
        Task("presence", partial(announcer.run, resume=report.resume)),
        probing,
        Task("prefetch", partial(ahead.run, state)),
        Probes(state),
        direct,
        Context("web", serve(view, listen, config.web.metrics_from)),
        Task("events", recorder.run),
        HostSettings(Host("gateway", adjust=False), view),
        *([peers] if peers is not None else []),
        Task("cluster nodes", partial(tell_nodes, state, direct)),
        Task("returned packets", returned),
        FirstVerdicts(ahead, prober, state),
        forwarding,
        plane.proxy,
    ]


class Probing(NamedTuple):
    """What asks the nodes."""

    prober: Prober
    ahead: StartupPrefetch
    loop: Loop[ServiceKey, LoadBalancer]


def probing_of(config: Config, state: State, plane: DataPlane, planned: Planned) -> Probing:
    """The loop that keeps the probes equal to the plan. It tells nothing: the other loop does."""
    section, paths = config.gateway, plane.probe_paths
    command = probing_command(
        section.probe_interval_s, section.probe_timeout_s, PROBE_MARK * paths.needed
    )
    prober = Prober(state.observe, command, paths.add)
    ahead = StartupPrefetch(planned.unconfirmed, prober, plane.direct.precompute_tables)
    loop = Loop(
        "probing",
        state.objects_only,
        ahead.plan,
        [prober],
        lambda _intents, _outcomes: None,
        pace=Pace(coalesce_s=COALESCE_S, plan_slice=PLAN_SLICE, patience_s=PROBE_AFTER_S),
    )
    return Probing(prober, ahead, loop)


def reporter_of(view: View, state: State, recorder: EventRecorder) -> Reporter[LoadBalancer]:
    """What a gateway tells the owners of Services."""
    return Reporter[LoadBalancer](
        view,
        state,
        recorder,
        reason=SYNC_FAILED,
        who=f"gateway {view.node_name}",
        notes=notes_of_probes,
        patience_s=PATIENCE_S,
    )


def apiserver_balancer(config: Config) -> ApiServerBalancer:
    """The balancer of the API server, which does nothing if there is to be none."""
    return ApiServerBalancer(config.gateway.api_server, Path(f"{config.gateway.proxy_path}-api"))


async def found_in_time(find: Callable[[], Access], apiserver: ApiServerBalancer) -> Access:
    """The way to an API server that may come to be only after us: who is to make a kubeconfig may
    need the balancer first."""
    told = ""
    while True:
        await apiserver.ensure()
        try:
            return find()
        except Refused as error:
            if str(error) != told:
                log.warning("there is no way to the API server yet", problem=str(error))
            told = str(error)
        await asyncio.sleep(ACCESS_S)


def peers_of(config: Config) -> Peers | None:
    """The other gateways, if any are configured. Raises Refused if certificates cannot be used."""
    section = config.gateway
    if not section.peer_listen and not section.peers:
        return None
    tls = PeerTLS(section.peer_tls) if section.peer_tls is not None else None
    if tls is not None:
        tls.load()
    return Peers(section.peer_listen, section.peers, tls=tls)


def rules_of(config: Config) -> Rules:
    """How packets get to nodes, as it is configured."""
    tunnel = config.tunnel
    return Rules(config.gateway.forwarding, tunnel.kind, tunnel.vni, tunnel.port, tunnel.gateways)


def direct_driver(
    config: Config, selectors: Sequence[str], state: State, peers: Peers | None
) -> DirectDriver:
    """The driver as it is configured, at the interfaces that these selectors choose."""
    section = config.gateway
    return DirectDriver(
        selectors,
        attach_kind=section.attach,
        rules=rules_of(config),
        pin_path=Path(section.pin_path),
        drain_s=section.drain_timeout_s,
        requeue=state.subscribers.mark,
        inherit=peers.inherit if peers is not None else None,
        sizes=Sizes(
            section.table_memory_mib << 20, section.connection_entries, section.datagram_entries
        ),
        namespace_share=section.namespace_share,
    )


async def tell_nodes(state: State, direct: DirectDriver) -> None:
    """Tell the driver the addresses of all nodes whenever they change: this host may be one of
    them, and then packets that come from another have been through a gateway."""
    told: set[tuple[str, str]] = set()
    await state.whole.wait()
    with state.subscribers.subscription() as dirty:
        while True:
            nodes = {
                (name, entry.address)
                for name, node in state.nodes.items()
                for entry in node.status.addresses
                if entry.type == "InternalIP"
            }
            try:
                if nodes != told:
                    await direct.set_cluster_nodes(nodes)
                    told = nodes
            except FairleadError as error:
                log.warning(
                    "the cluster's nodes are not known to the data plane yet", error=str(error)
                )
            await dirty.take(TELL_NODES_S)


async def clean_up(config: Config) -> None:
    """Take this gateway's data plane off the host, whichever process left it there."""
    await remove_components(data_plane(config, (), State(())))


def notes_of_probes(balancer: LoadBalancer) -> Collection[Finding]:
    """Those that are this role's to tell."""
    return [note for note in balancer.notes if note.code in NOTES]


class Probes(Component):
    """Shows the paths by which nodes are probed, and the last verdicts."""

    name = "probes"

    def __init__(self, state: State) -> None:
        self._state = state

    def status(self) -> ProbesState:
        names = {
            entry.address: name
            for name, node in self._state.nodes.items()
            for entry in node.status.addresses
        }
        return ProbesState(
            tuple(
                ProbedNode(names.get(address, ""), address, way, verdict)
                for address, ways in self._state.probed().items()
                for way, verdict in ways.items()
            )
        )


class FirstVerdicts(Component):
    """Holds the start back until nodes have had time to answer their first probes, but not for
    long; then the API is believed of the rest, no longer than needed."""

    name = "first verdicts"

    def __init__(self, ahead: StartupPrefetch, prober: Prober, state: State) -> None:
        self._ahead = ahead
        self._prober = prober
        self._state = state

    async def open(self) -> None:
        await self._ahead.handed_on.wait()
        try:
            async with asyncio.timeout_at(self._ahead.newest_s + FIRST_VERDICTS_S):
                await self._prober.settled()
        except TimeoutError:
            log.info(
                "believing the API until all health ports have been asked", ports=self._prober.ports
            )
            self._state.believing = True

    async def run(self) -> None:
        await self._prober.settled()
        self._state.believing = False
