"""A gateway with a thousand Services of class fairlead.io/proxy: what one more costs, and a member,
and source ranges.

In: how many Services. Out: a `Many` for each round. The gateway is the process that ships, with its
probes and its HAProxy; an API server is acted by `stream.Replay`, which lists objects that were
made here and tells events. Every Service has an address, a node port and a health port of its own,
and nodes that answer on all of them. A delay counts from the event's leaving this process to its
effect: a client that is answered, or HAProxy's own word."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
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
LOOK_S = 0.002
CALM_S = 1.5
"""Longer than a reload has to wait for the one before."""


class Many(msgspec.Struct, frozen=True):
    """Of one round. Memory in MiB, of what is resident; HAProxy's is that of its master and its one
    worker."""

    ready_s: float
    """From the start of the gateway's process until everything was as planned."""
    add_s: tuple[float, ...]
    """One more Service: from its event until it answers a client."""
    remove_s: tuple[float, ...]
    member_s: tuple[float, ...]
    """An endpoint that turns unready: until HAProxy sends nothing new to its node."""
    first_ranges_s: tuple[float, ...]
    """A thousand source ranges on a Service that had none: until a client that is in none of them
    gets no answer."""
    ranges_s: tuple[float, ...]
    """The same number in place of others: until a client that had no answer gets one."""
    gateway_mib: float
    haproxy_mib: float
    haproxy_alone_mib: float
    """HAProxy with one Service."""


class Told:
    """Objects as the API server would list and tell them."""

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
        """All that nodes are to answer on, those of the Service that is still to come too."""
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
        """`ready`: its first endpoint."""
        body = endpoint_slice(number, self.size, f"uid-{number}")
        body["metadata"] |= {"uid": f"uid-slice-{number}", "resourceVersion": "1"}
        body["endpoints"][0]["conditions"] |= {"ready": ready, "serving": ready}
        return body

    @staticmethod
    def address(number: int) -> str:
        return str(FIRST_ADDRESS + number)


