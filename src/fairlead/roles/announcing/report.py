"""The report of one role about the addresses that it announces: its Announcer in the Kubernetes
API, Events, and metrics.

In: the parts `l2` and `bgp` of the components that announce. Out: one object (`kube.announcers`),
which is written when something has changed, at most once in `INTERVAL_S`, and every `REFRESH_S`;
Events about the differences (`plan.announcer_events`). Invariants: nothing is written before the
role is in step with the cluster, so the Announcer of the previous process stays during a restart.
Addresses that it announced cause no Event again. Nothing is written while another process reports
under the same name (`roles.instance_name`). A failed write stops nothing: it is
logged once until the problem changes, and repeated."""

import asyncio
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec
import structlog
from prometheus_client.registry import Collector

from fairlead.backoff import Backoff
from fairlead.drivers import Component
from fairlead.errors import FairleadError, Refused
from fairlead.kube.announcers import (
    ANNOUNCERS,
    FIELD_MANAGER,
    Announcer,
    AnnouncerStatus,
    announcer_name,
    body_of,
    status_of,
)
from fairlead.kube.answers import NotFound, RefusedByServer, Unauthenticated
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder, stamp
from fairlead.kube.objects import ObjectKey
from fairlead.model import ServiceKey
from fairlead.plan.announcer_events import Announced, Notice, lasting, notices
from fairlead.role_state import AnnouncedAddress, BgpState, L2State
from fairlead.roles.announcing.metrics import AnnouncementCollector
from fairlead.roles.report import REMIND_S
from fairlead.state import State
from fairlead.web import View

log = structlog.get_logger()

INTERVAL_S = 1.0
"""The minimum time between two writes of a small object, and the interval at which the components
are read if none of them reports a change."""
SLOWER_EACH = 100
MAX_SLOWER = 5
"""The minimum time between two writes is this many times longer at most: once more for each
`SLOWER_EACH` addresses. A write contains all addresses, so while Services are created all the time,
the work of the API server would grow with the square of their number."""
COALESCE_S = 0.05
"""How long a change waits for others."""
REFRESH_S = 300.0
"""The interval of writes without a change."""
MAX_UNWRITTEN = 100
"""The maximum number of Events about the object that wait until it can be written."""
ANSWER_S = 5.0
"""The time-out of a request."""
RETRY_S = (1.0, 60.0)
"""The first and the longest delay after a failed request."""


