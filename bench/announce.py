"""`python -m bench.announce`: what callers notice when the announcer of an address fails, beside
MetalLB.

In: labs of three nodes with one pod each and a router without a route to the address: gateways of
Fairlead on all nodes with their defaults, the same with a shorter Lease, the same as peers of each
other, and kube-proxy with MetalLB in layer 2 mode. Out: for each event and lab the connections that
failed, the longest time for which one of five callers had no answer, and the open connections that
broke. The victim is always the node that announces the address. The events happen in all labs in
turn, round after round, so that other load of the machine affects all alike.

* the machine fails: its cable is cut and its processes are killed; later it boots again;
* the process that announces is killed (SIGKILL), and later started again;
* the process is restarted as planned (SIGTERM, and started again at once)."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from statistics import median

import msgspec
import yaml
from bench.metallb import Metallb, find
from bench.options import options, progress, run_benchmark
from tests.e2e.load import OPEN_CONNECTIONS, Load, Web, output

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.errors import Unavailable
from fairlead.lab import kubeproxy, namespace
from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site
from fairlead.lab.topology import LAN, ROUTER
from fairlead.net import arp
from fairlead.net.packet_socket import PacketSocket

NODES = ("node1", "node2", "node3")
DEFAULT_S, SHORT_S = 30.0, 6.0
DEFAULTS, SHORT = "Fairlead", f"Fairlead, Lease of {SHORT_S:g} s"
PEERS = f"{SHORT}, peers"
METALLB = "MetalLB 0.13.12"
PATIENCE_S = 0.4
"""A call without an answer is given up and repeated after this time."""
BACK_S, QUICK_S = 10.0, 2.0
MARGIN_S = 10.0
"""How long an event is watched after it should be over."""
SETTLED_S, POLL_S, ANSWER_S = 60.0, 0.2, 0.5
FAILS, BOOTS = "the machine fails", "it boots again"
KILLED, STARTED = "the process is killed", "it is started again"
RESTARTED = "the process is restarted"
EVENTS = (FAILS, BOOTS, KILLED, STARTED, RESTARTED)
COLUMNS = (
    "EVENT",
    "SYSTEM",
    "ROUNDS",
    "FAILED",
    "LONGEST GAP MS",
    "BROKEN ON THE HOST",
    "BROKEN ELSEWHERE",
    "MOVED",
)


class Effect(msgspec.Struct, frozen=True):
    """What the callers of one system noticed of one event. `host`: the node that the event
    affected. `broken`, `why`: the open connections that broke, of `OPEN_CONNECTIONS`, by the node
    of their pod, and by node and reason. `announced_by`: the node that announced the address
    afterwards."""

    event: str
    system: str
    round: int
    host: str
    seconds: float
    calls: int
    failed: int
    longest_gap_ms: int
    broken: Mapping[str, int]
    why: Mapping[str, int]
    stalled_ms: int
    announced_by: str

    @property
    def broken_elsewhere(self) -> int:
        return sum(number for node, number in self.broken.items() if node != self.host)


class Report(msgspec.Struct, frozen=True):
    effects: tuple[Effect, ...]


class System:
    """A system in its lab, with one Service. `takes_over_s`: after this time another node should
    announce the address of a node that fails."""

    takes_over_s = 0.0

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

    async def announcer(self) -> str:
        """Return the node that answers the router's ARP requests for the address; empty: none."""
        macs = {host.mac: host.name for host in self.site.topology.hosts}
        with namespace.inside(self.site.namespace(ROUTER)):
            link = PacketSocket("lan", arp.ETHERTYPE)
        with link:
            link.send(arp.request(link.mac, str(LAN[0][1]), self.web.address))
            while (frame := await asyncio.to_thread(link.receive, ANSWER_S)) is not None:
                found = arp.parse(frame)
                if found and found.operation == arp.REPLY and found.sender == self.web.address:
                    return macs.get(found.sender_mac.hex(":"), "")
        return ""


class Fairlead(System):
    """Gateways on all nodes, whose Leases have this duration."""

    def __init__(self, name: str, site: Site, lease_s: float) -> None:
        super().__init__(name, site)
        self.takes_over_s = lease_s

    async def kill(self, node: str) -> None:
        await self.site.kill_role(node, "gateway")

    async def stop(self, node: str) -> None:
        await self.site.stop_role(node, "gateway")

    async def start(self, node: str) -> None:
        await self.site.start_role(node, "gateway")

    async def boot(self, node: str) -> None:
        await self.site.revive_node(node)


class WithMetallb(System):
    """MetalLB's speakers and kube-proxy on all nodes."""

    takes_over_s = 6.0

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
    name: str, lab: str, lease_s: float, *, peers: bool = False
) -> AsyncIterator[System]:
    """Build a lab with gateways on its nodes."""
    made = Site.create(
        lab,
        nodes=len(NODES),
        gateways_on_nodes=True,
        announce="l2",
        apiserver="real",
        transport=Transport(peers=peers),
    )
    async with made as site:
        configuration = yaml.safe_load(site.directory.config.read_text())
        configuration["presence"]["leaseDurationS"] = lease_s
        site.directory.config.write_text(yaml.safe_dump(configuration))
        for host in ("control", *NODES):
            for role in site.roles(host):
                await site.stop_role(host, role)
                await site.start_role(host, role)
        system = Fairlead(name, site, lease_s)
        await _serve(system)
        yield system


