"""`fairlead node`: the service proxy of a node that has no kube-proxy, and the node's end of the
tunnels.

In: Services and EndpointSlices. Out: this node's nftables rules, tunnel and health ports. The
health ports come last: an answer of 200 proves that everything else is in place, and gateways wait
for it. It cannot prove that the pods exist that EndpointSlices show as ready: after a boot, these
may be the pods of before the boot (`drivers.healthport`). When the process stops or is killed,
rules and tunnel stay. If kube-proxy runs (node.serviceProxy: false), this role manages only the
tunnel, and does not watch EndpointSlices."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from ipaddress import ip_network
from typing import Any, NamedTuple

import structlog

from fairlead.backoff import Backoff
from fairlead.config import Config
from fairlead.drivers import Component, Driver
from fairlead.drivers.awaited_pods import AwaitedPods
from fairlead.drivers.healthport import HealthPortDriver
from fairlead.drivers.host import Host
from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.drivers.tunnel import NoTunnel, TunnelDriver
from fairlead.drivers.tunnel.requirements import requirements as requirements_of_arrivals
from fairlead.errors import Refused, Unavailable
from fairlead.kube.access import Access
from fairlead.kube.answers import NotFound, RefusedByServer, Unauthenticated
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.kube.objects import NODES, Node, ObjectKey, Service
from fairlead.model import Family, Finding, NodeService, ServiceKey
from fairlead.net.address import family_of
from fairlead.net.listening import EVERYWHERE
from fairlead.net.localroutes import assigned_addresses
from fairlead.net.selection import of_host
from fairlead.plan.budget import elements_of
from fairlead.plan.cluster import plan_node
from fairlead.plan.conflicts import Precedence, precedence_of
from fairlead.plan.members import leaving
from fairlead.plan.projection import NODE, TUNNEL_NODE
from fairlead.reconcile import Loop, Pace
from fairlead.roles.components import Task, remove_components, run_components
from fairlead.roles.health_check_server import command as health_check_server_command
from fairlead.roles.host import HostSettings
from fairlead.roles.own_addresses import OwnAddresses
from fairlead.roles.own_node import OwnNode
from fairlead.roles.presence import Announcer
from fairlead.roles.process import SOURCES, WITHOUT_SLICES, Feed, KnownHosts, freshness_of
from fairlead.roles.report import Reporter
from fairlead.state import State
from fairlead.web import View, serve

log = structlog.get_logger()

SYNC_FAILED = "SyncProxyRulesFailed"
DEFAULT_LISTEN = "127.0.0.1:9442"
PLAN_SLICE = 20
"""The number of Services that are planned, or compared by an audit, before a change is processed;
it takes some milliseconds."""
LARGE = 5_000
"""The number of elements (`budget.elements_of`) above which a Service is large: it takes a tenth of
a second or more, and other Services do not wait for it."""
CHECK_INTERVAL_S = 2.0
"""The interval at which the host's addresses are read, if `node.nodePortAddresses` selects among
them."""
API_RETRY_S = (0.2, 5.0)
"""The first and the longest delay before the next request to an API server that does not answer at
the start."""


class HostAddresses:
    """The addresses of the host that are in one of these networks, at the time of the last
    `refresh`. Like kube-proxy, it excludes loopback addresses. Unlike kube-proxy, it excludes
    link-local addresses too."""

    def __init__(self, cidrs: Sequence[str]) -> None:
        self._networks = [ip_network(cidr) for cidr in cidrs]
        self._found: tuple[str, ...] = ()

    def __call__(self) -> Sequence[str]:
        return self._found

    async def refresh(self) -> bool:
        """Read the addresses again. Return whether they have changed. Raise Unavailable if they
        cannot be read."""
        assigned = await asyncio.to_thread(assigned_addresses)
        usable = {each for each in assigned if not each.is_loopback and not each.is_link_local}
        found = tuple(
            sorted(
                str(each) for each in usable if any(each in network for network in self._networks)
            )
        )
        before, self._found = self._found, found
        return found != before


class NodeAddresses:
    """The addresses of this node's NodePorts, as the API shows them now. While the API shows none
    (the Node may be deleted and registered again), the last addresses that the API showed stay in
    use, so that NodePorts keep answering."""

    def __init__(self, node_name: str, nodes: Mapping[str, Node], last: Sequence[str]) -> None:
        self._node_name = node_name
        self._nodes = nodes
        self._last = last

    def __call__(self) -> Sequence[str]:
        if (node := self._nodes.get(self._node_name)) is not None:
            self._last = primary_addresses(node) or self._last
        return self._last


def primary_addresses(node: Node) -> Sequence[str]:
    """Return the first InternalIP of each family, where kube-proxy too answers for NodePorts."""
    first: dict[Family, str] = {}
    for entry in node.status.addresses:
        if entry.type == "InternalIP":
            first.setdefault(family_of(entry.address), entry.address)
    return tuple(first.values())


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
    return service is not None and elements_of(service, state.slices_of(key)) > LARGE


async def first_addresses(client: Client, node_name: str) -> Sequence[str]:
    """Return the addresses of this node at the start. Wait while the API server does not answer or
    denies access, because a process that ended instead would be restarted with growing delays, and
    the node would stay unserved long after the problem is solved. Raise Refused if the Node has no
    InternalIP, and NotFound if the Node does not exist."""
    retry = Backoff(*API_RETRY_S)
    logged: type[Exception] | None = None
    while True:
        try:
            node = await client.get(NODES, ObjectKey("", node_name))
            break
        except NotFound:
            raise
        except (Unavailable, RefusedByServer) as problem:
            # Invalid credentials are logged by the connection.
            if not isinstance(problem, Unauthenticated) and type(problem) is not logged:
                logged = type(problem)
                level = log.error if isinstance(problem, RefusedByServer) else log.warning
                level("waiting for the API server", problem=str(problem))
            await asyncio.sleep(retry.next_s())
    if not (addresses := primary_addresses(node)):
        raise Refused(
            f"Node {node_name} has no InternalIP",
            fix="is the kubelet, or the cloud's node controller, running?",
        )
    return addresses


async def run(
    config: Config, access: Access, node_name: str, *, remove_at_stop: bool = False
) -> None:
    """Run the role until cancelled. Then rules and tunnel stay in place, unless `remove_at_stop` is
    set."""
    state = State(SOURCES if config.node.service_proxy else WITHOUT_SLICES, cluster_ips=False)
    view = View("node", node_name)
    # Nobody reads these addresses where kube-proxy serves external IPs.
    hosts = [KnownHosts(state, config, access)] if config.node.service_proxy else []
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    try:
        async with Client(access) as client, serve(view, listen, config.web.metrics_from):
            for each in hosts:
                await each.resolve()
            first = await first_addresses(client, node_name)
            addresses = NodeAddresses(node_name, state.nodes, first)
            host_addresses = HostAddresses(config.node.node_port_addresses)
            await host_addresses.refresh()
            drivers = drivers_of(config, state, node_name, addresses, host_addresses)
            parts = components(config, view, client, state, drivers)
            await run_components([*hosts, *parts], view)
    except asyncio.CancelledError:
        # After a failure the process is started again, and traffic continues meanwhile. So this is
        # not done for other exceptions.
        if remove_at_stop:
            await clean_up()
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
    plan, large = partial(plan_node, state, name), partial(is_large, state)
    loop = Loop(
        "proxy", state, plan, drivers.chain, report, large=large, pace=Pace(plan_slice=PLAN_SLICE)
    )
    freshness = freshness_of(client, config)
    view.follow(loop)
    view.watch(freshness)
    announcer = Announcer(client, config.presence, view, name, warned=report.warned)
    return [
        *drivers.components,
        *([OwnAddresses("node", state)] if proxying else []),
        Task("events", recorder.run),
        HostSettings(Host("node", adjust=config.node.adjust_system), view),
        Feed(client, state, freshness, NODE if proxying else TUNNEL_NODE),
        Task("freshness", freshness.run),
        Task("presence", partial(announcer.run, resume=report.resume)),
        loop,
    ]


def interfaces_of(config: Config, node_name: str) -> Sequence[str]:
    """Return the selectors of the interfaces where packets from gateways arrive at this node."""
    return of_host(node_name, config.node.interfaces, config.node.interfaces_by_node)


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
    components beside them, in the order of the start."""

    chain: Sequence[Driver[ServiceKey, NodeService, Any, Any, Any]]
    components: Sequence[Component]


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
    arrivals, own = Arrivals(addresses, selectors), OwnNode("node", node_name, state)
    if not config.node.service_proxy:
        return Drivers(tunnels, [own, *ends, arrivals])
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
        healthy=lambda: proxy.healthy() and not own.is_other,
        command=health_check_server_command(),
        node_eligible=lambda: node_name in state.nodes and not leaving(state.nodes[node_name]),
        addresses=host_addresses() if chosen else EVERYWHERE,
        requeue=state.subscribers.mark,
        awaited=AwaitedPods(config.cluster.pod_cidrs),
    )
    moving = [Task("host addresses", partial(follow_host, state, host_addresses, health))]
    return Drivers(
        [proxy, *tunnels, health],
        [own, proxy, *ends, health, arrivals, *(moving if chosen else ())],
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


async def clean_up() -> None:
    """Remove everything that this process or an earlier process of this role has put into the
    kernel, and restore the settings of the host."""
    nowhere = NodeAddresses("", {}, ())
    drivers = drivers_of(Config(), State(()), "", nowhere, HostAddresses(()))
    settings = HostSettings(Host("node", adjust=False), View("node", ""))
    await remove_components([settings, *drivers.components])
