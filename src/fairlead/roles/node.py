"""`fairlead node`: what a node does for its Services: the service proxy where there is no kube-proxy, its end of the tunnels.

In: Services and EndpointSlices. Out: this node's nftables rules, tunnel and health ports. The health ports come last: one that
answers 200 is the proof that the rest is in place, and gateways wait for it. Stopped or killed, rules and tunnel stay.
Where kube-proxy runs (node.serviceProxy: false) only the tunnel is ours, and no EndpointSlice is asked for.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
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
from fairlead.kube.objects import NODES, Node, ObjectKey
from fairlead.model import Family, NodeService
from fairlead.plan.addresses import family_of
from fairlead.plan.cluster import plan_node
from fairlead.plan.members import leaving
from fairlead.plan.projection import NODE, TUNNEL_NODE
from fairlead.reconcile import Loop
from fairlead.roles.host import watch_host
from fairlead.roles.process import SOURCES, WITHOUT_SLICES, feed
from fairlead.roles.report import Reporter
from fairlead.state import State
from fairlead.telemetry import TunnelCollector
from fairlead.web import View, serve

log = structlog.get_logger()

SYNC_FAILED = "SyncProxyRulesFailed"
DEFAULT_LISTEN = "127.0.0.1:9442"
API_RETRY_S = (0.2, 5.0)
"""First and longest wait for an API server that does not answer at the start."""


class NodeAddresses:
    """Where this node's NodePorts answer, as the API shows it now. While it shows no address (the Node is away for a moment,
    to be registered anew), those that it showed last: nothing is to stop answering for that."""

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


async def first_addresses(client: Client, node_name: str) -> Sequence[str]:
    """The addresses of this node at the start. Waits for an API server that is away or does not let us in: a process that ended
    instead would be started ever more rarely, and the node would be missing for long after all is well."""
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
        raise Refused(f"Node {node_name} has no InternalIP", fix="is the kubelet, or the cloud's node controller, running?")
    return addresses


async def run(config: Config, access: Access, node_name: str) -> None:
    """Run the node's part until cancelled. What it has put in place stays then."""
    proxying = config.node.service_proxy
    keep = NODE if proxying else TUNNEL_NODE
    state = State(SOURCES if proxying else WITHOUT_SLICES)
    view = View("node", node_name)
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    async with Client(access) as client, serve(view, listen), AsyncExitStack() as opened:
        addresses = NodeAddresses(node_name, state.nodes, await first_addresses(client, node_name))
        drivers = await open_drivers(config, state, node_name, addresses, view, opened)
        async with asyncio.TaskGroup() as group:
            recorder = EventRecorder(client, "fairlead-node")
            report = Reporter[NodeService](view, state, recorder, reason=SYNC_FAILED, who=f"node {node_name}")
            loop = Loop("proxy", state, partial(plan_node, state, node_name), drivers, report)
            view.follow(loop)
            group.create_task(recorder.run())
            host = Host("node", adjust=config.node.adjust_system)
            group.create_task(watch_host(host, partial(needs, config, addresses), view))
            feed(group, client, state, keep)
            for driver in drivers:
                if isinstance(driver, TunnelDriver):
                    group.create_task(driver.follow())
            group.create_task(loop.run())


async def needs(config: Config, addresses: NodeAddresses) -> Sequence[Need]:
    """What this node needs of its host. Room for tracked flows is kube-proxy's matter where that runs."""
    own = needs_of_proxy() if config.node.service_proxy else ()
    return (*own, *await needs_of_arrivals(addresses(), config.node.interfaces))


async def open_drivers(
    config: Config, state: State, node_name: str, addresses: NodeAddresses, view: View, opened: AsyncExitStack
) -> Sequence[Driver[NodeService, Any, Any, Any]]:
    """What this node does, in the order in which it comes to be; closed with `opened`."""
    drivers: list[Driver[NodeService, Any, Any, Any]] = []
    cluster = config.cluster
    if config.node.service_proxy:
        proxy = NodeProxyDriver(node_addresses=addresses, pod_cidrs=cluster.pod_cidrs, service_cidrs=cluster.service_cidrs)
        await proxy.open()
        opened.push_async_callback(proxy.close, remove=False)
        drivers.append(proxy)
    if config.tunnel.kind != "none":
        tunnel = TunnelDriver(config.tunnel, node_addresses=addresses, interfaces=config.node.interfaces)
        await tunnel.open()
        opened.push_async_callback(tunnel.close, remove=False)
        view.registry.register(TunnelCollector(tunnel))
        view.traffic = lambda: {"tunnel": {"kind": config.tunnel.kind, "packets": tunnel.counters()}}
        drivers.append(tunnel)
    else:
        for what in await remove_tunnel():
            log.info("removed what a tunnel left", what=what)
    if config.node.service_proxy:
        health = HealthPortDriver(
            node_name=node_name,
            healthy=proxy.healthy,
            node_eligible=lambda: node_name in state.nodes and not leaving(state.nodes[node_name]),
        )
        await health.open()
        opened.push_async_callback(health.close)
        drivers.append(health)
    return drivers


async def clean_up() -> None:
    """Take out of the kernel what this role has put there, whoever left it, and put settings of the host back."""
    if await remove_table():
        log.info("removed the table inet fairlead: this node serves no Services now")
    else:
        log.info("nothing to remove: there is no table inet fairlead here")
    for what in await remove_tunnel():
        log.info("removed", what=what)
    for setting in Host("node", adjust=False).restore():
        log.info("put back", setting=setting)
