"""The labs of `bench.announce`: systems that announce addresses, each with its hosts and a router.

In: a name. Out: a `Subject`, whose hosts can be cut off, killed and ended, and whose addresses can
be called from a client. All labs have four nodes with kube-proxy, a router, a client behind it, and
five pods of one Service, placed 3/1/1/0; all Services have policy Local. The client keeps the hash
of a connection when it retransmits (net.core.txrehash), as hardware routers do for a connection;
otherwise Linux routers in namespaces would choose another next hop after each retransmission.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from bench.callers import CLIENT
from bench.metallb import ADDRESS_ANNOTATION, POOL_ANNOTATION, Metallb
from bench.paths import must
from bench.resilient import daemon_hops

from fairlead.errors import Unavailable
from fairlead.kube.crds import GROUP_VERSION
from fairlead.lab import kubeproxy, namespace, process
from fairlead.lab.routers import RouterKind, Routing
from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site
from fairlead.lab.topology import ROUTER
from fairlead.plan.classes import ANNOUNCE, DIRECT

NODES = 4
APP = "web"
PLACEMENT = ("node1", "node1", "node1", "node2", "node3")
L2_POOL, BGP_POOL = "192.0.2.200-192.0.2.229", "203.0.113.100-203.0.113.199"
L2_ADDRESSES = tuple(f"192.0.2.{200 + number}" for number in range(12))
BGP_ADDRESSES = ("203.0.113.100",)
METALLB_L2, METALLB_BGP = "metallb l2", "metallb bgp"
DIRECT_L2, DIRECT_BGP, DIRECT_FRR_BGP = "direct l2", "direct bgp", "direct, FRR router, bgp"
ANNOUNCE_L2, ANNOUNCE_BGP = "announce l2", "announce bgp"
OWN_ADDRESS, OWN_POOL = "fairlead.io/addresses", "fairlead.io/address-pool"
MANY_POOLS = {"bgp": "100.64.0.0/22", "l2": "100.68.0.0/22"}
PORTS: Sequence[Mapping[str, Any]] = (
    {"name": "http", "port": 80, "targetPort": "http"},
    {"name": "dns", "port": 53, "targetPort": "dns", "protocol": "UDP"},
)
CALL_PORTS = PORTS[:1]
READY_WITHIN_S = 60.0
ROUTING = Routing(daemon="bird", bfd_interval_ms=50)
"""BIRD notices a silent host after three intervals, if the host has BFD. MetalLB has not."""


class Subject:
    """A lab whose addresses are announced.

    In: the addresses of Services, by the way in which they are announced. Of each way of layer 2
    there are several, so that each host owns at least one. `hosts`: the hosts that events affect in
    turn."""

    watch_s = 5.5
    """How long to watch after an event: longer than the outage that it causes, and long enough to
    notice a silent connection."""

    def __init__(
        self, site: Site, addresses: Mapping[str, Sequence[str]], hosts: Sequence[str]
    ) -> None:
        self.site = site
        self.addresses = addresses
        self._hosts = hosts

    programs: Collection[str] = ()
    """The labels of the system's processes, without the host."""

    def another_service(self, way: str, number: int) -> tuple[str, dict[str, Any]]:
        """Return an address that no Service has, and a Service with this address."""
        raise NotImplementedError

    async def add_pool(self, way: str) -> str:
        """Create a pool for `service_of_pool`, and return a prefix that contains all its
        addresses."""
        raise NotImplementedError

    def service_of_pool(self, way: str, number: int) -> dict[str, Any]:
        """Return a Service with an address of this pool."""
        raise NotImplementedError

    async def kill(self, host: str) -> None:
        """Kill the process that announces (SIGKILL)."""
        raise NotImplementedError

    async def stop(self, host: str) -> None:
        """End the process that announces (SIGTERM)."""
        raise NotImplementedError

    async def start(self, host: str) -> None:
        """Start the process that announces."""
        raise NotImplementedError

    async def hand_over(self, host: str) -> None:
        """Take the host out of service as planned."""
        raise NotImplementedError

    async def silence(self, host: str) -> None:
        """Take the host's port out of its switch: the machine is silent, and its link stays up."""
        await self.site.remove_port(host)

    async def restore(self, host: str) -> None:
        """Undo `silence`."""
        await self.site.restore_port(host)

    async def repair(self) -> None:
        """Undo an event whose measurement has failed."""
        for host in self._hosts:
            await self.site.restore_port(host)
            if not await self.running(host):
                await self.start(host)

    async def running(self, host: str) -> bool:
        """Return whether the process that announces runs."""
        labels = {f"{host}/{program}" for program in self.programs}
        return any(each.label in labels for each in process.find(self.site.name, f"{host}/"))

    async def target(self, number: int) -> tuple[str, Mapping[str, str]]:
        """Return the host of the event with this number, and an address of each way that it
        announces."""
        owned = [await self._owned(way) for way in self.addresses if _of_l2(way)]
        for host in rotated(self._hosts, number):
            if all(host in each for each in owned):
                chosen = {way: found[0] for way, found in self.addresses.items()}
                ways = filter(_of_l2, self.addresses)
                return host, chosen | {
                    way: each[host] for way, each in zip(ways, owned, strict=True)
                }
        raise Unavailable(f"none of {', '.join(self._hosts)} owns an address; owners: {owned}")

    async def _owned(self, way: str) -> Mapping[str, str]:
        """Return an address of this way for each host that owns one."""
        owners = {}
        for address in self.addresses[way]:
            if owner := await self.owner(address, fresh=True):
                owners[owner] = address
        return owners

    async def owner(self, address: str, *, fresh: bool = False) -> str:
        """Return the host to which the router sends packets to an address of its own network, ""
        if it knows none. With `fresh` it asks the network."""
        if fresh:
            await self.site.exec(ROUTER, ["ip", "neigh", "del", address, "dev", "lan"])
            await answer(self.site, address)
        text = await must(self.site, ROUTER, f"ip -json neigh show {address}")
        macs = {host.mac: host.name for host in self.site.topology.hosts}
        found = [macs.get(entry.get("lladdr", ""), "") for entry in json.loads(text or "[]")]
        return found[0] if found else ""

    async def hops(self, address: str) -> int:
        """Return the number of next hops of the router's route to an address."""
        return len(await daemon_hops(self.site, address))


