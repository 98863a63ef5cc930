"""Probes the health ports of the members, so that a gateway notices a dead node long before
Kubernetes does.

In: the probes to start and to stop. Out: calls of `observe(address, port, verdict, services,
routed)` at each change of a verdict, and when another Service uses a port that has a verdict. The
verdict is None when the port is no longer probed. All members are probed in every state, so that
they can come back. kube-proxy's health ports are probed: the port of KEP-3836 for policy Cluster,
the healthCheckNodePort for policy Local.

Invariants: there is one probe in flight per node address, not per Service. A probe that is not
answered soon starts a check of the machine (`silence_check`), so a machine that falls silent is
`down` 0.12 s after the first probe that it does not answer; without a check, after two time-outs
(0.3 s). A failure on our own side does not count against a node.

The monitor runs in its own process (`roles/prober_process`); the driver in the gateway's loop is
`prober`. A thousand nodes, each probed ten times a second, must cost a small part of a CPU core.
Therefore one task serves all nodes, a few hundred times a second, connections are kept open, and
new targets are probed at a limited rate."""

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
from fairlead.drivers.liveness import MAX_IN_TURN, NodeLiveness, Target
from fairlead.drivers.silence import HANDSHAKES_AFTER, Silence
from fairlead.drivers.silence_check import SilenceCheck
from fairlead.errors import Unavailable
from fairlead.model import ServiceKey, Verdict
from fairlead.net.httpanswer import SILENT, Answer
from fairlead.net.httpprobe import ProbeConnection

log = structlog.get_logger()

Observe = Callable[[str, int, Verdict | None, Collection[ServiceKey], bool], None]
"""(address, port, verdict, the Services that use the port, whether the probes follow the host's
routes)."""


