"""`python -m bench.nodes`: `fairlead node` and the real kube-proxy (nftables mode) on a node of a
recorded cluster.

In: a size and a number of rounds. Out: a `Report`, as a table with ratios or as JSON. Each proxy
has its own network namespace and reads a recording of a real API server. Effects are observed by
packets alone: a client on the node connects to ClusterIPs, and the pod that answers returns its
address.

packets: some random Services have one endpoint. An event moves it to another address; the delay
lasts from sending the event to the first connection that reaches the new address. Events are sent
for half a minute, but at least three.

rules: of the other Services, one third have an endpoint moved to an address that is new, fifty
events a second. The delay lasts until the kernel reports that the address is in a rule
(`committed`).

loaded: as before with a hundred events a second, while in the rest of the Services nine hundred
endpoints a second become unready, or ready again.

A start lasts until each sampled Service has answered; its CPU time includes processes that the
proxy started, until they have exited. The two proxies are measured in turn, and both are programmed
while connections are counted (`calls`). kube-proxy has its default configuration
(nftables.minSyncPeriod 1s), except that it uses JSON instead of protobuf.
"""

import asyncio
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from statistics import median

import msgspec
import yaml
from bench.calls import Calls, Destination, calls
from bench.cluster import Progress
from bench.committed import Committed
from bench.fixture import FIRST_NODE, Size, node_name
from bench.moving import Others, Reader, Sampled, modified, others_of, sample
from bench.options import add_cluster, options, progress, run_benchmark
from bench.result import quantile, spread
from bench.rig import with_children
from bench.stream import Recording, Replay, recording

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.errors import Refused, Unavailable
from fairlead.lab import kubeproxy, namespace, process
from fairlead.lab.kubeapiserver import find_program
from fairlead.lab.process import Process
from fairlead.lab.settings import kubeconfig
from fairlead.probe.burst import LINGER_NONE
from fairlead.roles.health_check_server import command as health_check_server_command

OURS, THEIRS = "fairlead node", "kube-proxy"
SAMPLE = 100
"""Services with one endpoint, by which starts and events are observed."""
EVENTS, CHANGES = 40, 1000
"""Number of events that are followed to the first correct packet, and to the kernel's rule."""
CALM_PER_S, PACE_PER_S, SEEN = 50.0, 1000.0, 0.1
"""Events per second without and with load; the last is the share of the events under load whose
delay is measured."""
TURNS = 12
"""Turns of the measurement of connections."""
ENOUGH_S, FEWEST = 30.0, 3
"""After ENOUGH_S seconds FEWEST events suffice: kube-proxy takes fifteen seconds for one event at
10,000 Services."""
TRY_S, READY_WITHIN_S, SEEN_WITHIN_S = 0.02, 300.0, 120.0
PODS = "10.0.0.0/8"
POD_PORT = 8080
NODE_IN, PODS_IN = "198.19.0.1/16", "198.19.255.2/16"
TICK_S = 0.01


class Started(msgspec.Struct, frozen=True):
    """From the start of the process to answers of all sampled Services. CPU time includes that of
    children, because kube-proxy runs `nft`. Memory in MiB."""

    answered_s: float
    cpu_s: float
    resident_mib: float


class Delays(msgspec.Struct, frozen=True):
    """Delays from event to the kernel's rule, or to the first correct packet. `events` is the
    number of measured events, `cpu_share` the proxy's CPU meanwhile, as a share of one core."""

    events: int
    median_ms: float
    p99_ms: float
    max_ms: float
    cpu_share: float


class Figures(msgspec.Struct, frozen=True):
    """One proxy in one round. `packets`: one event after the other, to the first correct packet.
    `rules`: fifty events a second, to the kernel's rule. `loaded`: the same during a thousand
    events a second. `resident_mib`: afterwards. `calls`: by destination."""

    started: Started
    packets: Delays
    rules: Delays
    loaded: Delays
    resident_mib: float
    calls: Mapping[str, Calls]


class Report(msgspec.Struct, frozen=True):
    services: int
    endpoints: int
    rounds: tuple[Mapping[str, Figures], ...]


def delays_of(took_ms: Sequence[float], cpu_share: float) -> Delays:
    return Delays(
        len(took_ms), median(took_ms), quantile(sorted(took_ms), 0.99), max(took_ms), cpu_share
    )


def cpu_s(pid: int) -> float:
    """User and system time so far of the process and of its children, including ended children."""
    ticks = 0
    for each in with_children(pid):
        fields = proc(each, "stat").rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15] if each == pid else fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def busy(pid: int) -> bool:
    """Whether the process has a child that exists only for one job, such as kube-proxy's `nft`. The
    process that answers health checks for `fairlead node` is permanent and does not count."""
    answering = "\0".join(health_check_server_command())
    return any(
        answering not in line for each in with_children(pid)[1:] if (line := proc(each, "cmdline"))
    )


