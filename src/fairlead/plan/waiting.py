"""Who waits for what: Services that could not be given all that they want, in line for what may
become free.

In: what a Service waits for; news of what changed. Out: those concerned by the news, one after the
other, in order. Invariant: pure, but for its memory; finding the next in line does not cost more
when the line is long."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection

from fairlead.plan.addresses import Order

Wait = tuple[str, ...]
"""What a Service waits for: `("pool", name, family)`, `("address", address)` or `("sharing",
namespace, key)`."""


class WaitQueues:
    """One line for each thing that is waited for."""

    def __init__(self) -> None:
        self._queues: dict[Wait, list[Order]] = {}
        self._news: set[Wait] = set()

    def move(self, order: Order, before: Collection[Wait], after: Collection[Wait]) -> None:
        """A Service that stood in the lines `before` stands in the lines `after` from now on."""
        for wait in set(before).difference(after):
            line = self._queues[wait]
            del line[bisect_left(line, order)]
            if not line:
                del self._queues[wait]
        for wait in set(after).difference(before):
            insort(self._queues.setdefault(wait, []), order)

    def notify(self, *waits: Wait) -> None:
        """There is news of these."""
        self._news.update(waits)

    def notify_all(self, sort: str) -> None:
        """There is news of everything of this sort."""
        self._news.update(wait for wait in self._queues if wait[0] == sort)

    def drain(self) -> list[Wait]:
        """All that there is news of, which is no news then."""
        news, self._news = sorted(self._news), set()
        return news

    def next(self, wait: Wait, after: Order | None = None) -> Order | None:
        """Who is first in that line, or next after this Service."""
        line = self._queues.get(wait, [])
        place = bisect_right(line, after) if after is not None else 0
        return line[place] if place < len(line) else None
