"""Queues of Services that wait for an address, a pool or a sharing key.

A Service waits if it could not be given everything that it requests. In: what each Service waits
for, and notifications of changes. Out: the Services that a change concerns, one at a time, in
their order of precedence. Invariant: pure, except for its memory; finding the next Service takes
logarithmic time in the length of the queue."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection

from fairlead.plan.addresses import Order

Wait = tuple[str, ...]
"""What a Service waits for: `("pool", name, family)`, `("address", address)` or `("sharing",
namespace, key)`."""


class WaitQueues:
    """A sorted queue of Services for each thing that Services wait for."""

    def __init__(self) -> None:
        self._queues: dict[Wait, list[Order]] = {}
        self._changed: set[Wait] = set()

    def move(self, order: Order, before: Collection[Wait], after: Collection[Wait]) -> None:
        """Move a Service from the queues of `before` to the queues of `after`."""
        for wait in set(before).difference(after):
            queue = self._queues[wait]
            del queue[bisect_left(queue, order)]
            if not queue:
                del self._queues[wait]
        for wait in set(after).difference(before):
            insort(self._queues.setdefault(wait, []), order)

    def notify(self, *waits: Wait) -> None:
        """Record that these may have become available."""
        self._changed.update(waits)

    def notify_all(self, sort: str) -> None:
        """Record that everything of this sort ("pool", "address", "sharing") that a Service waits
        for may have become available."""
        self._changed.update(wait for wait in self._queues if wait[0] == sort)

    def drain(self) -> list[Wait]:
        """Return everything that has been recorded as available, sorted, and forget it."""
        changed, self._changed = sorted(self._changed), set()
        return changed

    def next(self, wait: Wait, after: Order | None = None) -> Order | None:
        """Return the first Service of a queue, or the first one after the Service `after`; None if
        there is none."""
        queue = self._queues.get(wait, [])
        index = bisect_right(queue, after) if after is not None else 0
        return queue[index] if index < len(queue) else None
