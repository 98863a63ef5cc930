"""The driver of class `fairlead.io/octavia`: load balancers of OpenStack.

In: LoadBalancers with OctaviaSettings. Out: for each of them a load balancer at Octavia, with the
desired listeners, pools, members and monitors; and for the plan, the properties of each existing
load balancer. `read` reads Octavia, and locates load balancers that a Service shares or adopts.
`diff` is pure. `apply` makes the given writes, reads the result, and requests another pass of the
loop, which compares.

The state that was read last is kept in memory and used until the next audit, or until a write
fails: then the state is read again before the next write. The driver is run with many Services at
once, each in a pass of its own, because Octavia takes seconds to minutes for each load balancer.

Invariants: objects without this cluster's mark are neither listed nor changed. No load balancer is
created before a read has shown that the Service has none, not even a broken one. Of several load
balancers of one Service, the working one stays."""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import structlog

from fairlead.drivers import Component
from fairlead.drivers.octavia import diff as differences
from fairlead.drivers.octavia.apply import DEFAULT_PACE, Pace, PollSchedule, StillWorking
from fairlead.drivers.octavia.attempts import Attempts
from fairlead.drivers.octavia.balancers import (
    ACTIVE,
    BalancerSpec,
    BalancerState,
    Found,
    provider_of,
)
from fairlead.drivers.octavia.changes import Blocked, Call, Change, Write
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.health import healths
from fairlead.drivers.octavia.locate import Locator
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.network import Network
from fairlead.drivers.octavia.read import read_all, read_one, settled
from fairlead.drivers.octavia.render import specs_of
from fairlead.drivers.octavia.state_cache import StateCache, WriteHistory
from fairlead.drivers.octavia.writer import Writer
from fairlead.errors import FairleadError
from fairlead.kube.events import Recorder
from fairlead.model import DONE, ExistingLoadBalancer, LoadBalancer, Outcome, ServiceKey
from fairlead.plan.cloud import Claimant
from fairlead.role_state import LoadBalancerHealth, OctaviaState

log = structlog.get_logger()

ClaimantOf = Callable[[ServiceKey], Claimant | None]
Observe = Callable[[ServiceKey, ExistingLoadBalancer | None], None]

CREATED = "CreatedLoadBalancer"
AGAIN_S = 0.01
"""The delay after writes until the loop compares again."""
NOTHING = Found(())


