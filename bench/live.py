"""`python -m bench.live`: the delay from an event of the API server to a gateway's kernel maps, and
the cost of a start.

In: a size and a number of rounds. Out: a `Report`, as a table or as JSON. The gateway is the
process that ships, with its probes, its eBPF maps and its filter on an interface. Its API server is
a recording of a real API server with the cluster, in which pods are placed at random, so that no
two Services share a table.

Each round starts the gateway with nothing in the kernel, sends events one by one, each of which
changes the table of one Service, and starts the gateway again, so that it adopts what it left. A
delay lasts from sending the event until the listener's record in the kernel's map changes, which is
polled about every 0.1 ms. No event may be lost: at the end of each round the gateway's plan must
match the events.

An event about a node that the gateway considers dead changes no table until the gateway considers
the node up again. On a busy machine the process that plays the nodes may be too slow for the
prober; such events are counted separately and not as delays.
"""

import asyncio
import json
import os
import random
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
from bench.cluster import Progress
from bench.fixture import Size, node_name
from bench.options import add_cluster, options, progress, run_benchmark
from bench.plot import Bar, bars
from bench.result import quantile, spread
from bench.rig import Rig, Started, cpu_s, rig
from bench.stream import Recording, recording

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.errors import Unavailable
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, Node
from fairlead.lab import process
from fairlead.net.bpf import Map
from fairlead.plan.members import node_address

PACES_PER_S = (10, 100, 1000)
LASTS_S = 10.0
"""Duration of each pace."""
SETTLE_S = 3.0
LOST_AFTER_S = 10.0
POLL_S = 0.00005


class Event(NamedTuple):
    """A line of a watch, the listener whose record it changes, and the health port of the node that
    it is about."""

    line: str
    key: bytes
    health: tuple[str, int]


class Delays(msgspec.Struct, frozen=True):
    """The delays at one pace of events."""

    pace_per_s: float
    events: int
    median_ms: float
    p99_ms: float
    max_ms: float
    cpu_share: float
    """The gateway's CPU, as a share of one core."""
    hidden: int = 0
    """Events about nodes that the gateway has considered dead at any time. Such an event changes
    tables when the gateway considers the node up again, or never."""


class Round(msgspec.Struct, frozen=True):
    cold: Started
    again: Started
    idle_share: float
    """Share of one core that probes and other background work use while there are no events."""
    delays: tuple[Delays, ...]


class Report(msgspec.Struct, frozen=True):
    services: int
    endpoints: int
    nodes: int
    rounds: tuple[Round, ...]


def scattered(recorded: Recording, nodes: int) -> Recording:
    """Return the same cluster with each Service's pods on random nodes, no two on one node."""
    draw_node = random.Random(1)
    path = ENDPOINT_SLICES.path()
    slices = []
    for raw in recorded.listed[path]:
        each = json.loads(bytes(raw))
        for endpoint, number in zip(
            each["endpoints"], draw_node.sample(range(nodes), len(each["endpoints"])), strict=True
        ):
            endpoint["nodeName"] = node_name(number)
        slices.append(msgspec.Raw(msgspec.json.encode(each)))
    return Recording({**recorded.listed, path: slices}, [])


class Events:
    """An endless sequence of events: each makes one endpoint of a Service unready, or ready again;
    Services come in random order."""

    def __init__(self, built: Rig, recorded: Recording) -> None:
        self._keys = {
            (each.key.namespace, each.key.name): built.listener_key(each) for each in built.balanced
        }
        self._ports = {
            (each.key.namespace, each.key.name): each.spec.health_check_node_port
            for each in built.balanced
        }
        self._addresses = addresses_of(recorded)
        self._slices: list[dict[str, Any]] = [
            json.loads(bytes(raw)) for raw in recorded.listed[ENDPOINT_SLICES.path()]
        ]
        random.Random(2).shuffle(self._slices)

    def __iter__(self) -> Iterator[Event]:
        ready = False
        while True:
            for each in self._slices:
                each["endpoints"][0]["conditions"] |= {"ready": ready, "serving": ready}
                metadata = each["metadata"]
                name = metadata["namespace"], metadata["labels"]["kubernetes.io/service-name"]
                health = self._addresses[each["endpoints"][0]["nodeName"]], self._ports[name]
                line = json.dumps({"type": "MODIFIED", "object": each}, separators=(",", ":"))
                yield Event(line, self._keys[name], health)
            ready = not ready

    def ready(self) -> dict[str, set[str]]:
        """Return the nodes of the ready endpoints of each Service, after the last event."""
        found = {}
        for each in self._slices:
            metadata = each["metadata"]
            service = metadata["labels"]["kubernetes.io/service-name"]
            found[f"{metadata['namespace']}/{service}"] = {
                one["nodeName"] for one in each["endpoints"] if one["conditions"]["ready"]
            }
        return found


