"""The parts of the data plane that depend on the host's networks: programs at interfaces, next
hops, VLAN tags.

In: the kernel's state and events, the nodes in the maps, the nodes of the cluster. Out: up-to-date
maps `next_hops`, `tags` and `settings`, and attached programs. Invariant: each method brings
everything that it is responsible for to the present state, even if earlier events were missed. This
module knows nothing of Services."""

import asyncio
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import structlog

from fairlead.drivers.direct.host_network.attach import Attachments, Programs
from fairlead.drivers.direct.host_network.host_network import HostNetwork, NetworkChanges, Node
from fairlead.drivers.direct.host_network.next_hops import Rules
from fairlead.drivers.direct.maps import flow_shares
from fairlead.drivers.direct.maps.flow_shares import usable
from fairlead.drivers.direct.maps.nodes import NO_NEXT_HOPS, Nodes
from fairlead.drivers.direct.maps.records import (
    FRACTION,
    INDEX,
    IS_NODE,
    LOCAL,
    REPORT_ENTRIES,
    SETTINGS,
    UNREACHABLE,
    NextHop,
    tick,
)
from fairlead.errors import FairleadError
from fairlead.net.address import is_ipv6
from fairlead.net.bpf import Map

log = structlog.get_logger()

_ONLY = INDEX.pack(0)
REMOVAL_LOG_S = 10.0
"""The shortest time between two log lines about removals of a program from the same interface."""
COPYING_LIMIT_S = 30.0
"""Longer than it takes to copy the entries of full tables. The limit is reached only if the process
dies meanwhile."""


class Removals(NamedTuple):
    """How often another process has removed a program from an interface, and when the last removal
    was repaired. `logged_s`: when a log line last reported one, in monotonic seconds."""

    times: int = 0
    last: datetime = datetime.min.replace(tzinfo=UTC)
    logged_s: float = -math.inf


ONE_PACKET_TABLES = ("new_connections", "new_datagrams")
"""The tables of flows with only one packet so far."""


