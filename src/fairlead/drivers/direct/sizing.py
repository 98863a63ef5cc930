"""With which tables a listener is served where there is not memory for those that its weights call for. Pure.

In: a change, the listener that is there, and how much memory it may count for. Out: the slots to try, best first: as they are
asked for; with half as many slots for new connections, and again half as many; and at last slots that are written over the old
ones.
Invariant: a listener that is there may keep the size that it has, whatever its namespace has, and one from which a node is to
go always has a way that takes no memory.
"""

from collections.abc import Iterator
from typing import NamedTuple

from fairlead.drivers.direct.layout import CHUNK_BYTES, ListenerRecord
from fairlead.drivers.direct.spec import SetListener, slots_of
from fairlead.net import maglev
from fairlead.net.transition import Slots, in_place

PART = 8
"""A table may take one part in so many of what its namespace may still have, unless it is of the smallest size: so tables
become smaller before there are none."""


class Fitting(NamedTuple):
    """Slots that a listener may have. `over`: they are written over those that it has."""

    slots: Slots
    over: bool = False


def chunks(size: int) -> int:
    """Chunks of the arena that a table of this many slots takes."""
    return -(-size * 2 // CHUNK_BYTES)


def claim(record: ListenerRecord) -> int:
    """Chunks that a listener counts for: two tables of its present size, because a change needs the second one, and of the
    smallest size at least, because members may come back; or those that it has, if they are larger."""
    current = chunks(max(record.current_size, maglev.SMALLEST))
    return current + max(current, chunks(record.previous_size))


def fittings(change: SetListener, old: Slots | None, room: int, granted: int) -> Iterator[Fitting]:
    """What to try for a listener that has the slots `old`, or is new (None). `room`: chunks that it may count for. `granted`:
    the size that it may have whatever the room is; less than 0: none."""
    before = Slots() if change.afresh or old is None else old
    wanted, has = len(change.slots.current) // 2, len(old.current) // 2 if old else 0
    for size in maglev.sizes_down_from(wanted):
        needed, part = (2 * chunks(size), PART) if size > maglev.SMALLEST else (2 * chunks(maglev.SMALLEST), 1)
        if size > granted and part * needed > room:
            continue
        if size == wanted:
            yield Fitting(change.slots)
        elif change.listener.weights:  # else no node is in reach, and the slots are what they were to be
            yield Fitting(slots_of(change.listener, before, maglev.table_of(change.listener.weights, size)))
    if old and (has or (old.previous and not wanted)):
        yield Fitting(_over(change, old, has), over=True)


def _over(change: SetListener, old: Slots, size: int) -> Slots:
    weights, listener = change.listener.weights, change.listener
    if not weights and change.slots.current:
        return old
    table = maglev.table_of(weights, size) if weights else maglev.EMPTY
    return in_place(old, table, frozenset((*listener.keepers, *listener.left)))
