"""The driver of class fairlead.io/direct: pinned eBPF maps, and programs at the ingress of the
gateway's interfaces.

In: LoadBalancers. Out: the programs send packets for their listeners to nodes. Forwarding does not
depend on this process: if the process dies, the maps and programs stay, and its successor adopts
them. No packet is lost, and no connection moves. Invariant: the maps themselves name the owner of
each listener. The only state in this process is a mirror of the maps, which is complete at every
moment. Sources: tc-bpf(8), and KEP-1860 (ipMode VIP), by which kube-proxy serves packets for a
load-balancer address that reach a node unmodified."""

import asyncio
import os
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog
from prometheus_client.registry import Collector

from fairlead.config import AttachKind
from fairlead.drivers import Component, Requeue, no_requeue
from fairlead.drivers.direct import spec
from fairlead.drivers.direct.change_run import ChangeRun
from fairlead.drivers.direct.counters import Counters
from fairlead.drivers.direct.host_network import attach, blackhole, probe_paths
from fairlead.drivers.direct.host_network.attach import Attachments, Problems, Programs
from fairlead.drivers.direct.host_network.blackhole import BlackholeRoutes
from fairlead.drivers.direct.host_network.host_network import Node
from fairlead.drivers.direct.host_network.networks import Limits, Networks
from fairlead.drivers.direct.host_network.next_hops import Rules
from fairlead.drivers.direct.host_network.requirements import requirements_of
from fairlead.drivers.direct.maps import pins
from fairlead.drivers.direct.maps.arena import GRACE_S
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.mirror import Draining
from fairlead.drivers.direct.maps.survey import Survey
from fairlead.drivers.direct.metrics import InterfacesCollector, TrafficCollector
from fairlead.drivers.direct.spec import (
    DirectActual,
    DirectChange,
    DirectSpec,
    ListenerKey,
    RemoveListener,
    SetListener,
    SetNode,
)
from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.errors import FairleadError, Refused
from fairlead.kube.events import stamp
from fairlead.model import Finding, LoadBalancer, Outcome, ServiceKey
from fairlead.net import bpffs
from fairlead.net.bpf import Map
from fairlead.net.program import Program
from fairlead.role_state import DrainState, InterfaceState, ResourceState, TrafficState
from fairlead.turns import in_background, in_turns, parts

log = structlog.get_logger()

DEFAULT_PIN_PATH = bpffs.ROOT / "fairlead"
NETWORK_CHANGES_PAUSE_S = 0.05
"""The shortest pause after a change of the host's networks was handled. Further changes in the
pause are handled together."""
PROGRAMS_CHECK_S = 1.0
"""The interval at which the programs are checked for those that are gone without an event."""
RELEASED_S = 10.0
"""How long a cleanup waits for programs elsewhere to end: the kernel removes the programs of a
network namespace some time after the namespace."""
REMOVAL_SHOWN = timedelta(hours=1)
"""How long a Finding reports that another process removed a program."""
NOT_FORWARDING, PROGRAM_REMOVED = "GatewayNotForwarding", "ProgramRemoved"
INTERFACE_NOT_FORWARDING = "InterfaceNotForwarding"
BATCH_SIZE = 50
"""How many Services are read, or changes applied, before other tasks of the process run. A batch
takes some milliseconds. Smaller batches would not help: while events arrive fast, work that is
nearly done would wait for work that has just arrived."""
RESOURCE_RETRY_S = GRACE_S + 0.05
"""How long after the release of a resource the Services that wait for it are retried. Released
table memory can be used after its grace period."""
UNSERVED_TIMEOUT_S = 150.0
"""The time after which a listener that could not be created counts as no longer wanted. While it is
wanted, the loop plans it again about once a minute."""
INSERTS_PER_S = 125_000
"""Limit of new flow entries a second, for each CPU and each table of open or closing flows."""
MESSAGES_PER_S = 1000
"""Limit of packets a second that the data plane itself creates, for each CPU and kind: echo
replies, ICMP "too big", refusals."""

Batching = Callable[[Iterable[Sequence[ServiceKey]]], AsyncIterator[Sequence[ServiceKey]]]
"""Iterates over batches, and lets other tasks run in between; see `turns`."""

Inherit = Callable[[ListenerMaps, dict[str, Map]], Awaitable[None]]
"""Copies tables and flow entries of peers into the maps."""


