"""The driver of layer 2 announcement: one host of a link answers ARP requests and neighbor
solicitations for each address.

In: intents with announcements of method `l2`. Out: the program of bpf/neighbors.bpf.c at the
ingress of the interfaces, its maps, and a process that decides which addresses this host owns
(`process`).

Invariants: from `open` on, this host continues to own the addresses of a previous process. An
address that no Service requests again is withdrawn after the role has decided about all Services to
which the address may belong (`drivers.Undecided`). When this process is stopped or killed, the
kernel goes on, also with answers to other announcers, so nothing moves. An address is announced
only after the drivers before this one serve its Service; it is withdrawn before they stop. Without
a right or a fact that only layer 2 needs, the driver announces nothing, reports it, and the role
continues."""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import structlog

from fairlead.announce_sections import L2Config
from fairlead.drivers import (
    PATIENCE_S,
    Component,
    Requeue,
    Undecided,
    all_decided,
    method_change,
    no_requeue,
)
from fairlead.drivers.l2 import maps as l2_maps
from fairlead.drivers.l2 import outcomes, spec
from fairlead.drivers.l2.helper import Helper
from fairlead.drivers.l2.host_links import default_names, default_selectors, read_host_links
from fairlead.drivers.l2.maps import Maps
from fairlead.drivers.l2.messages import (
    Configure,
    Interface,
    Report,
    Settings,
    Wanted,
)
from fairlead.drivers.l2.metrics import L2Collector, Numbers
from fairlead.drivers.l2.placing import HostLinks, Placement, Room, place
from fairlead.drivers.l2.records import MAX_NAME, Place, group_of
from fairlead.drivers.l2.removal import Role, attach, detach, remove_l2
from fairlead.drivers.l2.reported import Reported
from fairlead.drivers.l2.requirements import requirements
from fairlead.drivers.l2.spec import Actual, Change, Intent, Requested, Spec
from fairlead.drivers.l2.station import Unusable, check_rights
from fairlead.drivers.method_change import AnnouncedElsewhere
from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.errors import FairleadError, Refused
from fairlead.model import Finding, Outcome, ServiceKey
from fairlead.net import bpffs
from fairlead.net.link_events import LinkEvents
from fairlead.net.selection import Selection, select
from fairlead.role_state import L2State, timestamp

log = structlog.get_logger()

FOLLOW_PAUSE_S = 0.05
"""Pause after a change of the networks. Changes in this time are handled together."""
HAND_OVER_S = 3.0
"""How long `leave` waits for other announcers."""
HAND_OVER_CHECK_S = 0.05
UNUSABLE = "Layer2Unavailable"
"""The code of the Finding that this host cannot announce on layer 2."""
MOVE_S = 1.0
"""How long this host still answers for an address that another method announces: routers need a
moment to install a route."""
RETRY_S = 5.0
"""The interval at which the driver tries again to begin, if something prevented it."""


