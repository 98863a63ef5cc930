"""Systems that announce the address of a Service, each in its lab: Fairlead and MetalLB.

In: a name and the name of the lab. Out: a `System` with one Service that has an address of each
family and a pod on each of three nodes. Its router has no route to the addresses. Invariant: which
node announces an address is known by what the router sees alone: who answers its requests, and
which MAC address its kernel sends to."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from ipaddress import ip_address

import yaml
from bench.metallb import Metallb
from tests.e2e.load import Load, Web, output

from fairlead.kube.presence import OnLink
from fairlead.lab import kubeproxy, namespace
from fairlead.lab.site import ROLE_PORTS, Site
from fairlead.lab.topology import LAN, LAN_POOL, ROUTER
from fairlead.net import arp, ndp
from fairlead.net.address import is_ipv6
from fairlead.net.packet_socket import PacketSocket
from fairlead.plan.announce import announcers_of, owner_of
from fairlead.plan.gateways import Gateways

NODES = ("node1", "node2", "node3")
DEFAULT_S, SHORT_S = 30.0, 6.0
DEFAULTS, SHORT = "Fairlead", f"Fairlead, Lease of {SHORT_S:g} s"
ALONE, SHORT_ALONE = f"{DEFAULTS}, no peers", f"{SHORT}, no peers"
METALLB = "MetalLB 0.13.12"
TAKEOVERS = "fairlead_takeovers_total"
SETTLED_S, POLL_S, ANSWER_S = 60.0, 0.2, 0.2
STEADY_S = 1.0
"""A node announces an address if it alone has answered for it for this time."""


class System:
    """A system in its lab, with one Service. `takes_over_s`: after this time another node should
    announce the address of a node whose process is dead, and after `notices_s` that of a machine
    that fails."""

    takes_over_s = notices_s = 0.0

    def __init__(self, name: str, site: Site) -> None:
        self.name, self.site = name, site
        self.web = Web(site)

    async def kill(self, node: str) -> None:
        """Kill the process that announces."""
        raise NotImplementedError

    async def stop(self, node: str) -> None:
        """End the process that announces."""
        raise NotImplementedError

    async def start(self, node: str) -> None:
        """Start the process that announces."""
        raise NotImplementedError

    async def boot(self, node: str) -> None:
        """Boot a machine that has failed."""
        raise NotImplementedError

    async def restart(self, node: str) -> None:
        """Restart the process that announces."""
        await self.stop(node)
        await self.start(node)

    async def takeovers(self) -> int:
        """Return how often a node took over from one that did not answer."""
        return 0

    async def owners(self, steady_s: float = STEADY_S) -> Mapping[str, str]:
        """Wait until each address has had one owner for this time, which the router's kernel knows.
        Return the node that announces each. A node that has just booted may announce an address for
        a moment, and leave it to its heir. Raise TimeoutError."""
        before: Mapping[str, str] = {}
        since_s = 0.0
        async with asyncio.timeout(SETTLED_S):
            while True:
                answers = await asyncio.to_thread(answering, self.site, self.web.addresses)
                found = {name: next(iter(each)) for name, each in answers.items() if len(each) == 1}
                if found != before:
                    before, since_s = found, time.monotonic()
                if len(found) < len(answers):
                    await asyncio.sleep(POLL_S)
                elif time.monotonic() - since_s >= steady_s:
                    known = await entries(self.site, self.web.addresses)
                    if all(known.get(name, node) == node for name, node in found.items()):
                        return found

    async def announcer(self) -> str:
        """Return the node that answers requests for the first address; empty: none."""
        answers = await asyncio.to_thread(answering, self.site, self.web.addresses[:1])
        return min(answers[self.web.address], default="")


def answering(site: Site, addresses: Sequence[str]) -> Mapping[str, set[str]]:
    """Return the nodes that answer the router's requests for each address."""
    macs = {bytes.fromhex(host.mac.replace(":", "")): host.name for host in site.topology.hosts}
    found: dict[str, set[str]] = {each: set() for each in addresses}
    with namespace.inside(site.namespace(ROUTER)):
        asking = [
            PacketSocket("lan", arp.ETHERTYPE),
            # The packets of clients never end.
            PacketSocket("lan", ndp.ETHERTYPE, ndp.ADVERTISES),
        ]
    try:
        for opened in asking:
            opened.reserve(4 << 20)
        for each in addresses:
            opened = asking[is_ipv6(each)]
            ask = ndp.solicitation if is_ipv6(each) else arp.request
            opened.send(ask(opened.mac, str(LAN[is_ipv6(each)][1]), each))
        for opened in asking:
            while (frame := opened.receive(ANSWER_S)) is not None:
                told, mac = _answer(frame)
                if told in found and mac in macs:
                    found[told].add(macs[mac])
    finally:
        for opened in asking:
            opened.close()
    return found


def _answer(frame: bytes) -> tuple[str, bytes]:
    """Return the address that a station says it has in an answer, and its MAC address."""
    if (reply := arp.parse(frame)) and reply.operation == arp.REPLY and not reply.announces:
        return reply.sender, reply.sender_mac
    message = ndp.parse(frame)
    if message and message.type == ndp.ADVERTISEMENT and message.solicited:
        return message.target, message.mac
    return "", b""


