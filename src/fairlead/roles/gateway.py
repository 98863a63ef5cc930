"""`fairlead gateway`: takes packets for load-balancer addresses and hands them to nodes that can serve them.

In: Services with their addresses (from status), EndpointSlices, Nodes, its own probes of the nodes. Out: the eBPF data
plane of this host. Any number of gateways share the work without talking to each other: same objects, same plan.
Stopped or killed, the kernel goes on forwarding by the last tables, and the next start adopts them.
"""

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import structlog

from fairlead.config import Config
from fairlead.drivers.direct import DirectDriver, remove_pins
from fairlead.drivers.monitor import MonitorDriver
from fairlead.errors import Refused
from fairlead.intents import Balancers
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.model import LoadBalancer, Note, Outcome, ServiceKey
from fairlead.plan.balancer import HEALTH_CHECKS_FAILING
from fairlead.reconcile import Loop
from fairlead.roles.process import SOURCES, feed
from fairlead.state import State
from fairlead.telemetry import Metrics, TrafficCollector
from fairlead.web import View, serve

log = structlog.get_logger()

FIRST_VERDICTS_S = 2.0
"""How long a start waits for the first answers of the nodes before it forwards by the API's word alone."""

FAILING_PATIENCE_S = 5.0
"""So long no health check of a Service must have succeeded before its owner is told."""
FAILING_AGAIN_S = 60.0


async def run(config: Config, access: Access, node_name: str) -> None:
    """Run the gateway until cancelled. What the kernel does stays in place then."""
    if not config.gateway.interfaces:
        raise Refused(
            "the gateway does not know where packets arrive", fix="give --interface, or gateway.interfaces in the file"
        )
    state = State(SOURCES)
    metrics = Metrics()
    view = View("gateway", node_name, metrics)
    direct = DirectDriver(config.gateway.interfaces, pin_path=Path(config.gateway.pin_path))
    await direct.open()
    try:
        metrics.registry.register(TrafficCollector(direct))
        view.traffic = lambda: traffic_of(direct)
        async with Client(access) as client, serve(view, config.web.listen), asyncio.TaskGroup() as group:
            recorder = EventRecorder(client, "fairlead-gateway")
            failing = FailingHealthChecks(recorder)
            balancers = Balancers(state, config)
            monitor = MonitorDriver(
                state.observe,
                interval_s=config.gateway.probe_interval_s,
                timeout_s=config.gateway.probe_timeout_s,
            )

            def report(intents: Mapping[ServiceKey, LoadBalancer], outcomes: Mapping[ServiceKey, Outcome]) -> None:
                view.record(intents, outcomes)
                metrics.show(view.outcomes, view.intents)
                metrics.passes.labels("forwarding").inc(len(outcomes))
                failing.see(intents, outcomes)

            probing = Loop("probing", state, balancers, [monitor], lambda _intents, _outcomes: None)
            forwarding = Loop("forwarding", state, balancers, [direct], report)
            view.ready = forwarding.settled.is_set
            group.create_task(recorder.run())
            group.create_task(failing.run())
            group.create_task(monitor.run())
            feed(group, client, state)
            group.create_task(probing.run())
            await _first_verdicts(probing, monitor)
            group.create_task(forwarding.run())
    finally:
        await direct.close(remove=False)


class FailingHealthChecks:
    """Tells a Service's owner that no health check succeeds, once that has lasted, and again while it lasts.

    At first it is so for every new Service: the nodes open its health port a moment after the gateway begins to ask.
    """

    def __init__(
        self, recorder: EventRecorder, *, patience_s: float = FAILING_PATIENCE_S, again_s: float = FAILING_AGAIN_S
    ) -> None:
        self._recorder = recorder
        self._patience_s = patience_s
        self._again_s = again_s
        self._due: dict[ServiceKey, tuple[float, str, Note]] = {}

    def see(self, intents: Mapping[ServiceKey, LoadBalancer], outcomes: Collection[ServiceKey]) -> None:
        """Take in what the loop has just planned for the Services of `outcomes`."""
        now_s = asyncio.get_running_loop().time()
        for key in outcomes:
            balancer = intents.get(key)
            note = next((n for n in balancer.notes if n.reason == HEALTH_CHECKS_FAILING), None) if balancer else None
            if balancer is None or note is None:
                self._due.pop(key, None)
                continue
            due_s, _, _ = self._due.get(key, (now_s + self._patience_s, "", note))
            self._due[key] = due_s, balancer.uid, note

    async def run(self) -> None:
        """Tell, until cancelled."""
        while True:
            await asyncio.sleep(self._patience_s / 10)
            now_s = asyncio.get_running_loop().time()
            for key, (due_s, uid, note) in list(self._due.items()):
                if due_s <= now_s:
                    self._due[key] = now_s + self._again_s, uid, note
                    self._recorder.event(key, uid, "Warning", note.reason, note.message)


async def clean_up(config: Config) -> None:
    """Take this gateway's data plane out of the kernel, whoever left it there."""
    await remove_pins(Path(config.gateway.pin_path))


def traffic_of(direct: DirectDriver) -> Mapping[str, Any]:
    """The counters, for showing."""
    return {"services": {str(key): traffic._asdict() for key, traffic in direct.counters().items()}, "drops": direct.drops()}


async def _first_verdicts(probing: Loop[LoadBalancer], monitor: MonitorDriver) -> None:
    """An adopted data plane goes on as it is until the nodes have answered once: to plan without verdicts would move traffic
    away from nodes that are merely not asked yet."""
    await probing.settled.wait()
    try:
        async with asyncio.timeout(FIRST_VERDICTS_S):
            await monitor.settled()
    except TimeoutError:
        log.warning("not every node's health port has shown itself yet, going on", waited_s=FIRST_VERDICTS_S)