class L2Driver(Component):
    """Driver of layer 2 announcement. `run` owns the announcing process and must run beside the
    loop.

    - `role` and `cluster` (returns the id of the cluster; empty: it is not known): announcers of
      another role or cluster on the same link are not members;
    - `name`: of this host, as in `Announcement.candidates`;
    - `command`: starts the process, see `roles/l2_process`;
    - `selectors`: the interfaces of the role, if the section selects none (see `net.selection`);
      without any, the interfaces with the node's addresses are used;
    - `requeue`, `undecided`: see `drivers`."""

    name = "l2"
    batch = 0
    patience_s = PATIENCE_S

    def __init__(
        self,
        role: Role,
        name: str,
        section: L2Config,
        command: Sequence[str],
        *,
        cluster: Callable[[], str],
        pin_path: Path,
        selectors: Sequence[str] = (),
        node_addresses: Callable[[], Sequence[str]] = tuple,
        requeue: Requeue = no_requeue,
        undecided: Undecided = all_decided,
    ) -> None:
        self._role: Role = role
        self._host = name
        self._section = section
        self._default_selectors = default_selectors(section, name, selectors)
        self._selection = Selection({}, ())
        """What the selectors chose last."""
        self._cluster = cluster
        self._pin_path = pin_path
        self._node_addresses = node_addresses
        self._requeue = requeue
        self._undecided = undecided
        self._status_changed: Callable[[], None] = lambda: None
        self._helper = Helper(command, self._reported)
        self._maps: Maps | None = None
        self._lock = -1
        self._settings: Settings | None = None
        self._specs: dict[ServiceKey, Spec] = {}
        self._requests: dict[str, dict[ServiceKey, Requested]] = {}
        self._placements: dict[str, Placement] = {}
        self._wanted: dict[Place, Wanted] = {}
        self._interfaces: tuple[Interface, ...] = ()
        self._reports = Reported(name)
        self._adopted: set[Place] = set()
        """What a previous process announced and no Service has requested yet."""
        self._problem: Finding | None = None
        """Why this host announces nothing."""
        self._refused: set[ServiceKey] = set()
        """The Services that were told so."""
        self._ready = False
        self._presented = False
        """Whether other announcers learn from this process that this host serves."""
        self._leaving = False
        self._withdrawn = False
        self._news: dict[ServiceKey, list[Finding]] = {}
        self._told: dict[ServiceKey, Outcome] = {}
        """The last outcome of each Service that is not done."""
        self.announced_elsewhere: AnnouncedElsewhere | None = None
        """None: an address that another method announces from now on is withdrawn at once."""
        self._elsewhere_since_s: dict[str, float] = {}
        """Since when another method is known to announce an address that this host owns."""
        self._turn = asyncio.Lock()

    # Lifecycle

    async def open(self) -> None:
        """Load the program and attach it, and adopt what a previous process announced. Raise
        Refused if the kernel does not support it, another process uses the pins, or the name of the
        host is too long."""
        if len(self._host.encode()) > MAX_NAME:
            raise Refused(
                f"the name {self._host} of this host is longer than {MAX_NAME} bytes",
                fix="give the host a shorter name",
            )
        await self._begin()

    async def _begin(self) -> None:
        """Begin to announce, unless something prevents it that other parts of the role do not
        need."""
        before, self._problem = self._problem, None
        try:
            check_rights()
            if self._maps is None:
                self._lock = bpffs.lock(self._pin_path)
                self._maps = await asyncio.to_thread(Maps.open, self._pin_path)
            group = self._group(self._maps)
        except Unusable as problem:
            self._problem = Finding(UNUSABLE, str(problem), "error")
            if self._problem != before:
                log.error("nothing is announced on layer 2", problem=str(problem))
            return
        self._adopted = set(self._maps.states())
        ready = any(each.state == "ready" for each in self._maps.presentations().values())
        self._settings = Settings(
            self._host,
            group,
            str(l2_maps.directory_of(self._pin_path)),
            self._section.hello_interval_ms / 1000,
            self._section.hello_multiplier,
            self._section.stale_s,
            ready,
        )
        self._ready = ready
        self._interfaces = self._used(self._read_links())
        await attach(
            self._pin_path, self._role, self._maps, [each.index for each in self._interfaces]
        )

    def _group(self, maps: Maps) -> bytes:
        """Return the group of the announcers. Raise Unusable if the id of the cluster is not known,
        and no previous process knew it: announcers of two clusters would take each other for
        members, and each would leave its addresses to the other."""
        if cluster := self._cluster():
            return group_of(cluster, self._role)
        for each in maps.presentations().values():
            return each.group
        raise Unusable(
            "the id of the cluster, the uid of its namespace kube-system, cannot be read, and "
            "without it announcers of several clusters on one link cannot be told apart",
            fix="install the ClusterRole of this version, which permits it",
        )

    async def run(self) -> None:
        """Run the announcing process, and follow the kernel's changes of interfaces. Raise
        Unavailable if the process ends by itself."""
        while self._problem is not None:
            await asyncio.sleep(RETRY_S)
            await self._begin()
        self._requeue(self._refused)
        self._status_changed()
        assert self._settings is not None
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._follow())
            try:
                await self._helper.run(self._settings)
            finally:
                following.cancel()

    async def close(self) -> None:
        """Release the resources of this process. The kernel continues to answer."""
        if self._maps is not None:
            self._maps.close()
            self._maps = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def remove(self) -> Sequence[str]:
        """Hand over what this host owns, and remove everything."""
        return await remove_l2(self._role, self._pin_path)

    async def leave(self) -> None:
        """Hand over all addresses, and take over none. Return when other announcers have taken over
        and this host has ceased to answer, or when there is no other announcer."""
        self._leaving = True
        if self._problem is not None:
            return
        async with self._turn:
            await self._configure({}, ())
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                while self._reports.owns_any:
                    await asyncio.sleep(HAND_OVER_CHECK_S)

    async def withdraw(self) -> None:
        """Hand over all addresses to other announcers. Then announce no address, even if no other
        announcer has taken it over."""
        await self.leave()
        self._withdrawn = True
        await self._place_all()

    async def stay(self) -> None:
        """Undo `leave` and `withdraw`: this host may take over addresses again."""
        self._leaving = self._withdrawn = False
        await self._place_all()

    async def _place_all(self) -> None:
        if self._problem is None:
            async with self._turn:
                await self._place(list(self._requests), self._read_links())

    # Driver

    def render(self, intents: Mapping[ServiceKey, Intent]) -> Mapping[ServiceKey, Spec]:
        """See `spec.render`."""
        return spec.render(intents)

    def diff(
        self, desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Actual]
    ) -> Sequence[Change]:
        """See `spec.diff`."""
        return spec.diff(desired, actual)

    withdraws_first = True

    def withdrawals(
        self, intents: Mapping[ServiceKey, Intent], actual: Mapping[ServiceKey, Actual]
    ) -> Sequence[Change]:
        """See `spec.withdrawals`."""
        return spec.withdrawals(intents, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Actual]:
        """Return what is announced, as this process knows it. With None, also attach the program
        again where it is missing, and withdraw what a previous process announced and no Service
        requests."""
        if keys is not None:
            return {key: self._actual(key) for key in keys if key in self._specs}
        await self.withdraw_leftovers()
        return {key: self._actual(key) for key in self._specs}

    async def withdraw_leftovers(self) -> None:
        """Withdraw what a previous process announced and no Service requests, except the addresses
        of Services about which nothing is decided."""
        if self._problem is not None:
            return
        async with self._turn:
            if not self._presented:
                # A host without Services is a member too, and may own the next address.
                self._ready = self._presented = True
                await self._configure({}, ())
            undecided = self._undecided()
            leftovers = (
                tuple(
                    at for at in self._adopted - self._wanted.keys() if at.address not in undecided
                )
                if undecided is not None
                else ()
            )
            await self._follow_links(leftovers)
            self._adopted.difference_update(leftovers)

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Announce and withdraw addresses. An address that is announced for the first time is
        probed first; its Service waits."""
        services = {change.service for change in changes}
        if self._problem is not None:
            self._refused |= services
            problem = Outcome(
                "unavailable", str(self._problem), UNUSABLE, in_part=True, coarse=True
            )
            return dict.fromkeys(services, problem)
        async with self._turn:
            affected = {
                each.requested.address
                for each in changes
                if each.requested is not None and each.verb != "keep"
            }
            before = self._specs
            self._request(spec.carried_out(before, changes))
            self._ready = self._presented = True
            try:
                await self._place(affected, self._read_links())
            except BaseException:
                # The next attempt has to find the same changes.
                self._request(before)
                raise
        shared = {key for each in affected for key in self._requests.get(each, ())}
        self._requeue([key for key in shared - services if self._unsettled(key)])
        for address in affected:
            self._elsewhere_since_s.pop(address, None)
        kept: dict[ServiceKey, list[str]] = {}
        for each in changes:
            if each.verb == "keep" and each.requested is not None:
                kept.setdefault(each.service, []).append(each.requested.address)
        return {
            key: self._report(key).joined(method_change.waiting(kept[key], "layer 2", "BGP"))
            if key in kept
            else self._report(key)
            for key in services
        }

    def announces(self, address: str) -> bool:
        """Return whether this host answers for the address on a link, or knows that another host
        does."""
        statuses = self._reports.of_address(address, self._interfaces)
        return any(
            each.phase == "owned" or (each.phase == "silent" and each.holder) for each in statuses
        )

    # What is wanted

    def _request(self, specs: Mapping[ServiceKey, Spec]) -> None:
        self._specs = dict(specs)
        self._requests = spec.by_address(self._specs)

    def _read_links(self) -> HostLinks:
        """Return the interfaces of this host, and what the selectors choose of them."""
        links = read_host_links()
        selectors = [
            *self._default_selectors,
            *(name for each in self._specs.values() for one in each for name in one.interfaces),
        ]
        self._selection = select(dict.fromkeys(selectors), links.present, self._selection)
        return links._replace(former=self._selection)

    def _used(self, links: HostLinks) -> tuple[Interface, ...]:
        """Return the interfaces where this host is an announcer: the default ones, and those of
        addresses."""
        names = {name for each in self._placements.values() for name in each.interfaces}
        names.update(self._default(links))
        # An interface may have vanished since an address was placed on it.
        return tuple(
            Interface(links.indexes[name], name) for name in sorted(names) if name in links.indexes
        )

    def _default(self, links: HostLinks) -> Sequence[str]:
        return default_names(self._default_selectors, self._node_addresses, links)

    def _placed(self, addresses: Collection[str], links: HostLinks) -> dict[str, Placement]:
        """Return the placements of all addresses, with those of these addresses chosen again.
        Addresses that are announced now keep their room."""
        default = self._default(links)
        chosen = set(addresses)
        placements = {
            address: each for address, each in self._placements.items() if address not in chosen
        }
        room = Room(placements.values(), default)
        announced = {address for address, each in self._placements.items() if each.interfaces}
        for address in sorted(chosen, key=lambda each: (each not in announced, each)):
            if requests := self._requests.get(address):
                selectors = spec.combined(list(requests.values())).interfaces
                found = place(address, selectors, default, links)
                placements[address] = room.take(address, found)
        return placements

    async def _place(self, addresses: Collection[str], links: HostLinks) -> None:
        """Choose the interfaces of these addresses again, and tell the process what has changed."""
        self._placements = self._placed(addresses, links)
        wanted: dict[Place, Wanted] = {}
        for address in addresses:
            if address not in self._placements:
                continue
            request = spec.combined(list(self._requests[address].values()))
            for name in self._placements[address].interfaces:
                at = Place(links.indexes[name], address)
                candidates = () if self._withdrawn else request.candidates
                wanted[at] = Wanted(at, candidates, request.leaving)
        chosen = set(addresses)
        gone = [at for at in self._wanted if at.address in chosen and at not in wanted]
        new = {at: each for at, each in wanted.items() if self._wanted.get(at) != each}
        used = self._used(links)
        if used != self._interfaces:
            assert self._maps is not None
            indexes = [each.index for each in used]
            await attach(self._pin_path, self._role, self._maps, indexes)
            self._interfaces = used
        await self._configure(new, gone)
        self._adopted.difference_update(new)
        await detach(self._pin_path, self._role, but=[each.index for each in used])

    async def _configure(self, new: Mapping[Place, Wanted], gone: Collection[Place]) -> None:
        wanted = {at: each for at, each in {**self._wanted, **new}.items() if at not in gone}
        leaving = self._leaving or (bool(wanted) and all(each.leaving for each in wanted.values()))
        await self._helper.exchange(
            Configure(0, self._interfaces, tuple(new.values()), tuple(gone), self._ready, leaving)
        )
        self._wanted = wanted

    # Changes of interfaces

    async def _follow(self) -> None:
        """Until cancelled: follow interfaces that appear, vanish or change."""
        with closing(LinkEvents(default_routes=True)) as events:
            while True:
                await events.next()
                async with self._turn:
                    try:
                        await self._follow_links(())
                    except FairleadError as problem:
                        log.warning(
                            "following a change of the interfaces failed", problem=str(problem)
                        )
                await asyncio.sleep(FOLLOW_PAUSE_S)

    async def _follow_links(self, leftovers: Collection[Place]) -> None:
        """Attach the program to all interfaces that are used now, and place all addresses again if
        the interfaces have changed."""
        assert self._maps is not None
        links = self._read_links()
        before, after = self._placements, self._placed(self._requests, links)
        indexes = {each.name: each.index for each in self._interfaces}
        wanted: dict[str, set[int]] = {}
        for at in self._wanted:
            wanted.setdefault(at.address, set()).add(at.interface)
        # An interface that was created again has the same name and another index.
        affected = [
            address
            for address, placement in after.items()
            if placement != before.get(address)
            or {links.indexes[name] for name in placement.interfaces} != wanted.get(address, set())
        ]
        if affected or self._used(links) != self._interfaces:
            await self._place(affected, links)
            self._requeue({key for each in affected for key in self._requests.get(each, ())})
        else:
            await attach(self._pin_path, self._role, self._maps, list(indexes.values()))
        if leftovers:
            await self._configure({}, leftovers)

    # Reports

    def _reported(self, report: Report) -> None:
        """Take a report of the process."""
        now = timestamp(datetime.now(UTC))
        for key, finding in self._reports.take(report, self._names, self._requests, now):
            self._news.setdefault(key, []).append(finding)
        affected = {
            key for each in report.places for key in self._requests.get(each.place.address, ())
        }
        self._requeue([key for key in affected if self._unsettled(key)])
        if report.places or report.members is not None:
            self._status_changed()

    @property
    def _names(self) -> Mapping[int, str]:
        """The names of the interfaces, by index."""
        return {each.index: each.name for each in self._interfaces}

    def _actual(self, key: ServiceKey) -> Actual:
        moved = frozenset(each.address for each in self._specs[key] if self._moved(each.address))
        return Actual(self._specs[key], self._unsettled(key), moved)

    def _moved(self, address: str) -> bool:
        """Return whether this host does not own the address, or another method has announced it for
        long enough."""
        statuses = self._reports.of_address(address, self._interfaces)
        if self.announced_elsewhere is None or not any(each.phase == "owned" for each in statuses):
            return True
        if not self.announced_elsewhere(address):
            self._elsewhere_since_s.pop(address, None)
            return False
        now_s = asyncio.get_running_loop().time()
        return now_s - self._elsewhere_since_s.setdefault(address, now_s) >= MOVE_S

    def _unsettled(self, key: ServiceKey) -> bool:
        """Whether there is something to report about the Service that has not been reported."""
        return key in self._news or key in self._told or self._outcome(key).state != "done"

    def _outcome(self, key: ServiceKey) -> Outcome:
        return outcomes.outcome(
            self._host,
            self._specs.get(key, ()),
            self._placements,
            self._names,
            by_address=lambda address: self._reports.of_address(address, self._interfaces),
        )

    def _report(self, key: ServiceKey) -> Outcome:
        """Return the outcome of a Service, with what happened to it."""
        outcome = self._outcome(key)
        if outcome.state == "done":
            self._told.pop(key, None)
        else:
            self._told[key] = outcome
        # The host serves the Service, and other hosts may announce it, also by another method.
        failed = outcome.state != "done"
        return msgspec.structs.replace(
            outcome, in_part=failed, coarse=failed, notes=tuple(self._news.pop(key, ()))
        )

    def watch_status(self, changed: Callable[[], None]) -> None:
        """See `Component.watch_status`."""
        self._status_changed = changed

    def status(self) -> L2State:
        """Return the part of `/state`. May be called from any thread."""
        names = self._names
        problems = (self._problem, *(each.problem for each in list(self._placements.values())))
        findings = {each for each in problems if each is not None}
        return L2State(
            tuple(sorted(names.values())),
            self._reports.addresses(names, self._requests),
            self._reports.members(),
            self._reports.conflicts(),
            self._reports.takes,
            tuple(sorted(findings)),
        )

    def collectors(self) -> tuple[L2Collector]:
        return (L2Collector(self._numbers),)

    def _numbers(self) -> Numbers:
        return Numbers(
            self._reports.owned_by_interface(self._names),
            [(each.interface, each.state) for each in self._reports.members()],
            self._reports.announcements,
            self._maps.counters() if self._maps else {},
        )

    async def requirements(self) -> Collection[SysctlRequirement]:
        return requirements([each.name for each in self._interfaces], self._requests)
