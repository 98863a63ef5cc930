"""Observe which gateways are alive, from the Leases by which they announce themselves; and delete
Leases that expired long ago.

In: the Leases of the gateways. Out: `Gateways` in the state, which the controller's plan reads.
Invariants: no time that another process wrote is compared with a clock. A gateway is gone when, for
the Lease's duration as measured by this process, its Lease has not changed or has not said that the
gateway is ready. Only time counts in which this process could have observed a renewal: no gateway
is declared gone while the API server cannot be reached, and when it is back gateways have most of a
duration to renew. An answer to another request proves nothing, because the watch may hang at one
API server while another one answers. Therefore the watch includes the Leases of controllers, and
the renewals of this process's own Lease show that the watch delivers renewals. A Lease that exists
at the start proves nothing: whether its gateway is alive is known once the Lease changes, or has
not changed for its duration. Follows client-go's leader election, which observes Leases in the same
way."""

import asyncio
import time
from collections.abc import Callable, Mapping

import msgspec
import structlog

from fairlead.config import PresenceConfig
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.freshness import Freshness
from fairlead.kube.lease_object import LEASES, Lease
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import (
    COMPONENT_LABEL,
    LONGEST_REASON,
    MOST_NAMED,
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
"""A Lease that has not changed for this time is deleted."""
COLLECT_LOOK_S = 600.0


class Observed(msgspec.Struct):
    """One gateway. `silent_s`: for how long its Lease has not changed while a renewal could be
    observed. `unready_s`: for how long the gateway has not been ready. `vouched`: whether a renewal
    was observed."""

    presence: Presence
    duration_s: float
    vouched: bool
    silent_s: float = 0.0
    unready_s: float = 0.0

    @property
    def expired(self) -> bool:
        return max(self.silent_s, self.unready_s) > self.duration_s


class Silences:
    """The gateways, and for how long each has been silent. It has no clock: the caller passes the
    time to `listen`."""

    def __init__(self, most_s: float) -> None:
        """`most_s`: the maximum that is counted between two calls of `listen`: in a longer time
        nothing could be observed."""
        self.gateways: dict[ObjectKey, Observed] = {}
        self._most_s = most_s

    def hear(self, changed: Mapping[ObjectKey, Lease | None], *, first: bool) -> None:
        """Process Leases that changed. `first`: these Leases existed when the watch began."""
        for key, lease in changed.items():
            before = self.gateways.pop(key, None)
            presence = presence_of(lease) if lease is not None else None
            if lease is None or presence is None or presence.role != "gateway":
                continue
            # A gateway that restarts is not ready for a moment; meanwhile the tables of its
            # predecessor forward.
            unready_s = (
                0.0 if presence.ready else before.unready_s if before is not None else float("inf")
            )
            duration_s = float(lease.spec.lease_duration_seconds or 1)
            self.gateways[key] = Observed(presence, duration_s, not first, unready_s=unready_s)

    def listen(self, passed_s: float) -> None:
        """Some time has passed in which renewals could be observed."""
        for each in self.gateways.values():
            each.silent_s += min(passed_s, self._most_s)
            each.unready_s += min(passed_s, self._most_s)

    @property
    def decided(self) -> bool:
        """Whether it is known that some gateway is alive, or that none is."""
        alive = (each for each in self.gateways.values() if not each.expired)
        return any(each.vouched for each in self.gateways.values() if not each.expired) or not any(
            alive
        )

    def value(self) -> Gateways:
        """The gateways that are alive, and the Services that they cannot serve."""
        alive = [each.presence for each in self.gateways.values() if not each.expired]
        refusals: dict[ServiceKey, dict[str, str]] = {}
        for presence in alive:
            for each in presence.not_served[
                :MOST_NAMED
            ]:  # what a gateway writes; whoever has its token may write more
                refusals.setdefault(each.key, {})[presence.name[:LONGEST_REASON]] = each.message[
                    :LONGEST_REASON
                ]
        return Gateways(frozenset(presence.name for presence in alive), refusals)


class GatewayWatch:
    """Keeps `state.gateways` equal to what the Leases show. `decided` is set once that is known, or
    cannot become known."""

    def __init__(
        self, client: Client, state: State, section: PresenceConfig, freshness: Freshness
    ) -> None:
        self.decided = asyncio.Event()
        self._state = state
        self._tick_s = section.lease_duration_s / 12
        self._silences = Silences(section.lease_duration_s / 3)
        self._reflector: Reflector[Lease] = Reflector(
            client,
            LEASES,
            namespace=section.namespace,
            label_selector=f"{SELECTOR},{COMPONENT_LABEL} in (controller,gateway)",
            on_forbidden=self._forbidden,
        )
        self._last_contact_s = self._reflector.last_contact_s
        freshness.add(LEASES.plural, self._reflector)

    async def run(self) -> None:
        """Observe, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._count())

    async def _follow(self) -> None:
        first = True
        async for changed in self._reflector.changes():
            self._listen()
            self._silences.hear(changed, first=first)
            first = False
            self._tell()

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            if self._reflector.synced:
                self._listen()
                self._tell()

    def _listen(self) -> None:
        """Count the time until the watch has brought something last."""
        before_s, self._last_contact_s = self._last_contact_s, self._reflector.last_contact_s
        self._silences.listen(max(0.0, self._last_contact_s - before_s))

    def _tell(self) -> None:
        if not self._silences.decided and not self.decided.is_set():
            return
        before, after = self._state.gateways, self._silences.value()
        if before is not None and before.alive != after.alive:
            log.info("gateways alive", gateways=sorted(after.alive), before=sorted(before.alive))
        self._state.update_gateways(after)
        self.decided.set()

    def _forbidden(self) -> None:
        """Without the right to watch the Leases no condition mentions gateways; the reflector has
        logged why."""
        self.decided.set()


async def collect(client: Client, section: PresenceConfig, *, fence: Callable[[], None]) -> None:
    """Delete Leases of instances that are long gone, until cancelled. For the leader."""
    seen: dict[str, tuple[str, float]] = {}
    while True:
        try:
            leases = await client.list(LEASES, namespace=section.namespace, label_selector=SELECTOR)
            now_s = time.monotonic()
            seen = {each.metadata.name: _since(each, seen, now_s) for each in leases}
            for lease in leases:
                if now_s - seen[lease.metadata.name][1] > COLLECT_S:
                    await _collect(client, lease, fence)
        except FairleadError as problem:
            level = log.info if isinstance(problem, Unavailable) else log.warning
            level("deleting the Leases of instances that are gone failed", problem=str(problem))
        await asyncio.sleep(COLLECT_LOOK_S)


def _since(lease: Lease, seen: Mapping[str, tuple[str, float]], now_s: float) -> tuple[str, float]:
    """The version of a Lease, and when this version was first seen."""
    version = lease.metadata.resource_version
    known = seen.get(lease.metadata.name)
    return known if known is not None and known[0] == version else (version, now_s)


async def _collect(client: Client, lease: Lease, fence: Callable[[], None]) -> None:
    metadata = lease.metadata
    fence()
    try:
        await client.delete(
            LEASES, ObjectKey(metadata.namespace, metadata.name), version=metadata.resource_version
        )
        log.info("deleted the Lease of an instance that is gone", lease=metadata.name)
    except (NotFound, Conflict):
        pass  # the instance has renewed the Lease meanwhile
