"""Change the tables of a listener so that no open connection moves.

In: the slots as they are, the new Maglev table, and the nodes that may keep connections. Out: the
slots as they shall be.

A packet's hash picks a node in `current`, and, where there is one, in `previous`. What `previous`
says of a hash:
  NONE      every connection there is on the current node; no state is needed
  a node    connections without an entry are on this node, those with one are where the entry says
  TRACKED   connections without an entry are on the current node, those with one are where the entry says
New connections of a hash whose `previous` is not NONE get an entry (bpf/choose.h).

Invariant: after a transition every open connection to a node that may keep it is found there again,
by entry or by table. `previous` has a size of its own, the largest of those it was made from. Sizes
divide one another (see `maglev`), so each of its slots lies within one slot of every table that it
descends from, and nothing is lost when a listener grows or shrinks. The current table follows from
the weights alone, so that gateways of different age agree on where new connections go.

A slot that is tracked stays so while more than one node may keep connections: nothing here shows
whether a connection from before the change is still in use, and an age limit would break those that
are. The price is bounded: one more table for each listener, and an entry for each new connection
there, in a table that makes room by itself. How full it is, is a metric."""

from array import array
from collections.abc import Callable, Iterable, Set
from ctypes import c_uint8, c_uint32, c_void_p
from functools import cache
from itertools import chain, repeat, starmap
from typing import NamedTuple

from fairlead.net.maglev import SMALLEST, Table, at, library

NONE = 0xFFFF
TRACKED = 0xFFFE


class Slots(NamedTuple):
    """The two tables of a listener; numbers in them are places in `nodes`, or NONE and TRACKED.

    `nodes`: sorted, those that occur. `current`, `previous`: unsigned 16-bit numbers, either may be
    empty. `by_source`, `previous_by_source`: the table is indexed by the client's address alone,
    not by the whole flow."""

    nodes: tuple[str, ...] = ()
    current: bytes = b""
    previous: bytes = b""
    by_source: bool = False
    previous_by_source: bool = False


def transition(
    old: Slots, table: Table, retained_nodes: Set[str], *, by_source: bool = False
) -> Slots:
    """The slots that serve new connections by `table` and leave each open connection of the
    `retained_nodes` where it is.

    Repeating it changes nothing. A node that is not among `retained_nodes` loses its connections.
    """
    new = Slots(table.nodes, table.slots, b"", by_source, by_source)
    if not old.previous and old[:2] == new[:2] and old.by_source == by_source:
        return new
    if not old.current and not old.previous:
        return new  # nothing is open
    if len(table.nodes) <= 1 and retained_nodes <= set(table.nodes):
        return new  # whatever is open is on the only node: there is nothing to tell apart
    return (
        old
        if is_settled(old, table, retained_nodes, by_source=by_source)
        else by_rule(old, table, retained_nodes, by_source=by_source)
    )


def by_rule(old: Slots, table: Table, retained_nodes: Set[str], *, by_source: bool) -> Slots:
    """The slots after going through all of them, one by one."""
    # RetainedNodes that no table names count as well: entries may name them.
    names = tuple(sorted({*old.nodes, *table.nodes, *retained_nodes}))
    place = {name: i for i, name in enumerate(names)}
    was, before = (
        _renumber(old.current, old.nodes, place),
        _renumber(old.previous, old.nodes, place),
    )
    now = _renumber(table.slots, table.nodes, place)
    rule = _rule({place[name] for name in retained_nodes})
    if before and old.previous_by_source != old.by_source:
        previous, previous_by_source = _without_current(before, rule), old.previous_by_source
    elif old.by_source != by_source and (was or before):
        size = max(len(was), len(before))
        previous = array("H", map(rule, _stretch(was, size), _stretch(before, size), repeat(NONE)))
        previous = array("H", (TRACKED if each == NONE else each for each in previous))
        previous_by_source = old.by_source
    else:
        previous, previous_by_source = (
            follow_in_c(was, before, now, {place[name] for name in retained_nodes}),
            by_source,
        )
    return _canonical(names, now, _condense(previous), by_source, previous_by_source)