def addresses_of(recorded: Recording) -> dict[str, str]:
    """Return the address of each node at which its health ports are probed."""
    nodes = [msgspec.json.decode(each, type=Node) for each in recorded.listed[NODES.path()]]
    return {node.metadata.name: node_address(node, "IPv4") or "" for node in nodes}


def mismatched(state: dict[str, Any], ready: dict[str, set[str]]) -> list[str]:
    """Return the Services whose planned members differ from the last event, whatever the probes
    report. For these an event was lost."""
    planned = {
        name: {
            member["node"]
            for each in service["plan"]["listeners"]
            for member in each["members"]
            if member["weight"]
        }
        for name, service in state["services"].items()
    }
    return sorted(name for name, nodes in ready.items() if planned.get(name) != nodes)


async def delays_ms(
    built: Rig, listeners: Map, events: Iterator[Event], pace_per_s: float, lasts_s: float
) -> tuple[list[tuple[float, Event]], list[Event]]:
    """Send events at this pace. Return the delay of each, and the events that changed nothing."""
    waiting: dict[bytes, tuple[float, bytes | None, Event]] = {}
    shown: list[tuple[float, Event]] = []
    hidden: list[Event] = []
    upcoming: Event | None = None
    begun_s = time.monotonic()
    due = deque(
        begun_s + number / pace_per_s for number in range(max(1, round(lasts_s * pace_per_s)))
    )
    while due or waiting:
        if due and due[0] <= time.monotonic():
            upcoming = upcoming or next(events)
            # The next event of a Service is sent when the previous one has taken effect: two events
            # together might change nothing.
            if upcoming.key not in waiting:
                due.popleft()
                before = listeners.lookup(upcoming.key)
                waiting[upcoming.key] = time.monotonic(), before, upcoming
                await built.replay.write(upcoming.line)
                upcoming = None
        # The event loop's timers are as coarse as the delays that are measured.
        time.sleep(POLL_S)  # noqa: ASYNC251
        await asyncio.sleep(0)
        for key, (since_s, before, event) in list(waiting.items()):
            if listeners.lookup(key) != before:
                shown.append(((time.monotonic() - since_s) * 1000, event))
                del waiting[key]
            elif time.monotonic() - since_s > LOST_AFTER_S:
                hidden.append(event)
                del waiting[key]
    return shown, hidden


def used(pid: int) -> tuple[float, float]:
    """Return the current time, and the process's CPU time so far."""
    return time.monotonic(), cpu_s(pid)


def share_since(pid: int, then: tuple[float, float]) -> float:
    """Return the process's CPU since `then`, as a share of one core."""
    now_s, now_cpu_s = used(pid)
    return (now_cpu_s - then[1]) / (now_s - then[0])


