"""`fairlead node`: what a node does for its Services: the service proxy where there is no
kube-proxy, its end of the tunnels.

In: Services and EndpointSlices. Out: this node's nftables rules, tunnel and health ports. The
health ports come last: one that answers 200 is the proof that the rest is in place, and gateways
wait for it. Stopped or killed, rules and tunnel stay. Where kube-proxy runs (node.serviceProxy:
false) only the tunnel is ours, and no EndpointSlice is asked for."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from ipaddress import ip_network
from typing import Any

import structlog

from fairlead.config import Config
from fairlead.drivers import Driver
from fairlead.drivers.healthport import HealthPortDriver
from fairlead.drivers.host import Host, Need
from fairlead.drivers.nodeproxy import NodeProxyDriver, remove_table
from fairlead.drivers.nodeproxy.needs import needs as needs_of_proxy
from fairlead.drivers.tunnel import TunnelDriver, remove_tunnel
from fairlead.drivers.tunnel.needs import needs as needs_of_arrivals
from fairlead.errors import Refused, Unavailable
from fairlead.kube.access import Access
from fairlead.kube.answers import NotFound, RefusedByServer, Unauthenticated
from fairlead.kube.backoff import Backoff
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.kube.freshness import Freshness, stale_after_s
from fairlead.kube.networks import read_address
from fairlead.kube.objects import NODES, Node, ObjectKey, Service
from fairlead.model import Family, Finding, NodeService, ServiceKey
from fairlead.net.listening import EVERYWHERE
from fairlead.net.localroutes import all_borne
from fairlead.net.selection import of_host
from fairlead.plan.addresses import family_of
from fairlead.plan.cluster import plan_node
from fairlead.plan.members import leaving
from fairlead.plan.projection import NODE, TUNNEL_NODE
from fairlead.reconcile import Loop
from fairlead.roles.answering import command as answering_command
from fairlead.roles.host import watch_host
from fairlead.roles.presence import Announcer
from fairlead.roles.process import SOURCES, WITHOUT_SLICES, feed
from fairlead.roles.report import Reporter
from fairlead.state import State
from fairlead.telemetry import TunnelCollector
from fairlead.web import View, serve

log = structlog.get_logger()

SYNC_FAILED = "SyncProxyRulesFailed"
DEFAULT_LISTEN = "127.0.0.1:9442"
PLAN_SLICE = 20
"""So many Services are planned, or compared by an audit, in some milliseconds, before a change has
its turn."""
LARGE = 5_000
"""A Service with more ports times endpoints than this takes a tenth of a second or more. Other
Services do not wait for it."""
LOOK_S = 2.0
"""So often it is looked whether others have taken our rules away; and at the host's addresses,
where `node.nodePortAddresses` says which count."""
API_RETRY_S = (0.2, 5.0)
"""First and longest wait for an API server that does not answer at the start."""


class HostAddresses:
    """Those of the host's addresses that are in one of these networks, as it had them when it was
    looked last. Loopback is not among them, as in kube-proxy; nor are link-local ones, which
    kube-proxy takes."""

    def __init__(self, cidrs: Sequence[str]) -> None:
        self._networks = [ip_network(cidr) for cidr in cidrs]
        self._found: tuple[str, ...] = ()

    def __call__(self) -> Sequence[str]:
        return self._found

    async def look(self) -> bool:
        """Look again; whether there are others now. Raises Unavailable."""
        borne = await asyncio.to_thread(all_borne)
        reached = {each for each in borne if not each.is_loopback and not each.is_link_local}
        found = tuple(
            sorted(
                str(each) for each in reached if any(each in network for network in self._networks)
            )
        )
        before, self._found = self._found, found
        return found != before


class NodeAddresses:
    """Where this node's NodePorts answer, as the API shows it now. While it shows no address (the
    Node is away for a moment, to be registered anew), those that it showed last: nothing is to stop
    answering for that."""

    def __init__(self, node_name: str, nodes: Mapping[str, Node], last: Sequence[str]) -> None:
        self._node_name = node_name
        self._nodes = nodes
        self._last = last

    def __call__(self) -> Sequence[str]:
        if (node := self._nodes.get(self._node_name)) is not None:
            self._last = primary_addresses(node) or self._last
        return self._last


def primary_addresses(node: Node) -> Sequence[str]:
    """The first InternalIP of each family, where kube-proxy too answers for NodePorts."""
    first: dict[Family, str] = {}
    for entry in node.status.addresses:
        if entry.type == "InternalIP":
            first.setdefault(family_of(entry.address), entry.address)
    return tuple(first.values())


def claim(services: Mapping[ServiceKey, Service], key: ServiceKey, address: str) -> str | None:
    """How good a Service's claim to an address is (see `Claim`): what it was given comes before
    what it names itself, for anybody may name anything in spec.externalIPs; then the older one.
    None: there is no such Service."""
    if (service := services.get(key)) is None:
        return None
    given = {entry.ip for entry in service.status.load_balancer.ingress}
    named = address in set(map(read_address, service.spec.external_ips)) and address not in set(
        map(read_address, given)
    )
    return f"{named:d} {service.metadata.creation_timestamp or ''}"


def is_large(state: State, key: ServiceKey) -> bool:
    """Whether other Services must not wait until this Service is planned and in the kernel."""
    service = state.services.get(key)
    endpoints = sum(len(each.endpoints or ()) for each in state.slices_of(key))
    return service is not None and len(service.spec.ports) * endpoints > LARGE


async def first_addresses(client: Client, node_name: str) -> Sequence[str]:
    """The addresses of this node at the start. Waits for an API server that is away or does not let
    us in: a process that ended instead would be started ever more rarely, and the node would be
    missing for long after all is well."""
    retry = Backoff(*API_RETRY_S)
    told: type[Exception] | None = None
    while True:
        try:
            node = await client.get(NODES, ObjectKey("", node_name))
            break
        except NotFound:
            raise
        except (Unavailable, RefusedByServer) as problem:
            # Of credentials the connection has told.
            if not isinstance(problem, Unauthenticated) and type(problem) is not told:
                told = type(problem)
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
    """Run the node's part until cancelled. What it has put in place stays then, unless it is to be
    removed."""
    proxying = config.node.service_proxy
    keep = NODE if proxying else TUNNEL_NODE
    state = State(SOURCES if proxying else WITHOUT_SLICES)
    view = View("node", node_name)
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    async with (
        Client(access) as client,
        serve(view, listen, config.web.metrics_from),
        AsyncExitStack() as opened,
    ):
        if remove_at_stop:
            opened.push_async_exit(
                _clean_up_if_cancelled
            )  # the first to be pushed: it comes after all drivers have let go
        addresses = NodeAddresses(node_name, state.nodes, await first_addresses(client, node_name))
        answering = HostAddresses(config.node.node_port_addresses)
        await answering.look()
        drivers = await open_drivers(config, state, node_name, addresses, answering, view, opened)
        async with asyncio.TaskGroup() as group:
            recorder = EventRecorder(client, "fairlead-node")
            report = Reporter[NodeService](
                view, state, recorder, reason=SYNC_FAILED, who=f"node {node_name}", notes=notes_of
            )
            plan, large = partial(plan_node, state, node_name), partial(is_large, state)
            loop = Loop("proxy", state, plan, drivers, report, large=large, plan_slice=PLAN_SLICE)
            view.follow(loop)
            freshness = Freshness(
                lambda: client.answered_s, stale_s=stale_after_s(config.presence.lease_duration_s)
            )
            view.watch(freshness)
            announcer = Announcer(client, config.presence, view, node_name, warned=report.warned)
            group.create_task(recorder.run())
            host = Host("node", adjust=config.node.adjust_system)
            group.create_task(
                watch_host(
                    host, partial(needs, config, addresses, interfaces_of(config, node_name)), view
                )
            )
            feed(group, client, state, freshness, keep)
            group.create_task(freshness.run())
            group.create_task(announcer.run(resume=report.resume))
            for driver in drivers:
                if isinstance(driver, TunnelDriver):
                    group.create_task(driver.follow())
                if isinstance(driver, NodeProxyDriver):
                    group.create_task(follow_rules(state, driver))
                if isinstance(driver, HealthPortDriver):
                    group.create_task(driver.run())
                    if config.node.node_port_addresses:
                        group.create_task(follow_host(state, answering, driver))
            group.create_task(loop.run())


def interfaces_of(config: Config, node_name: str) -> Sequence[str]:
    """The selectors of the interfaces where packets from gateways arrive at this node."""
    return of_host(node_name, config.node.interfaces, config.node.interfaces_by_node)


def notes_of(service: NodeService) -> Sequence[Finding]:
    """What users are to know of what this node does for a Service."""
    return service.notes


async def needs(
    config: Config, addresses: NodeAddresses, arrivals: Sequence[str]
) -> Sequence[Need]:
    """What this node needs of its host. `arrivals`: the selectors of its interfaces. Where
    kube-proxy runs, kube-proxy sets the room for tracked flows."""
    own = needs_of_proxy() if config.node.service_proxy else ()
    return (*own, *await needs_of_arrivals(addresses(), arrivals))


async def open_drivers(
    config: Config,
    state: State,
    node_name: str,
    addresses: NodeAddresses,
    answering: HostAddresses,
    view: View,
    opened: AsyncExitStack,
) -> Sequence[Driver[NodeService, Any, Any, Any]]:
    """What this node does, in the order in which it comes to be; closed with `opened`."""
    drivers: list[Driver[NodeService, Any, Any, Any]] = []
    cluster, chosen = config.cluster, bool(config.node.node_port_addresses)
    if config.node.service_proxy:
        proxy = NodeProxyDriver(
            node_addresses=addresses,
            pod_cidrs=cluster.pod_cidrs,
            pod_interfaces=config.node.pod_interfaces,
            node_port_addresses=answering if chosen else None,
            service_cidrs=cluster.service_cidrs,
            claim=partial(claim, state.services),
        )
        await proxy.open()
        opened.push_async_callback(proxy.close, remove=False)
        drivers.append(proxy)
    if config.tunnel.kind != "none":
        tunnel = TunnelDriver(
            config.tunnel, node_addresses=addresses, selectors=interfaces_of(config, node_name)
        )
        await tunnel.open()
        opened.push_async_callback(tunnel.close, remove=False)
        view.registry.register(TunnelCollector(tunnel))
        view.parts.append(tunnel.status)
        drivers.append(tunnel)
    else:
        for what in await remove_tunnel():
            log.info("removed what a tunnel left", what=what)
    if config.node.service_proxy:
        health = HealthPortDriver(
            node_name=node_name,
            healthy=proxy.healthy,
            command=answering_command(),
            node_eligible=lambda: node_name in state.nodes and not leaving(state.nodes[node_name]),
            addresses=answering() if chosen else EVERYWHERE,
            touched=state.subscribers.mark,
        )
        await health.open()
        opened.push_async_callback(health.close)
        drivers.append(health)
    return drivers


async def follow_host(state: State, answering: HostAddresses, health: HealthPortDriver) -> None:
    """Have NodePorts and health ports answer at the host's addresses as these change, until
    cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if await answering.look():
                await health.move(answering())
                state.subscribers.mark(state.services)
        except Unavailable as problem:
            log.warning(
                "NodePorts answer where they did: the host's addresses are not known",
                problem=str(problem),
            )


async def follow_rules(state: State, proxy: NodeProxyDriver) -> None:
    """Have rules that others took away (`nft flush ruleset`, a firewall that is loaded anew) come
    back, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if await proxy.disturbed():
                log.warning(
                    "somebody else has taken rules of the table inet fairlead away: it is made anew"
                )
                state.subscribers.mark(state.services)
        except Unavailable as problem:
            log.warning("whether our rules are there is not known", problem=str(problem))


async def _clean_up_if_cancelled(kind: type[BaseException] | None, *_: object) -> None:
    """A failure is to be followed by another start, and traffic goes on until then."""
    if kind is asyncio.CancelledError:
        await clean_up()


async def clean_up() -> None:
    """Take out of the kernel what this role has put there, whoever left it, and put settings of the
    host back."""
    if await remove_table():
        log.info("removed the table inet fairlead: this node serves no Services now")
    else:
        log.info("nothing to remove: there is no table inet fairlead here")
    for what in await remove_tunnel():
        log.info("removed", what=what)
    for setting in Host("node", adjust=False).restore():
        log.info("put back", setting=setting)