def follow_in_python(
    was: "array[int]", before: "array[int]", now: "array[int]", retained_nodes: Set[int]
) -> "array[int]":
    """The reference: what `previous` becomes, slot by slot, where all tables are indexed by the
    same hash."""
    size = max(len(was), len(before), len(now))
    stretched = zip(_stretch(was, size), _stretch(before, size), _stretch(now, size), strict=True)
    return array("H", starmap(_rule(retained_nodes), stretched))


def follow_in_c(
    was: "array[int]", before: "array[int]", now: "array[int]", retained_nodes: Set[int]
) -> "array[int]":
    """The same through bpf/transition.c. Raises Refused if it has not been built."""
    size = max(len(was), len(before), len(now))
    may_keep = bytearray(TRACKED)  # for any number of a node
    for retained_node in retained_nodes:
        may_keep[retained_node] = 1
    previous = array("H", bytes(2 * size))
    tables = (number for each in (was, before, now) for number in (c_uint32(len(each)), at(each)))
    keeping = (c_uint8 * TRACKED).from_buffer(may_keep)
    library().follow(c_uint32(size), *tables, keeping, c_uint32(len(retained_nodes)), at(previous))
    return previous


def in_place(old: Slots, table: Table, retained_nodes: Set[str]) -> Slots:
    """Slots that can be written over `old`, one by one, because both tables keep their sizes: in
    slots whose node is not in `table`, the node of `table` replaces it; no other slot changes. For
    use when there is no memory for a second pair of tables.

    table: with as many slots as the old current table, or empty. A new node gets only slots of
    nodes that have left, so shares may differ from the weights. A connection without an entry moves
    if its node has left but may keep connections, and no table remembers its slot: `old` has no
    previous table, or one with fewer slots than the current table or with another hash."""
    names = tuple(sorted({*old.nodes, *table.nodes, *retained_nodes}))
    place = {name: i for i, name in enumerate(names)}
    was, before = (
        _renumber(old.current, old.nodes, place),
        _renumber(old.previous, old.nodes, place),
    )
    dealt, stay = _renumber(table.slots, table.nodes, place), {place[name] for name in table.nodes}
    pairs = zip(was, dealt, strict=True) if dealt else ()
    now = array("H", (node if node in stay else new for node, new in pairs))
    may_keep = {place[name] for name in retained_nodes}
    if before and old.by_source == old.previous_by_source and len(before) >= len(was):
        previous = follow_in_c(was, before, now, may_keep)
    else:
        previous = _without_current(before, _rule(may_keep))
    return _canonical(names, now, previous, old.by_source, old.previous_by_source)


def is_settled(old: Slots, table: Table, retained_nodes: Set[str], *, by_source: bool) -> bool:
    """Whether the rule would say again what `previous` says already: no slot has another node, and
    no retained_node has gone. Saves going through all slots where nothing has changed."""
    if (
        not old.previous
        or not old.by_source == old.previous_by_source == by_source
        or len(retained_nodes) < 2
    ):
        return False
    named = nodes_in(array("H", old.previous))
    if len(old.current) != len(table.slots) or not {old.nodes[i] for i in named} <= retained_nodes:
        return False
    place = {name: i for i, name in enumerate(table.nodes)}
    return (
        _renumber(
            old.current, old.nodes, {name: place.get(name, NONE) for name in old.nodes}
        ).tobytes()
        == table.slots
    )


def tracked_as(own: Slots, other: Slots) -> Slots:
    """The slots, tracked also where another gateway's are: its connections there may have entries,
    which count here then.

    No connection moves by it: one without an entry is where it was before.
    """
    if not other.previous:
        return own
    by_source = own.previous_by_source if own.previous else other.previous_by_source
    # Tables that are indexed by different hashes have no slots in common: then all have to be.
    crossed = not own.by_source == by_source == other.previous_by_source
    mine, theirs = array("H", own.previous), array("H", other.previous)
    size = max(len(mine), len(theirs))
    pairs = zip(_stretch(mine, size), _stretch(theirs, size), strict=True)
    previous = array(
        "H",
        (
            TRACKED if mine == NONE and (crossed or theirs != NONE) else mine
            for mine, theirs in pairs
        ),
    )
    return own._replace(previous=_condense(previous).tobytes(), previous_by_source=by_source)


