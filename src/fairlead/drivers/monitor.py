"""Probe the health ports of the members, so that a gateway knows of a dead node long before
Kubernetes does.

In: what to begin to ask and what to end. Out: `observe(address, port, verdict, services, routed)`
at each change of a verdict, and when another Service uses a port whose verdict is known; None when
a port is no longer asked. All members are probed, whatever their state, so that they can come back.
Invariants: one probe in flight per node address, not per Service; a node that falls silent is known
to be down after two time-outs (0.3 s) and at most one interval. A failure of our own is not held
against a node. It runs in a process of its own (`roles/probing`), of which a gateway's loop sees
the driver in front of it (`prober`). One task looks after all nodes, a few hundred times a second,
and connections are kept: a thousand nodes, each asked ten times a second, have to cost a small part
of a core. New targets are asked at a limited rate, for the same reason. Reads kube-proxy's health
ports: KEP-3836 for policy Cluster, the healthCheckNodePort for policy Local."""

import asyncio
import heapq
import resource
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import count
from types import MappingProxyType

import structlog

from fairlead.drivers.health_targets import Probes, StartProbes, StopProbes, after
from fairlead.drivers.liveness import IN_TURN, NodeLiveness, Target
from fairlead.errors import Unavailable
from fairlead.model import ServiceKey, Verdict
from fairlead.net.httpanswer import SILENT, Answer
from fairlead.net.httpprobe import ProbeConnection

log = structlog.get_logger()

Observe = Callable[[str, int, Verdict | None, Collection[ServiceKey], bool], None]
"""(address, port, verdict, the Services for which it is asked, whether probes follow the host's
routes)."""


TICK_S = 0.005
"""Nodes are looked after so often: many at a time, which costs less than each at its own moment."""
AT_ONCE = 20
"""Nodes in one step, which others of this process wait for."""
CONNECTS_PER_TICK = 10
"""New connections: 2,000 a second. A start with 100,000 targets would otherwise do nothing else."""
RENEW = 100
"""After so many questions a connection is made anew: that the machine still takes new ones has to
be proved too."""


TOGETHER_S = 0.3
"""The first verdicts for a Service that is new are told together, once all its nodes have been
asked, or after so long. Told one by one they would make each gateway go through other members,
until all have the same."""


Place = tuple[str, bool]
"""A node's address, and whether probes follow the host's routes: a node may answer on one path and
not on the other."""


class NodeProbes:
    """One node address under probe, on one path. `due_s`: when to ask it; None: not before it has
    answered, or something has changed. `asked`: the target that is being asked. `asked_s`: when the
    last target was asked."""

    def __init__(self, place: Place, interval_s: float) -> None:
        self.place = place
        self.liveness = NodeLiveness(interval_s)
        self.due_s: float | None = None
        self.asked: Target | None = None
        self.asked_s = float("-inf")
        self.lines: dict[int, ProbeConnection] = {}
        """By port; the one that was used last comes last."""
        self.questions = 0


