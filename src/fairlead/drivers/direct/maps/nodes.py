"""The nodes in the maps: which number stands for which node, and where what it gets is sent.

In: names and hops. Out: numbers for slots. Names are pinned beside the records, so that a successor
knows them. Invariant: a number is taken from a node only after a grace period without any use (a
slot, or a Service whose connection entries count), and numbers are reused as late as can be,
because an entry that does not count may still hold one."""

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
"""How packets get to one node: IPv4, IPv6."""

NO_NEXT_HOPS = (NextHop(), NextHop())


class NodesFound(NamedTuple):
    """The nodes as they were found in the maps."""

    numbers: dict[str, int]
    next_hops: dict[str, NextHops]

    def names(self) -> dict[int, str]:
        """Which node each number stands for."""
        return {number: name for name, number in self.numbers.items()}

    def addresses(self) -> list[tuple[str, str]]:
        """(node, address) of all that have a hop, sorted."""
        return _addresses(self.next_hops)


def _addresses(next_hops: Mapping[str, NextHops]) -> list[tuple[str, str]]:
    return sorted(
        (name, hop.address) for name, hops in next_hops.items() for hop in hops if hop.address
    )


class Nodes:
    """The maps `hops` and `node_names`, mirrored. Times are monotonic seconds."""

    def __init__(self, hops: Map, names: Map, statistics: Map) -> None:
        self._next_hops_map, self._names, self._statistics = hops, names, statistics
        self._next = 0
        self._unused_since: dict[str, float] = {}
        self.changed_since_survey: set[str] = set()
        """Nodes that were changed since whoever surveys has emptied it."""
        self.numbers: dict[str, int] = {}
        self.next_hops: dict[str, NextHops] = {}
        self._reachable: tuple[set[str], set[str]] = (set(), set())
        """Those that can get packets over IPv4, over IPv6."""
        self._reachable_addresses: dict[str, tuple[tuple[str, str], ...]] = {}
        """What `usable` has been asked for since it last changed: every change of a Service asks
        for each of its nodes."""

    def survey(self) -> Iterator[tuple[str, int, NextHops]]:
        """Read the maps anew, a node at a time; changes nothing."""
        named = ((INDEX.unpack(key)[0], unpack_text(value)) for key, value in self._names.items())
        names = {number: name for number, name in named if name}
        records = self._next_hops_map.rows(
            2 * number + place for number in names for place in (0, 1)
        )
        for (at, ipv4), (_, ipv6) in zip(records, records, strict=True):
            yield names[at // 2], at // 2, (unpack_next_hop(ipv4), unpack_next_hop(ipv6))

    def adopt(self, found: NodesFound) -> None:
        """Have the mirror be what was found, but for what was changed since."""
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
        # Only a start has to guess: later the numbers that were taken away last would be the next.
        self._next = self._next or max(self.numbers.values(), default=-1) + 1

    def _drop(self, name: str) -> None:
        del self.numbers[name], self.next_hops[name]
        self._unused_since.pop(name, None)
        self._set_reachable(name, False, ipv6=False)
        self._set_reachable(name, False, ipv6=True)

    def _write(self, number: int, hops: NextHops) -> None:
        for place, hop in enumerate(hops):
            self._next_hops_map.update(INDEX.pack(2 * number + place), pack_next_hop(hop))

    def names(self) -> dict[int, str]:
        """Which node each number stands for."""
        return {number: name for name, number in self.numbers.items()}

    def addresses(self) -> list[tuple[str, str]]:
        """(node, address) of all that have a hop, sorted."""
        return _addresses(self.next_hops)

    def reachable(self, name: str, *, ipv6: bool) -> str:
        """The address of that family at which the node can get packets; empty if it cannot."""
        return self.next_hops[name][ipv6].address if name in self._reachable[ipv6] else ""

    def is_reachable_at(self, name: str, address: str) -> bool:
        """Whether the node gets packets at this address."""
        return (name, address) in self.reachable_addresses(name)

    def all_reachable(self, names: Iterable[str], *, ipv6: bool) -> bool:
        """Whether all of these nodes can get packets of that family."""
        return self._reachable[ipv6].issuperset(names)

    def unreachable(self, names: Set[str], *, ipv6: bool) -> list[str]:
        """Those of these nodes that cannot get packets of that family, sorted."""
        return sorted(names - self._reachable[ipv6])

    def reachable_addresses(self, name: str) -> tuple[tuple[str, str], ...]:
        """(node, address) for each address at which the node can get packets, sorted."""
        if (found := self._reachable_addresses.get(name)) is None:
            addresses = {self.reachable(name, ipv6=False), self.reachable(name, ipv6=True)} - {""}
            found = self._reachable_addresses[name] = tuple(
                (name, address) for address in sorted(addresses)
            )
        return found

    def numbers_of(self, names: Iterable[str]) -> "array[int]":
        """The numbers that stand for these nodes, in their order. Raises what `number` raises."""
        known = self.numbers
        return array("H", [known[name] if name in known else self.number(name) for name in names])

    def number(self, name: str) -> int:
        """The number that stands for the node, a new one if it has none. Raises Refused when there
        are no more."""
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
                f"no number is left for node {name}", fix=f"one gateway can serve {limit} nodes"
            )
        self.changed_since_survey.add(name)
        self._write(number, NO_NEXT_HOPS)
        self._statistics.clear_values(INDEX.pack(number))
        self._names.update(INDEX.pack(number), NODE_NAME.pack(pack_text(name, 256)))
        self._next = number + 1
        self.numbers[name], self.next_hops[name] = number, NO_NEXT_HOPS
        return number

    def set_next_hop(self, name: str, hop: NextHop, *, ipv6: bool) -> None:
        """Send what the node gets in that family this hop from now on."""
        number = self.number(name)
        self.changed_since_survey.add(name)
        self._next_hops_map.update(INDEX.pack(2 * number + ipv6), pack_next_hop(hop))
        ipv4_hop, ipv6_hop = self.next_hops[name]
        self.next_hops[name] = (ipv4_hop, hop) if ipv6 else (hop, ipv6_hop)
        self._set_reachable(name, bool(hop.address), ipv6=ipv6)

    def mark_unreachable(self, name: str, *, ipv6: bool) -> None:
        """There is no hop for that family any more: not usable until one is set anew. The kernel's
        record stays: open connections lose nothing by going on as before."""
        self.changed_since_survey.add(name)
        self._set_reachable(name, False, ipv6=ipv6)

    def _set_reachable(self, name: str, can: bool, *, ipv6: bool) -> None:
        (self._reachable[ipv6].add if can else self._reachable[ipv6].discard)(name)
        self._reachable_addresses.pop(name, None)

    def forget_unused(self, used: Iterable[str], now_s: float) -> None:
        """Take the numbers from nodes that have not been used for the grace period."""
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
