"""Which namespaces may cause a reload of HAProxy now. Pure: the time is an argument.

A worker has connections of all namespaces. After a reload it stays as an old worker until they
end, and the number of old workers is limited. So every reload brings the end of a worker nearer,
with connections of Services that have not changed.

In: the reloads that took place, each with the namespaces whose Services needed it; the connections
of the old workers. Out: how long a namespace has to wait, and the workers to end when there are too
many. An old worker is *free* if one namespace alone caused it, and it has connections of this
namespace only: to end it costs nobody else anything. Every other old worker counts for the
namespaces that caused it.

The share of one namespace does not limit what many namespaces do together. So when more than half
of the old workers that there may be have connections of others, the time between two reloads grows
with their number, up to `MAX_WAIT_S`, when each reload ends one of them. All changes that wait
share the next reload. So connections have time to end, whoever changes how much
(`tests/drivers/proxy/test_reloads.py`).

A namespace that changes often waits for longer, one that changes rarely does not, whatever the
others do together: for a namespace that has caused a reload within `MAX_PAUSE_S`, the time between
two reloads grows up to `MAX_PAUSE_S`. Nobody shall pay for what one other namespace does, by
keeping connections in all old workers, or by causing most of them. So this longer time counts
without the old workers that one namespace alone caused or alone has connections in, for the
namespace for which they are most. A namespace that has used up its share waits for up to
`MAX_PAUSE_S` after the last reload that it caused, for connections in all old workers.

Connections of a namespace that only keeps them count in half of the old workers at most that
namespaces with connections in fewer of them leave. In the other old workers they end first.

Invariants: a change of a namespace that has caused no reload for `MAX_PAUSE_S` waits for
`MAX_WAIT_S` at most because of others, whatever they do, and no change waits for longer than
`MAX_PAUSE_S` because of them. Whatever one namespace does, reloads that it causes alone end
connections of others only when all old workers have some and, once its share is used up, not more
often than once in `MAX_PAUSE_S`. `to_record` and `restore` carry what is known over a restart of
the process, which HAProxy outlives."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from fairlead.model import ServiceKey

BURST = 10
"""The number of reloads that a namespace may cause one after the other. Later ones are spread over
time, because the changes of other namespaces wait during each reload."""
SHARE = 0.5
"""The fraction of old workers that may count for one namespace, of those that others leave; and the
fraction in which its connections count."""
MAX_WAIT_S = 60.0
"""The time between two reloads when the limit is reached by workers with connections of others; and
how long a namespace at most waits for the end of connections in old workers that count for it."""
MAX_PAUSE_S = 300.0
"""The time between two such reloads that one namespace causes."""


class OldWorker(NamedTuple):
    """An old worker. `reloads`: the number of reloads since its start. `connections`: the number
    of its open connections by namespace, without zeros."""

    pid: int
    reloads: int
    connections: Mapping[str, int]


class ReloadRecord(msgspec.Struct, frozen=True):
    """What the next process must know about reloads: the namespaces that caused those which made
    workers old, by process id; when each namespace has its whole burst again, and when the last
    reload took place, in seconds of the monotonic clock of the host."""

    causes: Mapping[int, tuple[str, ...]] = msgspec.field(default_factory=dict)
    paid_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    last_s: float = 0.0


class Reloads:
    """The reloads of one HAProxy. The driver updates them.

    - `limit`: the maximum number of old workers; 0: no limit.
    - `interval_s`: the time after which a namespace that has used up its burst may cause another
      reload."""

    def __init__(self, limit: int, interval_s: float) -> None:
        self._limit = limit
        self._interval_s = interval_s
        self._last_s = float("-inf")
        self._last_causes: frozenset[str] = frozenset()
        self._causes: dict[int, frozenset[str]] = {}
        """The namespaces that caused the reload which made a worker old, by process id. A worker
        for which they are not known counts as caused by others."""
        self._paid_s: dict[str, float] = {}
        """When each namespace has its whole burst again."""
        self._caused_s: dict[str, float] = {}
        """When each namespace last caused a reload, if this was within `MAX_PAUSE_S`."""
        self._full_s: dict[str, float] = {}
        """Since when each namespace has had no room for another old worker."""
        self._waits_s: dict[ServiceKey, float] = {}
        """When a change of each Service was last found to wait."""

    def record(self, worker: int, namespaces: Collection[str], now_s: float) -> None:
        """Record that changes of these namespaces have made this worker old."""
        self._last_s, self._last_causes = now_s, frozenset(namespaces)
        self._causes[worker] = self._last_causes
        self._paid_s = {each: paid_s for each, paid_s in self._paid_s.items() if paid_s > now_s}
        self._caused_s = {
            each: last_s for each, last_s in self._caused_s.items() if last_s > now_s - MAX_PAUSE_S
        } | dict.fromkeys(namespaces, now_s)
        self._full_s = {
            each: full_s
            for each, full_s in self._full_s.items()
            if each not in namespaces and full_s > now_s - 2 * MAX_WAIT_S
        }
        for namespace in namespaces:
            paid_s = self._paid_s.get(namespace, now_s)
            self._paid_s[namespace] = min(paid_s, now_s + self._burst_s) + self._interval_s

    def to_record(self) -> ReloadRecord:
        """Return what the next process must know."""
        causes = {pid: tuple(sorted(each)) for pid, each in self._causes.items()}
        return ReloadRecord(causes, dict(self._paid_s), max(self._last_s, 0.0))

    def restore(self, record: ReloadRecord, now_s: float) -> None:
        """Take over what an earlier process recorded. Times that cannot be right, because the host
        has been started since, count as little as possible against anybody."""
        self._causes = {pid: frozenset(each) for pid, each in record.causes.items()}
        latest_s = now_s + self._burst_s + self._interval_s
        self._paid_s = {key: at_s for key, at_s in record.paid_s.items() if at_s <= latest_s}
        self._last_s = record.last_s if record.last_s <= now_s else float("-inf")

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

    def waiting(self, now_s: float) -> set[ServiceKey]:
        """Return the Services whose changes wait."""
        return {each for each, last_s in self._waits_s.items() if last_s > now_s - MAX_WAIT_S}

    def end_waits(self, services: Collection[ServiceKey]) -> None:
        """Record that no change of these Services waits any more."""
        for each in services:
            self._waits_s.pop(each, None)

    def has_room(self, namespace: str, old: Sequence[OldWorker], now_s: float) -> bool:
        """Whether the namespace may cause another old worker: not before the time since the last
        reload that the old workers with connections of other namespaces require. One may always
        count for the namespace; and one more if this was asked in vain `MAX_WAIT_S` ago, and the
        namespace has caused no reload since, nor for the time that these workers require."""
        if not self._limit:
            return True
        at_stake, of_one = 0, Counter[str]()
        for worker in old:
            if holders := self._holders(worker) - {namespace}:
                at_stake += 1
                causes = self._causes.get(worker.pid, frozenset())
                of_one.update(
                    {name for names in (holders, causes) if len(names) == 1 for name in names}
                )
        pause_s = min(MAX_PAUSE_S * self._above_half(at_stake), MAX_WAIT_S)
        caused_s = self._caused_s.get(namespace, float("-inf"))
        if now_s - caused_s < MAX_PAUSE_S:
            without_one = at_stake - max(of_one.values(), default=0)
            pause_s = max(pause_s, MAX_PAUSE_S * self._above_half(without_one))
        if self._has_share(namespace, old):
            self._full_s.pop(namespace, None)
            return now_s - self._last_s >= pause_s
        full_s = self._full_s.setdefault(namespace, now_s)
        return (
            now_s - self._last_s >= pause_s
            and now_s - full_s >= MAX_WAIT_S
            and now_s - caused_s >= MAX_PAUSE_S * self._above_half(at_stake)
        )

    def _above_half(self, workers: int) -> float:
        """Return 0 if these are half of the old workers that there may be, or fewer; 1 if all."""
        return min(max(0.0, 2 * workers / self._limit - 1), 1.0)

    def _has_share(self, namespace: str, old: Sequence[OldWorker]) -> bool:
        counted = self.others_in(old)
        own = sum(namespace in self._causes.get(pid, ()) for pid in counted)
        others = len(counted) - own
        return own < max(1, int(SHARE * (self._limit - others)))

    def surplus(self, old: Sequence[OldWorker]) -> list[OldWorker]:
        """Return the workers to end: free workers first, then those with connections only of the
        namespaces that caused the last reload, then those with connections only of namespaces that
        have some in too many workers; of equal ones the oldest."""
        if not self._limit:
            return []
        others = self.others_in(old)

        def rank(worker: OldWorker) -> tuple[bool, bool, bool, int]:
            holders = self._holders(worker)
            paying = holders <= self._last_causes
            return bool(holders), not paying, worker.pid in others, -worker.reloads

        return sorted(old, key=rank)[: max(0, len(old) - self._limit)]

    def _holders(self, worker: OldWorker) -> set[str]:
        """Return the namespaces with connections in the worker, except one that alone caused it."""
        sole = self._causes.get(worker.pid, frozenset())
        return worker.connections.keys() - (sole if len(sole) == 1 else frozenset())

    def others_in(self, old: Sequence[OldWorker]) -> Counter[int]:
        """Return the number of connections of others in each worker, without zeros: those that are
        not of the namespace which alone caused it. If several caused it together, all are: a single
        change of a namespace must not put its connections at the mercy of another one's changes.

        Connections of a namespace count in its share of the workers only, which is a fraction of
        those that namespaces with connections in fewer workers leave: in those with most of them,
        of equal ones in the newest."""
        held: dict[str, list[OldWorker]] = {}
        for worker in old:
            for namespace in self._holders(worker):
                held.setdefault(namespace, []).append(worker)
        found: Counter[int] = Counter()
        for namespace, workers in sorted(held.items(), key=lambda each: (len(each[1]), each[0])):
            workers.sort(key=lambda each: (-each.connections[namespace], each.reloads))
            for worker in workers[: max(1, int(SHARE * (self._limit - len(found))))]:
                found[worker.pid] += worker.connections[namespace]
        return found

    @property
    def _burst_s(self) -> float:
        return (BURST - 1) * self._interval_s
