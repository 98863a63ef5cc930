"""Probe the health ports of the members, so that a gateway knows of a dead node long before Kubernetes does.

In: LoadBalancers with a health monitor. Out: `observe(address, port, verdict, services)` at each change of a verdict; None
when a port is asked no more. All members are probed, whatever their state: that is how they come back.
Invariants: one task, and one probe in flight, per node address, not per Service; a node that falls silent is known to
be down after two time-outs (0.3 s) and at most one interval. A failure of our own is not held against a node.
Reads kube-proxy's health ports: KEP-3836 for policy Cluster, the healthCheckNodePort for policy Local.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import structlog

from fairlead.drivers.liveness import NodeLiveness, Target
from fairlead.errors import Unavailable
from fairlead.model import LoadBalancer, Outcome, ServiceKey, Value, Verdict
from fairlead.net.httpprobe import probe

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


class NodeProbes:
    """One node address under probe. `changed` wakes its task when there is something new to ask."""

    def __init__(self, interval_s: float) -> None:
        self.liveness = NodeLiveness(interval_s)
        self.changed = asyncio.Event()


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
        self._tasks: asyncio.TaskGroup | None = None
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
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for address, node in self._nodes.items():
                tasks.create_task(self._probe_node(address, node), name=f"probe {address}")
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    def _start(self, change: StartProbe) -> None:
        target = change.target
        self._wanted.setdefault(change.service, {})[target] = change.local
        if target not in self._askers:
            self._unproved.add(target)
            self._all_proved.clear()
        askers = self._askers.setdefault(target, {})
        askers[change.service] = change.local
        node = self._nodes.get(target.address)
        if node is None:
            node = self._nodes[target.address] = NodeProbes(self._interval_s)
            if self._tasks is not None:
                self._tasks.create_task(self._probe_node(target.address, node), name=f"probe {target.address}")
        node.liveness.add(target, local=any(askers.values()))
        node.changed.set()

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
        node = self._nodes[target.address]
        node.liveness.remove(target)
        node.changed.set()
        self._proved(target)
        self._observe(target.address, target.port, None, ())

    def _proved(self, target: Target) -> None:
        self._unproved.discard(target)
        if not self._unproved:
            self._all_proved.set()

    async def _probe_node(self, address: str, node: NodeProbes) -> None:
        """Ask the targets of one node, one after the other, until there are none."""
        loop = asyncio.get_running_loop()
        asked_s = float("-inf")
        while (turn := node.liveness.next(asked_s)) is not None:
            due_s, target = turn
            if due_s > loop.time() and await changed_before(node.changed, due_s):
                continue
            asked_s = loop.time()
            node.liveness.asking(target)
            await self._ask(node.liveness, target)
        # No wait lies between the look and this, so no target can have been added to a node that goes.
        del self._nodes[address]

    async def _ask(self, liveness: NodeLiveness, target: Target) -> None:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        try:
            answer = await probe(target.address, target.port, target.path, timeout_s=self._timeout_s)
        except Unavailable as problem:
            log.warning("probe not sent", target=str(target), problem=str(problem))
            self._tell(liveness.could_not_ask(target, loop.time()))
            return
        now_s = loop.time()
        if answer.kind == "silent" and now_s - asked_s > 1.5 * self._timeout_s:
            # We were late ourselves (a busy loop): the answer may have lain there all the while.
            log.warning("probe disregarded", target=str(target), late_s=round(now_s - asked_s - self._timeout_s, 3))
            return
        self._tell(liveness.judge(target, answer, now_s))

    def _tell(self, changes: Iterable[tuple[Target, Verdict]]) -> None:
        for target, verdict in changes:
            log.info("probed", target=str(target), verdict=verdict)
            self._proved(target)
            self._observe(target.address, target.port, verdict, self._askers.get(target, {}).keys())


def probes_of(balancer: LoadBalancer) -> Probes:
    """The health ports to ask for one Service."""
    monitor = balancer.health_monitor
    if monitor is None:
        return Probes((), False)
    addresses = {member.address for listener in balancer.listeners for member in listener.members}
    targets = tuple(sorted(Target(address, monitor.port, monitor.path) for address in addresses))
    return Probes(targets, any(listener.policy == "Local" for listener in balancer.listeners))


async def changed_before(changed: asyncio.Event, due_s: float) -> bool:
    """Wait until `due_s`, but no longer than until there is something new."""
    changed.clear()
    try:
        async with asyncio.timeout_at(due_s):
            await changed.wait()
    except TimeoutError:
        return False
    return True
