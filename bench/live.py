"""`python -m bench.live`: how soon what the API server tells is what a gateway does, and what a
start from nothing takes.

In: a size, a number of rounds. Out: a `Report`, as a table or as JSON. The gateway is the process
that ships, with its probes, its eBPF maps and its filter on an interface; before it stands a
recording of a real API server with the cluster, in which pods are placed at random, so that no two
Services share a table. Each round starts it with nothing in the kernel, tells it events one by one,
which each change the table of one Service, and starts it again, to adopt what it left. A delay
counts from the event's leaving this process to the listener's record in the kernel's map being
another; it is looked for every 0.1 ms. No event may be lost: at the end of each round the gateway's
plan has to be what it was told. An endpoint whose node the gateway takes for dead changes no table,
whatever is told of it, until the gateway thinks better of the node. Where the machine has much else
to do, what plays the nodes may be too slow for the prober: such events are counted apart, and are
not taken for delays."""

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
from bench.cluster import Tell
from bench.fixture import Size, node_name
from bench.options import add_cluster, give_out, options, tell
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
"""Of each pace."""
CALM_S = 3.0
LOST_AFTER_S = 10.0
LOOK_S = 0.00005


class Event(NamedTuple):
    """A line of a watch, the listener whose record changes by it, and the health port of the node
    that is told of."""

    line: str
    key: bytes
    health: tuple[str, int]


class Delays(msgspec.Struct, frozen=True):
    """At one pace of events."""

    pace_per_s: float
    events: int
    median_ms: float
    p99_ms: float
    most_ms: float
    cpu_share: float
    """Of one core, the gateway's."""
    hidden: int = 0
    """Events of nodes that the gateway has ever taken for dead: these change tables when it thinks
    better of them, or never."""


class Round(msgspec.Struct, frozen=True):
    cold: Started
    again: Started
    idle_share: float
    """Of one core: what probes take, and all else that goes on when nothing happens."""
    delays: tuple[Delays, ...]


class Report(msgspec.Struct, frozen=True):
    services: int
    endpoints: int
    nodes: int
    rounds: tuple[Round, ...]


