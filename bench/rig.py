"""A gateway as shipped, in front of a recorded cluster: the process, its API server, and the nodes
that it probes.

In: a `Recording`. Out: a network namespace with `fairlead gateway` in it, next to one that has all
nodes' addresses and answers on all health ports; the API server is a `Replay`. The gateway's
effects are read from its pinned maps. Invariant: when the rig is closed, no process, namespace, pin
or file of it is left.
"""

import asyncio
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import msgspec
import yaml
from bench.stream import Recording, Replay

from fairlead.drivers.direct.maps.records import pack_listener_key
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.errors import Refused, Unavailable
from fairlead.kube.objects import SERVICES, Service
from fairlead.lab import namespace, process
from fairlead.lab.process import Process
from fairlead.lab.settings import kubeconfig
from fairlead.net import bpffs
from fairlead.net.bpf import Map

GATEWAY_ADDRESS, NODES_ADDRESS = ip_interface("198.19.255.1/16"), ip_interface("198.19.255.2/16")
NODES_NETWORK = "198.19.0.0/17"
READY_WITHIN_S = 60.0
POLL_S = 0.005
STOP_WITHIN_S = 10.0
STATE_WITHIN_S = 30.0
LINES_SHOWN = 20
NOT_UP = re.compile(r'"target": "http://([0-9.]+):([0-9]+)/[^"]*", "verdict": "(?!up")')
"""A line of the prober's log with a verdict other than `up`."""


class Started(msgspec.Struct, frozen=True):
    """The cost of a start, from the start of the process, including the import of modules. CPU time
    and sizes (in MiB) are those of the process and its prober; `kernel_mib` is the memory of its
    maps and programs."""

    listeners_s: float
    """Until the record of every listener was in the kernel."""
    ready_s: float
    """Until /readyz reported ready: everything is as planned and the program is attached."""
    cpu_s: float
    resident_mib: float
    peak_mib: float
    kernel_mib: float


class Rig:
    """A gateway and its surroundings, created by `rig`. `replay` sends events to the gateway."""

    def __init__(
        self, name: str, folder: Path, recorded: Recording, replay: Replay, ports: Collection[int]
    ) -> None:
        self.name = name
        self.replay = replay
        self.haproxy = folder / "haproxy"
        """The folder of the gateway's HAProxy, if it has one."""
        self._ports = ports
        self._folder = folder
        self._pins = bpffs.ROOT / name
        services = [
            msgspec.json.decode(each, type=Service) for each in recorded.listed[SERVICES.path()]
        ]
        self.balanced = [each for each in services if each.status.load_balancer.ingress]

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[tuple[Process, Map, Started]]:
        """Run a gateway that is ready when the block begins. It is stopped as by an operator, so
        the kernel keeps forwarding."""
        async with self.running() as (running, begun_s):
            listeners = await self._pinned("listeners", running, begun_s)
            while listeners.count() < len(self.balanced):
                await self._poll(running, begun_s)
            listeners_s = time.monotonic() - begun_s
            yield (
                running,
                listeners,
                started(running.pid, listeners_s, await self.ready_s(running, begun_s)),
            )
            listeners.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[Process, float]]:
        """Run a gateway's process. Yield it and its start time (CLOCK_MONOTONIC)."""
        begun_s = time.monotonic()
        running = self._spawn()
        try:
            yield running, begun_s
        finally:
            await running.stop(STOP_WITHIN_S)

    async def ready_s(self, running: Process, begun_s: float) -> float:
        """Wait until the gateway reports ready. Return the seconds since `begun_s`."""
        while not await self._reports_ready():
            await self._poll(running, begun_s)
        return time.monotonic() - begun_s

    def reset(self) -> None:
        """Remove the gateway's state from the kernel, so that the next start is like that of a
        freshly booted host."""
        subprocess.run(
            ["ip", "-n", self.name, "link", "delete", "eth0"], check=True, capture_output=True
        )
        bpffs.remove(self._pins)
        connect(self.name, self.nodes)

    @property
    def nodes(self) -> str:
        return f"{self.name}-nodes"

    def serve_health(self) -> Path:
        """Answer on every health port of every Service, and on the other requested ports. Return
        the file that is created once all of them are served."""
        ports, serving = self._folder / "ports.json", self._folder / "serving"
        ports.write_text(
            json.dumps(
                sorted(
                    {each.spec.health_check_node_port for each in self.balanced} | {*self._ports}
                )
            )
        )
        argv = process.python("bench.health", str(ports), str(serving))
        process.spawn(self.name, "health", argv, log=self._folder / "health.log", inside=self.nodes)
        return serving

    def listener_key(self, service: Service) -> bytes:
        """Return the key of a Service's listener."""
        return pack_listener_key(ListenerKey(service.status.load_balancer.ingress[0].ip, 80, "TCP"))

    def _spawn(self) -> Process:
        settings, access = self._folder / "fairlead.yaml", self._folder / "kubeconfig"
        section = {
            "interfaces": ["eth0"],
            "pinPath": str(self._pins),
            "proxyPath": str(self.haproxy),
        }
        settings.write_text(yaml.safe_dump({"gateway": section}))
        access.write_text(kubeconfig("bench", self.replay.access))
        argv = process.python(
            "fairlead", "gateway", "--config", str(settings), "--kubeconfig", str(access)
        )
        running = process.spawn(
            self.name, "gateway", argv, log=self._folder / "gateway.log", inside=self.name
        )
        # This process has a lower priority, because it plays other machines. The gateway does not.
        process.set_nice(running.pid, 0)
        return running

    async def _pinned(self, name: str, running: Process, begun_s: float) -> Map:
        """Open a map of the running gateway, as soon as all maps are pinned."""
        while not (found := list(self._pins.glob("layout-*/settings"))):
            await self._poll(running, begun_s)
        return Map.open(found[0].with_name(name))

    async def _poll(self, running: Process, begun_s: float) -> None:
        if not running.running or time.monotonic() - begun_s > READY_WITHIN_S:
            log = "\n".join((self._folder / "gateway.log").read_text().splitlines()[-LINES_SHOWN:])
            raise Unavailable(
                f"the gateway exited at startup, or was not ready within {READY_WITHIN_S} s; end "
                f"of its log:\n{log}"
            )
        await asyncio.sleep(POLL_S)

    async def state(self) -> dict[str, Any]:
        """Return the gateway's state, see `/state` of `fairlead.web`."""
        _, _, body = (await self._get("/state", STATE_WITHIN_S)).partition(b"\r\n\r\n")
        found: dict[str, Any] = json.loads(body)
        return found

    def not_up(self) -> set[tuple[str, int]]:
        """Return addresses and ports of the health ports that have had a verdict other than `up`,
        by the gateway's log."""
        found = NOT_UP.findall((self._folder / "gateway.log").read_text())
        return {(address, int(port)) for address, port in found}

    async def _reports_ready(self) -> bool:
        try:
            return b" 200 " in (await self._get("/readyz", 2.0))[:64]
        except (OSError, TimeoutError):
            return False

    async def _get(self, path: str, within_s: float) -> bytes:
        """Return a complete response of the gateway's own HTTP server."""
        sock = namespace.make_socket(self.name)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                await loop.sock_connect(sock, ("127.0.0.1", 9441))
                await loop.sock_sendall(sock, f"GET {path} HTTP/1.0\r\n\r\n".encode())
                answer = b""
                while chunk := await loop.sock_recv(sock, 1 << 20):
                    answer += chunk
                return answer
        finally:
            sock.close()


