"""The nodes in the maps: which number stands for which node, and where what it gets is sent.

In: names, addresses, next hops. Out: numbers for slots. Names are pinned beside the records, so that a successor knows them.
Invariant: a number is taken from a node only after a grace period without any use (a slot, or a Service whose connection
entries count), and numbers are reused as late as can be, because an entry that does not count may still hold one.
"""

from collections.abc import Iterable
from typing import NamedTuple

from fairlead.drivers.direct.arena import GRACE_S
from fairlead.drivers.direct.layout import (
    HERE,
    INDEX,
    LINK,
    NODE_NAME,
    NodeRecord,
    pack_node,
    pack_text,
    unpack_node,
    unpack_text,
)
from fairlead.drivers.direct.next_hop import NextHop
from fairlead.errors import Refused
from fairlead.net.bpf import Map


class NodesFound(NamedTuple):
    """The nodes as they were found in the maps."""

    numbers: dict[str, int]
    by_name: dict[str, NodeRecord]

    def names(self) -> dict[int, str]:
        """Which node each number stands for."""
        return {number: name for name, number in self.numbers.items()}

    def addresses(self) -> list[tuple[str, str]]:
        """(node, address) of what can be used, sorted."""
        each = ((name, record.address(ipv6=ipv6)) for name, record in self.by_name.items() for ipv6 in (False, True))
        return sorted((name, address) for name, address in each if address)


class Nodes:
    """The maps `nodes` and `node_names`, mirrored. Times are monotonic seconds."""

    def __init__(self, records: Map, names: Map) -> None:
        self._records, self._names = records, names
        self._next = 0
        self._unused_since: dict[str, float] = {}
        self.generation = 0
        """Counts the changes."""
        self.numbers: dict[str, int] = {}
        self.by_name: dict[str, NodeRecord] = {}
        self._doubted: set[tuple[str, bool]] = set()

    def survey(self) -> NodesFound:
        """Read the maps anew; changes nothing."""
        found = ((INDEX.unpack(key)[0], unpack_text(value)) for key, value in self._names.items())
        numbers = {name: number for number, name in found if name}
        return NodesFound(numbers, {name: self._read(number) for name, number in numbers.items()})

    def adopt(self, found: NodesFound) -> None:
        """Have the mirror be what was found."""
        self.numbers, self.by_name = dict(found.numbers), dict(found.by_name)
        self._next = max(self.numbers.values(), default=-1) + 1
        self._doubted = set()

    def _read(self, number: int) -> NodeRecord:
        data = self._records.lookup(INDEX.pack(number))
        return unpack_node(data) if data else NodeRecord()

    def names(self) -> dict[int, str]:
        """Which node each number stands for."""
        return {number: name for name, number in self.numbers.items()}

    def reachable(self, name: str, *, ipv6: bool) -> str:
        """The address of that family at which the node can get packets; empty if it cannot."""
        return self.by_name[name].address(ipv6=ipv6) if name in self.by_name and (name, ipv6) not in self._doubted else ""

    def usable(self) -> dict[str, tuple[str, ...]]:
        """Of each node the addresses that can be used, sorted."""
        found = ((name, {self.reachable(name, ipv6=ipv6) for ipv6 in (False, True)}) for name in self.by_name)
        return {name: tuple(sorted(addresses - {""})) for name, addresses in found}

    def number(self, name: str) -> int:
        """The number that stands for the node, a new one if it has none. Raises Refused when there are no more."""
        if name in self.numbers:
            return self.numbers[name]
        limit, taken = self._names.spec.max_entries, set(self.numbers.values())
        free = (each % limit for each in range(self._next, self._next + limit) if each % limit not in taken)
        number = next(free, None)
        if number is None:
            raise Refused(f"no number is left for node {name}", fix=f"one gateway can serve {limit} nodes")
        self.generation += 1
        self._records.update(INDEX.pack(number), pack_node(NodeRecord()))
        self._names.update(INDEX.pack(number), NODE_NAME.pack(pack_text(name, 256)))
        self._next = number + 1
        self.numbers[name], self.by_name[name] = number, NodeRecord()
        return number

    def set_address(self, name: str, address: str, hop: NextHop) -> None:
        """Send what the node gets in the address's family that way from now on."""
        number = self.number(name)
        self.generation += 1
        record = self.by_name[name]
        if ":" in address:
            record = record._replace(ipv6=address, interface6=hop.interface)
        else:
            record = record._replace(ipv4=address, interface4=hop.interface)
        record = record._replace(mode=HERE if hop.here else LINK)
        self._records.update(INDEX.pack(number), pack_node(record))
        self.by_name[name] = record
        self._doubted.discard((name, ":" in address))

    def doubt(self, name: str, *, ipv6: bool) -> None:
        """The next hop of that family holds no more, or there is none: not usable until it is set anew. The kernel's record
        stays: open connections lose nothing by going on as before."""
        self.generation += 1
        self._doubted.add((name, ipv6))

    def forget_unused(self, used: Iterable[str], now_s: float) -> None:
        """Take the numbers from nodes that have not been used for the grace period."""
        unused = self.numbers.keys() - set(used)
        self._unused_since = {name: self._unused_since.get(name, now_s) for name in unused}
        for name in [each for each, since in self._unused_since.items() if now_s - since >= GRACE_S]:
            self.generation += 1
            key = INDEX.pack(self.numbers.pop(name))
            self._records.update(key, pack_node(NodeRecord()))
            self._names.update(key, NODE_NAME.pack(b""))
            del self.by_name[name], self._unused_since[name]
            self._doubted -= {(name, False), (name, True)}
