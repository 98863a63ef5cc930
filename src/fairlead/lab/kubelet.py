"""The kubelets of all nodes of a lab: run the Pods that are bound to the nodes, and report their
status.

In: Pods from the API. Out: sandboxes on the machine, Pod status, and the deletion of Pods that have
ended. Each Pod (by UID) has one task, which owns its sandbox from start to removal and reads the
latest version of the Pod whenever it is woken.

Invariants: two Pods with one name never have sandboxes at the same time. A deleted Pod serves until
its connections are done or its grace period is over. Nothing is done on a node that is switched
off; when it is on again, its Pods are started again. Follows the pod lifecycle of Kubernetes
(termination of Pods, container restarts with back-off).
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime

import structlog

from fairlead.errors import Conflict, FairleadError, Refused
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import ObjectKey
from fairlead.lab import status
from fairlead.lab.objects import PODS, Pod
from fairlead.lab.pod import Placement, Sandbox
from fairlead.lab.process import Process
from fairlead.lab.rundir import RunDirectory
from fairlead.lab.topology import PODS_PER_NODE, Topology, pod_network

log = structlog.get_logger()

RETRY_S = 1.0
MAX_RETRY_S = 10.0
POLL_S = 0.2
"""Interval at which a Pod's task checks whether its node is on again."""


