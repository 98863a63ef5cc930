"""The driver of class fairlead.io/proxy: one HAProxy for all Services of a gateway.

In: LoadBalancers. Out: a HAProxy that listens for them. Serving does not depend on this process:
when it dies HAProxy goes on, and its successor reads from it what it does. When HAProxy dies, it is
started anew with everything. Members come, go, drain and change their weights in the running
process, source ranges too. What only another configuration can change is brought by a reload, for
all Services that wait for one together, and seldom: a worker that is replaced stays for as long as
its last connection. Invariant: the state kept here is what HAProxy was last told, or has shown; an
address is this host's own (by a local route) from before its first listener until after its last,
and leads to its listeners alone (`shield`). Members are probed by Fairlead alone
(`drivers/monitor.py`), once for all Services of a node, as for class direct; HAProxy asks them too
where a Service wants that. Without this process a member that does not take a connection is passed
over."""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from fairlead.drivers import Component, LookAgain, never_again
from fairlead.drivers.proxy import members, removal, runtime, shield, spec, workers
from fairlead.drivers.proxy.counters import COLUMNS, ProxyCounters, traffic_of
from fairlead.drivers.proxy.drains import Drains
from fairlead.drivers.proxy.metrics import ProxyCollector
from fairlead.drivers.proxy.process import Haproxy
from fairlead.drivers.proxy.render import lists_of, render, section_name, sections_of, service_of
from fairlead.drivers.proxy.spec import (
    ProxyChange,
    ProxySpec,
    RemoveListener,
    Served,
    Server,
    SetDrain,
    SetListener,
    SetRanges,
    TellCut,
)
from fairlead.errors import FairleadError, Unavailable
from fairlead.model import DONE, Finding, LoadBalancer, Outcome, ServiceKey
from fairlead.net import localroutes
from fairlead.plan.proxying import ended
from fairlead.plan.proxying import switched as switched_note
from fairlead.role_state import ProxiedTraffic, ProxyState, WorkerState

log = structlog.get_logger()

RELOAD_PAUSE_S = 1.0
"""What changes within this time comes with one reload."""
LOOK_S = 5.0
"""Counters are read so often, and ended what has drained for too long."""
REMOVE_S = 60.0
"""Servers whose last connection has ended are removed so often: HAProxy tells all connections for
it, 10,000 in 80 ms."""


