"""Read from the maps what listeners there are, whose they are, and what belongs to them.

In: the maps, and what is known already: what has not changed since need not be read in full. Out: a
`Survey`, in parts, so that others may have their turn between them. It changes nothing; what
changes meanwhile `ListenerMaps.adopt` knows better."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cache, partial
from itertools import islice
from mmap import mmap
from typing import NamedTuple, TypeVar

from fairlead.drivers.direct.maps.mirror import InstalledListener
from fairlead.drivers.direct.maps.nodes import Nodes, NodesFound
from fairlead.drivers.direct.maps.records import (
    BY_SOURCE,
    CHUNK_BYTES,
    LISTENER,
    PREVIOUS_BY_SOURCE,
    ListenerRecord,
    unpack_entry,
    unpack_listener_key,
    unpack_owner,
)
from fairlead.drivers.direct.maps.retained_nodes import RetainedNodes
from fairlead.drivers.direct.maps.source_ranges import Ranges
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.model import ServiceKey
from fairlead.net.address import unpack_address
from fairlead.net.bpf import Map
from fairlead.net.transition import Slots, nodes_in, renumber

NO_OWNER = ServiceKey("", "")
"""Owner of a listener without a mark. It is wanted by no plan, so it is taken away."""


T = TypeVar("T")
V = TypeVar("V")

AT_ONCE = 50
"""Listeners, or nodes, that are looked at in one part: a millisecond or two."""
PAIRS_AT_ONCE = 250
"""Elements of other maps, which are only taken in."""


class Baseline(NamedTuple):
    """What is known when a survey begins: what has not changed need not be read in full."""

    listeners: Mapping[ListenerKey, InstalledListener]
    names: dict[int, str]


class Survey(NamedTuple):
    """What was found in the maps."""

    changed: Mapping[ListenerKey, InstalledListener]
    """Listeners that are other than was baseline, or were not baseline."""
    gone: frozenset[ListenerKey]
    """Listeners that were known and are not there."""
    nodes: NodesFound
    stale_marks: tuple[bytes, ...]
    """Marks without a listener: what an interrupted change left."""
    retained_nodes: Mapping[int, Set[int]]
    """Numbers of nodes that keep their UDP flows, by the index of the listener's counters."""
    ranges: Mapping[int, Set[bytes]]
    """Source ranges, by the number of their sets."""
    addresses: Set[str]


class Surveyor:
    """Reads the maps that `ListenerMaps` writes. `memory`: the arena's."""

    def __init__(
        self,
        maps: Mapping[str, Map],
        memory: mmap,
        nodes: Nodes,
        ranges: Ranges,
        retained_nodes: RetainedNodes,
        clock: Callable[[], float],
    ) -> None:
        self._listeners, self._owners, self._addresses = (
            maps["listeners"],
            maps["owners"],
            maps["addresses"],
        )
        self._entries = maps["connections"], maps["new_connections"], maps["closing_connections"]
        self._memory, self._clock = memory, clock
        self._nodes, self._ranges, self._retained_nodes = nodes, ranges, retained_nodes

    def survey(self, baseline: Baseline, *, with_entries: bool = False) -> Iterator[Survey | None]:
        """Read the maps anew. Gives None after each part, and the whole at last: for 10,000
        listeners that takes a third of a second. It changes nothing, so that it may be run in a
        thread.

        with_entries: also which nodes the connection entries name. The first survey needs it, later
        the plan has said more."""
        nodes = NodesFound({}, {})
        for count, (name, node, ways) in enumerate(self._nodes.survey(), 1):
            nodes.numbers[name], nodes.next_hops[name] = node, ways
            if count % AT_ONCE == 0:
                yield None
        names = nodes.names()
        decode = cache(
            partial(_decode, names)
        )  # most Services have several listeners with equal tables
        renamed = {name for _, name in names.items() ^ baseline.names.items()}
        entries = self._named_by_entries(names) if with_entries else {}
        retained_nodes: dict[int, set[int]] = {}
        yield from _group(self._retained_nodes.survey(), retained_nodes)
        owners: dict[bytes, bytes] = {}
        yield from _gather(self._owners.items(), owners)
        changed: dict[ListenerKey, InstalledListener] = {}
        gone = set(baseline.listeners)
        for number, (packed, value) in enumerate(self._listeners.items(), 1):
            key, record = unpack_listener_key(packed), ListenerRecord(*LISTENER.unpack(value))
            owner = unpack_owner(owners.pop(packed)) if packed in owners else (NO_OWNER, "")
            tables = self._table(*record[:2]), self._table(*record[2:4])
            old, digest = baseline.listeners.get(key), hash(tables)
            gone.discard(key)
            same = old and (old[:2], old.record, old.digest) == (owner, record, digest)
            if not (same and old and renamed.isdisjoint(old.slots.nodes)):
                slots = decode(*tables, record.flags)
                keeping = {
                    names[number]
                    for number in retained_nodes.get(record.statistics, ())
                    if number in names
                }
                idle_since = dict.fromkeys(
                    {*slots.nodes, *entries.get(packed, ()), *keeping}, self._clock()
                )
                changed[key] = InstalledListener(*owner, slots, record, digest, None, idle_since)
            if number % AT_ONCE == 0:
                yield None
        ranges: dict[int, set[bytes]] = {}
        yield from _group(self._ranges.survey(), ranges)
        addresses: dict[str, bytes] = {}
        yield from _gather(
            ((unpack_address(key), value) for key, value in self._addresses.items()), addresses
        )
        yield Survey(
            changed, frozenset(gone), nodes, tuple(owners), retained_nodes, ranges, addresses.keys()
        )

    def _named_by_entries(self, names: dict[int, str]) -> dict[bytes, set[str]]:
        found: dict[bytes, set[str]] = {}
        for listener, number in {
            unpack_entry(key, value) for entries in self._entries for key, value in entries.items()
        }:
            if number in names:
                found.setdefault(listener, set()).add(names[number])
        return found

    def _table(self, offset: int, size: int) -> bytes:
        """A table as the arena holds it, with the numbers of nodes."""
        return self._memory[offset * CHUNK_BYTES : offset * CHUNK_BYTES + size * 2]


def _gather(pairs: Iterable[tuple[T, V]], found: dict[T, V]) -> Iterator[None]:
    """Take these in, in parts."""
    left = iter(pairs)
    while some := dict(islice(left, PAIRS_AT_ONCE)):
        found |= some
        yield None


def _group(pairs: Iterable[tuple[int, T]], found: dict[int, set[T]]) -> Iterator[None]:
    """The same, where there may be many under one number."""
    for count, (number, each) in enumerate(pairs, 1):
        found.setdefault(number, set()).add(each)
        if count % PAIRS_AT_ONCE == 0:
            yield None


def _decode(names: dict[int, str], current: bytes, previous: bytes, flags: int) -> Slots:
    """Slots by node name, from tables of numbers. A number that stands for nobody gives the empty
    name, which no plan wants."""
    tables = array("H", current), array("H", previous)
    numbers = nodes_in(*tables)
    nodes = tuple(sorted({names.get(number, "") for number in numbers}))
    to = array("H", bytes(2 * (max(numbers, default=0) + 1)))
    for number in numbers:
        to[number] = nodes.index(names.get(number, ""))
    now, before = (renumber(each, to).tobytes() for each in tables)
    return Slots(nodes, now, before, bool(flags & BY_SOURCE), bool(flags & PREVIOUS_BY_SOURCE))
