"""Detection of the gateways that are alive, by the Leases with which they announce themselves, and
deletion of Leases that expired long ago.

In: the Leases of the gateways. Out: `Gateways` in the state, which the controller's plan reads.
Follows client-go's leader election, which observes Leases in the same way.

Invariants: no time that another process wrote is compared with a clock. A gateway is gone if its
Lease has not changed, or has not reported readiness, for the duration of the Lease as measured by
this process. Only time counts in which this process could have observed a renewal. So no gateway is
declared gone while the API server is unreachable, and afterwards gateways have most of a duration
to renew. An answer to another request proves nothing, because the watch may hang at one API server
while another API server answers. Therefore the watch includes the Leases of controllers, and the
renewals of this process's own Lease prove that the watch delivers renewals. A Lease that exists at
the start proves nothing: whether its gateway is alive is known once the Lease changes, or has not
changed for its duration."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec
import structlog

from fairlead.config import PresenceConfig
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.kube.announcers import ANNOUNCERS, Announcer
from fairlead.kube.answers import NotFound, RefusedByServer
from fairlead.kube.client import Client
from fairlead.kube.freshness import Freshness
from fairlead.kube.lease_object import LEASES, Lease
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import (
    COMPONENT_LABEL,
    MAX_NAMED,
    MAX_REASON_LENGTH,
    SELECTOR,
    Presence,
    presence_of,
)
from fairlead.kube.reflector import Reflector
from fairlead.model import ServiceKey
from fairlead.plan.gateways import Gateways
from fairlead.state import State

log = structlog.get_logger()

COLLECT_S = 3600.0
"""A Lease or an Announcer that has not changed for this time is deleted."""
COLLECT_LOOK_S = 600.0

WrittenT = TypeVar("WrittenT", Lease, Announcer)
Seen = dict[str, tuple[str, float]]
"""By name, the version of an object, and when this version was first seen."""


class Observed(msgspec.Struct):
    """One gateway. `silent_s`: how long its Lease has not changed while a renewal could be
    observed. `unready_s`: how long the gateway has not been ready. `renewed`: whether a renewal was
    observed."""

    presence: Presence
    duration_s: float
    renewed: bool
    silent_s: float = 0.0
    unready_s: float = 0.0

    @property
    def expired(self) -> bool:
        return max(self.silent_s, self.unready_s) > self.duration_s


class GatewayLeases:
    """The gateways, or the nodes, and how long each has been silent. It has no clock: the caller
    passes the time to `advance`."""

    def __init__(self, max_step_s: float, role: Literal["gateway", "node"] = "gateway") -> None:
        """`max_step_s`: the maximum that is counted between two calls of `advance`. In a longer
        time renewals could not be observed."""
        self.gateways: dict[ObjectKey, Observed] = {}
        self._role = role
        self._max_step_s = max_step_s

    def update(self, changed: Mapping[ObjectKey, Lease | None], *, first: bool) -> None:
        """Process changed Leases. `first`: these Leases existed when the watch began."""
        for key, lease in changed.items():
            before = self.gateways.pop(key, None)
            presence = presence_of(lease) if lease is not None else None
            if lease is None or presence is None or presence.role != self._role:
                continue
            # A gateway that restarts is not ready for a moment; meanwhile the tables of its
            # predecessor forward.
            unready_s = (
                0.0 if presence.ready else before.unready_s if before is not None else float("inf")
            )
            duration_s = float(lease.spec.lease_duration_seconds or 1)
            self.gateways[key] = Observed(presence, duration_s, not first, unready_s=unready_s)

    def advance(self, passed_s: float) -> None:
        """Count a time in which renewals could be observed."""
        for each in self.gateways.values():
            each.silent_s += min(passed_s, self._max_step_s)
            each.unready_s += min(passed_s, self._max_step_s)

    @property
    def decided(self) -> bool:
        """Whether it is known that at least one gateway is alive, or that none is."""
        alive = (each for each in self.gateways.values() if not each.expired)
        return any(each.renewed for each in self.gateways.values() if not each.expired) or not any(
            alive
        )

    def value(self) -> Gateways:
        """Return the gateways that are alive, and the Services that they cannot serve."""
        alive = [each.presence for each in self.gateways.values() if not each.expired]
        refusals: dict[ServiceKey, dict[str, str]] = {}
        for presence in alive:
            # A gateway keeps to these limits, but any client with its token can write more.
            for each in presence.not_served[:MAX_NAMED]:
                name, reason = presence.name[:MAX_REASON_LENGTH], each.message[:MAX_REASON_LENGTH]
                refusals.setdefault(each.key, {})[name] = reason
        return Gateways(frozenset(presence.name for presence in alive), refusals)


class LeaseWatch:
    """Observes the Leases of gateways, or of nodes, and calls `publish` whenever time has passed.
    `decided` is set once it is known which of them are alive, or if that cannot become known."""

    def __init__(
        self,
        client: Client,
        section: PresenceConfig,
        freshness: Freshness,
        publish: Callable[[Gateways], None],
        role: Literal["gateway", "node"],
    ) -> None:
        self.decided = asyncio.Event()
        self._publish_value = publish
        self._tick_s = section.lease_duration_s / 12
        self._leases = GatewayLeases(section.lease_duration_s / 3, role)
        self._reflector: Reflector[Lease] = Reflector(
            client,
            LEASES,
            namespace=section.namespace,
            label_selector=f"{SELECTOR},{COMPONENT_LABEL} in (controller,{role})",
            on_forbidden=self._forbidden,
        )
        self._last_contact_s = self._reflector.last_contact_s
        freshness.add(LEASES.plural if role == "gateway" else f"{role} leases", self._reflector)

    async def run(self) -> None:
        """Observe, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._count())

    async def _follow(self) -> None:
        first = True
        async for changed in self._reflector.changes():
            self._advance()
            self._leases.update(changed, first=first)
            first = False
            self._publish()

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            if self._reflector.synced:
                self._advance()
                self._publish()

    def _advance(self) -> None:
        """Count the time up to the last delivery of the watch."""
        before_s, self._last_contact_s = self._last_contact_s, self._reflector.last_contact_s
        self._leases.advance(max(0.0, self._last_contact_s - before_s))

    def _publish(self) -> None:
        if not self._leases.decided and not self.decided.is_set():
            return
        self._publish_value(self._leases.value())
        self.decided.set()

    def _forbidden(self) -> None:
        """Continue without the permission to watch Leases: no condition mentions gateways then. The
        reflector has logged the reason."""
        self.decided.set()


