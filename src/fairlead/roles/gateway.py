"""`fairlead gateway`: receives packets for load-balancer addresses and forwards them to nodes that
can serve them.

In: Services with their addresses (from their status, where the controller publishes them),
EndpointSlices, Nodes, and the results of its own probes of the nodes; how addresses are announced.
Out: the eBPF data plane of this host (class direct), a HAProxy process (class proxy), and the
announcement of the addresses that they serve. Any number of gateways share the work without
coordination, because equal objects give equal plans. When the process stops or is killed, the
kernel and HAProxy continue with their last configuration, and the next start adopts both. Gateways
with peers send each other the flow entries of slots in transition, so that a connection can move
between gateways even while its slot is in transition. A gateway can also be the load balancer of
the API servers; that part starts before the API answers, so the gateway itself may reach the API
through it.

Two loops run over one plan. The first loop keeps the probes equal to the plan. Their results are
part of the plan of the second loop, which keeps the data plane equal to it. A start must not remove
nodes from service only because they have not been probed yet. So it waits for the first results; if
there are too many nodes to probe in that time, it trusts the API until each of them has been
probed."""

import asyncio
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import structlog

from fairlead.announce_sections import AnnounceConfig
from fairlead.config import Config
from fairlead.drivers import Component
from fairlead.drivers.bgp import BirdDriver
from fairlead.drivers.direct import DirectDriver, Peers
from fairlead.drivers.host import Host
from fairlead.drivers.proxy import ApiServerBalancer
from fairlead.errors import FairleadError, Refused
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.model import Finding, LoadBalancer
from fairlead.net.address import split_host_port
from fairlead.net.selection import of_host
from fairlead.plan.members import HEALTH_CHECKS_FAILING, HEALTH_CHECKS_FLAPPING, NODE_NOT_ANSWERING
from fairlead.plan.projection import ANNOUNCING_GATEWAY, GATEWAY
from fairlead.reconcile import Loop, Pace
from fairlead.roles.announce_feed import AnnounceFeed, announce_sources
from fairlead.roles.announcers import Announcers, AnnouncingHost, announcers_of, leftovers
from fairlead.roles.announcing.report import announcer_of
from fairlead.roles.components import Context, Task, remove_components, run_components
from fairlead.roles.cut_off import CutOffWatch, StartWatch
from fairlead.roles.data_plane import DataPlane, data_plane, peers_of
from fairlead.roles.gateway_probing import (
    COALESCE_S,
    PLAN_SLICE,
    FirstVerdicts,
    Probes,
    probing_of,
)
from fairlead.roles.host import HostSettings
from fairlead.roles.other_announcers import OtherAnnouncers
from fairlead.roles.peer_search import PeerSearch
from fairlead.roles.plan_cache import PlanCache
from fairlead.roles.presence import Announcer
from fairlead.roles.process import SOURCES, Feed, freshness_of
from fairlead.roles.report import Reporter
from fairlead.roles.returned import watch_returned
from fairlead.roles.without_api import withdraw_at_stop
from fairlead.roles.yielding import Yielding
from fairlead.state import State
from fairlead.web import View, serve

log = structlog.get_logger()

SYNC_FAILED = "SyncGatewayFailed"
DEFAULT_LISTEN = "127.0.0.1:9441"
GRACE_PERIOD_S = 5.0
"""How long a problem must last before an Event reports it."""
NODE_ADDRESSES_COALESCE_S = 1.0
SWITCH_S = 0.0005
"""The interval after which a thread releases the interpreter lock: an audit, which compares in a
thread, delays a change for at most this time."""
ACCESS_S = 1.0
"""The interval at which a start checks for a kubeconfig that does not exist yet."""
NOTES = frozenset({HEALTH_CHECKS_FAILING, HEALTH_CHECKS_FLAPPING, NODE_NOT_ANSWERING})
"""The notes that only a gateway can know; the controller reports all other notes."""


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
    state, peers = State((*SOURCES, *announce_sources(config))), peers_of(config)
    plane = data_plane(config, selectors, state, peers)
    access = find() if section.api_server is None else await wait_for_access(find, plane.apiserver)
    try:
        async with Client(access) as client:
            view = View("gateway", node_name)
            await run_components(components(config, view, client, state, plane, peers), view)
    except asyncio.CancelledError:
        await withdraw_at_stop(config, leftovers(config, announcing_host(config, node_name)))
        raise