class MetallbSubject(Subject):
    """MetalLB in layer 2 mode and in BGP mode."""

    watch_s = 9.0
    programs = ("controller", "speaker")

    def __init__(
        self, site: Site, addresses: Mapping[str, Sequence[str]], metallb: Metallb
    ) -> None:
        super().__init__(site, addresses, tuple(dict.fromkeys(PLACEMENT)))
        self._metallb = metallb

    def another_service(self, way: str, number: int) -> tuple[str, dict[str, Any]]:
        address = spare_address(way, number)
        return address, service(
            f"another-{way.split()[-1]}-{number}",
            annotations={ADDRESS_ANNOTATION: address},
            ports=CALL_PORTS,
        )

    async def add_pool(self, way: str) -> str:
        method = method_of(way)
        await self._metallb.add_pool(f"many-{method}", [MANY_POOLS[method]], method)
        return MANY_POOLS[method]

    def service_of_pool(self, way: str, number: int) -> dict[str, Any]:
        name = f"many-{method_of(way)}"
        annotations = {POOL_ANNOTATION: name}
        return service(f"{name}-{number}", annotations=annotations, ports=CALL_PORTS)

    async def kill(self, host: str) -> None:
        await self._metallb.speaker(host).kill()

    async def stop(self, host: str) -> None:
        await self._metallb.speaker(host).stop(grace_s=10)

    async def hand_over(self, host: str) -> None:
        # The speaker's pod is deleted. There is no other way in this version.
        await self.stop(host)

    async def start(self, host: str) -> None:
        self._metallb.start_speaker(host)

        async def announced() -> bool:
            (address,) = self.addresses[METALLB_BGP]
            return await self.hops(address) == len(self._hosts)

        await until(announced, f"the announcements of {host}")

    async def restore(self, host: str) -> None:
        # After a partition, speakers do not search for members that they consider dead before five
        # minutes have passed. A new process does.
        await self.kill(host)
        await super().restore(host)
        await self.start(host)


@asynccontextmanager
async def metallb_lab(name: str) -> AsyncIterator[MetallbSubject]:
    """Build a lab with MetalLB. Remove everything at the end."""
    lab = Site.create(
        name,
        nodes=NODES,
        gateways=0,
        roles=False,
        apiserver="real",
        announce="bgp",
        routing=ROUTING,
    )
    async with lab as site:
        await prepare(site)
        for host in site.topology.of("node"):
            await kubeproxy.start(site, host.name)
        metallb = Metallb(site)
        await metallb.install([L2_POOL], [BGP_POOL])
        addresses = {METALLB_L2: L2_ADDRESSES, METALLB_BGP: BGP_ADDRESSES}
        wanted = [address for each in addresses.values() for address in each]
        await site.apply(
            [
                service(f"web-{number}", annotations={ADDRESS_ANNOTATION: address})
                for number, address in enumerate(wanted)
            ]
        )
        await answers(site, wanted)
        yield MetallbSubject(site, addresses, metallb)


