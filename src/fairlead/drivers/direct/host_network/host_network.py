"""The ways to nodes as this host's networks are now, kept so by the kernel's events.

In: (node, address) pairs, events of routes, interfaces and neighbours. Out: a `NextHop` for each, or
why there is none; and word of what changed. The kernel's neighbour table is not in use where XDP
forwards, because the kernel does not see those packets: so a neighbour that XDP needs is looked for
when it is not known and whenever the kernel grows unconfirmed of it. One that does not answer is left
alone for a while: what is sent to it meanwhile goes by the kernel, which asks for it itself.
Invariant: a way has a hardware address only where XDP may send to it (the interface bears our
program) and the neighbour is known; without one the XDP program leaves the packet to the tc
program, which asks the kernel. Follows RFC 4861, 7.3 (states)."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from fairlead.drivers.direct.host_network import blackhole
from fairlead.drivers.direct.host_network.next_hops import Rules, next_hop_to
from fairlead.drivers.direct.maps.records import HERE, NextHop
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.net.routes import Interface, Neighbour
from fairlead.net.routing import Routing

Node = tuple[str, str]
"""Name and address."""

UNKNOWN = bytes(6)
RETRY_S = 10.0
"""A neighbour without a known hardware address is not looked for again sooner."""


class NetworkChanges(NamedTuple):
    """What to look at again. `networks`: everything. `neighbours`: ways whose next hop is one of
    these (interface, address)."""

    networks: bool
    neighbours: frozenset[tuple[int, str]]


class HostNetwork:
    """What is known of this host's networks. Close it. `clock`: seconds that never go back."""

    def __init__(self, rules: Rules, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._routing = Routing(ignored_protocol=blackhole.PROTOCOL)
        self._neighbours: dict[tuple[int, str], Neighbour] = {}
        self._watched: dict[tuple[int, str], float] = {}
        """Neighbours that XDP needs, and when each was last looked for."""
        self.fast: frozenset[int] = frozenset()
        """Interfaces that XDP may send on."""
        self.renew()

    def close(self) -> None:
        """Hear no more."""
        self._routing.close()

    def renew(self) -> None:
        """Read interfaces and neighbours anew."""
        self._interfaces = self._routing.interfaces()
        self._neighbours = self._routing.neighbours()

    def interfaces(self) -> Mapping[str, Interface]:
        """The interfaces by name, as they are now."""
        self._interfaces = self._routing.interfaces()
        return {each.name: each for each in self._interfaces.values()}

    def ways(self, nodes: Iterable[Node]) -> dict[Node, NextHop | FairleadError]:
        """The way to each of these, or why there is none. Takes 50 us for each: of many, ask in a
        thread."""
        return {node: self._way(node) for node in nodes}

    def _way(self, node: Node) -> NextHop | FairleadError:
        name, address = node
        try:
            route = self._routing.route(address)
            if route and route.interface not in self._interfaces:
                self.renew()
            interface = self._interfaces.get(route.interface) if route else None
            return self.with_mac(next_hop_to(name, address, route, interface, self._rules))
        except (Unavailable, Refused) as error:
            return error

    def with_mac(self, way: NextHop) -> NextHop:
        """The way with the hardware address that its next hop has now, if XDP may send there."""
        if way.kind == HERE or (way.lower or way.interface) not in self.fast:
            return way._replace(mac=UNKNOWN)
        return way._replace(mac=self.mac_of(way) or UNKNOWN)

    def mac_of(self, way: NextHop) -> bytes:
        """The hardware address of the next hop; empty while it is not known. It is looked for then,
        and kept an eye on."""
        place = (way.interface, way.next_hop)
        self._watched.setdefault(place, -math.inf)
        known = self._neighbours.get(place)
        if known is None or known.unconfirmed or not known.mac:
            self._look_for(place, known)
        return known.mac if known else b""

    def watch_only(self, ways: Iterable[NextHop]) -> None:
        """Keep an eye on the next hops of these and of no others."""
        needed = {(way.interface, way.next_hop) for way in ways}
        for place in self._watched.keys() - needed:
            self._watched.pop(place, None)

    def _look_for(self, place: tuple[int, str], known: Neighbour | None) -> None:
        now_s = self._clock()
        if not (known and known.mac) and now_s - self._watched.get(place, -math.inf) < RETRY_S:
            return
        self._watched[place] = now_s
        with suppress(
            Unavailable
        ):  # the interface is down or gone: an event of its own says when that is over
            self._routing.resolve(*place)

    async def news(self) -> NetworkChanges:
        """Wait until something is to be looked at again."""
        while True:
            changes = await self._routing.changes()
            changed = frozenset(self._note(changes.neighbours))
            if changes.others or changed:
                return NetworkChanges(changes.others, changed)

    def _note(self, told: Iterable[Neighbour]) -> Iterator[tuple[int, str]]:
        """Those of the watched neighbours whose hardware address is another one now."""
        for each in told:
            place = (each.interface, each.address)
            before = self._neighbours.get(place)
            self._neighbours[place] = each
            if place not in self._watched:
                if not each.mac:
                    del self._neighbours[place]
                continue
            if each.unconfirmed:
                self._look_for(place, each)
            if each.mac != (before.mac if before else b""):
                yield place