def components(
    config: Config,
    view: View,
    client: Client,
    state: State,
    plane: DataPlane,
    peers: Peers | None,
) -> Sequence[Component]:
    """Return the components of the gateway, in the order of its start. The reflectors, the prober
    and the plan work while the programs are loaded into the kernel, which takes most of a second.
    Traffic is changed only after the first verdicts."""
    name, direct = view.node_name, plane.direct
    recorder = EventRecorder(client, "fairlead-gateway")
    report = reporter_of(view, state, recorder)
    planned = PlanCache(state, config, name)
    freshness = freshness_of(client, config)
    announcers = announcers_of(config, client, state, announcing_host(config, name), freshness)
    prober, prefetch, probing = probing_of(config, state, plane, planned)
    forwarding = Loop(
        "forwarding",
        state,
        planned.confirmed,
        [direct, plane.proxy, *announcers.chain],
        report,
        pace=Pace(coalesce_s=COALESCE_S, plan_slice=PLAN_SLICE),
    )
    yielding = Yielding(state, name, peers) if config.announce is not None else None
    announcers.follow(forwarding)
    view.watch(freshness)
    view.follow(forwarding)
    announcer = Announcer(
        client,
        config.presence,
        view,
        name,
        interfaces=lambda: [each.name for each in direct.interfaces],
        warned=report.warned,
        recorder=recorder,
        findings=lambda: peers.status().findings if peers is not None else (),
    )
    returned = partial(watch_returned, lambda: direct.counters, state, recorder, name)
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    return [
        plane.apiserver,
        plane.probe_paths,
        *start_watch(state, announcers),
        prober,
        Feed(
            client,
            state,
            freshness,
            GATEWAY if config.announce is None else ANNOUNCING_GATEWAY,
            started=forwarding.settled,
            update_nodes=yielding.update_nodes if yielding is not None else None,
        ),
        *([] if config.announce is None else [AnnounceFeed(client, state, freshness)]),
        Task("freshness", freshness.run),
        Task("presence", partial(announcer.run, resume=report.resume)),
        *peer_search(config, client, state, name, peers),
        *([yielding] if yielding is not None else []),
        probing,
        Task("prefetch", partial(prefetch.run, state)),
        Probes(state),
        direct,
        Context("web", serve(view, listen, config.web.metrics_from)),
        Task("events", recorder.run),
        HostSettings(Host("gateway", adjust=False), view),
        *([] if config.announce is None else [other_announcers(config.announce, view, direct)]),
        *([peers] if peers is not None else []),
        Task("cluster nodes", partial(pass_node_addresses, state, direct)),
        Task("returned packets", returned),
        FirstVerdicts(prefetch, prober, state),
        *announcers.components,
        *cut_off_watch(state, name, announcers, peers),
        forwarding,
        plane.proxy,
        announcer_of(
            config.announce is not None, client, view, state, recorder, announcers.components
        ),
    ]


def cut_off_watch(
    state: State, name: str, announcers: Announcers, peers: Peers | None
) -> Sequence[Component]:
    """Return the component that holds back routes after a cut; none without a BIRD of Fairlead's
    own: the sessions of another routing daemon are not known."""
    return [CutOffWatch(state, name, each, peers) for each in birds_of(announcers)]


def start_watch(state: State, announcers: Announcers) -> Sequence[Component]:
    """Return the component that notices a start while the host is cut off."""
    return [StartWatch(state, each) for each in birds_of(announcers)]


def birds_of(announcers: Announcers) -> Sequence[BirdDriver]:
    """Return the driver of Fairlead's own BIRD, if it is configured."""
    return [each for each in announcers.chain if isinstance(each, BirdDriver)]


def other_announcers(section: AnnounceConfig, view: View, direct: DirectDriver) -> Component:
    """Return the component that looks for other announcers on this host."""
    return OtherAnnouncers(section, view, lambda: [each.name for each in direct.interfaces])


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


def peer_search(
    config: Config, client: Client, state: State, name: str, peers: Peers | None
) -> Sequence[Component]:
    """Return the component that finds the other gateways in the cluster; none if they are
    listed."""
    section = config.gateway
    if peers is None or section.peers != "auto":
        return ()
    port = split_host_port(section.peer_address)[1]
    search = PeerSearch(client, config.presence, state, name, port, peers.set_peers)
    peers.unknown = search.search_soon
    return (search,)


def announcing_host(config: Config, name: str) -> AnnouncingHost:
    """Return this gateway as a host that announces addresses."""
    section = config.gateway
    selectors = of_host(name, section.interfaces, section.interfaces_by_node)
    return AnnouncingHost("gateway", name, Path(section.pin_path), selectors)


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
    """Remove the data plane from this host, including what earlier processes left. Addresses that
    this host announces are handed over to other gateways before that."""
    host = announcing_host(config, "")
    await remove_components([*data_plane(config, (), State(())), *leftovers(config, host)])


def notes_of_probes(balancer: LoadBalancer) -> Collection[Finding]:
    """Return the notes that this role reports."""
    return [note for note in balancer.notes if note.code in NOTES]
