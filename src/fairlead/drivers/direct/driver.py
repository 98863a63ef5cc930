"""The driver of class fairlead.io/direct: pinned maps, and a program at the ingress of the gateway's interfaces.

In: LoadBalancers. Out: packets for their listeners are handed to nodes. Forwarding does not depend on this process: when it
dies the maps and the program stay, and its successor adopts them as they are, with no packet lost and no connection moved.
Invariant: what is in the maps says itself whose it is; the only state here is a mirror of them, which is whole at every moment.
Follows tc-bpf(8), and what kube-proxy does on a node with packets for a VIP (ipMode VIP, KEP-1860) that reach it unmodified.
"""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fairlead.drivers.direct import pins, spec
from fairlead.drivers.direct.layout import COUNTER, INDEX, SETTINGS, TRAFFIC
from fairlead.drivers.direct.next_hop import NextHop, routes
from fairlead.drivers.direct.nodes import NodesFound
from fairlead.drivers.direct.spec import DirectActual, DirectChange, DirectSpec, SetNode
from fairlead.drivers.direct.steps import carry_out
from fairlead.drivers.direct.tables import Survey, Tables
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.net import bpffs, tc

DEFAULT_PIN_PATH = bpffs.ROOT / "fairlead"
DEFAULT_KEEP_LEFT_S = 24 * 3600.0
"""kube-proxy's time-out of established TCP connections (conntrack.tcpEstablishedTimeout): a node has forgotten by then what
was idle all the time."""
SURVEYS = 3
"""How often the maps are read beside changes before changes wait for it."""
_DROP_REASONS = ("NO_MEMBER", "NO_NEXT_HOP", "HOP_LIMIT", "FRAGMENT")


class Traffic(NamedTuple):
    """What listeners got so far. `flows`: TCP connections that opened, UDP flows that were new."""

    packets: int = 0
    bytes: int = 0
    flows: int = 0


class Entries(NamedTuple):
    """How full a table of connection entries is. When it is full each new entry pushes out one that was not used for long; if
    that one's connection is still open, and its slot has changed since, the connection breaks."""

    used: int
    most: int


