"""`fairlead node`: the service proxy of a node that has no kube-proxy, and the node's end of the
tunnels.

In: Services and EndpointSlices. Out: this node's nftables rules, tunnel and health ports. The
health ports come last: an answer of 200 proves that everything else is in place, and gateways wait
for it. When the process stops or is killed, rules and tunnel stay. If kube-proxy runs
(node.serviceProxy: false), this role manages only the tunnel, and does not watch EndpointSlices.

With node.announce the node also announces the addresses of Services of class
fairlead.io/announce: it then watches EndpointSlices in any case, and probes the health ports of
kube-proxy. Announcements come after everything else of a Service is in place."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from fairlead.announce_sections import BgpConfig
from fairlead.config import Config
from fairlead.drivers import Component, Driver
from fairlead.drivers.healthport import HealthPortDriver
from fairlead.drivers.host import Host
from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.drivers.tunnel import NoTunnel, TunnelDriver
from fairlead.drivers.tunnel.requirements import requirements as requirements_of_arrivals
from fairlead.errors import Unavailable
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.kube.objects import Service
from fairlead.model import Finding, NodeService, ServiceKey
from fairlead.net.interfaces import holders, present
from fairlead.net.listening import EVERYWHERE
from fairlead.net.selection import DEFAULT_ROUTE, of_host, select
from fairlead.plan.announced import nodes_announce
from fairlead.plan.cluster import plan_node
from fairlead.plan.conflicts import Precedence, precedence_of
from fairlead.plan.members import leaving
from fairlead.plan.network_plugin import is_ovn_kubernetes, two_service_proxies
from fairlead.plan.projection import (
    ANNOUNCING_NODE,
    ANNOUNCING_TUNNEL_NODE,
    NODE,
    TUNNEL_NODE,
    Projection,
)
from fairlead.reconcile import Loop, Pace, Plan
from fairlead.roles.announce_feed import AnnounceFeed, announce_sources
from fairlead.roles.announcers import AnnouncingHost, announcers_of, leftovers
from fairlead.roles.announcing.report import announcer_of
from fairlead.roles.components import Task, remove_components, run_components
from fairlead.roles.health_check_server import command as health_check_server_command
from fairlead.roles.host import HostSettings
from fairlead.roles.node_addresses import HostAddresses, NodeAddresses, first_addresses
from fairlead.roles.node_announcing import AnnouncingPlan, probing
from fairlead.roles.other_announcers import OtherAnnouncers
from fairlead.roles.presence import Announcer
from fairlead.roles.process import SOURCES, WITHOUT_SLICES, Feed, freshness_of
from fairlead.roles.report import Reporter
from fairlead.roles.without_api import withdraw_at_stop
from fairlead.state import State
from fairlead.web import View, serve

log = structlog.get_logger()

SYNC_FAILED = "SyncProxyRulesFailed"
DEFAULT_LISTEN = "127.0.0.1:9442"
PLAN_SLICE = 20
"""The number of Services that are planned, or compared by an audit, before a change is processed;
it takes some milliseconds."""
LARGE = 5_000
"""The number of ports times endpoints above which a Service is large: it takes a tenth of a second
or more, and other Services do not wait for it."""
CHECK_INTERVAL_S = 2.0
"""The interval at which the host's addresses are read, if `node.nodePortAddresses` selects among
them."""


def service_precedence(
    services: Mapping[ServiceKey, Service], key: ServiceKey, address: str, port: str
) -> Precedence | None:
    """Return the precedence of a Service for a port of an address; None if the Service does not
    exist."""
    service = services.get(key)
    return precedence_of(key, service, address, port) if service is not None else None


def is_large(state: State, key: ServiceKey) -> bool:
    """Return whether planning and applying the Service takes so long that other Services must not
    wait for it."""
    service = state.services.get(key)
    endpoints = sum(len(each.endpoints or ()) for each in state.slices_of(key))
    return service is not None and len(service.spec.ports) * endpoints > LARGE


async def run(
    config: Config, access: Access, node_name: str, *, remove_at_stop: bool = False
) -> None:
    """Run the role until cancelled. Then rules and tunnel stay in place, unless `remove_at_stop` is
    set."""
    state = State(sources_of(config))
    view = View("node", node_name)
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    try:
        async with Client(access) as client, serve(view, listen, config.web.metrics_from):
            first = await first_addresses(client, node_name)
            addresses = NodeAddresses(node_name, state.nodes, first)
            host_addresses = HostAddresses(config.node.node_port_addresses)
            await host_addresses.refresh()
            drivers = drivers_of(config, state, node_name, addresses, host_addresses)
            await run_components(components(config, view, client, state, drivers), view)
    except asyncio.CancelledError:
        # After a failure the process is started again, and traffic continues meanwhile. So this is
        # not done for other exceptions.
        if remove_at_stop:
            await clean_up(config)
        elif nodes_announce(config):
            announcing = announcing_config(config)
            host = announcing_host(config, node_name, tuple)
            await withdraw_at_stop(announcing, leftovers(announcing, host))
        raise


def components(
    config: Config, view: View, client: Client, state: State, drivers: "Drivers"
) -> Sequence[Component]:
    """Return the components of the node, in the order of its start: first those that serve
    Services, then those that report about them."""
    name, proxying = view.node_name, config.node.service_proxy
    recorder = EventRecorder(client, "fairlead-node")
    report = Reporter[NodeService](
        view, state, recorder, reason=SYNC_FAILED, who=f"node {name}", notes=notes_of
    )
    large = partial(is_large, state)
    plan: Plan[ServiceKey, NodeService] = partial(plan_node, state, name)
    if proxying:
        view.service_proxies = partial(other_service_proxies, state, name)
    probes: Sequence[Component] = ()
    feeds: Sequence[Component] = ()
    freshness = freshness_of(client, config)
    if config.announce is not None and config.node.announce:
        addresses = None if proxying else drivers.node_addresses
        plan = announcing = AnnouncingPlan(state, config, name, addresses)
        probes = () if proxying else probing(config, state, announcing)
        feeds = (
            AnnounceFeed(client, state, freshness),
            OtherAnnouncers(config.announce, view, partial(arrivals_of, config, name, drivers)),
        )
    host = announcing_host(config, name, drivers.node_addresses)
    announcers = announcers_of(announcing_config(config), client, state, host, freshness)
    loop = Loop(
        "proxy",
        state,
        plan,
        [*drivers.chain, *announcers.chain],
        report,
        large=large,
        pace=Pace(plan_slice=PLAN_SLICE),
    )
    announcers.follow(loop)
    view.follow(loop)
    view.watch(freshness)
    announcer = Announcer(
        client, config.presence, view, name, warned=report.warned, recorder=recorder
    )
    return [
        *drivers.components,
        Task("events", recorder.run),
        HostSettings(Host("node", adjust=config.node.adjust_system), view),
        Feed(client, state, freshness, projection_of(config)),
        *feeds,
        Task("freshness", freshness.run),
        Task("presence", partial(announcer.run, resume=report.resume)),
        *probes,
        *announcers.components,
        loop,
        announcer_of(nodes_announce(config), client, view, state, recorder, announcers.components),
    ]


def announcing_config(config: Config) -> Config:
    """Return the configuration without the section `announce` if this node announces nothing. If
    BGP is not configured, its files are not those of a gateway on the same host."""
    section = config.announce
    if section is None or not config.node.announce:
        return msgspec.structs.replace(config, announce=None)
    if section.method == "bgp" or section.bgp != BgpConfig():
        return config
    bgp = BgpConfig(directory=f"{section.bgp.directory}-node")
    return msgspec.structs.replace(config, announce=msgspec.structs.replace(section, bgp=bgp))


def announcing_host(
    config: Config, node_name: str, node_addresses: Callable[[], Sequence[str]]
) -> AnnouncingHost:
    """Return this node as a host that announces addresses."""
    selectors = interfaces_of(config, node_name)
    return AnnouncingHost("node", node_name, Path(config.node.pin_path), selectors, node_addresses)


def sources_of(config: Config) -> Sequence[str]:
    """Return the sources of the state of a node. Only a service proxy, and a node that announces
    addresses, need endpoints."""
    sources = SOURCES if config.node.service_proxy or nodes_announce(config) else WITHOUT_SLICES
    return (*sources, *announce_sources(config)) if nodes_announce(config) else sources


def projection_of(config: Config) -> Projection:
    """Return the projection of the objects that a node reads."""
    if nodes_announce(config):
        return ANNOUNCING_NODE if config.node.service_proxy else ANNOUNCING_TUNNEL_NODE
    return NODE if config.node.service_proxy else TUNNEL_NODE


def interfaces_of(config: Config, node_name: str) -> Sequence[str]:
    """Return the selectors of the interfaces where packets from gateways arrive at this node."""
    return of_host(node_name, config.node.interfaces, config.node.interfaces_by_node)


def arrivals_of(config: Config, node_name: str, drivers: "Drivers") -> Sequence[str]:
    """Return the interfaces where packets for load-balancer addresses arrive. Raise Unavailable."""
    if selectors := interfaces_of(config, node_name):
        return select(selectors, present(routes=DEFAULT_ROUTE in selectors)).names
    return [link.name for link in holders(drivers.node_addresses())]


def other_service_proxies(state: State, node_name: str) -> Sequence[Finding]:
    """Return the Finding that OVN-Kubernetes is a service proxy of this node, too."""
    node = state.nodes.get(node_name)
    return (two_service_proxies(),) if node is not None and is_ovn_kubernetes(node) else ()


def notes_of(service: NodeService) -> Sequence[Finding]:
    """Return the notes that this node reports."""
    return service.notes


class Arrivals(Component):
    """The component for the interfaces where packets from gateways arrive, with or without a
    tunnel: it returns their requirements on the settings of the host. `selectors`: see
    `interfaces_of`."""

    name = "arrivals"

    def __init__(self, addresses: NodeAddresses, selectors: Sequence[str]) -> None:
        self._addresses = addresses
        self._selectors = selectors

    async def requirements(self) -> Collection[SysctlRequirement]:
        return await requirements_of_arrivals(self._addresses(), self._selectors)


class Drivers(NamedTuple):
    """The drivers of this node. `chain`: the drivers of its loop. `components`: the drivers and the
    components beside them, in the order of the start. `node_addresses`: see NodeAddresses."""

    chain: Sequence[Driver[ServiceKey, NodeService, Any, Any, Any]]
    components: Sequence[Component]
    node_addresses: Callable[[], Sequence[str]]


def drivers_of(
    config: Config,
    state: State,
    node_name: str,
    addresses: NodeAddresses,
    host_addresses: HostAddresses,
) -> Drivers:
    """Return the drivers that the configuration requests. The health ports come last: an answer of
    200 proves that everything else is in place."""
    chosen, selectors = bool(config.node.node_port_addresses), interfaces_of(config, node_name)
    if config.tunnel.kind == "none":
        tunnels: list[TunnelDriver] = []
        ends: list[Component] = [NoTunnel()]
    else:
        tunnels = [TunnelDriver(config.tunnel, node_addresses=addresses, selectors=selectors)]
        ends = [*tunnels]
    arrivals = Arrivals(addresses, selectors)
    if not config.node.service_proxy:
        return Drivers(tunnels, [*ends, arrivals], addresses)
    proxy = NodeProxyDriver(
        node_addresses=addresses,
        pod_cidrs=config.cluster.pod_cidrs,
        pod_interfaces=config.node.pod_interfaces,
        node_port_addresses=host_addresses if chosen else None,
        service_cidrs=config.cluster.service_cidrs,
        precedence_of=partial(service_precedence, state.services),
        requeue=state.subscribers.mark,
    )
    health = HealthPortDriver(
        node_name=node_name,
        healthy=proxy.healthy,
        command=health_check_server_command(),
        node_eligible=lambda: node_name in state.nodes and not leaving(state.nodes[node_name]),
        addresses=host_addresses() if chosen else EVERYWHERE,
        requeue=state.subscribers.mark,
    )
    moving = [Task("host addresses", partial(follow_host, state, host_addresses, health))]
    return Drivers(
        [proxy, *tunnels, health],
        [proxy, *ends, health, arrivals, *(moving if chosen else ())],
        addresses,
    )


async def follow_host(
    state: State, host_addresses: HostAddresses, health: HealthPortDriver
) -> None:
    """Move NodePorts and health ports to the host's addresses as these change, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        try:
            if await host_addresses.refresh():
                await health.move(host_addresses())
                state.subscribers.mark(state.services)
        except Unavailable as problem:
            log.warning(
                "cannot read the host's addresses; NodePorts keep their present addresses",
                problem=str(problem),
            )


async def clean_up(config: Config) -> None:
    """Remove everything that this process or an earlier process of this role has put into the
    kernel, and restore the settings of the host. Addresses that this node announces are handed over
    to other nodes before that."""
    nowhere = NodeAddresses("", {}, ())
    drivers = drivers_of(Config(), State(()), "", nowhere, HostAddresses(()))
    settings = HostSettings(Host("node", adjust=False), View("node", ""))
    host = announcing_host(config, "", nowhere)
    announcing = announcing_config(config) if nodes_announce(config) else config
    await remove_components([settings, *drivers.components, *leftovers(announcing, host)])
