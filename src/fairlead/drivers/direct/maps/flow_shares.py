"""The share of each namespace in the tables of established and closing flows.

In: the namespaces that have listeners, and the entries in the maps. Out: the number of each
namespace, which the records of its listeners name, and how many entries it may add. The program
counts entries under these numbers, and puts entries beyond a share into `excess_flows`
(bpf/shares.h): so clients of one namespace cannot displace the entries of another one.

Invariant: each count is the sum of two parts. Only the programs change the first one, and only this
process the second one. The sum is approximate, and contains entries that are of no more use, such
as those of a transition that has ended. When a share is used up, `recount` removes such entries and
counts the others.
"""

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from socket import IPPROTO_UDP

from fairlead.drivers.direct.maps.quota import RESERVE
from fairlead.drivers.direct.maps.records import DATAGRAM_LIFETIME, INDEX, listener_of, tick
from fairlead.net.bpf import Map, possible_cpus

EXCESS_TABLE, CLOSING_TABLE = "excess_flows", "closing_connections"
TABLES = ("connections", "datagrams", CLOSING_TABLE)
"""The tables with shares."""
_COUNTED = ("connections", "datagrams", EXCESS_TABLE, CLOSING_TABLE)
"""All tables whose entries are counted, in the order of `enum shared_table`."""
_EXCESS = _COUNTED.index(EXCESS_TABLE)
NO_SHARE = 0
"""The number of a namespace without a share. In the map, the counts of all namespaces together."""
HELD_BY_CPU = 128
_TOTAL = 0
_COLUMNS = 2 * len(_COUNTED)
_PROTOCOL_AT = 18
"""The offset of the protocol in the packed key of a listener."""
_ENTRIES_AT_ONCE = 500
"""Entries that are counted in one part, which takes about a millisecond."""

UseOf = Callable[[bytes], tuple[int, bool] | None]
"""Returns, for the key of a listener as bytes, the number of its namespace, and whether its slots
have not been in transition for some time, so that it needs no entries of connections; None if there
is no such listener."""