def scattered(recorded: Recording, nodes: int) -> Recording:
    """The same cluster, but each Service's pods are on nodes drawn at random, no two on one."""
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
    """Events without end: each turns one endpoint of a Service unready, or ready again, Services in
    random order."""

    def __init__(self, built: Rig, recorded: Recording) -> None:
        self._keys = {
            (each.key.namespace, each.key.name): built.key(each) for each in built.balanced
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
        """The nodes of the ready endpoints of each Service, as was told last."""
        found = {}
        for each in self._slices:
            name = f"{each['metadata']['namespace']}/{each['metadata']['labels']['kubernetes.io/service-name']}"
            found[name] = {
                one["nodeName"] for one in each["endpoints"] if one["conditions"]["ready"]
            }
        return found


def addresses_of(recorded: Recording) -> dict[str, str]:
    """Of each node, that at which its health ports are asked."""
    nodes = [msgspec.json.decode(each, type=Node) for each in recorded.listed[NODES.path()]]
    return {node.metadata.name: node_address(node, "IPv4") or "" for node in nodes}


def not_as_told(state: dict[str, Any], ready: dict[str, set[str]]) -> list[str]:
    """The Services whose members are not those that were told, whatever probes say of them: of
    these an event was lost."""
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
    """Tell events at this pace; of each, how long it took. And the events that have changed
    nothing."""
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
            # The next of a Service comes when the one before has shown: the two together might
            # change nothing.
            if upcoming.key not in waiting:
                due.popleft()
                before = listeners.lookup(upcoming.key)
                waiting[upcoming.key] = time.monotonic(), before, upcoming
                await built.replay.tell(upcoming.line)
                upcoming = None
        time.sleep(LOOK_S)  # noqa: ASYNC251 - the event loop's timers are as coarse as what is measured
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
    """Now, and the process's CPU time so far."""
    return time.monotonic(), cpu_s(pid)


def share_since(pid: int, then: tuple[float, float]) -> float:
    """How much of a core the process has used since."""
    now_s, now_cpu_s = used(pid)
    return (now_cpu_s - then[1]) / (now_s - then[0])


class Bench:
    """One run; needs root."""

    def __init__(
        self, folder: Path, size: Size, *, rounds: int, lasts_s: float, tell: Tell
    ) -> None:
        self.folder = folder
        self.size = size
        self.rounds = rounds
        self.lasts_s = lasts_s
        self.tell = tell

    async def run(self) -> Report:
        """Measure everything. Nothing runs any more afterwards."""
        self.folder.mkdir(parents=True, exist_ok=True)
        recorded = scattered(await recording(self.folder, self.size, self.tell), self.size.nodes)
        async with rig(recorded) as built:
            rounds = []
            for number in range(self.rounds):
                self.tell(f"round {number + 1} of {self.rounds}")
                rounds.append(await self._round(built, Events(built, recorded)))
                built.forget()
        return Report(self.size.services, self.size.endpoints, self.size.nodes, tuple(rounds))

    async def _round(self, built: Rig, events: Events) -> Round:
        """Raises Unavailable if an event was lost."""
        delays = []
        upcoming = iter(events)
        async with built.gateway() as (running, listeners, cold):
            await asyncio.sleep(CALM_S)
            begun = used(running.pid)
            await asyncio.sleep(self.lasts_s)
            idle_share = share_since(running.pid, begun)
            for pace_per_s in PACES_PER_S:
                begun = used(running.pid)
                shown, hidden = await delays_ms(
                    built, listeners, upcoming, pace_per_s, self.lasts_s
                )
                share, doubted = share_since(running.pid, begun), built.doubted()
                found = sorted(ms for ms, event in shown if event.health not in doubted)
                if not found or not {event.health for event in hidden} <= doubted:
                    raise Unavailable(
                        f"{len(hidden)} events have changed nothing in {LOST_AFTER_S} s, nor are "
                        "their nodes dead"
                    )
                figures = median(found), quantile(found, 0.99), found[-1], share
                delays.append(
                    Delays(pace_per_s, len(found), *figures, len(shown) + len(hidden) - len(found))
                )
            if lost := not_as_told(await built.state(), events.ready()):
                raise Unavailable(
                    f"of {len(lost)} Services the gateway's plan is not what it was told, of "
                    f"{lost[0]} first"
                )
        async with built.gateway() as (_, _, again):
            return Round(cold, again, idle_share, tuple(delays))


START_HEADINGS = ("START", "ALL LISTENERS", "READY", "CPU", "RSS", "PEAK RSS", "KERNEL")
DELAY_HEADINGS = ("EVENTS/S", "MEDIAN", "P99", "MOST", "CPU, OF A CORE", "HIDDEN")


def start_rows(report: Report) -> list[tuple[str, ...]]:
    """From nothing, and adopting what a predecessor left."""
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
    """A line for each pace."""
    paces: dict[float, list[Delays]] = defaultdict(list)
    for each in report.rounds:
        for delays in each.delays:
            paces[delays.pace_per_s].append(delays)
    rows = [
        (
            f"{pace_per_s:g}",
            f"{spread([each.median_ms for each in found], '.2f')} ms",
            f"{spread([each.p99_ms for each in found], '.2f')} ms",
            f"{spread([each.most_ms for each in found], '.1f')} ms",
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
    """From event to kernel at each pace."""
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
    """As tables."""
    print(f"{report.services} Services of {report.endpoints} endpoints, {report.nodes} nodes")
    draw(START_HEADINGS, start_rows(report))
    draw(DELAY_HEADINGS, delay_rows(report))


def main() -> None:
    parser = options("bench.live", __doc__, rounds=5, quick="one round, two seconds of each pace")
    add_cluster(parser)
    asked = parser.parse_args()
    size = Size(asked.services, asked.endpoints, asked.nodes)
    # What is done here, and by the process that answers for the nodes, is done by other machines
    # elsewhere.
    os.setpriority(os.PRIO_PROCESS, 0, process.BESIDE)
    rounds, lasts_s = (1, 2.0) if asked.quick else (asked.rounds, LASTS_S)

    def measure() -> Report:
        return run(Bench(asked.folder, size, rounds=rounds, lasts_s=lasts_s, tell=tell).run())

    give_out(asked, measure, show, plots)


if __name__ == "__main__":
    main()