def _tentative_per_s(entries: int) -> int:
    """Return how many entries a second each CPU may add to a table of flows with only one packet so
    far.

    All CPUs together add half of what the table holds, so an entry stays for at least one second.
    By then the second packet of the flow should have arrived. The part of one CPU is never less
    than an eighth of the table, because one CPU may get all packets: if a flood reaches more than
    four CPUs, entries stay for less than a second."""
    return max(entries // 2 // (os.cpu_count() or 1), entries // 8)


class Limits(NamedTuple):
    """The configured values of the map `settings`.

    `namespace_share`: the fraction of the tables of established flows that one namespace may have
    of what the others leave. `report_entries`: whether the program reports new flow entries to user
    space.
    """

    inserts_per_s: int
    messages_per_s: int
    namespace_share: float = 1.0
    report_entries: bool = False


def is_node_of_cluster(hops: Iterable[NextHop | FairleadError]) -> bool:
    """Return whether this host is one of the nodes with these next hops."""
    return any(isinstance(hop, NextHop) and hop.kind == LOCAL for hop in hops)


class Networks:
    """The host's networks as the data plane needs them. The caller must close it. Its methods must
    not run concurrently, except `next_changes`."""

    def __init__(
        self,
        attachments: Attachments,
        rules: Rules,
        limits: Limits,
        maps: Mapping[str, Map],
        nodes: Nodes,
        programs: Programs,
    ) -> None:
        self.attachments = attachments
        self._host_network = HostNetwork(rules)
        self._rules = rules
        self._limits = limits
        self._maps = maps
        self._nodes = nodes
        self._programs = programs
        self._cluster: tuple[Node, ...] | None = None
        self._unmatched: tuple[str, ...] = ()
        self._failure = ""
        """The text of the error with which the last attempt to attach failed."""
        self._problem = ""
        self.removals: dict[str, Removals] = {}
        """By interface: how often another process has removed a program."""
        self._copying_until = 0
        (_, _, _, flags, *_) = SETTINGS.unpack(
            maps["settings"].lookup(_ONLY) or bytes(SETTINGS.size)
        )
        # The value of the previous process applies until `update_next_hops` determines it.
        self._set(is_node=bool(flags & IS_NODE))

    def close(self) -> None:
        """Stop receiving events. Attached programs stay."""
        self._host_network.close()
        self.attachments.close()

    def set_copying(self, copying: bool) -> None:
        """Set whether flow entries of an older program are copied now, for at most COPYING_LIMIT_S.

        Meanwhile the program drops packets of flows that may have an entry there, so that their
        senders send them again. Otherwise it would send them to the node that the flow would have
        without an entry.
        """
        limit_s = time.monotonic() + COPYING_LIMIT_S
        self._copying_until = tick(limit_s) if copying else 0
        self._set(is_node=self._is_node)

    def _set(self, *, is_node: bool) -> None:
        self._is_node = is_node
        flags = IS_NODE * is_node | REPORT_ENTRIES * self._limits.report_entries
        port = self._rules.vxlan_port.to_bytes(2, "big")
        limits = self._limits
        record = SETTINGS.pack(
            limits.inserts_per_s,
            min(
                _tentative_per_s(self._maps[table].spec.max_entries) for table in ONE_PACKET_TABLES
            ),
            limits.messages_per_s,
            flags,
            port,
            self._copying_until,
            *(usable(self._maps[table].spec.max_entries) for table in flow_shares.TABLES),
            int(limits.namespace_share * FRACTION),
        )
        if self._maps["settings"].lookup(_ONLY) != record:
            self._maps["settings"].update(_ONLY, record)

    def check(self) -> None:
        """Raise the errors of `Attachments.check`."""
        self.attachments.check(self._host_network.interfaces())

    async def attach(self) -> None:
        """Attach our programs to every interface. Raise the errors of `Attachments.attach`."""
        before = self.attachments.choices
        try:
            await self.attachments.attach(
                self._programs, self._maps["tags"], self._host_network.interfaces()
            )
        finally:
            self._host_network.xdp_interfaces = self.attachments.xdp_interfaces
            for name, choice in self.attachments.choices.items():
                if choice != before.get(name):
                    log.info("attached", interface=name, attach=choice.mode, why=choice.why)
            self._log_unmatched()

    def _log_unmatched(self) -> None:
        """Log the selectors that match no interface, when they have changed."""
        unmatched = self.attachments.unmatched
        if unmatched and unmatched != self._unmatched:
            log.info("selectors match no interface of this host", selectors=", ".join(unmatched))
        self._unmatched = unmatched

    async def reattach(self) -> None:
        """Attach the programs again if an interface has lost one, or was added or changed. Raise
        the errors of `Attachments.attach`."""
        lost = await self.attachments.look()
        current = self.attachments.is_current(self._host_network.interfaces())
        try:
            if lost or not current:
                await self.attach()
        finally:
            if lost:
                for name in lost - await self.attachments.look():
                    self._record_removal(name)
            self._log_problem()

    async def restore_programs(self) -> None:
        """Attach the programs again if another process has removed one. An error is logged once."""
        if not await self.attachments.look():
            return
        await self._reattach_or_log()

    async def _reattach_or_log(self) -> None:
        try:
            await self.reattach()
            self._failure = ""
        except FairleadError as error:
            if str(error) != self._failure:
                log.warning("attaching the programs failed", error=str(error))
            self._failure = str(error)

    def _record_removal(self, name: str) -> None:
        now_s, before = time.monotonic(), self.removals.get(name, Removals())
        times, logged_s = before.times + 1, before.logged_s
        # Another program may remove it as often as it is attached.
        if now_s - logged_s >= REMOVAL_LOG_S:
            logged_s = now_s
            log.warning(
                "another process had removed the gateway's program: it is attached again",
                interface=name,
                removals=times,
            )
        self.removals[name] = Removals(times, datetime.now(UTC), logged_s)

    def _log_problem(self) -> None:
        """Log when the gateway stops forwarding, and when it forwards again."""
        before, self._problem = self._problem, str(self.attachments.problems)
        if self._problem and self._problem != before:
            log.error("this gateway does not forward", problem=self._problem)
        elif before and not self._problem:
            log.info("this gateway forwards again", problem_before=before)

    async def find_next_hops(self, nodes: Iterable[Node]) -> dict[Node, NextHop | FairleadError]:
        """Return the next hop of each node, or why there is none."""
        wanted = tuple(nodes)
        return await asyncio.to_thread(self._host_network.find_next_hops, wanted) if wanted else {}

    async def update_next_hops(self) -> set[str]:
        """Bring the next hops of all nodes to the present state. Return the nodes that have become
        unreachable."""
        hops = await self.find_next_hops({*self._nodes.addresses(), *(self._cluster or ())})
        self._host_network.watch_only(hop for hop in hops.values() if isinstance(hop, NextHop))
        if self._cluster is not None:
            self._set(is_node=is_node_of_cluster(hops[node] for node in self._cluster))
        return self.write_next_hops(hops)

    @property
    def next_hops(self) -> frozenset[str]:
        """The addresses to which frames are sent."""
        hops = (hop for both in self._nodes.next_hops.values() for hop in both)
        return frozenset(hop.next_hop for hop in hops if hop.kind not in (UNREACHABLE, LOCAL))

    @property
    def routers(self) -> frozenset[str]:
        """The addresses to which frames are sent that are not the address of a node itself."""
        hops = (hop for both in self._nodes.next_hops.values() for hop in both)
        return frozenset(
            hop.next_hop
            for hop in hops
            if hop.kind not in (UNREACHABLE, LOCAL) and hop.next_hop != hop.address
        )

    def write_next_hops(self, hops: Mapping[Node, NextHop | FairleadError]) -> set[str]:
        """Write the next hops that have changed. Return the nodes that have become unreachable."""
        lost = set()
        for (name, address), hop in hops.items():
            ipv6, installed = is_ipv6(address), self._nodes.next_hops.get(name, NO_NEXT_HOPS)
            if installed[ipv6].address != address:
                continue  # no Service needs the node, or its address was changed meanwhile
            reachable = self._nodes.reachable(name, ipv6=ipv6)
            if not isinstance(hop, FairleadError):
                if hop != installed[ipv6] or not reachable:
                    self._nodes.set_next_hop(name, hop, ipv6=ipv6)
            elif reachable:
                lost.add(name)
                self._nodes.mark_unreachable(name, ipv6=ipv6)
        return lost

    async def set_cluster(self, cluster: Collection[Node]) -> None:
        """Set the nodes of the cluster, including nodes that no Service needs."""
        self._cluster = tuple(sorted(cluster))
        await self.update_next_hops()

    async def next_changes(self) -> NetworkChanges:
        """Wait until something has changed, and return it. May run beside the other methods."""
        return await self._host_network.next_changes()

    async def apply_changes(self, changes: NetworkChanges) -> set[str]:
        """Bring everything that these changes concern to the present state. Return the nodes that
        have become unreachable."""
        if changes.networks:
            self._host_network.refresh()
            await self._reattach_or_log()
        elif changes.hooks:
            await self.restore_programs()
        if changes.networks or (changes.neighbours and self._cluster is not None):
            return await self.update_next_hops()
        return self.write_next_hops(dict(self._hops_via(changes.neighbours)))

    def _hops_via(self, next_hops: Collection[tuple[int, str]]) -> Iterator[tuple[Node, NextHop]]:
        """Yield the next hops that use these neighbours, with their present MAC addresses."""
        for name, hops in self._nodes.next_hops.items():
            for hop in hops:
                if (hop.interface, hop.next_hop) in next_hops:
                    yield (name, hop.address), self._host_network.with_mac(hop)
