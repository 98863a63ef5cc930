"""`fairlead controller`: gives Services their addresses and writes their status.

In: Services and pools. Out: the claim, status and Events of every Service that a class of ours serves. The chain is claim,
then publish: a Service is claimed before anything is done for it, and let go when everything is undone.
The only writer of Service status: of several controllers one leads, by a Lease. Away, it takes nothing away: data planes go
on, only new Services wait.
"""

import asyncio
import socket
import uuid
from collections.abc import Collection, Mapping

import structlog

from fairlead.config import Config
from fairlead.drivers.claim import ClaimDriver
from fairlead.drivers.newest import NewestServices
from fairlead.drivers.publish import PublishDriver
from fairlead.errors import FairleadError, Refused
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.kube.lease import Elector
from fairlead.kube.objects import SERVICES, ObjectKey, Service
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.cluster import Grants, plan_controller
from fairlead.reconcile import Loop
from fairlead.roles.process import SOURCES, feed
from fairlead.roles.report import Reporter
from fairlead.state import State
from fairlead.web import View, serve

log = structlog.get_logger()

SYNC_FAILED = "SyncLoadBalancerFailed"
"""The upstream service controller's reason for what could not be done."""

WRITERS = 8
"""How many Services are written at once."""

CATCH_UP_S = 1.0
"""So long a new leader waits for its watch before it asks again what there is."""

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
    """Run a controller until cancelled: stand by until the Lease is ours, then do the work, anew in each term."""
    state = State(SOURCES)
    view = View("controller", "")
    view.standing_by = state.whole.is_set
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    async with Client(access) as client, serve(view, listen), asyncio.TaskGroup() as group:
        recorder = EventRecorder(client, "fairlead-controller")
        elector = elector_of(config, client)
        group.create_task(recorder.run())
        feed(group, client, state)

        async def term() -> None:
            await catch_up(client, state)
            fence = elector.assert_leading
            newest = NewestServices(state)
            loop = Loop(
                "services",
                state,
                Planner(state, config),
                [ClaimDriver(client, newest, recorder, fence=fence), PublishDriver(client, newest, recorder, fence=fence)],
                Reporter[LoadBalancer](view, state, recorder, reason=SYNC_FAILED, notes=lambda balancer: balancer.notes),
                parallel=WRITERS,
            )
            view.follow(loop)
            try:
                await loop.run()
            finally:
                view.follow(None)

        group.create_task(elector.lead(term))


def elector_of(config: Config, client: Client) -> Elector:
    """A candidate of its own for each process: two on one host must not take each other for themselves."""
    section = config.controller
    return Elector(
        client,
        ObjectKey(section.lease_namespace, section.lease_name),
        f"{socket.gethostname()}_{uuid.uuid4()}",
        lease_s=section.lease_duration_s,
        renew_deadline_s=section.lease_duration_s * 2 / 3,
        retry_s=section.lease_duration_s / 7,
    )


async def catch_up(client: Client, state: State) -> None:
    """Wait until the state shows all that the leader before us may have written: an address that it gave a moment ago must
    not be given again. A list without a version is what the API server has now; versions of one kind grow."""
    await state.whole.wait()
    while True:
        try:
            fresh = await client.list(SERVICES)
            async with asyncio.timeout(CATCH_UP_S):
                while any(behind(state, service) for service in fresh):
                    await asyncio.sleep(CATCH_UP_S / 50)
            return
        except (FairleadError, TimeoutError) as error:
            log.info("catching up", why=str(error) or "the watch is behind, or a Service was deleted meanwhile")
            await asyncio.sleep(CATCH_UP_S / 5)


def behind(state: State, fresh: Service) -> bool:
    """Whether the state has an older version of this Service, or none."""
    known = state.services.get(fresh.key)
    return known is None or int(known.metadata.resource_version) < int(fresh.metadata.resource_version)
