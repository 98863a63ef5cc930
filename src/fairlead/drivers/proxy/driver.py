"""The driver of class fairlead.io/proxy: one HAProxy for all Services of a gateway.

In: LoadBalancers. Out: a HAProxy that listens for them.

Serving does not depend on this process. When it ends HAProxy continues, and the next process reads
HAProxy's state. When HAProxy dies, it is restarted with all Services. Members, weights, draining
and source ranges are changed in the running HAProxy, and listeners are removed there. Everything
else needs a new configuration and a reload. Services that need a reload share one, and reloads are
limited in frequency, and for each namespace (`reloads`), because an old worker stays until its last
connection ends.

Members are probed by Fairlead alone (`drivers/monitor.py`), once for all Services of a node, as for
class direct; HAProxy also probes them if a Service requests it. While this process does not run,
HAProxy still passes over a member that refuses a connection.

Invariants: the state kept here is what HAProxy was last given or last showed. An address is local
to this host (by a local route) from before its first listener exists until after its last one is
gone, and leads to its listeners alone (`shield`)."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import msgspec
import structlog

from fairlead.drivers import Component, Requeue, no_requeue
from fairlead.drivers.proxy import members, removal, runtime, shield, spec, workers
from fairlead.drivers.proxy.conflicts import Conflicts
from fairlead.drivers.proxy.counters import (
    COLUMNS,
    ProxyCounters,
    ProxyTraffic,
    full_of,
    traffic_of,
)
from fairlead.drivers.proxy.drains import Drains
from fairlead.drivers.proxy.metrics import ProxyCollector
from fairlead.drivers.proxy.process import Haproxy
from fairlead.drivers.proxy.reloads import Reloads
from fairlead.drivers.proxy.render import acl_lines, render, section_name, sections_of
from fairlead.drivers.proxy.shares import NO_SHARES, Shares
from fairlead.drivers.proxy.spec import (
    FullBy,
    ProxyChange,
    ProxyKey,
    ProxyListener,
    ProxySpec,
    RemoveListener,
    ReportClosed,
    ReportFull,
    Served,
    Server,
    SetDrain,
    SetRanges,
)
from fairlead.errors import FairleadError, Unavailable
from fairlead.kube.networks import read_address
from fairlead.model import DONE, Finding, LoadBalancer, Outcome, ServiceKey
from fairlead.net import localroutes
from fairlead.net.nfnetlink import RulesetChanges
from fairlead.plan.proxying import PROXY, connections_limited, ended, limit_capped, reload_delayed
from fairlead.plan.proxying import switched as switched_note
from fairlead.role_state import ProxiedTraffic, ProxyState, WorkerState

log = structlog.get_logger()

RELOAD_PAUSE_S = 1.0
"""Minimum time between two reloads. Changes within this time share a reload."""
PAUSES_AFTER_BURST = 10
"""The number of these times between two reloads of a namespace that has used up its burst."""
GATHER_S = 0.5
"""The delay of a reload that changes which have waited for longer are to share."""
POLL_INTERVAL_S = 5.0
"""Interval at which counters are read, and connections of drained servers past their time are
closed."""
CHECK_INTERVAL_S = 2.0
"""Interval at which the driver checks whether another program has changed nftables rules."""
NOT_ANSWERING = "ProxyNotAnswering"
HANGING_CHECKS = 2
"""The number of checks in a row without an answer after which the worker counts as one that hangs.
A process of the gateway that was itself stopped for a moment finds one answer late."""
FOLLOW_PAUSE_S = 0.05
"""Pause after removed routes were added again. Removals in this time are handled together."""
DELETE_INTERVAL_S = 60.0
"""Interval at which servers without connections are deleted. This requires a list of all
connections from HAProxy, which takes 80 ms for 10,000."""


class ProxyDriver(Component):
    """Driver of the HAProxy of class fairlead.io/proxy.

    - `folder`: for HAProxy's configuration and sockets; no other instance may use it. Its path has
      at most 80 characters, because the paths of sockets are limited.
    - `requeue`: called with the Services that are no longer served because restarting HAProxy
      failed, or that have something to report.
    - `drain_s`: how long a server keeps its connections after it stopped getting new ones, unless
      the Service sets its own limit; 0: until they end.
    - `old_workers`: maximum number of old workers that may keep their connections after reloads; 0:
      no limit.
    - `belongs_to_host`: whether a host of the cluster has the address: this driver never makes it
      local. The plan contains no such address, but HAProxy may still have it from an earlier
      process.
    - `finds_conflicts`: whether other stations are looked for that have an address of a Service.
    - `reload_pause_s`: minimum time between two reloads.
    - `shares`: the shares of namespaces and Services in HAProxy's connections."""

    name = "proxy"
    problem_class = PROXY

    def __init__(
        self,
        folder: Path,
        *,
        requeue: Requeue = no_requeue,
        drain_s: float = 0.0,
        old_workers: int = 0,
        belongs_to_host: Callable[[str], bool] = lambda _address: False,
        finds_conflicts: bool = False,
        reload_pause_s: float = RELOAD_PAUSE_S,
        shares: Shares = NO_SHARES,
    ) -> None:
        self._drain_s = drain_s
        self._old_workers = old_workers
        self._belongs_to_host = belongs_to_host
        self._reloads = Reloads(old_workers, PAUSES_AFTER_BURST * reload_pause_s)
        self._drains = Drains()
        self.conflicts = Conflicts(lambda: self._local(self._specs))
        self._finds_conflicts = finds_conflicts
        self._reload_pause_s = reload_pause_s
        self.haproxy = Haproxy(folder)
        self.counters = ProxyCounters()
        self.reloads = 0
        """Number of configurations that took effect, by a reload or a start."""
        self._closed: Counter[ServiceKey] = Counter()
        """Connections that were closed because there were too many old workers, until the Service's
        next pass reports them."""
        self._shares = shares
        self._full: dict[ServiceKey, FullBy] = {}
        """The limits that Services had reached when the counters were last read."""
        self._unreported: dict[ServiceKey, FullBy] = {}
        """Those of them that the Service's next pass reports."""
        self._requeue = requeue
        self._specs: dict[ServiceKey, ProxySpec] = {}
        self._leaving: set[tuple[str, str]] = set()
        """Servers in maintenance, as (section, node), that remain to be deleted."""
        self._reloaded_s = float("-inf")
        self._gathering = False
        """Whether the next pass has all changes that wait, so that their reload can take place."""
        self._removed_s = float("-inf")
        self._hanging = ""
        """What is wrong with a worker that hangs; empty: it answers."""
        self._changing = asyncio.Lock()

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, ProxySpec]:
        """See `spec.specs_of`."""
        return spec.specs_of(intents, self._drain_s)

    def diff(
        self, desired: Mapping[ServiceKey, ProxySpec], actual: Mapping[ServiceKey, ProxySpec]
    ) -> Sequence[ProxyChange]:
        """See `spec.diff`."""
        return spec.diff(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, ProxySpec]:
        """Return what HAProxy serves, as it shows it. With keys, return what it was last given."""
        if keys is not None:
            return {
                key: msgspec.structs.replace(
                    self._specs[key],
                    closed=self._closed[key],
                    full=self._unreported.get(key, ""),
                )
                for key in keys
                if key in self._specs
            }
        async with self._changing:
            found = await self._found()
            if found or not self.haproxy.alive():
                self._adopt(found)
                await self._ensure_routes()
                if found and not self.reloads:
                    self._reloads.restore(self.haproxy.reload_record(), self._now_s())
                    await self._set_shares()
            # Otherwise HAProxy runs but does not show its configuration. Keep what it was last
            # given; if that is nothing, everything is set again.
            return dict(self._specs)

    async def _set_shares(self) -> None:
        """Reload a HAProxy of an earlier process whose configuration has other shares than this
        process, or none: they are part of it. Nobody's change is the cause."""
        if self._shares.are_in(self.haproxy.text()):
            return
        replaced = await self._current_worker()
        try:
            await self.haproxy.run(render(self._specs, self.haproxy.paths, self._shares))
        except FairleadError as error:
            log.warning("the shares of connections were not changed", problem=str(error))
            return
        self._record_reload(replaced, ())
        self._reloaded_s = self._now_s()
        self.counters.end_worker()
        log.info("HAProxy was reloaded with other shares of connections")

    def _record_reload(self, replaced: int, namespaces: Collection[str]) -> None:
        """Record that changes of these namespaces have made the worker `replaced` old; 0: there was
        none."""
        self.reloads += 1
        if replaced:
            self._reloads.record(replaced, namespaces, self._now_s())
            self.haproxy.write_reload_record(self._reloads.to_record())

    async def _ensure_routes(self) -> None:
        """Restore the routes and the shield of the present listeners, if another program changed
        them."""
        wanted, present = self._local(self._specs), await localroutes.present()
        if wanted or present:
            self._shield(self._specs)
        await self._add_missing(wanted - present)
        await localroutes.delete(present - wanted)

    async def _add_missing(self, missing: Collection[str]) -> None:
        if missing and self.reloads:
            log.warning(
                "another program has removed routes by which this gateway accepts addresses: they "
                "are added again",
                addresses=len(missing),
                first=min(missing),
            )
        await localroutes.add(missing)

    async def apply(self, changes: Sequence[ProxyChange]) -> Mapping[ServiceKey, Outcome]:
        """Carry out the changes. A Service waits if its listeners need a reload soon after the last
        one, or if its namespace may not cause a reload now. Raise Refused for a configuration that
        HAProxy does not accept; HAProxy then continues with the previous one."""
        async with self._changing:
            if self._hanging:
                # Services of other classes would wait for each answer that does not come.
                why = Outcome("unavailable", self._hanging)
                return dict.fromkeys((change.service for change in changes), why)
            reports = [each for each in changes if isinstance(each, ReportClosed | ReportFull)]
            outcomes = await self._apply([each for each in changes if each not in reports])
            for change in reports:
                service = change.service
                if isinstance(change, ReportFull):
                    self._unreported.pop(service, None)
                    note = connections_limited(service, by_share=change.full == "share")
                else:
                    self._closed -= Counter({service: change.connections})
                    note = ended(change.connections, self._old_workers)
                outcomes = _with_note(outcomes, service, note)
            # A Service that failed is still served in part if HAProxy had listeners for it before.
            return {
                key: each
                if each.state == "done"
                else msgspec.structs.replace(each, in_part=key in self._specs)
                for key, each in outcomes.items()
            }

    async def _apply(self, changes: Sequence[ProxyChange]) -> Mapping[ServiceKey, Outcome]:
        reloading = spec.needing_reload(changes, self._specs)
        services = {change.service for change in reloading}
        live = [change for change in changes if change not in reloading]
        waiting: dict[ServiceKey, Outcome] = {}
        if services and not (waiting := self._paused(services)):
            if not (waiting := self._blocked(services) or await self._delayed_outcomes(services)):
                return await self._reload(changes, services)
            # The wait is longer than the pause, and the plan may already have given the address and
            # port of a removed listener to another Service. HAProxy keeps its last listener.
            removals = [each for each in reloading if isinstance(each, RemoveListener)]
            if spec.after(self._specs, [*live, *removals]):
                live += removals
        return waiting | await self._apply_live(live)

    @property
    def _master_hanging(self) -> str:
        """What is wrong with a master that hangs; empty: it answers."""
        if not self.haproxy.master_hangs:
            return ""
        return (
            f"HAProxy's master (process {self.haproxy.master_pid() or 0}) does not answer: "
            "no listener of class fairlead.io/proxy is added or changed, and no drain time-out "
            "ends connections"
        )

    def _paused(self, services: Collection[ServiceKey]) -> dict[ServiceKey, Outcome]:
        """Return the outcomes of these Services, which need a reload, during the pause after the
        last one."""
        if (left_s := self._reloaded_s + self._reload_pause_s - self._now_s()) <= 0:
            return {}
        why = Outcome("waiting", "HAProxy has just been reloaded", again_s=left_s)
        return dict.fromkeys(services, why)

    def _blocked(self, services: Collection[ServiceKey]) -> dict[ServiceKey, Outcome]:
        """Return the outcomes of these Services, which need a reload, while the master hangs."""
        if not (why := self._master_hanging):
            return {}
        return dict.fromkeys(services, Outcome("unavailable", why))

    async def _delayed_outcomes(
        self, services: Collection[ServiceKey]
    ) -> dict[ServiceKey, Outcome]:
        """Return the outcomes of these Services, which need a reload, if none of their namespaces
        may cause it now. Otherwise it takes place with the changes of all of them."""
        now_s = self._now_s()
        waits = {each: self._reloads.wait_s(each.namespace, now_s) for each in services}
        if ready := {each.namespace for each, wait_s in waits.items() if not wait_s}:
            old = []
            with suppress(Unavailable):
                old = workers.by_namespace(await workers.connections(self.haproxy))
            if any(self._reloads.has_room(each, old, now_s) for each in ready):
                return self._gathered(services)
        new = self._reloads.begin_waits(services, now_s)
        outcomes = {}
        for service, wait_s in waits.items():
            note = reload_delayed(service.namespace, 0 if wait_s else self._old_workers)
            outcomes[service] = Outcome(
                "waiting",
                str(note),
                again_s=wait_s or POLL_INTERVAL_S,
                notes=(note,) if service in new else (),
            )
        return outcomes

    def _gathered(self, services: Collection[ServiceKey]) -> dict[ServiceKey, Outcome]:
        """Have the changes of all Services that wait share the reload that these may cause now: if
        some are not in this pass, return outcomes that postpone it to the next one, once."""
        others = self._reloads.waiting(self._now_s()) - set(services)
        self._gathering = bool(others) and not self._gathering
        if not self._gathering:
            return {}
        self._requeue({*others, *services})
        why = Outcome("waiting", "all changes that wait are applied together", again_s=GATHER_S)
        return dict.fromkeys(services, why)

    async def run(self) -> None:
        """Until cancelled: read counters, delete servers without connections, restart HAProxy when
        it dies, notice when it hangs, and restore routes and the shield when another program
        removes them."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_routes())
            group.create_task(self._keep_shield())
            group.create_task(self._keep_running())
            group.create_task(self._watch_worker())
            group.create_task(self._watch_master())
            if self._finds_conflicts:
                group.create_task(self.conflicts.run())

    async def _keep_routes(self) -> None:
        with closing(localroutes.removals()) as removals:
            while True:
                began_s = self._now_s()
                async with self._changing:
                    try:
                        wanted = self._local(self._specs)
                        await self._add_missing(wanted - await localroutes.present())
                    except FairleadError as error:
                        log.warning("adding removed routes again failed", problem=str(error))
                # If another program keeps undoing this, leave most of the time for other work.
                await asyncio.sleep(max(FOLLOW_PAUSE_S, 5 * (self._now_s() - began_s)))
                await removals.next()

    async def _keep_shield(self) -> None:
        with closing(RulesetChanges()) as changes:
            while True:
                await asyncio.sleep(CHECK_INTERVAL_S)
                async with self._changing:
                    try:
                        # A gateway without such Services needs no nftables.
                        if self._local(self._specs) and changes.seen() and not shield.is_present():
                            log.warning(
                                "another program has removed rules that shield other ports of "
                                "this gateway's addresses: they are created again"
                            )
                            self._shield(self._specs)
                    except FairleadError as error:
                        log.warning("creating the shield again failed", problem=str(error))

    async def _keep_running(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await (self.haproxy.exited() if self._specs else asyncio.sleep(POLL_INTERVAL_S))
            async with self._changing:
                if self._specs and not await self.haproxy.running():
                    # A master that does not answer has a worker that still serves.
                    if not self.haproxy.alive():
                        await self._restart()
                    elif self.haproxy.master_hangs and not self._hanging:
                        with suppress(Unavailable):
                            await self._count()
                        await self._remove_servers_when_due()
                elif not self._hanging:
                    await self._poll()
                    await self._remove_servers_when_due()
            await asyncio.sleep(0.1)

    async def _watch_worker(self) -> None:
        """Find out whether the worker answers. Its end does not show this, and the kernel goes on
        accepting connections for a process that is stopped."""
        missed = 0
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            # Also one of an earlier process, which does not show what it serves.
            hangs = self.haproxy.alive() and await self.haproxy.hangs()
            missed = missed + 1 if hangs else 0
            if self._hanging and not hangs:
                log.info("HAProxy answers again")
                self._hanging = ""
            elif not self._hanging and missed == HANGING_CHECKS:
                # A master that is frozen too does not name its worker.
                worker = await self._current_worker()
                which = (
                    f"worker (process {worker})"
                    if worker
                    else f"worker, of the master with process id {self.haproxy.master_pid() or 0},"
                )
                self._hanging = (
                    f"HAProxy's {which} does not answer: "
                    "no Service of class fairlead.io/proxy is served"
                )
                log.error(self._hanging)

    async def _watch_master(self) -> None:
        """Find out whether the master answers. Each change would wait for it."""
        missed = 0
        while True:
            master = self.haproxy.master_pid()
            await asyncio.sleep(CHECK_INTERVAL_S)
            # It does not answer during a reload. While it hangs there is none.
            async with nullcontext() if self.haproxy.master_hangs else self._changing:
                hangs = await self.haproxy.check_master()
            if self.haproxy.master_pid() != master:
                missed = 0  # this was, at least in part, about another one
                continue
            missed = missed + 1 if hangs else 0
            if self.haproxy.master_hangs and not hangs:
                log.info("HAProxy's master answers again")
                self.haproxy.master_hangs = False
            elif not self.haproxy.master_hangs and missed >= HANGING_CHECKS:
                self.haproxy.master_hangs = True
                log.error(self._master_hanging)

    def findings(self) -> Sequence[Finding]:
        stopped = (
            "see whether the process is stopped (state T in `ps`): continue it with `kill -CONT`"
        )
        if hanging := self._hanging:
            remedy = f"{stopped}, or end it with `kill -KILL`, and the gateway starts HAProxy again"
            return (Finding(NOT_ANSWERING, hanging, "error", remedy=remedy, blocks="Ready"),)
        if hanging := self._master_hanging:
            # The worker serves what it has.
            remedy = (
                f"{stopped}. Its end breaks all connections of class fairlead.io/proxy, because it "
                "ends the workers too; the gateway then starts HAProxy again"
            )
            return (Finding(NOT_ANSWERING, hanging, "error", remedy=remedy),)
        return ()

    async def _restart(self) -> None:
        log.error("HAProxy ended unexpectedly and is restarted", services=len(self._specs))
        self.counters.record_unexpected_exit()
        self._leaving = set()
        try:
            await self.haproxy.run(render(self._specs, self.haproxy.paths, self._shares))
            self.reloads += 1
        except FairleadError as error:
            log.error("restarting HAProxy failed", problem=str(error))
            lost, self._specs = set(self._specs), {}
            self._requeue(lost)

    async def poll(self) -> None:
        """Do the periodic work of `run` now."""
        async with self._changing:
            await self._poll()
            await self._remove_servers()

    async def remove(self) -> Sequence[str]:
        """Remove everything: HAProxy with its connections, its folder, the routes, the shield."""
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
            WorkerState(*self.counters.worker, self.counters.in_old_workers),
        )

    def collectors(self) -> tuple[ProxyCollector]:
        return (ProxyCollector(self.counters),)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    def _shield(self, *states: Mapping[ServiceKey, ProxySpec]) -> None:
        """Install the shield for the listeners of all these states."""
        self._shield_listeners(
            each.listener for specs in states for one in specs.values() for each in one.listeners
        )

    def _shield_listeners(self, listeners: Iterable[ProxyListener]) -> None:
        shielded = [each for each in listeners if not self._belongs_to_host(each.key.address)]
        shared = {each.key.address for each in shielded if each.settings.shared}
        shield.install({each.key for each in shielded}, shared=shared)

    async def leave_hosts(self) -> None:
        """Remove the routes and the rules of the shield for addresses of hosts. An earlier process
        may have left them, and this host may not reach its API server before they are gone."""
        listing = shield.listing()
        shielded = filter(None, map(read_address, re.split(r"[\s,{}]+", listing)))
        hosts = set(filter(self._belongs_to_host, {*shielded, *await localroutes.present()}))
        if hosts:
            await localroutes.delete(hosts)
            # The configuration still has the listeners that have been removed since.
            present = {
                ProxyKey(address, int(port))
                for address, port in re.findall(r"([0-9a-f.:]+) \. ([0-9]+)", listing)
            }
            self._shield_listeners(
                each.listener
                for each in sections_of(self.haproxy.text())
                if each.listener.key in present
            )
            log.warning("left addresses of Services to their hosts", addresses=sorted(hosts))

    def _local(self, specs: Mapping[ServiceKey, ProxySpec]) -> set[str]:
        """Return the addresses that are to be local to this host."""
        return {each for each in self._addresses(specs) if not self._belongs_to_host(each)}

    @staticmethod
    def _addresses(specs: Mapping[ServiceKey, ProxySpec]) -> set[str]:
        return {each.listener.key.address for one in specs.values() for each in one.listeners}

    def _adopt(self, specs: dict[ServiceKey, ProxySpec]) -> None:
        """Store `specs` as the state of HAProxy."""
        self._drains.update(self._specs, specs, self._now_s())
        self._specs = specs

    async def _found(self) -> dict[ServiceKey, ProxySpec]:
        """Return what the running HAProxy serves: listeners from the configuration file, if HAProxy
        runs with it, and servers from HAProxy itself. What cannot be determined is left out, so
        that it is set again."""
        text = self.haproxy.text()
        has_worker = self.haproxy.master_hangs or await self.haproxy.running()
        if not has_worker or not await self.haproxy.runs(text):
            return {}
        shown: dict[str, list[Server]] = {}
        for each in await runtime.servers(self.haproxy.worker):
            if not each.out:
                shown.setdefault(each.section, []).append(
                    Server(each.node, each.address, each.port, each.weight)
                )
        specs: dict[ServiceKey, ProxySpec] = {}
        listening = await runtime.listening(self.haproxy.worker)
        for section in sections_of(text):
            service = ServiceKey(section.namespace, section.name)
            name = section_name(service, section.listener.key)
            if name not in listening:
                continue
            # HAProxy does not have the drain time.
            given = self._specs.get(service, ProxySpec("", ()))
            one = specs.get(service, ProxySpec("", ()))
            served = Served(section.listener, tuple(sorted(shown.get(name, ()))))
            specs[service] = msgspec.structs.replace(
                given,
                uid=section.uid,
                listeners=tuple(sorted([*one.listeners, served])),
                source_ranges=self._ranges(service),
            )
        return specs

    def _ranges(self, service: ServiceKey) -> tuple[str, ...]:
        with suppress(FileNotFoundError):
            return tuple(Path(self.haproxy.paths.ranges(service)).read_text().split())
        return ()

    def _write_ranges(self, service: ServiceKey, cidrs: Sequence[str]) -> None:
        path = Path(self.haproxy.paths.ranges(service))
        draft = path.with_suffix(".new")
        draft.write_text("".join(f"{cidr}\n" for cidr in cidrs))
        draft.replace(path)

    def _drop_ranges(self, service: ServiceKey) -> None:
        Path(self.haproxy.paths.ranges(service)).unlink(missing_ok=True)

    async def _reload(
        self, changes: Sequence[ProxyChange], causes: Collection[ServiceKey]
    ) -> Mapping[ServiceKey, Outcome]:
        self._reloads.end_waits(causes)
        wanted = spec.after(self._specs, changes)
        rivals = spec.rivals(wanted, self._specs)
        outcomes = {
            service: Outcome(
                "unavailable", f"Service {owner} listens on one of its addresses and ports"
            )
            for service, owner in rivals.items()
        }
        if rivals:
            causes = set(causes) - rivals.keys()
            changes = [change for change in changes if change.service not in rivals]
            if not causes:
                return outcomes | await self._apply_live(changes)
            wanted = spec.after(self._specs, changes)
        self.haproxy.make_folder()
        for service, one in wanted.items():
            if any(
                each.listener.restricted for each in one.listeners
            ) and one.source_ranges != self._ranges(service):
                self._write_ranges(service, one.source_ranges)
        before, after = self._addresses(self._specs), self._local(wanted)
        self._shield(self._specs, wanted)
        await localroutes.add(after - self._local(self._specs))
        if wanted:
            await self._poll()
            replaced = await self._current_worker() if before else 0
            await self.haproxy.run(render(wanted, self.haproxy.paths, self._shares))
            self._record_reload(replaced, {each.namespace for each in causes})
        else:
            await self.haproxy.stop()
        if before:
            # After the first configuration no pause is needed: there is no old worker that a reload
            # would add to, and more Services are about to be set up.
            self._reloaded_s = self._now_s()
        self.counters.end_worker()
        switched = spec.switches(self._specs, wanted)
        await self._drop_removed(wanted)
        self._leaving = set()
        for service, headers in switched.items():
            outcomes = _with_note(outcomes, service, switched_note(*headers))
        largest = self._shares.largest(sum(len(each.listeners) for each in wanted.values()))
        for service in sorted(set(causes) & wanted.keys()):
            limits = {each.listener.settings.connection_limit for each in wanted[service].listeners}
            if self._shares.limited and max(limits) > largest:
                outcomes = _with_note(outcomes, service, limit_capped(max(limits), largest))
        return outcomes

    async def _current_worker(self) -> int:
        """Return the process id of the worker that accepts connections; 0 if there is none, or the
        master does not name it."""
        if self.haproxy.master_hangs:
            return 0
        with suppress(Unavailable):
            found, _ = await runtime.workers(self.haproxy.master)
            return next((each.pid for each in found if not each.old), 0)
        return 0

    async def _drop_removed(self, wanted: dict[ServiceKey, ProxySpec]) -> None:
        """Adopt this state, and remove what only listeners needed that are gone from it."""
        before = self._addresses(self._specs)
        self.counters.keep(wanted)
        self._closed = Counter(
            {key: self._closed[key] for key in self._closed.keys() & wanted.keys()}
        )
        self._unreported = {key: each for key, each in self._unreported.items() if key in wanted}
        await localroutes.delete(before - self._local(wanted))
        if before:
            self._shield(wanted)
        for service in self._specs.keys() - wanted.keys():
            self._drop_ranges(service)
        self._adopt(wanted)

    async def _apply_live(self, changes: Sequence[ProxyChange]) -> dict[ServiceKey, Outcome]:
        """Carry out the changes that need no reload. After a failure, read HAProxy's state again:
        the next attempt starts from it."""
        outcomes: dict[ServiceKey, Outcome] = {}
        if not changes:
            return outcomes
        try:
            if removals := [each for each in changes if isinstance(each, RemoveListener)]:
                await runtime.shut_down(
                    self.haproxy.worker, [section_name(each.service, each.key) for each in removals]
                )
                await self._drop_removed(spec.after(self._specs, removals))
            await self._set_ranges([change for change in changes if isinstance(change, SetRanges)])
            server_changes = [change for change in changes if isinstance(change, spec.SetServers)]
            if server_changes:
                self._leaving |= await members.set_servers(
                    self.haproxy.worker, server_changes, self._specs
                )
                self._adopt(spec.after(self._specs, server_changes))
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
        """Replace the source ranges of Services. The worker identifies ACL lists by the line number
        in its configuration file, so the file must be the one with which the worker runs."""
        if not changes:
            return
        text = self.haproxy.text()
        if not await self.haproxy.runs(text):
            raise Unavailable("HAProxy does not run with its newest configuration")
        numbers, lines = await runtime.acl_lists(self.haproxy.worker), acl_lines(text)
        if unknown := [line for each in lines.values() for line in each if line not in numbers]:
            raise Unavailable(
                f"HAProxy does not show the ACL list in line {unknown[0]} of its configuration"
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

    async def _poll(self) -> None:
        """Read counters, close connections of servers that exceeded their drain time, and stop
        surplus old workers (`reloads`)."""
        if not self._specs:
            return
        with suppress(Unavailable):
            old = await workers.connections(self.haproxy)
            self._reloads.keep({each.pid for each in old})
            await self._count(sum(old.values(), Counter()))
            if expired := self._drains.expired(self._specs, self._now_s()):
                await members.end_connections(self.haproxy.master, set(expired))
            surplus = {each.pid for each in self._reloads.surplus(workers.by_namespace(old))}
            workers.end(self.haproxy, surplus)
            closed = sum((old[each] for each in old if each.pid in surplus), Counter())
            self._report_closed(closed)

    async def _count(self, in_old_workers: Counter[ServiceKey] | None = None) -> None:
        """Read counters, unless an old worker answers on the worker's socket. `in_old_workers`: the
        connections that are open in old workers; None: only the master knows, which hangs."""
        worker, found = await runtime.totals(self.haproxy.worker, COLUMNS)
        current = (
            self.counters.worker.pid if in_old_workers is None else await self._current_worker()
        )
        if worker.pid != current:
            return
        sections = {
            section_name(service, each.listener.key): service
            for service, one in self._specs.items()
            for each in one.listeners
        }
        rows = list(found)
        traffic = traffic_of(rows, sections)
        self._note_full(traffic, full_of(rows, sections))
        old = None if in_old_workers is None else {key: in_old_workers[key] for key in self._specs}
        self.counters.take(traffic, worker, old)

    def _note_full(
        self, traffic: Mapping[ServiceKey, ProxyTraffic], at_limit: Collection[ServiceKey]
    ) -> None:
        """Have the Services report that have reached a limit since the counters were last read."""
        full: dict[ServiceKey, FullBy] = dict.fromkeys(at_limit, "limit")
        for service, counted in traffic.items():
            if counted.over_share > self.counters.over_share(service):
                full[service] = "share"
        new = {key: each for key, each in full.items() if self._full.get(key) != each}
        self._full = full
        if new:
            self._unreported |= new
            self._requeue(new)

    async def _remove_servers_when_due(self) -> None:
        if self._now_s() >= self._removed_s + DELETE_INTERVAL_S:
            await self._remove_servers()

    async def _remove_servers(self) -> None:
        """Delete the servers in maintenance that no longer have connections."""
        self._removed_s = self._now_s()
        with suppress(Unavailable):
            self._leaving = await members.remove(self.haproxy.worker, self._leaving)

    def _report_closed(self, connections: Counter[ServiceKey]) -> None:
        """Log the connections that were closed with old workers, and have their Services report
        them."""
        if not connections:
            return
        log.warning(
            "stopped HAProxy workers from before a reload: there were too many",
            connections=connections.total(),
            limit=self._old_workers,
        )
        served = {key: count for key, count in connections.items() if key in self._specs}
        self._closed.update(served)
        self._requeue(served)


def _with_note(
    outcomes: Mapping[ServiceKey, Outcome], service: ServiceKey, note: Finding
) -> dict[ServiceKey, Outcome]:
    outcome = outcomes.get(service, DONE).joined(Outcome("done", notes=(note,)))
    return {**outcomes, service: outcome}
