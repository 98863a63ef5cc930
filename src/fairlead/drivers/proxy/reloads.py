"""Which namespaces may cause a reload of HAProxy now. Pure: the time is an argument.

A worker has connections of all namespaces. After a reload it stays as an old worker until they
end, and the number of old workers is limited. So every reload brings the end of a worker nearer,
with connections of Services that have not changed.

In: the reloads that took place, each with the namespaces whose Services needed it; the connections
of the old workers. Out: how long a namespace has to wait, and the workers to end when there are too
many. An old worker is *free* if one namespace alone caused it, and it has connections of this
namespace only: to end it costs nobody else anything. Every other old worker counts for the
namespaces that caused it.

A namespace that only keeps connections in old workers must not prevent the changes of others
either. So its connections count in half of the old workers at most, and no change waits for
connections longer than `MAX_WAIT_S`.

Invariants: a namespace for which as many workers count as may needs `MAX_WAIT_S` for each further
reload that it causes alone; a free worker is ended before any other."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fairlead.model import ServiceKey

BURST = 10
"""The number of reloads that a namespace may cause one after the other. Later ones are spread over
time, because the changes of other namespaces wait during each reload."""
SHARE = 0.5
"""The fraction of old workers that may count for one namespace, of those that others leave; and the
fraction of the limit in which connections of one namespace count."""
MAX_WAIT_S = 60.0
"""How long a namespace at most waits for the end of connections in old workers that count for it.
"""


class OldWorker(NamedTuple):
    """An old worker. `reloads`: the number of reloads since its start. `connections`: the number
    of its open connections by namespace, without zeros."""

    pid: int
    reloads: int
    connections: Mapping[str, int]


class Reloads:
    """The reloads of one HAProxy. The driver updates them.

    - `limit`: the maximum number of old workers; 0: no limit.
    - `interval_s`: the time after which a namespace that has used up its burst may cause another
      reload."""

    def __init__(self, limit: int, interval_s: float) -> None:
        self._limit = limit
        self._interval_s = interval_s
        self._causes: dict[int, frozenset[str]] = {}
        """The namespaces that caused the reload which made a worker old, by process id. Those of
        workers from before this process are not known: such workers count as caused by others."""
        self._paid_s: dict[str, float] = {}
        """When each namespace has its whole burst again."""
        self._full_s: dict[str, float] = {}
        """Since when each namespace has had no room for another old worker."""
        self._waits_s: dict[ServiceKey, float] = {}
        """When a change of each Service was last found to wait."""

    def record(self, worker: int, namespaces: Collection[str], now_s: float) -> None:
        """Record that changes of these namespaces have made this worker old."""
        self._causes[worker] = frozenset(namespaces)
        self._paid_s = {each: paid_s for each, paid_s in self._paid_s.items() if paid_s > now_s}
        self._full_s = {
            each: full_s
            for each, full_s in self._full_s.items()
            if each not in namespaces and full_s > now_s - 2 * MAX_WAIT_S
        }
        for namespace in namespaces:
            paid_s = self._paid_s.get(namespace, now_s)
            self._paid_s[namespace] = min(paid_s, now_s + self._burst_s) + self._interval_s

    def keep(self, old: Collection[int]) -> None:
        """Delete what is known about workers that have ended."""
        self._causes = {pid: each for pid, each in self._causes.items() if pid in old}

    def wait_s(self, namespace: str, now_s: float) -> float:
        """Return how long the namespace must wait because it has caused many reloads."""
        return max(0.0, self._paid_s.get(namespace, now_s) - now_s - self._burst_s)

    def begin_waits(self, services: Collection[ServiceKey], now_s: float) -> set[ServiceKey]:
        """Record that changes of these Services wait now. Return the Services whose change did not
        wait before. A Service that does not ask again within `MAX_WAIT_S` is forgotten: it was
        deleted, or its change was withdrawn."""
        self._waits_s = {
            each: last_s for each, last_s in self._waits_s.items() if last_s > now_s - MAX_WAIT_S
        }
        new = set(services) - self._waits_s.keys()
        self._waits_s |= dict.fromkeys(services, now_s)
        return new

    def end_waits(self, services: Collection[ServiceKey]) -> None:
        """Record that no change of these Services waits any more."""
        for each in services:
            self._waits_s.pop(each, None)

    def has_room(self, namespace: str, old: Sequence[OldWorker], now_s: float) -> bool:
        """Whether another old worker may count for the namespace. One always may; and one more if
        this was asked in vain `MAX_WAIT_S` ago, and the namespace has caused no reload since."""
        counted = self.others_in(old)
        own = sum(namespace in self._causes.get(pid, ()) for pid in counted)
        others = len(counted) - own
        if not self._limit or own < max(1, int(SHARE * (self._limit - others))):
            self._full_s.pop(namespace, None)
            return True
        return now_s - self._full_s.setdefault(namespace, now_s) >= MAX_WAIT_S

    def surplus(self, old: Sequence[OldWorker]) -> list[OldWorker]:
        """Return the workers to end: free workers first, then those with the fewest connections of
        others; of equal ones the oldest."""
        if not self._limit:
            return []
        others = self.others_in(old)
        ranked = sorted(old, key=lambda each: (others[each.pid], -each.reloads))
        return ranked[: max(0, len(old) - self._limit)]

    def others_in(self, old: Sequence[OldWorker]) -> Counter[int]:
        """Return the number of connections of others in each worker, without zeros: those that are
        not of the namespace which alone caused it. If several caused it together, all are: a single
        change of a namespace must not put its connections at the mercy of another one's changes.

        Connections of a namespace count in its share of the workers only: in those with most of
        them, of equal ones in the newest."""
        held: dict[str, list[OldWorker]] = {}
        for worker in old:
            for namespace in worker.connections:
                if self._causes.get(worker.pid) != frozenset((namespace,)):
                    held.setdefault(namespace, []).append(worker)
        found: Counter[int] = Counter()
        for namespace, workers in held.items():
            workers.sort(key=lambda each: (-each.connections[namespace], each.reloads))
            for worker in workers[: max(1, int(SHARE * self._limit))]:
                found[worker.pid] += worker.connections[namespace]
        return found

    @property
    def _burst_s(self) -> float:
        return (BURST - 1) * self._interval_s
