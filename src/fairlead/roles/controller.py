"""`fairlead controller`: gives Services their addresses and writes their status.

In: Services and pools. Out: the claim, status and Events of every Service that a class of ours serves. The only writer of
Service status. Away, it takes nothing away: data planes go on as programmed, only new Services wait.
"""

import asyncio
from collections.abc import Mapping

from fairlead.config import Config
from fairlead.drivers.status import StatusDriver
from fairlead.intents import Publications
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.model import Outcome, Publication, ServiceKey
from fairlead.reconcile import Loop
from fairlead.roles.process import SOURCES, feed
from fairlead.state import State
from fairlead.telemetry import Metrics
from fairlead.web import View, serve

SYNC_FAILED = "SyncLoadBalancerFailed"
"""The upstream service controller's reason for what could not be done."""


async def run(config: Config, access: Access) -> None:
    """Run the controller until cancelled."""
    state = State(SOURCES)
    metrics = Metrics()
    view = View("controller", "", metrics)
    async with Client(access) as client, serve(view, config.web.listen), asyncio.TaskGroup() as group:
        recorder = EventRecorder(client, "fairlead-controller")
        publications = Publications(state, config)

        def report(intents: Mapping[ServiceKey, Publication], outcomes: Mapping[ServiceKey, Outcome]) -> None:
            view.record(intents, outcomes)
            metrics.show(view.outcomes, {})
            metrics.passes.labels("status").inc(len(outcomes))
            for key, outcome in outcomes.items():
                _tell(recorder, state, publications, key, outcome)

        loop = Loop("status", state, publications, [StatusDriver(client, state, recorder)], report)
        view.ready = loop.settled.is_set
        group.create_task(recorder.run())
        feed(group, client, state)
        group.create_task(loop.run())


def _tell(recorder: EventRecorder, state: State, publications: Publications, key: ServiceKey, outcome: Outcome) -> None:
    """Events for what a user should know; the recorder sees to it that a repetition is not a new Event."""
    service = state.services.get(key)
    if service is None:
        return
    if outcome.state != "done":
        recorder.event(key, service.metadata.uid, "Warning", SYNC_FAILED, outcome.message)
    for note in publications.notes_of(key):
        recorder.event(key, service.metadata.uid, "Warning", note.reason, note.message)