class FairleadSubject(Subject):
    """A class of Fairlead. `role` is the role that announces, and `ways` are its ways."""

    def __init__(
        self,
        site: Site,
        addresses: Mapping[str, Sequence[str]],
        hosts: Sequence[str],
        *,
        role: str,
        class_name: str,
    ) -> None:
        super().__init__(site, addresses, hosts)
        self.programs = ("controller", role, "bird")
        self._role = role
        self._class_name = class_name

    def another_service(self, way: str, number: int) -> tuple[str, dict[str, Any]]:
        address = spare_address(way, number)
        return address, self.service(
            f"another-{way.split()[-1]}-{number}", {OWN_ADDRESS: address}, CALL_PORTS
        )

    async def add_pool(self, way: str) -> str:
        method = method_of(way)
        await self.site.apply([_pool(f"many-{method}", MANY_POOLS[method], method)])
        return MANY_POOLS[method]

    def service_of_pool(self, way: str, number: int) -> dict[str, Any]:
        name = f"many-{method_of(way)}"
        return self.service(f"{name}-{number}", {OWN_POOL: name}, CALL_PORTS)

    def service(
        self,
        name: str,
        annotations: Mapping[str, str],
        ports: Sequence[Mapping[str, Any]] = PORTS,
    ) -> dict[str, Any]:
        """Return a Service of this class."""
        return service(name, class_name=self._class_name, annotations=annotations, ports=ports)

    async def running(self, host: str) -> bool:
        return bool(process.find(self.site.name, f"{host}/{self._role}"))

    async def kill(self, host: str) -> None:
        await self.site.kill_role(host, self._role)

    async def stop(self, host: str) -> None:
        await self.site.stop_role(host, self._role)

    async def hand_over(self, host: str) -> None:
        await self.stop(host)
        directory = self.site.directory
        pins = directory.pins(host) if self._role == "gateway" else directory.node_pins(host)
        options = {
            "config": directory.config_of(host),
            "kubeconfig": directory.kubeconfig_of(self._role),
            "node-name": host,
            "pin-path": pins,
        }
        if self._role == "gateway":
            options["proxy-path"] = directory.proxy(host)
        argv = ["fairlead", self._role, "--cleanup"]
        for name, value in options.items():
            argv += [f"--{name}", str(value)]
        code, _, errors = await self.site.exec(host, argv, timeout_s=60)
        if code:
            raise Unavailable(f"{' '.join(argv)} on {host} ended with {code}: {errors}")

    async def start(self, host: str) -> None:
        await self.site.start_role(host, self._role)
        await self._announced(host)

    async def restore(self, host: str) -> None:
        await super().restore(host)
        await self._announced(host)

    async def _announced(self, host: str) -> None:
        """Wait until the router has a route to each host."""

        async def announced() -> bool:
            ways = ways_of(self, "bgp")
            hops = [await self.hops(self.addresses[way][0]) for way in ways]
            return all(each == len(set(self._hosts)) for each in hops)

        await until(announced, f"the announcements of {host}")


@asynccontextmanager
async def direct_lab(
    name: str, *, daemon: RouterKind = "bird", ways: Sequence[str] = (DIRECT_L2, DIRECT_BGP)
) -> AsyncIterator[FairleadSubject]:
    """Build a lab with class direct, whose gateways are the nodes. Each of them announces all
    addresses by BGP, and owns some of the addresses of layer 2. Remove everything at the end."""
    lab = Site.create(
        name,
        nodes=NODES,
        gateways=0,
        gateways_on_nodes=True,
        node_proxy="kube-proxy",
        transport=Transport(peers=True),
        announce="bgp",
        routing=msgspec.structs.replace(ROUTING, daemon=daemon),
        short_leases=False,
    )
    async with lab as site:
        # Half of the events affect a host without pods, so that they show the loss of the
        # announcer alone.
        names = [host.name for host in site.topology.gateways]
        idle = [name for name in names if name not in PLACEMENT]
        hosts = [each for name in names if name in PLACEMENT for each in (*idle, name)]
        yield await _fairlead(site, ways, hosts, role="gateway", class_name=DIRECT.name)


@asynccontextmanager
async def direct_frr_lab(name: str) -> AsyncIterator[FairleadSubject]:
    """Build the same lab with FRR as the routing daemon of the router."""
    async with direct_lab(name, daemon="frr", ways=(DIRECT_FRR_BGP,)) as subject:
        yield subject


@asynccontextmanager
async def announce_lab(name: str) -> AsyncIterator[FairleadSubject]:
    """Build a lab with class announce, in which the nodes with ready pods announce. Its router has
    FRR, which uses the weights of the nodes. One gateway serves Services of class direct. Remove
    everything at the end."""
    lab = Site.create(
        name,
        nodes=NODES,
        gateways=1,
        node_proxy="kube-proxy",
        default_class="announce",
        announce="bgp",
        routing=msgspec.structs.replace(ROUTING, daemon="frr"),
        short_leases=False,
    )
    async with lab as site:
        hosts = tuple(dict.fromkeys(PLACEMENT))
        ways = ANNOUNCE_L2, ANNOUNCE_BGP
        yield await _fairlead(site, ways, hosts, role="node", class_name=ANNOUNCE.name)


