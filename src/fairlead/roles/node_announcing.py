"""The announcements of a node for class `fairlead.io/announce`: its plan, and the probes of its own
health ports.

In: the state of the cluster, the clock. Out: NodeServices with their announcements, and Services
that are marked when a decision is due. If kube-proxy is the service proxy, the node probes its own
health ports in the way in which gateways probe them, and announces an address once they answer. If
this role is the service proxy, its chain of drivers announces an address after everything else is
in place, so it needs no probe.

Invariant: after a start nothing is withdrawn only because a health port has not been probed yet:
the loop begins after the first verdicts."""

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec

from fairlead.config import Config
from fairlead.drivers import Component
from fairlead.drivers.prober import Prober
from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import (
    HealthMonitor,
    Listener,
    LoadBalancer,
    Member,
    NodeService,
    ServiceKey,
)
from fairlead.net.address import family_of
from fairlead.plan.announcing_nodes import is_local
from fairlead.plan.cluster import plan_node
from fairlead.plan.confirming import Confirmation, confirm
from fairlead.plan.lingering import Lingering, linger
from fairlead.plan.node_announcing import NodeAnnouncing
from fairlead.plan.service import health_monitor_of
from fairlead.reconcile import Loop, Pace
from fairlead.roles.prober_process import command as prober_command
from fairlead.state import State

FIRST_VERDICTS_S = 1.0
"""How long a start waits for the first verdicts about its health ports."""
PLAN_SLICE = 50
"""The number of Services that are planned before other tasks run."""

Addresses = Callable[[], Sequence[str]]


class AnnouncingPlan:
    """The plan of a node that announces addresses.

    Large Services are planned in a thread, so the memory of the decisions has a lock. `addresses`:
    the addresses of this node where its health ports answer; None: this role is the service proxy,
    so nothing is probed."""

    def __init__(
        self, state: State, config: Config, node_name: str, addresses: Addresses | None
    ) -> None:
        self._state = state
        self._node_name = node_name
        self._addresses = addresses
        self._announcing = NodeAnnouncing(config, node_name)
        self._probing = NodeAnnouncing(config, node_name)
        """Another memory, because the loop that probes runs beside the loop that announces."""
        self._confirmations: dict[ServiceKey, Confirmation] = {}
        """By Service and not by port, because a change of the policy changes the port."""
        self._lingering: dict[ServiceKey, Lingering] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._timers: dict[ServiceKey, asyncio.TimerHandle] = {}

    def __call__(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, NodeService | Refused]:
        """Return the plan of these Services. Services whose announcements change because of them
        are marked."""
        planned = dict(plan_node(self._state, self._node_name, keys))
        with self._lock:
            for key in keys:
                intent, service = planned.get(key), self._state.services.get(key)
                if service is None:
                    self._announcing.forget(self._state)
                    self._confirmations.pop(key, None)
                    self._lingering.pop(key, None)
                elif isinstance(intent, NodeService):
                    planned[key] = self._announced(service, intent)
        return planned

    def probes(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        """Return load balancers whose only member is this node, for the Services that the node is
        to announce as soon as its health ports confirm them: the intents of a prober."""
        found: dict[ServiceKey, LoadBalancer | Refused] = {}
        for key in keys:
            service = self._state.services.get(key)
            if service is None or not self._probing.may_serve(self._state, service):
                continue
            monitor = health_monitor_of(service)
            if monitor is not None and (address := self._address()):
                found[key] = self._probed(service, monitor, address)
        return found

    def _announced(self, service: Service, intent: NodeService) -> NodeService:
        """Add the announcements of the Service, and arrange the next decision."""
        now_s = self._loop.time()
        due: list[float] = []
        serves = partial(self._serves, now_s, due)
        decision = self._announcing.decide(self._state, service, now_s, serves)
        lingering = linger(
            self._lingering.pop(service.key, None),
            now_s,
            local=is_local(service),
            announces=decision.announces,
        )
        if lingering is not None:
            self._lingering[service.key] = lingering
            due.append(lingering.until_s)
            # A service proxy other than this role follows the policy by itself.
            intent = msgspec.structs.replace(intent, external_policy="Cluster")
        due_s = min(decision.due_s, *due) if due else decision.due_s
        self._loop.call_soon_threadsafe(self._arrange, service.key, due_s, decision.others)
        if not decision.announcements:
            return intent
        return msgspec.structs.replace(intent, announcements=decision.announcements)

    def _arrange(self, key: ServiceKey, due_s: float, others: Collection[ServiceKey]) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if due_s != float("inf"):
            self._timers[key] = self._loop.call_at(due_s, self._state.subscribers.mark, (key,))
        if others:
            self._state.subscribers.mark(others)

    def _serves(self, now_s: float, due: list[float], service: Service) -> bool:
        """Return whether the service proxy has confirmed the Service. Add to `due` when that
        ends."""
        monitor = health_monitor_of(service)
        if self._addresses is None or monitor is None:
            return True
        if not (address := self._address()):
            return False
        verdict = self._state.verdict_of(address, monitor.port)
        before = self._confirmations.get(service.key, Confirmation())
        state = self._confirmations[service.key] = confirm(before, verdict, now_s)
        due.append(state.due_s)
        return state.confirmed

    def _address(self) -> str:
        """Return the address of this node where its health ports are probed; empty: it has none."""
        return next(iter(self._addresses()), "") if self._addresses is not None else ""

    def _probed(self, service: Service, monitor: HealthMonitor, address: str) -> LoadBalancer:
        port = service.spec.ports[0]
        listener = Listener(
            family_of(address),
            port.port,
            port.protocol,
            service.spec.external_traffic_policy or "Cluster",
            port.node_port,
            (Member(self._node_name, address, 1),),
        )
        return LoadBalancer(
            service.key, service.metadata.uid, "", (), (listener,), health_monitor=monitor
        )


def probing(config: Config, state: State, plan: AnnouncingPlan) -> Sequence[Component]:
    """Return the components that probe the health ports of this node, in the order of the start.
    The last one delays the start of the components after it."""
    section = config.gateway
    prober = Prober(
        state.observe, prober_command(section.probe_interval_s, section.probe_timeout_s, 0)
    )
    loop = Loop(
        "own health",
        state.objects_only,
        plan.probes,
        [prober],
        lambda _intents, _outcomes: None,
        pace=Pace(plan_slice=PLAN_SLICE),
    )
    return [prober, loop, _FirstVerdicts(state, prober, loop)]


class _FirstVerdicts(Component):
    """The component that delays the start until the health ports have been probed."""

    name = "first verdicts"

    def __init__(self, state: State, prober: Prober, loop: Loop[ServiceKey, LoadBalancer]) -> None:
        self._state = state
        self._prober = prober
        self._loop = loop

    async def open(self) -> None:
        await self._state.has_synced.wait()
        await self._loop.settled.wait()
        try:
            async with asyncio.timeout(FIRST_VERDICTS_S):
                await self._prober.settled()
        except TimeoutError:
            pass  # a port without a verdict is one that does not answer
