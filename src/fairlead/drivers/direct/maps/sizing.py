"""Which tables a listener gets when there is no memory for the size that its weights call for.
Pure.

In: a change, the existing listener, and how much memory it may use. Out: the slots to try, the best
first: as they are asked for; then with half as many slots for new connections, a quarter, and so
on; and at last slots that are written over the old ones. Invariant: an existing listener may keep
its size, however much its namespace uses, and a node can always be removed from a listener, because
one of the choices takes no memory."""

from collections.abc import Iterator
from typing import NamedTuple

from fairlead.drivers.direct.maps.records import CHUNK_BYTES, ListenerRecord
from fairlead.drivers.direct.spec import SetListener, next_slots
from fairlead.net import maglev
from fairlead.net.transition import Slots, in_place

PART = 8
"""A table may take one part in PART of what its namespace may still use, unless it has the smallest
size. So tables become smaller before a listener gets none."""


class Fitting(NamedTuple):
    """Slots that a listener may have. `over`: they are written over its present slots."""

    slots: Slots
    over: bool = False


def chunks(size: int) -> int:
    """Chunks of the arena that a table of this many slots takes."""
    return -(-size * 2 // CHUNK_BYTES)


def claim(record: ListenerRecord) -> int:
    """Chunks that count as used by a listener: two tables of its present size, because a change
    needs the second one; two of the smallest size if it has none, because members may come back; or
    its two present tables, if they are larger."""
    current = chunks(max(record.current_size, maglev.SMALLEST))
    return current + max(current, chunks(record.previous_size))


def fittings(change: SetListener, old: Slots | None, room: int, granted: int) -> Iterator[Fitting]:
    """The choices for a listener that has the slots `old`, or is new (None). `room`: chunks that it
    may use. `granted`: the size that it may have independent of the room; less than 0: none."""
    before = Slots() if change.from_scratch or old is None else old
    wanted, has = len(change.slots.current) // 2, len(old.current) // 2 if old else 0
    for size in maglev.sizes_down_from(wanted):
        needed, part = (
            (2 * chunks(size), PART) if size > maglev.SMALLEST else (2 * chunks(maglev.SMALLEST), 1)
        )
        if size > granted and part * needed > room:
            continue
        if size == wanted:
            yield Fitting(change.slots)
        elif (
            change.listener.weights
        ):  # without weights no node can be reached, and there is no smaller table
            yield Fitting(
                next_slots(change.listener, before, maglev.table_of(change.listener.weights, size))
            )
    if old and (has or (old.previous and not wanted)):
        yield Fitting(_over(change, old, has), over=True)


def _over(change: SetListener, old: Slots, size: int) -> Slots:
    weights, listener = change.listener.weights, change.listener
    if not weights and change.slots.current:
        return old
    table = maglev.table_of(weights, size) if weights else maglev.EMPTY
    return in_place(old, table, frozenset((*listener.retained_nodes, *listener.departed)))
