"""A whole lab: bring it up, act on it as people, cables and power supplies would, take it down.

In: a name and a size. Out: a running site out of network namespaces on this machine, with an API server, a control plane
and Fairlead's roles as separate processes.
Invariants: `up` either succeeds or leaves nothing; `down` leaves nothing, whatever was killed before; nothing is added to the
machine's own namespace. A `Site` remembers nothing that is not also on the machine: any program may open a lab that is up.
"""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from fairlead.errors import Refused, Unavailable
from fairlead.kube.client import Client
from fairlead.kube.kubeconfig import read_kubeconfig
from fairlead.lab import crds, manifests, namespace, process, requirements, rights, server, settings, wiring
from fairlead.lab.objects import PODS
from fairlead.lab.pod import pod_label
from fairlead.lab.process import Process
from fairlead.lab.rundir import ApiServerKind, RunDirectory, Size
from fairlead.lab.topology import ROUTER, Host, Topology, plan_topology, prefix

ROLES = {"control": "controller", "gateway": "gateway", "node": "node"}
"""The command that runs on each kind of host."""
CLUSTER_LABEL = "lab/cluster"
STOP_TIMEOUT_S = 10
LOOK_S = 0.02
ROLE_PORTS = {"control": 9440, "gateway": 9441, "node": 9442}
"""Where each role shows itself unless it is told otherwise."""

Progress = Callable[[str], None]


