"""The lab's control plane and kubelets, one process per lab: `python -m fairlead.lab.cluster LAB`.

In: the run directory of a lab whose network and API server are up. Out: until SIGTERM, Nodes are
registered, Pods are scheduled and run, and EndpointSlices and Endpoints are kept current. Pods
outlive this process; its next start removes them and starts them again. Follows the behaviour of
kube-scheduler, of the node lifecycle and EndpointSlice controllers and of the kubelet, as far as
Services can observe it.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

from fairlead.errors import Conflict, FairleadError
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.kube.reflector import Reflector
from fairlead.lab import pod, status
from fairlead.lab.background import run_until_sigterm
from fairlead.lab.endpoints import EndpointController
from fairlead.lab.kubelet import Kubelet
from fairlead.lab.objects import ENDPOINTS, NODES, PODS, SLICES, Node, Pod
from fairlead.lab.rundir import RunDirectory
from fairlead.lab.slices import MANAGED_BY_LABEL, MANAGER
from fairlead.lab.topology import Host, Topology

log = structlog.get_logger()

NODE_GRACE_S = 40.0
"""Time after a node's last heartbeat at which Kubernetes marks it unreachable
(--node-monitor-grace-period)."""
POLL_S = 0.5
RETRY_S = 1.0


class Cluster:
    """A lab's control plane. `run` runs it until it is cancelled."""

    def __init__(self, client: Client, topology: Topology, directory: RunDirectory) -> None:
        self._client = client
        self._topology = topology
        self._directory = directory
        self._nodes: dict[ObjectKey, Node] = {}
        self._pods: dict[ObjectKey, Pod] = {}
        # (UID, node) of Pods that were bound and whose binding the watch may not have shown yet.
        self._bound: dict[ObjectKey, tuple[str, str]] = {}
        self._waiting = asyncio.Event()

    async def run(self) -> None:
        """Run the control plane until cancelled."""
        await pod.remove_leftovers(self._topology)
        await self._register_nodes()
        endpoints = EndpointController(self._client)
        async with asyncio.TaskGroup() as group:
            kubelet = Kubelet(self._client, self._topology, self._directory, group)
            known = [
                self._follow(group, Reflector(self._client, NODES), self._update_nodes),
                self._follow(
                    group,
                    Reflector(self._client, PODS),
                    self._update_pods,
                    endpoints.update_pods,
                    kubelet.update,
                ),
                self._follow(group, Reflector(self._client, SERVICES), endpoints.update_services),
                self._follow(group, Reflector(self._client, ENDPOINTS), endpoints.update_endpoints),
                self._follow(
                    group,
                    Reflector(self._client, SLICES, label_selector=f"{MANAGED_BY_LABEL}={MANAGER}"),
                    endpoints.update_slices,
                ),
            ]
            for event in known:
                await event.wait()
            group.create_task(endpoints.run(), name="endpoints")
            group.create_task(self._schedule(), name="scheduler")
            group.create_task(self._watch_nodes(), name="node lifecycle")
            self._directory.cluster_ready.write_bytes(
                msgspec.json.encode({"nodes": len(self._nodes)})
            )
            log.info("cluster is up", nodes=len(self._nodes))

    def _follow(
        self,
        group: asyncio.TaskGroup,
        reflector: Reflector[Any],
        *consumers: Callable[[Mapping[ObjectKey, Any]], None],
    ) -> asyncio.Event:
        """Pass each change of a collection to `consumers`. Return an event that is set once the
        first list has been delivered."""
        complete = asyncio.Event()

        async def follow() -> None:
            async for changes in reflector.changes():
                for consume in consumers:
                    consume(changes)
                complete.set()

        group.create_task(follow(), name="follow")
        return complete

    def _update_nodes(self, changes: Mapping[ObjectKey, Node | None]) -> None:
        _merge(self._nodes, changes)
        self._waiting.set()

    def _update_pods(self, changes: Mapping[ObjectKey, Pod | None]) -> None:
        _merge(self._pods, changes)
        self._waiting.set()

    async def _register_nodes(self) -> None:
        for host in self._topology.of("node"):
            try:
                await self._client.create(NODES, status.node_object(host, self._topology.lab))
            except Conflict:  # registered before this process was restarted
                log.debug("node is registered already", node=host.name)
            await self._report_node(host, ready=True)

    async def _report_node(self, host: Host, *, ready: bool) -> None:
        body = {"status": status.node_status(host, ready=ready, now=_now())}
        await self._client.patch(NODES, ("", host.name), body, subresource="status")

    async def _schedule(self) -> None:
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            try:
                await self._bind_all()
            except FairleadError as problem:
                log.warning("scheduler", problem=str(problem))
                await asyncio.sleep(RETRY_S)
                self._waiting.set()

    async def _bind_all(self) -> None:
        alive = frozenset(
            host.name for host in self._topology.of("node") if not self._directory.is_off(host.name)
        )
        for key, (uid, _) in list(self._bound.items()):
            found = self._pods.get(key)
            if found is None or found.metadata.uid != uid or found.spec.node_name:
                del self._bound[key]
        for key, waiting in list(self._pods.items()):
            if (
                waiting.spec.node_name
                or waiting.metadata.deletion_timestamp
                or waiting.finished
                or key in self._bound
            ):
                continue
            node = status.choose_node(waiting, self._nodes.values(), self._load(), alive)
            if node is not None:
                await self._bind(key, waiting, node)
                self._bound[key] = (waiting.metadata.uid, node)

    def _load(self) -> list[str]:
        """Return the node of each Pod that is assigned to one, one entry per Pod."""
        present = [
            known.spec.node_name
            for known in self._pods.values()
            if known.spec.node_name and not known.finished
        ]
        return present + [node for _, node in self._bound.values()]

    async def _bind(self, key: ObjectKey, waiting: Pod, node: str) -> None:
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": waiting.metadata.uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        try:
            await self._client.request("POST", f"{PODS.path(*key)}/binding", body=binding)
        except (NotFound, Conflict):  # deleted meanwhile, or bound by another client
            log.debug("pod cannot be bound", pod=str(key), node=node)

    async def _watch_nodes(self) -> None:
        """Run the node lifecycle controller: a node without a heartbeat for NODE_GRACE_S becomes
        Unknown and its Pods become unready."""
        loop = asyncio.get_running_loop()
        seen_s = {host.name: loop.time() for host in self._topology.of("node")}
        lost: set[str] = set()
        while True:
            for host in self._topology.of("node"):
                try:
                    if not self._directory.is_off(host.name):
                        seen_s[host.name] = loop.time()
                        if host.name in lost:
                            await self._report_node(host, ready=True)
                            lost.discard(host.name)
                            self._waiting.set()
                    elif host.name not in lost and loop.time() - seen_s[host.name] > NODE_GRACE_S:
                        await self._report_node(host, ready=False)
                        await self._mark_pods_unready(host)
                        lost.add(host.name)
                except NotFound:
                    # A client deleted the Node. It is registered again at the next start, as by a
                    # kubelet.
                    lost.discard(host.name)
                except FairleadError as problem:
                    log.warning("node lifecycle", node=host.name, problem=str(problem))
            await asyncio.sleep(POLL_S)

    async def _mark_pods_unready(self, host: Host) -> None:
        for key, known in list(self._pods.items()):
            if known.spec.node_name == host.name and not known.finished:
                body = {"status": {"conditions": status.unreachable(known, _now())}}
                await self._client.patch(PODS, key, body, subresource="status")


def _merge(objects: dict[ObjectKey, Any], changes: Mapping[ObjectKey, Any]) -> None:
    for key, changed in changes.items():
        if changed is None:
            objects.pop(key, None)
        else:
            objects[key] = changed


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    asyncio.run(run_until_sigterm(sys.argv[1], "cluster", Cluster))