class GatewayWatch(LeaseWatch):
    """Keeps `state.gateways` equal to the Leases of gateways."""

    def __init__(
        self, client: Client, state: State, section: PresenceConfig, freshness: Freshness
    ) -> None:
        super().__init__(client, section, freshness, self._update, "gateway")
        self._state = state

    def _update(self, after: Gateways) -> None:
        before = self._state.gateways
        if before is not None and before.alive != after.alive:
            log.info("gateways alive", gateways=sorted(after.alive), before=sorted(before.alive))
        self._state.update_gateways(after)


async def collect(client: Client, section: PresenceConfig, *, fence: Callable[[], None]) -> None:
    """Delete Leases that their processes have not renewed for a long time, until cancelled. Only
    the leader runs it."""
    seen: Seen = {}
    while True:
        try:
            found = await client.list(LEASES, namespace=section.namespace, label_selector=SELECTOR)
            seen, expired = _unchanged(found, seen, COLLECT_S)
            for lease in expired:
                key = ObjectKey(lease.metadata.namespace, lease.metadata.name)
                fence()
                # The instance may have renewed the Lease meanwhile.
                with suppress(NotFound, Conflict):
                    await client.delete(LEASES, key, version=lease.metadata.resource_version)
                    log.info("deleted the Lease of an instance that is gone", lease=key.name)
        except FairleadError as problem:
            _log_failure("Leases of instances that are gone", problem)
        await asyncio.sleep(COLLECT_LOOK_S)


async def collect_announcers(
    client: Client,
    *,
    fence: Callable[[], None],
    after_s: float = COLLECT_S,
    look_s: float = COLLECT_LOOK_S,
) -> None:
    """Delete Announcers that their processes have not written for `after_s`, until cancelled. Only
    the leader runs it."""
    seen: Seen = {}
    while True:
        try:
            seen, left = _unchanged(await _announcers(client), seen, after_s)
            for each in left:
                key = ObjectKey("", each.metadata.name)
                fence()
                with suppress(NotFound, Conflict):
                    await client.delete(ANNOUNCERS, key, version=each.metadata.resource_version)
                    log.info("deleted an Announcer that no process writes", announcer=key.name)
        except FairleadError as problem:
            _log_failure("Announcers that no process writes", problem)
        await asyncio.sleep(look_s)


def _log_failure(what: str, problem: FairleadError) -> None:
    level = log.info if isinstance(problem, Unavailable) else log.warning
    level(f"deleting {what} failed", problem=str(problem))


async def _announcers(client: Client) -> Sequence[Announcer]:
    """Return the Announcers; none if the API server does not serve them, or this account may not
    read them."""
    try:
        return await client.list(ANNOUNCERS)
    except RefusedByServer:
        return ()


def _unchanged(
    objects: Iterable[WrittenT], before: Seen, after_s: float
) -> tuple[Seen, list[WrittenT]]:
    """Return the version of each object with the time at which this version was first seen, and the
    objects that have not changed for `after_s`. `before`: the result of the previous call."""
    now_s = time.monotonic()
    seen: Seen = {}
    unchanged = []
    for each in objects:
        name, version = each.metadata.name, each.metadata.resource_version
        known = before.get(name)
        seen[name] = known if known is not None and known[0] == version else (version, now_s)
        if now_s - seen[name][1] > after_s:
            unchanged.append(each)
    return seen, unchanged
