"""`python -m bench.announce`: addresses that announce themselves, beside MetalLB.

In: a number of rounds, and the parts to measure. Out: a `Report`, as tables or as JSON with every
figure. The labs of all systems are up at the same time, and each measurement is made in all of them
in turn. All ways of one system are called at the same time.

events: what happens to the host that announces, with steady callers (`caller`) and connections that
stay open (`callers`). The machine becomes silent, as when the port of its switch is taken out; the
process that announces is killed (SIGKILL); it is ended (SIGTERM); the host is taken out of service
as planned (`fairlead gateway --cleanup`; MetalLB's speaker is ended). Each event has a second half,
in which the machine or the process comes back. The hosts are affected in turn.

changes: one of the next hops of the router is lost, and comes back, with 2,000 open connections;
with the routes of the routing daemon, and with a resilient group (`resilient`).

created: from the creation of a Service to its first answer.

shares: a burst of connections, by pod. The pods are placed 3/1/1/0.

rates: requests and connections per second of class announce (`announce_rates`).

many: a thousand new addresses, until the router's kernel has a route to each, or each answers ARP.

idle: CPU and memory of all processes of a system, without those of Kubernetes.

MetalLB 0.13.12 is the latest whose Go module can be built without further modules. Its BGP mode is
the native one, with the shortest hold time (3 s).
"""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import NamedTuple

import msgspec
from bench.announce_parts import first_answer_ms, idle, many, share
from bench.announce_rates import Rates, rates
from bench.announced import (
    COST_HEADINGS,
    EVENT_HEADINGS,
    RATE_HEADINGS,
    SHARE_HEADINGS,
    Effect,
    Idle,
    Many,
    Report,
    Share,
    cost_rows,
    event_rows,
    rate_rows,
    share_rows,
)
from bench.announcers import (
    ANNOUNCE_BGP,
    PLACEMENT,
    FairleadSubject,
    Subject,
    announce_lab,
    direct_frr_lab,
    direct_lab,
    metallb_lab,
    ways_of,
)
from bench.callers import Callers
from bench.metallb import find
from bench.options import options, progress, run_benchmark
from bench.resilient import resilient

from fairlead.cli.interrupt import run
from fairlead.cli.output import draw
from fairlead.errors import Conflict, Unavailable

SYSTEMS: Mapping[str, Callable[[str], AbstractAsyncContextManager[Subject]]] = {
    "direct": direct_lab,
    "direct-frr": direct_frr_lab,
    "announce": announce_lab,
    "metallb": metallb_lab,
}
SILENT, KILLED, ENDED = "machine silent", "process killed", "process ended"
HANDED_OVER = "handed over"
Rounds = tuple[Mapping[str, Mapping[str, Effect]], ...]
EVENTS = (SILENT, KILLED, ENDED, HANDED_OVER)
BACK = "back"
BACK_WATCH_S = 3.0
RATE_S = 3
SETTLE_S = 5.0
"""How long the second half waits for the end of the first half's effect."""


class Load(NamedTuple):
    """The callers of each address."""

    open_connections: int = 1000
    flows: int = 16
    calls_per_s: float = 100


CHANGE_LOAD = Load(open_connections=2000, flows=4, calls_per_s=50)
PARTS = ("idle", "created", "shares", "rates", "events", "changes", "many")


class Sizes(NamedTuple):
    """How much to measure: rounds of events and of changes of ECMP, Services whose first answer is
    timed, connections of a burst, addresses, and seconds of an idle system."""

    rounds: int
    load: Load = Load()
    change_rounds: int = 1
    created: int = 10
    connections: int = 20_000
    addresses: int = 1000
    rate_rounds: int = 3
    idle_s: float = 10.0


QUICK = Sizes(
    1, Load(100, 4, 50), created=2, connections=2000, addresses=100, rate_rounds=1, idle_s=2.0
)