def proc(pid: int, file: str) -> str:
    """A file of /proc about a process; empty if the process has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_text()
    return ""


class Node:
    """A node with one of the two proxies on it."""

    def __init__(
        self,
        name: str,
        proxy: str,
        folder: Path,
        replay: Replay,
        sampled: Sequence[Sampled],
        others: Others,
    ) -> None:
        self.name, self.proxy = name, proxy
        self._others = others
        self._folder, self._replay, self._sampled = folder, replay, sampled
        self._running: Process | None = None
        self._turn = 0

    async def start(self) -> Started:
        """Start the proxy, and return once every sampled Service has answered."""
        begun_s = time.monotonic()
        self._running = running = process.spawn(
            self.name,
            self.proxy.split()[0],
            self._argv(),
            log=self._folder / "log",
            inside=self.name,
        )
        process.set_nice(running.pid, 0)
        left = list(self._sampled)
        while left:
            if not running.running or time.monotonic() - begun_s > READY_WITHIN_S:
                raise Unavailable(
                    f"{self.proxy} exited at startup, or {len(left)} Services did not answer; "
                    f"see {self._folder}"
                )
            if self.answering_pod(left[-1].cluster_ip) == left[-1].addresses[0]:
                left.pop()
            else:
                await asyncio.sleep(TICK_S)
        answered_s = time.monotonic() - begun_s
        while busy(running.pid):
            await asyncio.sleep(TICK_S)
        return Started(answered_s, cpu_s(running.pid), self.resident_mib())

    def answering_pod(self, address: str, timeout_s: float = TRY_S) -> str:
        """Return the address of the pod that answers a connection from this node to `address`;
        empty if there is no answer."""
        with namespace.make_socket(self.name) as sock:
            sock.settimeout(timeout_s)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
            try:
                sock.connect((address, 80))
                return sock.recv(64).decode().strip()
            except OSError:
                return ""

    async def moves(self, events: int, between: Callable[[], float]) -> list[float]:
        """Move the endpoint of one Service after the other. Return the delay of each move, in
        milliseconds."""
        found: list[float] = []
        first_s = time.monotonic()
        for nth in range(events):
            if len(found) >= FEWEST and time.monotonic() - first_s > ENOUGH_S:
                break
            await asyncio.sleep(between())
            one = self._sampled[(self._turn + nth) % len(self._sampled)]
            here = self.answering_pod(one.cluster_ip, 1.0)
            there = next(each for each in one.addresses if each != here)
            one.slice["endpoints"][0]["addresses"] = [there]
            begun_s = time.monotonic()
            await self._replay.write(modified(one.slice))
            while self.answering_pod(one.cluster_ip) != there:
                if time.monotonic() - begun_s > SEEN_WITHIN_S:
                    raise Unavailable(
                        f"{self.proxy} did not apply an event within {SEEN_WITHIN_S} s"
                    )
                await asyncio.sleep(0)
            found.append((time.monotonic() - begun_s) * 1000)
        self._turn += len(found)
        return found

    async def packets(self, events: int) -> Delays:
        """Return the delays of this number of events until the first correct packet."""
        draw_s = random.Random(5)
        with self._used() as used:
            took_ms = await self.moves(events, lambda: draw_s.uniform(0.0, 0.3))
        return delays_of(took_ms, used[0])

    async def rules(self, events: int, pace_per_s: float, others_per_s: float = 0.0) -> Delays:
        """Return the delays of this number of events, at this pace, until the kernel's rule.
        `others_per_s` is the pace of events of other Services that are sent in between."""
        with Committed(self.name) as committed, self._used() as used:
            begun_s, sent, others = time.monotonic(), 0, 0
            while sent < events:
                since_s = time.monotonic() - begun_s
                for move in islice(
                    self._others.moves, min(events, int(since_s * pace_per_s)) - sent
                ):
                    committed.expect(move.service, move.address)
                    await self._replay.write(move.line)
                    sent += 1
                if lines := list(islice(self._others.turns, int(since_s * others_per_s) - others)):
                    await self._replay.write("\n".join(lines))
                    others += len(lines)
                await asyncio.sleep(TICK_S)
            await committed.all_applied(SEEN_WITHIN_S)
        return delays_of(committed.took_ms, used[0])

    @contextmanager
    def _used(self) -> Iterator[list[float]]:
        """Measure the proxy's CPU during the block. The yielded list holds its share of one core
        afterwards."""
        assert self._running is not None
        found: list[float] = []
        begun_s, begun_cpu_s = time.monotonic(), cpu_s(self._running.pid)
        yield found
        found.append((cpu_s(self._running.pid) - begun_cpu_s) / (time.monotonic() - begun_s))

    def destinations(self) -> Mapping[str, Destination]:
        """Return the destinations to connect to: a pod, and a Service by each of its addresses."""
        one = self._sampled[0]
        return {
            "a pod": Destination(self.answering_pod(one.cluster_ip, 1.0), POD_PORT),
            "a ClusterIP": Destination(one.cluster_ip, 80),
            "a load balancer's address": Destination(one.balancer, 80),
            "a NodePort": Destination(str(FIRST_NODE), one.node_port),
        }

    def resident_mib(self) -> float:
        assert self._running is not None
        statuses = (proc(each, "status") for each in with_children(self._running.pid))
        return sum(
            int(line.split()[1]) / 1024
            for each in statuses
            for line in each.splitlines()
            if line.startswith("VmRSS")
        )

    def _argv(self) -> Sequence[str]:
        access, settings = self._folder / "kubeconfig", self._folder / "settings.yaml"
        access.write_text(kubeconfig("bench", self._replay.access))
        if self.proxy == OURS:
            settings.write_text(yaml.safe_dump({"cluster": {"podCIDRs": [PODS]}}))
            files = ["--config", str(settings), "--kubeconfig", str(access)]
            return process.python("fairlead", "node", *files, "--node-name", node_name(0))
        wanted = {
            **kubeproxy.configuration(node_name(0), access),
            "clusterCIDR": PODS,
            "nftables": {},
            "healthzBindAddress": "0.0.0.0:10256",
        }
        settings.write_text(yaml.safe_dump(wanted))
        return [str(find_program("kube-proxy")), "--config", str(settings)]


def cable(node: str, pods: str) -> None:
    """Connect both namespaces. The addresses of all pods are in the namespace `pods`."""
    for command in (
        f"-n {node} link set lo up",
        f"-n {pods} link set lo up",
        f"-n {node} link add eth0 type veth peer name eth0 netns {pods}",
        f"-n {node} address add {NODE_IN} dev eth0",
        f"-n {pods} address add {PODS_IN} dev eth0",
        f"-n {node} link set eth0 up",
        f"-n {pods} link set eth0 up",
        f"-n {pods} route replace local {PODS} dev lo",
        f"-n {node} route add default via {PODS_IN.partition('/')[0]}",
    ):
        subprocess.run(["ip", *command.split()], check=True)


@asynccontextmanager
async def node(
    name: str, proxy: str, recorded: Recording, sampled: Sequence[Sampled]
) -> AsyncIterator[Node]:
    """Build a node, the pods that it can reach, and an API server for its proxy, which is not
    started yet. Remove everything at the end."""
    pods = f"{name}-pods"
    with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as text:
        folder = Path(text)
        try:
            for each in (name, pods):
                namespace.create(each)
            cable(name, pods)
            serving = folder / "serving"
            argv = process.python("bench.server", str(POD_PORT), str(serving))
            process.spawn(name, "server", argv, log=folder / "server.log", inside=pods)
            while not serving.exists():
                await asyncio.sleep(TICK_S)
            async with Reader(recorded).listen(name) as replay:
                yield Node(name, proxy, folder, replay, sampled, others_of(recorded, sampled))
        finally:
            await process.kill_all((*process.find(name), *process.in_namespaces([name, pods])))
            for each in (name, pods):
                namespace.delete(each)


class Bench:
    """One run; needs root, and kube-proxy."""

    def __init__(
        self,
        folder: Path,
        size: Size,
        *,
        rounds: int,
        events: int,
        changes: int,
        turns: int,
        progress: Progress,
    ) -> None:
        self.folder, self.size, self.rounds, self.progress = folder, size, rounds, progress
        self.events, self.changes, self.turns = events, changes, turns

    async def run(self) -> Report:
        """Measure everything. All processes have ended when this returns."""
        if os.geteuid() != 0:
            raise Refused(
                "this benchmark creates network namespaces and nftables rules", fix="run it as root"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        recorded = await recording(self.folder, self.size, self.progress)
        rounds = [await self._round(number, recorded) for number in range(self.rounds)]
        return Report(self.size.services, self.size.endpoints, tuple(rounds))

    async def _round(self, number: int, recorded: Recording) -> Mapping[str, Figures]:
        order = (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS)
        started: dict[str, Started] = {}
        packets: dict[str, Delays] = {}
        rules: dict[str, Delays] = {}
        loaded: dict[str, Delays] = {}
        async with AsyncExitStack() as stack:
            nodes: dict[str, Node] = {}
            for proxy in order:
                self.progress(f"round {number + 1} of {self.rounds}: {proxy}")
                own, sampled = sample(recorded, SAMPLE)
                name = f"flt-bench-{os.getpid()}-{proxy.split()[0][:4]}"
                nodes[proxy] = await stack.enter_async_context(node(name, proxy, own, sampled))
                started[proxy] = await nodes[proxy].start()
                await asyncio.sleep(2.0)
                packets[proxy] = await nodes[proxy].packets(self.events)
                rules[proxy] = await nodes[proxy].rules(self.changes, CALM_PER_S)
                loaded[proxy] = await nodes[proxy].rules(
                    self.changes, PACE_PER_S * SEEN, PACE_PER_S * (1 - SEEN)
                )
                await asyncio.sleep(2.0)
            resident_mib = {proxy: nodes[proxy].resident_mib() for proxy in order}
            called = calls(
                {nodes[proxy].name: nodes[proxy].destinations() for proxy in order}, self.turns
            )
        return {
            proxy: Figures(
                started[proxy],
                packets[proxy],
                rules[proxy],
                loaded[proxy],
                resident_mib[proxy],
                called[nodes[proxy].name],
            )
            for proxy in order
        }


def delay_rows(
    what: str, of: Callable[[Figures], Delays]
) -> Mapping[str, Callable[[Figures], float]]:
    """Return the rows of delays."""
    return {
        f"{what}, median, ms": lambda each: of(each).median_ms,
        f"{what}, 99th percentile, ms": lambda each: of(each).p99_ms,
        f"{what}, max, ms": lambda each: of(each).max_ms,
        f"{what}, events": lambda each: float(of(each).events),
        f"{what}, CPU, of a core": lambda each: of(each).cpu_share,
    }


ROWS: Mapping[str, Callable[[Figures], float]] = {
    "start, until all answer, s": lambda each: each.started.answered_s,
    "CPU of the start, s": lambda each: each.started.cpu_s,
    "RSS, MiB": lambda each: each.started.resident_mib,
    **delay_rows("event to packet", lambda each: each.packets),
    **delay_rows("event to rule", lambda each: each.rules),
    **delay_rows("under 1,000 events a second, event to rule", lambda each: each.loaded),
    "RSS afterwards, MiB": lambda each: each.resident_mib,
}


def call_rows(what: str) -> Mapping[str, Callable[[Figures], float]]:
    """Return the rows of connections to one destination."""
    return {
        f"connections a second to {what}": lambda each: each.calls[what].per_s,
        f"until a connection to {what} is established, us": lambda each: each.calls[what].first_us,
    }


def rows(report: Report) -> list[tuple[str, ...]]:
    """Return the rows with both figures, and with kube-proxy's over ours, of the same round."""
    made: list[tuple[str, ...]] = []
    called = next(iter(report.rounds[0].values())).calls
    wanted = [*ROWS.items(), *(row for what in called for row in call_rows(what).items())]
    for what, of in wanted:
        pairs = [(of(each[OURS]), of(each[THEIRS])) for each in report.rounds]
        ratio = spread([theirs / ours if ours else 0.0 for ours, theirs in pairs], ".2f")
        made.append(
            (
                what,
                spread([ours for ours, _ in pairs], ".2f"),
                spread([theirs for _, theirs in pairs], ".2f"),
                ratio,
            )
        )
    return made


def show(report: Report) -> None:
    """Print the report as a table."""
    print(f"{report.services} Services of {report.endpoints} endpoints")
    draw(("", OURS.upper(), THEIRS.upper(), "OVER OURS"), rows(report))


def main() -> None:
    parser = options(
        "bench.nodes", __doc__, rounds=3, quick="one round of a small cluster", plots=False
    )
    add_cluster(parser)
    arguments = parser.parse_args()
    size = (
        Size(200, 3, 20)
        if arguments.quick
        else Size(arguments.services, arguments.endpoints, arguments.nodes)
    )
    os.setpriority(os.PRIO_PROCESS, 0, process.SUPPORT_NICE)
    rounds, events, changes, turns = (
        (1, 10, 100, 2) if arguments.quick else (arguments.rounds, EVENTS, CHANGES, TURNS)
    )

    def measure() -> Report:
        return run(
            Bench(
                arguments.folder,
                size,
                rounds=rounds,
                events=events,
                changes=changes,
                turns=turns,
                progress=progress,
            ).run()
        )

    run_benchmark(arguments, measure, show)


if __name__ == "__main__":
    main()
