"""`fairlead controller`: assigns addresses to Services and writes their status.

In: Services, pools, AddressGrants. Out: the claim, grants, status and Events of every Service that
a class of Fairlead serves. The chain of drivers is claim, grant, publish: a Service is claimed
before any other driver works for it, and released after they have removed everything. Class octavia
has a loop of its own (`roles.octavia`). The controller is the only writer of Service status: one of
several controllers is the leader, by a Lease. While no controller runs, nothing is removed: data
planes continue, and only new Services wait."""

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
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import ObjectKey, Service
from fairlead.kube.presence import Warned
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.plan.cluster import plan_controller
from fairlead.plan.gateways import PARTLY_SERVED
from fairlead.plan.keeping import limits_of
from fairlead.plan.ledger import Ledger
from fairlead.plan.projection import CONTROLLER, of_controller
from fairlead.plan.status import CONDITION_TYPES, PENDING, REFUSED, UNAVAILABLE
from fairlead.reconcile import Loop, Pace, Report
from fairlead.roles.catch_up import catch_up
from fairlead.roles.components import Context, Task, Until, run_components
from fairlead.roles.gateways import GatewayWatch, collect
from fairlead.roles.octavia import octavia_loop
from fairlead.roles.pool_reports import PoolReports
from fairlead.roles.presence import Announcer, controller_name
from fairlead.roles.process import (
    ADDRESS_SOURCES,
    SOURCES,
    AddressFeed,
    Feed,
    KnownHosts,
    freshness_of,
)
from fairlead.roles.report import START_S, Reporter
from fairlead.roles.reporting import SharedReport
from fairlead.roles.service_reports import ServiceReports
from fairlead.state import State
from fairlead.web import View, serve

SYNC_FAILED = "SyncLoadBalancerFailed"
"""The reason that the service controller of Kubernetes uses for failures to serve a Service."""

REMOVAL_FAILED = "DeleteLoadBalancerFailed"
"""The reason that the service controller of Kubernetes uses for failures to remove a load balancer.
"""

GRACE_PERIOD_S = 5.0
"""How long a problem that may pass by itself must last before an Event reports it."""

CONDITIONS_COALESCE_S = 0.3
"""The delay that keeps a condition from being written for the moment in which a new Service has no
endpoints."""

WRITERS = 8
"""The number of Services that are written in parallel."""

DEFAULT_LISTEN = "127.0.0.1:9440"


class Planner:
    """`plan_controller` with a ledger of the addresses that it has assigned."""

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
        """Update the ledger when pools change, because without Services no plan would do so."""
        while True:
            await self._state.pools_changed.wait()
            self._state.pools_changed.clear()
            if self._state.has_synced.is_set():
                self(())


async def run(
    config: Config,
    access: Access,
    *,
    grace_period_s: float = GRACE_PERIOD_S,
    start_s: float = START_S,
) -> None:
    """Run a controller until cancelled: stand by until this process holds the Lease, then do the
    work. Each term as leader starts the work again."""
    state = State((*SOURCES, *ADDRESS_SOURCES, LEASES.plural))
    hosts = KnownHosts(state, config, access)
    await hosts.resolve()
    view = View("controller", "")
    view.standing_by = state.has_synced.is_set
    listen = config.web.listen if config.web.listen is not None else DEFAULT_LISTEN
    async with Client(access) as client:
        recorder = EventRecorder(client, "fairlead-controller")
        elector = elector_of(config, client)
        freshness = freshness_of(client, config)
        view.watch(freshness)
        gateways = GatewayWatch(client, state, config.presence, freshness)
        announcer = Announcer(client, config.presence, view, controller_name())
        projection = of_controller(config)

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
                grace_period_s=grace_period_s,
                start_s=start_s,
            )

        components = [
            Context("web", serve(view, listen, config.web.metrics_from)),
            Task("events", recorder.run),
            Task("freshness", freshness.run),
            Task("presence", partial(announcer.run, remove_at_end=True)),
            Feed(client, state, freshness, projection),
            AddressFeed(client, state, freshness),
            gateways,
            hosts,
            Task("leader election", partial(elector.lead, term)),
        ]
        await run_components(components, view)


class Term(Component):
    """The time in which this process leads. At other times the view is empty, and another process
    writes the Events."""

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


