"""`fairlead controller`: gives Services their addresses and writes their status.

In: Services and pools. Out: the claim, status and Events of every Service that a class of ours serves. The chain is claim,
then publish: a Service is claimed before anything is done for it, and let go when everything is undone.
The only writer of Service status. Away, it takes nothing away: data planes go on, only new Services wait.
"""

import asyncio
from collections.abc import Collection, Mapping

from fairlead.config import Config
from fairlead.drivers.claim import ClaimDriver
from fairlead.drivers.publish import PublishDriver
from fairlead.errors import Refused
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.cluster import Grants, plan_controller
from fairlead.reconcile import Loop
from fairlead.roles.process import SOURCES, feed
from fairlead.roles.report import Reporter
from fairlead.state import State
from fairlead.web import View, serve

SYNC_FAILED = "SyncLoadBalancerFailed"
"""The upstream service controller's reason for what could not be done."""

WRITERS = 8
"""How many Services are written at once."""

DEFAULT_LISTEN = "127.0.0.1:9440"


class Planner:
    """`plan_controller` with a memory for the grants."""

    def __init__(self, state: State, config: Config) -> None:
        self._state = state
        self._config = config
        self._grants: Grants = {}

    def __call__(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        planned, self._grants = plan_controller(self._state, self._config, self._grants, keys)
        return planned


async def run(config: Config, access: Access) -> None:
    """Run the controller until cancelled."""
    state = State(SOURCES)
    view = View("controller", "")
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    async with Client(access) as client, serve(view, listen), asyncio.TaskGroup() as group:
        recorder = EventRecorder(client, "fairlead-controller")
        report = Reporter[LoadBalancer](view, state, recorder, reason=SYNC_FAILED, notes=lambda balancer: balancer.notes)
        loop = Loop(
            "services",
            state,
            Planner(state, config),
            [ClaimDriver(client, state, recorder), PublishDriver(client, state, recorder)],
            report,
            parallel=WRITERS,
        )
        view.follow(loop)
        group.create_task(recorder.run())
        feed(group, client, state)
        group.create_task(loop.run())