def usable(capacity: int) -> int:
    """Return how many entries of a table of this size namespaces may use. The rest stays free:
    each CPU holds up to 128 free entries ready, takes that many at once, and the kernel evicts
    entries as soon as fewer are free (LOCAL_FREE_TARGET in Linux kernel/bpf/bpf_lru_list.c). In a
    table that is too small for its CPUs, half is usable all the same."""
    held = HELD_BY_CPU * (possible_cpus() + 1)
    return capacity - min(max(capacity // RESERVE, held), capacity // 2)


class FlowShares:
    """The numbers of namespaces, and the map `shares`.

    share: the fraction that one namespace may have of what the other namespaces leave.
    """

    def __init__(self, maps: Mapping[str, Map], share: float) -> None:
        self._maps = tuple(maps[name] for name in _COUNTED)
        self._absent: set[bytes] = set()
        """The listeners that did not exist at the last count, although entries named them."""
        self._share = share
        self._size = maps["shares"].spec.max_entries
        self._memory = maps["shares"].memory()
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._next = _TOTAL + 1

    def close(self) -> None:
        """Release the memory of the map."""
        self._memory.close()

    def number(self, namespace: str) -> int:
        """Return the number of the namespace: NO_SHARE if all numbers are in use."""
        if namespace not in self._numbers:
            if not self._free and self._next == self._size:
                return NO_SHARE
            number = self._free.pop() if self._free else self._next
            self._next = max(self._next, number + 1)
            self._numbers[namespace] = number
            for table in map(_COUNTED.index, TABLES):
                self._correct(number, table, -self._counted(number, table))
        return self._numbers[namespace]

    def adopt(self, held: Iterable[tuple[str, int]]) -> None:
        """Adopt the numbers that listeners name, and free those of namespaces without listeners.

        `held`: the namespace of each listener, and the number that its record names.
        """
        found = set(held)
        present = {namespace for namespace, _ in found}
        numbers = {
            namespace: number for namespace, number in self._numbers.items() if namespace in present
        }
        taken = set(numbers.values())
        for namespace, number in sorted(found):
            if number != NO_SHARE and namespace not in numbers and number not in taken:
                numbers[namespace] = number
                taken.add(number)
        self._numbers = numbers
        self._next = max(taken, default=_TOTAL) + 1
        self._free = [each for each in range(_TOTAL + 1, self._next) if each not in taken]

    def room(self, number: int, name: str) -> int:
        """Return how many entries the namespace with this number may add to a table, as the
        program computes it. `name`: one of TABLES."""
        table = _COUNTED.index(name)
        limit = usable(self._maps[table].spec.max_entries)
        total, own = self._entries(_TOTAL, table), self._entries(number, table)
        if number == NO_SHARE or total >= limit:
            return 0
        return max(0, int((limit - max(0, total - own)) * self._share) - own)

    def add(self, number: int, name: str, entries: int) -> None:
        """Count entries that this process has added to a table; a negative number: removed."""
        table = _COUNTED.index(name)
        for each in {number, _TOTAL}:
            self._correct(each, table, self._corrected(each, table) + entries)

    def add_excess(self, entries: int) -> None:
        """Count entries beyond shares that this process is about to add. The program looks for such
        entries only if any are counted."""
        self.add(_TOTAL, EXCESS_TABLE, entries)

    @property
    def needs_recount(self) -> bool:
        """Whether the share of any namespace is used up, there may be entries beyond shares, or the
        last count has left entries of listeners that do not exist."""
        return bool(self._absent or self._entries(_TOTAL, _EXCESS)) or any(
            not self.room(number, name) for number in self._numbers.values() for name in TABLES
        )

    def recount(self, use_of: UseOf) -> Iterator[None]:
        """Count the entries of each namespace again, and remove those that are of no more use.
        Yield after each part. 100,000 entries take about 0.2 s.

        The listener of a peer's entry may not exist here yet. So entries are removed if their
        listener did not exist at the last count either: it was removed, and no program looks them
        up any more."""
        before_absent, self._absent = self._absent, set()

        def known_use_of(listener: bytes) -> tuple[int, bool, bool]:
            use = use_of(listener)
            if use is not None:
                return *use, False
            gone = listener in before_absent
            if not gone:
                self._absent.add(listener)
            return NO_SHARE, False, gone

        for table, entries in enumerate(self._maps):
            numbers = range(1 if table == _EXCESS else self._next)
            before = [self._sum(number, table) for number in numbers]
            found: Counter[int] = Counter()
            yield from _count(entries, known_use_of, found)
            found[_TOTAL] = found.total()
            # What both parts of the counts have gained or lost meanwhile stays.
            for number in numbers:
                error = before[number] - found[number]
                self._correct(number, table, self._corrected(number, table) - error)

    def _entries(self, number: int, table: int) -> int:
        return max(0, self._sum(number, table))

    def _sum(self, number: int, table: int) -> int:
        return self._counted(number, table) + self._corrected(number, table)

    def _counted(self, number: int, table: int) -> int:
        return self._cell(number, table).value

    def _corrected(self, number: int, table: int) -> int:
        return self._cell(number, len(_COUNTED) + table).value

    def _correct(self, number: int, table: int, value: int) -> None:
        self._cell(number, len(_COUNTED) + table).value = value

    def _cell(self, number: int, column: int) -> ctypes.c_int64:
        """Return a number of the map. It is read and written as one word of 64 bits, so that no
        program reads half of it."""
        at = (number * _COLUMNS + column) * ctypes.sizeof(ctypes.c_int64)
        return ctypes.c_int64.from_buffer(self._memory, at)


def _count(
    table: Map, use_of: Callable[[bytes], tuple[int, bool, bool]], found: Counter[int]
) -> Iterator[None]:
    """Remove the entries of the table that are of no more use, and add the numbers of the others to
    `found`. The listeners are looked up for each part, because they may change between parts.

    `use_of`: as `UseOf`, and whether the listener is gone."""
    left = iter(table.items())
    while some := list(islice(left, _ENTRIES_AT_ONCE)):
        uses: dict[bytes, tuple[int, bool, bool]] = {}
        expired = tick(time.monotonic()) - DATAGRAM_LIFETIME
        void = []
        for key, entry in some:
            listener = listener_of(key)
            if listener not in uses:
                uses[listener] = use_of(listener)
            number, settled, gone = uses[listener]
            (seen,) = INDEX.unpack_from(entry, INDEX.size)
            # When a peer last had a packet of a UDP flow is not known: `seen` is 0.
            timed = listener[_PROTOCOL_AT] == IPPROTO_UDP and seen
            if gone or (seen <= expired if timed else settled):
                void.append(key)
            else:
                found[number] += 1
        table.delete_all(void)
        yield
