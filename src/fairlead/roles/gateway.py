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
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog

from fairlead.config import Config
from fairlead.drivers.direct import (
    DirectDriver,
    Peers,
    PeerTLS,
    ProbePaths,
    Rules,
    Sizes,
    remove_pins,
)
from fairlead.drivers.host import Host
from fairlead.drivers.prober import Prober
from fairlead.drivers.proxy import ApiServerBalancer, ProxyDriver
from fairlead.errors import FairleadError, Refused
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder, Recorder
from fairlead.kube.freshness import Freshness, stale_after_s
from fairlead.model import Finding, LoadBalancer, ProxyHeader, ServiceKey
from fairlead.net.httpprobe import PROBE_MARK
from fairlead.net.selection import of_host
from fairlead.plan.members import HEALTH_CHECKS_FAILING, HEALTH_CHECKS_FLAPPING, NODE_NOT_ANSWERING
from fairlead.plan.projection import GATEWAY
from fairlead.plan.proxying import ended, switched
from fairlead.reconcile import Loop
from fairlead.role_state import ProbedNode, ProbesState
from fairlead.roles.ahead import StartupPrefetch
from fairlead.roles.host import watch_host
from fairlead.roles.planned import Planned
from fairlead.roles.presence import Announcer
from fairlead.roles.probing import command as probing_command
from fairlead.roles.process import SOURCES, feed
from fairlead.roles.report import Reporter
from fairlead.roles.returned import watch_returned
from fairlead.state import State
from fairlead.telemetry import ApiServersCollector, PeersCollector, ProxyCollector, TrafficCollector
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


async def run(config: Config, find: Callable[[], Access], node_name: str) -> None:
    """Run the gateway until cancelled. What the kernel does stays in place then. `find`: the way to
    the API server."""
    selectors = of_host(node_name, config.gateway.interfaces, config.gateway.interfaces_by_node)
    if not selectors:
        raise Refused(
            f"gateway {node_name} has no interface: neither gateway.interfaces nor "
            "gateway.interfacesByNode names one for it",
            fix="set gateway.interfaces, or give --interface",
        )
    sys.setswitchinterval(SWITCH_S)
    apiserver = apiserver_balancer(config)
    await apiserver.keep()
    access = (
        await found_in_time(find, apiserver) if config.gateway.api_server is not None else find()
    )
    state = State(SOURCES)
    view = View("gateway", node_name)
    peers = peers_of(config)
    direct = direct_driver(config, selectors, state, peers)
    section = config.gateway
    proxy = ProxyDriver(
        Path(section.proxy_path),
        touched=state.subscribers.mark,
        drain_s=section.drain_timeout_s,
        old_workers=section.proxy_old_workers,
    )
    probe_paths = ProbePaths(
        rules_of(config), Path(section.pin_path), partial(setattr, state, "tunnels")
    )
    try:
        await probe_paths.open()
        async with (
            Client(access) as client,
            AsyncExitStack() as shown,
            asyncio.TaskGroup() as group,
        ):
            recorder = EventRecorder(client, "fairlead-gateway")
            proxy.switched = partial(tell_switch, recorder)
            proxy.cut = partial(tell_cut, recorder, section.proxy_old_workers)
            command = probing_command(
                section.probe_interval_s, section.probe_timeout_s, PROBE_MARK * probe_paths.needed
            )
            prober = Prober(state.observe, command, probe_paths.have)
            planned = Planned(state, config)
            ahead = StartupPrefetch(planned.unconfirmed, prober, direct.precompute_tables)
            report = Reporter[LoadBalancer](
                view,
                state,
                recorder,
                reason=SYNC_FAILED,
                who=f"gateway {node_name}",
                notes=notes_of_probes,
                patience_s=PATIENCE_S,
            )
            probing = Loop(
                "probing",
                state.objects_only,
                ahead.plan,
                [prober],
                lambda _intents, _outcomes: None,
                coalesce_s=COALESCE_S,
                plan_slice=PLAN_SLICE,
                patience_s=PROBE_AFTER_S,
            )
            forwarding = Loop(
                "forwarding",
                state,
                planned.confirmed,
                [direct, proxy],
                report,
                coalesce_s=COALESCE_S,
                plan_slice=PLAN_SLICE,
            )
            freshness = Freshness(
                lambda: client.answered_s, stale_s=stale_after_s(config.presence.lease_duration_s)
            )
            view.watch(freshness)
            announcer = Announcer(
                client,
                config.presence,
                view,
                node_name,
                interfaces=lambda: [each.name for each in direct.interfaces],
                warned=report.warned,
            )
            # What others work at, the API server, the prober and the kernel, goes on at the same
            # time.
            group.create_task(prober.run())
            group.create_task(probe_paths.follow())
            feed(group, client, state, freshness, GATEWAY, started=forwarding.settled)
            group.create_task(freshness.run())
            group.create_task(announcer.run(resume=report.resume))
            group.create_task(probing.run())
            handed_on = group.create_task(ahead.run(state))
            await direct.open()
            view.registry.register(TrafficCollector(lambda: direct.counters))
            view.registry.register(ProxyCollector(proxy.counters))
            view.registry.register(ApiServersCollector(lambda: apiserver.servers))
            view.parts += [direct.status, proxy.status, apiserver.status, partial(probes, state)]
            view.follow(forwarding)
            listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
            await shown.enter_async_context(serve(view, listen, config.web.metrics_from))
            group.create_task(apiserver.follow())
            group.create_task(recorder.run())
            group.create_task(direct.follow())
            group.create_task(watch_host(Host("gateway", adjust=False), direct.needs, view))
            if peers is not None:
                view.registry.register(PeersCollector(peers))
                view.parts.append(peers.status)
                group.create_task(peers.run())
            group.create_task(tell_nodes(state, direct))
            group.create_task(watch_returned(lambda: direct.counters, state, recorder, node_name))
            await handed_on
            await first_verdicts(ahead.newest_s + FIRST_VERDICTS_S, prober, state)
            group.create_task(doubt(prober, state))
            group.create_task(forwarding.run())
            group.create_task(proxy.follow())
    finally:
        probe_paths.close()
        await direct.close(remove=False)


