"""`fairlead controller`: gives Services their addresses and writes their status.

In: Services, pools, AddressGrants. Out: the claim, grants, status and Events of every Service that
a class of ours serves. The chain is claim, grant, publish: a Service is claimed before anything is
done for it, and let go when everything is undone. Class octavia has a loop of its own
(`roles.octavia`). The only writer of Service status: of several controllers one leads, by a Lease.
Away, it takes nothing away: data planes go on, only new Services wait."""

import asyncio
import socket
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from fairlead.config import Config
from fairlead.drivers import Component
from fairlead.drivers.claim import ClaimDriver, claimed_for
from fairlead.drivers.conditions import Conditions, ConditionsDriver
from fairlead.drivers.grant_cache import GrantCache
from fairlead.drivers.grants import GrantDriver
from fairlead.drivers.kept_addresses import KeptAddresses
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.drivers.publish import PublishDriver
from fairlead.drivers.service_status import ServiceWriter
from fairlead.errors import Refused
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.kube.lease import Elector
from fairlead.kube.objects import ObjectKey, Service
from fairlead.kube.presence import Warned
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.plan.cluster import plan_controller
from fairlead.plan.keeping import limits_of
from fairlead.plan.ledger import Ledger
from fairlead.plan.projection import CLOUD_CONTROLLER, CONTROLLER
from fairlead.plan.status import CONDITION_TYPES, PENDING, REFUSED, UNAVAILABLE
from fairlead.reconcile import Loop, Pace, Report
from fairlead.roles.catch_up import catch_up
from fairlead.roles.components import Context, Task, Until, run_components
from fairlead.roles.gateways import GatewayWatch, collect
from fairlead.roles.octavia import octavia_loop
from fairlead.roles.pool_reports import PoolReports
from fairlead.roles.presence import Announcer, controller_name
from fairlead.roles.process import ADDRESS_SOURCES, SOURCES, Feed, freshness_of
from fairlead.roles.report import START_S, Reporter
from fairlead.roles.reporting import SharedReport
from fairlead.roles.service_reports import ServiceReports
from fairlead.state import State
from fairlead.web import View, serve

SYNC_FAILED = "SyncLoadBalancerFailed"
"""The upstream service controller's reason for what could not be done."""

REMOVAL_FAILED = "DeleteLoadBalancerFailed"
"""The upstream service controller's reason for what could not be taken away."""

PATIENCE_S = 5.0
"""So long something that may pass by itself must last before the Service's owner is told."""

CONDITIONS_COALESCE_S = 0.3
"""A new Service has no endpoints for a moment; a condition is not written for that."""

WRITERS = 8
"""How many Services are written at once."""

DEFAULT_LISTEN = "127.0.0.1:9440"


