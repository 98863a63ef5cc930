"""What of the data plane depends on this host's networks: programs at interfaces, ways to nodes, VLAN tags.

In: the kernel's facts and events, the nodes in the maps, the nodes of the cluster. Out: the maps `ways`, `tags` and
`settings` as they should be, programs where they should be.
Invariant: each method brings all that it is about to what holds now, whatever was missed before. Nothing here knows Services.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import structlog

from fairlead.drivers.direct.attach import Attachments, Programs
from fairlead.drivers.direct.layout import AMONG_NODES, HERE, INDEX, NOWHERE, SETTINGS, TELL, Way, tick
from fairlead.drivers.direct.neighbours import News, Node, Surroundings
from fairlead.drivers.direct.nodes import NO_WAYS, Nodes
from fairlead.drivers.direct.ways import Rules
from fairlead.errors import FairleadError
from fairlead.net.bpf import Map

log = structlog.get_logger()

_ONLY = INDEX.pack(0)
COPYING_LIMIT_S = 30.0
"""Longer than it takes to copy the entries of full tables. Only a process that dies meanwhile reaches it."""


class Limits(NamedTuple):
    """What goes into the map `settings` as it is configured. `tell`: new entries are wanted in user space."""

    inserts_per_s: int
    notes_per_s: int
    messages_per_s: int
    tell: bool = False


def among_nodes(ways: Iterable[Way | FairleadError]) -> bool:
    """Whether this host is one of the nodes to which these ways lead."""
    return any(isinstance(way, Way) and way.kind == HERE for way in ways)


class Networks:
    """Close it. Its methods are not to run beside each other."""

    def __init__(
        self, attachments: Attachments, rules: Rules, limits: Limits, maps: Mapping[str, Map], nodes: Nodes, programs: Programs
    ) -> None:
        self.attachments = attachments
        self._surroundings = Surroundings(rules)
        self._rules = rules
        self._limits = limits
        self._maps = maps
        self._nodes = nodes
        self._programs = programs
        self._cluster: tuple[Node, ...] | None = None
        self._unmatched: tuple[str, ...] = ()
        self._copying_until = 0
        (_, _, _, flags, *_) = SETTINGS.unpack(maps["settings"].lookup(_ONLY) or bytes(SETTINGS.size))
        self._set(among=bool(flags & AMONG_NODES))  # as a predecessor knew it, until `find_ways` does

    def close(self) -> None:
        """Hear of nothing more; what is attached stays."""
        self._surroundings.close()

    def set_copying(self, copying: bool) -> None:
        """Tell the program that flow entries of an older program are being copied, for at most COPYING_LIMIT_S: until then it
        drops packets of flows that may have an entry there, so that their senders send again. Otherwise it would send the
        packets to the node that the flow would have without an entry."""
        self._copying_until = tick(time.monotonic() + COPYING_LIMIT_S) if copying else 0
        self._set(among=self._among)

    def _set(self, *, among: bool) -> None:
        self._among = among
        flags = AMONG_NODES * among | TELL * self._limits.tell
        port = self._rules.vxlan_port.to_bytes(2, "big")
        limits = self._limits
        record = SETTINGS.pack(
            limits.inserts_per_s, limits.notes_per_s, limits.messages_per_s, flags, port, self._copying_until
        )
        if self._maps["settings"].lookup(_ONLY) != record:
            self._maps["settings"].update(_ONLY, record)

    def check(self) -> None:
        """Raises as `Attachments.check`."""
        self.attachments.check(self._surroundings.interfaces())

    async def attach(self) -> None:
        """Have our programs on every interface. Raises as `Attachments.attach`."""
        before = self.attachments.shown
        try:
            await self.attachments.attach(self._programs, self._maps["tags"], self._surroundings.interfaces())
        finally:
            self._surroundings.fast = self.attachments.fast
            for each in set(self.attachments.shown) - set(before):
                log.info("attached", interface=each.name, attach=each.attach, why=each.why)
            self._tell_unmatched()

    def _tell_unmatched(self) -> None:
        """Log the selectors that match no interface, when they have changed."""
        unmatched = self.attachments.unmatched
        if unmatched and unmatched != self._unmatched:
            log.info("selectors match no interface of this host", selectors=", ".join(unmatched))
        self._unmatched = unmatched

    async def reattach(self) -> None:
        """Put back what an interface has lost. Raises as `Attachments.attach`."""
        if not await self.attachments.whole(self._surroundings.interfaces()):
            await self.attach()

    async def ways(self, nodes: Iterable[Node]) -> dict[Node, Way | FairleadError]:
        """The way to each of these nodes, or why there is none."""
        asked = tuple(nodes)
        return await asyncio.to_thread(self._surroundings.ways, asked) if asked else {}

    async def find_ways(self) -> set[str]:
        """Have the ways to all nodes be as they are now. The nodes that have lost one."""
        ways = await self.ways({*self._nodes.addresses(), *(self._cluster or ())})
        self._surroundings.watch_only(way for way in ways.values() if isinstance(way, Way))
        if self._cluster is not None:
            self._set(among=among_nodes(ways[node] for node in self._cluster))
        return self.settle(ways)

    @property
    def next_hops(self) -> frozenset[str]:
        """The addresses that frames are sent to."""
        ways = (way for both in self._nodes.by_name.values() for way in both)
        return frozenset(way.next_hop for way in ways if way.kind not in (NOWHERE, HERE))

    def settle(self, ways: Mapping[Node, Way | FairleadError]) -> set[str]:
        """Write those that differ from what is there. The nodes that have lost theirs."""
        lost = set()
        for (name, address), way in ways.items():
            ipv6, present = ":" in address, self._nodes.by_name.get(name, NO_WAYS)
            if present[ipv6].address != address:
                continue  # no Service needs it, or it was set anew meanwhile
            reachable = self._nodes.reachable(name, ipv6=ipv6)
            if not isinstance(way, FairleadError):
                if way != present[ipv6] or not reachable:
                    self._nodes.set_way(name, way, ipv6=ipv6)
            elif reachable:
                lost.add(name)
                self._nodes.doubt(name, ipv6=ipv6)
        return lost

    async def among(self, cluster: Collection[Node]) -> None:
        """These are the nodes of the cluster, whether Services need them or not."""
        self._cluster = tuple(sorted(cluster))
        await self.find_ways()

    async def news(self) -> News:
        """Wait until something has changed. May run beside the other methods."""
        return await self._surroundings.news()

    async def heed(self, news: News) -> set[str]:
        """Bring what the news is about to what holds now. The nodes that have lost their way."""
        if not news.networks and self._cluster is None:
            return self.settle(dict(self._by_way_of(news.neighbours)))
        try:
            if news.networks:
                self._surroundings.renew()
                await self.reattach()
        except FairleadError as error:
            log.warning("not attached", error=str(error))
        return await self.find_ways()

    def _by_way_of(self, next_hops: Collection[tuple[int, str]]) -> Iterator[tuple[Node, Way]]:
        """The ways that lead over these next hops, with the hardware addresses of now."""
        for name, ways in self._nodes.by_name.items():
            for way in ways:
                if (way.interface, way.next_hop) in next_hops:
                    yield (name, way.address), self._surroundings.with_mac(way)
