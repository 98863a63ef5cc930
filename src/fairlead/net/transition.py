"""Change the tables of a listener so that no open connection moves.

In: the present slots, the new Maglev table, and the retained nodes, which may keep connections.
Out: the new slots.

The hash of a packet selects a node in `current` and, if that table exists, an entry in `previous`.
The value in `previous` means for the connections of that hash:

* NONE: every connection is on the current node; no flow entries are needed;
* a node: connections without a flow entry are on this node; connections with an entry are on the
  node in the entry;
* TRACKED: connections without a flow entry are on the current node; connections with an entry are
  on the node in the entry.

A new connection whose hash has a value other than NONE gets a flow entry (bpf/choose.h).

Invariant: after a transition every open connection to a retained node still reaches that node, by
flow entry or by table. `previous` has its own size, the largest size of the tables that it was
computed from. Sizes divide one another (see `maglev`), so each of its slots lies within one slot of
every one of these tables, and nothing is lost when a listener grows or shrinks. The current table
depends on the weights alone, so that gateways that started at different times agree on where new
connections go.

A tracked slot stays tracked while more than one node may keep connections: nothing here shows
whether a connection from before the change is still in use, and an age limit would break
connections that are. The cost is bounded: one more table for each listener, and a flow entry for
each new connection of these slots, in an LRU table. A metric shows how full that table is."""

from array import array
from collections.abc import Callable, Iterable, Set
from ctypes import c_uint8, c_uint32, c_void_p
from functools import cache
from itertools import chain, repeat, starmap
from typing import NamedTuple

from fairlead.net.maglev import MIN_SIZE, Table, at, library

NONE = 0xFFFF
TRACKED = 0xFFFE


class Slots(NamedTuple):
    """The two tables of a listener. Their values are indices of `nodes`, or NONE and TRACKED.

    `nodes`: sorted, only nodes that occur in a table. `current`, `previous`: unsigned 16-bit
    numbers; either may be empty. `by_source`, `previous_by_source`: the table is indexed by a hash
    of the client's address alone, not of the whole flow."""

    nodes: tuple[str, ...] = ()
    current: bytes = b""
    previous: bytes = b""
    by_source: bool = False
    previous_by_source: bool = False


def transition(
    old: Slots, table: Table, retained_nodes: Set[str], *, by_source: bool = False
) -> Slots:
    """Return slots that serve new connections by `table` and leave each open connection of the
    `retained_nodes` where it is.

    Applying it twice has no further effect. A node that is not in `retained_nodes` loses its
    connections."""
    new = Slots(table.nodes, table.slots, b"", by_source, by_source)
    if not old.previous and old[:2] == new[:2] and old.by_source == by_source:
        return new
    if not old.current and not old.previous:
        return new  # there are no open connections
    if len(table.nodes) <= 1 and retained_nodes <= set(table.nodes):
        return new  # the only node has all open connections, so no slot needs tracking
    return (
        old
        if is_settled(old, table, retained_nodes, by_source=by_source)
        else by_rule(old, table, retained_nodes, by_source=by_source)
    )


def by_rule(old: Slots, table: Table, retained_nodes: Set[str], *, by_source: bool) -> Slots:
    """Return the new slots, computed slot by slot."""
    # Retained nodes that are in neither table count as well, because flow entries may name them.
    names = tuple(sorted({*old.nodes, *table.nodes, *retained_nodes}))
    index_of = {name: i for i, name in enumerate(names)}
    old_current, old_previous = (
        _renumber(old.current, old.nodes, index_of),
        _renumber(old.previous, old.nodes, index_of),
    )
    current = _renumber(table.slots, table.nodes, index_of)
    rule = _rule({index_of[name] for name in retained_nodes})
    if old_previous and old.previous_by_source != old.by_source:
        previous, previous_by_source = _without_current(old_previous, rule), old.previous_by_source
    elif old.by_source != by_source and (old_current or old_previous):
        size = max(len(old_current), len(old_previous))
        previous = array(
            "H", map(rule, _stretch(old_current, size), _stretch(old_previous, size), repeat(NONE))
        )
        previous = array("H", (TRACKED if each == NONE else each for each in previous))
        previous_by_source = old.by_source
    else:
        previous, previous_by_source = (
            previous_in_c(
                old_current, old_previous, current, {index_of[name] for name in retained_nodes}
            ),
            by_source,
        )
    return _canonical(names, current, _condense(previous), by_source, previous_by_source)