class DirectDriver:
    """Implements fairlead.drivers.Driver. Call `open` first and `close` last.

    interfaces: names of those on which packets for listeners come in.
    pin_path: a directory on a bpffs, of this instance alone. If it is below /sys/fs/bpf, a bpffs is mounted there if need be.
    priority: of the filter among an interface's tc filters, the lowest is asked first. Instances that share an interface
    need different ones.
    arena_bytes: memory for slots, locked: 2 KiB to 128 KiB a listener, twice that while old connections are kept in place.
    connections, datagrams: entries for TCP connections in slots that changed, and for UDP flows; some 100 bytes each, locked.
    inserts_per_s: new entries that each CPU may make, of each kind.
    keep_left_s: so long a node may keep TCP connections of a Service with policy Cluster after it has ceased to be a member,
    because its last pod went. Its service proxy goes on handing them to pods elsewhere. The list must end somewhere: entries
    and slots do not show whether a connection is still in use. A start begins the time anew.
    Sizes hold for maps that are made; those of a predecessor stay as they are.
    """

    name = "direct"

    def __init__(
        self,
        interfaces: Sequence[str],
        *,
        pin_path: Path = DEFAULT_PIN_PATH,
        priority: int = 100,
        arena_bytes: int = 16 << 20,
        connections: int = 131072,
        datagrams: int = 65536,
        inserts_per_s: int = 125_000,
        keep_left_s: float = DEFAULT_KEEP_LEFT_S,
    ) -> None:
        self._interfaces = tuple(interfaces)
        self._pin_path = pin_path
        self._priority = priority
        self._sizes = {"arena": arena_bytes // 64, "connections": connections, "datagrams": datagrams}
        self._inserts_per_s = inserts_per_s
        self._keep_left_s = keep_left_s
        self._lock = -1
        self._pins: pins.Pins | None = None
        self._tables: Tables | None = None
        self._attached = False
        self._audited = False
        self._auditing = asyncio.Lock()
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        """Make the maps or adopt them, and attach the program. Raises Refused where the host does not permit it.

        Where the maps of another version lie, its program goes on forwarding until the first `apply` has filled ours, or
        a second whole `read` shows that there is nothing to fill them with.
        """
        self._lock = pins.lock(self._pin_path)
        try:
            self._pins = await asyncio.to_thread(pins.open_pins, self._pin_path, self._sizes)
            self._pins.maps["settings"].update(INDEX.pack(0), SETTINGS.pack(self._inserts_per_s, 0))
            self._tables = Tables(self._pins.maps, keep_left_s=self._keep_left_s)
            self._tables.adopt(await asyncio.to_thread(self._tables.survey, self._tables.known(), with_entries=True))
            if not self._pins.older:
                await self._attach()
        except BaseException:
            self._let_go()
            raise

    async def close(self, *, remove: bool = False) -> None:
        """Let go. `remove=False`: forwarding goes on by itself. `remove=True`: no trace is left of it."""
        try:
            if remove:
                await _remove(self._pin_path)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._tables:
            self._tables.close()
        if self._pins:
            self._pins.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._tables, self._pins, self._lock = None, None, -1
        self._attached = self._audited = False

    def _opened(self) -> tuple[Tables, pins.Pins]:
        if self._tables is None or self._pins is None:
            raise RuntimeError("the driver is not open")
        return self._tables, self._pins

    async def _attach(self) -> None:
        """Have our program on every interface; what an older layout left is taken away once ours forwards."""
        _, opened = self._opened()
        name = _filter_name(self._pin_path)
        wanted = {await tc.interface_index(interface) for interface in self._interfaces}
        for index in wanted:
            await tc.attach(index, opened.program.descriptor, name=name, priority=self._priority)
        for found in await tc.filters(name):
            if (found.interface, found.priority) not in {(index, self._priority) for index in wanted}:
                await tc.detach(found)
        for path in opened.older:
            bpffs.remove(path)
        self._pins = opened._replace(older=())
        self._attached = True

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, DirectSpec]:
        """See `spec.render`."""
        return spec.render(intents)

    def diff(
        self, desired: Mapping[ServiceKey, DirectSpec], actual: Mapping[ServiceKey, DirectActual]
    ) -> Sequence[DirectChange]:
        """See `spec.diff`."""
        return spec.diff(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, DirectActual]:
        """With keys: from the mirror, at once. None: from the maps; this renews the mirror that reading with keys answers from.

        A whole read also compares the next hops with the routing table, and puts back a filter that an interface has lost (it
        was made anew, say). Maps of an older layout beside ours: the first whole read leaves their program in charge, as ours
        has nothing to forward by yet; the `apply` that fills our maps puts ours in its place. If nothing was applied by the
        second whole read, there was nothing to apply, and ours takes over then.
        """
        tables, _ = self._opened()
        if keys is not None:
            return tables.actual(keys)
        async with self._auditing:
            if self._attached or self._audited:
                async with self._changing:
                    await self._reattach()
            self._audited = True
            await self._renew(tables)
            return tables.actual(None)

    async def _renew(self, tables: Tables) -> None:
        """Have the mirror be what is in the maps. Changes go on meanwhile, a survey that they overtook counts for nothing."""
        for _ in range(SURVEYS):
            if _adopt(tables, *await self._survey(tables)):
                return
        async with self._changing:
            _adopt(tables, *await self._survey(tables))

    async def _survey(self, tables: Tables) -> tuple[Survey, Collection[tuple[str, str]]]:
        """What is in the maps, and those (node, address) whose next hop there holds no more."""
        survey = await asyncio.to_thread(tables.survey, tables.known())
        return survey, await _astray(survey.nodes)

    async def _reattach(self) -> None:
        have = {found.interface for found in await tc.filters(_filter_name(self._pin_path))}
        want = {await tc.interface_index(interface) for interface in self._interfaces}
        if want - have:
            await self._attach()

    async def apply(self, changes: Sequence[DirectChange]) -> Mapping[ServiceKey, Outcome]:
        """Carry the changes out. A Service has an Outcome if one of its nodes cannot be reached (the others serve it then), if
        one of its listeners is held by another Service, or if there is no room for it. Raises Unavailable or Refused where the
        program cannot be attached."""
        tables, _ = self._opened()
        async with self._changing:
            next_hops = await _find_next_hops([change for change in changes if isinstance(change, SetNode)])
            outcomes = carry_out(tables, changes, next_hops)
            if not self._attached:
                await self._attach()
        return outcomes

    def counters(self) -> dict[ServiceKey, Traffic]:
        """What each Service got since its listeners were made."""
        tables, opened = self._opened()
        totals: dict[ServiceKey, Traffic] = {}
        for service, index in tables.statistics():
            rows = [TRAFFIC.unpack(row) for row in opened.maps["statistics"].per_cpu(INDEX.pack(index))]
            so_far = totals.get(service, Traffic())
            totals[service] = Traffic(*(sum(column) for column in zip(so_far, *rows, strict=True)))
        return totals

    def drops(self) -> dict[str, int]:
        """Packets for listeners that were dropped since the maps were made, by reason.

        The reasons: no_member, no_next_hop, hop_limit, fragment (see bpf/structs.h).
        """
        return {reason.lower(): self._event(reason) for reason in _DROP_REASONS}

    def untracked(self) -> int:
        """New flows that got no entry, because the insert limit was reached. Under a flood of SYNs, the flood."""
        return self._event("TRACK_REFUSED")

    def entries(self) -> dict[str, Entries]:
        """How full the tables of TCP connections and of UDP flows are."""
        _, opened = self._opened()
        return {
            name: Entries(opened.maps[name].count(), opened.maps[name].spec.max_entries)
            for name in ("connections", "datagrams")
        }

    def _event(self, name: str) -> int:
        _, opened = self._opened()
        number = opened.object_file.types.enumerators("event")[name]
        return sum(COUNTER.unpack(row)[0] for row in opened.maps["events"].per_cpu(INDEX.pack(number)))