def _rule(retained_nodes: Set[int]) -> Callable[[int, int, int], int]:
    """What `previous` becomes for a hash, from its old current node, its old previous one, and its
    new current one."""

    @cache
    def previous(was: int, before: int, now: int) -> int:
        if before in retained_nodes:
            return before  # the oldest: only its connections have no entries
        if before == NONE and was == now:
            return NONE
        if was != now and was in retained_nodes:
            return was
        if before == NONE:
            return NONE  # all connections were on a node that is gone
        return TRACKED if retained_nodes - {now} else NONE

    return previous


def _without_current(before: "array[int]", rule: Callable[[int, int, int], int]) -> "array[int]":
    """The tables are indexed by different hashes, so that no slot of one belongs to a slot of the
    other.

    All slots have been tracked since that began; they stay so.
    """
    kept = (rule(NONE, each, NONE) for each in before)
    return array("H", (TRACKED if each == NONE else each for each in kept))


def _renumber(slots: bytes, nodes: tuple[str, ...], place: dict[str, int]) -> "array[int]":
    return renumber(array("H", slots), array("H", [place[name] for name in nodes]))


def renumber(slots: "array[int]", to: "array[int]") -> "array[int]":
    """The table with number `to[i]` in the place of i; NONE and TRACKED stay. `to` has all numbers
    that occur."""
    out = array("H", bytes(2 * len(slots)))
    renumber_at(slots, to, out.buffer_info()[0])
    return out


def renumber_at(slots: "array[int]", to: "array[int]", address: int) -> None:
    """Write the slots to memory, one by one."""
    _renumbering()(len(slots), slots.buffer_info()[0], to.buffer_info()[0], address)


@cache
def _renumbering() -> Callable[..., None]:
    """`renumber` of bpf/transition.c, which takes plain numbers: a value of ctypes for each would
    cost more than the work."""
    renumbering = library().renumber
    renumbering.argtypes, renumbering.restype = (c_uint32, c_void_p, c_void_p, c_void_p), None
    return renumbering


def nodes_in(*tables: "array[int]") -> list[int]:
    """The numbers of nodes that occur in these tables, sorted."""
    occurs = bytearray(1 << 16)
    for table in tables:
        library().note(c_uint32(len(table)), at(table), (c_uint8 * len(occurs)).from_buffer(occurs))
    found, number = [], occurs.find(1)
    while 0 <= number < TRACKED:
        found.append(number)
        number = occurs.find(1, number + 1)
    return found


def _stretch(slots: "array[int]", size: int) -> Iterable[int]:
    """The same table with `size` slots; an empty one says NONE everywhere."""
    if not slots:
        return array("H", [NONE]) * size
    times = size // len(slots)
    return slots if times == 1 else chain.from_iterable(map(repeat, slots, repeat(times)))


def _condense(slots: "array[int]") -> "array[int]":
    """The shortest table that says the same; empty if that is NONE everywhere."""
    if slots.tobytes() == b"\xff" * (2 * len(slots)):
        return array("H")
    while len(slots) > SMALLEST and slots[0::2] == slots[1::2]:
        slots = slots[0::2]
    return slots


def _canonical(
    names: tuple[str, ...],
    now: "array[int]",
    previous: "array[int]",
    by_source: bool,
    previous_by_source: bool,
) -> Slots:
    """Equal slots as equal values: no name that does not occur."""
    used = nodes_in(now, previous)
    to = array("H", bytes(2 * len(names)))
    for new, old in enumerate(used):
        to[old] = new
    return Slots(
        tuple(names[i] for i in used),
        renumber(now, to).tobytes(),
        renumber(previous, to).tobytes(),
        by_source,
        previous_by_source if previous else by_source,
    )
