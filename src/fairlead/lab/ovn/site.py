"""A site whose load balancer is OVN in front of the pods.

    client ── router ── external network ─┬─ chassis 1 ── pods
                                          ├─ chassis 2 ── pods
                                          └─ chassis 3 ── pods

In: a name, the number of pods of each hypervisor, a topology. Out: with topology `router`, a
distributed router `dr` with its gateway port on the last hypervisor, and a switch `pods` with all
pods; with topology `gateways`, a gateway router on each hypervisor (layout.py). A client is one
router hop away, so that its address is not one of OVN's. Every pod runs the echo server. There is
no second gateway chassis, because on a busy machine the gateway port would move between the two.
All of this exists in network namespaces with one prefix, and ends with `down`."""

import asyncio
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from fairlead.lab import echo, namespace, process
from fairlead.lab.ovn import layout
from fairlead.lab.ovn.central import Central
from fairlead.lab.ovn.chassis import MTU, Chassis, without_offload
from fairlead.lab.ovn.layout import (
    POD_NETWORKS,
    ROUTER_ADDRESS,
    ROUTER_ADDRESS_V6,
    UPSTREAM,
    UPSTREAM_V6,
    OvnPod,
    Topology,
)
from fairlead.net.link import Nexthop, Rtnetlink

CLIENT_ADDRESS, CLIENT_ADDRESS_V6 = "198.51.100.10", "2001:db8:5::10"
VIPS = ("203.0.113.0/24", "2001:db8:1::/64")
"""Addresses that the client's router sends to the distributed router."""
POD_PORT = 8080
START_TIMEOUT_S = 120.0