class Bench:
    """One gateway that runs, and is ready."""

    def __init__(self, built: Rig, told: Told) -> None:
        self._built = built
        self._told = told
        self.haproxy = Haproxy(built.haproxy)

    async def add_and_remove(self) -> tuple[float, float]:
        """One more Service, and one fewer. Seconds of each."""
        number = self._told.size.services
        await asyncio.sleep(CALM_S)
        begun_s = time.monotonic()
        await self._tell(ENDPOINT_SLICES, "ADDED", self._told.slice(number))
        await self._tell(SERVICES, "ADDED", self._told.service(number))
        added_s = await _since(begun_s, lambda: self.answers(number))
        await asyncio.sleep(CALM_S)
        begun_s = time.monotonic()
        await self._tell(SERVICES, "DELETED", self._told.service(number))
        await self._tell(ENDPOINT_SLICES, "DELETED", self._told.slice(number))
        return added_s, await _since(begun_s, lambda: self._closed(number))

    async def member(self, number: int) -> float:
        """An endpoint turns unready, and then ready again. Seconds until the first is in force."""
        first = self._told.slice(number)["endpoints"][0]["nodeName"]
        await asyncio.sleep(CALM_S)
        begun_s = time.monotonic()
        await self._tell(ENDPOINT_SLICES, "MODIFIED", self._told.slice(number, ready=False))
        lasted_s = await _since(begun_s, lambda: self._serves(number, first, False))
        await self._tell(ENDPOINT_SLICES, "MODIFIED", self._told.slice(number))
        await _since(time.monotonic(), lambda: self._serves(number, first, True))
        return lasted_s

    async def ranges(self, number: int) -> tuple[float, float]:
        """A thousand where there were none, which do not let us in; then others, which do. Seconds
        of each."""
        own = str(GATEWAY_ADDRESS.network)
        others = [f"10.{at >> 8}.{at & 255}.0/24" for at in range(RANGES - 1)]
        await asyncio.sleep(CALM_S)
        first_s = await self._restrict(number, [*others, *FOREIGN], lambda: self._closed(number))
        moved = [f"172.{16 + (at >> 8)}.{at & 255}.0/24" for at in range(RANGES - 1)]
        second_s = await self._restrict(number, [*moved, own], lambda: self.answers(number))
        await asyncio.sleep(CALM_S)
        await self._restrict(number, [], lambda: self.answers(number))
        return first_s, second_s

    async def _restrict(
        self, number: int, ranges: Sequence[str], so: Callable[[], Awaitable[bool]]
    ) -> float:
        begun_s = time.monotonic()
        await self._tell(SERVICES, "MODIFIED", self._told.service(number, ranges))
        return await _since(begun_s, so)

    async def answers(self, number: int) -> bool:
        """Whether a client gets what a node says."""
        asking = namespace.make_socket(self._built.name)
        asking.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(0.5):
                asking.bind((str(GATEWAY_ADDRESS.ip), 0))
                await loop.sock_connect(asking, (self._told.address(number), 80))
                await loop.sock_sendall(asking, b"GET / HTTP/1.0\r\n\r\n")
                return b" 200 " in await loop.sock_recv(asking, 64)
        except OSError:
            return False
        finally:
            asking.close()

    async def _closed(self, number: int) -> bool:
        return not await self.answers(number)

    async def _serves(self, number: int, node_name: str, wanted: bool) -> bool:
        """Whether HAProxy says of this node that it gets new connections, or does not."""
        namespace_name, name = place_of(number)
        section = f"{namespace_name}.{name}.80.{self._told.address(number)}"
        weights = {
            each.node: each.weight
            for each in await runtime.servers(self.haproxy.worker, section)
            if not each.out
        }
        return bool(weights.get(node_name)) == wanted

    async def _tell(self, resource: Resource[Any], kind: str, body: Body) -> None:
        await self._built.replay.tell(
            msgspec.json.encode({"type": kind, "object": body}).decode(), resource
        )

    async def haproxy_mib(self) -> float:
        """Of its processes, once old workers have ended."""
        async with asyncio.timeout(LOST_AFTER_S):
            while len(found := (await runtime.workers(self.haproxy.master))[0]) != 1:
                await asyncio.sleep(0.1)
        master = self.haproxy.master_pid()
        return sum(_resident_mib(pid) for pid in (master, *(each.pid for each in found)) if pid)


async def measure(size: Size, repeats: int) -> Many:
    """Build it, measure each so many times, take it away."""
    async with _ready(Told(Size(1, size.endpoints, size.nodes))) as (alone, _, _):
        haproxy_alone_mib = await alone.haproxy_mib()
    async with _ready(told := Told(size)) as (bench, ready_s, pid):
        members, added, restricted = [], [], []
        for at in range(repeats):
            members.append(await bench.member(at % size.services))
            added.append(await bench.add_and_remove())
            restricted.append(await bench.ranges((at + 1) % told.size.services))
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
async def _ready(told: Told) -> AsyncIterator[tuple[Bench, float, int]]:
    """A gateway whose last Service answers, how long that took, and its process id."""
    async with rig(told.recording(), told.ports()) as built, built.running() as (running, begun_s):
        bench = Bench(built, told)
        await built.ready_s(running, begun_s)
        yield (
            bench,
            await _since(begun_s, lambda: bench.answers(told.size.services - 1)),
            running.pid,
        )


async def _since(begun_s: float, so: Callable[[], Awaitable[bool]]) -> float:
    """Seconds until it is so."""
    while not await so():
        if time.monotonic() - begun_s > LOST_AFTER_S:
            raise Unavailable(f"an event has had no effect in {LOST_AFTER_S} s")
        await asyncio.sleep(LOOK_S)
    return time.monotonic() - begun_s


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def _raw(body: Body) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(body))