TICK_S = 0.005
"""Interval at which due nodes are served. Serving many nodes at once costs less than a timer for
each."""
NODES_PER_STEP = 20
"""Maximum number of nodes in one step, for which other tasks of this process wait."""
CONNECTS_PER_TICK = 10
"""Maximum number of new connections per tick: 2,000 a second. Otherwise a start with 100,000
targets would leave time for nothing else."""
PROBES_PER_CONNECTION = 100
"""A connection is replaced after this number of probes to its node, because the probes must also
show that the node accepts new connections."""
MAX_CHECKS = 50
"""Maximum number of nodes that are checked at the same time. If more are silent, this host is
probably cut off, and the time-outs of probes decide."""


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
        self._recent: deque[tuple[float, NodeProbes]] = deque()
        """Probes that were just sent, in the order of their times: the time, and the node."""
        self._outstanding: deque[tuple[float, NodeProbes]] = deque()
        """Earlier probes that had no answer when a check of their machine was due."""
        self._checks: dict[NodeProbes, SilenceCheck] = {}
        self._order = count()
        self._work_available = asyncio.Event()
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
                self._connects = CONNECTS_PER_TICK
                self._step_checks(asyncio.get_running_loop().time())
                while self._tick(asyncio.get_running_loop().time()):
                    await asyncio.sleep(0)
                await self._pause()
        finally:
            self._running = False
            for node in self._nodes.values():
                for connection in node.connections.values():
                    connection.close()
                node.connections, node.outstanding, node.due_s = {}, None, None
                self._end_check(node)
            self._agenda.clear()
            self._recent.clear()
            self._outstanding.clear()

    async def _pause(self) -> None:
        if self._agenda or self._recent or self._outstanding:
            await asyncio.sleep(TICK_S)
            return
        self._work_available.clear()
        await self._work_available.wait()

    def _tick(self, now_s: float) -> bool:
        """Serve up to NODES_PER_STEP nodes that are due or whose probe timed out. Return whether
        there may be more."""
        for _ in range(NODES_PER_STEP):
            if (late := self._overdue(now_s)) is not None:
                self._time_out(*late, now_s)
                self._serve(late[0], now_s)
                continue
            if not self._agenda or self._agenda[0][0] > now_s:
                return False
            due_s, _, node = heapq.heappop(self._agenda)
            if node.due_s != due_s:
                continue  # outdated entry: the node is in the agenda again, at another time
            node.due_s = None
            self._serve(node, now_s)
        return True

    def _overdue(self, now_s: float) -> tuple[NodeProbes, Target] | None:
        """Return a node whose probe timed out, and the target; None if there is none. All probes
        have the same time-out, so the oldest one expires first."""
        check_s = now_s - HANDSHAKES_AFTER[0] * self._timeout_s
        while self._recent and self._recent[0][0] <= check_s:
            sent_s, node = self._recent.popleft()
            if node.outstanding is not None and node.sent_s == sent_s:
                self._outstanding.append((sent_s, node))
                self._begin_check(node, node.outstanding, now_s)
        while self._outstanding and self._outstanding[0][0] <= now_s - self._timeout_s:
            sent_s, node = self._outstanding.popleft()
            if node.outstanding is not None and node.sent_s == sent_s:
                return node, node.outstanding
        return None

    def _begin_check(self, node: NodeProbes, target: Target, now_s: float) -> None:
        targets = node.liveness.to_check(target)
        if not targets or len(self._checks) >= MAX_CHECKS:
            return
        silence = Silence(node.sent_s, self._timeout_s, now_s)
        self._checks[node] = SilenceCheck(silence, targets, self._mark_of(target))
        self._step_check(node, now_s)

    def _step_checks(self, now_s: float) -> None:
        for node in list(self._checks):
            self._step_check(node, now_s)

    def _step_check(self, node: NodeProbes, now_s: float) -> None:
        result = self._checks[node].step(now_s)
        if result == "waiting":
            return
        self._end_check(node)
        if result == "dead" and node.outstanding is not None:
            node.connections.pop(node.outstanding.port).close()
            node.outstanding = None
            self._report(node.liveness.machine_dead(now_s))
            self._serve(node, now_s)

    def _end_check(self, node: NodeProbes) -> None:
        if self._checks and (check := self._checks.pop(node, None)) is not None:
            check.close()

    def _schedule(self, node: NodeProbes, due_s: float) -> None:
        node.due_s = due_s
        heapq.heappush(self._agenda, (due_s, next(self._order), node))
        self._work_available.set()

    def _serve(self, node: NodeProbes, now_s: float) -> None:
        """Probe the target that is due, or put the node into the agenda for the time at which one
        is due."""
        next_probe = node.liveness.next(node.sent_s)
        if next_probe is None:
            self._forget(node)
            return
        due_s, target = next_probe
        if due_s <= now_s and target.port not in node.connections:
            if not self._connects:
                # No new connection is allowed in this tick. Until the target's turn, probe
                # over the connection that is open, to see whether the machine is alive.
                due_s, target = node.liveness.repeat(node.sent_s) or next_probe
                due_s = due_s if target.port in node.connections else now_s + self._interval_s
            else:
                self._connects -= 1
        if due_s > now_s:
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

    def _mark_of(self, target: Target) -> int:
        return 0 if target.routed else self._mark

    def _forget(self, node: NodeProbes) -> None:
        self._end_check(node)
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
            connection = ProbeConnection(
                asyncio.get_running_loop(),
                target.address,
                target.port,
                partial(self._on_answer, node),
                self._mark_of(target),
            )
        node.connections[target.port] = connection
        if len(node.connections) > MAX_IN_TURN:
            node.connections.pop(next(iter(node.connections))).close()
        self._recent.append((now_s, node))
        self.sent += 1
        connection.send_request(target.path)

    def _on_answer(self, node: NodeProbes, answer: Answer | Unavailable) -> None:
        target, node.outstanding = node.outstanding, None
        self._end_check(node)
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

    def _time_out(self, node: NodeProbes, target: Target, now_s: float) -> None:
        """Record that a probe timed out. The next one uses a new connection, because this one may
        be stuck."""
        node.outstanding = None
        self._end_check(node)
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