class ProxyDriver(Component):
    """Implements fairlead.drivers.Driver.

    folder: for HAProxy's configuration and sockets, of this instance alone; its path has 80
    characters at most, for sockets. look_again: for Services that HAProxy could not be started with
    after it had died, or of which there is something to tell. drain_s: so long a server keeps
    connections after it has ceased to get new ones, unless the Service says otherwise; 0: as long
    as they last. old_workers: so many of before a reload may go on with their connections; 0: any
    number. reload_pause_s: between two reloads at least."""

    name = "proxy"

    def __init__(
        self,
        folder: Path,
        *,
        look_again: LookAgain = never_again,
        drain_s: float = 0.0,
        old_workers: int = 0,
        reload_pause_s: float = RELOAD_PAUSE_S,
    ) -> None:
        self._drain_s = drain_s
        self._old_workers = old_workers
        self._drains = Drains()
        self._reload_pause_s = reload_pause_s
        self.haproxy = Haproxy(folder)
        self.counters = ProxyCounters()
        self.reloads = 0
        """Configurations that were brought into force, starts among them."""
        self._cut: Counter[ServiceKey] = Counter()
        """Connections that ended because there were too many old workers, until the next pass over
        the Service tells of them."""
        self._look_again = look_again
        self._specs: dict[ServiceKey, ProxySpec] = {}
        self._leaving: set[tuple[str, str]] = set()
        self._reloaded_s = float("-inf")
        self._removed_s = float("-inf")
        self._changing = asyncio.Lock()

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, ProxySpec]:
        """Pure."""
        return spec.specs_of(intents, self._drain_s)

    def diff(
        self, desired: Mapping[ServiceKey, ProxySpec], actual: Mapping[ServiceKey, ProxySpec]
    ) -> Sequence[ProxyChange]:
        """Pure."""
        return spec.diff(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, ProxySpec]:
        """What HAProxy does. With keys, what it was told."""
        if keys is not None:
            return {
                key: msgspec.structs.replace(self._specs[key], cut=self._cut[key])
                for key in keys
                if key in self._specs
            }
        async with self._changing:
            found = await self._found()
            if found or not self.haproxy.alive():
                self._adopt(found)
                await self._keep_ways()
            # Else it lives and does not say what it does: it goes on by what it was told, or is set
            # anew as a whole.
            return dict(self._specs)

    async def _keep_ways(self) -> None:
        """Have the routes and the shield that belong to what is there, whoever changed them."""
        wanted, there = self._addresses(self._specs), await localroutes.present()
        if wanted or there:
            self._shield(self._specs)
        await localroutes.add(wanted - there)
        await localroutes.delete(there - wanted)

    async def apply(self, changes: Sequence[ProxyChange]) -> Mapping[ServiceKey, Outcome]:
        """Carry the changes out. A Service waits if its listeners need a reload and there has just
        been one. Raises Refused for a configuration that HAProxy does not take; it goes on as
        before then."""
        async with self._changing:
            telling = [change for change in changes if isinstance(change, TellCut)]
            outcomes = await self._apply(
                [change for change in changes if not isinstance(change, TellCut)]
            )
            for change in telling:
                self._cut -= Counter({change.service: change.connections})
                note = ended(change.connections, self._old_workers)
                outcomes = _with_note(outcomes, change.service, note)
            # HAProxy goes on with the listeners that such a Service had before.
            return {
                key: each
                if each.state == "done"
                else msgspec.structs.replace(each, in_part=key in self._specs)
                for key, each in outcomes.items()
            }

    async def _apply(self, changes: Sequence[ProxyChange]) -> Mapping[ServiceKey, Outcome]:
        outcomes: dict[ServiceKey, Outcome] = {}
        if spec.needs_reload(changes):
            if (left_s := self._reloaded_s + self._reload_pause_s - self._now_s()) <= 0:
                return await self._reload(changes)
            waiting = {
                change.service
                for change in changes
                if isinstance(change, SetListener | RemoveListener)
            }
            outcomes = dict.fromkeys(
                waiting, Outcome("waiting", "HAProxy has just been reloaded", again_s=left_s)
            )
        live = [
            change for change in changes if not isinstance(change, SetListener | RemoveListener)
        ]
        return outcomes | await self._tell(live)

    async def run(self) -> None:
        """Keep counters, remove servers that have emptied, and notice when HAProxy dies, until
        cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await (self.haproxy.died() if self._specs else asyncio.sleep(LOOK_S))
            async with self._changing:
                if self._specs and not await self.haproxy.running():
                    await self._restart()
                else:
                    await self._look()
                    if self._now_s() >= self._removed_s + REMOVE_S:
                        await self._remove_servers()
            await asyncio.sleep(0.1)

    async def _restart(self) -> None:
        log.error("HAProxy has died; it is started anew", services=len(self._specs))
        self.counters.died()
        self._leaving = set()
        try:
            await self.haproxy.run(render(self._specs, self.haproxy.paths))
            self.reloads += 1
        except FairleadError as error:
            log.error("HAProxy could not be started anew", problem=str(error))
            lost, self._specs = set(self._specs), {}
            self._look_again(lost)

    async def look(self) -> None:
        """Do now what `run` does now and then."""
        async with self._changing:
            await self._look()
            await self._remove_servers()

    async def remove(self) -> Sequence[str]:
        """Take everything away: HAProxy, with its connections, its folder, the routes, the
        shield."""
        async with self._changing:
            self._specs = {}
            gone = await removal.remove(self.haproxy, localroutes.PROTOCOL, shield.TABLE)
            return ("the balancer of class fairlead.io/proxy",) if gone else ()

    def status(self) -> ProxyState:
        """For `/state`. May be called from any thread."""
        return ProxyState(
            {
                str(key): ProxiedTraffic(*traffic)
                for key, traffic in self.counters.services().items()
            },
            WorkerState(*self.counters.worker),
        )

    def collectors(self) -> tuple[ProxyCollector]:
        return (ProxyCollector(self.counters),)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    @staticmethod
    def _shield(*states: Mapping[ServiceKey, ProxySpec]) -> None:
        """Have the shield for the listeners of all of these."""
        listeners = [
            each.listener for specs in states for one in specs.values() for each in one.listeners
        ]
        shared = {each.key.address for each in listeners if each.settings.shared}
        shield.put({each.key for each in listeners}, shared=shared)

    @staticmethod
    def _addresses(specs: Mapping[ServiceKey, ProxySpec]) -> set[str]:
        return {each.listener.key.address for one in specs.values() for each in one.listeners}

    def _adopt(self, specs: dict[ServiceKey, ProxySpec]) -> None:
        """This is there from now on."""
        self._drains.settle(self._specs, specs, self._now_s())
        self._specs = specs

    async def _found(self) -> dict[ServiceKey, ProxySpec]:
        """What the HAProxy that runs does: by the file, if it runs by it, and by its own word. What
        cannot be said of it is left out, and so set anew."""
        if not await self.haproxy.running() or not await self.haproxy.runs(
            text := self.haproxy.text()
        ):
            return {}
        shown: dict[str, list[Server]] = {}
        for each in await runtime.servers(self.haproxy.worker):
            if not each.out:
                shown.setdefault(each.section, []).append(
                    Server(each.node, each.address, each.port, each.weight)
                )
        specs: dict[ServiceKey, ProxySpec] = {}
        for section in sections_of(text):
            service = ServiceKey(section.namespace, section.name)
            servers = shown.get(section_name(service, section.listener.key), [])
            drain_s = self._specs[service].drain_s if service in self._specs else 0.0
            one = specs.get(service, ProxySpec(section.uid, (), self._ranges(service), drain_s))
            listeners = tuple(
                sorted([*one.listeners, Served(section.listener, tuple(sorted(servers)))])
            )
            specs[service] = ProxySpec(section.uid, listeners, one.source_ranges, one.drain_s)
        return specs

    def _ranges(self, service: ServiceKey) -> tuple[str, ...]:
        with suppress(FileNotFoundError):
            return tuple(Path(self.haproxy.paths.ranges(service)).read_text().split())
        return ()

    def _write_ranges(self, service: ServiceKey, cidrs: Sequence[str]) -> None:
        path = Path(self.haproxy.paths.ranges(service))
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(f"{cidr}\n" for cidr in cidrs))
        fresh.replace(path)

    def _drop_ranges(self, service: ServiceKey) -> None:
        Path(self.haproxy.paths.ranges(service)).unlink(missing_ok=True)

    async def _reload(self, changes: Sequence[ProxyChange]) -> Mapping[ServiceKey, Outcome]:
        wanted = spec.after(self._specs, changes)
        rivals = spec.rivals(wanted, self._specs)
        if rivals:
            wanted = spec.after(
                self._specs, [change for change in changes if change.service not in rivals]
            )
        self.haproxy.make_folder()
        for service, one in wanted.items():
            if any(
                each.listener.restricted for each in one.listeners
            ) and one.source_ranges != self._ranges(service):
                self._write_ranges(service, one.source_ranges)
        before, after = self._addresses(self._specs), self._addresses(wanted)
        self._shield(self._specs, wanted)
        await localroutes.add(after - before)
        if wanted:
            await self._look()
            await self.haproxy.run(render(wanted, self.haproxy.paths))
            self.reloads += 1
        else:
            await self.haproxy.stop()
        if before:
            # Where nothing was served before there is no old worker to spare, and others are about
            # to be set up too.
            self._reloaded_s = self._now_s()
        self.counters.worker_ended()
        self.counters.keep(wanted)
        self._cut = Counter({key: self._cut[key] for key in self._cut.keys() & wanted.keys()})
        await localroutes.delete(before - after)
        if before:
            self._shield(wanted)
        for service in self._specs.keys() - wanted.keys():
            self._drop_ranges(service)
        switched = spec.switches(self._specs, wanted)
        self._adopt(wanted)
        self._leaving = set()
        outcomes = {
            service: Outcome(
                "unavailable", f"Service {owner} listens on one of its addresses and ports"
            )
            for service, owner in rivals.items()
        }
        for service, headers in switched.items():
            outcomes = _with_note(outcomes, service, switched_note(*headers))
        return outcomes

    async def _tell(self, changes: Sequence[ProxyChange]) -> dict[ServiceKey, Outcome]:
        """Carry out what the running process can do. What fails is tried again, by what is there
        then."""
        outcomes: dict[ServiceKey, Outcome] = {}
        if not changes:
            return outcomes
        try:
            await self._set_ranges([change for change in changes if isinstance(change, SetRanges)])
            setting = [change for change in changes if isinstance(change, spec.SetServers)]
            if setting:
                self._leaving |= await members.set_servers(
                    self.haproxy.worker, setting, self._specs
                )
                self._adopt(spec.after(self._specs, setting))
            self._adopt(
                spec.after(
                    self._specs, [change for change in changes if isinstance(change, SetDrain)]
                )
            )
        except Unavailable as error:
            with suppress(FairleadError):
                self._adopt(await self._found() or self._specs)
            outcomes = dict.fromkeys(
                {change.service for change in changes}, Outcome("unavailable", str(error))
            )
        return outcomes

    async def _set_ranges(self, changes: Sequence[SetRanges]) -> None:
        """Which list is whose, the worker says by lines of the text that it runs by."""
        if not changes:
            return
        text = self.haproxy.text()
        if not await self.haproxy.runs(text):
            raise Unavailable("HAProxy does not run by its newest configuration")
        numbers, lines = await runtime.lists(self.haproxy.worker), lists_of(text)
        if unknown := [line for each in lines.values() for line in each if line not in numbers]:
            raise Unavailable(
                f"HAProxy does not show the list of line {unknown[0]} of its configuration"
            )
        for change in changes:
            names = [
                section_name(change.service, each.listener.key)
                for each in self._specs[change.service].listeners
            ]
            own = [[numbers[line] for line in lines.get(name, ())] for name in names]
            file = self.haproxy.paths.ranges(change.service)
            await runtime.replace_ranges(self.haproxy.worker, own, file, change.cidrs)
            self._write_ranges(change.service, change.cidrs)
            self._specs = spec.after(self._specs, [change])

    async def _look(self) -> None:
        """Take counters, end what has drained for too long and old workers that are too many."""
        if not self._specs:
            return
        sections = {
            section_name(service, each.listener.key): service
            for service, one in self._specs.items()
            for each in one.listeners
        }
        with suppress(Unavailable):
            await self._count(sections)
            if expired := self._drains.expired(self._specs, self._now_s()):
                await members.end_connections(self.haproxy.master, set(expired))
            self._tell_cut(await workers.end_oldest(self.haproxy, self._old_workers), sections)

    async def _count(self, sections: Mapping[str, ServiceKey]) -> None:
        """Take counters, unless another worker answers than the one that runs."""
        found, _ = await runtime.workers(self.haproxy.master)
        worker, rows = await runtime.totals(self.haproxy.worker, COLUMNS)
        if worker.pid not in [each.pid for each in found if not each.old]:
            return
        elsewhere: Counter[ServiceKey] = Counter()
        for old in (each.pid for each in found if each.old):
            with suppress(Unavailable):  # it ends by itself just now
                for section, count in (
                    await runtime.open_connections(self.haproxy.master, old)
                ).items():
                    elsewhere[service_of(section)] += count
        self.counters.take(
            traffic_of(rows, sections),
            worker,
            {service: elsewhere[service] for service in self._specs},
        )

    async def _remove_servers(self) -> None:
        """Those whose last connection has ended."""
        self._removed_s = self._now_s()
        with suppress(Unavailable):
            self._leaving = await members.remove(self.haproxy.worker, self._leaving)

    def _tell_cut(self, connections: Mapping[str, int], sections: Mapping[str, ServiceKey]) -> None:
        if not connections:
            return
        log.warning(
            "the oldest workers of before a reload were ended, there were too many",
            connections=sum(connections.values()),
            most=self._old_workers,
        )
        by_service: Counter[ServiceKey] = Counter()
        for section, count in connections.items():
            if section in sections:
                by_service[sections[section]] += count
        self._cut.update(by_service)
        self._look_again(by_service)


def _with_note(
    outcomes: Mapping[ServiceKey, Outcome], service: ServiceKey, note: Finding
) -> dict[ServiceKey, Outcome]:
    told = outcomes.get(service, DONE).joined(Outcome("done", notes=(note,)))
    return {**outcomes, service: told}