async def observe(
    subject: Subject, event: str, number: int, load: Load, ways: Collection[str] = ()
) -> Mapping[str, Mapping[str, Effect]]:
    """Cause an event and undo it. Return the effect of both halves on each of these ways, by
    default on all."""
    host, addresses = await subject.target(number)
    addresses = {way: each for way, each in addresses.items() if not ways or way in ways}
    cause, undo = {
        SILENT: (subject.silence, subject.restore),
        KILLED: (subject.kill, subject.start),
        ENDED: (subject.stop, subject.start),
        HANDED_OVER: (subject.hand_over, subject.start),
    }[event]
    halves = ((event, cause, subject.watch_s), (f"{event}, {BACK}", undo, BACK_WATCH_S))
    effects: dict[str, Mapping[str, Effect]] = {}
    async with AsyncExitStack() as stack:
        callers = {
            way: await stack.enter_async_context(
                Callers(
                    subject.site,
                    address,
                    open_connections=load.open_connections,
                    flows=load.flows,
                    calls_per_s=load.calls_per_s,
                )
            )
            for way, address in addresses.items()
        }
        for name, action, watch_s in halves:
            settled = (each.settled(within_s=SETTLE_S) for each in callers.values())
            await asyncio.gather(*settled)
            await action(host)
            await asyncio.sleep(watch_s)
            taken = await asyncio.gather(*(each.take() for each in callers.values()))
            effects[name] = {
                way: msgspec.structs.replace(effect, host=host, pods=PLACEMENT.count(host))
                for way, effect in zip(callers, taken, strict=True)
            }
    return effects


class Bench:
    """One run with several labs, which are all up. `sizes`: how much to measure."""

    def __init__(self, subjects: Mapping[str, Subject], sizes: Sizes) -> None:
        self._subjects = subjects
        self._sizes = sizes

    async def events(
        self, events: Collection[str]
    ) -> tuple[Mapping[str, Mapping[str, Effect]], ...]:
        """Measure these events in all labs in turn, round after round."""
        done = []
        for number in range(self._sizes.rounds):
            effects: dict[str, dict[str, Effect]] = {}
            for event in events:
                for name, subject in self._subjects.items():
                    progress(f"round {number + 1} of {self._sizes.rounds}: {name}: {event}")
                    _merge(effects, await self._observed(subject, event, number, self._sizes.load))
            done.append(effects)
        return tuple(done)

    async def changes(self) -> Rounds:
        """Measure the loss and the return of one of several next hops, with the routes of the
        routing daemon and with resilient groups."""
        done = []
        for number in range(self._sizes.change_rounds):
            effects: dict[str, dict[str, Effect]] = {}
            for name, subject in self._subjects.items():
                for way in ways_of(subject, "bgp"):
                    progress(f"changes of ECMP, {number + 1}: {name}: {way}")
                    found = await self._observed(subject, SILENT, number, CHANGE_LOAD, (way,))
                    _merge(effects, _renamed(found, "plain"))
                    async with resilient(subject.site, subject.addresses[way][0]):
                        found = await self._observed(subject, SILENT, number, CHANGE_LOAD, (way,))
                    _merge(effects, _renamed(found, "resilient"))
            done.append(effects)
        return tuple(done)

    async def _observed(
        self,
        subject: Subject,
        event: str,
        number: int,
        load: Load,
        ways: Collection[str] = (),
    ) -> Mapping[str, Mapping[str, Effect]]:
        """Observe an event. A failure is reported, and the event is left out: it would discard all
        previous rounds."""
        try:
            return await observe(subject, event, number, load, ways)
        except (Unavailable, Conflict) as error:
            progress(f"{error}; left out")
            await subject.repair()
            return {}

    async def created_ms(self) -> Mapping[str, list[float]]:
        """Measure the time to the first answer of a new Service."""
        found: dict[str, list[float]] = {}
        for number in range(self._sizes.created):
            for subject in self._subjects.values():
                for way in subject.addresses:
                    progress(f"first answer, {number + 1} of {self._sizes.created}: {way}")
                    found.setdefault(way, []).append(await first_answer_ms(subject, way, number))
        return found

    async def shares(self) -> Mapping[str, Share]:
        """Measure how connections are distributed over the pods."""
        found = {}
        for subject in self._subjects.values():
            for way in subject.addresses:
                progress(f"{self._sizes.connections} connections: {way}")
                found[way] = await share(subject, way, self._sizes.connections)
        return found

    async def rates(self) -> tuple[Rates, ...]:
        """Measure the rates of class announce."""
        for subject in self._subjects.values():
            if isinstance(subject, FairleadSubject) and ANNOUNCE_BGP in subject.addresses:
                return await rates(subject, self._sizes.rate_rounds, RATE_S)
        return ()

    async def many(self) -> Mapping[str, Many]:
        """Measure the time until many new addresses are reached."""
        found = {}
        for subject in self._subjects.values():
            for way in subject.addresses:
                progress(f"{self._sizes.addresses} addresses: {way}")
                found[way] = await many(subject, way, self._sizes.addresses, self._sizes.idle_s)
        return found

    async def idle(self) -> Mapping[str, Idle]:
        """Measure the cost of the systems while nothing happens."""
        found = {}
        for name, subject in self._subjects.items():
            progress(f"idle: {name}")
            found[name] = await idle(subject, self._sizes.idle_s)
        return found


