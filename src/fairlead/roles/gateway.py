"""`fairlead gateway`: takes packets for load-balancer addresses and hands them to nodes that can serve them.

In: Services with their addresses (from status), EndpointSlices, Nodes, its own probes of the nodes. Out: the eBPF data
plane of this host. Any number of gateways share the work without talking to each other: same objects, same plan.
Stopped or killed, the kernel goes on forwarding by the last tables, and the next start adopts them.
"""

import asyncio
from collections.abc import Mapping
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
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.plan.balancer import HEALTH_CHECKS_FAILING
from fairlead.reconcile import Loop
from fairlead.roles.process import SOURCES, feed
from fairlead.state import State
from fairlead.telemetry import Metrics, TrafficCollector
from fairlead.web import View, serve

log = structlog.get_logger()

FIRST_VERDICTS_S = 2.0
"""How long a start waits for the first answers of the nodes before it forwards by the API's word alone."""


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
                for key, balancer in intents.items():
                    for note in balancer.notes:
                        if note.reason == HEALTH_CHECKS_FAILING:
                            recorder.event(key, balancer.uid, "Warning", note.reason, note.message)

            probing = Loop("probing", state, balancers, [monitor], lambda _intents, _outcomes: None)
            forwarding = Loop("forwarding", state, balancers, [direct], report)
            view.ready = forwarding.settled.is_set
            group.create_task(recorder.run())
            group.create_task(monitor.run())
            feed(group, client, state)
            group.create_task(probing.run())
            await _first_verdicts(probing, monitor)
            group.create_task(forwarding.run())
    finally:
        await direct.close(remove=False)


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
