"""`python -m bench.ovn`: class fairlead.io/ovn at a real OVN, beside `ovn-nbctl`.

In: numbers of load balancers, of changes and of connections. Out: a `Report`, as tables with ratios
or as JSON with every figure. A distributed router with a gateway port, three chassis with the
userspace datapath, and four pods placed 3/1/0; FAIRLEAD_OVN chooses the version of OVN.

start: the controller starts with this number of Services and an empty northbound database. Each has
three pods. Time and CPU until the database has all load balancers, and until every chassis has
installed them; then the memory of each program.

changes: the pod of a Service is replaced by another one, with that number of load balancers. From
the answer of the API server to the write of the EndpointSlice until every chassis has the change,
and until the first new connection reaches the new pod; the CPU time of each program for one change.
In turn, the same change of a load balancer that does not belong to Fairlead, by one command
`ovn-nbctl --wait=hv set load_balancer` with a plain list of backends, from the start of the
command. Each delay and the CPU time is that of a change of its own, so that one measurement is not
part of another.

shares: a burst of connections to four pods, and to three, by pod that answers.

Each round has a new OVN for each number of load balancers.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path

import msgspec
from bench.announced import Share
from bench.options import log_to_stderr, options, progress, run_benchmark
from bench.ovn_figures import (
    CPU_HEADINGS,
    DELAY_HEADINGS,
    MEMORY_HEADINGS,
    SHARE_HEADINGS,
    START_HEADINGS,
    Changes,
    Measured,
    Report,
    Start,
    Usage,
    cpu_rows,
    delay_rows,
    memory_rows,
    ratios,
    share_rows,
    start_rows,
)
from bench.ovn_stand import IDLE_CPU_S, TEMPLATE, Stand, background, stand
from bench.ovn_watched import watched, within
from bench.ovn_ways import SEQUENCE, Way, commanded, controlled

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.drivers.ovn.northbound import BALANCERS, GLOBAL
from fairlead.errors import Refused, Unavailable
from fairlead.lab import namespace, process
from fairlead.lab.ovn.layout import OvnPod
from fairlead.lab.ovn.programs import program
from fairlead.net.ovsdb import Table
from fairlead.probe.burst import Tally

PLAIN_MOVED, PLAIN_SHARED = "203.0.113.200", "203.0.113.201"
PAUSE_S = 0.25
"""The time after a change. The driver changes the backends of a row at most every 0.1 s."""
CALLERS_PORTS, BURST_PORTS = "10000 29999", "30000 60999"
"""The ports of the client: conntrack still has entries of earlier connections to the same pods."""
FEWER_PODS = 3
CALLER = Path(__file__).with_name("ovn_caller.py")


class Sizes(msgspec.Struct, frozen=True):
    """How much to measure: load balancers, changes of each kind, connections of a burst."""

    rows: tuple[int, ...]
    changes: int
    connections: int


QUICK = Sizes((20,), changes=3, connections=400)


class Bench:
    """The whole benchmark."""

    def __init__(self, sizes: Sizes, *, rounds: int, progress: Callable[[str], None]) -> None:
        self.sizes, self.rounds, self._progress = sizes, rounds, progress

    async def run(self) -> Report:
        """Measure everything. No process, namespace or file is left when this returns."""
        if os.geteuid() != 0:
            raise Refused("this benchmark creates network namespaces", fix="run it as root")
        rounds = []
        for number in range(self.rounds):
            found = []
            for rows in self.sizes.rows:
                where = f"round {number + 1} of {self.rounds}, {rows} load balancers"
                self._progress(f"{where}: starting OVN")
                async with stand() as made:
                    found.append(await self._measure(made, rows, where))
            rounds.append(tuple(found))
        return Report(version(), tuple(rounds))

    async def _measure(self, made: Stand, rows: int, where: str) -> Measured:
        self._progress(f"{where}: start of the controller")
        start = await started(made, rows)
        self._progress(f"{where}: installed after {start.installed_s:.1f} s; waiting until idle")
        await made.idle()
        first = made.site.pods[0]
        async with AsyncExitStack() as stack:
            moved = (
                await stack.enter_async_context(controlled(made, "moved", [first.address])),
                await commanded(made, PLAIN_MOVED),
            )
            self._progress(f"{where}: {self.sizes.changes} changes of each kind")
            changes = await changed(made, moved, self.sizes.changes)
            shared = (
                await stack.enter_async_context(controlled(made, "shared", [first.address])),
                await commanded(made, PLAIN_SHARED),
            )
            self._progress(f"{where}: bursts of connections")
            shares = await shared_by(made, shared, self.sizes.connections)
        return Measured(rows, os.getloadavg()[0], start, changes, shares)


async def started(made: Stand, rows: int) -> Start:
    """Start the controller with this number of Services, and wait until every chassis has their
    load balancers. Return the cost."""
    made.start_controller()
    await made.add_service(TEMPLATE, background(0))
    await made.stop_controller()
    await made.fill(rows - 1)
    await made.site.central.control("nb", "--all", "destroy", "load_balancer")
    await made.site.central.synchronize()
    north = {BALANCERS: Table(("name",)), GLOBAL: SEQUENCE}
    async with watched(made.site.central, north) as seen:
        before, begun_s = made.usage(), time.monotonic()
        made.start_controller()
        in_database_s = await seen.until(
            lambda: len(seen.north.rows(BALANCERS)) >= rows, "all rows were in the database"
        )
        installed_s = await seen.until(
            lambda: all(
                each["hv_cfg"] == each["nb_cfg"] for each in seen.north.rows(GLOBAL).values()
            ),
            "every chassis had all rows",
        )
        used = difference(made.usage(), before)
    return Start(in_database_s - begun_s, installed_s - begun_s, used, made.resident())


async def changed(made: Stand, ways: Sequence[Way], count: int) -> Mapping[str, Changes]:
    """Return the figures of this number of changes of each kind by each way, in turn."""
    namespace.set_sysctls(
        made.site.namespace("client"), {"net/ipv4/ip_local_port_range": CALLERS_PORTS}
    )
    found = {way.name: Changes([], [], [], []) for way in ways}
    first, *others = made.site.pods  # the Service has the first pod already
    pods = {way.name: cycle((*others, first)) for way in ways}
    for number in range(count):
        for way in ways if number % 2 == 0 else reversed(ways):
            figures, following = found[way.name], pods[way.name]
            in_database_ms, flows_ms = await until_flows(way, next(following))
            figures.flows_ms.append(flows_ms)
            figures.in_database_ms.extend(in_database_ms)
            figures.connection_ms.append(await until_connection(made, way, next(following)))
            figures.cpu_s.append(await cost(way, next(following)))
    return found


async def until_flows(way: Way, pod: OvnPod) -> tuple[list[float], float]:
    """Replace the pod. Return the time until the northbound database has the change, if that is
    known, and until every chassis has it, in milliseconds."""
    begun_s = await way.change([pod.address])
    in_database_s = await way.in_database()
    installed_s = await way.installed()
    await asyncio.sleep(PAUSE_S)
    known = [] if in_database_s is None else [(in_database_s - begun_s) * 1000]
    return known, (installed_s - begun_s) * 1000


async def until_connection(made: Stand, way: Way, pod: OvnPod) -> float:
    """Replace the pod. Return the time until a new connection has reached it, in milliseconds."""
    async with calling(made, way.address, pod.name) as answered:
        begun_s = await way.change([pod.address])
        async with within(f"{way.address} was answered by {pod.name}"):
            answered_s = float(await asyncio.to_thread(answered))
    await asyncio.sleep(PAUSE_S)
    return (answered_s - begun_s) * 1000


async def cost(way: Way, pod: OvnPod) -> Usage:
    """Replace the pod. Return the CPU time of each program until nothing is left to do."""
    before = used = way.usage()
    await way.change([pod.address])
    await way.in_database()
    while True:
        await asyncio.sleep(PAUSE_S)
        last, used = used, way.usage()
        if sum(difference(used, last).values()) < IDLE_CPU_S * PAUSE_S:
            return difference(used, before)


async def shared_by(
    made: Stand, ways: Sequence[Way], connections: int
) -> Mapping[int, Mapping[str, Share]]:
    """Return the shares of all pods, and of fewer pods, by each way."""
    namespace.set_sysctls(
        made.site.namespace("client"), {"net/ipv4/ip_local_port_range": BURST_PORTS}
    )
    found: dict[int, dict[str, Share]] = {}
    for pods in (made.site.pods, made.site.pods[-FEWER_PODS:]):
        for way in ways:
            await way.change([each.address for each in pods])
            await way.installed()
            argv = process.python("fairlead.probe", "burst", way.address, "80")
            argv += ("--connections", str(connections), "--concurrency", "32")
            tally = msgspec.json.decode(await made.at_client(argv), type=Tally)
            share = Share(tally.answered, tally.failed, tally.by_pod, len(pods))
            found.setdefault(len(pods), {})[way.name] = share
            await asyncio.sleep(PAUSE_S)
    return found


@asynccontextmanager
async def calling(made: Stand, address: str, pod: str) -> AsyncIterator[Callable[[], str]]:
    """Open connections to the address during the block. Yield a function that blocks until one
    has reached the pod, and returns the time."""
    child = caller(made, address, pod)
    assert child.stdout is not None
    try:
        if await asyncio.to_thread(child.stdout.readline) != "ready\n":
            raise Unavailable(f"the caller of {address} has ended")
        yield child.stdout.readline
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def caller(made: Stand, address: str, pod: str) -> "subprocess.Popen[str]":
    """Start `bench/ovn_caller.py` on the client."""
    argv = (sys.executable, "-I", "-S", str(CALLER), address, "80", pod)
    environment = process.environment(made.site.lab, "caller")
    with namespace.inside(made.site.namespace("client")):
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)


def difference(after: Usage, before: Usage) -> Usage:
    return {name: value - before[name] for name, value in after.items()}


def version() -> str:
    """Return the version of OVN."""
    argv = (str(program("ovn-northd")), "--version")
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[0].removeprefix("ovn-northd ")


def show(report: Report) -> None:
    """Print the tables and the ratios."""
    print(f"OVN {report.version}")
    for headings, rows in (
        (START_HEADINGS, start_rows(report)),
        (MEMORY_HEADINGS, memory_rows(report)),
        (DELAY_HEADINGS, delay_rows(report)),
        (CPU_HEADINGS, cpu_rows(report)),
        (SHARE_HEADINGS, share_rows(report)),
    ):
        draw(headings, rows)
        print()
    print("writer: the controller, or ovn-nbctl. Delays: median / 99th percentile / maximum.")
    print(*ratios(report), sep="\n")


def main() -> None:
    quick = f"one round, {QUICK.rows[0]} load balancers, {QUICK.changes} changes of each kind"
    parser = options("bench.ovn", __doc__, rounds=1, quick=quick, plots=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[100, 1000], help="load balancers")
    parser.add_argument("--changes", type=int, default=20, help="changes of each kind, by each way")
    parser.add_argument("--connections", type=int, default=20_000, help="of a burst")
    arguments = parser.parse_args()
    sizes = Sizes(tuple(arguments.rows), arguments.changes, arguments.connections)
    rounds = arguments.rounds
    if arguments.quick:
        sizes, rounds = QUICK, 1

    log_to_stderr()
    run_benchmark(
        arguments, lambda: run(Bench(sizes, rounds=rounds, progress=progress).run()), show
    )


if __name__ == "__main__":
    main()
