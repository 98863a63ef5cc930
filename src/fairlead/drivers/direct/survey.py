"""Read from the maps what listeners there are, whose they are, and what belongs to them.

In: the maps, and what is known already: what has not changed since need not be read in full. Out: a `Survey`, whole. It changes
nothing, so that it may run in a thread while changes are made; whether it still holds then is for `Tables.adopt` to see.
"""

from array import array
from collections.abc import Callable, Mapping
from functools import cache, partial
from mmap import mmap
from typing import NamedTuple

from fairlead.drivers.direct.keepers import Keepers
from fairlead.drivers.direct.layout import (
    BY_SOURCE,
    CHUNK_BYTES,
    LISTENER,
    PREVIOUS_BY_SOURCE,
    ListenerRecord,
    unpack_address,
    unpack_entry,
    unpack_listener_key,
    unpack_owner,
)
from fairlead.drivers.direct.mirror import InstalledListener, Mirror
from fairlead.drivers.direct.nodes import Nodes, NodesFound
from fairlead.drivers.direct.ranges import Ranges
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.model import ServiceKey
from fairlead.net.bpf import Map
from fairlead.net.transition import Slots, nodes_in, renumber

NOBODY = ServiceKey("", "")
"""Owner of a listener without a mark. It is wanted by no plan, so it is taken away."""


class Known(NamedTuple):
    """What is known when a survey begins: what has not changed need not be read in full."""

    generation: int
    mirror: Mirror
    names: dict[int, str]


class Survey(NamedTuple):
    """What was found in the maps. Holds if nothing was changed since it began."""

    generation: int
    mirror: Mirror
    nodes: NodesFound
    stale_marks: tuple[bytes, ...]
    """Marks without a listener: what an interrupted change left."""
    keepers: Mapping[int, frozenset[int]]
    """Numbers of nodes that keep their UDP flows, by the index of the listener's counters."""
    ranges: Mapping[int, frozenset[bytes]]
    """Source ranges, by the number of their sets."""
    addresses: frozenset[str]


class Surveyor:
    """Reads the maps that `Tables` writes. `memory`: the arena's."""

    def __init__(
        self,
        maps: Mapping[str, Map],
        memory: mmap,
        nodes: Nodes,
        ranges: Ranges,
        keepers: Keepers,
        clock: Callable[[], float],
    ) -> None:
        self._listeners, self._owners, self._addresses = maps["listeners"], maps["owners"], maps["addresses"]
        self._entries = maps["connections"], maps["new_connections"]
        self._memory, self._clock = memory, clock
        self._nodes, self._ranges, self._keepers = nodes, ranges, keepers

    def survey(self, known: Known, *, with_entries: bool = False) -> Survey:
        """Read the maps anew. Takes up to a second for 10,000 listeners: call it in a thread; it changes nothing.

        with_entries: also which nodes the connection entries name. The first survey needs it, later the plan has said more.
        """
        nodes = self._nodes.survey()
        names = nodes.names()
        decode = cache(partial(_decode, names))  # most Services have several listeners with equal tables
        same_names = names == known.names
        entries = self._named_by_entries(names) if with_entries else {}
        keepers = self._keepers.survey()
        owners = dict(self._owners.items())
        found: list[tuple[ListenerKey, InstalledListener]] = []
        for packed, value in self._listeners.items():
            key, record = unpack_listener_key(packed), ListenerRecord(*LISTENER.unpack(value))
            owner = unpack_owner(owners.pop(packed)) if packed in owners else (NOBODY, "")
            tables = self._table(*record[:2]), self._table(*record[2:4])
            old, digest = known.mirror.listeners.get(key), hash(tables)
            if old and same_names and (old[:2], old.record, old.digest) == (owner, record, digest):
                found.append((key, old))
                continue
            slots = decode(*tables, record.flags)
            keeping = {names[number] for number in keepers.get(record.statistics, ()) if number in names}
            idle_since = dict.fromkeys({*slots.nodes, *entries.get(packed, ()), *keeping}, self._clock())
            found.append((key, InstalledListener(*owner, slots, record, digest, None, idle_since)))
        addresses = frozenset(unpack_address(key) for key, _ in self._addresses.items())
        return Survey(known.generation, Mirror(found), nodes, tuple(owners), keepers, self._ranges.survey(), addresses)

    def _named_by_entries(self, names: dict[int, str]) -> dict[bytes, set[str]]:
        found: dict[bytes, set[str]] = {}
        for listener, number in {unpack_entry(key, value) for entries in self._entries for key, value in entries.items()}:
            if number in names:
                found.setdefault(listener, set()).add(names[number])
        return found

    def _table(self, offset: int, size: int) -> bytes:
        """A table as the arena holds it, with the numbers of nodes."""
        return self._memory[offset * CHUNK_BYTES : offset * CHUNK_BYTES + size * 2]


def _decode(names: dict[int, str], current: bytes, previous: bytes, flags: int) -> Slots:
    """Slots by node name, from tables of numbers. A number that stands for nobody gives the empty name, which no plan wants."""
    tables = array("H", current), array("H", previous)
    numbers = nodes_in(*tables)
    nodes = tuple(sorted({names.get(number, "") for number in numbers}))
    to = array("H", bytes(2 * (max(numbers, default=0) + 1)))
    for number in numbers:
        to[number] = nodes.index(names.get(number, ""))
    now, before = (renumber(each, to).tobytes() for each in tables)
    return Slots(nodes, now, before, bool(flags & BY_SOURCE), bool(flags & PREVIOUS_BY_SOURCE))
