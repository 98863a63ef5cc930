"""A gateway with a thousand Services of class fairlead.io/proxy: the cost of one more Service, of a
member, and of source ranges.

In: the number of Services. Out: a `Many` for each round. The gateway is the process that ships,
with its probes and its HAProxy. `stream.Replay` stands in for the API server: it lists objects that
this module generates, and sends events. Every Service has its own address, node port and health
port, and nodes answer on all of them. A delay lasts from sending the event to its effect: a client
that gets an answer, or HAProxy's own report.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import msgspec
from bench.fixture import Body, Size, endpoint_slice, node, place_of, service
from bench.rig import GATEWAY_ADDRESS, Rig, rig, started
from bench.stream import RESOURCES, Recording

from fairlead.drivers.proxy import runtime
from fairlead.drivers.proxy.process import Haproxy
from fairlead.errors import Unavailable
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICES, Resource
from fairlead.lab import namespace
from fairlead.plan.classes import PROXY

FIRST_ADDRESS = IPv4Address("198.18.0.0")
FIRST_NODE_PORT, FIRST_HEALTH_PORT = 10_000, 20_000
RANGES = 1000
FOREIGN = ("192.0.2.0/24",)
LOST_AFTER_S = 20.0
POLL_S = 0.002
SETTLE_S = 1.5
"""Longer than the minimum time between two reloads."""


class Many(msgspec.Struct, frozen=True):
    """The results of one round. Memory is resident memory in MiB; HAProxy's is that of its master
    and its only worker."""

    ready_s: float
    """From the start of the gateway's process until everything was as planned."""
    add_s: tuple[float, ...]
    """A new Service: from its event until it answers a client."""
    remove_s: tuple[float, ...]
    member_s: tuple[float, ...]
    """An endpoint that turns unready: until HAProxy sends no new connections to its node."""
    first_ranges_s: tuple[float, ...]
    """A thousand source ranges on a Service that had none: until a client outside of them gets no
    answer."""
    ranges_s: tuple[float, ...]
    """The same number in place of others: until a client that had no answer gets one."""
    gateway_mib: float
    haproxy_mib: float
    haproxy_alone_mib: float
    """HAProxy with a single Service."""


