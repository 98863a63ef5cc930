"""The nodes in the maps: the number of each node, and its next hops.

In: names and next hops. Out: numbers for slots. The names are pinned beside the records, so that
the next process knows them. Invariant: a node loses its number only after a grace period in which
no slot uses the number and no flow entry that is followed needs it. Numbers are reused as late as
possible, because an entry that is no longer followed may still contain one.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from fairlead.drivers.direct.maps.arena import GRACE_S
from fairlead.drivers.direct.maps.records import (
    INDEX,
    NODE_NAME,
    NextHop,
    pack_next_hop,
    pack_text,
    unpack_next_hop,
    unpack_text,
)
from fairlead.errors import Refused
from fairlead.net.bpf import Map

NextHops = tuple[NextHop, NextHop]
"""The next hops of one node: IPv4, IPv6."""

NO_NEXT_HOPS = (NextHop(), NextHop())


class NodesFound(NamedTuple):
    """The nodes as they were found in the maps."""

    numbers: dict[str, int]
    next_hops: dict[str, NextHops]

    def names(self) -> dict[int, str]:
        """Return the name of each number's node."""
        return {number: name for name, number in self.numbers.items()}

    def addresses(self) -> list[tuple[str, str]]:
        """Return (node, address) for every next hop, sorted."""
        return _addresses(self.next_hops)


def _addresses(next_hops: Mapping[str, NextHops]) -> list[tuple[str, str]]:
    return sorted(
        (name, hop.address) for name, hops in next_hops.items() for hop in hops if hop.address
    )