class Kubelet:
    """Runs the Pods that are bound to the lab's nodes. `update` takes every change of a Pod; the
    Pods' tasks live in `group`."""

    def __init__(
        self, client: Client, topology: Topology, directory: RunDirectory, group: asyncio.TaskGroup
    ) -> None:
        self.client = client
        self.topology = topology
        self.directory = directory
        self.group = group
        self.starting = asyncio.Semaphore(4)
        self.names: defaultdict[ObjectKey, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._hosts = {host.name: host for host in topology.of("node")}
        self._runs: dict[ObjectKey, PodRun] = {}
        self._indexes: defaultdict[str, set[int]] = defaultdict(set)
        self._last: defaultdict[str, int] = defaultdict(lambda: -1)

    def update(self, changes: Mapping[ObjectKey, Pod | None]) -> None:
        """Record the current state of Pods (None: deleted)."""
        for key, pod in changes.items():
            run = self._runs.get(key)
            if run is not None and (pod is None or pod.metadata.uid != run.uid):
                run.update(None)
                del self._runs[key]
                run = None
            if pod is None or pod.spec.node_name not in self._hosts or pod.finished:
                continue
            if run is None:
                run = self._runs[key] = PodRun(self, key, pod)
                self.group.create_task(run.run(), name=f"pod {key}")
            run.update(pod)

    def reserve(self, pod: Pod) -> Placement:
        """Reserve an address for a Pod on its node. Addresses are assigned round robin, so that a
        freed address is not reused at once. Raise Refused when the node is full."""
        host = self._hosts[pod.spec.node_name]
        if pod.spec.host_network:
            return Placement(host, None)
        taken = self._indexes[host.name]
        for step in range(1, PODS_PER_NODE + 1):
            index = (self._last[host.name] + step) % PODS_PER_NODE
            if index not in taken:
                taken.add(index)
                self._last[host.name] = index
                return Placement(host, pod_network(host, index), index)
        raise Refused(
            f"node {host.name} is full: it runs {len(taken)} pods",
            fix="use more nodes or fewer pods",
        )

    def release(self, placement: Placement) -> None:
        """Release the address of a Pod."""
        self._indexes[placement.host.name].discard(placement.index)

    def is_off(self, node: str) -> bool:
        """Return whether the node is switched off."""
        return self.directory.is_off(node)


class PodRun:
    """The task of one Pod on its node."""

    def __init__(self, kubelet: Kubelet, key: ObjectKey, pod: Pod) -> None:
        self.uid = pod.metadata.uid
        self._kubelet = kubelet
        self._key = key
        self._node = pod.spec.node_name
        self._pod: Pod | None = pod
        self._woken = asyncio.Event()
        self._sandbox: Sandbox | None = None
        self._restarts = 0
        self._started = ""
        self._reported: tuple[bool, int] | None = None
        self._rebooted = False
        """Whether the node has been switched off since the Pod was started."""

    def update(self, pod: Pod | None) -> None:
        """Give the task the current state of its Pod."""
        self._pod = pod
        self._woken.set()

    async def run(self) -> None:
        """Run until the Pod is gone. On cancellation the Pod's server continues, as containers do
        when a kubelet stops."""
        failures = 0
        async with self._kubelet.names[self._key]:
            while True:
                try:
                    await self._live()
                    await self._remove()
                    return
                except FairleadError as problem:
                    failures += 1
                    log.warning("pod", pod=str(self._key), problem=str(problem))
                    await asyncio.sleep(min(failures * RETRY_S, MAX_RETRY_S))

    async def _live(self) -> None:
        while (pod := self._pod) is not None:
            self._woken.clear()
            if self._kubelet.is_off(self._node):
                self._rebooted = True
                await self._remove()
                await asyncio.sleep(POLL_S)
            elif self._rebooted:
                self._rebooted = False
                await self._report_end(pod)
            elif pod.metadata.deletion_timestamp is not None:
                if await self._terminate(pod):
                    return
            elif self._sandbox is None:
                await self._start(pod)
                await self._report(pod)
            elif self._sandbox.server is not None and not self._sandbox.server.running:
                await self._handle_exit(pod)
            else:
                await self._report(pod)
                await self._woken.wait()

    async def _start(self, pod: Pod) -> None:
        kubelet = self._kubelet
        async with kubelet.starting:
            sandbox = Sandbox(kubelet.topology, kubelet.directory, pod, kubelet.reserve(pod))
            self._sandbox = sandbox
            try:
                await sandbox.start()
            except FairleadError:
                await self._remove()
                raise
        self._started = _now()
        self._reported = None
        if sandbox.server is not None:
            kubelet.group.create_task(self._wake_at_end(sandbox.server), name=f"end of {self._key}")

    async def _wake_at_end(self, server: Process) -> None:
        await server.wait()
        self._woken.set()

    async def _handle_exit(self, pod: Pod) -> None:
        """Handle a server that exited by itself: report the Pod as unready, and let it start again
        after a back-off."""
        log.warning("server ended", pod=str(self._key))
        self._restarts += 1
        await self._report(pod, broken=True)
        await self._remove()
        await asyncio.sleep(min(self._restarts * RETRY_S, MAX_RETRY_S))

    async def _report_end(self, pod: Pod) -> None:
        """Report that the server of the Pod ended with its node. Until then the Pod is ready, at an
        address that it does not get again."""
        body = {
            "metadata": {"uid": self.uid},
            "status": {"conditions": status.unreachable(pod, _now())},
        }
        with suppress(NotFound):  # the Pod is gone; the watch will report that
            await self._kubelet.client.patch(PODS, self._key, body, subresource="status")
        self._reported = None

    async def _report(self, pod: Pod, *, broken: bool = False) -> None:
        sandbox = self._sandbox
        ready = status.probe_succeeds(pod) and not broken
        if sandbox is None or self._reported == (ready, self._restarts):
            return
        report = status.running_status(
            pod,
            sandbox.placement.host,
            sandbox.placement.addresses,
            ready=ready,
            restarts=self._restarts,
            now=_now(),
            started=self._started,
        )
        body = {"metadata": {"uid": self.uid}, "status": report}
        try:
            await self._kubelet.client.patch(PODS, self._key, body, subresource="status")
        except NotFound:  # the Pod is gone; the watch will report that
            return
        self._reported = (ready, self._restarts)

    async def _terminate(self, pod: Pod) -> bool:
        """Terminate the Pod within its grace period. Return False if its node is switched off
        meanwhile: a node that is off cannot delete the Pod from the API."""
        sandbox = self._sandbox
        if sandbox is not None and sandbox.server is not None:
            sandbox.terminate()
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            while sandbox.server.running and self._pod is not None:
                await self._report(self._pod)
                self._woken.clear()
                # Computed in each round: a second deletion may shorten the grace period.
                left_s = began_s + status.grace_s(self._pod) - loop.time()
                try:
                    async with asyncio.timeout(max(0.0, left_s)):
                        await self._woken.wait()
                except TimeoutError:
                    break
            if self._kubelet.is_off(self._node):
                return False
        await self._remove()
        if self._pod is not None:
            await self._delete()
        return True

    async def _delete(self) -> None:
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self.uid},
        }
        try:
            await self._kubelet.client.request("DELETE", PODS.path(*self._key), body=options)
        except (NotFound, Conflict):  # already deleted; the name may belong to another Pod by now
            return

    async def _remove(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.remove()
            self._kubelet.release(self._sandbox.placement)
            self._sandbox = None


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