class Objects:
    """The objects and events of the replayed API server."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def recording(self) -> Recording:
        numbers = range(self.size.services)
        listed: dict[str, list[msgspec.Raw]] = {resource.path(): [] for resource in RESOURCES}
        listed[SERVICES.path()] = [_raw(self.service(number)) for number in numbers]
        listed[ENDPOINT_SLICES.path()] = [_raw(self.slice(number)) for number in numbers]
        listed[NODES.path()] = [_raw(node(number)) for number in range(self.size.nodes)]
        return Recording(listed, [])

    def ports(self) -> set[int]:
        """Return all ports that nodes must answer on, including those of the Service that is added
        later."""
        numbers = range(self.size.services + 1)
        return {
            first + number for first in (FIRST_NODE_PORT, FIRST_HEALTH_PORT) for number in numbers
        }

    def service(self, number: int, ranges: Sequence[str] = ()) -> Body:
        body = service(number)
        body["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": "1"}
        body["spec"] |= {
            "loadBalancerClass": PROXY.name,
            "allocateLoadBalancerNodePorts": True,
            "healthCheckNodePort": FIRST_HEALTH_PORT + number,
            "loadBalancerSourceRanges": list(ranges),
        }
        body["spec"]["ports"][0]["nodePort"] = FIRST_NODE_PORT + number
        body["status"] = {
            "loadBalancer": {"ingress": [{"ip": self.address(number), "ipMode": "Proxy"}]}
        }
        return body

    def slice(self, number: int, *, ready: bool = True) -> Body:
        """Return the slice of a Service. `ready` applies to its first endpoint."""
        body = endpoint_slice(number, self.size, f"uid-{number}")
        body["metadata"] |= {"uid": f"uid-slice-{number}", "resourceVersion": "1"}
        body["endpoints"][0]["conditions"] |= {"ready": ready, "serving": ready}
        return body

    @staticmethod
    def address(number: int) -> str:
        return str(FIRST_ADDRESS + number)


class Bench:
    """A gateway that runs and is ready."""

    def __init__(self, built: Rig, objects: Objects) -> None:
        self._built = built
        self._objects = objects
        self.haproxy = Haproxy(built.haproxy)

    async def add_and_remove(self) -> tuple[float, float]:
        """Add a Service and remove it. Return the seconds of each."""
        number = self._objects.size.services
        await asyncio.sleep(SETTLE_S)
        begun_s = time.monotonic()
        await self._send(ENDPOINT_SLICES, "ADDED", self._objects.slice(number))
        await self._send(SERVICES, "ADDED", self._objects.service(number))
        added_s = await _since(begun_s, lambda: self.answers(number))
        await asyncio.sleep(SETTLE_S)
        begun_s = time.monotonic()
        await self._send(SERVICES, "DELETED", self._objects.service(number))
        await self._send(ENDPOINT_SLICES, "DELETED", self._objects.slice(number))
        return added_s, await _since(begun_s, lambda: self._closed(number))

    async def member(self, number: int) -> float:
        """Make an endpoint unready, and ready again. Return the seconds until the first change is
        in force."""
        first = self._objects.slice(number)["endpoints"][0]["nodeName"]
        await asyncio.sleep(SETTLE_S)
        begun_s = time.monotonic()
        await self._send(ENDPOINT_SLICES, "MODIFIED", self._objects.slice(number, ready=False))
        lasted_s = await _since(begun_s, lambda: self._serves(number, first, False))
        await self._send(ENDPOINT_SLICES, "MODIFIED", self._objects.slice(number))
        await _since(time.monotonic(), lambda: self._serves(number, first, True))
        return lasted_s

    async def ranges(self, number: int) -> tuple[float, float]:
        """Set a thousand ranges that exclude this client, then others that include it. Return the
        seconds of each."""
        own = str(GATEWAY_ADDRESS.network)
        others = [f"10.{at >> 8}.{at & 255}.0/24" for at in range(RANGES - 1)]
        await asyncio.sleep(SETTLE_S)
        first_s = await self._restrict(number, [*others, *FOREIGN], lambda: self._closed(number))
        moved = [f"172.{16 + (at >> 8)}.{at & 255}.0/24" for at in range(RANGES - 1)]
        second_s = await self._restrict(number, [*moved, own], lambda: self.answers(number))
        await asyncio.sleep(SETTLE_S)
        await self._restrict(number, [], lambda: self.answers(number))
        return first_s, second_s

    async def _restrict(
        self, number: int, ranges: Sequence[str], condition: Callable[[], Awaitable[bool]]
    ) -> float:
        begun_s = time.monotonic()
        await self._send(SERVICES, "MODIFIED", self._objects.service(number, ranges))
        return await _since(begun_s, condition)

    async def answers(self, number: int) -> bool:
        """Return whether a client gets a node's answer."""
        sock = namespace.make_socket(self._built.name)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(0.5):
                sock.bind((str(GATEWAY_ADDRESS.ip), 0))
                await loop.sock_connect(sock, (self._objects.address(number), 80))
                await loop.sock_sendall(sock, b"GET / HTTP/1.0\r\n\r\n")
                return b" 200 " in await loop.sock_recv(sock, 64)
        except OSError:
            return False
        finally:
            sock.close()

    async def _closed(self, number: int) -> bool:
        return not await self.answers(number)

    async def _serves(self, number: int, node_name: str, wanted: bool) -> bool:
        """Return whether HAProxy's report on this node, that it gets new connections or not, is as
        wanted."""
        namespace_name, name = place_of(number)
        section = f"{namespace_name}.{name}.80.{self._objects.address(number)}"
        weights = {
            each.node: each.weight
            for each in await runtime.servers(self.haproxy.worker, section)
            if not each.out
        }
        return bool(weights.get(node_name)) == wanted

    async def _send(self, resource: Resource[Any], kind: str, body: Body) -> None:
        await self._built.replay.write(
            msgspec.json.encode({"type": kind, "object": body}).decode(), resource
        )

    async def haproxy_mib(self) -> float:
        """Return the memory of HAProxy's processes, once old workers have exited."""
        found: Sequence[runtime.Worker] = ()
        async with asyncio.timeout(LOST_AFTER_S):
            while len(found) != 1:
                await asyncio.sleep(0.1)
                # While it reloads, the master refuses connections.
                with suppress(Unavailable):
                    found = (await runtime.workers(self.haproxy.master))[0]
        master = self.haproxy.master_pid()
        return sum(_resident_mib(pid) for pid in (master, *(each.pid for each in found)) if pid)


async def measure(size: Size, repeats: int) -> Many:
    """Build the rig, measure everything `repeats` times, and remove it."""
    async with _ready(Objects(Size(1, size.endpoints, size.nodes))) as (alone, _, _):
        haproxy_alone_mib = await alone.haproxy_mib()
    async with _ready(objects := Objects(size)) as (bench, ready_s, pid):
        members, added, restricted = [], [], []
        for at in range(repeats):
            members.append(await bench.member(at % size.services))
            added.append(await bench.add_and_remove())
            restricted.append(await bench.ranges((at + 1) % objects.size.services))
        return Many(
            ready_s,
            tuple(seconds for seconds, _ in added),
            tuple(seconds for _, seconds in added),
            tuple(members),
            tuple(seconds for seconds, _ in restricted),
            tuple(seconds for _, seconds in restricted),
            started(pid, 0, 0).resident_mib,
            await bench.haproxy_mib(),
            haproxy_alone_mib,
        )


@asynccontextmanager
async def _ready(objects: Objects) -> AsyncIterator[tuple[Bench, float, int]]:
    """Run a gateway. Yield it when its last Service answers, with the seconds that took and its
    PID."""
    async with (
        rig(objects.recording(), objects.ports()) as built,
        built.running() as (running, begun_s),
    ):
        bench = Bench(built, objects)
        await built.ready_s(running, begun_s)
        yield (
            bench,
            await _since(begun_s, lambda: bench.answers(objects.size.services - 1)),
            running.pid,
        )


async def _since(begun_s: float, condition: Callable[[], Awaitable[bool]]) -> float:
    """Return the seconds from `begun_s` until the condition holds."""
    while not await condition():
        if time.monotonic() - begun_s > LOST_AFTER_S:
            raise Unavailable(f"an event had no effect within {LOST_AFTER_S} s")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - begun_s


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def _raw(body: Body) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(body))