class Bench:
    """One run; needs root."""

    def __init__(
        self, folder: Path, size: Size, *, rounds: int, lasts_s: float, progress: Progress
    ) -> None:
        self.folder = folder
        self.size = size
        self.rounds = rounds
        self.lasts_s = lasts_s
        self.progress = progress

    async def run(self) -> Report:
        """Measure everything. All processes have ended when this returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        recorded = scattered(
            await recording(self.folder, self.size, self.progress), self.size.nodes
        )
        async with rig(recorded) as built:
            rounds = []
            for number in range(self.rounds):
                self.progress(f"round {number + 1} of {self.rounds}")
                rounds.append(await self._round(built, Events(built, recorded)))
                built.reset()
        return Report(self.size.services, self.size.endpoints, self.size.nodes, tuple(rounds))

    async def _round(self, built: Rig, events: Events) -> Round:
        """Run one round. Raise Unavailable if an event was lost."""
        delays = []
        upcoming = iter(events)
        async with built.gateway() as (running, listeners, cold):
            await asyncio.sleep(SETTLE_S)
            begun = used(running.pid)
            await asyncio.sleep(self.lasts_s)
            idle_share = share_since(running.pid, begun)
            for pace_per_s in PACES_PER_S:
                begun = used(running.pid)
                shown, hidden = await delays_ms(
                    built, listeners, upcoming, pace_per_s, self.lasts_s
                )
                share, not_up = share_since(running.pid, begun), built.not_up()
                found = sorted(ms for ms, event in shown if event.health not in not_up)
                if not found or not {event.health for event in hidden} <= not_up:
                    raise Unavailable(
                        f"{len(hidden)} events changed nothing within {LOST_AFTER_S} s, although "
                        "their nodes are not dead"
                    )
                figures = median(found), quantile(found, 0.99), found[-1], share
                delays.append(
                    Delays(pace_per_s, len(found), *figures, len(shown) + len(hidden) - len(found))
                )
            if lost := mismatched(await built.state(), events.ready()):
                raise Unavailable(
                    f"the gateway's plan does not match the events of {len(lost)} Services, the "
                    f"first is {lost[0]}"
                )
        async with built.gateway() as (_, _, again):
            return Round(cold, again, idle_share, tuple(delays))


START_HEADINGS = ("START", "ALL LISTENERS", "READY", "CPU", "RSS", "PEAK RSS", "KERNEL")
DELAY_HEADINGS = ("EVENTS/S", "MEDIAN", "P99", "MAX", "CPU, OF A CORE", "HIDDEN")


def start_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the rows of starts from nothing, and of starts that adopt the state of the previous
    process."""
    starts = {
        "from nothing": [each.cold for each in report.rounds],
        "again": [each.again for each in report.rounds],
    }
    return [
        (
            name,
            f"{spread([each.listeners_s for each in found], '.2f')} s",
            f"{spread([each.ready_s for each in found], '.2f')} s",
            f"{spread([each.cpu_s for each in found], '.2f')} s",
            f"{spread([each.resident_mib for each in found])} MiB",
            f"{spread([each.peak_mib for each in found])} MiB",
            f"{spread([each.kernel_mib for each in found])} MiB",
        )
        for name, found in starts.items()
    ]


def delay_rows(report: Report) -> list[tuple[str, ...]]:
    """Return a row for each pace."""
    paces: dict[float, list[Delays]] = defaultdict(list)
    for each in report.rounds:
        for delays in each.delays:
            paces[delays.pace_per_s].append(delays)
    rows = [
        (
            f"{pace_per_s:g}",
            f"{spread([each.median_ms for each in found], '.2f')} ms",
            f"{spread([each.p99_ms for each in found], '.2f')} ms",
            f"{spread([each.max_ms for each in found], '.1f')} ms",
            f"{spread([each.cpu_share for each in found], '.0%')}",
            str(sum(each.hidden for each in found)),
        )
        for pace_per_s, found in paces.items()
    ]
    return [
        ("0", "-", "-", "-", spread([each.idle_share for each in report.rounds], ".0%"), "-"),
        *rows,
    ]


def plots(report: Report) -> dict[str, str]:
    """Return the plot of the delays at each pace."""
    groups = {
        f"{pace:g} events a second": [
            Bar("median", [each.delays[at].median_ms for each in report.rounds], 0),
            Bar("99th percentile", [each.delays[at].p99_ms for each in report.rounds], 1),
        ]
        for at, pace in enumerate(PACES_PER_S)
    }
    title = f"From event to live table, {report.services:,} Services, {report.nodes:,} nodes"
    return {"live": bars(title, "ms", groups, form=".2f")}


def show(report: Report) -> None:
    """Print the report as tables."""
    print(f"{report.services} Services of {report.endpoints} endpoints, {report.nodes} nodes")
    draw(START_HEADINGS, start_rows(report))
    draw(DELAY_HEADINGS, delay_rows(report))


def main() -> None:
    parser = options("bench.live", __doc__, rounds=5, quick="one round, two seconds of each pace")
    add_cluster(parser)
    arguments = parser.parse_args()
    size = Size(arguments.services, arguments.endpoints, arguments.nodes)
    # The work of this process, and of the process that answers for the nodes, would run on other
    # machines in a cluster.
    os.setpriority(os.PRIO_PROCESS, 0, process.SUPPORT_NICE)
    rounds, lasts_s = (1, 2.0) if arguments.quick else (arguments.rounds, LASTS_S)

    def measure() -> Report:
        return run(
            Bench(arguments.folder, size, rounds=rounds, lasts_s=lasts_s, progress=progress).run()
        )

    run_benchmark(arguments, measure, show, plots)


if __name__ == "__main__":
    main()
