"""The table sizes that a listener may get when memory is short. Pure.

In: a change, the present listener, and how much memory it may use. Out: the slots to try, the best
first: the requested slots; then slots with half as many entries in the current table, a quarter,
and so on; and at last slots that overwrite the present ones. Invariant: an existing listener may
keep its table size regardless of its namespace's usage. A node can always be removed from a
listener, because the last choice needs no memory.
"""

from collections.abc import Iterator
from typing import NamedTuple

from fairlead.drivers.direct.maps.records import CHUNK_BYTES, ListenerRecord
from fairlead.drivers.direct.spec import SetListener, next_slots
from fairlead.net import maglev
from fairlead.net.transition import Slots, in_place

PART = 8
"""A table larger than the smallest size may use at most one part in PART of what its namespace may
still use. So tables become smaller before a listener gets none."""
MIN_LISTENERS, MAX_LISTENERS = 1024, 32768
RETAINED_PER_LISTENER = 32
"""For how many nodes that keep connections of a listener there is room, on average."""


class SlotsChoice(NamedTuple):
    """Slots that a listener may get. `in_place`: they overwrite its present slots."""

    slots: Slots
    in_place: bool = False


def chunks(size: int) -> int:
    """Return the number of chunks that a table of this many slots needs."""
    return -(-size * 2 // CHUNK_BYTES)


def max_listeners(arena: int) -> int:
    """Return for how many listeners the maps are made, if the arena has this number of chunks. More
    would not fit into it, because each is charged for two tables of the smallest size."""
    return min(max(arena // (2 * chunks(maglev.MIN_SIZE)), MIN_LISTENERS), MAX_LISTENERS)


def claim(record: ListenerRecord) -> int:
    """Return the number of chunks that a listener is charged for: two tables of its present size,
    because a change needs the second one; two tables of the smallest size if it has none, because
    members may return; or its present two tables, if they are larger."""
    current = chunks(max(record.current_size, maglev.MIN_SIZE))
    return current + max(current, chunks(record.previous_size))


def slots_choices(
    change: SetListener, old: Slots | None, available: int, granted: int
) -> Iterator[SlotsChoice]:
    """Yield the choices for a listener that has the slots `old`, or is new (None).

    `available`: the chunks that it may use. `granted`: the table size that it may have
    regardless of `available`; negative if there is none.
    """
    before = Slots() if change.from_scratch or old is None else old
    wanted, has = len(change.slots.current) // 2, len(old.current) // 2 if old else 0
    for size in maglev.sizes_down_from(wanted):
        needed, part = (
            (2 * chunks(size), PART) if size > maglev.MIN_SIZE else (2 * chunks(maglev.MIN_SIZE), 1)
        )
        if size > granted and part * needed > available:
            continue
        if size == wanted:
            yield SlotsChoice(change.slots)
        # Without weights no node can be reached, and there is no smaller table.
        elif change.listener.weights:
            yield SlotsChoice(
                next_slots(change.listener, before, maglev.table_of(change.listener.weights, size))
            )
    if old and (has or (old.previous and not wanted)):
        yield SlotsChoice(_overwriting_slots(change, old, has), in_place=True)


def _overwriting_slots(change: SetListener, old: Slots, size: int) -> Slots:
    weights, listener = change.listener.weights, change.listener
    if not weights and change.slots.current:
        return old
    table = maglev.table_of(weights, size) if weights else maglev.EMPTY
    return in_place(old, table, frozenset((*listener.retained_nodes, *listener.departed)))
