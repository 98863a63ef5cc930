"""`fairlead node`: the service proxy of one node, for clusters without kube-proxy.

In: Services and EndpointSlices. Out: this node's nftables rules and health ports. The rules come first: a health port that
answers 200 is the proof that they are in place, and gateways wait for it. Stopped or killed, the rules stay.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

import structlog

from fairlead.config import Config
from fairlead.drivers.healthport import HealthPortDriver
from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.errors import Refused, Unavailable
from fairlead.kube.access import Access
from fairlead.kube.backoff import Backoff
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.kube.objects import NODES, ObjectKey
from fairlead.model import NodeService
from fairlead.plan.balancer import leaving
from fairlead.plan.cluster import plan_node
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


async def node_addresses(client: Client, node_name: str) -> Sequence[str]:
    """The InternalIPs of this node: where its NodePorts answer. Waits for an API server that is away: a process that ended
    instead would be started ever more rarely, and the node would be missing for long after the server is back."""
    retry = Backoff(*API_RETRY_S)
    while True:
        try:
            node = await client.get(NODES, ObjectKey("", node_name))
            break
        except Unavailable as problem:
            log.warning("waiting for the API server", problem=str(problem))
            await asyncio.sleep(retry.next_s())
    addresses = [entry.address for entry in node.status.addresses if entry.type == "InternalIP"]
    if not addresses:
        raise Refused(f"Node {node_name} has no InternalIP", fix="is the kubelet, or the cloud's node controller, running?")
    return addresses


async def run(config: Config, access: Access, node_name: str) -> None:
    """Run the node's service proxy until cancelled. Its rules stay in place then."""
    state = State(SOURCES)
    view = View("node", node_name)
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    async with Client(access) as client, serve(view, listen):
        addresses = await node_addresses(client, node_name)
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
                feed(group, client, state)
                group.create_task(loop.run())
        finally:
            await health.close()
            await proxy.close(remove=False)


async def clean_up() -> None:
    """Take this node's rules out of the kernel."""
    proxy = NodeProxyDriver(node_addresses=(), pod_cidrs=())
    await proxy.open()
    await proxy.close(remove=True)