def _merge(effects: dict[str, dict[str, Effect]], more: Mapping[str, Mapping[str, Effect]]) -> None:
    for event, found in more.items():
        effects.setdefault(event, {}).update(found)


def _renamed(
    effects: Mapping[str, Mapping[str, Effect]], routes: str
) -> Mapping[str, Mapping[str, Effect]]:
    names = "next hop lost", "next hop back"
    return {
        f"{name}, {routes}": effect
        for name, effect in zip(names, effects.values(), strict=False)  # empty if it failed
    }


async def measure(
    sizes: Sizes,
    *,
    systems: Collection[str] = tuple(SYSTEMS),
    parts: Collection[str] = PARTS,
    events: Collection[str] = EVENTS,
) -> Report:
    """Build a lab for each system, and measure in all of them in turn. Remove the labs."""
    async with AsyncExitStack() as stack:
        subjects: dict[str, Subject] = {}
        for name in systems:
            progress(f"a lab with {name}")
            lab = SYSTEMS[name](f"ann{os.getpid()}x{len(subjects)}")
            subjects[name] = await stack.enter_async_context(lab)
        bench = Bench(subjects, sizes)
        return Report(
            idle=await bench.idle() if "idle" in parts else {},
            created_ms=await bench.created_ms() if "created" in parts else {},
            shares=await bench.shares() if "shares" in parts else {},
            rates=await bench.rates() if "rates" in parts else (),
            events=await bench.events(events) if "events" in parts else (),
            changes=await bench.changes() if "changes" in parts else (),
            many=await bench.many() if "many" in parts else {},
        )


def show(report: Report) -> None:
    """Print the report as tables."""
    for rounds in (report.events, report.changes):
        if rounds:
            draw(EVENT_HEADINGS, event_rows(rounds))
            print()
    if report.shares:
        draw(SHARE_HEADINGS, share_rows(report.shares))
        print()
    if report.rates:
        draw(RATE_HEADINGS, rate_rows(report.rates))
        print()
    if rows := cost_rows(report):
        draw(COST_HEADINGS, rows)


def main() -> None:
    parser = options(
        "bench.announce", __doc__, rounds=2, quick="one round, and few of everything", plots=False
    )
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=tuple(SYSTEMS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=EVENTS)
    arguments = parser.parse_args()
    if "metallb" in arguments.systems:
        find()
    sizes = QUICK if arguments.quick else Sizes(rounds=arguments.rounds)

    def measured() -> Report:
        return run(
            measure(
                sizes,
                systems=arguments.systems,
                parts=arguments.parts,
                events=arguments.events,
            )
        )

    run_benchmark(arguments, measured, show)


if __name__ == "__main__":
    main()
