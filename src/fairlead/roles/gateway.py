"""`fairlead gateway`: receives packets for load-balancer addresses and forwards them to nodes that
can serve them.

In: Services with their addresses (from their status, where the controller publishes them),
EndpointSlices, Nodes, and the results of its own probes of the nodes. Out: the eBPF data plane of
this host (class direct) and a HAProxy process (class proxy); and, if the configuration says so, the
announcement of addresses on layer 2 or by BGP. Any number of gateways share the work without
coordination, because equal objects give equal plans. When the process stops or is killed,
the kernel and HAProxy continue with their last configuration, and the next start adopts both.
Gateways with peers send each other the flow entries of slots in transition, so that a connection
can move between gateways even while its slot is in transition. A gateway can also be the load
balancer of the API servers; that part starts before the API answers, so the gateway itself may
reach the API through it.

Two loops run over one plan. The first loop keeps the probes equal to the plan. Their results are
part of the plan of the second loop, which keeps the data plane equal to it. A start must not remove
nodes from service only because they have not been probed yet. So it waits for the first results; if
there are too many nodes to probe in that time, it trusts the API until each of them has been
probed."""

import asyncio
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from fairlead.config import Config
from fairlead.drivers import Component
from fairlead.drivers.announce import AnnounceDriver, NoAnnouncement
from fairlead.drivers.bgp import BgpDriver, NoBgp
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
from fairlead.drivers.proxy.process import max_files
from fairlead.drivers.proxy.shares import Shares
from fairlead.errors import FairleadError, Refused
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.kube.freshness import Freshness
from fairlead.kube.presence import Presence
from fairlead.model import Finding, LoadBalancer, ServiceKey
from fairlead.net.httpprobe import PROBE_MARK
from fairlead.net.selection import of_host
from fairlead.plan.members import HEALTH_CHECKS_FAILING, HEALTH_CHECKS_FLAPPING, NODE_NOT_ANSWERING
from fairlead.plan.projection import GATEWAY, including_excluded
from fairlead.plan.refusals import EXCLUDED
from fairlead.reconcile import Loop, Pace
from fairlead.role_state import ProbedNode, ProbesState
from fairlead.roles.components import Context, Task, Until, remove_components, run_components
from fairlead.roles.gateways import GatewayWatch
from fairlead.roles.host import HostSettings
from fairlead.roles.leaving import Leaving
from fairlead.roles.neighbor_process import command as neighbor_command
from fairlead.roles.own_addresses import OwnAddresses
from fairlead.roles.own_node import OwnNode
from fairlead.roles.peer_search import PeerSearch
from fairlead.roles.plan_cache import PlanCache
from fairlead.roles.prefetch import StartupPrefetch
from fairlead.roles.presence import Announcer
from fairlead.roles.prober_process import command as prober_command
from fairlead.roles.process import (
    SOURCES,
    Feed,
    KnownHosts,
    freshness_of,
)
from fairlead.roles.report import Reporter
from fairlead.roles.returned import watch_returned
from fairlead.state import State
from fairlead.web import View, serve

log = structlog.get_logger()

SYNC_FAILED = "SyncGatewayFailed"
DEFAULT_LISTEN = "127.0.0.1:9441"
GRACE_PERIOD_S = 5.0
"""How long a problem must last before an Event reports it."""
NODE_ADDRESSES_COALESCE_S = 1.0
COALESCE_S = 0.002
"""How long after the previous pass a change waits for further changes. The value is small because
collecting changes does not reduce their cost, and changes that arrive during a pass are collected
for the next pass anyway."""
PROBE_AFTER_S = 0.005
"""The delay of the loop that probes. Most changes do not change what is probed, so the loop that
forwards runs first."""
PLAN_SLICE = 50
"""The number of Services that are planned before other tasks run; it takes some milliseconds."""
SWITCH_S = 0.0005
"""The interval after which a thread releases the interpreter lock: an audit, which compares in a
thread, delays a change for at most this time."""
FIRST_VERDICTS_S = 0.6
"""How long a start waits for results after it sent the first probe to the last node; long enough to
detect every dead node."""
GATEWAYS_S = 2.0
"""How long a start waits until it is known which gateways are alive."""
ACCESS_S = 1.0
"""The interval at which a start checks for a kubeconfig that does not exist yet."""
NOTES = frozenset({EXCLUDED, HEALTH_CHECKS_FAILING, HEALTH_CHECKS_FLAPPING, NODE_NOT_ANSWERING})
"""The notes that a gateway knows first, or that only a gateway can know; the controller reports all
other notes."""