@asynccontextmanager
async def rig(recorded: Recording, ports: Collection[int] = ()) -> AsyncIterator[Rig]:
    """Build a rig. `ports` are node ports that are answered in addition to health ports. Raise
    Refused without root."""
    if os.geteuid() != 0:
        raise Refused(
            "this benchmark creates network namespaces and loads eBPF programs",
            fix="run it as root",
        )
    name = f"flt-bench-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
        made = (name, f"{name}-nodes")
        try:
            for each in made:
                namespace.create(each)
            connect(*made)
            async with Replay(recorded).listen(name) as replay:
                built = Rig(name, Path(folder), recorded, replay, ports)
                serving = built.serve_health()
                async with asyncio.timeout(READY_WITHIN_S):
                    while not serving.exists():
                        await asyncio.sleep(POLL_S)
                yield built
        finally:
            await process.kill_all((*process.find(name), *process.in_namespaces([name])))
            for each in made:
                namespace.delete(each)
            bpffs.remove(bpffs.ROOT / name)


def connect(gateway: str, nodes: str) -> None:
    """Connect both namespaces. The addresses of all nodes are in the namespace `nodes`."""
    commands = (
        f"-n {gateway} link set lo up",
        f"-n {nodes} link set lo up",
        f"-n {gateway} link add eth0 type veth peer name eth0 netns {nodes}",
        f"-n {gateway} address add {GATEWAY_ADDRESS} dev eth0",
        f"-n {nodes} address add {NODES_ADDRESS} dev eth0",
        f"-n {gateway} link set eth0 up",
        f"-n {nodes} link set eth0 up",
        f"-n {nodes} route replace local {NODES_NETWORK} dev lo",
    )
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def started(pid: int, listeners_s: float, ready_s: float) -> Started:
    """Return the cost of a start, with the resources that the process has used so far."""
    sizes = {"VmRSS": 0.0, "VmHWM": 0.0}
    for each in with_children(pid):
        for line in Path(f"/proc/{each}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in sizes:
                sizes[name] += int(value.split()[0]) / 1024
    return Started(
        listeners_s, ready_s, cpu_s(pid), sizes["VmRSS"], sizes["VmHWM"], kernel_mib(pid)
    )


def with_children(pid: int) -> list[int]:
    """Return the PIDs of the process and of its running children, such as its prober."""
    return [
        pid,
        *(
            int(each)
            for found in Path(f"/proc/{pid}/task").glob("*/children")
            for each in found.read_text().split()
        ),
    ]


def cpu_s(pid: int) -> float:
    """Return user and system time so far of the process and its running children."""
    ticks = 0
    for each in with_children(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def kernel_mib(pid: int) -> float:
    """Return the memory of the maps and programs that the process has open, as the kernel accounts
    it (`memlock` in proc(5), fdinfo)."""
    held: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        text = ""
        with suppress(FileNotFoundError):  # the descriptor was closed meanwhile
            text = entry.read_text()
        fields = dict(line.partition(":")[::2] for line in text.splitlines())
        if "memlock" in fields:
            held["map" + fields.get("map_id", "") + fields.get("prog_id", "")] = int(
                fields["memlock"]
            )
    return sum(held.values()) / (1 << 20)