class TermContext(NamedTuple):
    """The objects that all drivers of one term share. `fence`: raises an error unless this process
    leads."""

    client: Client
    state: State
    service_cache: ServiceCache
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
    grace_period_s: float,
    start_s: float,
) -> None:
    """Serve all Services until cancelled. One loop assigns and publishes addresses, another one
    writes the conditions that show the outcomes. `gateways_known`: set once it is known which
    gateways are alive."""
    service_cache = ServiceCache(state)
    writer = ServiceWriter(client, service_cache, fence=fence)
    context = TermContext(client, state, service_cache, writer, recorder, fence)
    events = reporter_of(view, context, grace_period_s, start_s)
    reports = ServiceReports(service_cache)

    def report(
        intents: Mapping[ServiceKey, LoadBalancer], outcomes: Mapping[ServiceKey, Outcome]
    ) -> None:
        events(intents, outcomes)
        reports(intents, outcomes)

    shared = SharedReport(report)
    planner = Planner(state, config)
    pools = PoolReports(client, state, planner.ledger, recorder, limits_of(config), fence=fence)
    planner.on_assigned = pools.changed
    loop = services_loop(config, context, planner, shared.of("services"))

    async def known() -> None:
        """Wait until it is known which conditions of the previous leader still hold, and take over
        the Warnings of that leader."""
        await loop.settled.wait()
        await gateways_known.wait()
        events.resume(inherited_warnings(state.services.values()))

    with octavia_loop(
        config, state, writer, service_cache, recorder, shared.of("octavia"), view, fence=fence
    ) as octavia:
        components = [
            Term(view, loop, events),
            loop,
            octavia,
            *pools.components,
            Task("pools", planner.follow_pools),
            Task("expired Leases", partial(collect, client, config.presence, fence=fence)),
            Until("all Services and gateways are known", known),
            conditions_loop(context, reports, octavia.settled),
        ]
        await run_components(components, view)


def reporter_of(
    view: View, context: TermContext, grace_period_s: float, start_s: float
) -> Reporter[LoadBalancer]:
    """Return the reporter that writes the Events of the controller."""
    return Reporter[LoadBalancer](
        view,
        context.state,
        context.recorder,
        reason=SYNC_FAILED,
        removal_reason=REMOVAL_FAILED,
        notes=lambda balancer: balancer.notes,
        grace_period_s=grace_period_s,
        settle_s=2 * grace_period_s,
        start_s=start_s,
    )


def services_loop(
    config: Config,
    context: TermContext,
    planner: Planner,
    report: Report[ServiceKey, LoadBalancer],
) -> Loop[ServiceKey, LoadBalancer]:
    """Return the loop that claims Services, grants addresses and publishes them."""
    grant_cache, limits = GrantCache(context.state), limits_of(config)
    kept_addresses = KeptAddresses(
        context.client, context.state, grant_cache, context.recorder, limits
    )
    claim = ClaimDriver(context.writer, context.service_cache, context.recorder)
    grants = GrantDriver(
        context.client,
        context.writer,
        context.service_cache,
        grant_cache,
        kept_addresses,
        fence=context.fence,
    )
    publish = PublishDriver(
        context.writer,
        context.service_cache,
        context.recorder,
        grants.publish_precondition,
        grants.granted,
    )
    return Loop(
        "services",
        context.state,
        planner,
        [claim, grants, publish],
        report,
        pace=Pace(parallel=WRITERS),
    )


def conditions_loop(
    context: TermContext, reports: ServiceReports, cloud_known: asyncio.Event
) -> Loop[ServiceKey, Conditions]:
    """Return the loop that writes the conditions of Services. `cloud_known`: set once the load
    balancers in the cloud are known."""

    def undecided(service: Service) -> bool:
        """Return whether nothing is known about the load balancer of the Service because the cloud
        has not answered yet."""
        return (
            not cloud_known.is_set()
            and service.key not in reports.services
            and bool(claimed_for(service, "octavia"))
        )

    return Loop(
        "conditions",
        reports,
        reports.plan,
        [ConditionsDriver(context.writer, context.service_cache, undecided=undecided)],
        lambda _intents, _outcomes: None,
        pace=Pace(parallel=WRITERS, coalesce_s=CONDITIONS_COALESCE_S),
    )


def inherited_warnings(services: Iterable[Service]) -> Iterator[Warned]:
    """Yield the Warnings of the previous leader that still held when it ended, read from the
    conditions of Services."""
    for service in services:
        for condition in service.status.conditions:
            if (
                condition.type in CONDITION_TYPES
                and (condition.status == "False" or condition.reason in PARTLY_SERVED)
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
    """Return the elector of this process. Its identity contains a random part, because two
    processes on one host must be different candidates."""
    section = config.controller
    return Elector(
        client,
        ObjectKey(section.lease_namespace, section.lease_name),
        f"{socket.gethostname()}_{uuid.uuid4()}",
        lease_s=section.lease_duration_s,
        renew_deadline_s=section.lease_duration_s * 2 / 3,
        retry_s=section.lease_duration_s / 7,
    )
