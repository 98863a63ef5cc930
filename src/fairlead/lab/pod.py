"""A pod of the lab, from creation to removal: the container runtime's part of a kubelet.

In: the node and network of the pod. Out: a namespace with an echo server in it, and its removal.
Invariant: after `remove` nothing of the pod is left on the machine, whatever its state was before.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fairlead.errors import Unavailable
from fairlead.lab import namespace, process, wiring
from fairlead.lab.objects import Pod
from fairlead.lab.process import Process
from fairlead.lab.rundir import RunDirectory
from fairlead.lab.topology import Host, PodNetwork, Topology

ECHO = Path(__file__).with_name("echo.py")
START_TIMEOUT_S = 60


class Placement(msgspec.Struct, frozen=True):
    """Where a pod runs: its node and its own network. `network` is None in the node's network.
    `index` is the pod's number on the node."""

    host: Host
    network: PodNetwork | None
    index: int = -1

    @property
    def addresses(self) -> tuple[str, str]:
        return self.network.addresses if self.network else self.host.addresses


class Sandbox:
    """A pod on the machine. Its methods may be repeated in any order."""

    def __init__(
        self, topology: Topology, directory: RunDirectory, pod: Pod, placement: Placement
    ) -> None:
        self.placement = placement
        self.server: Process | None = None
        self._topology = topology
        self._directory = directory
        self._pod = pod
        key = (pod.metadata.namespace, pod.metadata.name)
        self._node_namespace = topology.namespace(placement.host.name)
        self.namespace = topology.pod_namespace(*key) if placement.network else self._node_namespace
        self.label = pod_label(placement.host.name, *key)

    async def start(self) -> None:
        """Create the pod's network unless it uses the node's, and start its server. Every port is
        open when this returns. Raise Unavailable if the server does not start."""
        if self.placement.network:
            await wiring.build_pod(
                self.namespace, self._node_namespace, self.placement.host, self.placement.network
            )
        reader, writer = os.pipe()
        try:
            self.server = process.spawn(
                self._topology.lab,
                self.label,
                self._command(writer),
                log=self._directory.log(
                    f"pod/{self._pod.metadata.namespace}.{self._pod.metadata.name}"
                ),
                inside=self.namespace,
                pass_fds=(writer,),
                nice=process.POD_NICE,
            )
            os.close(writer)
            writer = -1
            if not await _read_byte(reader):
                raise Unavailable(
                    f"the server of pod {self._pod.metadata.name} exited at startup",
                    fix="see its log",
                )
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)

    def terminate(self) -> None:
        """Send SIGTERM to the server: it exits when its clients are served."""
        if self.server is not None:
            self.server.send(signal.SIGTERM)

    async def remove(self) -> None:
        """Kill the server and remove the network."""
        if self.server is not None:
            await self.server.kill()
        if self.placement.network:
            await process.kill_all(process.in_namespaces([self.namespace]))
            await wiring.tear_down_pod(self.namespace, self._node_namespace, self.placement.network)

    def _command(self, ready_fd: int) -> Sequence[str]:
        metadata = self._pod.metadata
        command = [
            sys.executable,
            "-I",
            "-S",
            str(ECHO),
            "--pod",
            metadata.name,
            "--node",
            self.placement.host.name,
        ]
        command += ["--ready-fd", str(ready_fd)]
        for address in self.placement.addresses:
            command += ["--address", address]
        for container in self._pod.spec.containers:
            for port in container.ports:
                if port.protocol in ("TCP", "UDP"):
                    command += [f"--{port.protocol.lower()}", str(port.container_port)]
        return command


def pod_label(node: str, namespace_name: str, name: str) -> str:
    """Return the label of a pod's process. It begins with the node, so that all pods of a node can
    be found when the node is killed."""
    return f"pod/{node}/{namespace_name}.{name}"


async def remove_leftovers(topology: Topology) -> None:
    """Remove every pod that a previous process left behind."""
    names = namespace.names(topology.namespace("pod-"))
    await process.kill_all((*process.find(topology.lab, "pod/"), *process.in_namespaces(names)))
    for name in names:
        namespace.delete(name)


async def _read_byte(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await readable.wait()
    except TimeoutError as error:
        raise Unavailable(f"a pod's server was not ready within {START_TIMEOUT_S} s") from error
    finally:
        loop.remove_reader(descriptor)
    return os.read(descriptor, 1)
