"""A whole lab: bring it up, act on it as operators, cables and power supplies do, take it down.

In: a name and a size. Out: a site out of network namespaces on this machine, with an API server, a
control plane and Fairlead's roles as separate processes. Invariants: `up` succeeds or leaves
nothing; `down` leaves nothing, whatever was killed before; nothing is added to the machine's own
namespace. A `Site` keeps no state that is not on the machine as well, so any program may open a lab
that is up.
"""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from fairlead.errors import Refused, Unavailable, plain
from fairlead.invocation import called
from fairlead.kube.client import Client
from fairlead.kube.kubeconfig import read_kubeconfig
from fairlead.kube.objects import ENDPOINT_SLICES
from fairlead.lab import (
    crds,
    manifests,
    namespace,
    process,
    requirements,
    rights,
    server,
    settings,
    wiring,
)
from fairlead.lab.objects import PODS
from fairlead.lab.pod import pod_label
from fairlead.lab.process import Process
from fairlead.lab.rundir import ApiServerKind, RunDirectory, Size, Transport
from fairlead.lab.topology import ROUTER, Announcement, Host, Kind, Topology, prefix
from fairlead.net.address import socket_family

ROLES: dict[Kind, str] = {"control": "controller", "gateway": "gateway", "node": "node"}
"""The role that runs on each kind of host. Where the nodes are the gateways, a gateway runs on each
node, too."""
CLUSTER_LABEL = "lab/cluster"
STOP_TIMEOUT_S = 10
REPORT_TIMEOUT_S = 10
"""Time limit for the kubelet's first report after the boot of a node. The lab's control plane may
be stopped."""
POLL_S = 0.02
DEFAULT_TRANSPORT = Transport()
ROLE_PORTS: dict[str, int] = {"control": 9440, "gateway": 9441, "node": 9442}
"""The default port of each role's HTTP endpoints, by the kind of host it runs on."""
KINDS: dict[str, Kind] = {role: kind for kind, role in ROLES.items()}

Progress = Callable[[str], None]