class Monitor:
    """Asks, once `run` runs."""

    def __init__(
        self, observe: Observe, *, interval_s: float = 0.1, timeout_s: float = 0.15, mark: int = 0
    ) -> None:
        """`mark`: SO_MARK of the sockets of probes that take the path of forwarded packets."""
        self._observe = observe
        self._mark = mark
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._nodes: dict[Place, NodeProbes] = {}
        self._wanted: dict[ServiceKey, Probes] = {}
        self._askers: dict[Target, ServiceKey | set[ServiceKey]] = {}
        """For whom each is asked; mostly it is one Service alone, and there are a hundred
        thousand."""
        self._running = False
        self._agenda: list[tuple[float, int, NodeProbes]] = []
        self._asked: deque[tuple[float, NodeProbes]] = deque()
        """Who was asked, in the order of time, and when."""
        self._order = count()
        self._some = asyncio.Event()
        self._connects = 0
        self.sent = 0
        """Questions that were asked."""
        self._awaited: dict[ServiceKey, int] = {}
        """Services that are new, and of how many of their targets nothing is known yet."""
        self._held: dict[Target, Verdict] = {}
        self._warned: set[Target] = set()
        """Of which something else than `up` was logged."""
        self._unproved: set[Target] = set()
        self._all_proved = asyncio.Event()
        self._all_proved.set()

    @property
    def wanted(self) -> Mapping[ServiceKey, Probes]:
        """What is asked for each Service."""
        return MappingProxyType(self._wanted)

    @property
    def verdicts(self) -> Mapping[Target, Verdict | None]:
        """All targets and what is known of them now; None: nothing yet."""
        return MappingProxyType(
            {
                target: self._nodes[_place(target)].liveness.verdict(target)
                for target in self._askers
            }
        )

    @property
    def targets(self) -> int:
        """How many are asked."""
        return len(self._askers)

    def change(self, starts: Sequence[StartProbes], stops: Sequence[StopProbes]) -> None:
        """Begin these, then end those."""
        if new := [each.service for each in starts if each.service not in self._wanted]:
            self._awaited.update(dict.fromkeys(new, 0))
            asyncio.get_running_loop().call_later(TOGETHER_S, self._release, new)
        touched: set[NodeProbes] = set()
        for start in starts:
            self._start(start, touched)
        for stop in stops:
            self._stop(stop, touched)
        for node in touched:
            self._change(node)

    @property
    def all_proved(self) -> bool:
        """Whether something is known of every target. When that comes to be so, something is
        observed."""
        return self._all_proved.is_set()

    async def settled(self) -> None:
        """Wait until something is known of every target; the caller sets the deadline."""
        await self._all_proved.wait()

    async def run(self) -> None:
        """Probe until cancelled."""
        _allow_descriptors()
        self._running = True
        try:
            for node in self._nodes.values():
                self._look_at(node, 0.0)
            while True:
                self._connects = CONNECTS_PER_TICK
                while self._tick(asyncio.get_running_loop().time()):
                    await asyncio.sleep(0)
                await self._pause()
        finally:
            self._running = False
            for node in self._nodes.values():
                for line in node.lines.values():
                    line.close()
                node.lines, node.asked, node.due_s = {}, None, None
            self._agenda.clear()
            self._asked.clear()

    async def _pause(self) -> None:
        if self._agenda or self._asked:
            await asyncio.sleep(TICK_S)
            return
        self._some.clear()
        await self._some.wait()

    def _tick(self, now_s: float) -> bool:
        """Look after some of the nodes that are due; whether there are more."""
        for _ in range(AT_ONCE):
            if (late := self._overdue(now_s)) is not None:
                self._give_up(*late, now_s)
                self._go_on(late[0], now_s)
                continue
            if not self._agenda or self._agenda[0][0] > now_s:
                return False
            due_s, _, node = heapq.heappop(self._agenda)
            if node.due_s != due_s:
                continue  # it is in the agenda again, for another time
            node.due_s = None
            self._go_on(node, now_s)
        return True

    def _overdue(self, now_s: float) -> tuple[NodeProbes, Target] | None:
        """One that has not answered in time, and what it was asked. All have as long: who was asked
        first is the first."""
        while self._asked and self._asked[0][0] <= now_s - self._timeout_s:
            asked_s, node = self._asked.popleft()
            if node.asked is not None and node.asked_s == asked_s:
                return node, node.asked
        return None

    def _look_at(self, node: NodeProbes, due_s: float) -> None:
        node.due_s = due_s
        heapq.heappush(self._agenda, (due_s, next(self._order), node))
        self._some.set()

    def _go_on(self, node: NodeProbes, now_s: float) -> None:
        """Ask what is due, or note when something will be."""
        turn = node.liveness.next(node.asked_s)
        if turn is None:
            self._forget(node)
            return
        due_s, target = turn
        if due_s <= now_s and target.port not in node.lines:
            if not self._connects:
                # Others come first; that the machine lives is asked where a connection is there
                # already.
                due_s, target = node.liveness.again(node.asked_s) or turn
                due_s = due_s if target.port in node.lines else now_s + self._interval_s
            else:
                self._connects -= 1
        if due_s > now_s:
            self._look_at(node, due_s)
        else:
            self._ask(node, target, now_s)

    def _start(self, change: StartProbes, touched: set[NodeProbes]) -> None:
        service, before = change.service, self._wanted.get(change.service)
        held = frozenset(before.targets) if before else frozenset[Target]()
        self._wanted[service] = after(before, change)
        unknown = 0
        for target in change.targets:
            askers, local = self._askers.get(target), change.local
            node = self._nodes.get(_place(target))
            if node is None:
                node = self._nodes[_place(target)] = NodeProbes(_place(target), self._interval_s)
            if askers is None:
                self._askers[target] = service
                self._unproved.add(target)
            elif askers != service:
                if isinstance(askers, ServiceKey):
                    askers = self._askers[target] = {askers}
                askers.add(service)
                local = local or node.liveness.is_local(target)
            unknown += target in self._unproved and target not in held
            node.liveness.add(target, local=local)
            touched.add(node)
            verdict = node.liveness.verdict(target)
            if verdict is None or target in held:
                continue
            if target not in self._held:
                # It may have changed since the Service was planned, when it was told to others
                # only.
                self._show(target, verdict, (service,))
            elif service not in self._awaited:
                # Those for whom it is held may not want it any more when their time comes.
                self._show(target, self._held.pop(target), self._services(target))
        if self._unproved:
            self._all_proved.clear()
        if service in self._awaited:
            self._awaited[service] += unknown

    def _show(
        self, target: Target, verdict: Verdict | None, services: Collection[ServiceKey]
    ) -> None:
        self._observe(target.address, target.port, verdict, services, target.routed)

    def _services(self, target: Target) -> Set[ServiceKey]:
        """For whom it is asked."""
        askers = self._askers.get(target, frozenset[ServiceKey]())
        return {askers} if isinstance(askers, ServiceKey) else askers

    def _change(self, node: NodeProbes) -> None:
        """There is something new to ask, or something not to ask any more."""
        if self._running and node.asked is None and node.due_s != 0.0:
            self._look_at(node, 0.0)

    def _stop(self, change: StopProbes, touched: set[NodeProbes]) -> None:
        service, before = change.service, self._wanted.pop(change.service, None)
        held = frozenset(before.targets) if before else frozenset[Target]()
        left = after(before, change)
        if left.targets:
            self._wanted[service] = left
        for target in held.intersection(change.targets):
            if service in self._awaited:
                self._awaited[service] -= target in self._unproved
            askers = self._askers[target]
            if isinstance(askers, set):
                askers.discard(service)
                if askers:
                    continue
            del self._askers[target]
            self._held.pop(target, None)
            self._warned.discard(target)
            node = self._nodes[_place(target)]
            node.liveness.remove(target)
            touched.add(node)
            self._proved(target)
            self._show(target, None, ())
        if self._awaited.get(service, 1) <= 0:
            self._release((service,))

    def _proved(self, target: Target) -> None:
        """Something is known of it now, or nobody wants to know it any more."""
        if target not in self._unproved:
            return
        self._unproved.discard(target)
        if not self._unproved:
            self._all_proved.set()
        for service in self._services(target) & self._awaited.keys():
            self._awaited[service] -= 1
            if self._awaited[service] <= 0:
                self._release((service,))

    def _release(self, services: Iterable[ServiceKey]) -> None:
        """Tell what is known of their targets."""
        for service in services:
            probes = self._wanted.get(service)
            if self._awaited.pop(service, None) is None or probes is None:
                continue
            for target in probes.targets:
                if target in self._held:
                    self._show(target, self._held.pop(target), self._services(target))

    def _forget(self, node: NodeProbes) -> None:
        for line in node.lines.values():
            line.close()
        del self._nodes[node.place]

    def _ask(self, node: NodeProbes, target: Target, now_s: float) -> None:
        node.asked, node.asked_s = target, now_s
        node.liveness.asking(target)
        line = node.lines.pop(target.port, None)
        node.questions += 1
        if line is None or node.questions % RENEW == 0:
            if line is not None:
                line.close()
            mark = 0 if target.routed else self._mark
            line = ProbeConnection(
                asyncio.get_running_loop(),
                target.address,
                target.port,
                partial(self._answered, node),
                mark,
            )
        node.lines[target.port] = line
        if len(node.lines) > IN_TURN:
            node.lines.pop(next(iter(node.lines))).close()
        self._asked.append((now_s, node))
        self.sent += 1
        line.request(target.path)

    def _answered(self, node: NodeProbes, answer: Answer | Unavailable) -> None:
        target, node.asked = node.asked, None
        if target is None:
            return
        now_s = asyncio.get_running_loop().time()
        if not node.lines[target.port].open:
            del node.lines[target.port]
        if isinstance(answer, Unavailable):
            log.warning("probe not sent", target=str(target), problem=str(answer))
            self._tell(node.liveness.could_not_ask(target, now_s))
        else:
            if changes := node.liveness.judge(target, answer, now_s):
                self._tell(changes)
        turn = node.liveness.next(node.asked_s)
        self._look_at(node, turn[0] if turn else now_s)

    def _give_up(self, node: NodeProbes, target: Target, now_s: float) -> None:
        """Nothing has come in time. The next question goes over a new connection, as this one's may
        be stuck."""
        node.asked = None
        node.lines.pop(target.port).close()
        late_s = now_s - node.asked_s - self._timeout_s
        if late_s > 0.5 * self._timeout_s:
            # We were late ourselves (a busy loop): the answer may have lain there all the while.
            log.warning("probe disregarded", target=str(target), late_s=round(late_s, 3))
            return
        self._tell(node.liveness.judge(target, SILENT, now_s))

    def _tell(self, changes: Iterable[tuple[Target, Verdict]]) -> None:
        for target, verdict in changes:
            if (
                verdict != "up" or target in self._warned
            ):  # that all is well at first is no news, said a hundred thousand times
                log.info("probed", target=str(target), verdict=verdict)
            (self._warned.discard if verdict == "up" else self._warned.add)(target)
            askers = self._services(target)
            if askers <= self._awaited.keys():
                self._held[target] = verdict
            else:
                self._show(target, verdict, askers)
            self._proved(target)


def _place(target: Target) -> Place:
    return target.address, target.routed


def _allow_descriptors() -> None:
    """Each node under probe takes up to `IN_TURN` of them; the usual limit is of times when
    select(2) could not take more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