@asynccontextmanager
async def metallb(name: str, lab: str) -> AsyncIterator[System]:
    """Build a lab with MetalLB."""
    made = Site.create(lab, nodes=len(NODES), gateways=0, roles=False, apiserver="real")
    async with made as site:
        for node in NODES:
            await kubeproxy.start(site, node)
        installed = Metallb(site)
        await installed.install(["192.0.2.224-192.0.2.250"])
        system = WithMetallb(name, site, installed)
        await _serve(system)
        yield system


async def _serve(system: System) -> None:
    # A retransmission must not choose another path, as it does between network namespaces only.
    await output(system.site, "client1", "sysctl", "-w", "net.core.txrehash=0")
    await system.web.start(NODES)
    await system.web.create()
    await _settle(system)


async def _settle(system: System) -> str:
    """Wait until a node announces the address, and all connections can be opened. Return the
    node."""
    async with asyncio.timeout(SETTLED_S):
        while not (node := await system.announcer()):
            await asyncio.sleep(POLL_S)
    async with Load(system.site, system.web.address):
        return node


SYSTEMS: Mapping[str, Callable[[str, str], AbstractAsyncContextManager[System]]] = {
    DEFAULTS: lambda name, lab: fairlead(name, lab, DEFAULT_S),
    SHORT: lambda name, lab: fairlead(name, lab, SHORT_S),
    PEERS: lambda name, lab: fairlead(name, lab, SHORT_S, peers=True),
    METALLB: metallb,
}


async def observe(system: System, number: int, *, quick: bool) -> AsyncIterator[Effect]:
    """Yield the effects of all events. Each affects the node that announces the address then."""
    long_s = system.takes_over_s + MARGIN_S
    halves = (
        ((FAILS, system.site.kill_node, long_s), (BOOTS, system.boot, BACK_S)),
        ((KILLED, system.kill, long_s), (STARTED, system.start, BACK_S)),
        ((RESTARTED, system.restart, BACK_S),),
    )
    for steps in halves:
        node = await _settle(system)
        load = Load(system.site, system.web.address, timeout_s=PATIENCE_S, patience_s=PATIENCE_S)
        async with load:
            for event, act, watch_s in steps:
                progress(f"round {number + 1}: {system.name}: {event}: {node}")
                seconds = QUICK_S if quick else watch_s
                found = await load.counts_during(act(node), watch_s=seconds)
                broken = Counter(each.node for each in found.broken)
                why = Counter(f"{each.node}: {each.why}" for each in found.broken)
                yield Effect(
                    event,
                    system.name,
                    number,
                    node,
                    seconds,
                    found.requests,
                    found.failed,
                    found.longest_gap_ms,
                    dict(broken),
                    dict(why),
                    found.stalled_ms,
                    await system.announcer(),
                )


async def measure(
    rounds: int, *, systems: Sequence[str] = tuple(SYSTEMS), quick: bool = False
) -> Report:
    """Build a lab for each system, and let all events happen in all of them in turn."""
    effects: list[Effect] = []
    async with AsyncExitStack() as stack:
        labs: list[System] = []
        for place, name in enumerate(systems):
            progress(f"a lab with {name}")
            lab = SYSTEMS[name](name, f"ann{os.getpid()}x{place}")
            labs.append(await stack.enter_async_context(lab))
        for number in range(rounds):
            for system in labs:
                try:
                    effects.extend([each async for each in observe(system, number, quick=quick)])
                except (Unavailable, TimeoutError) as error:
                    # It would discard all other results.
                    progress(f"round {number + 1} of {system.name} is left out: {error!r}")
    return Report(tuple(effects))


def rows_of(effects: Sequence[Effect]) -> list[tuple[str, ...]]:
    """Return a row for each event and system. Numbers are the median and the worst."""
    rows: list[tuple[str, ...]] = []
    for event in EVENTS:
        for system in dict.fromkeys(each.system for each in effects):
            found = [each for each in effects if (each.event, each.system) == (event, system)]
            if not found:
                continue
            calls = sum(each.calls for each in found)
            rows.append(
                (
                    event,
                    system,
                    str(len(found)),
                    f"{_middle([each.failed for each in found])} of {calls // len(found):,}",
                    _middle([each.longest_gap_ms for each in found]),
                    _middle([each.broken.get(each.host, 0) for each in found]),
                    _middle([each.broken_elsewhere for each in found]),
                    f"{sum(each.announced_by != each.host for each in found)} of {len(found)}",
                )
            )
    return rows


def _middle(values: Sequence[int]) -> str:
    return f"{median(values):,.0f} ({max(values):,})" if len(values) > 1 else f"{values[0]:,}"


def show(report: Report) -> None:
    draw(COLUMNS, rows_of(report.effects))
    print(f"\nOpen connections: {OPEN_CONNECTIONS}. Numbers: median (worst).")


def main() -> None:
    parser = options(
        "bench.announce", __doc__, rounds=3, quick="watch each event for 2 s", plots=False
    )
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=tuple(SYSTEMS))
    arguments = parser.parse_args()
    if METALLB in arguments.systems:
        find()
    run_benchmark(
        arguments,
        lambda: run(measure(arguments.rounds, systems=arguments.systems, quick=arguments.quick)),
        show,
    )


if __name__ == "__main__":
    main()
