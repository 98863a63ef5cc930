"""Probe the health ports of the members, so that a gateway knows of a dead node long before Kubernetes does.

In: LoadBalancers with a health monitor. Out: `observe(address, port, verdict, services)` at each change of a verdict; None
when a port is asked no more. All members are probed, whatever their state: that is how they come back.
Invariants: one probe in flight per node address, not per Service; a node that falls silent is known to be down after two
time-outs (0.3 s) and at most one interval. A failure of our own is not held against a node.
One task looks after all nodes, a few hundred times a second, and connections are kept: a thousand nodes, each asked ten times a
second, have to cost a small part of a core. New targets are asked at a limited rate, for the same reason.
Reads kube-proxy's health ports: KEP-3836 for policy Cluster, the healthCheckNodePort for policy Local.
"""

import asyncio
import heapq
import resource
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from types import MappingProxyType

import structlog

from fairlead.drivers.liveness import IN_TURN, NodeLiveness, Target
from fairlead.errors import Unavailable
from fairlead.model import LoadBalancer, Outcome, ServiceKey, Value, Verdict
from fairlead.net.httpprobe import SILENT, Answer, Line

log = structlog.get_logger()

Observe = Callable[[str, int, Verdict | None, Collection[ServiceKey]], None]
"""(address, port, verdict, the Services on whose behalf it is asked)."""


class Probes(Value, frozen=True):
    """What is to be asked for one Service. Targets are sorted. `local`: they are healthCheckNodePorts."""

    targets: tuple[Target, ...]
    local: bool


class StartProbe(Value, frozen=True):
    """Ask `target` from now on, for this Service."""

    service: ServiceKey
    target: Target
    local: bool

    def __str__(self) -> str:
        return f"probe {self.target}"


class StopProbe(Value, frozen=True):
    """Ask `target` no more on behalf of this Service."""

    service: ServiceKey
    target: Target

    def __str__(self) -> str:
        return f"stop probing {self.target}"


ProbeChange = StartProbe | StopProbe


TICK_S = 0.005
"""Nodes are looked after so often: many at a time, which costs less than each at its own moment."""
AT_ONCE = 20
"""Nodes in one step, which others of this process wait for."""
CONNECTS_PER_TICK = 10
"""New connections: 2,000 a second. A start with 100,000 targets would otherwise do nothing else."""
RENEW = 100
"""After so many questions a connection is made anew: that the machine still takes new ones has to be proved too."""


TOGETHER_S = 0.3
"""The first verdicts for a Service that is new are told together, once all its nodes have been asked, or after so long. Told
one by one they would make each gateway go through other members, until all have the same."""


class NodeProbes:
    """One node address under probe. `due_s`: when to look after it; None: nothing to do until it is told of a change.
    `asked`: the target that is being asked. `asked_s`: when the last one was."""

    def __init__(self, address: str, interval_s: float) -> None:
        self.address = address
        self.liveness = NodeLiveness(interval_s)
        self.due_s: float | None = None
        self.asked: Target | None = None
        self.asked_s = float("-inf")
        self.lines: dict[int, Line] = {}
        """By port; the one that was used last comes last."""
        self.questions = 0


