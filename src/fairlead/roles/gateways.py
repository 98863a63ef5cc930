"""Detection of the gateways that are alive, by the Leases with which they announce themselves, and
deletion of Leases that expired long ago.

In: the Leases of the gateways. Out: `Gateways` in the state, which the plans of the controller and
of gateways that announce addresses read.
Follows client-go's leader election, which observes Leases in the same way.

Invariants: no time that another process wrote is compared with a clock. A gateway is gone if its
Lease has not changed, or has reported neither readiness nor a problem of its host, for the duration
of the Lease as measured by this process. Only time counts in which this process could have observed
a renewal. So no gateway is declared gone while the API server is unreachable, and afterwards
gateways have most of a duration to renew. An answer to another request proves nothing, because the
watch may hang at one API server while another API server answers. Therefore the watch includes the
Leases of controllers, and the renewals of this process's own Lease prove that the watch delivers
renewals. A Lease that exists at the start proves nothing: whether its gateway is alive is known
once the Lease changes, or has not changed for its duration. A gateway whose problem comes and goes
changes `Gateways` at most twice in the duration of its Lease, because each change concerns all
Services. A problem that concerns one class counts apart from one that concerns all of them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog

from fairlead.config import PresenceConfig
from fairlead.drivers import Component
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.freshness import Freshness
from fairlead.kube.lease_object import LEASES, Lease
from fairlead.kube.networks import read_address, read_peer
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import (
    COMPONENT_LABEL,
    LEAVE_ANNOTATION,
    MAX_ADDRESSES,
    MAX_LISTED,
    MAX_NAMED,
    MAX_NETWORKS,
    MAX_REASON_LENGTH,
    SELECTOR,
    Claimed,
    Presence,
    presence_of,
)
from fairlead.kube.reflector import Reflector
from fairlead.model import ServiceKey
from fairlead.plan.gateways import Gateways
from fairlead.roles.metrics import GatewaysCollector
from fairlead.state import State

log = structlog.get_logger()

COLLECT_S = 3600.0
"""A Lease that has not changed for this time is deleted."""
COLLECT_LOOK_S = 600.0
MAX_PEERS = 100
"""The maximum number of gateways with which a gateway exchanges flow entries: each connects to all
others."""
PROBLEM_S = 2.0
"""A problem of a gateway counts when it has lasted for this time."""


class FoundPeers(NamedTuple):
    """Where to connect to the other gateways, `address:port`: to those that are `live`, and to all
    that are `known`, because they have a Lease."""

    live: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()


class Lasting(msgspec.Struct):
    """The problem of a gateway that counts: one that it has reported for `PROBLEM_S`, until it has
    reported none for the duration of its Lease. `text`: empty if no problem counts.
    `unchanged_s`: for how long this text has counted. `other_s`: for how long the gateway has
    reported the opposite: a problem while none counts, or none while one does."""

    text: str = ""
    unchanged_s: float = 0.0
    other_s: float = 0.0

    def advance(self, reported: str, passed_s: float, duration_s: float) -> None:
        """Count a time in which the gateway reported this problem; empty: none."""
        self.unchanged_s += passed_s
        if bool(reported) != bool(self.text):
            self.other_s += passed_s
            changed = self.other_s >= (duration_s if self.text else PROBLEM_S)
        else:
            self.other_s = 0.0
            changed = reported != self.text and self.unchanged_s >= duration_s
        if changed:
            self.text, self.unchanged_s, self.other_s = reported, 0.0, 0.0


class Observed(msgspec.Struct):
    """One gateway. `silent_s`: how long its Lease has not changed while a renewal could be
    observed. `unready_s`: how long the gateway has not been ready. `renewed`: whether a renewal was
    observed. `problems`: its problems by the class of Services that they concern; those of the
    class "" concern all Services, and are the first."""

    presence: Presence
    duration_s: float
    renewed: bool
    problems: dict[str, Lasting]
    silent_s: float = 0.0
    unready_s: float = 0.0

    @property
    def expired(self) -> bool:
        return max(self.silent_s, self.unready_s) > self.duration_s

    @property
    def problem(self) -> tuple[str, str]:
        """The class and the text of the problem that counts; the text is empty if none does."""
        counting = ((each, problem.text) for each, problem in self.problems.items() if problem.text)
        return next(counting, ("", ""))

    def count_problems(self, passed_s: float) -> None:
        """Count a time in which the gateway reported the problem of its presence."""
        reported = self.presence.problem_class[:MAX_REASON_LENGTH]
        self.problems.setdefault(reported, Lasting())
        for each, problem in self.problems.items():
            text = self.presence.problem if each == reported else ""
            problem.advance(text, passed_s, self.duration_s)
        self.problems = {
            each: problem
            for each, problem in self.problems.items()
            if problem.text or each in ("", reported)
        }


class GatewayLeases:
    """The gateways, and how long each has been silent. It has no clock: the caller passes the time
    to `advance`."""

    def __init__(
        self, max_step_s: float, own: str = "", continues: Callable[[], bool] = lambda: False
    ) -> None:
        """`max_step_s`: the maximum that is counted between two calls of `advance`. In a longer
        time renewals could not be observed. `own`: the gateway that observes. Once its readiness
        was observed, it is alive also while it is not ready: the others count on it, and if it did
        not, nobody would answer for its addresses. Before, it is alive only if `continues` returns
        that its predecessor's announcements are in the kernel. All observers see readiness in the
        same order, so of gateways that start together, each knows those that were ready before
        it."""
        self.gateways: dict[ObjectKey, Observed] = {}
        self._max_step_s = max_step_s
        self._own, self._continues = own, continues
        self.asked_to_leave = ""
        """The identity of the process that the Lease of the gateway `own` asks to leave."""
        self._own_counts = False
        """Whether the gateway that observes is alive although it is not ready."""

    def update(self, changed: Mapping[ObjectKey, Lease | None], *, first: bool) -> None:
        """Process changed Leases. `first`: these Leases existed when the watch began."""
        for key, lease in changed.items():
            before = self.gateways.pop(key, None)
            presence = presence_of(lease) if lease is not None else None
            if presence is not None and lease is not None and presence.name == self._own:
                self.asked_to_leave = lease.metadata.annotations.get(LEAVE_ANNOTATION, "")
            if lease is None or presence is None or presence.role != "gateway":
                continue
            if presence.name == self._own:
                self._own_counts |= presence.ready or self._continues()
            # A gateway that restarts is not ready for a moment; meanwhile the tables of its
            # predecessor forward, and its kernel answers for addresses.
            unready_s = (
                0.0
                if presence.ready or presence.problem or self._is_counted(presence)
                else before.unready_s
                if before is not None
                else 0.0
                if presence.announced_count
                else float("inf")
            )
            duration_s = float(lease.spec.lease_duration_seconds or 1)
            # A problem that exists at the start counts at once: otherwise Services that an earlier
            # controller has shown as not ready would be ready for a moment.
            problems = before.problems if before is not None else {"": Lasting()}
            if before is None and first:
                problems[presence.problem_class[:MAX_REASON_LENGTH]] = Lasting(presence.problem)
            self.gateways[key] = Observed(
                presence, duration_s, not first, problems, unready_s=unready_s
            )

    def advance(self, passed_s: float) -> None:
        """Count a time in which renewals could be observed."""
        step_s = min(passed_s, self._max_step_s)
        for each in self.gateways.values():
            each.silent_s += step_s
            if not self._is_counted(each.presence):
                each.unready_s += step_s
            each.count_problems(step_s)

    def _is_counted(self, presence: Presence) -> bool:
        return self._own_counts and presence.name == self._own

    @property
    def decided(self) -> bool:
        """Whether it is known that at least one gateway is alive, or that none is."""
        alive = (each for each in self.gateways.values() if not each.expired)
        return any(each.renewed for each in self.gateways.values() if not each.expired) or not any(
            alive
        )

    def addresses(self) -> Mapping[str, Sequence[str]]:
        """Return the addresses that each gateway needs itself, also if it is not alive: its host
        has them as long as its Lease exists. A text that is not an address is left out, so that a
        gateway cannot exclude a network."""
        return {
            each.presence.name: [
                address
                for text in each.presence.addresses[:MAX_ADDRESSES]
                if (address := read_address(text)) is not None
            ]
            for each in self.gateways.values()
        }

    def peers(self) -> FoundPeers | None:
        """Return the other gateways that exchange flow entries; None while the Lease of this
        gateway does not say that it does so, too: they would refuse it. One that renews its Lease
        is live also while it is not ready: it may still forward. Of more than `MAX_PEERS`, the
        first by name are taken, for all gateways the same."""
        found = {
            each.presence.name: (peer, each.silent_s <= each.duration_s)
            for each in self.gateways.values()
            if (peer := read_peer(each.presence.peer)) is not None
        }
        names = sorted(found)[:MAX_PEERS]
        if self._own not in found:
            return None
        if self._own not in names:
            return FoundPeers()
        others = [found[name] for name in names if name != self._own]
        return FoundPeers(
            frozenset(peer for peer, live in others if live), frozenset(peer for peer, _ in others)
        )

    def value(self) -> Gateways:
        """Return the gateways that are alive, and the Services that they cannot serve."""
        observed = [each for each in self.gateways.values() if not each.expired]
        alive = [each.presence for each in observed]
        refusals: dict[ServiceKey, dict[str, str]] = {}
        for presence in alive:
            # A gateway keeps to these limits, but any client with its token can write more.
            for each in presence.not_served[:MAX_NAMED]:
                name, reason = presence.name[:MAX_REASON_LENGTH], each.message[:MAX_REASON_LENGTH]
                refusals.setdefault(each.key, {})[name] = reason
        counting = {each.presence.name[:MAX_REASON_LENGTH]: each.problem for each in observed}
        problems = {name: text[:MAX_REASON_LENGTH] for name, (_, text) in counting.items() if text}
        classes = {name: class_name for name, (class_name, _) in counting.items() if class_name}
        names = frozenset(presence.name[:MAX_REASON_LENGTH] for presence in alive)
        gone = frozenset(
            each.presence.name[:MAX_REASON_LENGTH]
            for each in self.gateways.values()
            if each.expired
        )
        announcers = {
            presence.name[:MAX_REASON_LENGTH]: presence.announces[:MAX_NETWORKS]
            for presence in alive
            if presence.announces
        }
        unproved = frozenset(
            each.presence.name[:MAX_REASON_LENGTH] for each in observed if not each.renewed
        )
        own_macs = {
            mac for each in self.gateways.values() for mac in each.presence.macs[:MAX_ADDRESSES]
        }
        claimed = {
            address: (
                presence.name[:MAX_REASON_LENGTH],
                Claimed(address, each.interface[:MAX_REASON_LENGTH], each.mac[:MAX_REASON_LENGTH]),
            )
            for presence in alive
            for each in presence.claimed[:MAX_LISTED]
            if (address := read_address(each.address)) is not None
            # The kernels of all gateways answer for an address that they accept. Only where
            # addresses are announced must no other gateway answer.
            and (presence.announces or each.mac not in own_macs)
        }
        leaving = {
            presence.name[:MAX_REASON_LENGTH]: presence.leaving[:MAX_REASON_LENGTH]
            for presence in alive
            if presence.leaving
        }
        return Gateways(
            names,
            refusals,
            problems,
            gone - names,
            announcers,
            unproved,
            claimed,
            leaving,
            classes,
        )


class GatewayWatch(Component):
    """Keeps `state.gateways`, and the excluded addresses of gateways, equal to the Leases.
    `decided` is set once the gateways are known, or cannot become known. `update`: stores the
    gateways; absent: `State.update_gateways`. `own`, `continues`: see `GatewayLeases`. `peers`:
    called with the other gateways that exchange flow entries."""

    name = "gateways"

    def __init__(
        self,
        client: Client,
        state: State,
        section: PresenceConfig,
        freshness: Freshness,
        *,
        update: Callable[[Gateways], None] | None = None,
        own: str = "",
        continues: Callable[[], bool] = lambda: False,
        peers: Callable[[FoundPeers], None] = lambda _: None,
    ) -> None:
        self._peers = peers
        self.decided = asyncio.Event()
        self._state = state
        self._update = update or state.update_gateways
        self._tick_s = section.lease_duration_s / 12
        self._leases = GatewayLeases(section.lease_duration_s / 3, own, continues)
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

    @property
    def silent_s(self) -> float:
        """How long the watch has delivered nothing. After the duration of a Lease, other gateways,
        which observe this one, may know that it is gone."""
        return time.monotonic() - self._reflector.last_contact_s

    @property
    def asked_to_leave(self) -> str:
        """The identity of the process that is asked to give the addresses of this gateway away;
        empty: none."""
        return self._leases.asked_to_leave

    def collectors(self) -> tuple[GatewaysCollector]:
        return (GatewaysCollector(lambda: self._state.gateways),)

    async def _follow(self) -> None:
        first = True
        async for changed in self._reflector.changes():
            self._advance()
            self._leases.update(changed, first=first)
            first = False
            self._publish()
            self._state.mark_synced(LEASES.plural)

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
        self._state.exclude_gateways(self._leases.addresses())
        if (peers := self._leases.peers()) is not None:
            self._peers(peers)
        if not self._leases.decided and not self.decided.is_set():
            return
        before, after = self._state.gateways, self._leases.value()
        if before is not None and before.alive != after.alive:
            log.info("gateways alive", gateways=sorted(after.alive), before=sorted(before.alive))
        self._state.gateways_forbidden = False
        self._update(after)
        self.decided.set()

    def _forbidden(self) -> None:
        """Continue without the permission to watch Leases: no condition mentions gateways then. The
        reflector has logged the reason."""
        # Gateways that were known before stay known.
        self._state.gateways_forbidden = self._state.gateways is None
        self._state.mark_synced(LEASES.plural)
        self.decided.set()


async def collect(client: Client, section: PresenceConfig, *, fence: Callable[[], None]) -> None:
    """Delete Leases of instances that have been gone for a long time, until cancelled. Only the
    leader runs it."""
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
    """Return the version of a Lease, and the time at which this version was first seen."""
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
        # The instance has renewed the Lease meanwhile, or the Lease is already deleted.
        pass