def previous_in_python(
    old_current: "array[int]",
    old_previous: "array[int]",
    current: "array[int]",
    retained_nodes: Set[int],
) -> "array[int]":
    """Compute `previous` slot by slot, for tables that are indexed by the same hash. This is the
    reference implementation, to which the one in C is compared."""
    size = max(len(old_current), len(old_previous), len(current))
    stretched = zip(
        _stretch(old_current, size),
        _stretch(old_previous, size),
        _stretch(current, size),
        strict=True,
    )
    return array("H", starmap(_rule(retained_nodes), stretched))


def previous_in_c(
    old_current: "array[int]",
    old_previous: "array[int]",
    current: "array[int]",
    retained_nodes: Set[int],
) -> "array[int]":
    """Compute the same with bpf/transition.c. Raise Refused if it has not been built."""
    size = max(len(old_current), len(old_previous), len(current))
    may_keep = bytearray(TRACKED)  # one flag for every possible index of a node
    for retained_node in retained_nodes:
        may_keep[retained_node] = 1
    previous = array("H", bytes(2 * size))
    tables = (
        number
        for each in (old_current, old_previous, current)
        for number in (c_uint32(len(each)), at(each))
    )
    retained_flags = (c_uint8 * TRACKED).from_buffer(may_keep)
    library().compute_previous(
        c_uint32(size), *tables, retained_flags, c_uint32(len(retained_nodes)), at(previous)
    )
    return previous


def in_place(old: Slots, table: Table, retained_nodes: Set[str]) -> Slots:
    """Return slots that can be written over `old`, one by one, because both tables keep their
    sizes.

    In slots whose node is not in `table`, the node of `table` replaces it; no other slot changes.
    For use when there is no memory for a second pair of tables.

    `table` has as many slots as the old current table, or is empty. A new node gets only slots of
    nodes that have left, so shares may differ from the weights. A connection without a flow entry
    moves if its node has left but may keep connections, and no table records its slot: `old` has no
    previous table, or one with fewer slots than the current table or with another hash."""
    names = tuple(sorted({*old.nodes, *table.nodes, *retained_nodes}))
    index_of = {name: i for i, name in enumerate(names)}
    old_current, old_previous = (
        _renumber(old.current, old.nodes, index_of),
        _renumber(old.previous, old.nodes, index_of),
    )
    wanted, remaining = (
        _renumber(table.slots, table.nodes, index_of),
        {index_of[name] for name in table.nodes},
    )
    pairs = zip(old_current, wanted, strict=True) if wanted else ()
    current = array("H", (node if node in remaining else new for node, new in pairs))
    may_keep = {index_of[name] for name in retained_nodes}
    if (
        old_previous
        and old.by_source == old.previous_by_source
        and len(old_previous) >= len(old_current)
    ):
        previous = previous_in_c(old_current, old_previous, current, may_keep)
    else:
        previous = _without_current(old_previous, _rule(may_keep))
    return _canonical(names, current, previous, old.by_source, old.previous_by_source)


def is_settled(old: Slots, table: Table, retained_nodes: Set[str], *, by_source: bool) -> bool:
    """Return whether the rule would leave `previous` unchanged: no slot gets another node, and
    every node in `previous` is still retained. This avoids computing all slots if nothing has
    changed."""
    if (
        not old.previous
        or not old.by_source == old.previous_by_source == by_source
        or len(retained_nodes) < 2
    ):
        return False
    named = nodes_in(array("H", old.previous))
    if len(old.current) != len(table.slots) or not {old.nodes[i] for i in named} <= retained_nodes:
        return False
    index_of = {name: i for i, name in enumerate(table.nodes)}
    return (
        _renumber(
            old.current, old.nodes, {name: index_of.get(name, NONE) for name in old.nodes}
        ).tobytes()
        == table.slots
    )