class DataPlane(NamedTuple):
    """The parts of the data plane on this host."""

    apiserver: ApiServerBalancer
    probe_paths: ProbePaths
    direct: DirectDriver
    proxy: ProxyDriver
    announce: AnnounceDriver | NoAnnouncement
    bgp: BgpDriver | NoBgp


async def run(config: Config, find: Callable[[], Access], node_name: str) -> None:
    """Run the gateway until cancelled. The data plane in the kernel stays in place. `find`: returns
    how to reach the API server."""
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
    search = search_of(config, selectors, peers)
    plane = data_plane(config, selectors, state, peers, name=node_name)
    access = find() if section.api_server is None else await wait_for_access(find, plane.apiserver)
    hosts = KnownHosts(state, config, access)
    own = await leave_hosts(hosts, state, plane)
    async with Client(access) as client:
        view = View("gateway", node_name)
        parts = components(config, view, client, state, plane, peers, own, search)
        await run_components([hosts, *parts], view)


async def leave_hosts(hosts: KnownHosts, state: State, plane: DataPlane) -> OwnAddresses:
    """Leave the addresses that this host needs to their hosts, before it needs the API server. An
    earlier process may have made the address of the API server or of a router local, and then only
    this host itself can undo it. Return the component that keeps these addresses known."""
    own = OwnAddresses(
        "gateway", state, lambda: hosts.api_servers, routers=lambda: plane.direct.routers
    )
    for resolve in (False, True):  # at first without a resolver, which may be out of reach too
        if resolve:
            await hosts.resolve()
        await own.refresh()
        try:
            await plane.proxy.leave_hosts()
        except FairleadError as error:
            log.warning("cannot leave addresses to their hosts", problem=str(error))
    return own


def data_plane(
    config: Config,
    selectors: Sequence[str],
    state: State,
    peers: Peers | None = None,
    *,
    name: str = "",
) -> DataPlane:
    """Return everything that a gateway may leave on its host, according to the configuration.
    `name`: the name of the gateway."""
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
            belongs_to_host=state.belongs_to_host,
            # What announces addresses also notices who else has them.
            finds_conflicts=config.announce.l2 is None,
            shares=Shares(max_files(), section.namespace_share),
        ),
        announce_driver(config, selectors, state, name),
        bgp_driver(config),
    )


def components(
    config: Config,
    view: View,
    client: Client,
    state: State,
    plane: DataPlane,
    peers: Peers | None,
    own: OwnAddresses,
    search: PeerSearch | None,
) -> Sequence[Component]:
    """Return the components of the gateway, in the order of its start. The reflectors, the prober
    and the plan work while the programs are loaded into the kernel, which takes most of a second.
    Traffic is changed only after the first verdicts."""
    name, direct = view.node_name, plane.direct
    recorder = EventRecorder(client, "fairlead-gateway")
    report = reporter_of(view, state, recorder)
    planned = PlanCache(state, config)
    prober, prefetch, probing = probing_of(config, state, plane, planned)
    announce = plane.announce if isinstance(plane.announce, AnnounceDriver) else None
    if announce is not None:
        announce.withheld = planned.announced_although_refused
    bgp = plane.bgp if isinstance(plane.bgp, BgpDriver) else None
    if bgp is not None:
        bgp.shown = planned.shown_although_refused
    forwarding = Loop(
        "forwarding",
        state,
        planned.confirmed,
        [
            *([bgp.withdrawals] if bgp is not None else []),
            direct,
            plane.proxy,
            *([announce] if announce is not None else []),
            *([bgp] if bgp is not None else []),
        ],
        report,
        pace=Pace(coalesce_s=COALESCE_S, plan_slice=PLAN_SLICE),
    )
    freshness = freshness_of(client, config)
    view.watch(freshness)
    view.follow(forwarding)
    watched, known = others_of(config, client, state, freshness, announce, name, search)
    leaving = Leaving(
        state, name, lambda: any(each.asked_to_leave == announcer.identity for each in watched)
    )

    def inherit(before: Presence) -> None:
        leaving.inherit(before.leaving)
        if announce is not None:
            announce.follow(before)

    announcer = Announcer(
        client,
        config.presence,
        view,
        name,
        interfaces=lambda: [each.name for each in direct.interfaces],
        peer=lambda: search.own if search is not None else "",
        addresses=lambda: [*own.addresses, *(announce.reserved if announce is not None else ())],
        macs=lambda: own.macs,
        announces=lambda: announce.on_link if announce is not None else (),
        announced=lambda: announce.answered if announce is not None else {},
        claimed=lambda: (announce or plane.proxy.conflicts).claimed,
        leaving=leaving.since if announce is not None else str,
        waited_for=lambda: state.gateways is not None and bool(state.gateways.leaving),
        inherit=inherit,
        warned=report.warned,
    )
    projection = including_excluded(GATEWAY) if config.announce.ignore_exclude_label else GATEWAY
    if announce is not None:
        announce.silent_s = lambda: max((each.silent_s for each in watched), default=0.0)
    returned = partial(watch_returned, lambda: direct.counters, state, recorder, name)
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    return [
        # First, because a port that is not free ends the process before it changes the host.
        Context("web", serve(view, listen, config.web.metrics_from)),
        plane.apiserver,
        plane.probe_paths,
        own,
        OwnNode("gateway", name, state),
        prober,
        plane.announce,
        plane.bgp,
        *([search] if search is not None else []),
        *watched,
        Feed(client, state, freshness, projection, started=forwarding.settled),
        Task("freshness", freshness.run),
        Task("presence", partial(announcer.run, resume=report.resume)),
        probing,
        Task("prefetch", partial(prefetch.run, state)),
        Probes(state),
        direct,
        Task("events", recorder.run),
        HostSettings(Host("gateway", adjust=False), view),
        *([peers] if peers is not None else []),
        Task("cluster nodes", partial(pass_node_addresses, state, direct)),
        Task("returned packets", returned),
        FirstVerdicts(prefetch, prober, state),
        *known,
        forwarding,
        plane.proxy,
    ]


