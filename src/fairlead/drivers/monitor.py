"""Probes the health ports of the members, so that a gateway notices a dead node long before
Kubernetes does.

In: the probes to start and to stop. Out: calls of `observe(address, port, verdict, services,
routed)` at each change of a verdict, and when another Service uses a port that has a verdict. The
verdict is None when the port is no longer probed. All members are probed in every state, so that
they can come back. kube-proxy's health ports are probed: the port of KEP-3836 for policy Cluster,
the healthCheckNodePort for policy Local.

Invariants: there is one probe in flight per node address, not per Service. A node that falls silent
is `down` after two time-outs (0.3 s) plus at most one interval. A failure on our own side does not
count against a node.

The monitor runs in its own process (`roles/prober_process`); the driver in the gateway's loop is
`prober`. A thousand nodes, each probed ten times a second, must cost a small part of a CPU core,
and a few nodes next to nothing. Therefore one task with one timer serves all nodes: nodes that are
due at nearly the same time are probed together, and then stay together. Connections are kept open,
and new targets are probed at a limited rate."""

import asyncio
import heapq
import math
import resource
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import count
from types import MappingProxyType

import structlog

from fairlead.drivers.health_targets import Probes, StartProbes, StopProbes, after
from fairlead.drivers.liveness import MAX_IN_TURN, NodeLiveness, Target
from fairlead.errors import Unavailable
from fairlead.model import ServiceKey, Verdict
from fairlead.net.httpanswer import SILENT, Answer
from fairlead.net.httpprobe import ProbeConnection

log = structlog.get_logger()

Observe = Callable[[str, int, Verdict | None, Collection[ServiceKey], bool], None]
"""(address, port, verdict, the Services that use the port, whether the probes follow the host's
routes)."""


TICK_S = 0.005
"""The shortest interval at which due nodes are served. Serving many nodes at once costs less than a
timer for each. The first nodes of a tick may be probed this much early, so that a few nodes need no
more ticks than one node."""
NODES_PER_STEP = 20
"""Maximum number of nodes in one step, for which other tasks of this process wait. Also the maximum
number of nodes that are probed early, because a thousand nodes must not be probed at once."""
CONNECTS_PER_TICK = 10
"""Maximum number of new connections per tick: 2,000 a second. Otherwise a start with 100,000
targets would leave time for nothing else."""
PROBES_PER_CONNECTION = 100
"""A connection is replaced after this number of probes to its node, because the probes must also
show that the node accepts new connections."""


FIRST_VERDICTS_S = 0.3
"""The first verdicts for a new Service are delivered together, when all its targets have one, or
after this time. Delivered one by one, they would take each gateway through a different sequence of
members until all gateways have the same."""


NodePath = tuple[str, bool]
"""The address of a node, and whether its probes follow the host's routes. A node may answer on one
path and not on the other."""


class NodeProbes:
    """One probed node address, on one path.

    - `due_s`: when to probe it; None while an answer is outstanding or there is nothing to probe.
    - `outstanding`: the target of the outstanding probe.
    - `sent_s`: when the last probe was sent."""

    def __init__(self, path: NodePath, interval_s: float) -> None:
        self.path = path
        self.liveness = NodeLiveness(interval_s)
        self.due_s: float | None = None
        self.outstanding: Target | None = None
        self.sent_s = float("-inf")
        self.connections: dict[int, ProbeConnection] = {}
        """The open connections by port; the one used last comes last."""
        self.probes_sent = 0