class MonitorDriver:
    """The prober, as a driver. `run` has to run beside the loop: it owns the tasks that probe."""

    name = "monitor"

    def __init__(self, observe: Observe, *, interval_s: float = 0.1, timeout_s: float = 0.15) -> None:
        self._observe = observe
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._nodes: dict[str, NodeProbes] = {}
        self._wanted: dict[ServiceKey, dict[Target, bool]] = {}
        self._askers: dict[Target, dict[ServiceKey, bool]] = {}
        self._running = False
        self._agenda: list[tuple[float, int, NodeProbes]] = []
        self._order = count()
        self._some = asyncio.Event()
        self._connects = 0
        self.sent = 0
        """Questions that were asked."""
        self._awaited: dict[ServiceKey, set[Target]] = {}
        """Services that are new, and which of their targets nothing is known of yet."""
        self._held: dict[Target, Verdict] = {}
        self._warned: set[Target] = set()
        """Of which something else than `up` was logged."""
        self._unproved: set[Target] = set()
        self._all_proved = asyncio.Event()
        self._all_proved.set()

    @property
    def verdicts(self) -> Mapping[Target, Verdict | None]:
        """All targets and what is known of them now; None: nothing yet."""
        return MappingProxyType({target: self._nodes[target.address].liveness.verdict(target) for target in self._askers})

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Probes]:
        """The health ports of all members of each Service; a Service without a health monitor has none."""
        rendered = ((key, probes_of(balancer)) for key, balancer in intents.items())
        return {key: probes for key, probes in rendered if probes.targets}

    def diff(self, desired: Mapping[ServiceKey, Probes], actual: Mapping[ServiceKey, Probes]) -> Sequence[ProbeChange]:
        """Starts before stops: a target that changes hands is asked without a break."""
        nothing = Probes((), False)
        starts: list[ProbeChange] = []
        stops: list[ProbeChange] = []
        for key in sorted(desired.keys() | actual.keys()):
            wanted, present = desired.get(key, nothing), actual.get(key, nothing)
            kept = set(present.targets) if wanted.local == present.local else set()
            starts += (StartProbe(key, target, wanted.local) for target in wanted.targets if target not in kept)
            stops += (StopProbe(key, target) for target in present.targets if target not in set(wanted.targets))
        return starts + stops

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Probes]:
        """What is being asked. Nobody else can change it."""
        wanted = self._wanted.keys() if keys is None else [key for key in keys if key in self._wanted]
        return {key: Probes(tuple(sorted(self._wanted[key])), any(self._wanted[key].values())) for key in wanted}

    async def apply(self, changes: Sequence[ProbeChange]) -> Mapping[ServiceKey, Outcome]:
        """Start and stop. Never fails."""
        for change in changes:
            match change:
                case StartProbe():
                    self._start(change)
                case StopProbe():
                    self._stop(change)
        return {}

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

    async def _pause(self) -> None:
        if self._agenda:
            await asyncio.sleep(TICK_S)
            return
        self._some.clear()
        await self._some.wait()

    def _tick(self, now_s: float) -> bool:
        """Look after some of the nodes that are due; whether there are more."""
        for _ in range(AT_ONCE):
            if not self._agenda or self._agenda[0][0] > now_s:
                return False
            due_s, _, node = heapq.heappop(self._agenda)
            if node.due_s != due_s:
                continue  # it is in the agenda again, for another time
            node.due_s = None
            if node.asked is not None:
                self._give_up(node, node.asked, now_s)
            self._go_on(node, now_s)
        return True

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
                # Others come first; that the machine lives is asked where a connection is there already.
                due_s, target = node.liveness.again(node.asked_s) or turn
                due_s = due_s if target.port in node.lines else now_s + self._interval_s
            else:
                self._connects -= 1
        if due_s > now_s:
            self._look_at(node, due_s)
        else:
            self._ask(node, target, now_s)

    def _start(self, change: StartProbe) -> None:
        target = change.target
        if change.service not in self._wanted:
            self._awaited[change.service] = set()
            asyncio.get_running_loop().call_later(TOGETHER_S, self._release, change.service)
        self._wanted.setdefault(change.service, {})[target] = change.local
        if target not in self._askers:
            self._unproved.add(target)
            self._all_proved.clear()
        if target in self._unproved and change.service in self._awaited:
            self._awaited[change.service].add(target)
        askers = self._askers.setdefault(target, {})
        askers[change.service] = change.local
        node = self._nodes.get(target.address)
        if node is None:
            node = self._nodes[target.address] = NodeProbes(target.address, self._interval_s)
        node.liveness.add(target, local=any(askers.values()))
        self._change(node)

    def _change(self, node: NodeProbes) -> None:
        """There is something new to ask, or something not to ask any more."""
        if self._running and node.asked is None and node.due_s != 0.0:
            self._look_at(node, 0.0)

    def _stop(self, change: StopProbe) -> None:
        target = change.target
        targets = self._wanted.get(change.service, {})
        targets.pop(target, None)
        if not targets:
            self._wanted.pop(change.service, None)
        askers = self._askers.get(target, {})
        askers.pop(change.service, None)
        if askers or target not in self._askers:
            return
        del self._askers[target]
        self._held.pop(target, None)
        self._warned.discard(target)
        node = self._nodes[target.address]
        node.liveness.remove(target)
        self._change(node)
        self._proved(target)
        self._observe(target.address, target.port, None, ())

    def _proved(self, target: Target) -> None:
        self._unproved.discard(target)
        if not self._unproved:
            self._all_proved.set()
        for service in self._askers.get(target, {}).keys() & self._awaited.keys():
            self._awaited[service].discard(target)
            if not self._awaited[service]:
                self._release(service)

    def _release(self, service: ServiceKey) -> None:
        """Tell what is known of its targets."""
        if self._awaited.pop(service, None) is not None:
            for target in self._held.keys() & self._wanted.get(service, {}).keys():
                self._observe(target.address, target.port, self._held.pop(target), self._askers[target].keys())

    def _forget(self, node: NodeProbes) -> None:
        for line in node.lines.values():
            line.close()
        del self._nodes[node.address]

    def _ask(self, node: NodeProbes, target: Target, now_s: float) -> None:
        node.asked, node.asked_s = target, now_s
        node.liveness.asking(target)
        line = node.lines.pop(target.port, None)
        node.questions += 1
        if line is None or node.questions % RENEW == 0:
            if line is not None:
                line.close()
            line = Line(asyncio.get_running_loop(), target.address, target.port, partial(self._answered, node))
        node.lines[target.port] = line
        if len(node.lines) > IN_TURN:
            node.lines.pop(next(iter(node.lines))).close()
        self._look_at(node, now_s + self._timeout_s)
        self.sent += 1
        line.ask(target.path)

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
            self._tell(node.liveness.judge(target, answer, now_s))
        turn = node.liveness.next(node.asked_s)
        self._look_at(node, turn[0] if turn else now_s)

    def _give_up(self, node: NodeProbes, target: Target, now_s: float) -> None:
        """Nothing has come in time. The next question goes over a new connection, as this one's may be stuck."""
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
            if verdict != "up" or target in self._warned:  # that all is well at first is no news, said a hundred thousand times
                log.info("probed", target=str(target), verdict=verdict)
            (self._warned.discard if verdict == "up" else self._warned.add)(target)
            askers = self._askers.get(target, {}).keys()
            if askers <= self._awaited.keys():
                self._held[target] = verdict
            else:
                self._observe(target.address, target.port, verdict, askers)
            self._proved(target)


def probes_of(balancer: LoadBalancer) -> Probes:
    """The health ports to ask for one Service."""
    monitor = balancer.health_monitor
    if monitor is None:
        return Probes((), False)
    addresses = {member.address for listener in balancer.listeners for member in listener.members}
    targets = tuple(sorted(Target(address, monitor.port, monitor.path) for address in addresses))
    return Probes(targets, any(listener.policy == "Local" for listener in balancer.listeners))


def _allow_descriptors() -> None:
    """Each node under probe takes up to `IN_TURN` of them; the usual limit is of times when select(2) could not take more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