def others_of(
    config: Config,
    client: Client,
    state: State,
    freshness: Freshness,
    announce: AnnounceDriver | None,
    own: str,
    search: PeerSearch | None = None,
) -> tuple[Sequence[GatewayWatch], Sequence[Component]]:
    """Return the component that observes all gateways, and the one that delays the start until they
    are known; none if this gateway need not know the others, because it announces no address and
    does not look for peers."""
    if announce is None and search is None:
        return (), ()
    watch = GatewayWatch(
        client,
        state,
        config.presence,
        freshness,
        update=state.update_announcers if announce is not None else lambda _: None,
        own=own,
        continues=lambda: announce is not None and bool(announce.answered),
        peers=search.update if search is not None else lambda _: None,
    )
    if announce is None:
        return (watch,), ()

    async def known() -> None:
        # The API server may be away: then addresses are announced later.
        with suppress(TimeoutError):
            async with asyncio.timeout(GATEWAYS_S):
                await watch.decided.wait()

    return (watch,), (Until("the gateways are known", known),)


class Probing(NamedTuple):
    """The parts that probe the nodes."""

    prober: Prober
    prefetch: StartupPrefetch
    loop: Loop[ServiceKey, LoadBalancer]


def probing_of(config: Config, state: State, plane: DataPlane, planned: PlanCache) -> Probing:
    """Return the prober and the loop that keeps the probes equal to the plan. This loop reports no
    outcomes; the loop that forwards reports them."""
    section, paths = config.gateway, plane.probe_paths
    command = prober_command(
        section.probe_interval_s, section.probe_timeout_s, PROBE_MARK * paths.needed
    )
    prober = Prober(state.observe, command, paths.add)
    prefetch = StartupPrefetch(planned.unconfirmed, prober, plane.direct.precompute_tables)
    loop = Loop(
        "probing",
        state.objects_only,
        prefetch.plan,
        [prober],
        lambda _intents, _outcomes: None,
        pace=Pace(coalesce_s=COALESCE_S, plan_slice=PLAN_SLICE, idle_delay_s=PROBE_AFTER_S),
    )
    return Probing(prober, prefetch, loop)


def reporter_of(view: View, state: State, recorder: EventRecorder) -> Reporter[LoadBalancer]:
    """Return the reporter that writes the Events of this gateway."""
    return Reporter[LoadBalancer](
        view,
        state,
        recorder,
        reason=SYNC_FAILED,
        who=f"gateway {view.node_name}",
        notes=notes_of_probes,
        grace_period_s=GRACE_PERIOD_S,
    )


def apiserver_balancer(config: Config) -> ApiServerBalancer:
    """Return the load balancer of the API servers. It does nothing if none is configured."""
    return ApiServerBalancer(config.gateway.api_server, Path(f"{config.gateway.proxy_path}-api"))


async def wait_for_access(find: Callable[[], Access], apiserver: ApiServerBalancer) -> Access:
    """Wait until `find` succeeds, and keep the load balancer of the API servers running meanwhile:
    the kubeconfig may be created by a process that needs this load balancer."""
    logged = ""
    while True:
        await apiserver.ensure()
        try:
            return find()
        except Refused as error:
            if str(error) != logged:
                log.warning("waiting for access to the API server", problem=str(error))
            logged = str(error)
        await asyncio.sleep(ACCESS_S)