class OctaviaDriver(Component):
    """Implements fairlead.drivers.Driver."""

    name = "octavia"
    batch = 1

    def __init__(
        self,
        cloud: Cloud,
        owner: Owner,
        recorder: Recorder,
        *,
        claimant_of: ClaimantOf,
        observe: Observe,
        clock: Callable[[], float],
        fence: Callable[[], None] = lambda: None,
        pace: Pace = DEFAULT_PACE,
        manage_floating_ips: bool = False,
        manage_security_group: bool = False,
    ) -> None:
        """Create the driver. `claimant_of` returns the present Service of this name. `observe`
        receives the load balancer of a Service after each read. `fence` is called before each
        write, and raises if this process is no longer the leader. `clock` returns monotonic
        seconds. `manage_security_group`: that of the nodes."""
        self._cloud = cloud
        self._owner = owner
        self._recorder = recorder
        self._claimant_of = claimant_of
        self._observe = observe
        self._clock = clock
        self._schedule = PollSchedule(pace)
        self._network = Network(
            cloud,
            owner,
            recorder,
            manage_floating_ips=manage_floating_ips,
            manage_security_group=manage_security_group,
        )
        self._locator = Locator(cloud, owner, recorder)
        self._attempts = Attempts(clock)
        self._writer = Writer(cloud, self._network, self._attempts, self._schedule, fence)
        self._cache = StateCache(clock)
        self._write_history = WriteHistory()
        self._pending_since_s: dict[ServiceKey, float] = {}
        """The time at which Octavia was first seen working on a load balancer of the Service."""

    @property
    def read_incomplete(self) -> bool:
        """True until Octavia has been read as a whole."""
        return not self._cache.is_complete

    def render(
        self, intents: Mapping[ServiceKey, LoadBalancer]
    ) -> Mapping[ServiceKey, BalancerSpec]:
        """Pure."""
        return specs_of(intents, self._owner)

    def diff(
        self, desired: Mapping[ServiceKey, BalancerSpec], actual: Mapping[ServiceKey, Found]
    ) -> Sequence[Change]:
        """Pure."""
        return differences.diff(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Found]:
        """Return everything (None), or the state of these Services: from memory, or from Octavia if
        the memory is not valid. Raise Refused if a load balancer that a Service requests to share
        or adopt cannot be used."""
        if keys is None:
            await self._read_all()
            return {key: self._found(key) for key in self._cache.known}
        for key in keys:
            if await self._must_read(key):
                await self._read_from_octavia(key)
            self._report_to_plan(key)
        return {
            key: msgspec.structs.replace(self._found(key), after=self._write_history.read(key))
            for key in keys
        }

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Make the writes, Service by Service. A Service that was written to is `waiting`, because
        another pass has to compare the result with the plan; it is done if all its objects were
        deleted."""
        outcomes: dict[ServiceKey, Outcome] = {}
        for key in dict.fromkeys(change.service for change in changes):
            own = [change for change in changes if change.service == key]
            outcome = await self._apply_one(key, own)
            if outcome != DONE:
                outcomes[key] = outcome
        return outcomes

    def has_objects(self, key: ServiceKey) -> bool:
        """Return whether objects of the Service are known that must be deleted together with it."""
        found = self._cache.known.get(key, NOTHING)
        return bool(found.balancers or found.rules) or any(
            not each.kept for each in found.unattached_ips
        )

    def addresses(self, key: ServiceKey) -> Collection[str]:
        """Return the known addresses of the Service's load balancers."""
        return {
            address
            for balancer in self._cache.known.get(key, NOTHING).balancers
            for address in balancer.shown
        }

    def health(self) -> list[LoadBalancerHealth]:
        """Return the operating status of all load balancers, as it was last read. May be called
        from any thread."""
        return healths(self._cache.known.copy(), self._cache.ages_s())

    def status(self) -> OctaviaState:
        """Return the state of this driver for `/state`. May be called from any thread."""
        return OctaviaState(tuple(self.health()))

    async def _read_all(self) -> None:
        self._cache.begin()
        try:
            found = await self._network.with_all(await read_all(self._cloud, self._owner))
        except FairleadError as error:
            if self._cache.is_complete:
                raise
            # At the start, each Service reports the problem itself, when its own pass fails.
            log.warning("Octavia cannot be read", problem=str(error))
            return
        before = self._cache.known
        for key in self._cache.store_all(found):
            self._locator.remember(key, found[key].balancers)
        for key in before.keys() | self._cache.known.keys():
            self._report_to_plan(key)

    async def _must_read(self, key: ServiceKey) -> bool:
        """Return whether the Service must be read from Octavia. For a load balancer on which
        Octavia is working, only its status is read."""
        known, claimant = self._cache.known.get(key), self._claimant_of(key)
        if claimant is None:
            self._attempts.forget(key)
        in_progress = [each.id for each in known.balancers if each.is_pending] if known else []
        if in_progress:
            statuses = [await settled(self._cloud, id_) for id_ in in_progress]
            return not all(status.startswith("PENDING") for status in statuses)
        if self._cache.is_invalid(key):
            return True
        if claimant is None:
            return False
        balancer = self._chosen(key, claimant)
        # A broken load balancer may be recreated, which requires a read.
        return (
            known is None
            or balancer is None
            or balancer.status != ACTIVE
            or not self._is_located(key, claimant, known.balancers)
        )

    async def _read_from_octavia(self, key: ServiceKey) -> None:
        """Read the Service from Octavia. Raise Refused if a load balancer that it requests to share
        or adopt cannot be used."""
        own = await read_one(self._cloud, self._owner, key)
        balancers = await self._locator.add_to(key, own)
        claimant = self._claimant_of(key)
        if claimant is not None and not self._is_located(key, claimant, balancers):
            await self._locator.locate(key, claimant)
            balancers = await self._locator.add_to(key, own)
        self._cache.store(key, await self._network.with_one(key, balancers))
        self._report_to_plan(key)

    def _report_to_plan(self, key: ServiceKey) -> None:
        """Report the Service's load balancer to the plan."""
        claimant = self._claimant_of(key)
        balancer = self._chosen(key, claimant) if claimant is not None else None
        if balancer is not None and balancer.status == ACTIVE:
            self._attempts.forget(key)
        self._observe(key, differences.existing_of(balancer) if balancer is not None else None)

    def _found(self, key: ServiceKey) -> Found:
        found = self._locator.with_result(key, self._cache.known.get(key, NOTHING))
        found = msgspec.structs.replace(found, covers=self._network.covers)
        if any(balancer.is_pending for balancer in found.balancers):
            since_s = self._pending_since_s.setdefault(key, self._clock())
            poll_s = self._schedule.next_s(self._clock() - since_s)
            found = msgspec.structs.replace(found, poll_s=poll_s)
        else:
            self._pending_since_s.pop(key, None)
        return self._attempts.with_number(key, found)

    def _chosen(self, key: ServiceKey, claimant: Claimant) -> BalancerState | None:
        return differences.chosen(
            self._cache.known.get(key, NOTHING).balancers,
            claimant.uid,
            claimant.held,
            self._locator.id_for(key, claimant.uid),
        )

    def _is_located(
        self, key: ServiceKey, claimant: Claimant, balancers: Sequence[BalancerState]
    ) -> bool:
        found = self._locator.with_result(key, Found(tuple(balancers)))
        return differences.is_located(
            found, claimant.uid, claimant.held, claimant.shared_or_adopted
        )

    async def _apply_one(self, key: ServiceKey, changes: Sequence[Change]) -> Outcome:
        blocked = next((each.outcome for each in changes if isinstance(each, Blocked)), None)
        writes = [each for each in changes if not isinstance(each, Blocked)]
        if blocked is not None and blocked.state == "unavailable":
            self._cache.invalidate(key)  # other users may remove the obstacle
            self._write_history.end(key)
        if not writes:
            assert blocked is not None
            return blocked
        self._cache.invalidate(key)
        try:
            await self._writer.carry_out(key, writes)
        except StillWorking:
            return Outcome(
                "waiting",
                f"Octavia is still working: {writes[0]}",
                again_s=self._schedule.pace.last_s,
            )
        if blocked is None and self._deletes_everything(key, writes):
            self._forget(key)
            return DONE
        await self._read_from_octavia(key)
        self._write_history.add(key, tuple(writes))
        self._announce(key, writes)
        message = f"the load balancer is compared with the plan again, after {writes[-1]}"
        return blocked or Outcome("waiting", message, again_s=AGAIN_S)

    def _deletes_everything(self, key: ServiceKey, writes: Sequence[Write]) -> bool:
        """Return whether the Service is deleted and these writes delete all its objects. A Service
        that was recreated meanwhile is read again."""
        calls = [each for each in writes if isinstance(each, Call)]
        left = {each.balancer_id for each in calls if each.ends or each.leaves}
        known = {balancer.id for balancer in self._cache.known.get(key, NOTHING).balancers}
        return (
            self._claimant_of(key) is None
            and known <= left
            and not any(each.makes for each in calls)
        )

    def _forget(self, key: ServiceKey) -> None:
        self._cache.store(key, None)
        self._write_history.end(key)
        self._locator.forget(key)
        self._attempts.forget(key)
        self._observe(key, None)

    def _announce(self, key: ServiceKey, writes: Sequence[Write]) -> None:
        """Write an Event for a load balancer that was created."""
        made = next((each for each in writes if isinstance(each, Call) and each.makes), None)
        claimant = self._claimant_of(key)
        if made is None or claimant is None or (balancer := self._chosen(key, claimant)) is None:
            return
        provider = provider_of(balancer.provider) or balancer.provider
        where = f"load balancer {balancer.id} of provider {provider} at {balancer.address}"
        message = f"{where}: {made.why}"
        self._recorder.event(key, balancer.uid, "Normal", CREATED, message)