async def entries(site: Site, addresses: Sequence[str]) -> Mapping[str, str]:
    """Return the node to which the router's kernel sends packets for each of the addresses that it
    knows."""
    macs, wanted = {host.mac: host.name for host in site.topology.hosts}, {*addresses}
    found = {}
    for family in ("-4", "-6"):
        shown = await output(site, ROUTER, "ip", family, "neigh", "show", "dev", "lan")
        for words in map(str.split, shown.splitlines()):
            if words[0] in wanted and "lladdr" in words:
                found[words[0]] = macs.get(words[words.index("lladdr") + 1], "")
    return found


class Fairlead(System):
    """Gateways on all nodes, whose Leases have this duration."""

    notices_s = 1.0

    def __init__(self, name: str, site: Site, lease_s: float) -> None:
        super().__init__(name, site)
        self.takes_over_s = lease_s
        self.web.annotations = {"fairlead.io/addresses": ",".join(_alike())}

    async def kill(self, node: str) -> None:
        await self.site.kill_role(node, "gateway")

    async def stop(self, node: str) -> None:
        await self.site.stop_role(node, "gateway")

    async def start(self, node: str) -> None:
        await self.site.start_role(node, "gateway")

    async def boot(self, node: str) -> None:
        await self.site.revive_node(node)

    async def takeovers(self) -> int:
        url = f"http://127.0.0.1:{ROLE_PORTS['gateway']}/metrics"
        found = [await output(self.site, node, "curl", "-s", url) for node in NODES]
        lines = (line.split() for each in found for line in each.splitlines())
        return sum(int(float(words[1])) for words in lines if words[0] == TAKEOVERS)


def _alike() -> tuple[str, str]:
    """Return an address of each family that the same nodes inherit in the same order, so that one
    failure shows the gaps of both."""
    firsts = [ip_address(each.partition("-")[0]) for each in LAN_POOL]
    pairs = (
        (str(firsts[0] + four), str(firsts[1] + six)) for four in range(20) for six in range(20)
    )
    return next(pair for pair in pairs if _order(pair[0]) == _order(pair[1]))


def _order(address: str) -> Sequence[str]:
    """Return the nodes in the order in which they inherit the address."""
    found: list[str] = []
    links = tuple(OnLink("eth0", str(network)) for network in LAN)
    while left := [name for name in NODES if name not in found]:
        live = Gateways(frozenset(left), announcers=dict.fromkeys(left, links))
        owner = owner_of(address, announcers_of(live, {}))
        assert owner is not None
        found.append(owner.owner)
    return found


class WithMetallb(System):
    """MetalLB's speakers and kube-proxy on all nodes."""

    takes_over_s = notices_s = 6.0

    def __init__(self, name: str, site: Site, metallb: Metallb) -> None:
        super().__init__(name, site)
        self._metallb = metallb

    async def kill(self, node: str) -> None:
        await self._metallb.speaker(node).kill()

    async def stop(self, node: str) -> None:
        await self._metallb.speaker(node).stop(10)

    async def start(self, node: str) -> None:
        self._metallb.start_speaker(node)

    async def boot(self, node: str) -> None:
        await self.site.revive_node(node)
        await kubeproxy.start(self.site, node)
        await self.start(node)


@asynccontextmanager
async def fairlead(
    name: str, lab: str, lease_s: float, *, peers: bool = True
) -> AsyncIterator[System]:
    """Build a lab with gateways on its nodes."""
    made = Site.create(
        lab,
        nodes=len(NODES),
        gateways_on_nodes=True,
        announce="l2",
        apiserver="real",
    )
    async with made as site:
        configuration = yaml.safe_load(site.directory.config.read_text())
        configuration["presence"]["leaseDurationS"] = lease_s
        if not peers:
            del configuration["gateway"]["peers"]
        site.directory.config.write_text(yaml.safe_dump(configuration))
        await restart_roles(site)
        system = Fairlead(name, site, lease_s)
        await _serve(system)
        yield system


async def restart_roles(site: Site) -> None:
    """Restart all roles, which read the configuration then."""
    for host in (each.name for each in site.topology.hosts if each.kind in ("control", "node")):
        for role in site.roles(host):
            await site.stop_role(host, role)
            await site.start_role(host, role)


@asynccontextmanager
async def metallb(name: str, lab: str) -> AsyncIterator[System]:
    """Build a lab with MetalLB."""
    made = Site.create(lab, nodes=len(NODES), gateways=0, roles=False, apiserver="real")
    async with made as site:
        for node in NODES:
            await kubeproxy.start(site, node)
        installed = Metallb(site)
        await installed.install(LAN_POOL)
        system = WithMetallb(name, site, installed)
        await _serve(system)
        yield system


async def _serve(system: System) -> None:
    # A retransmission must not choose another path, as it does between network namespaces only.
    await output(system.site, "client1", "sysctl", "-w", "net.core.txrehash=0")
    await system.web.start(NODES)
    await system.web.create(ipFamilyPolicy="RequireDualStack")
    await settle(system)


async def settle(system: System) -> str:
    """Wait until a node announces the first address, and all connections can be opened. Return the
    node."""
    node = (await system.owners())[system.web.address]
    async with Load(system.site, system.web.address):
        return node


SYSTEMS: Mapping[str, Callable[[str, str], AbstractAsyncContextManager[System]]] = {
    DEFAULTS: lambda name, lab: fairlead(name, lab, DEFAULT_S),
    SHORT: lambda name, lab: fairlead(name, lab, SHORT_S),
    ALONE: lambda name, lab: fairlead(name, lab, DEFAULT_S, peers=False),
    SHORT_ALONE: lambda name, lab: fairlead(name, lab, SHORT_S, peers=False),
    METALLB: metallb,
}