def peers_of(config: Config) -> Peers | None:
    """Return the exchange with other gateways, or None if none is configured. Raise Refused if the
    certificates cannot be used."""
    section = config.gateway
    if not section.peer_listen and not section.peers:
        return None
    tls = PeerTLS(section.peer_tls) if section.peer_tls is not None else None
    if tls is not None:
        tls.load()
    return Peers(section.peer_address, None if section.peers == "auto" else section.peers, tls=tls)


def search_of(config: Config, selectors: Sequence[str], peers: Peers | None) -> PeerSearch | None:
    """Return the search for the other gateways, if the configuration asks for it."""
    section = config.gateway
    if peers is None or section.peers != "auto":
        return None
    return PeerSearch(peers, section.peer_address, selectors, own_link=section.peer_tls is None)


def rules_of(config: Config) -> Rules:
    """Return the configured rules for the forwarding method of each node."""
    tunnel = config.tunnel
    return Rules(config.gateway.forwarding, tunnel.kind, tunnel.vni, tunnel.port, tunnel.gateways)


def direct_driver(
    config: Config, selectors: Sequence[str], state: State, peers: Peers | None
) -> DirectDriver:
    """Return the driver of class direct, for the interfaces that match these selectors."""
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


def announce_driver(
    config: Config, selectors: Sequence[str], state: State, name: str
) -> AnnounceDriver | NoAnnouncement:
    """Return the driver that announces addresses, on the configured interfaces or on those where
    packets arrive. If no address is announced, return the component that removes what an earlier
    configuration left."""
    l2, pin_path = config.announce.l2, Path(config.gateway.pin_path)
    if l2 is None:
        return NoAnnouncement(pin_path)
    return AnnounceDriver(
        name,
        l2,
        l2.interfaces or selectors,
        pin_path=pin_path,
        lease_s=config.presence.lease_duration_s,
        gateways=lambda: state.gateways,
        forbidden=lambda: state.gateways_forbidden,
        watch_command=neighbor_command(),
        observe_silent=state.observe_silent,
    )


def bgp_driver(config: Config) -> BgpDriver | NoBgp:
    """Return the driver that announces addresses by BGP, or the component that withdraws what an
    earlier configuration left."""
    if (section := config.announce.bgp) is None:
        return NoBgp()
    return BgpDriver(section)


async def pass_node_addresses(state: State, direct: DirectDriver) -> None:
    """Pass the addresses of all nodes to the driver whenever they change. If this host is a node
    too, packets from the other nodes have passed a gateway already."""
    logged: set[tuple[str, str]] = set()
    await state.has_synced.wait()
    with state.subscribers.subscription() as dirty:
        while True:
            nodes = {
                (name, entry.address)
                for name, node in state.nodes.items()
                for entry in node.status.addresses
                if entry.type == "InternalIP"
            }
            try:
                if nodes != logged:
                    await direct.set_cluster_nodes(nodes)
                    logged = nodes
            except FairleadError as error:
                log.warning(
                    "cannot write the addresses of the nodes to the data plane", error=str(error)
                )
            await dirty.take(NODE_ADDRESSES_COALESCE_S)


async def clean_up(config: Config) -> None:
    """Remove the data plane from this host, including what earlier processes left."""
    await remove_components(data_plane(config, (), State(())))


def notes_of_probes(balancer: LoadBalancer) -> Collection[Finding]:
    """Return the notes that this role reports."""
    return [note for note in balancer.notes if note.code in NOTES]


class Probes(Component):
    """The component that shows the paths by which nodes are probed, and their last verdicts."""

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
                ProbedNode(names.get(address, ""), address, path, verdict)
                for address, paths in self._state.probed().items()
                for path, verdict in paths.items()
            )
        )


class FirstVerdicts(Component):
    """The component that delays the start until nodes have had time to answer their first probes.
    After a bounded time it lets the gateway trust the API about the remaining nodes, until all of
    them have been probed."""

    name = "first verdicts"

    def __init__(self, prefetch: StartupPrefetch, prober: Prober, state: State) -> None:
        self._prefetch = prefetch
        self._prober = prober
        self._state = state

    async def open(self) -> None:
        await self._prefetch.done.wait()
        try:
            async with asyncio.timeout_at(self._prefetch.last_first_probe_s + FIRST_VERDICTS_S):
                await self._prober.settled()
        except TimeoutError:
            log.info(
                "trusting the API until all health ports have been probed", ports=self._prober.ports
            )
            self._state.trust_api = True

    async def run(self) -> None:
        await self._prober.settled()
        self._state.trust_api = False