def apiserver_balancer(config: Config) -> ApiServerBalancer:
    """The balancer of the API server, which does nothing if there is to be none."""
    return ApiServerBalancer(config.gateway.api_server, Path(f"{config.gateway.proxy_path}-api"))


async def found_in_time(find: Callable[[], Access], apiserver: ApiServerBalancer) -> Access:
    """The way to an API server that may come to be only after us: who is to make a kubeconfig may
    need the balancer first."""
    told = ""
    while True:
        try:
            return find()
        except Refused as error:
            if str(error) != told:
                log.warning("there is no way to the API server yet", problem=str(error))
            told = str(error)
        await asyncio.sleep(ACCESS_S)
        await apiserver.keep()


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
        wanted=section.attach,
        rules=rules_of(config),
        pin_path=Path(section.pin_path),
        drain_s=section.drain_timeout_s,
        touched=state.subscribers.mark,
        inherit=peers.inherit if peers is not None else None,
        sizes=Sizes(
            section.table_memory_mib << 20, section.connection_entries, section.datagram_entries
        ),
        share=section.namespace_share,
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
                    await direct.among(nodes)
                    told = nodes
            except FairleadError as error:
                log.warning(
                    "the cluster's nodes are not known to the data plane yet", error=str(error)
                )
            await dirty.take(TELL_NODES_S)


async def clean_up(config: Config) -> None:
    """Take this gateway's data plane out of the kernel, whoever left it there."""
    removed = await remove_pins(Path(config.gateway.pin_path))
    if await ProxyDriver(Path(config.gateway.proxy_path)).remove():
        removed.append("the balancer of class fairlead.io/proxy")
    if await apiserver_balancer(config).remove():
        removed.append("the API server's balancer")
    for what in removed:
        log.info("removed", what=what)
    if not removed:
        log.info(
            "nothing to remove: no data plane of this pin path is here",
            pin_path=config.gateway.pin_path,
        )


def notes_of_probes(balancer: LoadBalancer) -> Collection[Finding]:
    """Those that are this role's to tell."""
    return [note for note in balancer.notes if note.code in NOTES]


def tell_switch(
    recorder: Recorder, service: ServiceKey, uid: str, before: ProxyHeader, after: ProxyHeader
) -> None:
    """Say what pods meet from now on. It is no failure, and over as soon as it is said."""
    note = switched(before, after)
    recorder.event(service, uid, "Normal", note.code, str(note))


def tell_cut(
    recorder: Recorder, most: int, service: ServiceKey, uid: str, connections: int
) -> None:
    """Say what was cut, and by which limit."""
    note = ended(connections, most)
    recorder.event(service, uid, "Warning", note.code, str(note))


def probes(state: State) -> ProbesState:
    """The paths by which nodes are probed, and the last verdicts, for `/state`."""
    names = {
        entry.address: name for name, node in state.nodes.items() for entry in node.status.addresses
    }
    return ProbesState(
        tuple(
            ProbedNode(names.get(address, ""), address, way, verdict)
            for address, ways in state.probed().items()
            for way, verdict in ways.items()
        )
    )


async def first_verdicts(until_s: float, prober: Prober, state: State) -> None:
    """Wait until every health port has been asked, but not for long; then the API is believed of
    the rest. `until_s`: by the event loop's clock."""
    try:
        async with asyncio.timeout_at(until_s):
            await prober.settled()
    except TimeoutError:
        log.info("believing the API until all health ports have been asked", ports=prober.ports)
        state.believing = True


async def doubt(prober: Prober, state: State) -> None:
    """Believe the API no longer than needed."""
    await prober.settled()
    state.believing = False
