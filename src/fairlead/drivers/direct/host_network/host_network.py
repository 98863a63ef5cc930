"""The next hops to nodes according to the host's present routes and neighbours.

In: (node, address) pairs, and the kernel's events about routes, interfaces and neighbours. Out: a
`NextHop` for each pair, or why there is none; and which of them changed.

The kernel does not see packets that XDP forwards, and so would let their neighbour entries expire.
Therefore a neighbour that XDP needs is resolved when its MAC address is unknown, and whenever its
entry is no longer confirmed. A neighbour that does not answer is resolved again after a pause.
Meanwhile packets to it take the kernel's path, and the kernel resolves it too.

Invariant: a next hop contains a MAC address only if XDP may send to it (the interface has our
program) and the neighbour is known. Without a MAC address the XDP program leaves the packet to the
tc program, which asks the kernel. Follows RFC 4861, 7.3 (states).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from fairlead.drivers.direct.host_network import blackhole
from fairlead.drivers.direct.host_network.next_hops import Rules, next_hop_to
from fairlead.drivers.direct.maps.records import LOCAL, NextHop
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.net.routes import Interface, Neighbour
from fairlead.net.routing import Routing

Node = tuple[str, str]
"""Name and address."""

UNKNOWN_MAC = bytes(6)
RETRY_S = 10.0
"""Minimum time between two attempts to resolve a neighbour whose MAC address is unknown."""


class NetworkChanges(NamedTuple):
    """What has changed. `networks`: routes or interfaces, so everything must be checked.
    `neighbours`: the (interface, address) of each neighbour whose MAC address has changed. `hooks`:
    interfaces on which a qdisc or a filter has changed, perhaps ours."""

    networks: bool
    neighbours: frozenset[tuple[int, str]]
    hooks: frozenset[int]


class HostNetwork:
    """The present networks of this host. The caller must close it.

    `clock`: monotonic time in seconds.
    """

    def __init__(self, rules: Rules, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._routing = Routing(ignored_protocol=blackhole.PROTOCOL)
        self._neighbours: dict[tuple[int, str], Neighbour] = {}
        self._watched: dict[tuple[int, str], float] = {}
        """Neighbours that XDP needs, and when each was last resolved."""
        self.xdp_interfaces: frozenset[int] = frozenset()
        """Interfaces on which XDP may send."""
        self.refresh()

    def close(self) -> None:
        """Stop receiving events."""
        self._routing.close()

    def refresh(self) -> None:
        """Read all interfaces and neighbours again."""
        self._interfaces = self._routing.interfaces()
        self._neighbours = self._routing.neighbours()

    def interfaces(self) -> Mapping[str, Interface]:
        """Return the present interfaces by name."""
        self._interfaces = self._routing.interfaces()
        return {each.name: each for each in self._interfaces.values()}

    def find_next_hops(self, nodes: Iterable[Node]) -> dict[Node, NextHop | FairleadError]:
        """Return the next hop of each node, or why there is none. Each node takes 50 us: call it in
        a thread for many nodes."""
        return {node: self._find_next_hop(node) for node in nodes}

    def _find_next_hop(self, node: Node) -> NextHop | FairleadError:
        name, address = node
        try:
            route = self._routing.route(address)
            if route and route.interface not in self._interfaces:
                self.refresh()
            interface = self._interfaces.get(route.interface) if route else None
            return self.with_mac(next_hop_to(name, address, route, interface, self._rules))
        except (Unavailable, Refused) as error:
            return error

    def with_mac(self, hop: NextHop) -> NextHop:
        """Return the next hop with the present MAC address, if XDP may send to it."""
        if hop.kind == LOCAL or (hop.lower or hop.interface) not in self.xdp_interfaces:
            return hop._replace(mac=UNKNOWN_MAC)
        return hop._replace(mac=self.mac_of(hop) or UNKNOWN_MAC)

    def mac_of(self, hop: NextHop) -> bytes:
        """Return the MAC address of the next hop; empty while it is unknown. Watch this neighbour
        from now on, and resolve it if its MAC address is unknown."""
        neighbour = (hop.interface, hop.next_hop)
        self._watched.setdefault(neighbour, -math.inf)
        known = self._neighbours.get(neighbour)
        if known is None or known.unconfirmed or not known.mac:
            self._resolve(neighbour, known)
        return known.mac if known else b""

    def watch_only(self, hops: Iterable[NextHop]) -> None:
        """Watch the neighbours of these next hops, and no others."""
        needed = {(hop.interface, hop.next_hop) for hop in hops}
        for neighbour in self._watched.keys() - needed:
            self._watched.pop(neighbour, None)

    def _resolve(self, neighbour: tuple[int, str], known: Neighbour | None) -> None:
        now_s = self._clock()
        if not (known and known.mac) and now_s - self._watched.get(neighbour, -math.inf) < RETRY_S:
            return
        self._watched[neighbour] = now_s
        # The interface may be down or removed. An event follows when it is back.
        with suppress(Unavailable):
            self._routing.resolve(*neighbour)

    async def next_changes(self) -> NetworkChanges:
        """Wait until the kernel reports a relevant change, and return it."""
        while True:
            changes = await self._routing.changes()
            changed = frozenset(self._record(changes.neighbours))
            if changes.others or changed or changes.hooks:
                return NetworkChanges(changes.others, changed, changes.hooks)

    def _record(self, neighbours: Iterable[Neighbour]) -> Iterator[tuple[int, str]]:
        """Record the neighbours, and yield watched neighbours whose MAC address has changed."""
        for each in neighbours:
            neighbour = (each.interface, each.address)
            before = self._neighbours.get(neighbour)
            self._neighbours[neighbour] = each
            if neighbour not in self._watched:
                if not each.mac:
                    del self._neighbours[neighbour]
                continue
            if each.unconfirmed:
                self._resolve(neighbour, each)
            if each.mac != (before.mac if before else b""):
                yield neighbour