class AnnouncerReport(Component):
    """The Announcer of this process. `sources`: the components whose parts are reported. `uid_of`:
    returns the uid of a Service, or None if it does not exist."""

    name = "announcer"

    def __init__(
        self,
        client: Client,
        view: View,
        sources: Sequence[Component],
        recorder: EventRecorder,
        uid_of: Callable[[ServiceKey], str | None],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._client = client
        self._view = view
        self._sources = sources
        self._recorder = recorder
        self._uid_of = uid_of
        self._interval_s = interval_s
        self._who = f"{view.role} {view.node_name}"
        self._key = ObjectKey("", announcer_name(view.role, view.node_name))
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._announced = Announced()
        """What was reported last."""
        self._written: AnnouncerStatus | None = None
        self._written_s = 0.0
        self._object: Announcer | None = None
        """The object as the API server returned it last."""
        self._unwritten: dict[str, Notice] = {}
        """The latest Event about the object by subject, until the object can be written."""
        self._remind_s = 0.0
        """When the problems that last are reported again."""
        self._conflicts_seen = 0
        self._failing = ""
        self._backoff = Backoff(*RETRY_S)

    def changed(self) -> None:
        """Report a change at once instead of at the next look. May be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        for each in self._sources:
            each.watch_status(self.changed)

    def collectors(self) -> Sequence[Collector]:
        return (AnnouncementCollector(lambda: self._announced, lambda: self._conflicts_seen),)

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while not await self._read_predecessor():
            await asyncio.sleep(self._backoff.next_s())
        while True:
            self._changed.clear()
            wait_s = self._interval_s
            if self._view.ready:
                self._report(await asyncio.to_thread(self._read))
                if not await self._write_if_due():
                    wait_s = self._backoff.next_s(self._interval_s)
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
            # Changes come in bursts: what belongs together is written together.
            due_s = self._written_s + self._interval_s * self._slower()
            await asyncio.sleep(max(COALESCE_S, due_s - clock()))

    def _slower(self) -> int:
        """Return how many times longer than usual a write waits after the previous one."""
        addresses = self._written.address_count if self._written is not None else 0
        return min(MAX_SLOWER, 1 + addresses // SLOWER_EACH)

    async def _read_predecessor(self) -> bool:
        """Read what an earlier process of this role announced. Return whether the API server
        answered."""
        try:
            async with asyncio.timeout(ANSWER_S):
                self._object = await self._client.get(ANNOUNCERS, self._key)
        except NotFound:
            return True
        except (FairleadError, TimeoutError) as problem:
            self._log_failure(problem)
            return isinstance(problem, RefusedByServer)
        if self._object.status is not None:
            self._announced = announced_by(self._object.status)
        return True

    def _read(self) -> Announced:
        """Return what the components announce now."""
        parts = [each.status() for each in self._sources]
        l2 = next((each for each in parts if isinstance(each, L2State)), None)
        bgp = next((each for each in parts if isinstance(each, BgpState)), None)
        return Announced(l2 or L2State(), bgp or BgpState())

    def _report(self, announced: Announced) -> None:
        """Write Events about the differences since the last call, and about problems that last."""
        before, self._announced = self._announced, announced
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._remind_s:
            self._remind_s = now_s + REMIND_S
            for notice in lasting(self._who, announced):
                self._defer(notice)
        if before == announced:
            return
        known = {(each.address, each.mac) for each in before.l2.conflicts}
        self._conflicts_seen += sum(
            (each.address, each.mac) not in known for each in announced.l2.conflicts
        )
        for notice in notices(self._who, before, announced):
            if not notice.services:
                self._defer(notice)
            for name in notice.services:
                key = ServiceKey.parse(name)
                if (uid := self._uid_of(key)) is not None:
                    self._recorder.event(key, uid, notice.kind, notice.reason, notice.message)

    def _defer(self, notice: Notice) -> None:
        """Keep an Event until the object is written, which may take as long as the API server is
        unreachable. So only the latest Event of each subject is kept, and a limited number."""
        self._unwritten.pop(notice.subject, None)
        self._unwritten[notice.subject] = notice
        if len(self._unwritten) > MAX_UNWRITTEN:
            del self._unwritten[next(iter(self._unwritten))]

    async def _write_if_due(self) -> bool:
        """Write the Announcer if it differs from the last one, or was not written for a while.
        Return whether nothing failed."""
        if self._view.name_in_use():
            self._written = None  # the other process writes the object
            return True
        l2, bgp = self._announced.l2, self._announced.bgp
        status = status_of(self._view.role, self._view.node_name, l2, bgp, ready=True)
        now_s = asyncio.get_running_loop().time()
        refresh_s = REFRESH_S * random.uniform(0.9, 1.0)
        if status == self._written and now_s < self._written_s + refresh_s:
            return True
        # Most nodes announce nothing, unlike gateways: objects of such nodes would only hide the
        # others.
        if self._view.role == "node" and not shows_anything(status):
            if self._object is None:
                return True
            if removed := await remove_announcer(self._client, "node", self._view.node_name):
                self._object, self._written = None, None
            return removed
        observed = msgspec.structs.replace(status, observed_at=stamp(datetime.now(UTC)))
        try:
            async with asyncio.timeout(ANSWER_S):
                self._object = await self._client.apply(
                    ANNOUNCERS,
                    self._key,
                    body_of(observed),
                    field_manager=FIELD_MANAGER,
                    force=True,
                )
        except (FairleadError, TimeoutError) as problem:
            self._log_failure(problem)
            return False
        if self._failing:
            log.info("Announcer written again", announcer=str(self._key))
        self._failing = ""
        self._backoff.reset()
        self._written, self._written_s = status, now_s
        for notice in self._unwritten.values():
            self._recorder.event_about(
                ANNOUNCERS, self._object, notice.kind, notice.reason, notice.message
            )
        self._unwritten.clear()
        return True

    def _log_failure(self, problem: Exception) -> None:
        """Log a failure once, until it changes or ends. The connection logs invalid credentials."""
        text = str(problem) or f"not answered in {ANSWER_S:g} s"
        if isinstance(problem, Unauthenticated) or text == self._failing:
            return
        self._failing = text
        level = log.error if isinstance(problem, Refused) else log.warning
        level(
            "the Announcer of this host is not written: the controller does not know which "
            "addresses this host announces",
            announcer=str(self._key),
            problem=text,
            fix="kubectl apply --server-side -f deploy/crds, and install the rights of this release"
            if isinstance(problem, Refused)
            else "",
        )


def announcer_of(
    announces: bool,
    client: Client,
    view: View,
    state: State,
    recorder: EventRecorder,
    sources: Sequence[Component],
) -> Component:
    """Return the component for the Announcer of a role. It opens after its `sources`. `announces`:
    whether the configuration lets the role announce addresses."""
    if not announces:
        return NoAnnouncer(client, view)

    def uid_of(key: ServiceKey) -> str | None:
        service = state.services.get(key)
        return service.metadata.uid if service is not None else None

    return AnnouncerReport(client, view, sources, recorder, uid_of)


class NoAnnouncer(Component):
    """The component of a role that announces nothing, as configured: it deletes the Announcer that
    an earlier configuration may have left."""

    name = "no announcer"

    def __init__(self, client: Client, view: View) -> None:
        self._client = client
        self._view = view

    async def run(self) -> None:
        backoff = Backoff(*RETRY_S)
        while not await remove_announcer(self._client, self._view.role, self._view.node_name):
            await asyncio.sleep(backoff.next_s())


async def remove_announcer(client: Client, role: str, host: str) -> bool:
    """Delete the Announcer of a role on a host, if there is one. Return whether the API server
    answered. Without the right to delete it, which a role that announces nothing need not have, the
    object is left to the controller (`roles.gateways.collect`)."""
    name = announcer_name(role, host)
    try:
        async with asyncio.timeout(ANSWER_S):
            await client.delete(ANNOUNCERS, ObjectKey("", name))
    except RefusedByServer:
        return True
    except (FairleadError, TimeoutError):
        return False
    log.info("removed", what=f"Announcer {name}")
    return True


def shows_anything(status: AnnouncerStatus) -> bool:
    """Return whether the status shows more than that there is nothing to announce."""
    return bool(
        status.addresses or status.sessions or status.members or status.conflicts or status.problems
    )


def announced_by(status: AnnouncerStatus) -> Announced:
    """Return what an Announcer shows, as far as Events depend on it."""
    # The method of an address without details is not known, so it counts as announced by both.
    more = [AnnouncedAddress(each, peers=("",)) for each in status.more_addresses]
    by_l2 = (
        AnnouncedAddress(each.address, each.services, interfaces=each.interfaces)
        for each in status.addresses
        if each.method == "l2"
    )
    by_bgp = (
        AnnouncedAddress(each.address, each.services, peers=each.peers)
        for each in status.addresses
        if each.method == "bgp"
    )
    return Announced(L2State(addresses=(*by_l2, *more)), BgpState(addresses=(*by_bgp, *more)))