class Planner:
    """`plan_controller` with a memory for who was given what."""

    def __init__(self, state: State, config: Config) -> None:
        self._state = state
        self._config = config
        self.ledger = Ledger()
        self.on_assigned: Callable[[], None] = lambda: None
        """Called after each plan."""

    def __call__(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        planned = plan_controller(self._state, self._config, self.ledger, keys)
        self.on_assigned()
        return planned

    async def follow_pools(self) -> None:
        """Take in pools that change while there is no Service to plan for."""
        while True:
            await self._state.pools_changed.wait()
            self._state.pools_changed.clear()
            if self._state.whole.is_set():
                self(())


async def run(
    config: Config, access: Access, *, patience_s: float = PATIENCE_S, start_s: float = START_S
) -> None:
    """Run a controller until cancelled: stand by until the Lease is ours, then do the work, anew in
    each term."""
    state = State((*SOURCES, *ADDRESS_SOURCES))
    view = View("controller", "")
    view.standing_by = state.whole.is_set
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    async with Client(access) as client:
        recorder = EventRecorder(client, "fairlead-controller")
        elector = elector_of(config, client)
        freshness = freshness_of(client, config)
        view.watch(freshness)
        gateways = GatewayWatch(client, state, config.presence, freshness)
        announcer = Announcer(client, config.presence, view, controller_name())
        keep = CONTROLLER if config.octavia is None else CLOUD_CONTROLLER

        async def term() -> None:
            await catch_up(client, state, CONTROLLER.service)
            await work(
                config,
                client,
                state,
                view,
                recorder,
                gateways.decided,
                fence=elector.assert_leading,
                patience_s=patience_s,
                start_s=start_s,
            )

        components = [
            Context("web", serve(view, listen, config.web.metrics_from)),
            Task("events", recorder.run),
            Task("freshness", freshness.run),
            Task("presence", partial(announcer.run, remove_at_end=True)),
            Feed(client, state, freshness, keep, addresses=True),
            Task("gateways", gateways.run),
            Task("leader election", partial(elector.lead, term)),
        ]
        await run_components(components, view)


class Term(Component):
    """The time in which this process leads: outside of it nothing is known that could be shown, and
    another process writes the Events."""

    name = "term"

    def __init__(
        self, view: View, loop: Loop[ServiceKey, LoadBalancer], events: Reporter[LoadBalancer]
    ) -> None:
        self._view = view
        self._loop = loop
        self._events = events

    async def open(self) -> None:
        self._view.follow(self._loop)

    async def close(self) -> None:
        self._events.close()
        self._view.follow(None)


class Writing(NamedTuple):
    """What all drivers of a term write with. `fence`: raises unless this process leads."""

    client: Client
    state: State
    newest: ServiceCache
    writer: ServiceWriter
    recorder: EventRecorder
    fence: Callable[[], None]


async def work(
    config: Config,
    client: Client,
    state: State,
    view: View,
    recorder: EventRecorder,
    gateways_known: asyncio.Event,
    *,
    fence: Callable[[], None],
    patience_s: float,
    start_s: float,
) -> None:
    """Serve all Services, until cancelled: one loop gives them what they ask for, another shows
    what became of it. `gateways_known`: set once it is known which gateways are alive."""
    newest = ServiceCache(state)
    writer = ServiceWriter(client, newest, fence=fence)
    writing = Writing(client, state, newest, writer, recorder, fence)
    events = reporter_of(view, writing, patience_s, start_s)
    reports = ServiceReports(newest)

    def report(
        intents: Mapping[ServiceKey, LoadBalancer], outcomes: Mapping[ServiceKey, Outcome]
    ) -> None:
        events(intents, outcomes)
        reports(intents, outcomes)

    shared = SharedReport(report)
    planner = Planner(state, config)
    pools = PoolReports(client, state, planner.ledger, recorder, limits_of(config), fence=fence)
    planner.on_assigned = pools.changed
    loop = services_loop(config, writing, planner, shared.of("services"))

    async def known() -> None:
        """Until then it is not known whether conditions that another leader wrote still hold."""
        await loop.settled.wait()
        await gateways_known.wait()
        events.resume(left_warned(state.services.values()))

    with octavia_loop(
        config, state, writer, newest, recorder, shared.of("octavia"), view, fence=fence
    ) as octavia:
        components = [
            Term(view, loop, events),
            loop,
            octavia,
            *pools.components,
            Task("pools", planner.follow_pools),
            Task("expired Leases", partial(collect, client, config.presence, fence=fence)),
            Until("all Services are known", known),
            conditions_loop(writing, reports, octavia.settled),
        ]
        await run_components(components, view)


def reporter_of(
    view: View, writing: Writing, patience_s: float, start_s: float
) -> Reporter[LoadBalancer]:
    """What the controller tells the owners of Services."""
    return Reporter[LoadBalancer](
        view,
        writing.state,
        writing.recorder,
        reason=SYNC_FAILED,
        removal_reason=REMOVAL_FAILED,
        notes=lambda balancer: balancer.notes,
        patience_s=patience_s,
        settle_s=2 * patience_s,
        start_s=start_s,
    )


def services_loop(
    config: Config,
    writing: Writing,
    planner: Planner,
    report: Report[ServiceKey, LoadBalancer],
) -> Loop[ServiceKey, LoadBalancer]:
    """The loop that claims Services, grants addresses and publishes them."""
    grant_cache, limits = GrantCache(writing.state), limits_of(config)
    keeping = KeptAddresses(writing.client, writing.state, grant_cache, writing.recorder, limits)
    claim = ClaimDriver(writing.writer, writing.newest, writing.recorder)
    grants = GrantDriver(
        writing.client, writing.writer, writing.newest, grant_cache, keeping, fence=writing.fence
    )
    publish = PublishDriver(
        writing.writer,
        writing.newest,
        writing.recorder,
        grants.publish_precondition,
        grants.granted,
    )
    return Loop(
        "services",
        writing.state,
        planner,
        [claim, grants, publish],
        report,
        pace=Pace(parallel=WRITERS),
    )


def conditions_loop(
    writing: Writing, reports: ServiceReports, cloud_known: asyncio.Event
) -> Loop[ServiceKey, Conditions]:
    """The loop that writes what became of Services. `cloud_known`: set once it is known what a
    cloud has."""

    def undecided(service: Service) -> bool:
        """Of what a cloud has, nothing is known while it is away."""
        return (
            not cloud_known.is_set()
            and service.key not in reports.services
            and bool(claimed_for(service, "octavia"))
        )

    return Loop(
        "conditions",
        reports,
        reports.plan,
        [ConditionsDriver(writing.writer, writing.newest, undecided=undecided)],
        lambda _intents, _outcomes: None,
        pace=Pace(parallel=WRITERS, coalesce_s=CONDITIONS_COALESCE_S),
    )


def left_warned(services: Iterable[Service]) -> Iterator[Warned]:
    """The Warnings of an earlier leader that still held when it ended, read from the conditions of
    Services."""
    for service in services:
        for condition in service.status.conditions:
            if (
                condition.type in CONDITION_TYPES
                and condition.status == "False"
                and condition.reason != PENDING
            ):
                reason = (
                    SYNC_FAILED if condition.reason in (REFUSED, UNAVAILABLE) else condition.reason
                )
                yield Warned(
                    str(service.key),
                    reason,
                    condition.last_transition_time or "",
                    service.metadata.uid,
                )


def elector_of(config: Config, client: Client) -> Elector:
    """A candidate of its own for each process: two on one host must not take each other for
    themselves."""
    section = config.controller
    return Elector(
        client,
        ObjectKey(section.lease_namespace, section.lease_name),
        f"{socket.gethostname()}_{uuid.uuid4()}",
        lease_s=section.lease_duration_s,
        renew_deadline_s=section.lease_duration_s * 2 / 3,
        retry_s=section.lease_duration_s / 7,
    )