class Nodes:
    """The maps `next_hops` (next hops) and `node_names`, mirrored. Times are monotonic seconds."""

    def __init__(self, hops: Map, names: Map, statistics: Map) -> None:
        self._next_hops_map, self._names, self._statistics = hops, names, statistics
        self._next = 0
        self._unused_since: dict[str, float] = {}
        self.changed_since_survey: set[str] = set()
        """Nodes that were changed since the last survey began."""
        self.numbers: dict[str, int] = {}
        self.next_hops: dict[str, NextHops] = {}
        self._reachable: tuple[set[str], set[str]] = (set(), set())
        """Nodes that can be reached over IPv4, and over IPv6."""
        self._reachable_addresses: dict[str, tuple[tuple[str, str], ...]] = {}
        """Cached results of `reachable_addresses`, which every change of a Service calls for each
        of its nodes."""

    def survey(self) -> Iterator[tuple[str, int, NextHops]]:
        """Read the maps: name, number and next hops of one node at a time. Nothing is changed."""
        named = ((INDEX.unpack(key)[0], unpack_text(value)) for key, value in self._names.items())
        names = {number: name for number, name in named if name}
        records = self._next_hops_map.rows(
            2 * number + index for number in names for index in (0, 1)
        )
        for (at, ipv4), (_, ipv6) in zip(records, records, strict=True):
            yield names[at // 2], at // 2, (unpack_next_hop(ipv4), unpack_next_hop(ipv6))

    def adopt(self, found: NodesFound) -> None:
        """Set the mirror to what was found, except for nodes that have changed since the survey
        began."""
        for name in self.numbers.keys() - found.numbers.keys() - self.changed_since_survey:
            self._drop(name)
        for name, number in found.numbers.items():
            hops = found.next_hops[name]
            if name in self.changed_since_survey or (
                self.numbers.get(name),
                self.next_hops.get(name),
            ) == (
                number,
                hops,
            ):
                continue
            self.numbers[name], self.next_hops[name] = number, hops
            for ipv6 in (False, True):
                self._set_reachable(name, bool(hops[ipv6].address), ipv6=ipv6)
        # Only the first survey has to guess the next free number. Later, the highest number in use
        # plus 1 could be a number that was freed a moment ago.
        self._next = self._next or max(self.numbers.values(), default=-1) + 1

    def _drop(self, name: str) -> None:
        del self.numbers[name], self.next_hops[name]
        self._unused_since.pop(name, None)
        self._set_reachable(name, False, ipv6=False)
        self._set_reachable(name, False, ipv6=True)

    def _write(self, number: int, hops: NextHops) -> None:
        for index, hop in enumerate(hops):
            self._next_hops_map.update(INDEX.pack(2 * number + index), pack_next_hop(hop))

    def names(self) -> dict[int, str]:
        """Return the name of each number's node."""
        return {number: name for name, number in self.numbers.items()}

    def addresses(self) -> list[tuple[str, str]]:
        """Return (node, address) for every next hop, sorted."""
        return _addresses(self.next_hops)

    def reachable(self, name: str, *, ipv6: bool) -> str:
        """Return the address of that family at which the node can be reached; empty if there is
        none."""
        return self.next_hops[name][ipv6].address if name in self._reachable[ipv6] else ""

    def is_reachable_at(self, name: str, address: str) -> bool:
        """Return whether the node can be reached at this address."""
        return (name, address) in self.reachable_addresses(name)

    def all_reachable(self, names: Iterable[str], *, ipv6: bool) -> bool:
        """Return whether all of these nodes can be reached over that family."""
        return self._reachable[ipv6].issuperset(names)

    def unreachable(self, names: Set[str], *, ipv6: bool) -> list[str]:
        """Return the nodes that cannot be reached over that family, sorted."""
        return sorted(names - self._reachable[ipv6])

    def reachable_addresses(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return (node, address) for each address at which the node can be reached, sorted."""
        if (found := self._reachable_addresses.get(name)) is None:
            addresses = {self.reachable(name, ipv6=False), self.reachable(name, ipv6=True)} - {""}
            found = self._reachable_addresses[name] = tuple(
                (name, address) for address in sorted(addresses)
            )
        return found

    def numbers_of(self, names: Iterable[str]) -> "array[int]":
        """Return the numbers of these nodes, in the same order. Raise the errors of `number`."""
        known = self.numbers
        return array("H", [known[name] if name in known else self.number(name) for name in names])

    def number(self, name: str) -> int:
        """Return the number of the node, a new one if it has none. Raise Refused if none is
        left."""
        if name in self.numbers:
            return self.numbers[name]
        limit, taken = self._names.spec.max_entries, set(self.numbers.values())
        free = (
            each % limit
            for each in range(self._next, self._next + limit)
            if each % limit not in taken
        )
        number = next(free, None)
        if number is None:
            raise Refused(
                f"node {name} cannot be served: all {limit} node numbers are in use",
                fix=f"one gateway can serve {limit} nodes",
            )
        self.changed_since_survey.add(name)
        self._write(number, NO_NEXT_HOPS)
        self._statistics.clear_values(INDEX.pack(number))
        self._names.update(INDEX.pack(number), NODE_NAME.pack(pack_text(name, 256)))
        self._next = number + 1
        self.numbers[name], self.next_hops[name] = number, NO_NEXT_HOPS
        return number

    def set_next_hop(self, name: str, hop: NextHop, *, ipv6: bool) -> None:
        """Set the next hop of one family, which takes effect at once."""
        number = self.number(name)
        self.changed_since_survey.add(name)
        self._next_hops_map.update(INDEX.pack(2 * number + ipv6), pack_next_hop(hop))
        ipv4_hop, ipv6_hop = self.next_hops[name]
        self.next_hops[name] = (ipv4_hop, hop) if ipv6 else (hop, ipv6_hop)
        self._set_reachable(name, bool(hop.address), ipv6=ipv6)

    def mark_unreachable(self, name: str, *, ipv6: bool) -> None:
        """Record that the node has no route for that family until a next hop is set.

        The kernel's record stays: open connections lose nothing if their packets take the previous
        path.
        """
        self.changed_since_survey.add(name)
        self._set_reachable(name, False, ipv6=ipv6)

    def _set_reachable(self, name: str, can: bool, *, ipv6: bool) -> None:
        (self._reachable[ipv6].add if can else self._reachable[ipv6].discard)(name)
        self._reachable_addresses.pop(name, None)

    def forget_unused(self, used: Iterable[str], now_s: float) -> None:
        """Free the numbers of nodes that `used` has not contained for the grace period."""
        unused = self.numbers.keys() - set(used)
        self._unused_since = {name: self._unused_since.get(name, now_s) for name in unused}
        for name in [
            each for each, since in self._unused_since.items() if now_s - since >= GRACE_S
        ]:
            self.changed_since_survey.add(name)
            number = self.numbers[name]
            self._write(number, NO_NEXT_HOPS)
            self._names.update(INDEX.pack(number), NODE_NAME.pack(b""))
            self._drop(name)