class DirectDriver(Component):
    """Implements fairlead.drivers.Driver. Call `open` first and `close` last.

    interfaces: selectors (see `net.selection`) of the interfaces on which packets for listeners
        arrive.
    attach_kind: where to attach programs: the option `gateway.attach`.
    rules: how to send packets to nodes.
    pin_path: a directory on a bpffs. No other instance may use it. Below /sys/fs/bpf a bpffs is
        mounted if there is none.
    priority: of our filter among the tc filters of an interface. The kernel runs the filter with
        the lowest number first. Instances that share an interface need different priorities.
    sizes: sizes of the maps, if they do not exist yet.
    namespace_share: the fraction of table memory, listeners, retained nodes, source ranges and
        flow entries that one namespace may use; see `maps.quota` and `maps.flow_shares`.
    drain_s: how long a node may keep connections of a Service after it last got new ones, if the
        Service sets no limit; 0: as long as the node has pods of the Service. The time starts
        again when the process starts.
    requeue: called with Services whose nodes became reachable or unreachable, and with
        Services that wait for a resource when a part of it was released.
    inherit: called when the maps are open, before programs use them. If it is given, the programs
        report new flow entries to this process.
    object_dir: the directory of the compiled programs.
    clock: monotonic seconds, for grace periods and drains."""

    name = "direct"

    def __init__(
        self,
        interfaces: Sequence[str],
        *,
        attach_kind: AttachKind = "auto",
        rules: Rules | None = None,
        pin_path: Path = DEFAULT_PIN_PATH,
        priority: int = 100,
        sizes: pins.Sizes | None = None,
        namespace_share: float = 1.0,
        drain_s: float = 0.0,
        requeue: Requeue = no_requeue,
        inherit: Inherit | None = None,
        object_dir: Path = pins.OBJECTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attachments = Attachments(tuple(interfaces), attach_kind, pin_path, priority)
        self._priority = priority
        self._rules = rules or Rules()
        self._pin_path = pin_path
        self._requeue = requeue
        self._inherit = inherit
        self._object_dir, self._clock = object_dir, clock
        self._sizes = sizes or pins.Sizes()
        self._limits = Limits(
            INSERTS_PER_S,
            MESSAGES_PER_S,
            namespace_share,
            report_entries=inherit is not None,
        )
        self._drain_s, self._namespace_share = drain_s, namespace_share
        self._pin_lock = -1
        self._pins: pins.Pins | None = None
        self._tables: ListenerMaps | None = None
        self._networks: Networks | None = None
        self._blackholes: BlackholeRoutes | None = None
        self._incomplete: set[ServiceKey] = set()
        """Services that did not get everything in the last `apply`, or have lost a next hop
        since."""
        self._unserved: dict[ServiceKey, tuple[frozenset[str], float]] = {}
        """The addresses of listeners that could not be created, and when the loop last planned
        them. They have blackhole routes too, because the router sends packets for them to this
        host."""
        self._resource_retry: asyncio.TimerHandle | None = None
        """Set while Services that wait for a resource have to wait longer, because the last retry
        was a moment ago."""
        self._attached = False
        """Our programs are attached, and use our maps."""
        self._audited = False
        """A complete read was done since `open`."""
        self._audit_lock = asyncio.Lock()
        """Held during a complete read: only one survey of the maps may run at a time."""
        self._change_lock = asyncio.Lock()
        """Held while maps, next hops or attachments are changed."""

    async def open(self) -> None:
        """Create or adopt the maps, and attach the programs.

        A program that forwards is not replaced by a program whose maps are empty. This occurs if
        maps of another version could not be copied, or if the pins of an attached program of ours
        were deleted. The attached program then keeps forwarding until the first `apply` has filled
        our maps, or until a second complete `read` shows that there is nothing to fill them with.

        Raise Refused if the host does not permit it, and Unavailable if an interface does not
        exist. After an error, no program is attached that was not attached before."""
        self._pin_lock = bpffs.lock(self._pin_path)
        attached_before = await attach.attached(self._pin_path)
        try:
            self._blackholes = BlackholeRoutes(lambda: self._attachments.names, self._priority)
            self._pins = await asyncio.to_thread(
                pins.open_pins, self._pin_path, self._sizes, self._object_dir
            )
            self._tables = ListenerMaps(
                self._pins.maps,
                peers=self._inherit is not None,
                share=self._namespace_share,
                clock=self._clock,
            )
            self._tables.adopt(
                await asyncio.to_thread(
                    self._tables.survey, self._tables.baseline(), with_entries=True
                )
            )
            await asyncio.to_thread(lambda made: [*made.recount_flows()], self._tables)
            if self._inherit is not None:
                await self._inherit(self._tables, self._pins.maps)
            self._networks = Networks(
                self._attachments,
                self._rules,
                self._limits,
                self._pins.maps,
                self._tables.nodes,
                Programs(self._load_tc, self._pins.xdp, self._copy_from_older),
            )
            self._networks.check()
            # An attached program has lost its pins if it uses neither our maps nor those of an
            # older layout. Its maps cannot be copied, so ours are empty.
            lost_its_pins = (
                attached_before.filters
                and not self._pins.older
                and not attach.uses_map(attached_before, self._pins.maps["listeners"])
            )
            if self._pins.complete and not lost_its_pins:
                await self._attach()
        except BaseException:
            await attach.detach(self._pin_path, but=attached_before)
            if self._pins is not None:
                self._pins.discard()
            self._release()
            raise

    async def close(self, *, remove: bool = False) -> None:
        """Close maps and sockets. `remove=False`: the programs keep forwarding. `remove=True`: also
        remove programs, pins and routes from the host."""
        try:
            if remove:
                await attach.detach(self._pin_path)
                await probe_paths.detach(probe_paths.filter_name(self._pin_path))
                await asyncio.to_thread(pins.remove, self._pin_path)
                blackhole.remove(self._priority)
        finally:
            self._release()

    async def remove(self) -> list[str]:
        """See `remove_pins`."""
        return await remove_pins(self._pin_path, self._priority)

    def _release(self) -> None:
        if self._resource_retry is not None:
            self._resource_retry.cancel()
            self._resource_retry = None
        for each in (self._tables, self._pins, self._networks, self._blackholes):
            if each is not None:
                each.close()
        if self._pin_lock >= 0:
            os.close(self._pin_lock)
        self._tables, self._pins, self._networks, self._pin_lock = None, None, None, -1
        self._attached = self._audited = False

    def _opened(self) -> tuple[ListenerMaps, pins.Pins, Networks]:
        if self._tables is None or self._pins is None or self._networks is None:
            raise RuntimeError("the driver is not open")
        return self._tables, self._pins, self._networks

    def _load_tc(self) -> Program:
        """Load the complete program. To be called in a thread, right before the program is
        attached.

        Loading takes most of a second, while an older program keeps creating flow entries in its
        own maps. Most of these entries are copied here, in the thread, so `_copy_from_older`, which
        blocks the event loop, has little left to copy."""
        _, opened, _ = self._opened()
        program = opened.tc()
        opened.copy_changes_of_older(forwarding=False)
        return program

    def _copy_from_older(self) -> None:
        """Copy the latest flow entries of an older program, right before our program replaces it.
        From now on our program drops packets whose entry may not be copied yet."""
        _, opened, networks = self._opened()
        opened.copy_changes_of_older(forwarding=False)
        networks.set_copying(bool(opened.copied))

    async def _attach(self) -> None:
        """Attach our programs to every interface. Then remove the maps of older layouts, which no
        program uses any more, and look up the next hop of every node."""
        _, opened, networks = self._opened()
        await networks.attach()
        try:
            self._pins = await asyncio.to_thread(opened.remove_older)
        finally:
            networks.set_copying(False)
        self._attached = True
        self._retry_services_of_nodes(await networks.update_next_hops())

    @property
    def interfaces(self) -> tuple[InterfaceState, ...]:
        """What is attached to each interface, and why."""
        return self._attachments.shown

    @property
    def routers(self) -> frozenset[str]:
        """The addresses of the routers through which this host reaches nodes."""
        return self._networks.routers if self._networks is not None else frozenset()

    async def requirements(self) -> tuple[SysctlRequirement, ...]:
        """Return the sysctls that the data plane needs with its present next hops."""
        _, _, networks = self._opened()
        return requirements_of(networks.next_hops)

    async def set_cluster_nodes(self, cluster: Collection[Node]) -> None:
        """Set the names and addresses of all nodes of the cluster. If this host is a node itself,
        packets from other gateways may arrive here."""
        _, _, networks = self._opened()
        async with self._change_lock:
            await networks.set_cluster(cluster)

    async def run(self) -> None:
        """Keep attachments and next hops equal to the host's networks, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_networks())
            group.create_task(self._restore_programs())

    async def _restore_programs(self) -> None:
        """Attach programs again that another process has removed. The kernel reports a removed
        filter by an event, but not a detached link or a deleted pin."""
        _, _, networks = self._opened()
        while True:
            await asyncio.sleep(PROGRAMS_CHECK_S)
            async with self._change_lock:
                if self._attached:
                    await networks.restore_programs()

    async def _follow_networks(self) -> None:
        """Adapt attachments and next hops to the host's networks on each event of the kernel.
        Audits do the same."""
        tables, _, networks = self._opened()
        while True:
            changes = await networks.next_changes()
            began_s = time.monotonic()
            async with self._change_lock:
                try:
                    if self._attached:
                        self._retry_services_of_nodes(await networks.apply_changes(changes))
                        if self._blackholes and self._blackholes.outdated:
                            await self._blackholes.sync(tables.addresses)
                        elif self._blackholes and changes.networks:
                            await self._blackholes.restore()
                except FairleadError as error:
                    log.warning(
                        "the host's networks changed; the change is handled at the next audit",
                        error=str(error),
                    )
            # If thousands of routes change, most of the time remains for other tasks.
            await asyncio.sleep(max(NETWORK_CHANGES_PAUSE_S, 5 * (time.monotonic() - began_s)))

    def _retry_services_of_nodes(self, lost: Collection[str]) -> None:
        """Have the loop reconcile the Services of the nodes in `lost`, which have lost their next
        hop, and all incomplete Services, which may be waiting for a next hop."""
        tables, _, _ = self._opened()
        if lost:
            self._incomplete |= tables.services_of(lost)
        if self._incomplete:
            self._requeue(self._incomplete)

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, DirectSpec]:
        """See `spec.render`."""
        return spec.render(intents, self._drain_s)

    def precompute_tables(self, intents: Mapping[ServiceKey, LoadBalancer]) -> None:
        """Compute the Maglev tables of these load balancers. Has no other effect, and may be called
        in a thread."""
        spec.precompute_tables(intents)

    def diff(
        self, desired: Mapping[ServiceKey, DirectSpec], actual: Mapping[ServiceKey, DirectActual]
    ) -> Sequence[DirectChange]:
        """See `spec.diff`."""
        return spec.diff(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, DirectActual]:
        """Return the installed state of these Services from the mirror; with None, that of all
        Services from the maps (a complete read, which also updates the mirror).

        The first complete read returns what `open` has read a moment ago, because no other process
        writes to the maps. A complete read also looks up the next hops of the nodes, and attaches
        programs again to interfaces that have lost them, for example because they were recreated.

        While maps of an older layout exist beside ours, the first complete read leaves their
        program attached, because our maps are still empty. The `apply` that fills our maps replaces
        it. If nothing was applied before the second complete read, there was nothing to apply, and
        this read replaces the program."""
        tables, _, networks = self._opened()
        if keys is not None:
            return await _actual(tables, keys, in_turns)
        async with self._audit_lock:
            if self._attached or self._audited:
                async with self._change_lock:
                    await (networks.reattach() if self._attached else self._attach())
            # The start of the process waits for the first read; nothing waits for an audit.
            batching: Batching = in_background if self._audited else in_turns
            if self._audited:
                await self._refresh_mirror()
            self._audited = True
            if self._blackholes:
                await self._blackholes.sync(tables.addresses)
                async with self._change_lock:
                    await self._blackholes.remove(
                        self._unused_addresses(tables, self._expire_unserved())
                    )
            return await _actual(tables, tables.services, batching)

    async def _refresh_mirror(self) -> None:
        """Update the mirror from the maps, and look up the next hop of every node.

        Changes may be applied meanwhile. For listeners and nodes that they touch, the mirror is
        newer than the survey, and stays as it is."""
        tables, _, networks = self._opened()
        async with self._change_lock:
            known = tables.baseline()
        survey: Survey | None = None
        async for part in in_background(tables.survey_in_parts(known)):
            survey = part
        assert survey is not None  # the last part is the complete survey
        next_hops = await networks.find_next_hops(survey.nodes.addresses())
        tables.adopt(survey)
        self._retry_waiting(tables)
        networks.write_next_hops(next_hops)
        tables.end_convergence()
        if tables.flow_shares.needs_recount:
            async for _ in in_background(tables.recount_flows()):
                pass

    async def apply(self, changes: Sequence[DirectChange]) -> Mapping[ServiceKey, Outcome]:
        """Apply the changes. A Service has an Outcome if one of its nodes cannot be reached (the
        other nodes then serve it), if another Service has one of its listeners, if a resource is
        used up, or if it is to be reconciled again later.

        Raise Unavailable or Refused if the programs cannot be attached."""
        tables, _, networks = self._opened()
        async with self._change_lock:
            # The next hop of a node that is already in use is kept current by `run`. Looking it up
            # again would need a thread.
            needed = [
                each
                for each in changes
                if not (
                    isinstance(each, SetNode)
                    and tables.nodes.is_reachable_at(each.node, each.address)
                )
            ]
            nodes = [change for change in needed if isinstance(change, SetNode)]
            async with self._with_blackhole_routes(changes):
                next_hops = await networks.find_next_hops(
                    {(change.node, change.address) for change in nodes}
                )
                run = ChangeRun(
                    tables,
                    {change: next_hops[change.node, change.address] for change in nodes},
                    needed,
                )
                async for batch in in_turns(parts(needed, BATCH_SIZE)):
                    run.apply(batch)
                outcomes = run.finish()
                self._record_unserved({change.service for change in changes}, run.missing)
            if not self._attached:
                await self._attach()
        self._retry_waiting(tables)
        failed = {service for service, outcome in outcomes.items() if outcome.state != "done"}
        self._incomplete = (
            self._incomplete.difference(change.service for change in changes) | failed
        )
        return outcomes

    def _retry_waiting(self, tables: ListenerMaps) -> None:
        """Retry the Services that wait for a resource if a part of it was released: at once, and
        again after RESOURCE_RETRY_S, when the grace period of released memory is over. Do nothing
        while the second retry is pending."""
        if self._resource_retry is None and (retriable := tables.quotas.take_retriable()):
            self._requeue(retriable)
            self._resource_retry = asyncio.get_running_loop().call_later(
                RESOURCE_RETRY_S, self._retry_all_waiting, tables
            )

    def _retry_all_waiting(self, tables: ListenerMaps) -> None:
        """Retry the Services that wait for table memory: memory that was released earlier can be
        used now."""
        self._resource_retry = None
        self._requeue(tables.quotas.memory.waiting.copy())
        self._retry_waiting(tables)

    @asynccontextmanager
    async def _with_blackhole_routes(self, changes: Sequence[DirectChange]) -> AsyncIterator[None]:
        """Add and remove the blackhole routes of the addresses in these changes. The changes are
        applied in the body of the context.

        Afterwards an address has a route if it has listeners or should have some. New routes are
        added while the body runs: at a start, the kernel needs about as long for thousands of
        routes as the changes take."""
        tables, _, _ = self._opened()
        if self._blackholes is None:
            yield
            return
        listening = {each.listener.key.address for each in changes if isinstance(each, SetListener)}
        touched = listening | {
            each.key.address for each in changes if isinstance(each, RemoveListener)
        }
        async with asyncio.TaskGroup() as group:
            if new := self._blackholes.missing(listening):
                group.create_task(self._blackholes.add(new))
            yield
        await self._blackholes.remove(self._unused_addresses(tables, touched))

    def _record_unserved(
        self,
        services: Collection[ServiceKey],
        missing: Mapping[ServiceKey, Collection[ListenerKey]],
    ) -> None:
        """Record which listeners of these Services could not be created. `missing` replaces earlier
        records of the Services."""
        for service in services:
            self._unserved.pop(service, None)
        now_s = self._clock()
        for service, keys in missing.items():
            self._unserved[service] = frozenset(key.address for key in keys), now_s

    def _expire_unserved(self) -> set[str]:
        """Delete the records of listeners that the loop no longer plans, because their Service was
        deleted or changed. Return their addresses."""
        oldest_s = self._clock() - UNSERVED_TIMEOUT_S
        expired = [key for key, (_, planned_s) in self._unserved.items() if planned_s < oldest_s]
        return set().union(*(self._unserved.pop(key)[0] for key in expired))

    def _unused_addresses(self, tables: ListenerMaps, addresses: Collection[str]) -> set[str]:
        """Return the given addresses that neither have a listener nor should have one."""
        wanted = frozenset[str]().union(*(each for each, _ in self._unserved.values()))
        return {each for each in addresses if each not in tables.addresses and each not in wanted}

    @property
    def counters(self) -> Counters:
        """The counters of the data plane, for the listeners and nodes that exist now."""
        tables, opened, _ = self._opened()
        return Counters(tables, opened.maps, opened.object_file.types.enumerators("event"))

    def draining(self) -> list[Draining]:
        """See `ListenerMaps.draining`."""
        tables, _, _ = self._opened()
        return tables.draining()

    def status(self) -> TrafficState:
        """For `/state`. May be called from any thread."""
        counters = self.counters
        return TrafficState(
            services={str(key): traffic for key, traffic in counters.services().items()},
            listeners=counters.listeners(),
            nodes=counters.nodes(),
            drops=counters.drops(),
            messages=counters.messages(),
            untracked=counters.untracked(),
            unsent=counters.unsent(),
            resources={
                name: ResourceState(filled.used, filled.capacity)
                for name, filled in counters.resources().items()
            },
            draining=tuple(
                DrainState(str(each.service), str(each.listener), each.node, round(each.left_s, 1))
                for each in self.draining()
            ),
            interfaces=self.interfaces,
        )

    def findings(self) -> tuple[Finding, ...]:
        """Return what keeps the gateway or one of its interfaces from forwarding now, and what
        others have removed."""
        removals = self._networks.removals.copy() if self._networks is not None else {}
        problems = self._attachments.problems if self._attached else Problems({}, {})
        problem = str(problems)
        since = datetime.now(UTC) - REMOVAL_SHOWN
        return (
            *([Finding(NOT_FORWARDING, problem, "error", blocks="Ready")] if problem else []),
            *(
                Finding(
                    INTERFACE_NOT_FORWARDING,
                    f"{other}, and the gateway forwards at other interfaces only",
                    subject=f"interface {name}",
                    remedy="check its link, or remove it from gateway.interfaces",
                )
                for name, other in problems.others.items()
            ),
            *(
                Finding(
                    PROGRAM_REMOVED,
                    f"another process removed the gateway's program from interface {name}, and the "
                    "gateway attached it again",
                    subject=f"interface {name}",
                    evidence=f"last at {stamp(each.last)}",
                    remedy="find out what changes the interface then: packets were lost meanwhile",
                )
                for name, each in removals.items()
                if each.last > since
            ),
        )

    def collectors(self) -> tuple[Collector, ...]:
        return (
            TrafficCollector(lambda: self.counters),
            InterfacesCollector(lambda: self.interfaces, self._removals),
        )

    def _removals(self) -> dict[str, int]:
        """Return how often another process has removed a program, by interface."""
        removals = self._networks.removals.copy() if self._networks is not None else {}
        return {name: each.times for name, each in removals.items()}


async def _actual(
    tables: ListenerMaps, keys: Collection[ServiceKey], batching: Batching
) -> dict[ServiceKey, DirectActual]:
    """Return the installed state of these Services from the mirror."""
    actual: dict[ServiceKey, DirectActual] = {}
    async for batch in batching(parts(tuple(keys), BATCH_SIZE)):
        actual |= tables.actual(batch)
    return actual


async def _check_owner(pin_path: Path) -> None:
    """Raise Refused if the pins belong to another owner: they only have the names of ours, or a
    gateway in another network namespace, as in another container or a lab, forwards with them,
    perhaps without its process."""
    pins.check_names(pin_path)
    until_s = time.monotonic() + RELEASED_S
    while True:
        used = await asyncio.to_thread(pins.users, pin_path)
        if used <= await attach.programs_here(await attach.attached(pin_path)):
            return
        if time.monotonic() > until_s:
            raise Refused(
                f"a gateway in another network namespace forwards with the maps in {pin_path}: "
                "nothing is removed",
                fix="run the command in the network namespace of that gateway, or give the "
                "--pin-path of the gateway to remove",
            )
        await asyncio.sleep(0.1)


async def remove_pins(pin_path: Path, priority: int = 100) -> list[str]:
    """Remove the programs and routes that a process left in this network namespace, and its pins.
    Return what was removed, as text for the user. Raise Refused, and remove nothing, while a
    process uses the pins, or if they belong to another owner.

    The pins may be missing although the rest exists, because the bpffs was mounted again or a user
    deleted them."""
    lock = bpffs.lock(pin_path) if await asyncio.to_thread(pin_path.exists) else -1
    try:
        await _check_owner(pin_path)
        detached = await attach.detach(pin_path)
        detached += await probe_paths.detach(probe_paths.filter_name(pin_path))
        return [
            *detached,
            *await asyncio.to_thread(pins.remove, pin_path),
            *blackhole.remove(priority),
        ]
    finally:
        if lock >= 0:
            os.close(lock)