class Monitor:
    """All probed nodes. Probes are sent while `run` runs."""

    def __init__(
        self, observe: Observe, *, interval_s: float = 0.1, timeout_s: float = 0.15, mark: int = 0
    ) -> None:
        """`mark` is the SO_MARK of probes that take the path of forwarded packets."""
        self._observe = observe
        self._mark = mark
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._nodes: dict[NodePath, NodeProbes] = {}
        self._wanted: dict[ServiceKey, Probes] = {}
        self._users: dict[Target, ServiceKey | set[ServiceKey]] = {}
        """The Services that use each target. Mostly it is one Service, which is then stored without
        a set: there may be a hundred thousand targets."""
        self._running = False
        self._agenda: list[tuple[float, int, NodeProbes]] = []
        """A heap of (due time, insertion number, node). A node that was rescheduled leaves outdated
        entries behind, which `_tick` skips. The insertion number makes equal times comparable."""
        self._outstanding: deque[tuple[float, NodeProbes]] = deque()
        """Sent probes in the order of their times: the time, and the node."""
        self._order = count()
        self._waiting: asyncio.Future[None] | None = None
        """Set while `run` waits for the next tick."""
        self._timer: asyncio.TimerHandle | None = None
        self._earliest_s = self._next_tick_s = math.inf
        """When the next tick may begin, and when it will."""
        self._connects = 0
        """The number of connections that may still be opened in this tick."""
        self.sent = 0
        """Total number of probes sent."""
        self._awaited: dict[ServiceKey, int] = {}
        """New Services, with the number of their targets that have no verdict yet."""
        self._withheld: dict[Target, Verdict] = {}
        """Verdicts that are withheld because only Services in `_awaited` use their targets."""
        self._logged_not_up: set[Target] = set()
        """Targets whose last logged verdict is not `up`."""
        self._undecided: set[Target] = set()
        """Targets without a verdict."""
        self._all_decided = asyncio.Event()
        self._all_decided.set()

    @property
    def wanted(self) -> Mapping[ServiceKey, Probes]:
        """The targets of each Service."""
        return MappingProxyType(self._wanted)

    @property
    def verdicts(self) -> Mapping[Target, Verdict | None]:
        """All targets with their verdicts; None for a target that has none yet."""
        return MappingProxyType(
            {
                target: self._nodes[_path_of(target)].liveness.verdict(target)
                for target in self._users
            }
        )

    @property
    def targets(self) -> int:
        """The number of targets."""
        return len(self._users)

    def change(self, starts: Sequence[StartProbes], stops: Sequence[StopProbes]) -> None:
        """Start probing the targets in `starts`, then stop probing the targets in `stops`."""
        if new := [each.service for each in starts if each.service not in self._wanted]:
            self._awaited.update(dict.fromkeys(new, 0))
            asyncio.get_running_loop().call_later(FIRST_VERDICTS_S, self._release, new)
        touched: set[NodeProbes] = set()
        for start in starts:
            self._start(start, touched)
        for stop in stops:
            self._stop(stop, touched)
        for node in touched:
            self._targets_changed(node)

    @property
    def all_decided(self) -> bool:
        """Whether every target has a verdict. The change to True comes together with a call of
        `observe`."""
        return self._all_decided.is_set()

    async def settled(self) -> None:
        """Wait until every target has a verdict. The caller sets the deadline."""
        await self._all_decided.wait()

    async def run(self) -> None:
        """Probe until cancelled."""
        _allow_descriptors()
        self._running = True
        try:
            for node in self._nodes.values():
                self._schedule(node, 0.0)
            while True:
                self._connects, early_s = CONNECTS_PER_TICK, TICK_S
                while self._tick(asyncio.get_running_loop().time(), early_s):
                    early_s = 0.0
                    await asyncio.sleep(0)
                await self._pause()
        finally:
            self._running = False
            for node in self._nodes.values():
                for connection in node.connections.values():
                    connection.close()
                node.connections, node.outstanding, node.due_s = {}, None, None
            self._agenda.clear()
            self._outstanding.clear()

    async def _pause(self) -> None:
        """Wait for TICK_S, and then until a node is due or a probe times out."""
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        self._earliest_s, self._next_tick_s = loop.time() + TICK_S, math.inf
        self._tick_by(min(self._next_due_s(), self._next_time_out_s()))
        try:
            await self._waiting
        finally:
            self._waiting = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _tick_by(self, due_s: float) -> None:
        """Begin the next tick at this time, or as soon as it may begin, unless it begins earlier
        anyway."""
        at_s = max(due_s, self._earliest_s)
        if self._waiting is None or at_s >= self._next_tick_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._next_tick_s = at_s
        self._timer = asyncio.get_running_loop().call_at(at_s, self._end_pause)

    def _end_pause(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _next_due_s(self) -> float:
        """Return when the next node is due; infinity if none is."""
        while self._agenda and self._agenda[0][2].due_s != self._agenda[0][0]:
            heapq.heappop(self._agenda)  # outdated: the node is there again, at another time
        return self._agenda[0][0] if self._agenda else math.inf

    def _next_time_out_s(self) -> float:
        """Return when the oldest probe without an answer times out; infinity if there is none. All
        probes have the same time-out, so the oldest one expires first."""
        while self._outstanding:
            sent_s, node = self._outstanding[0]
            if node.outstanding is not None and node.sent_s == sent_s:
                return sent_s + self._timeout_s
            self._outstanding.popleft()
        return math.inf

    def _tick(self, now_s: float, early_s: float) -> bool:
        """Serve up to NODES_PER_STEP nodes that are due within `early_s` or whose probe timed out.
        Return whether there may be more."""
        for _ in range(NODES_PER_STEP):
            if self._next_time_out_s() <= now_s:
                _, node = self._outstanding.popleft()
                self._time_out(node, now_s)
            elif self._next_due_s() <= now_s + early_s:
                _, _, node = heapq.heappop(self._agenda)
                node.due_s = None
            else:
                return False
            self._serve(node, now_s, early_s)
        return True

    def _schedule(self, node: NodeProbes, due_s: float) -> None:
        node.due_s = due_s
        heapq.heappush(self._agenda, (due_s, next(self._order), node))
        self._tick_by(due_s)

    def _serve(self, node: NodeProbes, now_s: float, early_s: float) -> None:
        """Probe the target that is due within `early_s`, or put the node into the agenda for the
        time at which one is due."""
        next_probe = node.liveness.next(node.sent_s)
        if next_probe is None:
            self._forget(node)
            return
        due_s, target = next_probe
        if due_s <= now_s + early_s and target.port not in node.connections:
            if not self._connects:
                # No new connection is allowed in this tick. Until the target's turn, probe
                # over the connection that is open, to see whether the machine is alive.
                due_s, target = node.liveness.repeat(node.sent_s) or next_probe
                due_s = due_s if target.port in node.connections else now_s + self._interval_s
            else:
                self._connects -= 1
        if due_s > now_s + early_s:
            self._schedule(node, due_s)
        else:
            self._probe(node, target, now_s)

    def _start(self, change: StartProbes, touched: set[NodeProbes]) -> None:
        service, before = change.service, self._wanted.get(change.service)
        held = frozenset(before.targets) if before else frozenset[Target]()
        self._wanted[service] = after(before, change)
        unknown = 0
        for target in change.targets:
            users, local = self._users.get(target), change.local
            node = self._nodes.get(_path_of(target))
            if node is None:
                node = self._nodes[_path_of(target)] = NodeProbes(
                    _path_of(target), self._interval_s
                )
            if users is None:
                self._users[target] = service
                self._undecided.add(target)
            elif users != service:
                if isinstance(users, ServiceKey):
                    users = self._users[target] = {users}
                users.add(service)
                local = local or node.liveness.is_local(target)
            unknown += target in self._undecided and target not in held
            node.liveness.add(target, local=local)
            touched.add(node)
            verdict = node.liveness.verdict(target)
            if verdict is None or target in held:
                continue
            if target not in self._withheld:
                # The verdict may have changed after the Service was planned, and then only the
                # other Services of the target were reported.
                self._observe_target(target, verdict, (service,))
            elif service not in self._awaited:
                # Report it now: the Services for which it is withheld may no longer use the target
                # when their verdicts are released.
                self._observe_target(target, self._withheld.pop(target), self._services(target))
        if self._undecided:
            self._all_decided.clear()
        if service in self._awaited:
            self._awaited[service] += unknown

    def _observe_target(
        self, target: Target, verdict: Verdict | None, services: Collection[ServiceKey]
    ) -> None:
        self._observe(target.address, target.port, verdict, services, target.routed)

    def _services(self, target: Target) -> Set[ServiceKey]:
        """Return the Services that use the target."""
        users = self._users.get(target, frozenset[ServiceKey]())
        return {users} if isinstance(users, ServiceKey) else users

    def _targets_changed(self, node: NodeProbes) -> None:
        """Serve the node in the next tick, because its targets have changed."""
        if self._running and node.outstanding is None and node.due_s != 0.0:
            self._schedule(node, 0.0)

    def _stop(self, change: StopProbes, touched: set[NodeProbes]) -> None:
        service, before = change.service, self._wanted.pop(change.service, None)
        held = frozenset(before.targets) if before else frozenset[Target]()
        left = after(before, change)
        if left.targets:
            self._wanted[service] = left
        for target in held.intersection(change.targets):
            if service in self._awaited:
                self._awaited[service] -= target in self._undecided
            users = self._users[target]
            if isinstance(users, set):
                users.discard(service)
                if users:
                    continue
            del self._users[target]
            self._withheld.pop(target, None)
            self._logged_not_up.discard(target)
            node = self._nodes[_path_of(target)]
            node.liveness.remove(target)
            touched.add(node)
            self._decided(target)
            self._observe_target(target, None, ())
        if self._awaited.get(service, 1) <= 0:
            self._release((service,))

    def _decided(self, target: Target) -> None:
        """Record that the target has a verdict, or is no longer probed."""
        if target not in self._undecided:
            return
        self._undecided.discard(target)
        if not self._undecided:
            self._all_decided.set()
        for service in self._services(target) & self._awaited.keys():
            self._awaited[service] -= 1
            if self._awaited[service] <= 0:
                self._release((service,))

    def _release(self, services: Iterable[ServiceKey]) -> None:
        """Report the withheld verdicts on the targets of these Services."""
        for service in services:
            probes = self._wanted.get(service)
            if self._awaited.pop(service, None) is None or probes is None:
                continue
            for target in probes.targets:
                if target in self._withheld:
                    self._observe_target(target, self._withheld.pop(target), self._services(target))

    def _forget(self, node: NodeProbes) -> None:
        for connection in node.connections.values():
            connection.close()
        del self._nodes[node.path]

    def _probe(self, node: NodeProbes, target: Target, now_s: float) -> None:
        node.outstanding, node.sent_s = target, now_s
        node.liveness.probe_started(target)
        # The connection is inserted again below, as the one used last.
        connection = node.connections.pop(target.port, None)
        node.probes_sent += 1
        if connection is None or node.probes_sent % PROBES_PER_CONNECTION == 0:
            if connection is not None:
                connection.close()
            mark = 0 if target.routed else self._mark
            connection = ProbeConnection(
                asyncio.get_running_loop(),
                target.address,
                target.port,
                partial(self._on_answer, node),
                mark,
            )
        node.connections[target.port] = connection
        if len(node.connections) > MAX_IN_TURN:
            node.connections.pop(next(iter(node.connections))).close()
        self._outstanding.append((now_s, node))
        self.sent += 1
        connection.send_request(target.path)

    def _on_answer(self, node: NodeProbes, answer: Answer | Unavailable) -> None:
        target, node.outstanding = node.outstanding, None
        if target is None:
            return
        now_s = asyncio.get_running_loop().time()
        if not node.connections[target.port].open:
            del node.connections[target.port]
        if isinstance(answer, Unavailable):
            log.warning("probe not sent", target=str(target), problem=str(answer))
            self._report(node.liveness.probe_not_sent(target, now_s))
        else:
            if changes := node.liveness.evaluate(target, answer, now_s):
                self._report(changes)
        next_probe = node.liveness.next(node.sent_s)
        self._schedule(node, next_probe[0] if next_probe else now_s)

    def _time_out(self, node: NodeProbes, now_s: float) -> None:
        """Record that a probe timed out. The next one uses a new connection, because this one may
        be stuck."""
        target, node.outstanding = node.outstanding, None
        assert target is not None
        node.connections.pop(target.port).close()
        late_s = now_s - node.sent_s - self._timeout_s
        if late_s > 0.5 * self._timeout_s:
            # This process was late itself (a busy event loop), so the answer may have arrived in
            # time and not have been read yet.
            log.warning("probe disregarded", target=str(target), late_s=round(late_s, 3))
            return
        self._report(node.liveness.evaluate(target, SILENT, now_s))

    def _report(self, changes: Iterable[tuple[Target, Verdict]]) -> None:
        for target, verdict in changes:
            # A first verdict `up` is not logged: there may be a hundred thousand of them.
            if verdict != "up" or target in self._logged_not_up:
                log.info("probed", target=str(target), verdict=verdict)
            (self._logged_not_up.discard if verdict == "up" else self._logged_not_up.add)(target)
            users = self._services(target)
            if users <= self._awaited.keys():
                self._withheld[target] = verdict
            else:
                self._observe_target(target, verdict, users)
            self._decided(target)


def _path_of(target: Target) -> NodePath:
    return target.address, target.routed


def _allow_descriptors() -> None:
    """Raise the limit of file descriptors to the hard limit. Each probed node takes up to
    `MAX_IN_TURN` of them. The default soft limit of 1,024 exists for the sake of select(2), which
    is not used here."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