class OvnSite:
    """The site. Call `up` and `down` once each; `down` also after a failure of `up`."""

    def __init__(
        self,
        lab: str,
        prefix: str,
        directory: Path,
        counts: Sequence[int],
        topology: Topology = "router",
    ) -> None:
        """`lab`: marks the processes. `prefix`: that of the namespaces. `directory`: has a short
        path, because the path of a Unix socket has at most 107 characters."""
        self.lab, self.prefix, self.directory = lab, prefix, directory
        self.topology = topology
        self.pods = layout.pods_of(counts, topology)
        self.gateways = layout.gateway_routers(len(counts)) if topology == "gateways" else ()
        self.central = Central(lab, directory / "central", self.namespace("fabric"))
        self.chassis = [
            Chassis(
                self.central, f"ch{number}", self.namespace(f"ch{number}"), f"10.250.0.{number}"
            )
            for number in range(1, len(counts) + 1)
        ]
        self._processes: dict[str, process.Process] = {}

    def namespace(self, name: str) -> str:
        """Return the name of a namespace of the site: `client`, `router`, a pod, a hypervisor."""
        return f"{self.prefix}-{name}"

    async def up(self) -> None:
        """Create everything, and return when every pod can be reached."""
        for name in ("fabric", "router", "client"):
            self._create(name)
        await self._make_outside()
        await self.central.start()
        for chassis in self.chassis:
            self._create(chassis.name)
        for number, chassis in enumerate(self.chassis, 1):
            await self._connect(chassis.name, number)
        async with asyncio.TaskGroup() as group:
            for chassis in self.chassis:
                group.create_task(chassis.start("tunnel", "external"))
        await self.central.control("nb", *self._network())
        for pod in self.pods:
            await self._make_pod(pod)
        await self.central.synchronize()
        await self._warm_up()

    async def down(self) -> None:
        """Remove everything."""
        await process.kill_all(process.find(self.lab))
        for name in namespace.names(f"{self.prefix}-"):
            namespace.delete(name)
        shutil.rmtree(self.directory, ignore_errors=True)

    def stop_pod(self, name: str) -> None:
        """End the server of a pod: its connections end, and it refuses new ones."""
        self._processes.pop(name).send(signal.SIGKILL)

    def _create(self, name: str) -> None:
        namespace.create(self.namespace(name))

    def _links(self, name: str) -> Rtnetlink:
        with namespace.inside(self.namespace(name)):
            return Rtnetlink()

    async def _make_outside(self) -> None:
        """Connect client, router and external network, and create the network of tunnels."""
        forwarding = {"net/ipv4/ip_forward": 1, "net/ipv6/conf/all/forwarding": 1}
        # The next hop of a connection depends on its ports too.
        forwarding |= {f"net/{each}/fib_multipath_hash_policy": 1 for each in ("ipv4", "ipv6")}
        namespace.set_sysctls(self.namespace("router"), forwarding)
        async with self._links("fabric") as links:
            for bridge in ("tunnels", "external"):
                await links.add_bridge(bridge)
                await links.set_state(bridge, up=True)
        await self._wire("router", "inside", "client", "eth0", 1)
        await self._wire("router", "outside", "fabric", "router", 2)
        async with self._links("fabric") as links:
            await links.set_bridge("router", "external")
        async with self._links("router") as links:
            for device, address in (
                ("inside", "198.51.100.1/24"),
                ("inside", "2001:db8:5::1/64"),
                ("outside", f"{UPSTREAM}/25"),
                ("outside", f"{UPSTREAM_V6}/64"),
            ):
                await links.set_address(device, address)
            for destination, via in self._routes():
                await links.set_route(destination, Nexthop(via))
        async with self._links("client") as links:
            await links.set_address("eth0", f"{CLIENT_ADDRESS}/24")
            await links.set_address("eth0", f"{CLIENT_ADDRESS_V6}/64")
            await links.set_route("0.0.0.0/0", Nexthop("198.51.100.1"))
            await links.set_route("::/0", Nexthop("2001:db8:5::1"))

    def _routes(self) -> Iterator[tuple[str, str]]:
        """Yield the routes of the client's router into OVN."""
        if self.topology == "router":
            for each in (*VIPS, *POD_NETWORKS):
                yield each, ROUTER_ADDRESS_V6 if ":" in each else ROUTER_ADDRESS
        for gateway in self.gateways:
            networks = layout.pod_networks(gateway.number)
            yield from zip(networks, (gateway.address, gateway.address_v6), strict=True)

    async def route(self, prefix: str, weights: Mapping[str, int]) -> None:
        """Route a prefix from the client's router to the gateway routers of these hypervisors, with
        these weights."""
        hops = [
            Nexthop(
                each.address_v6 if ":" in prefix else each.address, weight=weights[each.chassis]
            )
            for each in self.gateways
            if each.chassis in weights
        ]
        async with self._links("router") as links:
            await links.set_route(prefix, *hops)

    async def _connect(self, chassis: str, number: int) -> None:
        """Create the uplinks of a hypervisor."""
        for index, kind in enumerate(("tunnel", "external")):
            end = f"{kind}{number}"
            await self._wire(chassis, kind, "fabric", end, 16 * (index + 1) + number)
            async with self._links("fabric") as links:
                await links.set_bridge(end, f"{kind}s" if kind == "tunnel" else kind)

    async def _wire(self, first: str, device: str, second: str, other: str, number: int) -> None:
        """Create a cable between two namespaces."""
        macs = (f"02:00:00:00:01:{number:02x}", f"02:00:00:00:02:{number:02x}")
        mtu = MTU if device == "inside" else 1500
        async with self._links(first) as links:
            there = namespace.path(self.namespace(second))
            await links.add_veth(device, macs[0], other, macs[1], there, mtu)
            await links.set_state(device, up=True)
        async with self._links(second) as links:
            await links.set_state(other, up=True)
        for name, each in ((first, device), (second, other)):
            await without_offload(self.central, self.namespace(name), each)

    def _network(self) -> list[str]:
        """Return the command that creates the logical network."""
        if self.topology == "router":
            commands = layout.one_router(self.pods, self.chassis[-1].name)
        else:
            commands = layout.router_per_chassis(self.pods, self.gateways)
        return list(chain.from_iterable(("--", *each) for each in commands))[1:]

    async def _make_pod(self, pod: OvnPod) -> None:
        self._create(pod.name)
        inside = self.namespace(pod.name)
        (chassis,) = (each for each in self.chassis if each.name == pod.chassis)
        outer_mac = pod.mac.replace("02:00:0a", "02:00:0b")
        await chassis.plug(inside, outer_mac, pod.mac, pod.name)
        async with self._links(pod.name) as links:
            await links.set_state("eth0", up=True)
            addresses = zip((pod.address, pod.address_v6), pod.lengths, strict=True)
            for address, length in addresses:
                await links.set_address("eth0", f"{address}/{length}")
            for destination, via in zip(("0.0.0.0/0", "::/0"), pod.gateways, strict=True):
                await links.set_route(destination, Nexthop(via))
        self.start_pod(pod)

    def start_pod(self, pod: OvnPod) -> None:
        """Start the server of a pod."""
        ports = ["--tcp", str(POD_PORT), "--udp", str(POD_PORT)]
        ports += ["--address", pod.address, "--address", pod.address_v6]
        argv = (sys.executable, "-I", "-S", echo.__file__, "--pod", pod.name, "--node", pod.chassis)
        self._processes[pod.name] = process.spawn(
            self.lab,
            f"pod/{pod.name}",
            (*argv, *ports),
            log=self.directory / f"{pod.name}.log",
            inside=self.namespace(pod.name),
            nice=process.POD_NICE,
        )

    async def _warm_up(self) -> None:
        """Send packets on every path, because Open vSwitch drops the first packets to a tunnel
        endpoint or neighbor while it resolves the MAC address."""
        first = self.pods[0]
        targets = [(first.name, pod.address) for pod in self.pods[1:]]
        targets += [(pod.name, first.address) for pod in self.pods[1:]]
        targets += [(pod.name, each) for pod in self.pods for each in (UPSTREAM, UPSTREAM_V6)]
        async with asyncio.timeout(START_TIMEOUT_S):
            for name, address in targets:
                while not await self.answers(name, address):
                    pass

    async def answers(self, name: str, address: str) -> bool:
        """Return whether the address answers a TCP connection from this namespace, by accepting or
        by refusing it."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        loop = asyncio.get_running_loop()
        with namespace.make_socket(self.namespace(name), family) as connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(1):
                    await loop.sock_connect(connection, (address, POD_PORT))
            except ConnectionRefusedError:
                return True
            except OSError:  # also TimeoutError
                return False
        return True