def tracked_as(own: Slots, other: Slots) -> Slots:
    """Return the slots, and track also the slots that another gateway tracks: connections of these
    slots may have flow entries from that gateway, which then apply here too.

    No connection moves: a connection without an entry stays on its node."""
    if not other.previous:
        return own
    by_source = own.previous_by_source if own.previous else other.previous_by_source
    # Tables that are indexed by different hashes have no slots in common: then every slot has to be
    # tracked.
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
    """Return the function that computes the new value of `previous` for a hash, from its old
    current node, its old value in `previous`, and its new current node."""

    @cache
    def previous(old_current: int, old_previous: int, current: int) -> int:
        if old_previous in retained_nodes:
            return old_previous  # the oldest node: only its connections have no flow entries
        if old_previous == NONE and old_current == current:
            return NONE  # the slot keeps its node, and all its connections are there
        if old_current != current and old_current in retained_nodes:
            # The slot leaves this node, and connections without a flow entry are still there.
            return old_current
        if old_previous == NONE:
            return NONE  # all connections were on a node that is gone
        # Flow entries may name any retained node. If that can only be the current node, the slot
        # needs no tracking any more.
        return TRACKED if retained_nodes - {current} else NONE

    return previous


def _without_current(
    old_previous: "array[int]", rule: Callable[[int, int, int], int]
) -> "array[int]":
    """Return `previous` for a listener whose two tables are indexed by different hashes, so that no
    slot of one corresponds to a slot of the other.

    All slots have been tracked since the hash changed, and stay tracked."""
    kept = (rule(NONE, each, NONE) for each in old_previous)
    return array("H", (TRACKED if each == NONE else each for each in kept))


def _renumber(slots: bytes, nodes: tuple[str, ...], index_of: dict[str, int]) -> "array[int]":
    return renumber(array("H", slots), array("H", [index_of[name] for name in nodes]))


def renumber(slots: "array[int]", to: "array[int]") -> "array[int]":
    """Return the table with `to[i]` in place of i; NONE and TRACKED stay. `to` has an entry for
    every number that occurs."""
    out = array("H", bytes(2 * len(slots)))
    renumber_at(slots, to, out.buffer_info()[0])
    return out


def renumber_at(slots: "array[int]", to: "array[int]", address: int) -> None:
    """Write the renumbered slots to memory, one by one."""
    _renumbering()(len(slots), slots.buffer_info()[0], to.buffer_info()[0], address)


@cache
def _renumbering() -> Callable[..., None]:
    """Return `renumber` of bpf/transition.c.

    It takes plain numbers, because creating a ctypes value for each argument would cost more than
    the call."""
    renumbering = library().renumber
    renumbering.argtypes, renumbering.restype = (c_uint32, c_void_p, c_void_p, c_void_p), None
    return renumbering


def nodes_in(*tables: "array[int]") -> list[int]:
    """Return the indices of nodes that occur in these tables, sorted."""
    occurs = bytearray(1 << 16)
    for table in tables:
        library().mark_nodes(
            c_uint32(len(table)), at(table), (c_uint8 * len(occurs)).from_buffer(occurs)
        )
    found, number = [], occurs.find(1)
    while 0 <= number < TRACKED:
        found.append(number)
        number = occurs.find(1, number + 1)
    return found


def _stretch(slots: "array[int]", size: int) -> Iterable[int]:
    """Return the same table with `size` slots; for an empty table NONE in every slot."""
    if not slots:
        return array("H", [NONE]) * size
    times = size // len(slots)
    return slots if times == 1 else chain.from_iterable(map(repeat, slots, repeat(times)))


def _condense(slots: "array[int]") -> "array[int]":
    """Return the shortest equivalent table; an empty one if all slots are NONE."""
    if slots.tobytes() == b"\xff" * (2 * len(slots)):
        return array("H")
    while len(slots) > MIN_SIZE and slots[0::2] == slots[1::2]:
        slots = slots[0::2]
    return slots


def _canonical(
    names: tuple[str, ...],
    current: "array[int]",
    previous: "array[int]",
    by_source: bool,
    previous_by_source: bool,
) -> Slots:
    """Return slots without nodes that do not occur, so that equivalent slots are equal values."""
    used = nodes_in(current, previous)
    to = array("H", bytes(2 * len(names)))
    for new, old in enumerate(used):
        to[old] = new
    return Slots(
        tuple(names[i] for i in used),
        renumber(current, to).tobytes(),
        renumber(previous, to).tobytes(),
        by_source,
        previous_by_source if previous else by_source,
    )
