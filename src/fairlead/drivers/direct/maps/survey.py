"""Read from the maps which listeners exist, their owners, and everything that belongs to them.

In: the maps, and the known state: unchanged listeners need not be decoded again. Out: a `Survey`,
read in parts, so that other tasks can run in between. A survey changes nothing. If objects change
during a survey, `ListenerMaps.adopt` keeps the changes.
"""

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
"""The owner of a listener without an owner record. No plan contains it, so the listener is
removed."""


T = TypeVar("T")
V = TypeVar("V")

AT_ONCE = 50
"""Listeners, or nodes, that are read in one part, which takes a millisecond or two."""
PAIRS_AT_ONCE = 250
"""Elements of other maps that are read in one part: more, because they are only stored."""


class Baseline(NamedTuple):
    """The known state when a survey begins. Unchanged objects need not be decoded again."""

    listeners: Mapping[ListenerKey, InstalledListener]
    names: dict[int, str]


class Survey(NamedTuple):
    """The content that was found in the maps."""

    changed: Mapping[ListenerKey, InstalledListener]
    """Listeners that differ from the baseline, or are not in it."""
    removed: frozenset[ListenerKey]
    """Listeners of the baseline that do not exist any more."""
    nodes: NodesFound
    stale_owners: tuple[bytes, ...]
    """Keys of owner records without a listener, which an interrupted change has left."""
    retained_nodes: Mapping[int, Set[int]]
    """Numbers of the nodes that keep their open flows, by the index of the listener's counters."""
    ranges: Mapping[int, Set[bytes]]
    """Keys of source ranges, by the number of their sets."""
    addresses: Set[str]


class Surveyor:
    """Reads the maps that `ListenerMaps` writes. `memory`: the memory of the arena."""

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
        self._entries = tuple(
            maps[name]
            for name in ("connections", "excess_flows", "new_connections", "closing_connections")
        )
        self._memory, self._clock = memory, clock
        self._nodes, self._ranges, self._retained_nodes = nodes, ranges, retained_nodes

    def survey(self, baseline: Baseline, *, with_entries: bool = False) -> Iterator[Survey | None]:
        """Read the maps. Yield None after each part, and the survey at last. 10,000 listeners take
        a third of a second. Nothing is changed, so this may run in another thread.

        `with_entries`: also find the nodes that flow entries name. Only the first survey needs
        this; later the plan knows more.
        """
        nodes = NodesFound({}, {})
        for count, (name, node, hops) in enumerate(self._nodes.survey(), 1):
            nodes.numbers[name], nodes.next_hops[name] = node, hops
            if count % AT_ONCE == 0:
                yield None
        names = nodes.names()
        # Most Services have several listeners with equal tables, so decoded tables are cached.
        decode = cache(partial(_decode, names))
        renamed = {name for _, name in names.items() ^ baseline.names.items()}
        entries = self._named_by_entries(names) if with_entries else {}
        retained_nodes: dict[int, set[int]] = {}
        yield from _group(self._retained_nodes.survey(), retained_nodes)
        owners: dict[bytes, bytes] = {}
        yield from _gather(self._owners.items(), owners)
        changed: dict[ListenerKey, InstalledListener] = {}
        removed = set(baseline.listeners)
        for number, (packed, value) in enumerate(self._listeners.items(), 1):
            key, record = unpack_listener_key(packed), ListenerRecord(*LISTENER.unpack(value))
            owner = unpack_owner(owners.pop(packed)) if packed in owners else (NO_OWNER, "")
            tables = self._table(*record[:2]), self._table(*record[2:4])
            old, digest = baseline.listeners.get(key), hash(tables)
            removed.discard(key)
            same = old and (old[:2], old.record, old.digest) == (owner, record, digest)
            if not (same and old and renamed.isdisjoint(old.slots.nodes)):
                slots = decode(*tables, record.flags)
                retained = {
                    names[number]
                    for number in retained_nodes.get(record.statistics, ())
                    if number in names
                }
                idle_since = dict.fromkeys(
                    {*slots.nodes, *entries.get(packed, ()), *retained}, self._clock()
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
            changed,
            frozenset(removed),
            nodes,
            tuple(owners),
            retained_nodes,
            ranges,
            addresses.keys(),
        )

    def _named_by_entries(self, names: dict[int, str]) -> dict[bytes, set[str]]:
        """Return the nodes that flow entries name, by the packed key of the listener."""
        found: dict[bytes, set[str]] = {}
        for listener, number in {
            unpack_entry(key, value) for entries in self._entries for key, value in entries.items()
        }:
            if number in names:
                found.setdefault(listener, set()).add(names[number])
        return found

    def _table(self, offset: int, size: int) -> bytes:
        """Return a table as the arena contains it, with the numbers of nodes."""
        return self._memory[offset * CHUNK_BYTES : offset * CHUNK_BYTES + size * 2]


def _gather(pairs: Iterable[tuple[T, V]], found: dict[T, V]) -> Iterator[None]:
    """Store the pairs, in parts."""
    left = iter(pairs)
    while some := dict(islice(left, PAIRS_AT_ONCE)):
        found |= some
        yield None


def _group(pairs: Iterable[tuple[int, T]], found: dict[int, set[T]]) -> Iterator[None]:
    """Store the pairs, in parts, and collect all values of each number."""
    for count, (number, each) in enumerate(pairs, 1):
        found.setdefault(number, set()).add(each)
        if count % PAIRS_AT_ONCE == 0:
            yield None


def _decode(names: dict[int, str], current: bytes, previous: bytes, flags: int) -> Slots:
    """Return slots with node names, from tables of node numbers. A number without a node is decoded
    to the empty name, which no plan contains."""
    tables = array("H", current), array("H", previous)
    numbers = nodes_in(*tables)
    nodes = tuple(sorted({names.get(number, "") for number in numbers}))
    to = array("H", bytes(2 * (max(numbers, default=0) + 1)))
    for number in numbers:
        to[number] = nodes.index(names.get(number, ""))
    now, before = (renumber(each, to).tobytes() for each in tables)
    return Slots(nodes, now, before, bool(flags & BY_SOURCE), bool(flags & PREVIOUS_BY_SOURCE))
