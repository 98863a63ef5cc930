"""`python -m bench.announce`: what callers notice when the announcer of an address fails, beside
MetalLB.

In: labs of three nodes with one pod each and a router without a route to the address: gateways of
Fairlead on all nodes with their defaults, the same with a shorter Lease, the same without peers,
and kube-proxy with MetalLB in layer 2 mode. Out: for each event and lab the connections that
failed, the longest time for which one of five callers had no answer, and the open connections that
broke. The victim is always the node that announces the address. The events happen in all labs in
turn, round after round, so that other load of the machine affects all alike.

* the machine fails: its cable is cut and its processes are killed; later it boots again;
* the process that announces is killed (SIGKILL), and later started again;
* the process is restarted as planned (SIGTERM, and started again at once).

With `--kills N`, machines fail N times instead, while a client calls every 10 ms, and afterwards
busy loops compete with all processes: out come the gaps, and how often a gateway took over from one
that was alive."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
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
from fairlead.lab.site import ROLE_PORTS, Site
from fairlead.lab.topology import LAN, ROUTER
from fairlead.net import arp
from fairlead.net.packet_socket import PacketSocket

NODES = ("node1", "node2", "node3")
DEFAULT_S, SHORT_S = 30.0, 6.0
DEFAULTS, SHORT = "Fairlead", f"Fairlead, Lease of {SHORT_S:g} s"
ALONE = f"{SHORT}, no peers"
METALLB = "MetalLB 0.13.12"
KILL_COLUMNS = ("SYSTEM", "KILLS", "GAP MS", "HELD BROKEN", "BUSY LOOPS", "FALSE TAKE-OVERS")
INTERVAL_S, HELD = 0.01, 50
BEFORE_S, AFTER_S = 2.0, 3.0
"""How long a client calls before and after a machine fails."""
BUSY_LOOPS, BUSY_S = 8, 60.0
PATIENCE_S = 0.4
"""A call without an answer is given up and repeated after this time."""
BACK_S, QUICK_S = 10.0, 2.0
MARGIN_S = 10.0
"""How long an event is watched after it should be over."""
SETTLED_S, POLL_S, ANSWER_S = 60.0, 0.2, 0.5
TAKEOVERS = "fairlead_takeovers_total"
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


class Kill(msgspec.Struct, frozen=True):
    """What a client noticed of one failure of the machine that announced its address. `gaps_ms`:
    times without an answer. `broken`: of its open connections, those that broke."""

    system: str
    gaps_ms: tuple[int, ...]
    broken: int


class Busy(msgspec.Struct, frozen=True):
    """How often a gateway took over from one that was alive, beside busy loops."""

    system: str
    loops: int
    seconds: float
    takeovers: int


class Report(msgspec.Struct, frozen=True):
    effects: tuple[Effect, ...] = ()
    kills: tuple[Kill, ...] = ()
    busy: tuple[Busy, ...] = ()


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

    notices_s = 1.0

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

    async def takeovers(self) -> int:
        url = f"http://127.0.0.1:{ROLE_PORTS['gateway']}/metrics"
        found = [await output(self.site, node, "curl", "-s", url) for node in NODES]
        lines = (line.split() for each in found for line in each.splitlines())
        return sum(int(float(words[1])) for words in lines if words[0] == TAKEOVERS)


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
    ALONE: lambda name, lab: fairlead(name, lab, SHORT_S, peers=False),
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


def start_caller(system: System) -> "subprocess.Popen[str]":
    """Call the Service from the client, in an own process, until it gets a signal."""
    options = [f"--interval={INTERVAL_S}", f"--timeout={PATIENCE_S}", f"--held={HELD}"]
    target = f"{system.web.address}:80"
    with namespace.inside(system.site.namespace("client1")):
        return subprocess.Popen(
            [sys.executable, "-m", "fairlead", "probe", target, *options, "-o", "json"],
            stdout=subprocess.PIPE,
            text=True,
        )


async def kill(system: System) -> Kill:
    """Let the machine that announces fail while a client calls, and boot it again."""
    node = await _settle(system)
    caller = start_caller(system)
    try:
        await asyncio.sleep(BEFORE_S)
        await system.site.kill_node(node)
        await asyncio.sleep(system.notices_s + AFTER_S)
    finally:
        caller.send_signal(signal.SIGINT)
        told, _ = await asyncio.to_thread(caller.communicate, timeout=SETTLED_S)
    report = json.loads(told.splitlines()[-1])
    await system.boot(node)
    gaps = tuple(round(1000 * each["length_s"]) for each in report["gaps"])
    return Kill(system.name, gaps, sum(report["broken"].values()))


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Let busy loops compete with all processes."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


async def beside_busy_loops(system: System) -> Busy:
    """Count take-overs from gateways that are alive."""
    await _settle(system)
    before = await system.takeovers()
    with busy_loops(BUSY_LOOPS):
        await asyncio.sleep(BUSY_S)
        return Busy(system.name, BUSY_LOOPS, BUSY_S, await system.takeovers() - before)


async def measure_kills(number: int, systems: Sequence[str]) -> Report:
    """Let machines fail this often in a lab of each system, one lab after the other."""
    kills: list[Kill] = []
    busy: list[Busy] = []
    for place, name in enumerate(systems):
        progress(f"a lab with {name}")
        async with SYSTEMS[name](name, f"ann{os.getpid()}x{place}") as system:
            for done in range(number):
                kills.append(await kill(system))
                progress(f"{name}: {done + 1} of {number}: gaps of {kills[-1].gaps_ms} ms")
            busy.append(await beside_busy_loops(system))
    return Report(kills=tuple(kills), busy=tuple(busy))


def kill_rows_of(report: Report) -> list[tuple[str, ...]]:
    """Return a row for each system. Numbers are the median and the worst of the longest gaps."""
    rows: list[tuple[str, ...]] = []
    for each in report.busy:
        found = [kill for kill in report.kills if kill.system == each.system]
        rows.append(
            (
                each.system,
                str(len(found)),
                _middle([max(kill.gaps_ms, default=0) for kill in found]),
                _middle([kill.broken for kill in found]),
                f"{each.loops} for {each.seconds:g} s",
                str(each.takeovers),
            )
        )
    return rows


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
    if report.kills:
        draw(KILL_COLUMNS, kill_rows_of(report))
        print(f"\nOpen connections: {HELD}. Numbers: median (worst).")
        return
    draw(COLUMNS, rows_of(report.effects))
    print(f"\nOpen connections: {OPEN_CONNECTIONS}. Numbers: median (worst).")


def main() -> None:
    parser = options(
        "bench.announce", __doc__, rounds=3, quick="watch each event for 2 s", plots=False
    )
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=tuple(SYSTEMS))
    parser.add_argument("--kills", type=int, default=0, help="let machines fail this often")
    arguments = parser.parse_args()
    if METALLB in arguments.systems:
        find()
    run_benchmark(
        arguments,
        lambda: run(
            measure_kills(arguments.kills, arguments.systems)
            if arguments.kills
            else measure(arguments.rounds, systems=arguments.systems, quick=arguments.quick)
        ),
        show,
    )


if __name__ == "__main__":
    main()
