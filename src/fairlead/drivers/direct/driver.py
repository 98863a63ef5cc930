"""The driver of class fairlead.io/direct: pinned maps, and a program at the ingress of the gateway's interfaces.

In: LoadBalancers. Out: packets for their listeners are handed to nodes. Forwarding does not depend on this process: when it
dies the maps and the program stay, and its successor adopts them as they are, with no packet lost and no connection moved.
Invariant: what is in the maps says itself whose it is; the only state here is a mirror of them, which is whole at every moment.
Follows tc-bpf(8), and what kube-proxy does on a node with packets for a VIP (ipMode VIP, KEP-1860) that reach it unmodified.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from fairlead.config import AttachKind
from fairlead.drivers.direct import attach, blackhole, pins, probe_ways, spec
from fairlead.drivers.direct.arena import GRACE_S
from fairlead.drivers.direct.attach import Attachment, Attachments, Programs
from fairlead.drivers.direct.blackhole import BlackholeRoutes
from fairlead.drivers.direct.counters import Counters
from fairlead.drivers.direct.mirror import Draining
from fairlead.drivers.direct.needs import needs_of
from fairlead.drivers.direct.neighbours import Node
from fairlead.drivers.direct.networks import Limits, Networks
from fairlead.drivers.direct.spec import (
    DirectActual,
    DirectChange,
    DirectSpec,
    ListenerKey,
    RemoveListener,
    SetListener,
    SetNode,
)
from fairlead.drivers.direct.steps import Work
from fairlead.drivers.direct.survey import Survey
from fairlead.drivers.direct.tables import Tables
from fairlead.drivers.direct.ways import Rules
from fairlead.drivers.host import Need
from fairlead.errors import FairleadError
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.net import bpffs
from fairlead.net.bpf import Map
from fairlead.net.program import Program
from fairlead.turns import gently, in_turns, parts

log = structlog.get_logger()

DEFAULT_PIN_PATH = bpffs.ROOT / "fairlead"
FOLLOW_PAUSE_S = 0.05
"""After a change of the networks the next ones are waited for so long, and then looked at together."""
AT_ONCE = 50
"""Services that are read, and changes that are carried out, in one go: some milliseconds, which others of the process wait.
Fewer would be no gain: where events come fast, those that are nearly done would wait for those that have just come."""
ROOM_AGAIN_S = GRACE_S + 0.05
"""Services that wait for room are retried this time after some was released."""
ASKED_AGAIN_S = 150.0
"""A listener that could not be made is asked for again about once a minute; after this time without a request it is no longer
wanted."""
INSERTS_PER_S = 125_000
"""New entries that each CPU may make, of each kind of flows that are open or end."""
NOTES_PER_S = 65_536
"""Notes that all CPUs may make, of each kind of flows of which one packet was seen. Half as many as there is room for, so that
each is there for a second at least, when the second packet should have come."""
NOTES_PER_CPU_S = 16_384
"""So many each may make, however many CPUs there are: one alone may get all packets. If a flood reaches more than four, notes
are there for less than a second."""
MESSAGES_PER_S = 1000
"""Messages that the data plane itself sends for each second and CPU, of each kind: echo replies, "too big", refusals."""

Turns = Callable[[Iterable[Sequence[ServiceKey]]], AsyncIterator[Sequence[ServiceKey]]]

Inherit = Callable[[Tables, dict[str, Map]], Awaitable[None]]


class DirectDriver:
    """Implements fairlead.drivers.Driver. Call `open` first and `close` last.

    interfaces: selectors (see `net.selection`) of the interfaces where packets for listeners arrive.
    wanted: where to take packets, as `gateway.attach` says. rules: how to send them to nodes.
    pin_path: a directory on a bpffs, of this instance alone. If it is below /sys/fs/bpf, a bpffs is mounted there if need be.
    priority: of the filter among an interface's tc filters, the lowest is asked first. Instances that share an interface
    need different ones.
    sizes: of maps that are made.
    share: the fraction of table memory, listeners, retained nodes and source ranges that one namespace may have; see `quota`.
    drain_s: so long any node may keep connections of a Service after it has ceased to get new ones, unless the Service says
    otherwise; 0: for as long as it has pods of it. A start begins the time anew.
    touched: called with the Services to retry because nodes became reachable or unreachable, or because a resource for which
    they wait was released.
    inherit: called once the maps are there, before anything is forwarded by them. With it the program tells of new entries.
    objects: the folder of the programs. clock: seconds that never go back, for graces and drains.
    """

    name = "direct"

    def __init__(
        self,
        interfaces: Sequence[str],
        *,
        wanted: AttachKind = "auto",
        rules: Rules | None = None,
        pin_path: Path = DEFAULT_PIN_PATH,
        priority: int = 100,
        sizes: pins.Sizes | None = None,
        share: float = 1.0,
        drain_s: float = 0.0,
        touched: Callable[[Collection[ServiceKey]], None] = lambda _: None,
        inherit: Inherit | None = None,
        objects: Path = pins.OBJECTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attachments = Attachments(tuple(interfaces), wanted, pin_path, priority)
        self._priority = priority
        self._rules = rules or Rules()
        self._pin_path = pin_path
        self._touched = touched
        self._inherit = inherit
        self._objects, self._clock = objects, clock
        self._sizes = sizes or pins.Sizes()
        self._limits = Limits(
            INSERTS_PER_S, max(NOTES_PER_S // (os.cpu_count() or 1), NOTES_PER_CPU_S), MESSAGES_PER_S, tell=inherit is not None
        )
        self._drain_s, self._share = drain_s, share
        self._lock = -1
        self._pins: pins.Pins | None = None
        self._tables: Tables | None = None
        self._networks: Networks | None = None
        self._blackholes: BlackholeRoutes | None = None
        self._troubled: set[ServiceKey] = set()
        self._unserved: dict[ServiceKey, tuple[frozenset[str], float]] = {}
        """The addresses of listeners that could not be made, and when these were asked for last. They have blackhole routes as
        well, because the router sends packets for them here."""
        self._look_for_room: asyncio.TimerHandle | None = None
        """Set while Services that wait for room are not to be retried, because the last retry was a moment ago."""
        self._attached = False
        self._audited = False
        self._auditing = asyncio.Lock()
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        """Make the maps or adopt them, and attach the program. Raises Refused where the host does not permit it, and
        Unavailable if an interface does not exist. Either way nothing is attached then that was not attached before.

        A program that forwards is not replaced by one whose maps are empty. This concerns maps of another version that
        could not be carried over, and a program of ours whose pins are gone. The program that is there goes on until the first
        `apply` has filled our maps, or a second whole `read` shows that there is nothing to fill them with.
        """
        self._lock = pins.lock(self._pin_path)
        before = await attach.attached(self._pin_path)
        try:
            self._blackholes = BlackholeRoutes(lambda: self._attachments.names, self._priority)
            self._pins = await asyncio.to_thread(pins.open_pins, self._pin_path, self._sizes, self._objects)
            self._tables = Tables(self._pins.maps, peers=self._inherit is not None, share=self._share, clock=self._clock)
            self._tables.adopt(await asyncio.to_thread(self._tables.survey, self._tables.known(), with_entries=True))
            if self._inherit is not None:
                await self._inherit(self._tables, self._pins.maps)
            self._networks = Networks(
                self._attachments,
                self._rules,
                self._limits,
                self._pins.maps,
                self._tables.nodes,
                Programs(self._tc, self._pins.xdp, self._follow_older),
            )
            self._networks.check()
            forwards_otherwise = before.filters and not attach.works_on(before, self._pins.maps["listeners"])
            if self._pins.whole and (self._pins.older or not forwards_otherwise):
                await self._attach()
        except BaseException:
            await attach.detach(self._pin_path, but=before)
            if self._pins is not None:
                self._pins.discard()
            self._let_go()
            raise

    async def close(self, *, remove: bool = False) -> None:
        """Let go. `remove=False`: forwarding goes on by itself. `remove=True`: no trace is left of it."""
        try:
            if remove:
                await attach.detach(self._pin_path)
                await probe_ways.detach(probe_ways.filter_name(self._pin_path))
                await asyncio.to_thread(pins.remove, self._pin_path)
                blackhole.remove(self._priority)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._look_for_room is not None:
            self._look_for_room.cancel()
            self._look_for_room = None
        for each in (self._tables, self._pins, self._networks, self._blackholes):
            if each is not None:
                each.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._tables, self._pins, self._networks, self._lock = None, None, None, -1
        self._attached = self._audited = False

    def _opened(self) -> tuple[Tables, pins.Pins, Networks]:
        if self._tables is None or self._pins is None or self._networks is None:
            raise RuntimeError("the driver is not open")
        return self._tables, self._pins, self._networks

    def _tc(self) -> Program:
        """The complete program, to be attached soon. Loading it takes most of a second, in which an
        older one works on. Most of the changes that the older one makes are copied here, in the
        thread, which leaves little to `_follow_older`."""
        _, opened, _ = self._opened()
        program = opened.tc()
        opened.follow_older(forwarding=False)
        return program

    def _follow_older(self) -> None:
        """Copy what an older program has changed in its tables, right before ours takes its place."""
        _, opened, networks = self._opened()
        opened.follow_older(forwarding=False)
        networks.set_copying(bool(opened.copied))

    async def _attach(self) -> None:
        """Have our programs on every interface; what an older layout left is taken away once ours forwards."""
        _, opened, networks = self._opened()
        await networks.attach()
        try:
            self._pins = await asyncio.to_thread(opened.leave_older)
        finally:
            networks.set_copying(False)
        self._attached = True
        self._look_again_at(await networks.find_ways())

    @property
    def interfaces(self) -> tuple[Attachment, ...]:
        """What is attached to each interface, and why that."""
        return self._attachments.shown

    async def needs(self) -> tuple[Need, ...]:
        """What it needs of its host now."""
        _, _, networks = self._opened()
        return needs_of(networks.next_hops)

    async def among(self, cluster: Collection[Node]) -> None:
        """Tell the names and addresses of the cluster's nodes: this host may be one, and others may hand packets to it."""
        _, _, networks = self._opened()
        async with self._changing:
            await networks.among(cluster)

    async def follow(self) -> None:
        """Keep attachments and ways as the host's networks are, by the kernel's events, until cancelled. Audits do so too."""
        tables, _, networks = self._opened()
        while True:
            news = await networks.news()
            began_s = time.monotonic()
            async with self._changing:
                try:
                    if self._attached:
                        self._look_again_at(await networks.heed(news))
                        if self._blackholes and self._blackholes.outdated:
                            await self._blackholes.renew(tables.addresses)
                except FairleadError as error:
                    log.warning("the host's networks changed, but are not followed until the next audit", error=str(error))
            # Where thousands of routes change, most of the time is left for other work.
            await asyncio.sleep(max(FOLLOW_PAUSE_S, 5 * (time.monotonic() - began_s)))

    def _look_again_at(self, lost: Collection[str]) -> None:
        """The Services of nodes that have lost their way are to be looked at again, and those that wait for a way."""
        tables, _, _ = self._opened()
        if lost:
            self._troubled |= tables.services_of(lost)
        if self._troubled:
            self._touched(self._troubled)

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, DirectSpec]:
        """See `spec.render`."""
        return spec.render(intents, self._drain_s)

    def foresee(self, intents: Mapping[ServiceKey, LoadBalancer]) -> None:
        """Have the tables ready that these would need. Changes nothing; may be called in a thread."""
        spec.foresee(intents)

    def diff(
        self, desired: Mapping[ServiceKey, DirectSpec], actual: Mapping[ServiceKey, DirectActual]
    ) -> Sequence[DirectChange]:
        """See `spec.diff`."""
        return spec.diff(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, DirectActual]:
        """With keys: from the mirror, at once. None: from the maps; this renews the mirror that reading with keys answers from.
        The first time it is as `open` has read it, a moment ago: nobody else writes to the maps.

        A whole read also finds the ways to the nodes anew, and puts back what an interface has lost (it was made anew, say).
        Maps of an older layout beside ours: the first whole read leaves their program in charge, as ours has nothing to
        forward by yet; the `apply` that fills our maps puts ours in its place. If nothing was applied by the second whole
        read, there was nothing to apply, and ours takes over then.
        """
        tables, _, networks = self._opened()
        if keys is not None:
            return await _actual(tables, keys, in_turns)
        async with self._auditing:
            if self._attached or self._audited:
                async with self._changing:
                    await (networks.reattach() if self._attached else self._attach())
            turns: Turns = gently if self._audited else in_turns  # a start is waited for, an audit is not
            if self._audited:
                await self._renew()
            self._audited = True
            if self._blackholes:
                await self._blackholes.renew(tables.addresses)
                async with self._changing:
                    await self._blackholes.give_up(self._without_listeners(tables, self._forget_unserved()))
            return await _actual(tables, tables.services, turns)

    async def _renew(self) -> None:
        """Have the mirror be what is in the maps, and find the ways to the nodes there. Changes go on meanwhile: of what they
        touch the mirror says more than what was read."""
        tables, _, networks = self._opened()
        async with self._changing:
            known = tables.known()
        survey: Survey | None = None
        async for part in gently(tables.surveying(known)):
            survey = part
        assert survey is not None  # the last part is the whole
        ways = await networks.ways(survey.nodes.addresses())
        tables.adopt(survey)
        self._use_what_is_free(tables)
        networks.settle(ways)
        tables.grow_up()

    async def apply(self, changes: Sequence[DirectChange]) -> Mapping[ServiceKey, Outcome]:
        """Carry the changes out. A Service has an Outcome if one of its nodes cannot be reached (the others serve it then), if
        one of its listeners is held by another Service, or if there is no room for it. Raises Unavailable or Refused where the
        program cannot be attached."""
        tables, _, networks = self._opened()
        async with self._changing:
            # A node that others use has its way, which is kept as it should be: to ask for it again would take a thread.
            needed = [
                each for each in changes if not (isinstance(each, SetNode) and tables.nodes.leads(each.node, each.address))
            ]
            setting = [change for change in needed if isinstance(change, SetNode)]
            async with self._blackholed(changes):
                ways = await networks.ways({(change.node, change.address) for change in setting})
                work = Work(tables, {change: ways[change.node, change.address] for change in setting}, needed)
                async for some in in_turns(parts(needed, AT_ONCE)):
                    work.do(some)
                outcomes = work.end()
                self._note_unserved({change.service for change in changes}, work.missing)
            if not self._attached:
                await self._attach()
        self._use_what_is_free(tables)
        failed = {service for service, outcome in outcomes.items() if outcome.state != "done"}
        self._troubled = self._troubled.difference(change.service for change in changes) | failed
        return outcomes

    def _use_what_is_free(self, tables: Tables) -> None:
        """Retry the Services that wait for room if some was released: at once, but not more often than once in the time after
        which released memory can be used, and once more at the end of that time."""
        if self._look_for_room is None and (relieved := tables.quotas.relieved()):
            self._touched(relieved)
            self._look_for_room = asyncio.get_running_loop().call_later(ROOM_AGAIN_S, self._look_again_for_room, tables)

    def _look_again_for_room(self, tables: Tables) -> None:
        self._look_for_room = None
        self._touched(tables.quotas.memory.waiting.copy())
        self._use_what_is_free(tables)

    @asynccontextmanager
    async def _blackholed(self, changes: Sequence[DirectChange]) -> AsyncIterator[None]:
        """After the changes, which are made inside, their addresses have blackhole routes or are done without. The kernel takes
        new ones in meanwhile: at a start, when there are thousands, it has work for as long."""
        tables, _, _ = self._opened()
        if self._blackholes is None:
            yield
            return
        listening = {each.listener.key.address for each in changes if isinstance(each, SetListener)}
        touched = listening | {each.key.address for each in changes if isinstance(each, RemoveListener)}
        async with asyncio.TaskGroup() as group:
            if new := self._blackholes.lacking(listening):
                group.create_task(self._blackholes.have(new))
            yield
        await self._blackholes.give_up(self._without_listeners(tables, touched))

    def _note_unserved(self, services: Collection[ServiceKey], missing: Mapping[ServiceKey, Collection[ListenerKey]]) -> None:
        """Of these Services, exactly these listeners could not be made."""
        for service in services:
            self._unserved.pop(service, None)
        now_s = self._clock()
        for service, keys in missing.items():
            self._unserved[service] = frozenset(key.address for key in keys), now_s

    def _forget_unserved(self) -> set[str]:
        """Forget listeners that were not asked for again, because the Service is gone or changed; return their addresses."""
        since_s = self._clock() - ASKED_AGAIN_S
        over = [service for service, (_, asked_s) in self._unserved.items() if asked_s < since_s]
        return set().union(*(self._unserved.pop(service)[0] for service in over))

    def _without_listeners(self, tables: Tables, addresses: Collection[str]) -> set[str]:
        """Those of these addresses where no listener is, nor should be."""
        wanted = frozenset[str]().union(*(each for each, _ in self._unserved.values()))
        return {each for each in addresses if each not in tables.addresses and each not in wanted}

    @property
    def counters(self) -> Counters:
        """What the data plane has counted."""
        tables, opened, _ = self._opened()
        return Counters(tables, opened.maps, opened.object_file.types.enumerators("event"))

    def draining(self) -> list[Draining]:
        """See `Tables.draining`."""
        tables, _, _ = self._opened()
        return tables.draining()


async def _actual(tables: Tables, keys: Collection[ServiceKey], turns: Turns) -> dict[ServiceKey, DirectActual]:
    """What these Services have, from the mirror."""
    actual: dict[ServiceKey, DirectActual] = {}
    async for some in turns(parts(tuple(keys), AT_ONCE)):
        actual |= tables.actual(some)
    return actual


async def remove_pins(pin_path: Path, priority: int = 100) -> list[str]:
    """Take away what a process that ended left behind: its filters and routes in this network namespace, and its pins; says
    what there was. Raises Refused while a process works with the pins.

    Pins may be gone while the rest is there: the bpffs was mounted anew, or they were deleted by hand.
    """
    lock = pins.lock(pin_path) if await asyncio.to_thread(pin_path.exists) else -1
    try:
        detached = await attach.detach(pin_path)
        detached += await probe_ways.detach(probe_ways.filter_name(pin_path))
        return [*detached, *await asyncio.to_thread(pins.remove, pin_path), *blackhole.remove(priority)]
    finally:
        if lock >= 0:
            os.close(lock)
