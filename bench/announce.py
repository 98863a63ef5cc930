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

With `--kills N`, machines and links fail N times instead, see `bench.announcers_lost`."""

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import msgspec
from bench.announcers import DEFAULTS, METALLB, SHORT, SHORT_ALONE, SYSTEMS, System, settle
from bench.metallb import find
from bench.options import options, progress, run_benchmark
from tests.e2e.load import OPEN_CONNECTIONS, Load

from bench import announcers_lost
from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.errors import Unavailable

PATIENCE_S = 0.4
"""A call without an answer is given up and repeated after this time."""
BACK_S, QUICK_S = 10.0, 2.0
MARGIN_S = 10.0
"""How long an event is watched after it should be over."""
FAILS, BOOTS = "the machine fails", "it boots again"
KILLED, STARTED = "the process is killed", "it is started again"
RESTARTED = "the process is restarted"
COMPARED = (DEFAULTS, SHORT, SHORT_ALONE, METALLB)
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


async def observe(system: System, number: int, *, quick: bool) -> AsyncIterator[Effect]:
    """Yield the effects of all events. Each affects the node that announces the address then."""
    long_s = system.takes_over_s + MARGIN_S
    halves = (
        ((FAILS, system.site.kill_node, long_s), (BOOTS, system.boot, BACK_S)),
        ((KILLED, system.kill, long_s), (STARTED, system.start, BACK_S)),
        ((RESTARTED, system.restart, BACK_S),),
    )
    for steps in halves:
        node = await settle(system)
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


async def measure(rounds: int, *, systems: Sequence[str] = COMPARED, quick: bool = False) -> Report:
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
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=COMPARED)
    parser.add_argument("--kills", type=int, default=0, help="let machines fail this often")
    parser.add_argument(
        "--others", type=int, default=5, help="with --kills: those of the other systems"
    )
    parser.add_argument("--kept", type=Path, help="with --kills: write the results to this file")
    arguments = parser.parse_args()
    if METALLB in arguments.systems:
        find()
    if arguments.kills:
        # A shell lets commands in the background ignore it, and callers end by it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        lost = announcers_lost.measure(arguments.kills, arguments.others, kept=arguments.kept)
        run_benchmark(arguments, lambda: run(lost), announcers_lost.show)
        return
    run_benchmark(
        arguments,
        lambda: run(measure(arguments.rounds, systems=arguments.systems, quick=arguments.quick)),
        show,
    )


if __name__ == "__main__":
    main()
