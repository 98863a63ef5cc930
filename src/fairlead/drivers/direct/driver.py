"""The driver of class fairlead.io/direct: pinned maps, and a program at the ingress of the gateway's interfaces.

In: LoadBalancers. Out: packets for their listeners are handed to nodes. Forwarding does not depend on this process: when it
dies the maps and the program stay, and its successor adopts them as they are, with no packet lost and no connection moved.
Invariant: what is in the maps says itself whose it is; the only state here is a mirror of them.
Follows tc-bpf(8), and what kube-proxy does on a node with packets for a VIP (ipMode VIP, KEP-1860) that reach it unmodified.
"""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fairlead.drivers.direct import pins, spec
from fairlead.drivers.direct.layout import COUNTER, INDEX, SETTINGS, TRAFFIC
from fairlead.drivers.direct.next_hop import routes
from fairlead.drivers.direct.spec import DirectActual, DirectChange, DirectSpec, HoldNodes, RemoveServer, SetNode, SetServer
from fairlead.drivers.direct.tables import Tables
from fairlead.errors import Refused, Unavailable
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.net import bpffs, tc

DEFAULT_PIN_PATH = bpffs.ROOT / "fairlead"
_DROP_REASONS = ("NO_MEMBER", "NO_NEXT_HOP", "HOP_LIMIT", "FRAGMENT")


class Traffic(NamedTuple):
    """What listeners got so far. `flows`: TCP connections that opened, UDP flows that were new."""

    packets: int = 0
    bytes: int = 0
    flows: int = 0


class DirectDriver:
    """Implements fairlead.drivers.Driver. Call `open` first and `close` last.

    interfaces: names of those on which packets for listeners come in.
    pin_path: a directory on a bpffs, of this instance alone. If it is below /sys/fs/bpf, a bpffs is mounted there if need be.
    priority: of the filter among an interface's tc filters, the lowest is asked first. Instances that share an interface
    need different ones.
    arena_bytes: memory for slots, locked: 2 KiB to 128 KiB a listener, twice that while old connections are kept in place.
    connections, datagrams: entries for TCP connections in slots that changed, and for UDP flows; some 100 bytes each, locked.
    inserts_per_s: new entries that each CPU may make, of each kind.
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
    ) -> None:
        self._interfaces = tuple(interfaces)
        self._pin_path = pin_path
        self._priority = priority
        self._sizes = {"arena": arena_bytes // 64, "connections": connections, "datagrams": datagrams}
        self._inserts_per_s = inserts_per_s
        self._lock = -1
        self._pins: pins.Pins | None = None
        self._tables: Tables | None = None
        self._attached = False
        self._audited = False
        self._mirror_lock = asyncio.Lock()  # the mirror is read anew in a thread

    async def open(self) -> None:
        """Make the maps or adopt them, and attach the program. Raises Refused where the host does not permit it.

        Where the maps of another version lie, its program goes on forwarding until the first `apply` has filled ours, or
        a second whole `read` shows that there is nothing to fill them with.
        """
        self._lock = pins.lock(self._pin_path)
        try:
            self._pins = await asyncio.to_thread(pins.open_pins, self._pin_path, self._sizes)
            self._pins.maps["settings"].update(INDEX.pack(0), SETTINGS.pack(self._inserts_per_s, 0))
            self._tables = Tables(self._pins.maps)
            await asyncio.to_thread(self._tables.load)
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
        """With keys: from the mirror. None: from the maps; next hops are compared with the routing table, and a filter that an
        interface has lost (it was made anew, say) is put back."""
        tables, _ = self._opened()
        if keys is not None:
            return tables.actual(keys)
        async with self._mirror_lock:
            if self._attached or self._audited:
                await self._reattach()
            self._audited = True
            await asyncio.to_thread(tables.load)
            await self._check_next_hops(tables)
            return tables.actual(None)

    async def _reattach(self) -> None:
        have = {found.interface for found in await tc.filters(_filter_name(self._pin_path))}
        want = {await tc.interface_index(interface) for interface in self._interfaces}
        if want - have:
            await self._attach()

    async def _check_next_hops(self, tables: Tables) -> None:
        async with routes() as table:
            for name, address in tables.nodes.addresses(list(tables.nodes.by_name)):
                record = tables.nodes.by_name[name]
                try:
                    hop = await table.next_hop(name, address)
                    holds = hop.interface == (record.interface6 if ":" in address else record.interface4)
                except (Unavailable, Refused):
                    holds = False  # `apply` says why
                if not holds:
                    tables.nodes.doubt(name, ipv6=":" in address)

    async def apply(self, changes: Sequence[DirectChange]) -> Mapping[ServiceKey, Outcome]:
        """Carry the changes out: all, or raise. What was done before a failure stays, and is right as far as it goes."""
        tables, _ = self._opened()
        async with self._mirror_lock:
            await self._apply(tables, changes)
        return {}

    async def _apply(self, tables: Tables, changes: Sequence[DirectChange]) -> None:
        await self._set_nodes(tables, [change for change in changes if isinstance(change, SetNode)])
        for change in changes:
            match change:
                case SetServer(service=service, uid=uid, server=server, slots=slots):
                    tables.set_server(server.key, service, uid, slots)
                case HoldNodes(service=service, nodes=nodes):
                    tables.hold_nodes(service, nodes)
                case RemoveServer(service=service, key=key):
                    tables.remove_server(key, service)
        tables.forget_unused_nodes()
        if not self._attached:
            await self._attach()

    async def _set_nodes(self, tables: Tables, changes: Sequence[SetNode]) -> None:
        if not changes:
            return
        async with routes() as table:
            hops = [(change, await table.next_hop(change.node, change.address)) for change in changes]
        for change, hop in hops:
            tables.nodes.set_address(change.node, change.address, hop)

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

    def _event(self, name: str) -> int:
        _, opened = self._opened()
        number = opened.object_file.types.enumerators("event")[name]
        return sum(COUNTER.unpack(row)[0] for row in opened.maps["events"].per_cpu(INDEX.pack(number)))


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