def _adopt(tables: Tables, survey: Survey, astray: Collection[tuple[str, str]]) -> bool:
    if not tables.adopt(survey):
        return False
    for node, address in astray:
        tables.nodes.doubt(node, ipv6=":" in address)
    return True


async def _astray(nodes: NodesFound) -> list[tuple[str, str]]:
    found = []
    async with routes() as table:
        for name, address in nodes.addresses():
            record = nodes.by_name[name]
            try:
                hop = await table.next_hop(name, address)
            except (Unavailable, Refused):
                found.append((name, address))  # `apply` says why
                continue
            if hop.interface != (record.interface6 if ":" in address else record.interface4):
                found.append((name, address))
    return found


async def _find_next_hops(changes: Sequence[SetNode]) -> dict[SetNode, NextHop | FairleadError]:
    found: dict[SetNode, NextHop | FairleadError] = {}
    if not changes:
        return found
    async with routes() as table:
        for change in changes:
            try:
                found[change] = await table.next_hop(change.node, change.address)
            except (Unavailable, Refused) as error:
                found[change] = error
    return found


def _filter_name(pin_path: Path) -> str:
    """What marks our filters: two instances on one interface have different pin paths."""
    return f"fairlead:{pin_path.absolute()}"


def _absent(path: Path) -> bool:
    return not path.exists()


async def _remove(pin_path: Path) -> None:
    for found in await tc.filters(_filter_name(pin_path)):
        await tc.detach(found)
    bpffs.remove(pin_path)


async def remove_pins(pin_path: Path) -> None:
    """Take away what a process that ended left behind: its filters in this network namespace, and its pins.

    Nothing there: nothing is done. Raises Refused while a process works with them.
    """
    if _absent(pin_path):
        return
    lock = pins.lock(pin_path)
    try:
        await _remove(pin_path)
    finally:
        os.close(lock)