class Site:
    """One lab. Made by `create` (not there yet) or `open` (there already)."""

    def __init__(self, topology: Topology, size: Size) -> None:
        self.topology = topology
        self.size = size
        self.directory = RunDirectory(topology.lab)

    @classmethod
    def create(
        cls,
        name: str,
        *,
        nodes: int = 4,
        gateways: int = 1,
        clients: int = 1,
        roles: bool = True,
        apiserver: ApiServerKind = "embedded",
    ) -> Self:
        """A lab to be brought up. Raises Refused for a name or a size that cannot be."""
        return cls(plan_topology(name, nodes, gateways, clients), Size(nodes, gateways, clients, roles, apiserver))

    @classmethod
    def open(cls, name: str) -> Self:
        """A lab that is up. Raises Refused when there is none of this name."""
        directory = RunDirectory(name)
        return cls(directory.topology(), directory.size())

    @property
    def name(self) -> str:
        return self.topology.lab

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.down()

    async def up(self, progress: Progress = lambda _: None) -> None:
        """Bring everything up; it is ready for `apply` when this returns. If that fails or is cancelled, nothing is left.
        Raises Refused if this machine cannot have a lab, or has one of this name."""
        if namespace.names(prefix(self.name)) or process.find(self.name):
            fix = f"take it down, `fairlead lab down --name {self.name}`"
            raise Refused(f"lab {self.name} is there already, or what is left of it", fix=fix)
        await requirements.check()
        self.directory.make(self.size)
        try:
            await self._build(progress)
            progress("API server")
            await self._start_server()
            progress(f"control plane and {len(self.topology.of('node'))} kubelets")
            await self.start_cluster()
            if self.size.roles:
                await self._start_roles(progress)
        except BaseException:
            await self.down()
            raise

    async def down(self) -> None:
        """Take everything down. Also of a lab that is half up or half dead."""
        await demolish(self.name)

    def client(self) -> Client:
        """A client of the lab's API server; use it as an asynchronous context manager. Raises Unavailable without server."""
        return Client(self.directory.access())

    @property
    def url(self) -> str:
        """The API server's URL on this machine. Raises Unavailable while there is none."""
        return self.directory.server_url()

    async def apply(self, objects: Iterable[manifests.Manifest]) -> tuple[str, ...]:
        """Apply manifests; answers their names."""
        async with self.client() as client:
            return await manifests.apply(client, objects)

    async def await_pods(self, *, timeout_s: float = 30) -> None:
        """Return when every Pod that is not being deleted is ready."""
        waiting: list[str] = []
        async with self.client() as client:
            try:
                async with asyncio.timeout(timeout_s):
                    while waiting := [
                        pod.metadata.name
                        for pod in await client.list(PODS)
                        if not (pod.ready or pod.metadata.deletion_timestamp or pod.finished)
                    ]:
                        await asyncio.sleep(LOOK_S)
            except TimeoutError as error:
                raise Unavailable(f"pods {', '.join(waiting)} were not ready within {timeout_s} s") from error

    def namespace(self, host: str) -> str:
        """The network namespace of a host, or of a pod given as NAMESPACE/NAME. Raises Refused when there is none."""
        if "/" in host:
            name = self.topology.pod_namespace(*host.split("/", 1))
        else:
            name = self.topology.namespace(host if host == ROUTER else self.topology.host(host).name)
        if not namespace.path(name).exists():
            raise Refused(f"{host} does not run in lab {self.name}")
        return name

    async def exec(self, host: str, argv: Sequence[str], *, timeout_s: float = 30) -> tuple[int, str, str]:
        """Run a command on a host or in a pod (NAMESPACE/NAME): (exit code, standard output, standard error)."""
        return await process.run(self.namespace(host), argv, lab=self.name, timeout_s=timeout_s)

    def spawn(self, host: str, argv: Sequence[str], *, label: str = "", log: Path | None = None) -> Process:
        """Start a command on a host; it runs on until it ends, is stopped, or the lab goes down."""
        label = label or f"{host}/{Path(argv[0]).name}"
        return process.spawn(self.name, label, argv, log=log or self.directory.log(label), inside=self.namespace(host))

    def socket(self, host: str, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A socket of this process on a host or in a pod."""
        return namespace.make_socket(self.namespace(host), family, kind)

    async def connect(
        self, host: str, address: str, port: int, *, timeout_s: float = 5
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A TCP connection from a host or pod. Raises Unavailable when nobody answers, or refuses."""
        sock = self.socket(host, socket.AF_INET6 if ":" in address else socket.AF_INET)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
                return await asyncio.open_connection(sock=sock)
        except OSError as error:  # TimeoutError too
            sock.close()
            raise Unavailable(f"tried to connect from {host} to {address} port {port}: {error or 'no answer'}") from error
        except asyncio.CancelledError:
            sock.close()
            raise

    async def start_role(self, host: str) -> Process:
        """Start the host's Fairlead role; it is ready when this returns. Raises Refused if it runs, Unavailable if it fails."""
        found = self._role_host(host)
        role = self._spawn_role(found)
        await self._await_role(found, role)
        return role

    async def stop_role(self, host: str) -> None:
        """End the host's role in good order (SIGTERM). Raises Conflict if it does not run."""
        await process.one(self.name, self._role_label(self._role_host(host))).stop(STOP_TIMEOUT_S)

    async def kill_role(self, host: str) -> None:
        """End the host's role with no warning (SIGKILL); what is in the kernel stays. Raises Conflict if it does not run."""
        await process.one(self.name, self._role_label(self._role_host(host))).kill()

    async def kill_node(self, host: str) -> None:
        """A machine dies: its cable first, so that it cannot even say so, then all that ran on it. Its Node object stays."""
        found = self.topology.host(host)
        # First of all, so that its kubelet starts nothing again.
        self.directory.switch(host, on=False)
        await wiring.unplug(self.topology, found)
        pods = process.find(self.name, pod_label(host, "", "").removesuffix("."))
        await process.kill_all((*process.in_namespaces([self.topology.namespace(host)]), *pods))

    async def revive_node(self, host: str) -> None:
        """A dead machine boots: with an empty kernel, the same addresses, its role, and its pods anew."""
        found = self.topology.host(host)
        await wiring.demolish_host(self.topology, found)
        self.directory.remove_pins(host)
        await wiring.build_host(self.topology, found)
        self.directory.switch(host, on=True)
        if self.size.roles and found.kind in ROLES:
            await self.start_role(host)

    async def route_vips(self, gateways: Sequence[str]) -> None:
        """Let the router send VIPs to these gateways only: what its BGP sessions would make it do."""
        await wiring.route_vips(self.topology, [self.topology.host(name) for name in gateways])

    async def start_cluster(self) -> None:
        """Start the control plane and kubelets, and wait until they are ready. Pods of a predecessor start anew."""
        self.directory.cluster_ready.unlink(missing_ok=True)
        argv = process.python("fairlead.lab.cluster", self.name)
        started = process.spawn(self.name, CLUSTER_LABEL, argv, log=self.directory.log(CLUSTER_LABEL))
        await self._await(started, self._cluster_answers)

    async def _build(self, progress: Progress) -> None:
        progress("router")
        await wiring.build_router(self.topology)
        for host in self.topology.hosts:
            progress(host.name)
            await wiring.build_host(self.topology, host)

    async def _start_server(self) -> None:
        start = server.start_real if self.size.apiserver == "real" else server.start_embedded
        await start(self.topology, self.directory)
        async with self.client() as client:
            await crds.install(client)
            if self.size.apiserver == "real":
                await self._give_rights(client)
            else:
                await rights.install(client, ["Namespace"])
        self.directory.config.write_text(settings.configuration(str(self.directory.pins("gateway"))))

    async def _give_rights(self, client: Client) -> None:
        """A kubeconfig for each role, with its own account."""
        await rights.install(client)
        everybody = read_kubeconfig([self.directory.kubeconfig_inside])
        for role in ROLES.values():
            access = msgspec.structs.replace(everybody, token=await rights.token(client, role))
            self.directory.write_kubeconfig(self.directory.kubeconfig_of(role), settings.kubeconfig(self.name, access))

    async def _cluster_answers(self) -> bool:
        return self.directory.cluster_ready.exists()

    def _spawn_role(self, host: Host) -> Process:
        label = self._role_label(host)
        if any(running.label == label for running in process.find(self.name, label)):
            raise Refused(f"{label} runs already in lab {self.name}", fix="stop it first")
        program = Path(sys.executable).with_name("fairlead")
        argv = [str(program), ROLES[host.kind]]
        kubeconfig = self.directory.kubeconfig_of(ROLES[host.kind])
        argv += ["--config", str(self.directory.config), "--kubeconfig", str(kubeconfig)]
        if host.kind != "control":
            argv += ["--node-name", host.name]
        if host.kind == "gateway":
            argv += ["--pin-path", str(self.directory.pins(host.name))]
        return self.spawn(host.name, argv, label=label)

    async def _start_roles(self, progress: Progress) -> None:
        started = []
        for host in self.topology.hosts:
            if host.kind in ROLES:
                progress(f"fairlead {ROLES[host.kind]} on {host.name}")
                started.append((host, self._spawn_role(host)))
        progress("waiting for the roles to be ready")
        for host, role in started:
            await self._await_role(host, role)

    async def _await_role(self, host: Host, role: Process) -> None:
        async def is_ready() -> bool:
            try:
                reader, writer = await self.connect(host.name, "127.0.0.1", ROLE_PORTS[host.kind], timeout_s=1)
            except Unavailable:
                return False
            try:
                async with asyncio.timeout(2):
                    writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
                    return b" 200 " in await reader.readline()
            except OSError:
                return False
            finally:
                writer.close()

        await self._await(role, is_ready)

    async def _await(self, started: Process, is_ready: Callable[[], Awaitable[bool]]) -> None:
        await process.await_ready(started, is_ready, log=self.directory.log(started.label))

    def _role_host(self, host: str) -> Host:
        found = self.topology.host(host)
        if found.kind not in ROLES:
            raise Refused(f"no role of Fairlead runs on {host}", fix="choose control, a gateway or a node")
        return found

    def _role_label(self, host: Host) -> str:
        return f"{host.name}/{ROLES[host.kind]}"


async def demolish(lab: str) -> None:
    """Take away all that a lab of this name may have left: processes, namespaces with all in them, pins, files."""
    directory = RunDirectory(lab)
    start = prefix(lab)
    # Twice: what was about to be made when its maker was killed, is there by the second time.
    for _ in range(2):
        names = namespace.names(start)
        await process.kill_all((*process.find(lab), *process.in_namespaces(names)))
        for name in names:
            namespace.delete(name)
    directory.remove()
