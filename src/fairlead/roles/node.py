"""`fairlead node`: the service proxy of one node, for clusters without kube-proxy.

In: Services and EndpointSlices. Out: this node's nftables rules and health ports. The rules come first: a health port that
answers 200 is the proof that they are in place, and gateways wait for it. Stopped or killed, the rules stay.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from fairlead.config import Config
from fairlead.drivers.healthport import HealthPortDriver
from fairlead.drivers.nodeproxy import NodeProxyDriver, remove_table
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
from fairlead.plan.projection import NODE
from fairlead.reconcile import Loop
from fairlead.roles.process import SOURCES, feed
from fairlead.roles.report import Reporter
from fairlead.state import State
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
    """Run the node's service proxy until cancelled. Its rules stay in place then."""
    state = State(SOURCES)
    view = View("node", node_name)
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    async with Client(access) as client, serve(view, listen):
        addresses = NodeAddresses(node_name, state.nodes, await first_addresses(client, node_name))
        cluster = config.cluster
        proxy = NodeProxyDriver(node_addresses=addresses, pod_cidrs=cluster.pod_cidrs, service_cidrs=cluster.service_cidrs)
        health = HealthPortDriver(
            node_name=node_name,
            healthy=proxy.healthy,
            node_eligible=lambda: node_name in state.nodes and not leaving(state.nodes[node_name]),
        )
        await proxy.open()
        try:
            await health.open()
            async with asyncio.TaskGroup() as group:
                recorder = EventRecorder(client, "fairlead-node")
                report = Reporter[NodeService](view, state, recorder, reason=SYNC_FAILED, who=f"node {node_name}")
                loop = Loop("proxy", state, partial(plan_node, state, node_name), [proxy, health], report)
                view.follow(loop)
                group.create_task(recorder.run())
                feed(group, client, state, NODE)
                group.create_task(loop.run())
        finally:
            await health.close()
            await proxy.close(remove=False)


async def clean_up() -> None:
    """Take this node's rules out of the kernel, whoever left them there."""
    if await remove_table():
        log.info("removed the table inet fairlead: this node serves no Services now")
    else:
        log.info("nothing to remove: there is no table inet fairlead here")
