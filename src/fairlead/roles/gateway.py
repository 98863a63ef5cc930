"""`fairlead gateway`: takes packets for load-balancer addresses and hands them to nodes that can serve them.

In: Services with their addresses (from status, where the controller publishes them), EndpointSlices, Nodes, its own probes
of the nodes. Out: the eBPF data plane of this host. Any number of gateways share the work without talking to each other:
same objects, same plan. Stopped or killed, the kernel goes on forwarding by the last tables; the next start adopts them.

Two loops run over one plan. The first keeps the probes equal to it; what they show is part of the plan of the second, which
keeps the data plane equal to it, and which starts when every node has been asked once: a start must not take traffic away
from nodes only because nothing is known of them yet.
"""

import asyncio
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import structlog

from fairlead.config import Config
from fairlead.drivers.direct import DirectDriver, remove_pins
from fairlead.drivers.monitor import MonitorDriver
from fairlead.errors import Refused
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.model import LoadBalancer, Note
from fairlead.plan.cluster import plan_gateway
from fairlead.plan.members import HEALTH_CHECKS_FAILING
from fairlead.plan.projection import GATEWAY
from fairlead.reconcile import Loop
from fairlead.roles.process import SOURCES, feed
from fairlead.roles.report import Reporter
from fairlead.state import State
from fairlead.telemetry import TrafficCollector
from fairlead.web import View, serve

log = structlog.get_logger()

SYNC_FAILED = "SyncGatewayFailed"
DEFAULT_LISTEN = "127.0.0.1:9441"
PATIENCE_S = 5.0
"""So long something must be wrong before the Service's owner is told."""
FIRST_VERDICTS_S = 2.0
A_TARGET_S = 0.02
"""A start waits so long, and so much longer for each health port to ask, before it goes on without their answers."""


async def run(config: Config, access: Access, node_name: str) -> None:
    """Run the gateway until cancelled. What the kernel does stays in place then."""
    if not config.gateway.interfaces:
        raise Refused("the gateway does not know where packets arrive", fix="give --interface or gateway.interfaces")
    state = State(SOURCES)
    view = View("gateway", node_name)
    direct = DirectDriver(config.gateway.interfaces, pin_path=Path(config.gateway.pin_path))
    await direct.open()
    try:
        view.registry.register(TrafficCollector(direct))
        view.traffic = lambda: traffic_of(direct)
        listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
        async with Client(access) as client, serve(view, listen), asyncio.TaskGroup() as group:
            recorder = EventRecorder(client, "fairlead-gateway")
            monitor = MonitorDriver(
                state.observe, interval_s=config.gateway.probe_interval_s, timeout_s=config.gateway.probe_timeout_s
            )
            plan = partial(plan_gateway, state, config)
            report = Reporter[LoadBalancer](
                view,
                state,
                recorder,
                reason=SYNC_FAILED,
                who=f"gateway {node_name}",
                notes=notes_of_probes,
                patience_s=PATIENCE_S,
            )
            probing = Loop("probing", state, plan, [monitor], lambda _intents, _outcomes: None)
            forwarding = Loop("forwarding", state, plan, [direct], report)
            view.follow(forwarding)
            group.create_task(recorder.run())
            group.create_task(monitor.run())
            feed(group, client, state, GATEWAY)
            group.create_task(probing.run())
            await first_verdicts(probing, monitor)
            group.create_task(forwarding.run())
    finally:
        await direct.close(remove=False)


async def clean_up(config: Config) -> None:
    """Take this gateway's data plane out of the kernel, whoever left it there."""
    await remove_pins(Path(config.gateway.pin_path))


def notes_of_probes(balancer: LoadBalancer) -> Collection[Note]:
    """What only a gateway knows; the rest is the controller's to tell."""
    return [note for note in balancer.notes if note.reason == HEALTH_CHECKS_FAILING]


def traffic_of(direct: DirectDriver) -> Mapping[str, object]:
    """The counters, for showing."""
    return {"services": {str(key): traffic._asdict() for key, traffic in direct.counters().items()}, "drops": direct.drops()}


async def first_verdicts(probing: Loop[LoadBalancer], monitor: MonitorDriver) -> None:
    """Wait until every health port has been asked, but not for ever."""
    await probing.settled.wait()
    patience_s = FIRST_VERDICTS_S + A_TARGET_S * len(monitor.verdicts)
    try:
        async with asyncio.timeout(patience_s):
            await monitor.settled()
    except TimeoutError:
        log.warning("not every node's health port has shown itself yet, going on", waited_s=patience_s)