async def _fairlead(
    site: Site, ways: Sequence[str], hosts: Sequence[str], *, role: str, class_name: str
) -> FairleadSubject:
    """Create pods, a pool of layer 2 and Services, and wait until all addresses answer."""
    await prepare(site)
    await site.apply([_pool("lan", L2_POOL, "l2")])
    addresses = {way: L2_ADDRESSES if _of_l2(way) else BGP_ADDRESSES for way in ways}
    subject = FairleadSubject(site, addresses, hosts, role=role, class_name=class_name)
    wanted = [address for each in addresses.values() for address in each]
    await site.apply(
        [
            subject.service(f"web-{number}", {OWN_ADDRESS: address})
            for number, address in enumerate(wanted)
        ]
    )
    await answers(site, wanted)
    return subject


def _pool(name: str, addresses: str, method: str) -> Mapping[str, Any]:
    announce: dict[str, Any] = {"method": method}
    if method == "l2":
        announce["interfaces"] = ["eth0"]  # also for addresses that are not of its network
    spec = {"addresses": [addresses], "autoAssign": False, "announce": announce}
    return {
        "apiVersion": GROUP_VERSION,
        "kind": "AddressPool",
        "metadata": {"name": name},
        "spec": spec,
    }


async def prepare(site: Site) -> None:
    """Create the pods, and set the client's sysctls."""
    namespace.set_sysctls(site.namespace(CLIENT), {"net/core/txrehash": 0})
    await site.apply([pod(number, node) for number, node in enumerate(PLACEMENT, 1)])
    await site.await_pods()


def pod(number: int, node: str, *, app: str = APP) -> dict[str, Any]:
    """Return a pod of the Services. The last part of its name is its node."""
    ports = [
        {"name": "http", "containerPort": 8080},
        {"name": "dns", "containerPort": 5353, "protocol": "UDP"},
    ]
    container = {"name": "web", "image": "echo", "ports": ports}
    meta = {"name": f"{app}-{number}-{node}", "namespace": "default", "labels": {"app": app}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta,
        "spec": {"nodeName": node, "containers": [container]},
    }


def service(
    name: str,
    *,
    class_name: str = "",
    annotations: Mapping[str, str],
    ports: Sequence[Mapping[str, Any]] = PORTS,
    app: str = APP,
) -> dict[str, Any]:
    """Return a Service of the pods with this label."""
    spec: dict[str, Any] = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "allocateLoadBalancerNodePorts": False,
        "selector": {"app": app},
        "ports": list(ports),
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default", "annotations": dict(annotations)},
        "spec": spec | ({"loadBalancerClass": class_name} if class_name else {}),
    }


async def answers(site: Site, addresses: Sequence[str]) -> None:
    """Wait until each address answers."""
    for address in addresses:

        async def answered(address: str = address) -> bool:
            return await answer(site, address)

        await until(answered, f"an answer of {address}")


async def answer(site: Site, address: str, *, timeout_s: float = 0.5) -> bool:
    """Return whether the address answers one call."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await site.connect(CLIENT, address, 80, timeout_s=timeout_s)
            try:
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.transport.abort()
    except (OSError, Unavailable):
        return False


async def until(
    condition: Callable[[], Awaitable[object]], what: str, *, within_s: float = READY_WITHIN_S
) -> float:
    """Wait until the condition is true, and return how long that took. Raise Unavailable after
    `within_s` seconds."""
    begun_s = time.monotonic()
    while not await condition():
        if time.monotonic() - begun_s > within_s:
            raise Unavailable(f"waited {within_s:g} s in vain for {what}")
        await asyncio.sleep(process.POLL_S)
    return time.monotonic() - begun_s


def spare_address(way: str, number: int) -> str:
    """Return an address that the Services of the lab do not have."""
    network, first = ("192.0.2", 215) if _of_l2(way) else ("203.0.113", 150)
    return f"{network}.{first + number % 14}"


def rotated(hosts: Sequence[str], number: int) -> Sequence[str]:
    """Return the hosts in their order, from the one with this number on."""
    first = number % len(hosts)
    return (*hosts[first:], *hosts[:first])


def ways_of(subject: Subject, method: str) -> list[str]:
    """Return the ways with this method."""
    return [way for way in subject.addresses if way.endswith(f" {method}")]


def method_of(way: str) -> str:
    """Return the method of a way: `l2` or `bgp`."""
    return way.split()[-1]


def _of_l2(way: str) -> bool:
    return method_of(way) == "l2"
