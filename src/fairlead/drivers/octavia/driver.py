"""The driver of class `fairlead.io/octavia`: load balancers of OpenStack.

In: LoadBalancers with OctaviaSettings. Out: at Octavia a load balancer for each, with listeners, pools, members and monitors as
wanted; and its address, for whoever publishes it.
What was found last is kept in memory and believed until the next audit, or until a step fails: then a look comes first.
Made to be run with many Services at once, each in a pass of its own: Octavia takes seconds to minutes for each load balancer.
Invariant: what does not carry this cluster's mark is neither seen nor touched. No load balancer is made without a look whether
there is one, be it broken; of several the one that works stays.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog

from fairlead.drivers.octavia import diff as differences
from fairlead.drivers.octavia.apply import PATIENT, Pace, StillWorking, carry_out, wait_settled
from fairlead.drivers.octavia.changes import Await, Call, Change, GiveUp, Replan, Verify
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.read import read_all, read_one
from fairlead.drivers.octavia.render import trees_of
from fairlead.drivers.octavia.tree import Found, FoundTree, Tree, provider_of
from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.kube.events import Recorder
from fairlead.model import DONE, LoadBalancer, Outcome, Provider, ServiceKey

log = structlog.get_logger()

CREATED = "CreatedLoadBalancer"
RARELY_S = 900.0
"""After too many attempts in a row one load balancer is tried again no more often."""


class _Attempts(NamedTuple):
    made: int
    last_s: float


class OctaviaDriver:
    """Implements fairlead.drivers.Driver."""

    name = "octavia"

    def __init__(
        self,
        cloud: Cloud,
        owner: Owner,
        recorder: Recorder,
        *,
        clock: Callable[[], float],
        fence: Callable[[], None] = lambda: None,
        pace: Pace = PATIENT,
    ) -> None:
        """`fence` is called before each write, and raises if it must not be made: we do not lead any more. `clock`: seconds,
        that only go on."""
        self._cloud = cloud
        self._owner = owner
        self._recorder = recorder
        self._clock = clock
        self._fence = fence
        self._pace = pace
        self._known: dict[ServiceKey, Found] = {}
        self._whole = False
        """Whether those that are not known have none."""
        self._unsure: set[ServiceKey] = set()
        """Something has changed there, or may have."""
        self._touched: set[ServiceKey] = set()
        """Of which something was changed since the last look at everything began."""
        self._attempts: dict[ServiceKey, _Attempts] = {}

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Tree]:
        """Pure."""
        return trees_of(intents, self._owner)

    def diff(self, desired: Mapping[ServiceKey, Tree], actual: Mapping[ServiceKey, Found]) -> Sequence[Change]:
        """Pure."""
        return differences.diff(desired, actual)

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Found]:
        """All that is there, by a look; or what is known, of those whereof something is."""
        if keys is None:
            self._touched = self._unsure.copy()
            try:
                found = await read_all(self._cloud, self._owner)
            except FairleadError as error:
                if self._whole:
                    raise
                # At the start each Service is to tell its owner, by failing in its turn.
                log.warning("Octavia cannot be read", problem=str(error))
                return {}
            # What was changed meanwhile was seen before or after.
            kept = {key: known for key, known in self._known.items() if key in self._touched}
            self._known = {key: Found(tuple(trees)) for key, trees in found.items() if key not in self._touched} | kept
            self._whole = True
            keys = self._known.keys() | found.keys()
        for key in keys:
            if key in self._unsure or (key not in self._known and not self._whole):
                await self._look(key)
        return {key: self._with_attempts(key) for key in keys if key in self._known}

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Carry the steps out, Service by Service."""
        outcomes: dict[ServiceKey, Outcome] = {}
        for key in dict.fromkeys(change.service for change in changes):
            own = [change for change in changes if change.service == key]
            outcome = await self._apply_one(key, own)
            if outcome != DONE:
                outcomes[key] = outcome
        return outcomes

    def standing_of(self, key: ServiceKey, uid: str) -> Provider | None:
        """The provider of the load balancer that the Service of this uid has, as far as is known."""
        tree = self._chosen(key, uid)
        return provider_of(tree.provider) if tree is not None else None

    def located(self, intent: LoadBalancer) -> LoadBalancer:
        """With the address that it has at Octavia."""
        tree = self._chosen(intent.service, intent.uid)
        if tree is None or not tree.address:
            return intent
        return msgspec.structs.replace(intent, addresses=(tree.address,))

    def knows(self, key: ServiceKey) -> bool:
        """Whether it has a load balancer, as far as is known."""
        return key in self._known

    def addresses(self, key: ServiceKey) -> Collection[str]:
        """Those of the Service's load balancers, as far as is known."""
        return {tree.address for tree in self._known.get(key, Found(())).trees}

    def _chosen(self, key: ServiceKey, uid: str) -> FoundTree | None:
        return differences.chosen(self._known.get(key, Found(())).trees, uid)

    async def _look(self, key: ServiceKey) -> None:
        self._unsure.discard(key)
        try:
            trees = await read_one(self._cloud, self._owner, key)
        except BaseException:
            self._unsure.add(key)
            raise
        self._known.pop(key, None)
        if trees:
            self._known[key] = Found(tuple(trees))

    def _with_attempts(self, key: ServiceKey) -> Found:
        found, attempts = self._known[key], self._attempts.get(key)
        if attempts is None:
            return found
        rested = self._clock() - attempts.last_s >= RARELY_S
        count = min(attempts.made, differences.MOST_ATTEMPTS - 1) if rested else attempts.made
        return msgspec.structs.replace(found, attempts=count)

    async def _apply_one(self, key: ServiceKey, changes: Sequence[Change]) -> Outcome:
        self._unsure.add(key)
        self._touched.add(key)
        calls = [change for change in changes if isinstance(change, Call)]
        try:
            if calls:
                await self._carry_out(key, calls)
            for change in changes:
                match change:
                    case Call():
                        continue
                    case Await():
                        await wait_settled(self._cloud, change.tree, self._pace)
                        raise Conflict(f"done: {change}")
                    case Replan():
                        await self._look(key)
                        raise Conflict(str(change))
                    case GiveUp():
                        message = f"load balancer {change.tree} is in ERROR, {change.attempts} attempts to repair it failed"
                        fix = "ask the cloud's operators; it is tried again now and then"
                        return Outcome("unavailable", f"{message}; {fix}", again_s=RARELY_S / 10)
                    case Verify():
                        return await self._verify(change)
        except StillWorking:
            return Outcome("waiting", f"Octavia is still at work: {changes[0]}", again_s=self._pace.last_s)
        self._unsure.discard(key)
        self._known.pop(key, None)  # all steps went to take it away
        return DONE

    async def _carry_out(self, key: ServiceKey, calls: Sequence[Call]) -> None:
        if any(not call.tree for call in calls):
            before = self._known.get(key)
            await self._look(key)
            if self._known.get(key) != before:
                raise Conflict(f"the load balancers of Service {key} are others than was thought")
            self._unsure.add(key)
        repairs = any(call.repairs for call in calls)
        if repairs:
            so_far = self._attempts.get(key, _Attempts(0, 0.0)).made
            self._attempts[key] = _Attempts(so_far + 1, self._clock())
        try:
            await carry_out(self._cloud, calls, self._pace, self._fence)
        except Refused as error:
            if repairs:  # to fail over may be for the cloud's operators alone: there is another way
                raise Unavailable(str(error)) from error
            raise

    async def _verify(self, change: Verify) -> Outcome:
        key, before = change.service, self._chosen(change.service, change.wanted.uid)
        await self._look(key)
        found = self._known.get(key, Found(()))
        left = differences.diff({key: change.wanted}, {key: found})
        after = self._chosen(key, change.wanted.uid)
        if after is not None and (before is None or before.id != after.id):
            message = f"load balancer {after.id} of provider {change.wanted.provider} at {after.address}: {change.wanted.why}"
            self._recorder.event(key, change.wanted.uid, "Normal", CREATED, message)
        if left:
            return Outcome("unavailable", f"Octavia has not carried out all: what is left is {left[0]}")
        self._attempts.pop(key, None)
        return DONE