class Site:
    """A lab, made by `create` (before it is up) or `open` (when it is up)."""

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
        far_nodes: int = 0,
        gateways_on_nodes: bool = False,
        roles: bool = True,
        apiserver: ApiServerKind = "embedded",
        transport: Transport = DEFAULT_TRANSPORT,
        announce: Announcement = "none",
    ) -> Self:
        """Return a lab that is not up yet. Raise Refused for an invalid name or size."""
        size = Size(
            nodes=nodes,
            gateways=gateways,
            clients=clients,
            far_nodes=far_nodes,
            gateways_on_nodes=gateways_on_nodes,
            roles=roles,
            apiserver=apiserver,
            transport=transport,
            announce=announce,
        )
        return cls(size.topology(name), size)

    @classmethod
    def open(cls, name: str) -> Self:
        """Return a lab that is up. Raise Refused when no lab has this name."""
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
        """Bring the lab up; it accepts `apply` when this returns. On failure or cancellation
        nothing is left. Raise Refused if this machine cannot run a lab, or has a lab of this name.
        """
        requirements.check_root()
        if namespace.names(prefix(self.name)) or process.find(self.name):
            fix = f"take it down, `{called(f'lab down --name {self.name}')}`"
            raise Refused(f"lab {self.name} exists already, at least in part", fix=fix)
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
        """Take the lab down, also when it is only partly up or partly dead."""
        await tear_down(self.name)

    def client(self) -> Client:
        """Return a client of the lab's API server, to be used as an asynchronous context manager.
        Raise Unavailable while there is no server."""
        return Client(self.directory.access())

    @property
    def url(self) -> str:
        """The API server's URL on this machine. Raise Unavailable while there is no server."""
        return self.directory.server_url()

    async def apply(self, objects: Iterable[manifests.Manifest]) -> tuple[str, ...]:
        """Apply manifests and return their names."""
        async with self.client() as client:
            return await manifests.apply(client, objects)

    async def await_pods(self, *, timeout_s: float = 120) -> None:
        """Wait until every Pod is ready that is neither being deleted nor finished. Raise
        Unavailable after `timeout_s` seconds."""
        waiting: list[str] = []
        async with self.client() as client:
            try:
                async with asyncio.timeout(timeout_s):
                    while waiting := [
                        pod.metadata.name
                        for pod in await client.list(PODS)
                        if not (pod.ready or pod.metadata.deletion_timestamp or pod.finished)
                    ]:
                        await asyncio.sleep(POLL_S)
            except TimeoutError as error:
                raise Unavailable(
                    f"pods {', '.join(waiting)} were not ready within {timeout_s} s"
                ) from error

    def namespace(self, host: str) -> str:
        """Return the network namespace of a host, or of a pod given as NAMESPACE/NAME. Raise
        Refused when it does not exist."""
        if "/" in host:
            name = self.topology.pod_namespace(*host.split("/", 1))
        else:
            name = self.topology.namespace(
                host if host == ROUTER else self.topology.host(host).name
            )
        if not namespace.path(name).exists():
            raise Refused(f"{host} is not running in lab {self.name}")
        return name

    async def exec(
        self, host: str, argv: Sequence[str], *, timeout_s: float = 30
    ) -> tuple[int, str, str]:
        """Run a command on a host or in a pod (NAMESPACE/NAME). Return its exit code, standard
        output and standard error."""
        return await process.run(self.namespace(host), argv, lab=self.name, timeout_s=timeout_s)

    def spawn(
        self, host: str, argv: Sequence[str], *, label: str = "", log: Path | None = None
    ) -> Process:
        """Start a command on a host. It runs until it exits, is stopped, or the lab goes down."""
        label = label or f"{host}/{Path(argv[0]).name}"
        return process.spawn(
            self.name,
            label,
            argv,
            log=log or self.directory.log(label),
            inside=self.namespace(host),
        )

    def socket(
        self, host: str, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM
    ) -> socket.socket:
        """Return a socket of this process on a host or in a pod."""
        return namespace.make_socket(self.namespace(host), family, kind)

    async def connect(
        self, host: str, address: str, port: int, *, timeout_s: float = 5
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a TCP connection from a host or pod. Raise Unavailable when the connection is
        refused or not answered within `timeout_s` seconds."""
        sock = self.socket(host, socket_family(address))
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
                return await asyncio.open_connection(sock=sock)
        except OSError as error:  # TimeoutError too
            sock.close()
            raise Unavailable(
                f"tried to connect from {host} to {address} port {port}: {plain(error)}"
            ) from error
        except asyncio.CancelledError:
            sock.close()
            raise

    def roles(self, host: str) -> tuple[str, ...]:
        """Return the roles that should run on a host. Raise Refused for a host without roles."""
        found = self.topology.host(host)
        if found.kind not in ROLES:
            raise Refused(
                f"no role of Fairlead runs on {host}", fix="choose control, a gateway or a node"
            )
        both = found.kind == "node" and self.size.gateways_on_nodes
        return ("node", "gateway") if both else (ROLES[found.kind],)

    async def start_role(self, host: str, role: str = "") -> Process:
        """Start a Fairlead role on a host and return when it is ready. Without `role` this is the
        host's role, and the role `node` on a host that has two. Raise Refused if it runs already,
        Unavailable if it fails."""
        role = role or self.roles(host)[0]
        started = self._spawn_role(host, role)
        await self._await_role(host, role, started)
        return started

    async def stop_role(self, host: str, role: str = "") -> None:
        """Stop the host's role gracefully (SIGTERM). Raise Conflict if it is not running."""
        await self._role(host, role).stop(STOP_TIMEOUT_S)

    async def kill_role(self, host: str, role: str = "") -> None:
        """Kill the host's role (SIGKILL); its state in the kernel stays. Raise Conflict if it is
        not running."""
        await self._role(host, role).kill()

    async def kill_node(self, host: str) -> None:
        """Make a machine fail: cut its network, so that its processes cannot announce their end,
        then kill them. Its Node object stays.

        On the control host, the API server is cut off and the role is killed. The server's process
        keeps the objects, as a disk would, and is reachable again when the host is revived.
        """
        found = self.topology.host(host)
        # Before anything else, so that the kubelet does not restart what is killed below.
        self.directory.switch(host, on=False)
        await wiring.unplug(self.topology, found)
        if found.kind == "control":
            await process.kill_all(process.find(self.name, f"{host}/"))
            return
        pods = process.find(self.name, pod_label(host, "", "").removesuffix("."))
        await process.kill_all((*process.in_namespaces([self.topology.namespace(host)]), *pods))

    async def revive_node(self, host: str) -> None:
        """Boot a dead machine, with an empty kernel, the same addresses, and new processes of its
        roles and pods. On a machine that is up, start the roles that are not running, and change
        nothing else. Raise Refused if there is nothing to do."""
        found = self.topology.host(host)
        if self.directory.is_off(host):
            await self._boot(found)
        elif not (self._dead_roles(found)):
            roles = ", and its roles run" if self.size.roles and found.kind in ROLES else ""
            fix = f"to reboot it, kill it first: `{called(f'lab kill --name {self.name} {host}')}`"
            raise Refused(f"{host} of lab {self.name} is up{roles}", fix=fix)
        for role in self._dead_roles(found):
            await self.start_role(host, role)

    async def _boot(self, host: Host) -> None:
        if host.kind == "control":
            await wiring.plug_in(self.topology, host)
        else:
            await wiring.tear_down_host(self.topology, host)
            self.directory.remove_pins(host.name)
            await wiring.build_host(self.topology, host)
        lost = await self._ready_addresses(host)
        self.directory.switch(host.name, on=True)
        # The kubelet has to report the Pods of the node as unready before the node's role starts,
        # as on a real machine, where the kubelet starts both. Otherwise the role's first rules
        # would lead connections to addresses that no longer exist.
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                while lost & await self._ready_addresses(host):
                    await asyncio.sleep(POLL_S)

    async def _ready_addresses(self, host: Host) -> set[str]:
        """Return the addresses of Pods on a node that EndpointSlices show as ready; none while the
        API server does not answer. Pods with the node's own addresses keep them."""
        if host.kind != "node":
            return set()
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT_S), self.client() as client:
                return {
                    address
                    for slice_ in await client.list(ENDPOINT_SLICES)
                    for endpoint in slice_.endpoints or ()
                    if endpoint.ready and endpoint.node_name == host.name
                    for address in endpoint.addresses
                }.difference(host.addresses)
        return set()

    def _dead_roles(self, host: Host) -> list[str]:
        """Return the roles that should run on a host and are not running."""
        if not self.size.roles or host.kind not in ROLES:
            return []
        running = {each.label for each in process.find(self.name, f"{host.name}/") if each.leads}
        return [role for role in self.roles(host.name) if f"{host.name}/{role}" not in running]

    async def route_vips(self, gateways: Sequence[str]) -> None:
        """Let the router send VIPs to these gateways only, as BGP sessions of these gateways
        would."""
        await wiring.route_vips(self.topology, [self.topology.host(name) for name in gateways])

    async def start_cluster(self) -> None:
        """Start the control plane and kubelets, and wait until they are ready. Pods that exist are
        started again."""
        self.directory.cluster_ready.unlink(missing_ok=True)
        argv = process.python("fairlead.lab.cluster", self.name)
        started = process.spawn(
            self.name,
            CLUSTER_LABEL,
            argv,
            log=self.directory.log(CLUSTER_LABEL),
            nice=process.SUPPORT_NICE,
        )
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
                await self._grant_rights(client)
            else:
                await rights.install(client, ["Namespace"])
            configuration = settings.configuration(
                str(self.directory.pins("gateway")), self.size, self.topology
            )
            if self.size.roles:
                # The ConfigMap that the chart creates and that `kubectl fairlead plan` reads.
                await manifests.apply(client, [settings.config_map(configuration)])
        self.directory.config.write_text(configuration)

    async def _grant_rights(self, client: Client) -> None:
        """Write a kubeconfig for each role, with the role's own account."""
        await rights.install(client, announce=self.size.announce)
        common = read_kubeconfig([self.directory.kubeconfig_inside])
        for role in ROLES.values():
            access = msgspec.structs.replace(common, token=await rights.token(client, role))
            self.directory.write_kubeconfig(
                self.directory.kubeconfig_of(role), settings.kubeconfig(self.name, access)
            )

    async def _cluster_answers(self) -> bool:
        return self.directory.cluster_ready.exists()

    def _spawn_role(self, host: str, role: str) -> Process:
        label = f"{host}/{role}"
        if any(
            running.label == label and running.leads for running in process.find(self.name, label)
        ):
            raise Refused(f"{label} is already running in lab {self.name}", fix="stop it first")
        program = Path(sys.executable).with_name("fairlead")
        kubeconfig = self.directory.kubeconfig_of(role)
        argv = [
            str(program),
            role,
            "--config",
            str(self.directory.config),
            "--kubeconfig",
            str(kubeconfig),
        ]
        if role != "controller":
            argv += ["--node-name", host]
        if role == "gateway":
            argv += [
                "--pin-path",
                str(self.directory.pins(host)),
                "--proxy-path",
                str(self.directory.proxy(host)),
            ]
        return self.spawn(host, argv, label=label)

    async def _start_roles(self, progress: Progress) -> None:
        started = []
        for host in self.topology.hosts:
            for role in self.roles(host.name) if host.kind in ROLES else ():
                progress(f"fairlead {role} on {host.name}")
                started.append((host.name, role, self._spawn_role(host.name, role)))
        progress("waiting for the roles to be ready")
        for host_name, role, running in started:
            await self._await_role(host_name, role, running)

    async def _await_role(self, host: str, role: str, started: Process) -> None:
        async def is_ready() -> bool:
            try:
                reader, writer = await self.connect(
                    host, "127.0.0.1", ROLE_PORTS[KINDS[role]], timeout_s=1
                )
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

        await self._await(started, is_ready)

    async def _await(self, started: Process, is_ready: Callable[[], Awaitable[bool]]) -> None:
        await process.await_ready(started, is_ready, log=self.directory.log(started.label))

    def _role(self, host: str, role: str) -> Process:
        return process.one(self.name, f"{host}/{role or self.roles(host)[0]}")


async def tear_down(lab: str) -> None:
    """Remove everything that a lab of this name may have left: processes, namespaces with their
    contents, pins, files."""
    directory = RunDirectory(lab)
    start = prefix(lab)
    # Two rounds: the first one may kill a process while it creates something, which exists by the
    # second one.
    for _ in range(2):
        names = namespace.names(start)
        await process.kill_all((*process.find(lab), *process.in_namespaces(names)))
        for name in names:
            namespace.delete(name)
    directory.remove()
